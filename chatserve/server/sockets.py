"""uvicorn's WebSocket transport, with the endings that a chat server needs.

Owns how a connection ends on the wire, and nothing else:

- A frame that is too large is refused with 1009, which the peer can read: what it still sends is taken and dropped
  until it hangs up, where closing at once would reset the connection under its feet.
- A close goes out even while the peer does not read, and if it never does the connection is cut off.
- A server that goes away says 1001, and whoever still sends is told that the peer is gone.
"""

from __future__ import annotations

from typing import Any, Final

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

GOODBYE_TIMEOUT_S: Final = 5.0
"""How long a peer may take to answer a close before its connection is cut off."""


class ChatSocketTransport(WebSocketsSansIOProtocol):
    def data_received(self, data: bytes) -> None:
        if self.conn.parser_exc is not None:
            return
        super().data_received(data)

    def eof_received(self) -> None:
        self.transport.close()

    def handle_parser_exception(self) -> None:
        if self.close_sent:
            return
        sent = self.conn.close_sent
        assert sent is not None, "a parser that failed has said why"
        self.queue.put_nowait({"type": "websocket.disconnect", "code": sent.code, "reason": sent.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self._cut_off_later()

    def shutdown(self) -> None:
        self.stop_keepalive()
        if self.close_sent:
            return
        if not self.handshake_complete:
            self.send_500_response()
            self.transport.close()
            return
        self.queue.put_nowait({"type": "websocket.disconnect", "code": 1001})
        self.conn.send_close(1001, "the server is going away")
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self._cut_off_later()

    async def send(self, message: Any) -> None:
        closing = message["type"] == "websocket.close" and self.handshake_complete and not self.close_sent
        if closing:
            # What waits in the transport may never drain; the close joins it all the same.
            self.writable.set()
        try:
            await super().send(message)
        except RuntimeError as error:
            if not self.close_sent:
                raise
            # We have said goodbye in the meantime: whoever still has something to say is told that nobody listens.
            raise ClientDisconnected from error
        if closing and self.close_timer is not None:
            self._cut_off_later()

    def _cut_off_later(self) -> None:
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(GOODBYE_TIMEOUT_S, self.transport.abort)
