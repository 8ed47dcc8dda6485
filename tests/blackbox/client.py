"""The strict client of `chat.v1`, under the name by which tests know it. It is written against the protocol's
description alone and belongs to the program because `chatserve bench chaos` runs it too."""

from __future__ import annotations

from chatserve.bench.chaos.client import ChatClient, RequestFailedError
from chatserve.bench.chaos.mirror import Frame, Mirror, ProtocolViolationError

__all__ = ["ChatClient", "Frame", "Mirror", "ProtocolViolationError", "RequestFailedError"]
