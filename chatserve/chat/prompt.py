"""What the model reads: messages to token ids, turn by turn.

A user message's ids are everything that follows its parent's own ids in the prompt (the closing of the answer, the
turn, the opening of the next answer), a root's include the beginning of the prompt and the system prompt, and an
answer's ids are what was generated. So the prompt of any message is the concatenation of ids down its path, nothing is
ever encoded twice, and the next turn finds its whole past in the cache. Knows no sessions and does no I/O after
loading.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from typing import TYPE_CHECKING, Any, Final

from chatserve.chat.template import FALLBACK_STOP, FALLBACK_TEMPLATE, ChatTemplate
from chatserve.chat.tokenizer import After, Part, TextTokenizer
from chatserve.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

_PROBES: Final = ("a", "Zebra", " x", "\n", "\n\n\n", "\t", "1", "'s", "…", "你", "😀", ".", "-", "")
"""Texts that begin differently: the ids that their prompts share belong to none of them."""

_LAST_WORD: Final = re.compile(r"\s+\S{0,64}\Z")
"""A longer run without a space is no word: text in a script without spaces, or a link."""
_ENDINGS: Final = ("a", " a", "\n", ".")
"""How a text may go on: the ids that all of these share stay as they are while a person writes."""
NUM_ENDINGS: Final = len(_ENDINGS)

_TOKEN_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class PromptEncoder:
    """Renders and encodes turns for one model."""

    def __init__(self, model_dir: Path, *, operator_prompts: Collection[str] = ()) -> None:
        """Load tokenizer and template. System prompts in `operator_prompts` may share their KV between users.

        Raises:
            StartupError: the directory holds no tokenizer or template that works.
        """
        config = _read_json(model_dir / "tokenizer_config.json")
        special = {name: text for name in _TOKEN_NAMES if (text := _token_text(config.get(name))) is not None}
        source = _template_source(model_dir, config)
        self.stop_strings: tuple[str, ...] = ()
        if source is None:
            log.warning("the model has no chat template; turns are written as 'User:' and 'Assistant:' lines")
            self.stop_strings = (FALLBACK_STOP,)
            # A model that has always seen it first says nonsense without it.
            starts = TextTokenizer(model_dir).begins_with(special.get("bos_token", ""))
            source = ("{{ bos_token }}" if starts else "") + FALLBACK_TEMPLATE
        self.template = ChatTemplate(source, special)
        self._skeleton = self.template.skeleton
        if self.rewrites_history:
            log.warning(
                "the model's chat template renders earlier turns differently once later ones follow; "
                "they stay in the prompt as they were said, so that their KV can be used again"
            )
        self.tokenizer = TextTokenizer(model_dir, template_text=self.template.source)
        self._operator_prompts = frozenset(operator_prompts)
        self._template_digest = hashlib.sha256(self.template.source.encode()).hexdigest()
        self.stop_token_ids = self._find_stop_tokens(model_dir, special)
        # Found once, here: an operator's prompt may be long, and this is asked for on the event loop.
        self._shared_ids = {system: self._find_shared_ids(system) for system in (None, *self._operator_prompts)}
        self._template_ids = _common_start([self.encode_root(probe, "a") for probe in _PROBES])
        self.min_prompt_tokens = min(len(self.encode_root(system, "")) for system in (None, ""))
        """Of any conversation: what the template alone takes."""

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def check_context(self, context_tokens: int) -> None:
        """See that a conversation could begin in a context of so many tokens.

        Raises:
            StartupError: the template alone fills it.
        """
        least = self.min_prompt_tokens + 1
        if context_tokens < least:
            raise StartupError(
                f"--context-tokens must be at least {least}, not {context_tokens}: "
                f"the model's chat template alone takes {least - 1}, and an answer a token more"
            )

    @property
    def rewrites_history(self) -> bool:
        """Whether the template changes earlier turns as the conversation goes on; see `Skeleton`."""
        return self._skeleton.rewrites_history

    @property
    def answer_prefix(self) -> str:
        """White space that the model writes before an answer and that is not part of its text."""
        return self._skeleton.answer_prefix if self._skeleton.answer_prefix.isspace() else ""

    def encoded_for(self, system: str | None) -> str:
        """Names what a root message's ids depend on beside its text."""
        return hashlib.sha256(json.dumps([self._template_digest, system]).encode()).hexdigest()[:16]

    def encode_root(self, system: str | None, text: str) -> tuple[int, ...]:
        """Ids of a first user message: the whole prompt up to the opening of the answer."""
        return self.tokenizer.encode(self._skeleton.root_parts(system, text), after=After.NOTHING)

    def encode_turn(self, text: str) -> tuple[int, ...]:
        """Ids of a later user message: from the end of the answer before it to the opening of the next."""
        return self.tokenizer.encode(self._skeleton.turn_parts(text), after=After.TEXT)

    def encode_root_draft(self, system: str | None, text: str) -> tuple[int, ...]:
        """Ids that a first user message will begin with, if `text` is what has been written of it so far."""
        text = _whole_words(text)
        return _common_start([self.encode_root(system, text + ending) for ending in _ENDINGS])

    def encode_turn_draft(self, text: str) -> tuple[int, ...]:
        """Ids that a later user message will begin with, if `text` is what has been written of it so far."""
        text = _whole_words(text)
        return _common_start([self.encode_turn(text + ending) for ending in _ENDINGS])

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """Ids of an answer that this model did not generate, as after its opening."""
        prefix = self._skeleton.answer_prefix
        after = After.CONTROL if not prefix and self.tokenizer.ends_in_control(self._skeleton.root[1]) else After.TEXT
        return self.tokenizer.encode([Part(prefix, True), Part(text, False)], after=after)

    def encode_continuation(self, text: str) -> tuple[int, ...]:
        """Ids of text that goes on in mid-word."""
        return self.tokenizer.encode_continuation(text)

    def num_shared_tokens(self, system: str | None, root_ids: Sequence[int]) -> int:
        """How many leading ids of a prompt are the template's own, or of a system prompt that the operator configured.

        These may be shared between users. A system prompt that a user wrote is private, as is every token that a
        private text has a part in.
        """
        return _common_prefix(self._shared_ids.get(system, self._template_ids), root_ids)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _find_shared_ids(self, system: str | None) -> tuple[int, ...]:
        return _common_start([self.encode_root(system, probe) for probe in _PROBES])

    def _find_stop_tokens(self, model_dir: Path, special: dict[str, str]) -> tuple[int, ...]:
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _read_json(model_dir / name).get("eos_token_id")
            found.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
        eos = self.tokenizer.control_id(special.get("eos_token", ""))
        end_of_turn = self.tokenizer.leading_control(self._skeleton.closing)
        found.update(i for i in (eos, end_of_turn) if i is not None)
        return tuple(sorted(i for i in found if 0 <= i < self.vocab_size))


def _whole_words(text: str) -> str:
    """Without the word at the end, which may not be finished, and the space before it, which is part of its token."""
    return _LAST_WORD.sub("", text)


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _common_start(several: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    shortest = min(several, key=len)
    return shortest[: min(_common_prefix(shortest, other) for other in several)]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise StartupError(f"{path} is not valid JSON ({error}): fetch the model again") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object: fetch the model again")
    return value


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_source(model_dir: Path, config: dict[str, Any]) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):  # several by name
        by_name = {entry["name"]: entry["template"] for entry in value}
        value = by_name.get("default")
    return value if isinstance(value, str) else None
