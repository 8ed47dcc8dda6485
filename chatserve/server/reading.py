"""What a client frame must look like: text in, a typed frame or a named error out, and the `error` frame that says so.

Knows no connection and no time. Which frame may come when is `protocol`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import msgspec.inspect

from chatserve.errors import BadFrameError, BadParamsError, ChatError, TooLargeError
from chatserve.server import frames
from chatserve.server.frames import Request
from chatserve.server.json_text import decode_json
from chatserve.types import validate_params

if TYPE_CHECKING:
    from chatserve.config import Limits


def decode_object(text: str) -> dict[str, Any]:
    """Raises BadFrameError: no JSON object, or one that no string of UTF-8 can hold."""
    try:
        given = decode_json(text)
    except ValueError as error:
        raise BadFrameError(f"a frame is valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise BadFrameError("a frame is a JSON object")
    return given


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


def utf8_len(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
