"""One node of the block tree: a block's worth of tokens, where their KV stands, and who needs it to stay there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatserve.cache.evictor import PROBATION
from chatserve.cache.scopes import PUBLIC_TAG
from chatserve.cache.siblings import TAG_BYTES, TOKEN_BYTES

if TYPE_CHECKING:
    from chatserve.cache.siblings import Siblings
    from chatserve.types import BlockId, HostBlockId


class Node:
    """Written by the tree and its `retention` alone, except `has_writer`, which is for whoever leases it to set."""

    __slots__ = (
        "block_id",
        "children",
        "had_child",
        "has_writer",
        "host_block_id",
        "key",
        "last_used",
        "num_device_children",
        "num_pins",
        "parent",
        "standing",
    )

    def __init__(self, parent: Node | None, key: bytes) -> None:
        self.parent = parent
        self.key = key
        self.children: Siblings | None = None
        self.block_id: BlockId | None = None
        self.host_block_id: HostBlockId | None = None
        self.num_pins = 0
        self.num_device_children = 0
        self.last_used = 0
        self.standing = PROBATION
        self.had_child = False
        self.has_writer = False

    @property
    def tag(self) -> bytes:
        return self.key[:TAG_BYTES]

    @property
    def num_tokens(self) -> int:
        return (len(self.key) - TAG_BYTES) // TOKEN_BYTES

    @property
    def is_public(self) -> bool:
        return self.key.startswith(PUBLIC_TAG)

    def find_child(self, key: bytes) -> Node | None:
        return None if self.children is None else self.children.find(key)
