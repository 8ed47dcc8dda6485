"""Which cached blocks go into a snapshot, in which order, and how the manifest names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatserve.cache.evictor import HINTED, PROTECTED
from chatserve.cache.siblings import TAG_BYTES
from chatserve.cache.snapshot import ROOT, BlockRecord, Manifest

if TYPE_CHECKING:
    from chatserve.cache.block_tree import BlockTree
    from chatserve.cache.node import Node
    from chatserve.types import Scope


class ManifestBuilder:
    """Collects the blocks that have been written. Reads the tree, which must not change meanwhile."""

    def __init__(self, tree: BlockTree) -> None:
        self._tree = tree
        self._indices: dict[Node, int] = {tree.root: ROOT}
        self._scopes: dict[Scope, int] = {}
        self._blocks: list[BlockRecord] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def candidates(self) -> list[Node]:
        """Every idle node but those of drafts, most recently used first, and parents first: a path is used whole."""
        idle = [node for node in self._tree.walk() if not node.num_pins and node.standing != HINTED]
        return sorted(idle, key=lambda node: -node.last_used)  # stable, and the walk comes to parents first

    def place_in_snapshot(self, node: Node) -> tuple[int, int] | None:
        """Where the node's bytes are if it was restored and not read yet: the block's index and checksum."""
        return self._tree.unread.get(node)

    def may_add(self, node: Node) -> bool:
        """Whether all that leads to the node has been added."""
        return node.parent in self._indices

    def add(self, node: Node, checksum: int) -> None:
        """The node's bytes stand in the data file behind those added before it."""
        assert node.parent is not None
        scope = self._tree.tags.scope_of(node.tag)
        self._blocks.append(
            BlockRecord(
                parent=self._indices[node.parent],
                scope=self._scopes.setdefault(scope, len(self._scopes)),
                is_protected=node.standing == PROTECTED,
                token_ids=node.key[TAG_BYTES:],
                checksum=checksum,
            )
        )
        self._indices[node] = len(self._indices) - 1

    def manifest(self, *, identity: dict[str, str], block_bytes: int, data_file: str) -> Manifest:
        """What has been added."""
        return Manifest(
            identity=identity,
            block_size=self._tree.block_size,
            block_bytes=block_bytes,
            data_file=data_file,
            scopes=tuple(self._scopes),
            blocks=tuple(self._blocks),
        )
