"""Scripts for the fake runner, so that the real server answers with a text that a test has written.

A script sees token ids only: it reads the question back with the tiny tokenizer and gives the next byte of its answer.
For long answers there is a tokenizer whose few words are whole pieces of the answer instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models

from tests.server import tiny

START = tiny.END - 1
"""The id of `<|im_start|>`."""

Script = Callable[[Sequence[int]], int]


class Answers:
    """Answers each question as `say` has told it, a token a byte; before that, with the question."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._known: dict[tuple[int, ...], list[int]] = {}
        self.say(lambda question: question)

    def say(self, answer: Callable[[str], str]) -> None:
        """From now on, to questions that were asked before too."""
        self._answer = answer
        self._known.clear()

    def __call__(self, token_ids: Sequence[int]) -> int:
        start = len(token_ids) - 1 - list(reversed(token_ids)).index(START)
        header = len("<assistant\n") - 1
        prompt, written = tuple(token_ids[:start]), len(token_ids) - start - 1 - header
        answer = self._known.get(prompt)
        if answer is None:
            text = self._tokenizer.decode(list(prompt), skip_special_tokens=False)
            question = text.rsplit("<|im_start|>user\n", 1)[1].removesuffix("\n").removesuffix("<|im_end|>")
            answer = self._known[prompt] = self._tokenizer.encode(self._answer(question)).ids
        return answer[written] if written < len(answer) else tiny.END


def make_pieces_dir(folder: Path, pieces: Sequence[str]) -> Path:
    """The tiny model directory, in whose vocabulary the eight words are these pieces of text."""
    assert len(pieces) == len(tiny.WORDS)
    tiny.make_model_dir(folder)
    path = str(folder / "tokenizer.json")
    whole = Tokenizer.from_file(path)
    letters = tiny.VOCAB[: -len(tiny.WORDS)]
    to_letters = {piece: "".join(whole.encode(piece).tokens) for piece in pieces}
    vocab = {piece: index for index, piece in enumerate([*letters, *(to_letters[piece] for piece in pieces)])}
    whole.model = models.BPE(vocab=vocab, merges=[])
    whole.save(path)
    return folder


def in_pieces(order: Sequence[int]) -> Script:
    """The pieces in this order, by number, then the end."""
    first = len(tiny.VOCAB) - len(tiny.WORDS)

    def script(token_ids: Sequence[int]) -> int:
        written = 0
        while first <= token_ids[-1 - written] < tiny.END - 1:
            written += 1
        return first + order[written] if written < len(order) else tiny.END

    return script
