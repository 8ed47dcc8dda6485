"""Identifiers and sampling parameters that every layer shares.

Owns no behaviour beyond the validation of sampling parameters; knows nothing of any other module but `errors`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final, NewType

import msgspec

from chatserve.errors import BadParamsError

if TYPE_CHECKING:
    from collections.abc import Mapping

UserId = NewType("UserId", str)
SessionId = NewType("SessionId", str)
MessageId = NewType("MessageId", str)
RequestId = NewType("RequestId", str)
"""One generation attempt, as the engine knows it."""
BlockId = NewType("BlockId", int)
"""Index of a block in device storage."""
HostBlockId = NewType("HostBlockId", int)
"""Index of a block in the host pool."""
Scope = NewType("Scope", str)
"""Who may reuse a cached block: `PUBLIC`, or one user's id."""

PUBLIC: Final = Scope("")

LOCAL_USER: Final = UserId("local")
"""Everyone, where no tokens are configured."""


class FinishReason(enum.StrEnum):
    """Why a generation ended, as `generation.end` says it."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ORPHANED = "orphaned"
    INTERRUPTED = "interrupted"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen from the logits.

    Order of application: repetition penalty (over prompt and output), presence and frequency penalties (over output),
    temperature, top-k, top-p, min-p. Temperature 0 takes the largest logit and ignores the last four. The random number
    of a draw is a function of (`seed`, position of the token in the sequence) alone.
    """

    max_tokens: int | None = None
    """Most tokens to generate; None: as many as the context holds."""
    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    """None: drawn when the generation starts, and reported when it ends."""

    @classmethod
    def merge(cls, *layers: Mapping[str, Any]) -> SamplingParams:
        """Combine validated sparse layers, later ones first in rank."""
        merged: dict[str, Any] = {}
        for layer in layers:
            merged.update(layer)
        return msgspec.convert(merged, cls)


class _Whole(msgspec.Struct, frozen=True):
    low: int
    high: int

    def check(self, value: object) -> bool:
        return type(value) is int and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"a whole number from {self.low} to {self.high}"


class _Number(msgspec.Struct, frozen=True):
    low: float
    high: float
    above_low: bool = False

    def check(self, value: object) -> bool:
        if type(value) not in (int, float):
            return False
        # Of what is no number or infinite both comparisons cannot hold; an int may be too large for a float.
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high  # type: ignore[operator]

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above_low else f"from {self.low:g}"
        return f"a number {low} to {self.high:g}"


class _StopStrings(msgspec.Struct, frozen=True):
    most: int = 8
    longest: int = 256

    def check(self, value: object) -> bool:
        return (
            isinstance(value, list | tuple)
            and len(value) <= self.most
            and all(isinstance(s, str) and 1 <= len(s) <= self.longest for s in value)
        )

    def __str__(self) -> str:
        return f"a list of at most {self.most} strings of 1 to {self.longest} characters"


PARAM_RANGES: Final[Mapping[str, _Whole | _Number | _StopStrings]] = {
    "max_tokens": _Whole(1, 1_000_000),
    "temperature": _Number(0.0, 2.0),
    "top_p": _Number(0.0, 1.0, above_low=True),
    "top_k": _Whole(0, 1_000_000),
    "min_p": _Number(0.0, 1.0),
    "repetition_penalty": _Number(0.0, 2.0, above_low=True),
    "presence_penalty": _Number(-2.0, 2.0),
    "frequency_penalty": _Number(-2.0, 2.0),
    "stop": _StopStrings(),
    "seed": _Whole(0, 2**63 - 1),
}


def validate_params(given: object) -> dict[str, Any]:
    """Check a client's `params` object and keep what it set.

    Unknown fields are ignored and a null means "not set here", so the result is sparse and can be layered with
    `SamplingParams.merge`.

    Raises:
        BadParamsError: names the field, what was given and what is allowed.
    """
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise BadParamsError.of("params", given, "an object")
    kept: dict[str, Any] = {}
    for name, allowed in PARAM_RANGES.items():
        value = given.get(name)
        if value is None:
            continue
        if not allowed.check(value):
            raise BadParamsError.of(f"params.{name}", value, str(allowed))
        kept[name] = value
    return kept
