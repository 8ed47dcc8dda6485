"""ChatServe: a chat server whose conversation tree owns its KV cache."""

__version__ = "0.1.0"
