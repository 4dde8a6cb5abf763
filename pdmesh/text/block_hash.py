"""Names KV blocks: a hash chained over the tokens up to a block's end.

Two blocks have the same name iff they hold the same tokens after the same tokens under the same root, and the root carries
everything else that decides a block's contents or which requests may share it: identity of the model, tenant, salt. BLAKE2b with
128 bits is fast and collision-resistant.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import unpack
from typing import TypeVar

Block = TypeVar("Block")
Name = TypeVar("Name")
HASH_BYTES = 16
SHORT_NAME_BYTES = 8
_TOKEN_BYTES = 4
_BLOCK = blake2b(digest_size=HASH_BYTES, person=b"pdmesh.block")  # copied: that takes less than making one
_LEAD = bytes((HASH_BYTES,))


@lru_cache(maxsize=1024, typed=True)  # called for every request, with the same few identities and tenants
def cache_root(*fields: str | int, salt: str) -> bytes:
    """Return the root of a chain, 16 bytes, from the fields of an identity (in a fixed order) and a tenant's salt."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"pdmesh.root")
    for field in (*fields, salt):
        encoded = f"{type(field).__name__}:{field}".encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the name (16 bytes) of the block with `token_ids` (each in [0, 2**32)) after the block or root `parent`."""
    return _chain(parent, _pack(token_ids))


def hash_prompt(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the names of all full blocks of a prompt, in order."""
    packed = _pack(token_ids)
    stride = block_size * _TOKEN_BYTES
    hashes: list[bytes] = []
    fresh, lead = _BLOCK.copy, bytes((len(root),)) + root
    for start in range(0, len(packed) - stride + 1, stride):  # as _chain: prompts have thousands of blocks
        digest = fresh()
        digest.update(lead + packed[start : start + stride])
        name = digest.digest()
        hashes.append(name)
        lead = _LEAD + name
    return hashes


def short_name(block_hash: bytes) -> int:
    """Return the first eight bytes, big-endian: the name of a block in indexes and on the wire."""
    return int.from_bytes(block_hash[:SHORT_NAME_BYTES], "big")


def short_names(block_hashes: Sequence[bytes]) -> list[int]:
    """Return `short_name` of each, in a fourth of the time."""
    return list(unpack(f">{2 * len(block_hashes)}Q", b"".join(block_hashes))[::2])


def in_chains(
    blocks: Iterable[Block], name: Callable[[Block], Name], parent: Callable[[Block], Name | None]
) -> Iterator[list[Block]]:
    """Yield blocks in chains that follow each other in a prompt, each chain behind that of its parent if that is among them."""
    by_name = {name(block): block for block in blocks}
    children: dict[Name, list[Block]] = {}
    firsts: list[Block] = []
    for block in by_name.values():
        before = parent(block)
        if before in by_name:
            children.setdefault(before, []).append(block)
        else:
            firsts.append(block)
    waiting = firsts[::-1]
    while waiting:
        chain = [waiting.pop()]
        while following := children.get(name(chain[-1])):
            waiting.extend(following[:0:-1])
            chain.append(following[0])
        yield chain


def _chain(parent: bytes, packed: bytes) -> bytes:
    # The length distinguishes an empty root from a parent: no two different pairs make the same input.
    digest = _BLOCK.copy()
    digest.update(bytes((len(parent),)) + parent + packed)
    return digest.digest()


def _pack(token_ids: Sequence[int]) -> bytes:
    """Pack as little-endian uint32."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
