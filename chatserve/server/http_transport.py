"""uvicorn's HTTP transport, but one that does not wait for ever for a request.

Owns a timer a connection: from the first byte of a request, or from the connection's beginning, to the end of its head.
Between requests uvicorn has a timer of its own. A body may come slowly: whoever may send a large one is known by then.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_TIMEOUT_S: Final = 15.0


class PatientHttpTransport(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # whichever parser is installed
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_waiting():
            self._wait_no_more()
        elif self._patience is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _is_waiting(self) -> bool:
        """For the head of a request: none is being answered, and the connection has not become a socket."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered and self.transport.get_protocol() is self

    def _wait(self) -> None:
        self._patience = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self._give_up)

    def _wait_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if self._is_waiting():
            self.transport.abort()
