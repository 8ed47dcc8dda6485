"""KV that outlives the process: written to a directory when the engine ends in order, read back by the next one.

Blocks come back one by one: at once those that a request waits for, the others while the engine has nothing to do.
Whatever is wrong with a snapshot or its disk costs a line in the log, and computing again what was in it; never a
start, an end, or a text. Owns what is said and how long it may take; the files are `cache.snapshot_files`' business.
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import TYPE_CHECKING, Final, Protocol

from chatserve.cache.siblings import pack
from chatserve.cache.snapshot import Manifest, SnapshotError
from chatserve.cache.snapshot_files import SnapshotReader, SnapshotWriter, read_manifest, remove_snapshot
from chatserve.config import KV_SNAPSHOT_S
from chatserve.types import PUBLIC, Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from chatserve.cache.kv_manager import KVManager
    from chatserve.cache.manifest_builder import ManifestBuilder
    from chatserve.cache.node import Node
    from chatserve.cache.unread import UnreadBlock
    from chatserve.types import BlockId, HostBlockId, UserId

_log: Final = logging.getLogger(__name__)

_MANIFEST_S: Final = 1.0
"""Of the time to save, what is kept for the manifest: 130,000 blocks take 0.3 s."""
_BATCH_BLOCKS: Final = 32
READ_S: Final = 0.01
"""How long reading may keep the others waiting, a step."""


class BlockBytes(Protocol):
    """The bytes of a runner's blocks, between steps."""

    @property
    def block_bytes(self) -> int: ...

    def device_blocks(self, block_ids: Sequence[BlockId]) -> Sequence[memoryview]:
        """To read, until the next call. At most 32 blocks at once."""

    def host_block(self, host_block_id: HostBlockId) -> memoryview:
        """To read and to write. What steps had to copy has been copied once `settle` has returned."""

    def settle(self) -> None:
        """Wait for the copies of all steps so far."""


class Snapshot:
    """The snapshot of one engine: `restore` once, `read` now and then, `save` once, when nothing runs any more."""

    def __init__(
        self,
        kv: KVManager,
        source: BlockBytes,
        directory: Path,
        identity: dict[str, str],
        *,
        max_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`identity` names all that the bytes depend on; a snapshot of another identity is not used."""
        self._kv = kv
        self._source = source
        self._directory = directory
        self._identity = identity
        self._max_blocks = max_blocks
        self._clock = clock
        self._reader: SnapshotReader | None = None
        self._users_on_disk: frozenset[Scope] = frozenset()
        """Whose blocks the directory has, used or not, beside what all share."""

    # --- back ---------------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Take what there is into the empty cache, without its bytes."""
        try:
            reader = SnapshotReader(self._directory)
            self._users_on_disk = frozenset(reader.manifest.scopes) - {PUBLIC}
            try:
                self._check(reader.manifest)
            except SnapshotError:
                reader.close()
                raise
        except FileNotFoundError:
            return
        except SnapshotError as error:
            _log.warning("the KV snapshot in %s is not used, because %s", self._directory, error)
            return
        num_blocks = self._kv.unread.restore(reader.manifest)
        self._reader = reader
        total, scopes = len(reader.manifest.blocks), len(reader.manifest.scopes)
        _log.info(
            "the KV snapshot in %s has %d blocks of %d scopes; the host cache has room for %d of them",
            *(self._directory, total, scopes, num_blocks),
        )

    def _check(self, manifest: Manifest) -> None:
        theirs, ours = manifest.identity, self._identity
        other = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        if other:
            raise SnapshotError(f"it was made with another {', another '.join(other)}")
        if (manifest.block_size, manifest.block_bytes) != (self._kv.block_size, self._source.block_bytes):
            raise SnapshotError(f"its blocks are of {manifest.block_size} tokens and {manifest.block_bytes} bytes")

    @property
    def has_unread(self) -> bool:
        """Whether `read` has something to do."""
        return self._reader is not None and len(self._kv.unread) > 0

    def read(self, *, wanted_only: bool, budget_s: float = READ_S) -> None:
        """Read blocks for about `budget_s`, at least one if there is one: what is wanted, then the rest."""
        if self._reader is None:
            return
        unread, until = self._kv.unread, self._clock() + budget_s
        while True:
            block = unread.next_wanted()
            if block is None and not wanted_only:
                block = unread.next_cold()
            if block is None:
                break
            self._read(self._reader, block)
            if self._clock() >= until:
                break
        if not unread:
            self._reader.close()
            self._reader = None

    def _read(self, reader: SnapshotReader, block: UnreadBlock) -> None:
        if reader.read(block.index, block.checksum, self._source.host_block(block.host_block_id)):
            self._kv.unread.read(block)
            return
        if not self._kv.unread.num_damaged:
            _log.warning(
                "block %d of the KV snapshot in %s is damaged: it, what follows it and others like it are not used",
                *(block.index, self._directory),
            )
        self._kv.unread.damaged(block)

    # --- off the disk -------------------------------------------------------------------------------------------------

    def deleted(self, sequences: Sequence[Sequence[int]], user: UserId, num_kept_tokens: int) -> None:
        """Conversations of a user are gone, all but their first tokens: take the snapshot from the disk if it has any
        of that. What is still to be read from it can be.
        """
        if Scope(user) not in self._users_on_disk or not sequences:
            return
        try:
            manifest = read_manifest(self._directory)
            if not any(manifest.has(pack(ids), Scope(user), num_kept_tokens) for ids in sequences):
                return
            remove_snapshot(self._directory, manifest)
        except FileNotFoundError:  # somebody removed it
            self._users_on_disk = frozenset()
            return
        except (OSError, SnapshotError) as error:
            _log.warning("the KV snapshot in %s may have what was deleted: %s", self._directory, error)
            return
        self._users_on_disk = frozenset()
        _log.info("the KV snapshot in %s was removed, because a conversation that it had is deleted", self._directory)

    # --- out ----------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write what is cached, most recently used first, as much as the limit, the disk and the time allow."""
        started = self._clock()
        try:
            writer = SnapshotWriter(self._directory)
        except OSError as error:
            _log.warning("the KV snapshot cannot be written to %s: %s", self._directory, error.strerror or error)
            return
        try:
            self._save(writer, started)
        except OSError as error:
            _log.warning("the KV snapshot was not written to %s: %s", self._directory, error.strerror or error)
            writer.discard()
        finally:
            if self._reader is not None:
                self._reader.close()
                self._reader = None

    def _save(self, writer: SnapshotWriter, started: float) -> None:
        block_bytes, builder = self._source.block_bytes, self._kv.manifest_builder()
        nodes = builder.candidates()
        room = min(self._max_blocks, writer.room_bytes() // block_bytes)
        until = started + KV_SNAPSHOT_S - _MANIFEST_S
        self._source.settle()
        kept = iter(nodes[:room])
        while (batch := list(itertools.islice(kept, _BATCH_BLOCKS))) and self._clock() < until:
            self._write(batch, writer, builder)
        if not len(builder):
            writer.discard()
            if not nodes:
                writer.clear()  # what was cached has been deleted, and may not stay on the disk either
            elif self._max_blocks:
                _log.warning("the disk of %s has no room for a KV snapshot", self._directory)
            return
        writer.commit(builder.manifest(identity=self._identity, block_bytes=block_bytes, data_file=writer.data_file))
        _log.info(
            "saved %d of %d cached blocks, %d MiB, to %s in %.1f s",
            *(len(builder), len(nodes), len(builder) * block_bytes >> 20, self._directory, self._clock() - started),
        )

    def _write(self, batch: Sequence[Node], writer: SnapshotWriter, builder: ManifestBuilder) -> None:
        on_device = [node for node in batch if node.block_id is not None and node.host_block_id is None]
        block_ids = [node.block_id for node in on_device if node.block_id is not None]
        views = dict(zip(on_device, self._source.device_blocks(block_ids), strict=True))
        for node in batch:
            if not builder.may_add(node):
                continue
            view = views.get(node) or self._host_view(node, builder)
            if view is not None:
                builder.add(node, writer.append(view))

    def _host_view(self, node: Node, builder: ManifestBuilder) -> memoryview | None:
        """A node's host block, filled first if that has not been done. None: its bytes are lost."""
        assert node.host_block_id is not None
        view = self._source.host_block(node.host_block_id)
        place = builder.place_in_snapshot(node)
        if place is None:
            return view
        return view if self._reader is not None and self._reader.read(*place, view) else None
