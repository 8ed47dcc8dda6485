"""The writing of generated text to Redis: what a step produced, in as few and as small commands as its sessions allow.

A session's text grows at its tail (lua/chunk.lua). While this process alone appends to a session, and to one message of
it, extend.lua needs no more than the tail; whatever else may have happened is for append.lua to see to. Which of them
is asked is a guess here, and a wrong one costs another round trip.
"""

from __future__ import annotations

import itertools
import logging
import struct
from typing import TYPE_CHECKING, Final

from chatserve.chat.redis_chunks import pack_deltas, pack_name, raw
from chatserve.chat.redis_layout import Keys
from chatserve.chat.redis_link import Call, RedisLink, Script, raise_error
from chatserve.chat.store import Delta

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chatserve.types import MessageId, SessionId, UserId

log = logging.getLogger(__name__)

DELTAS_A_CALL: Final = 64
"""The server does nothing else during a call: these take it well under a millisecond."""
MAX_TAIL_DELTAS: Final = 64
MAX_TAIL_BYTES: Final = 4096
"""A tail is read as a whole for each delta: past this it is moved to the log."""
MAX_REMEMBERED: Final = 4096
UNKNOWN: Final = -1


class _Tail:
    """What this process knows of a session's tail, and the names that a delta of it takes."""

    __slots__ = ("attempt", "channel", "fence", "keys", "message", "name", "next_token", "num_bytes", "num_deltas")

    def __init__(self, delta: Delta) -> None:
        keys = Keys(delta.user)
        self.keys = keys.session(delta.session, "session", "generating", "log", "tail")
        self.channel = raw(keys.news(delta.session))
        self.message: MessageId = delta.message
        self.attempt, self.fence = delta.attempt, delta.fence
        self.name = raw(pack_name(delta.message, delta.attempt, delta.fence))
        self.next_token = UNKNOWN
        """The token after its last delta."""
        self.num_deltas = 0
        self.num_bytes = 0

    def is_of(self, delta: Delta) -> bool:
        return delta.message == self.message and delta.attempt == self.attempt and delta.fence == self.fence

    def takes(self, delta: Delta) -> bool:
        """Whether it is likely that the delta only makes the tail longer."""
        has_room = self.num_deltas < MAX_TAIL_DELTAS and self.num_bytes < MAX_TAIL_BYTES
        return self.next_token == delta.first_token and has_room and len(delta.token_ids) > 0

    def told(self, delta: Delta, seq: int, *, is_new: bool) -> None:
        """What came of a delta: its event's number, or where that is not above 0, that it was refused. `is_new`: if it
        was not, the tail begins with it.
        """
        if seq < 0:
            # The store went back, or it is a bug of ours; but one message's: the other deltas of the step are written.
            log.error("message %s: a delta does not follow what the store has", delta.message)
        if is_new:
            self.num_deltas = self.num_bytes = 0
        self.num_deltas += 1
        self.num_bytes += len(delta.text) + 4 * len(delta.token_ids)
        # One without tokens leaves no tail.
        self.next_token = delta.first_token + len(delta.token_ids) if seq > 0 and delta.token_ids else UNKNOWN


class Appender:
    """Implements `Store.append`."""

    def __init__(self, link: RedisLink, event_history: int) -> None:
        self._link = link
        self._event_history = event_history
        self._append, self._extend = (Script.read(name, "chunk") for name in ("append", "extend"))
        self._tails: dict[tuple[UserId, SessionId], _Tail] = {}

    async def append(self, deltas: Sequence[Delta]) -> list[int | None]:
        """See `Store.append`."""
        tails = [self._tail_of(delta) for delta in deltas]
        # Deltas of one session must stay in their order, which two scripts do not promise.
        is_each_alone = len({(delta.user, delta.session) for delta in deltas}) == len(deltas)
        extending = {i for i, delta in enumerate(deltas) if is_each_alone and tails[i].takes(delta)}
        parts = [
            (script, part)
            for script, chosen in ((self._extend, extending), (self._append, set(range(len(deltas))) - extending))
            for part in self._parts(deltas, sorted(chosen))
        ]
        seqs = dict.fromkeys(range(len(deltas)), 0)
        await self._run(parts, deltas, tails, seqs)
        if wrong := sorted(i for i in extending if not seqs[i]):
            extending.difference_update(wrong)
            await self._run([(self._append, part) for part in self._parts(deltas, wrong)], deltas, tails, seqs)
        for i, delta in enumerate(deltas):
            tails[i].told(delta, seqs[i], is_new=i not in extending)
        return [seqs[i] if seqs[i] > 0 else None for i in range(len(deltas))]

    def _tail_of(self, delta: Delta) -> _Tail:
        place = delta.user, delta.session
        tail = self._tails.get(place)
        if tail is None or not tail.is_of(delta):
            if len(self._tails) >= MAX_REMEMBERED:
                self._tails.clear()  # of what still runs the next delta takes the longer way, once
            tail = self._tails[place] = _Tail(delta)
        return tail

    def _parts(self, deltas: Sequence[Delta], which: Sequence[int]) -> Iterator[Sequence[int]]:
        """Some of the deltas in order, as many together as one call may have."""
        groups = [which]
        if self._link.is_cluster:
            groups = [list(group) for _, group in itertools.groupby(which, key=lambda i: deltas[i].user)]
        for group in groups:
            for start in range(0, len(group), DELTAS_A_CALL):
                yield group[start : start + DELTAS_A_CALL]

    async def _run(
        self,
        parts: Sequence[tuple[Script, Sequence[int]]],
        deltas: Sequence[Delta],
        tails: Sequence[_Tail],
        seqs: dict[int, int],
    ) -> None:
        """Send parts of the deltas, each to its script, and note what it answers."""
        calls: list[tuple[Script, Call]] = []
        for script, part in parts:
            packed = pack_deltas([(deltas[i], tails[i].name, tails[i].channel) for i in part])
            if script is self._extend:
                call = Call(tuple(tails[i].keys[-1] for i in part), (packed,))
            else:
                names = itertools.chain.from_iterable(tails[i].keys for i in part)
                call = Call(tuple(names), (self._event_history, packed))
            calls.append((script, call))
        replies = await self._link.scripts("append text", calls)
        for reply in replies:
            raise_error(reply)
        for (_, part), reply in zip(parts, replies, strict=True):
            seqs.update(zip(part, struct.unpack(f"<{len(part)}q", reply), strict=True))
