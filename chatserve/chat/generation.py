"""One answer being generated: tokens in, text out, and how far that text has reached the store.

Pure state, no I/O. Three lengths rise one after the other: what the engine has generated (in the `Run`), what is
settled as text (`_unsent`), and what is stored and published (`as_stored`). Owned by `Generations`, which moves them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from chatserve.chat.detokenizer import OutputText, Piece
from chatserve.chat.events import AnyEvent, GenerationEnd, GenerationQueued, GenerationStarted, Usage
from chatserve.chat.store import Delta, MessageRecord
from chatserve.engine.messages import PathRef, Started
from chatserve.types import FinishReason, SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatserve.chat.run import Run, RunEnd

GENERATING = "generating"

STATUS_OF = {
    FinishReason.STOP: "done",
    FinishReason.LENGTH: "done",
    FinishReason.CANCELLED: "stopped",
    FinishReason.ORPHANED: "stopped",
    FinishReason.INTERRUPTED: "interrupted",
    FinishReason.ERROR: "failed",
}


class Generation:
    """One attempt at one message; implements `RunListener`."""

    def __init__(
        self,
        *,
        user: UserId,
        session: SessionId,
        record: MessageRecord,
        output: OutputText,
        on_change: Callable[[Generation], None],
        monotonic: Callable[[], float],
    ) -> None:
        """`record` is the message as it was before: its text and ids go on."""
        assert record.seed is not None
        self.user = user
        self.session = session
        self.message = record.message
        self.attempt = record.attempt
        self.seed = record.seed
        self.run: Run | None = None
        self.reason: FinishReason | None = None
        """Why it was asked to stop, by a person, a stop string or ourselves; None: the engine decides."""
        self.end: RunEnd | None = None
        self.is_finishing = False
        self.is_told = False
        """Its end is published, though its writer does not know that it is stored."""
        self.ended = asyncio.Event()
        """Set once `generation.end` is published, or its message is gone."""
        self.notices: list[AnyEvent] = []
        """Events to be stored before the next text."""
        self.num_notice_writes = 0
        self._record = record
        self._output = output
        self._on_change = on_change
        self._monotonic = monotonic
        self._began = monotonic()
        self._first_token_at: float | None = None
        self._last_token_at = self._began
        self._num_timed = 0
        self._started: Started | None = None
        self._unsent: list[Piece] = []
        self.num_unsent = 0
        """Tokens that wait for the store."""
        self._stored_text = [record.text]
        self._stored_ids: list[int] = list(record.token_ids)
        self._num_taken = 0
        """Tokens of this attempt that went to the store; the last ones may not be published yet."""
        self._num_stored = 0

    # --- what the engine says -----------------------------------------------------------------------------------------

    def on_queued(self, position: int) -> None:
        if self.notices and isinstance(self.notices[-1], GenerationQueued):
            self.notices.pop()  # nobody has heard of that position yet
        self.notices.append(GenerationQueued(session=self.session, message=self.message, position=position))
        self._on_change(self)

    def on_started(self, started: Started) -> None:
        self._started = started
        self.notices.append(
            GenerationStarted(
                session=self.session,
                message=self.message,
                prompt_tokens=started.prompt_tokens,
                cached_tokens=started.cached_tokens,
                swapped_in_tokens=started.swapped_in_tokens,
                computed_tokens=started.computed_tokens,
            )
        )
        self._on_change(self)

    def on_tokens(self, token_ids: tuple[int, ...]) -> None:
        if self._output.stopped:
            return
        self._last_token_at = self._monotonic()
        if self._first_token_at is None:
            self._first_token_at = self._last_token_at
        else:
            self._num_timed += len(token_ids)
        for token in token_ids:
            self._hold(self._output.feed(token))
            if self._output.stopped:
                self.reason = self.reason or FinishReason.STOP
                break
        self._on_change(self)

    def on_end(self, end: RunEnd) -> None:
        if not self._output.stopped:
            self._hold(self._output.flush())
        self.end = end
        self._on_change(self)

    # --- what others need to know -------------------------------------------------------------------------------------

    @property
    def is_cut(self) -> bool:
        """A stop string is complete; the engine need not go on."""
        return self._output.stopped

    @property
    def num_kept(self) -> int:
        """Output tokens of this attempt that are part of the message, up to now."""
        return self._output.num_kept

    @property
    def is_ready_to_finish(self) -> bool:
        """It has ended, and all that comes before its end is stored and published."""
        is_taken = not self.notices and not any(piece.text for piece in self._unsent)
        is_published = self._num_stored == self._num_taken
        return self.end is not None and not self.is_finishing and is_taken and is_published

    def take_delta(self) -> Delta | None:
        """All that is settled and was not taken before, as one write; it must be stored before the next is taken."""
        text = "".join(piece.text for piece in self._unsent)
        if not text:
            return None
        token_ids = tuple(i for piece in self._unsent for i in piece.token_ids)
        self._unsent.clear()
        self.num_unsent = 0
        first_token = self._num_taken
        self._num_taken += len(token_ids)
        return Delta(
            user=self.user,
            session=self.session,
            message=self.message,
            attempt=self.attempt,
            first_token=first_token,
            token_ids=token_ids,
            text=text,
        )

    def stored(self, delta: Delta) -> None:
        """A delta was stored and is being published."""
        assert delta.first_token == self._num_stored
        self._num_stored += len(delta.token_ids)
        self._stored_ids += delta.token_ids
        self._stored_text.append(delta.text)
        if self.end is not None:
            self._on_change(self)  # its end may have waited for this

    def as_stored(self, record: MessageRecord) -> MessageRecord:
        """The message with the text that has been published."""
        if len(self._stored_text) > 1:
            self._stored_text = ["".join(self._stored_text)]
        return msgspec.structs.replace(
            record, text=self._stored_text[0], token_ids=tuple(self._stored_ids), status=GENERATING
        )

    def finished(self, record: MessageRecord) -> tuple[MessageRecord, GenerationEnd, PathRef | None]:
        """The message's final form, the event that says so, and what the engine holds of it."""
        end = self.end
        assert end is not None, "it has not ended"
        reason = self.final_reason
        assert self._num_stored == self._num_taken, "its text is published before its end"
        # Tokens without text (control tokens, half a character) are part of the prompt all the same.
        rest = tuple(i for piece in self._unsent for i in piece.token_ids)
        assert not any(piece.text for piece in self._unsent), "text is stored by deltas"
        usage = self._usage(self._num_stored + len(rest))
        stored = self.as_stored(record)
        final = msgspec.structs.replace(
            stored,
            token_ids=stored.token_ids + rest,
            status=STATUS_OF[reason],
            usage=usage,
        )
        event = GenerationEnd(
            session=self.session,
            message=self.message,
            reason=reason.value,
            status=final.status,
            usage=usage,
            seed=self.seed,
            code=end.code if reason is FinishReason.ERROR and end.code else UNSET,
            detail=end.detail if reason is FinishReason.ERROR else UNSET,
        )
        return final, event, end.path

    @property
    def final_reason(self) -> FinishReason:
        end = self.end
        assert end is not None
        if end.reason is not FinishReason.CANCELLED:
            return FinishReason.STOP if self._output.stopped else end.reason
        # Cancelled without anyone having asked: the engine is going away.
        return self.reason or FinishReason.INTERRUPTED

    def _hold(self, piece: Piece) -> None:
        if piece.token_ids or piece.text:
            self._unsent.append(piece)
            self.num_unsent += len(piece.token_ids)

    def _usage(self, completion_tokens: int) -> Usage:
        started = self._started
        if started is None:
            return Usage()
        first = self._first_token_at
        elapsed_s = 0.0 if first is None else self._last_token_at - first
        return Usage(
            prompt_tokens=started.prompt_tokens,
            cached_tokens=started.cached_tokens,
            swapped_in_tokens=started.swapped_in_tokens,
            computed_tokens=started.computed_tokens,
            completion_tokens=completion_tokens,
            ttft_ms=UNSET if first is None else round(1000 * (first - self._began), 3),
            tokens_per_s=round(self._num_timed / elapsed_s, 3) if elapsed_s > 0 else UNSET,
        )
