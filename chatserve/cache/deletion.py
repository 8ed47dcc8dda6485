"""Forgetting what a deleted conversation, or the draft of a message, alone was using.

From its end up to the first block that is public, pinned, part of another path, or worth more than what is deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from chatserve.cache import search
from chatserve.cache.evictor import HINTED, PREEMPTED, PROBATION, PROTECTED

if TYPE_CHECKING:
    from collections.abc import Container

    from chatserve.cache.block_tree import BlockTree
    from chatserve.cache.pager import Pager
    from chatserve.types import Scope

_ALL: Final = (PREEMPTED, PROBATION, PROTECTED, HINTED)


def forget_path(tree: BlockTree, pager: Pager, tokens: bytes, scope: Scope, num_kept_blocks: int) -> None:
    """Forget the path that packed `tokens` spell, but its first blocks."""
    # Again while there is something: the end of the path may stand there twice, shorter and longer.
    while _forget(tree, pager, tokens, scope, num_kept_blocks, _ALL):
        pass


def forget_draft(tree: BlockTree, pager: Pager, tokens: bytes, scope: Scope, num_kept_blocks: int) -> None:
    """Forget what of that path was computed for a draft alone."""
    _forget(tree, pager, tokens, scope, num_kept_blocks, (HINTED,))


def _forget(
    tree: BlockTree, pager: Pager, tokens: bytes, scope: Scope, num_kept_blocks: int, standings: Container[int]
) -> int:
    """How many nodes that freed."""
    num_freed = 0
    for path in reversed(search.paths(tree, tokens, scope, with_unread=True)):
        whole_tail = path.fork is not None and path.fork.num_tokens == path.fork_tokens
        nodes = [*path.nodes, path.fork] if path.fork is not None and whole_tail else path.nodes
        for node in reversed(nodes[num_kept_blocks:]):
            if node.is_public or node.num_pins or node.children or not tree.is_attached(node):
                break
            if node.standing not in standings:
                break
            pager.forget(node)
            num_freed += 1
    return num_freed
