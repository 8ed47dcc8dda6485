"""The state of one `chat.v1` connection, sans I/O: frames and the time go in, requests, answers and closes come out.

Owns the handshake, the heartbeat and the close codes; what a frame must look like is `reading`'s. Knows no socket, no
event loop and no session. Time is any monotonic clock in seconds; the caller calls `tick` no later than `deadline()`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from chatserve.errors import BadFrameError, ChatError, UnknownTypeError
from chatserve.server import frames
from chatserve.server.frames import CLIENT_FRAMES, PROTOCOL, AnyRequest, Hello, Ping, Pong, Typing
from chatserve.server.reading import check_request, decode_object, error_text, parse, utf8_len
from chatserve.types import UserId

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatserve.config import Limits

HELLO_TIMEOUT_S: Final = 5.0
PING_INTERVAL_S: Final = 20.0
PONG_TIMEOUT_S: Final = 8.0

PING: Final = '{"type":"ping"}'
PONG: Final = '{"type":"pong"}'


class CloseCode(enum.IntEnum):
    GOING_AWAY = 1001
    FRAME_TOO_LARGE = 1009
    INTERNAL = 1011
    MISUSE = 4000
    NOT_AUTHENTICATED = 4001
    REFUSED = 4003
    TOO_SLOW = 4008
    TOO_MANY = 4029


class Opened(msgspec.Struct, frozen=True):
    """The handshake is done: welcome `user`, then bring each of `resume` up to date."""

    user: UserId
    resume: tuple[frames.Resume, ...]


class Requested(msgspec.Struct, frozen=True):
    request: AnyRequest


class Typed(msgspec.Struct, frozen=True):
    typing: Typing


class Send(msgspec.Struct, frozen=True):
    text: str


class Close(msgspec.Struct, frozen=True):
    """Nothing follows it."""

    code: CloseCode
    reason: str


Output = Opened | Requested | Typed | Send | Close


class _State(enum.Enum):
    GREETING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class ChatProtocol:
    """One connection.

    `authenticate` maps a token, or None for its absence, to a user; None: refused. `bearer` is the token of the
    upgrade's `Authorization` header; one in `hello` comes before it. It is asked again with each ping, so that a token
    that was taken back ends its connections too.
    """

    def __init__(
        self,
        limits: Limits,
        authenticate: Callable[[str | None], UserId | None],
        now: float,
        bearer: str | None = None,
    ) -> None:
        self._limits = limits
        self._authenticate = authenticate
        self._token = bearer
        self._user: UserId | None = None
        self._state = _State.GREETING
        self._pinged_at = self._heard_at = now

    @property
    def closed(self) -> bool:
        return self._state is _State.CLOSED

    def deadline(self) -> float:
        """When `tick` has something to do if no frame comes before."""
        match self._state:
            case _State.GREETING:
                return self._pinged_at + HELLO_TIMEOUT_S
            case _State.OPEN:
                return self._pinged_at + (PONG_TIMEOUT_S if self._is_silent else PING_INTERVAL_S)
            case _State.CLOSED:
                return float("inf")

    def tick(self, now: float) -> list[Output]:
        if self.closed or now < self.deadline():
            return []
        if self._state is _State.GREETING:
            return [self._close(CloseCode.MISUSE, f"no hello within {HELLO_TIMEOUT_S:g} s")]
        if self._is_silent:
            return [self._close(CloseCode.TOO_SLOW, f"no frame within {PONG_TIMEOUT_S:g} s of a ping")]
        if self._authenticate(self._token) != self._user:
            return [self._close(CloseCode.NOT_AUTHENTICATED, "the token is no longer valid")]
        # Whatever the client says meanwhile: it too may want to know that we are there.
        self._pinged_at = now
        return [Send(PING)]

    @property
    def _is_silent(self) -> bool:
        """Since the last ping."""
        return self._heard_at < self._pinged_at

    def receive_binary(self, now: float) -> list[Output]:
        if self.closed:
            return []
        self._heard_at = now
        return self._refuse(BadFrameError("frames are text, not binary"))

    def receive_text(self, text: str, now: float) -> list[Output]:
        if self.closed:
            return []
        # A code point is at least one byte, so most frames are measured without encoding them.
        limit = self._limits.max_frame_bytes
        if len(text) > limit or (len(text) * 4 > limit and utf8_len(text) > limit):
            return [self._close(CloseCode.FRAME_TOO_LARGE, f"a frame is at most {limit} bytes")]
        self._heard_at = now
        try:
            given = decode_object(text)
        except BadFrameError as error:
            return self._refuse(error)
        try:
            return self._receive(given)
        except ChatError as error:
            return self._refuse(error, given)

    def close(self, code: CloseCode, reason: str) -> list[Close]:
        """The caller wants to end it: at most one `Close` ever comes out."""
        return [] if self.closed else [self._close(code, reason)]

    def excuse(self, now: float) -> None:
        """The peer is not silent, the caller is not listening."""
        self._heard_at = now

    def _refuse(self, error: ChatError, given: dict[str, Any] | None = None) -> list[Output]:
        """A frame that cannot be used is answered; the first one ends it, too."""
        said = Send(error_text(error, given))
        if self._state is _State.GREETING:
            return [said, self._close(CloseCode.MISUSE, "the first frame is a valid `hello`")]
        return [said]

    def _close(self, code: CloseCode, reason: str) -> Close:
        self._state = _State.CLOSED
        return Close(code, reason)

    def _receive(self, given: dict[str, Any]) -> list[Output]:
        kind = given.get("type")
        if not isinstance(kind, str):
            raise BadFrameError("a frame has a string field `type`")
        if self._state is _State.GREETING:
            return self._greet(kind, given)
        cls = CLIENT_FRAMES.get(kind)
        if cls is None:
            raise UnknownTypeError(f"the frame type {_shorten(kind)} is not known")
        if cls is Typing:
            return self._typing(given)
        frame = parse(cls, given)
        match frame:
            case Hello():
                raise BadFrameError("`hello` is the first frame of a connection, and only that")
            case Ping():
                return [Send(PONG)]
            case Pong():
                return []
            case _:
                check_request(frame, self._limits)
                return [Requested(cast("AnyRequest", frame))]

    def _greet(self, kind: str, given: dict[str, Any]) -> list[Output]:
        if kind != "hello":
            return [self._close(CloseCode.MISUSE, "the first frame is `hello`")]
        if "protocol" in given and given["protocol"] != PROTOCOL:
            return [self._close(CloseCode.MISUSE, f"this server speaks {PROTOCOL}")]
        hello = cast("Hello", parse(Hello, given))
        if hello.token is not None:
            self._token = hello.token
        user = self._authenticate(self._token)
        if user is None:
            return [self._close(CloseCode.NOT_AUTHENTICATED, "a valid token is needed")]
        self._user = user
        self._state = _State.OPEN
        return [Opened(user, tuple(hello.resume or ()))]

    def _typing(self, given: dict[str, Any]) -> list[Output]:
        # A hint is never an error: what cannot be used is dropped.
        try:
            typing = cast("Typing", parse(Typing, given))
        except ChatError:
            return []
        if typing.text is not None and utf8_len(typing.text) > self._limits.max_text_bytes:
            return []
        return [Typed(typing)]


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 64 else text[:61] + "...")
