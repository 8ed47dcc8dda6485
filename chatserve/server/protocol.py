"""The state of one `chat.v1` connection, sans I/O: frames and the time go in, requests, answers and closes come out.

Owns what a frame must look like, the handshake, the heartbeat and the close codes. Knows no socket, no event loop and
no session. Time is any monotonic clock in seconds; the caller calls `tick` no later than `deadline()`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import msgspec.inspect

from chatserve.errors import BadFrameError, BadParamsError, ChatError, TooLargeError, UnknownTypeError
from chatserve.server import frames
from chatserve.server.frames import CLIENT_FRAMES, PROTOCOL, AnyRequest, Hello, Ping, Pong, Request, Typing
from chatserve.types import UserId, validate_params

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
        return [Send(error_text(BadFrameError("frames are text, not binary")))]

    def receive_text(self, text: str, now: float) -> list[Output]:
        if self.closed:
            return []
        # A code point is at least one byte, so most frames are measured without encoding them.
        limit = self._limits.max_frame_bytes
        if len(text) > limit or (len(text) * 4 > limit and utf8_len(text) > limit):
            return [self._close(CloseCode.FRAME_TOO_LARGE, f"a frame is at most {limit} bytes")]
        self._heard_at = now
        try:
            given = _decode_object(text)
        except BadFrameError as error:
            return [Send(error_text(error))]
        try:
            return self._receive(given)
        except ChatError as error:
            return [Send(error_text(error, given))]

    def close(self, code: CloseCode, reason: str) -> list[Close]:
        """The caller wants to end it: at most one `Close` ever comes out."""
        return [] if self.closed else [self._close(code, reason)]

    def excuse(self, now: float) -> None:
        """The peer is not silent, the caller is not listening."""
        self._heard_at = now

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


def error_text(error: ChatError, given: dict[str, Any] | None = None, **fields: str) -> str:
    """An `error` frame; `id`, `session` and `message` are taken from the offending frame where they can be."""
    frame: dict[str, Any] = {"type": "error"}
    for name, longest in (("id", 256), ("session", 64), ("message", 64)):
        value = (given or {}).get(name)
        if isinstance(value, str) and len(value) <= longest:
            frame[name] = value
    frame |= fields
    frame |= {"code": error.code, "detail": error.detail, "retryable": error.retryable}
    for name, value in error.fields.items():
        # What stands in the frame by contract is not overwritten by what travels beside it.
        frame.setdefault(name, value)
    return msgspec.json.encode(frame).decode()


def parse(cls: type[frames.ClientFrame], given: dict[str, Any]) -> frames.ClientFrame:
    """Build a frame of class `cls`.

    Raises:
        BadFrameError: a required field is missing, or `id` is not one.
        BadParamsError: a field has a value of another type or range than it may have.
    """
    kept: dict[str, Any] = {}
    fields = msgspec.structs.fields(cls)
    if issubclass(cls, Request):
        request_id = given.get("id")
        if not isinstance(request_id, str) or not 1 <= len(request_id) <= 64:
            raise BadFrameError("a request has an `id`: a string of 1 to 64 characters")
    for field in fields:
        if field.required and field.encode_name not in given:
            raise BadFrameError(f"the field `{field.encode_name}` is missing")
    for field in fields:
        name = field.encode_name
        if name not in given:
            continue
        value = given[name]
        if name == "params":
            kept[name] = None if value is None else validate_params(value)
            continue
        try:
            kept[name] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            raise BadParamsError.of(name, value, describe(msgspec.inspect.type_info(field.type))) from error
    return cls(**kept)


def check_request(frame: frames.ClientFrame, limits: Limits) -> None:
    """Hold the texts of a request against the limits.

    Raises:
        TooLargeError: names the field and both sizes.
        BadFrameError: an update that updates nothing.
    """
    measured = (
        ("text", limits.max_text_bytes),
        ("title", limits.max_title_bytes),
        ("system", limits.max_system_bytes),
        ("query", limits.max_title_bytes),
        ("cursor", limits.max_title_bytes),
    )
    for name, limit in measured:
        value = getattr(frame, name, None)
        if isinstance(value, str) and (num_bytes := utf8_len(value)) > limit:
            raise TooLargeError.of(name, num_bytes, limit)
    match frame:
        case frames.SessionUpdate(title=None, system=msgspec.UNSET, params=None):
            raise BadFrameError("an update has at least one of `title`, `system` and `params`")
        case _:
            pass


def describe(info: msgspec.inspect.Type) -> str:  # noqa: PLR0911 - one a kind of type
    """What a field may be, in words."""
    match info:
        case msgspec.inspect.StrType():
            return "a string"
        case msgspec.inspect.IntType(ge=low, le=None):
            return f"a whole number of at least {low}"
        case msgspec.inspect.IntType(ge=low, le=high):
            return f"a whole number from {low} to {high}"
        case msgspec.inspect.ListType(item_type=item, max_length=most):
            return f"a list of at most {most} items, each {describe(item)}"
        case msgspec.inspect.StructType(fields=fields):
            return "an object of " + " and ".join(f"`{f.encode_name}` ({describe(f.type)})" for f in fields)
        case msgspec.inspect.UnionType(types=types):
            return " or ".join(describe(t) for t in types)
        case msgspec.inspect.NoneType():
            return "null"
        case _:
            raise AssertionError(f"no frame has a field of type {info}")


def utf8_len(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _decode_object(text: str) -> dict[str, Any]:
    try:
        given = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        raise BadFrameError(f"a frame is valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise BadFrameError("a frame is a JSON object")
    return given


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 64 else text[:61] + "...")
