"""One client of the engine: a non-blocking socket, what is half read, and what is not yet written.

Never waits. Knows frames, not what they mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from chatserve.engine.framing import command_reader, encode

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from chatserve.engine.messages import AnyCommand, EngineEvent

_READ_BYTES: Final = 1024 * 1024


class ConnectionLostError(Exception):
    """The client has closed, or is too slow to be kept."""


class Connection:
    """`number` names it in log lines."""

    def __init__(self, number: int, sock: socket.socket, *, max_out_bytes: int) -> None:
        sock.setblocking(False)
        self.number = number
        self.sock = sock
        self._max_out_bytes = max_out_bytes
        self._reader = command_reader()
        self._out = bytearray()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._out)

    def receive(self) -> Iterator[AnyCommand]:
        """The commands completed by what has arrived; one read, so that nobody keeps the loop to himself.

        Raises:
            ConnectionLostError: the client has closed.
            MalformedFrameError: what came is no command.
        """
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLostError(str(error)) from error
        if not data:
            raise ConnectionLostError("closed")
        yield from self._reader.feed(data)

    def send(self, event: EngineEvent) -> None:
        """Write what the socket takes and keep the rest.

        Raises:
            ConnectionLostError: the client has closed, or more than `max_out_bytes` wait for it.
        """
        self._out += encode(event)
        self.flush()
        if len(self._out) > self._max_out_bytes:
            raise ConnectionLostError(f"does not read: {len(self._out)} bytes are waiting for it")

    def flush(self) -> None:
        """Write what the socket takes.

        Raises:
            ConnectionLostError: the client has closed.
        """
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ConnectionLostError(str(error)) from error
