"""JSON as clients send it: read, or refused in words that say why."""

from __future__ import annotations

import json
import math
from typing import Any, Final, NoReturn

import msgspec

_MOST_DIGITS: Final = 400
"""Of a whole number that is read; none that is longer is allowed anywhere, and reading it takes quadratic time."""


def decode_json(text: str | bytes) -> Any:
    """Read a JSON text. A number beyond what the machine's numbers hold is an infinity, so that whoever looks at its
    field can say what is allowed there.

    Raises:
        ValueError: it is no JSON (NaN and infinities are none), a string in it is none of Unicode's, or it is nested
            deeper than the interpreter goes (some hundreds). The message completes "it is not valid JSON: …".
    """
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:  # UnicodeEncodeError is a ValueError
        if "out of range" not in str(error):
            raise
    try:
        given = json.loads(text, parse_int=_whole, parse_float=float, parse_constant=_refuse)
        json.dumps(given, ensure_ascii=False).encode()  # no lone surrogates
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return given


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else math.copysign(math.inf, -1 if digits[0] == "-" else 1)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
