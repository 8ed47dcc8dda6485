"""A model directory without a model: a byte-level tokenizer and ChatML, made in a moment, and a script for the fake
runner whose text is words, so that a test can read what it sees."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("the ", "cat ", "saw ", "one ", "more ", "bird ", "and ", "sang ")
VOCAB = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(word.strip() + "Ġ" for word in WORDS)]
END = len(VOCAB) + 1
VOCAB_SIZE = len(VOCAB) + 2


def make_model_dir(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(VOCAB)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    assert tokenizer.token_to_id("<|im_end|>") == END
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END, "vocab_size": VOCAB_SIZE}))
    return folder


def wordy(token_ids: Sequence[int]) -> int:
    """The next word as a hash of all tokens; it never ends by itself."""
    return len(VOCAB) - len(WORDS) + zlib.crc32(bytes(token % 256 for token in token_ids)) % len(WORDS)


def ends_after(num_tokens: int) -> object:
    """A script whose answers have `num_tokens` words and then end."""

    def script(token_ids: Sequence[int]) -> int:
        written = 0
        for token in reversed(token_ids):
            if not len(VOCAB) - len(WORDS) <= token < len(VOCAB):
                break
            written += 1
        return END if written >= num_tokens else wordy(token_ids)

    return script
