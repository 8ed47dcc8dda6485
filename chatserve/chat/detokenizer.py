"""Generated tokens to text, as it may be shown: whole characters, no control token, no part of a stop string.

`Detokenizer` turns tokens into text one at a time; `OutputText` adds stop strings and decides which tokens are settled,
that is, whose text can be shown and stored together with their ids. Both take constant time a token, whatever the
text's length. Pure; know nothing of messages or engines.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_LONGEST_CHARACTER_TOKENS = 8
"""More tokens than one character's bytes can be spread over, counting empty ones between."""


class Detokenizer:
    """An incremental UTF-8 decoder over the bytes of tokens.

    A byte sequence that is no character (a model may generate any) becomes U+FFFD once that is certain, and not before:
    a character in halves shows nothing until it is whole.
    """

    __slots__ = ("_bytes_of", "_decoder", "_skip")

    def __init__(self, bytes_of: Sequence[bytes], *, skip_prefix: str = "") -> None:
        """`skip_prefix`: white space that the model writes first and that is not part of the text."""
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._skip = skip_prefix

    def resume(self, token_ids: Sequence[int]) -> None:
        """Go on after `token_ids`, whose text is known, but whose last character may still lack bytes."""
        for token in token_ids[-_LONGEST_CHARACTER_TOKENS:]:
            self._decoder.decode(self._token(token))
        if token_ids:
            self._skip = ""

    def feed(self, token: int) -> str:
        """The text that becomes certain with this token."""
        text = self._decoder.decode(self._token(token))
        if self._skip and text:
            text = text.removeprefix(self._skip)
            self._skip = ""
        return text

    @property
    def is_mid_character(self) -> bool:
        return self._decoder.getstate()[0] != b""

    def _token(self, token: int) -> bytes:
        # A model's output layer may be padded past the vocabulary.
        return self._bytes_of[token] if 0 <= token < len(self._bytes_of) else b""


class Piece(NamedTuple):
    """Tokens and the text that they stand for."""

    token_ids: tuple[int, ...] = ()
    text: str = ""


class OutputText:
    """The text of one generation as it may be sent.

    Tokens are held back while their text might be the beginning of a stop string or half a character, and let go in
    order, ids and text together. When a stop string is complete, `stopped` becomes true: the text ends before it, the
    kept ids end before the token that it begins in, and what is left of that token's text is encoded by itself.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Iterable[str],
        encode_continuation: Callable[[str], Sequence[int]],
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = [_StopString(text) for text in stop]
        self._encode_continuation = encode_continuation
        self._held: list[_Held] = []
        self._text = ""
        self._num_released = 0
        self.stopped = False

    @property
    def num_kept(self) -> int:
        """How many of the fed tokens are part of the message: after a stop string, those that end before it."""
        return self._num_released + len(self._held)

    def feed(self, token: int) -> Piece:
        """Take one generated token; returns what can be sent now, often nothing."""
        assert not self.stopped, "the text has ended"
        new = self._detokenizer.feed(token)
        start = len(self._text)
        self._text += new
        self._held.append(_Held(token, len(self._text), not self._detokenizer.is_mid_character))
        longest_partial = 0
        if self._stops:
            if (cut := self._find_stop(new, start)) is not None:
                return self._stop_at(cut)
            longest_partial = max(stop.matched for stop in self._stops)
        return self._release(len(self._text) - longest_partial)

    def flush(self) -> Piece:
        """The end without a stop string: all that was held back. Half a character at the very end is not shown."""
        piece = Piece(tuple(held.token for held in self._held), self._text)
        self._num_released += len(self._held)
        self._held, self._text = [], ""
        return piece

    def _find_stop(self, new: str, start: int) -> int | None:
        """Where the stop string begins that is the first to be complete, the longest of those that are so together."""
        for i, char in enumerate(new):
            begins = [start + i + 1 - len(stop.text) for stop in self._stops if stop.feed(char)]
            if begins:
                return min(begins)
        return None

    def _stop_at(self, cut: int) -> Piece:
        self.stopped = True
        text = self._text[:cut]
        before = self._release(cut)
        remainder = text[len(before.text) :]
        self._held, self._text = [], ""
        ids = tuple(self._encode_continuation(remainder)) if remainder else ()
        return Piece(before.token_ids + ids, text)

    def _release(self, upto: int) -> Piece:
        """Let go of the tokens that end at or before `upto` characters of the held text, up to a whole character."""
        count = next((i + 1 for i in reversed(range(len(self._held))) if self._held[i].settles(upto)), 0)
        if count == 0:
            return Piece()
        released, self._held = self._held[:count], self._held[count:]
        end = released[-1].end
        piece = Piece(tuple(held.token for held in released), self._text[:end])
        self._text = self._text[end:]
        self._held = [held._replace(end=held.end - end) for held in self._held]
        self._num_released += count
        return piece


class _Held(NamedTuple):
    token: int
    end: int
    """Characters of the held text up to and with this token's."""
    is_whole: bool
    """No character is left in halves after it."""

    def settles(self, upto: int) -> bool:
        return self.is_whole and self.end <= upto


class _StopString:
    """Finds one string in a stream of characters (Knuth, Morris and Pratt, 1977)."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        assert text, "an empty stop string would match everywhere"
        self.text = text
        self.matched = 0
        """Characters of `text` that the stream now ends in."""
        self._fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def feed(self, char: str) -> bool:
        """Whether the string is complete with this character."""
        while self.matched and self.text[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.text[self.matched] == char
        if self.matched < len(self.text):
            return False
        self.matched = self._fallback[-1]
        return True
