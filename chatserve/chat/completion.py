"""One-shot answers for the OpenAI API: nothing is stored, and closing the iterator stops the generation."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from chatserve.chat.detokenizer import Detokenizer, OutputText
from chatserve.chat.events import Usage
from chatserve.chat.run import Run, RunEnd
from chatserve.chat.tree import ASSISTANT, USER
from chatserve.engine.messages import Started
from chatserve.errors import (
    BadParamsError,
    ChatError,
    ContextOverflowError,
    EngineUnavailableError,
    InternalError,
    OverloadedError,
)
from chatserve.types import FinishReason, SamplingParams, UserId, validate_params

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from chatserve.chat.core import Core


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Some text, or the end: then `finish_reason` (stop or length) and `usage` are set."""

    text: str
    finish_reason: str | None = None
    usage: Usage | None = None


class _Listener:
    """Collects text for one reader."""

    def __init__(self, output: OutputText, core: Core) -> None:
        self.output = output
        self.run: Run | None = None
        self.end: RunEnd | None = None
        self.started: Started | None = None
        self.changed = asyncio.Event()
        self._core = core
        self._text: list[str] = []
        self.num_tokens = 0

    def on_queued(self, position: int) -> None:
        pass

    def on_started(self, started: Started) -> None:
        self.started = started

    def on_tokens(self, token_ids: tuple[int, ...]) -> None:
        for token in token_ids:
            if self.output.stopped:
                break
            self._text.append(self.output.feed(token).text)
        if self.output.stopped:
            assert self.run is not None
            self._core.link.cancel(self.run, self.output.num_kept)
        self.changed.set()

    def on_end(self, end: RunEnd) -> None:
        if not self.output.stopped:
            self._text.append(self.output.flush().text)
        self.end = end
        self.changed.set()

    def take_text(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return text


async def complete(
    core: Core, user: UserId, messages: Sequence[Mapping[str, str]], params: object
) -> AsyncIterator[Chunk]:
    """Answer a conversation of `role` and `content` pairs that ends with a user message.

    Raises:
        BadParamsError: a role is unknown, or the last message is not a user's.
        ContextOverflowError, RateLimitedError, OverloadedError, EngineUnavailableError: before the first chunk.
    """
    sampling = SamplingParams.merge({"seed": secrets.randbits(53)}, validate_params(params))
    info = core.link.info()
    system, turns = _turns(messages)
    num_chars = sum(len(text) for _, text in turns) + len(system or "")
    prompt_ids, num_shared = await core.in_thread(user, num_chars, lambda: _encode(core, system, turns))
    if len(prompt_ids) >= info.context_tokens:
        raise ContextOverflowError.of(len(prompt_ids), info.context_tokens)
    core.check_load(user)
    detokenizer = Detokenizer(core.encoder.tokenizer.bytes_of, skip_prefix=core.encoder.answer_prefix)
    stop = (*sampling.stop, *core.encoder.stop_strings)
    listener = _Listener(OutputText(detokenizer, stop, core.encoder.encode_continuation), core)
    run = listener.run = Run(
        name=f"once.{core.new_id()}",
        user=user,
        prompt_ids=prompt_ids,
        num_shared_tokens=num_shared,
        sampling=sampling,
        stop_token_ids=core.encoder.stop_token_ids,
        base=None,
        listener=listener,
    )
    core.link.start(run)
    try:
        while listener.end is None:
            await listener.changed.wait()
            listener.changed.clear()
            if listener.end is None and (text := listener.take_text()):
                yield Chunk(text=text)
        if listener.end.reason is FinishReason.ERROR:
            raise _error(listener.end)
        if listener.end.reason in {FinishReason.CANCELLED, FinishReason.INTERRUPTED} and not listener.output.stopped:
            raise EngineUnavailableError(listener.end.detail or "the model is being stopped")
        length = listener.end.reason is FinishReason.LENGTH and not listener.output.stopped
        yield Chunk(text=listener.take_text(), finish_reason="length" if length else "stop", usage=_usage(listener))
    finally:
        core.link.cancel(run, listener.output.num_kept)


def _turns(messages: Sequence[Mapping[str, str]]) -> tuple[str | None, list[tuple[str, str]]]:
    """The system prompt, and turns that alternate: what comes in a row is joined by an empty line."""
    systems: list[str] = []
    turns: list[tuple[str, str]] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role in {"system", "developer"}:
            systems.append(text)
        elif role not in {USER, ASSISTANT}:
            raise BadParamsError.of("role", role, "system, user or assistant")
        elif turns and turns[-1][0] == role:
            turns[-1] = (role, f"{turns[-1][1]}\n\n{text}")
        else:
            turns.append((role, text))
    if not turns or turns[-1][0] != USER:
        raise BadParamsError("the last message must be a user message", field="messages")
    if turns[0][0] == ASSISTANT:
        turns.insert(0, (USER, ""))
    return "\n\n".join(systems) if systems else None, turns


def _encode(core: Core, system: str | None, turns: Sequence[tuple[str, str]]) -> tuple[tuple[int, ...], int]:
    encoder = core.encoder
    root = encoder.encode_root(system, turns[0][1])
    ids = list(root)
    for role, text in turns[1:]:
        ids += encoder.encode_turn(text) if role == USER else encoder.encode_answer(text)
    return tuple(ids), encoder.num_shared_tokens(system, root)


def _usage(listener: _Listener) -> Usage:
    started = listener.started
    fields: dict[str, Any] = {"completion_tokens": listener.output.num_kept}
    if started is not None:
        fields |= {
            "prompt_tokens": started.prompt_tokens,
            "cached_tokens": started.cached_tokens,
            "swapped_in_tokens": started.swapped_in_tokens,
            "computed_tokens": started.computed_tokens,
        }
    return Usage(**fields)


def _error(end: RunEnd) -> ChatError:
    for kind in (OverloadedError, EngineUnavailableError, BadParamsError):
        if kind.code == end.code:
            return kind(end.detail)
    return InternalError(end.detail or "the generation failed")
