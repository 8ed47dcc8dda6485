"""A change of a session's tree, from its one atomic commit to all that follows from it.

Owns the order: stored, then applied, answered and published, then what is to be generated is started. Which change it
is, and whether it may be made, is for the requests to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from chatserve.chat.events import AnyEvent, BranchSelected, MessageAdded, SessionUpdated
from chatserve.chat.live_session import LiveSession
from chatserve.chat.quotas import Quota, quota_of
from chatserve.chat.sessions import with_tree
from chatserve.chat.store import MessageRecord, Transaction
from chatserve.chat.tree import USER, TreeChange
from chatserve.types import MessageId

if TYPE_CHECKING:
    from chatserve.chat.core import Core
    from chatserve.chat.requests import Request

MAX_TITLE_CHARS = 60


class TreeCommits:
    """Of sessions whose lock is held."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def turn(
        self,
        request: Request,
        live: LiveSession,
        new: tuple[MessageRecord, ...],
        encoded: dict[MessageId, MessageRecord],
        fields: dict[str, Any],
    ) -> None:
        """New messages, of which the last is to be generated, with what else of their path was `encoded`."""
        change = live.tree.append(*new)
        # A fork on the path may get both its ids and its choice in one change.
        puts = {r.message: r for r in (*encoded.values(), *change.puts)}
        for message in puts.keys() & encoded.keys():
            ids = encoded[message]
            puts[message] = msgspec.structs.replace(puts[message], token_ids=ids.token_ids, encoded_for=ids.encoded_for)
        change = msgspec.structs.replace(change, puts=tuple(puts.values()))
        events: list[AnyEvent] = [
            MessageAdded(
                session=live.session,
                message=m.message,
                parent=m.parent,
                role=m.role,
                text=m.text,
                status=m.status,
            )
            for m in new
        ]
        title = _title_of(new[0].text) if new[0].role == USER and not live.record.title else ""
        await self.change(request, live, change, events, fields, start=new[-1], title=title)

    async def change(
        self,
        request: Request,
        live: LiveSession,
        change: TreeChange,
        events: list[AnyEvent],
        fields: dict[str, Any],
        *,
        start: MessageRecord | None = None,
        title: str = "",
    ) -> None:
        """Store a change of the tree, then apply it, answer, publish, and start what is to be generated."""
        core = self._core
        if change.leaf != live.tree.leaf:
            events.append(BranchSelected(session=live.session, leaf=change.leaf))
        now = live.record.updated_at if start is None else core.clock()
        record = with_tree(live.record, leaf=change.leaf, root_child=change.root_child, now=now)
        if title:
            record = msgspec.structs.replace(record, title=title, version=record.version + 1)
            events.append(SessionUpdated(session=live.session, title=title))
        old_ids = {m: live.tree.get(m).token_ids for r in change.puts if (m := r.message) in live.tree}

        def apply() -> None:
            if any(old_ids.get(r.message) and old_ids[r.message] != r.token_ids for r in change.puts):
                live.paths.clear()  # another system prompt: the engine's paths begin otherwise
            live.tree.apply(change)
            live.record = record
            request.answer(fields)
            if start is not None:
                core.generations.start(live, live.tree.get(start.message))

        transaction = Transaction(
            user=live.user,
            session=live.session,
            record=record,
            puts=change.puts,
            deletes=change.deletes,
            events=tuple(events),
            idempotency=request.idempotency(fields),
            quota=Quota() if start is None else quota_of(core.limits, starts=True),
            announcement=b"" if start is None else core.announce(live.session, title or None),
        )
        earlier = await core.sessions.commit(live, transaction, apply)
        if earlier is not None:
            request.answer_earlier(earlier)
        elif start is not None:
            core.publish_changed(live.user, live.session, title or None, deleted=False)


def _title_of(text: str) -> str:
    """The first line of a conversation's first message, cut at a word."""
    line = " ".join(next((line for line in text.splitlines() if line.strip()), "").split())
    if len(line) <= MAX_TITLE_CHARS:
        return line
    cut = line[: MAX_TITLE_CHARS - 1]
    return (cut.rpartition(" ")[0] if " " in cut[MAX_TITLE_CHARS // 2 :] else cut) + "…"
