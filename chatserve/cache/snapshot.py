"""The format of a KV snapshot's manifest: which cached blocks a file holds, and of whom.

A snapshot is two files in one directory: the bytes of all blocks, one after the other, and a manifest that names that
file, spells the path of each block and has its checksum. Owns the manifest's bytes and what a right one is; knows no
files, no tree and no tensors. See docs/kv-snapshot.md.

A manifest is `MAGIC`, the BLAKE2b digest (32 bytes) of what follows, and a MessagePack body. A block's checksum is its
CRC-32: it finds every burst of up to 32 bits and all but one in four thousand million other faults, costs 0.25 s a
gigabyte where BLAKE2b costs 1.1 s (measured), and comes with Python where xxHash would be one more dependency.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from chatserve.cache.siblings import TOKEN_BYTES
from chatserve.types import PUBLIC, Scope

MAGIC: Final = b"ChatServe KV 1\r\n"
"""Ends in the format's version; the line end shows a copy that was taken for text."""
_DIGEST_BYTES: Final = 32
ROOT: Final = -1
"""`BlockRecord.parent` of a first block."""


class SnapshotError(Exception):
    """A snapshot cannot be used; the text says why, in words that go on after "because"."""


class BlockRecord(msgspec.Struct, frozen=True, array_like=True):
    """One block. Its bytes stand in the data file at its own index in the manifest times `block_bytes`."""

    parent: int
    """Index of the block before it on its path, which is less than its own, or `ROOT`."""
    scope: int
    """Index into the manifest's scopes."""
    is_protected: bool
    """Paths part below it."""
    token_ids: bytes
    """Packed, as `siblings.pack` does."""
    checksum: int
    """CRC-32 of the block's bytes."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks from the most recently used path to the least, parents before children."""

    identity: dict[str, str]
    """What the bytes depend on, by name: model, tokenizer, layout. All must be as they were."""
    block_size: int
    block_bytes: int
    data_file: str
    """Name of the file of blocks, in the same directory."""
    scopes: tuple[Scope, ...]
    blocks: tuple[BlockRecord, ...]

    def has(self, tokens: bytes, scope: Scope, num_kept_tokens: int = 0) -> bool:
        """Whether a block of this scope alone spells some of a packed sequence past its first tokens."""
        ends = {ROOT: 0}
        """Of the blocks that spell a beginning of the sequence: how many bytes that is."""
        for index, block in enumerate(self.blocks):
            start = ends.get(block.parent)
            if start is None or self.scopes[block.scope] not in (PUBLIC, scope):
                continue
            end = start + len(block.token_ids)
            common = tokens[start:end]
            if not common or not block.token_ids.startswith(common):
                continue
            if self.scopes[block.scope] == scope and start + len(common) > num_kept_tokens * TOKEN_BYTES:
                return True
            if common == block.token_ids:
                ends[index] = end
        return False


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest file's bytes."""
    body = msgspec.msgpack.encode(manifest)
    return MAGIC + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body


def decode_manifest(data: bytes) -> Manifest:
    """The inverse of `encode_manifest`, for a file that may be anything.

    Raises:
        SnapshotError: not a whole manifest of this version, or one that no cache can have written.
    """
    if not data.startswith(MAGIC):
        raise SnapshotError("its manifest is none, or of another version")
    start = len(MAGIC) + _DIGEST_BYTES
    body = data[start:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != data[len(MAGIC) : start]:
        raise SnapshotError("its manifest is damaged")
    try:
        manifest = msgspec.msgpack.decode(body, type=Manifest)
    except msgspec.DecodeError as error:
        raise SnapshotError(f"its manifest is of another kind: {error}") from error
    _check_blocks(manifest)
    return manifest


def _check_blocks(manifest: Manifest) -> None:
    """A digest that is right says who wrote it as little as any other: what is inserted must make a tree."""
    full = manifest.block_size * TOKEN_BYTES
    seen: set[tuple[int, int, bytes]] = set()
    for index, block in enumerate(manifest.blocks):
        parent = None if block.parent == ROOT else block.parent
        size = len(block.token_ids)
        is_whole = 0 < size <= full and size % TOKEN_BYTES == 0 and 0 <= block.scope < len(manifest.scopes)
        if not is_whole or (parent is not None and not 0 <= parent < index):
            raise SnapshotError(f"block {index} of its manifest is none")
        scope = manifest.scopes[block.scope]
        above = PUBLIC if parent is None else manifest.scopes[manifest.blocks[parent].scope]
        if above not in (PUBLIC, scope) or (parent is not None and len(manifest.blocks[parent].token_ids) < full):
            raise SnapshotError(f"block {index} of its manifest cannot follow block {block.parent}")
        key = block.parent, block.scope, block.token_ids
        if key in seen:
            raise SnapshotError(f"block {index} of its manifest stands there twice")
        seen.add(key)
    if len(set(manifest.scopes)) != len(manifest.scopes):
        raise SnapshotError("a scope of its manifest stands there twice")
