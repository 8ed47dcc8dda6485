"""Text to token ids and back to bytes, over a model directory's `tokenizer.json`.

Owns the one distinction that chat templates need and tokenizers blur: control tokens (`<|im_end|>`, `</s>`) are matched
in the template's own text and never in what a person wrote, where they are ordinary characters. Knows nothing of roles
or templates. Uses the `tokenizers` library directly: `transformers` would bring torch into the web process.

A `Part` is a stretch of prompt text that is either the template's or a person's. Parts are tokenised as the whole
string would be: split at the template's control tokens, and what lies between two of them encoded in one piece, so that
merges across the seam of template and content come out as in training.
"""

from __future__ import annotations

import enum
import json
import re
import secrets
from typing import TYPE_CHECKING, Any, Final, NamedTuple, assert_never

from tokenizers import AddedToken, Tokenizer

from chatserve.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_CONTROL_SHAPE: Final = re.compile(r"<(\||\uff5c).*\1>|\[/?[A-Z_]+\]|</?(?:s|unk|pad|bos|eos)>")
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_PIECE: Final = "▁"


class Part(NamedTuple):
    """A stretch of prompt text."""

    text: str
    is_template: bool


class After(enum.Enum):
    """What stands before a stretch of prompt: SentencePiece models put a space before some beginnings."""

    NOTHING = enum.auto()
    CONTROL = enum.auto()
    TEXT = enum.auto()


class TextTokenizer:
    """Encodes parts of prompts, and knows the bytes that each token stands for."""

    def __init__(self, model_dir: Path, *, template_text: str = "") -> None:
        """Load `tokenizer.json`. Added tokens that `template_text` mentions are control tokens too.

        Raises:
            StartupError: there is none, or it is not of a kind that chat models use.
        """
        path = model_dir / "tokenizer.json"
        try:
            spec = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise StartupError(f"{path} is missing: save the model's fast tokenizer there") from None
        except ValueError as error:
            raise StartupError(f"{path} is not valid JSON ({error}): fetch the model again") from None
        added: list[dict[str, Any]] = spec.get("added_tokens") or []
        for token in added:
            token["special"] = bool(token["special"]) or _is_control(token["content"], template_text)
        self._control = {t["content"]: _Control(t["id"], t["lstrip"], t["rstrip"]) for t in added if t["special"]}
        self.control_ids = frozenset(control.id for control in self._control.values())
        self._control_pattern = _alternation(self._control)
        self.bytes_of = _token_bytes(spec, self.control_ids)
        """By token id, the bytes that it adds to the text; control tokens add none."""
        self._anchor = f"\x02{secrets.token_hex(16)}\x03"
        self._mid_text = _load(spec, self._anchor)
        self._glued = _load(_without_prefix_space(spec), self._anchor)
        self._plain = _load(spec, None)

    @property
    def vocab_size(self) -> int:
        return len(self.bytes_of)

    def control_id(self, content: str) -> int | None:
        """The id of a control token, if there is one of this text."""
        control = self._control.get(content)
        return None if control is None else control.id

    def begins_with(self, content: str) -> bool:
        """Whether the model's own tokenizer puts this control token before every text."""
        return self._plain.encode("a").ids[:1] == [self.control_id(content)]

    def leading_control(self, text: str) -> int | None:
        """The control token that `text` starts with, white space aside."""
        if self._control_pattern is None:
            return None
        match = self._control_pattern.match(text.lstrip())
        return None if match is None else self._control[match[0]].id

    def encode(self, parts: Iterable[Part], *, after: After) -> tuple[int, ...]:
        """Token ids of a stretch of prompt, given what stands before it.

        May take long for long texts and lets go of the interpreter lock: call it in a thread.
        """
        ids: list[int] = []
        run = ""
        strips_after = False
        for text, control in self._split(parts):
            run += text
            if control is None:
                continue
            if strips_after:
                run = run.lstrip()
            ids += self._encode_run(run.rstrip() if control.lstrip else run, after)
            ids.append(control.id)
            run, after, strips_after = "", After.CONTROL, control.rstrip
        ids += self._encode_run(run.lstrip() if strips_after else run, after)
        return tuple(ids)

    def ends_in_control(self, text: str) -> bool:
        """Whether a stretch of the template's text ends in a control token."""
        *_, (rest, _) = self._split([Part(text, True)])
        return not rest and bool(text)

    def encode_continuation(self, text: str) -> tuple[int, ...]:
        """Token ids of text that goes on in the middle of a word or line: exactly its bytes, no space before it."""
        return tuple(self._encode_literally(self._glued, text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of whole sequences, control tokens left out."""
        return b"".join(self.bytes_of[i] for i in token_ids).decode(errors="replace")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _split(self, parts: Iterable[Part]) -> Iterable[tuple[str, _Control | None]]:
        for part in parts:
            if not part.is_template or self._control_pattern is None:
                yield part.text, None
                continue
            at = 0
            for match in self._control_pattern.finditer(part.text):
                yield part.text[at : match.start()], None
                yield "", self._control[match[0]]
                at = match.end()
            yield part.text[at:], None

    def _encode_run(self, run: str, after: After) -> list[int]:
        match after:
            case After.NOTHING:
                ids = _ids(self._plain, run)
                return ids if self.control_ids.isdisjoint(ids) else self._encode_literally(self._mid_text, run)
            case After.CONTROL:
                return self._encode_literally(self._mid_text, run)
            case After.TEXT:
                return self._encode_literally(self._glued, run)
            case _:
                assert_never(after)

    def _encode_literally(self, tokenizer: Tokenizer, run: str) -> list[int]:
        """Encode text after an anchor that is no text, and drop the anchor.

        Some models' vocabularies hold the control tokens as ordinary pieces too; where one is found, the text is cut
        inside it, so that it cannot be.
        """
        if not run:
            return []
        encoding = tokenizer.encode_batch([self._anchor + run], add_special_tokens=False)[0]
        ids: list[int] = encoding.ids
        anchor, ids = ids[:1], ids[1:]
        assert anchor[0] >= self.vocab_size, "the anchor is the first token"
        if self.control_ids.isdisjoint(ids):
            return ids
        at = next(i for i, token in enumerate(ids) if token in self.control_ids)
        start, end = encoding.offsets[at + 1]
        cut = max(start + 1, (start + end) // 2) - len(self._anchor)
        if end - start < 2 or not 0 < cut < len(run):
            return [i for i in ids if i not in self.control_ids]  # an unknown-character token: nothing to cut
        return self._encode_literally(tokenizer, run[:cut]) + self._encode_literally(self._glued, run[cut:])


class _Control(NamedTuple):
    id: int
    lstrip: bool
    rstrip: bool


def _is_control(content: str, template_text: str) -> bool:
    return not content.isspace() and (content in template_text or _CONTROL_SHAPE.fullmatch(content) is not None)


def _alternation(contents: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    # encode() holds the interpreter lock all the while; encode_batch() lets go of it.
    ids: list[int] = tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
    return ids


def _load(spec: dict[str, Any], anchor: str | None) -> Tokenizer:
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # control tokens are text here
    if anchor is not None:
        tokenizer.add_tokens([AddedToken(anchor, normalized=False)])
    return tokenizer


def _without_prefix_space(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer, putting no space before the text."""

    def cleaned(node: Any) -> Any:
        if isinstance(node, list):
            kept = (cleaned(n) for n in node)
            return [n for n in kept if not (isinstance(n, dict) and n.get("type") == "Prepend")]
        if not isinstance(node, dict):
            return node
        node = {key: cleaned(value) for key, value in node.items()}
        if node.get("type") == "Metaspace":
            node["prepend_scheme"] = "never"
            node.pop("add_prefix_space", None)
        if node.get("type") == "ByteLevel":
            node["add_prefix_space"] = False
        return node

    normalizer = cleaned(spec.get("normalizer"))
    if isinstance(normalizer, dict) and normalizer.get("type") == "Prepend":
        normalizer = None
    return {**spec, "normalizer": normalizer, "pre_tokenizer": cleaned(spec.get("pre_tokenizer"))}


def _token_bytes(spec: dict[str, Any], control_ids: frozenset[int]) -> list[bytes]:
    vocab = spec["model"]["vocab"]
    pieces: dict[int, str] = (
        {i: piece for piece, i in vocab.items()} if isinstance(vocab, dict) else {i: p[0] for i, p in enumerate(vocab)}
    )
    kinds = set(_decoder_kinds(spec.get("decoder")))
    if "ByteLevel" in kinds:
        byte_of = _byte_level_alphabet()

        def to_bytes(piece: str) -> bytes:
            try:
                return bytes(byte_of[char] for char in piece)
            except KeyError:
                return piece.encode()

    elif kinds & {"ByteFallback", "Metaspace", "Replace"}:

        def to_bytes(piece: str) -> bytes:
            match = _BYTE_PIECE.fullmatch(piece)
            return bytes([int(match[1], 16)]) if match else piece.replace(_SPACE_PIECE, " ").encode()

    else:
        raise StartupError(
            f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is of no kind that is supported: "
            "byte-level BPE and SentencePiece are"
        )
    added = {token["id"]: token["content"].encode() for token in spec.get("added_tokens") or []}
    size = 1 + max([*pieces, *added])
    table = [b""] * size
    for i, piece in pieces.items():
        table[i] = to_bytes(piece)
    for i, content in added.items():
        table[i] = b"" if i in control_ids else content
    return table


def _decoder_kinds(node: Any) -> Iterable[str]:
    if isinstance(node, dict):
        yield node.get("type", "")
        for below in node.get("decoders") or ():
            yield from _decoder_kinds(below)


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins for bytes of GPT-2's byte-level BPE (Radford et al., 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet
