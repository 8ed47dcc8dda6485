"""The longest cached beginning of a sequence.

Reads the tree and changes nothing. Who may find what is decided here and nowhere else: a search follows public nodes
and those of one scope, and none whose bytes have still to be read from a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatserve.cache.node import Node
from chatserve.cache.scopes import PUBLIC_TAG
from chatserve.cache.siblings import TOKEN_BYTES, num_common

if TYPE_CHECKING:
    from collections.abc import Container

    from chatserve.cache.block_tree import BlockTree
    from chatserve.types import Scope


@dataclass(frozen=True, slots=True)
class Path:
    """The longest cached beginning of a sequence: full nodes from the root, then `fork_tokens` tokens of `fork`."""

    nodes: tuple[Node, ...]
    fork: Node | None
    fork_tokens: int
    extends_fork: bool
    """All tokens of `fork` match and it may be written on, so that nothing has to be copied."""


def find(tree: BlockTree, tokens: bytes, scope: Scope) -> Path:
    """The longest way to spell a beginning of packed `tokens`; among equals the more public."""
    return max(paths(tree, tokens, scope), key=lambda path: (len(path.nodes), path.fork_tokens))


def paths(tree: BlockTree, tokens: bytes, scope: Scope, *, with_unread: bool = False) -> list[Path]:
    """Every way to spell a beginning of packed `tokens` with public nodes and those of `scope`.

    A public node may have children of both kinds, a private one only of its own. So the ways are the public trunk
    and, from each of its nodes, the private branch; as a rule there is one, at the end of what is shared.
    """
    size = tree.block_size * TOKEN_BYTES
    hidden: Container[Node] = () if with_unread else tree.unread
    tags = [PUBLIC_TAG]
    trunk = _follow(tree.root, tokens, 0, PUBLIC_TAG, size, hidden)
    found = [trunk]
    own_tag = tree.tags.find(scope)
    if own_tag is not None:
        tags.append(own_tag)
        for depth in range(len(trunk), -1, -1):
            branch = _follow(trunk[depth - 1] if depth else tree.root, tokens, depth, own_tag, size, hidden)
            if branch:
                found.append(trunk[:depth] + branch)
    return [_fork(tree.root, nodes, tokens, tags, size, hidden) for nodes in found]


def _follow(node: Node, tokens: bytes, depth: int, tag: bytes, size: int, hidden: Container[Node]) -> list[Node]:
    """Full nodes below `node`, which is `depth` blocks deep, that spell what follows."""
    found: list[Node] = []
    for start in range(depth * size, len(tokens) - size + 1, size):
        child = node.find_child(tag + tokens[start : start + size])
        if child is None or child in hidden:
            break
        found.append(child)
        node = child
    return found


def _fork(root: Node, nodes: list[Node], tokens: bytes, tags: list[bytes], size: int, hidden: Container[Node]) -> Path:
    """The path over `nodes`, and the child at their end that shares most of the tokens that follow."""
    node = nodes[-1] if nodes else root
    rest = tokens[len(nodes) * size : (len(nodes) + 1) * size]
    best: tuple[int, bool, bool] = (0, False, False)
    fork: Node | None = None
    for tag in tags if node.children and rest else ():
        assert node.children is not None
        for near in node.children.neighbours(tag + rest):
            num_tokens = num_common(near.key, tag + rest) - 1
            if num_tokens <= 0:
                continue
            # Of several that share as many tokens, the one that ends right there can be extended without a copy.
            whole = node.children.find(tag + rest[: num_tokens * TOKEN_BYTES])
            for candidate in (near, whole):
                if candidate is None or candidate in hidden:
                    continue
                rank = num_tokens, _may_extend(candidate, num_tokens), candidate.block_id is not None
                if rank > best:
                    best, fork = rank, candidate
    return Path(tuple(nodes), fork, best[0], best[1])


def _may_extend(node: Node, num_tokens: int) -> bool:
    return node.num_tokens == num_tokens and not node.is_public and not node.has_writer
