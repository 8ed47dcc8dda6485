"""The body of `POST /v1/chat/completions`, checked.

Owns which of OpenAI's options there are here. What cannot be done is refused by name: an option that is silently
ignored would make an answer that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from chatserve.errors import BadFrameError, BadParamsError, TooLargeError
from chatserve.server.json_text import decode_json
from chatserve.server.reading import utf8_len
from chatserve.types import validate_params

_SAME_PARAMS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
_NOT_OFFERED: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
"""Options that would change the answer, and the values of them that ask for nothing."""

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Completion(msgspec.Struct, frozen=True):
    """A request, checked."""

    model: str
    messages: tuple[dict[str, str], ...]
    """Each with `role` (`system`, `user` or `assistant`) and `content`."""
    params: dict[str, Any]
    stream: bool
    include_usage: bool


def parse_completion(body: bytes, max_text_bytes: int) -> Completion:
    """Read a body.

    Raises:
        BadFrameError: not a JSON object.
        BadParamsError: a field is missing, ill-typed, out of range, or asks for what is not offered.
        TooLargeError: a text is over its limit.
    """
    try:
        given = decode_json(body)
    except ValueError as error:
        raise BadFrameError(f"the body is not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise BadFrameError("the body is not a JSON object")
    for name, harmless in _NOT_OFFERED.items():
        value = given.get(name)
        if value is not None and not any(_same(value, choice) for choice in harmless):
            offered = f"{msgspec.json.encode(harmless[0]).decode()}, or left out" if harmless else "left out"
            raise BadParamsError.of(name, value, f"{offered} (this server offers no other)")
    stream = _flag(given, "stream")
    options = given.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadParamsError.of("stream_options", options, "an object")
    if not stream and options:
        raise BadParamsError.of("stream_options", options, "left out where `stream` is not true")
    model = given.get("model")
    if not isinstance(model, str):
        raise BadParamsError.of("model", model, "a string")
    return Completion(
        model=model,
        messages=_messages(given.get("messages"), max_text_bytes),
        params=_params(given),
        stream=stream,
        include_usage=_flag(options, "include_usage"),
    )


def _params(given: dict[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {name: given[name] for name in _SAME_PARAMS if name in given}
    stop = given.get("stop")
    params["stop"] = [stop] if isinstance(stop, str) else stop
    limits = [given[name] for name in ("max_completion_tokens", "max_tokens") if given.get(name) is not None]
    params["max_tokens"] = limits[0] if limits else None
    try:
        return validate_params(params)
    except BadParamsError as error:
        # The same words, but named as this API names them.
        field = str(error.fields.get("field", "")).removeprefix("params.")
        raise BadParamsError(error.detail.replace("params.", "", 1), field=field) from error


def _messages(given: object, max_text_bytes: int) -> tuple[dict[str, str], ...]:
    if not isinstance(given, list) or not given:
        raise BadParamsError.of("messages", given, "a list of at least one message")
    messages: list[dict[str, str]] = []
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise BadParamsError.of(where, message, "an object with `role` and `content`")
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise BadParamsError.of(f"{where}.role", role, "one of system, developer, user, assistant")
        if message.get("tool_calls"):
            raise BadParamsError.of(f"{where}.tool_calls", message["tool_calls"], "left out: there are no tools here")
        text = _content(message.get("content"), f"{where}.content")
        if (size := utf8_len(text)) > max_text_bytes:
            raise TooLargeError.of(f"{where}.content", size, max_text_bytes)
        messages.append({"role": _ROLES[role], "content": text})
    return tuple(messages)


def _content(given: object, where: str) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise BadParamsError.of(where, given, "a string or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(given):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadParamsError.of(f"{where}[{index}]", part, 'a part of the type "text": this model reads text alone')
        texts.append(part["text"])
    return "".join(texts)


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BadParamsError.of(name, value, "true or false")
    return value


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other
