"""After a restart: messages that were being generated when their server died are marked, their text kept."""

from __future__ import annotations

import logging

import msgspec

from chatserve.chat.events import AnyEvent, GenerationEnd, Usage
from chatserve.chat.generation import GENERATING, STATUS_OF
from chatserve.chat.store import MessageRecord, SessionState, Store, Transaction
from chatserve.errors import NotFoundError
from chatserve.types import FinishReason, SessionId

log = logging.getLogger(__name__)


async def interrupt_unfinished(store: Store) -> None:
    """Give every generation that was acknowledged and never ended its end.

    Raises:
        StoreUnavailableError: the store is away.
    """
    found = await store.unfinished()
    for user, session in found:
        state = await store.load(user, session)
        if state is not None:
            await _interrupt(store, state)
    if found:
        log.warning("marked the unfinished answers of %d sessions as interrupted", len(found))


async def _interrupt(store: Store, state: SessionState) -> None:
    session = state.record.session
    unfinished = [m for m in state.messages if m.status == GENERATING]
    change = Transaction(
        user=state.record.user,
        session=session,
        puts=tuple(msgspec.structs.replace(m, status=STATUS_OF[FinishReason.INTERRUPTED]) for m in unfinished),
        events=tuple(_end(session, m) for m in unfinished),
        write_id=f"interrupt:{session}:{state.seq}",
    )
    try:
        await store.commit(change)
    except NotFoundError:
        log.info("session %s was deleted meanwhile", session)


def _end(session: SessionId, message: MessageRecord) -> AnyEvent:
    return GenerationEnd(
        session=session,
        message=message.message,
        reason=FinishReason.INTERRUPTED.value,
        status=STATUS_OF[FinishReason.INTERRUPTED],
        usage=Usage(),
        seed=message.seed or 0,
    )
