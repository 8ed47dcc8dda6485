"""`chatserve chat`: a client of the wire protocol in a terminal.

`view` is the pure state of a conversation as a client sees it, `client` keeps a connection and that state, `app` is the
person's side: commands in, text out. Shares no code with the server.
"""
