"""Which blocks hold which tokens, so that nobody computes a prefix that somebody has computed.

A block is known by a key: a digest of its own tokens and of the key of the block before it, so that equal keys mean
equal tokens from the very first on. The first key is chained to a salt, which keeps tenants apart: without the salt
nobody can find a block, nor learn from a fast answer that it is there. (The scheme is that of vLLM's automatic prefix
caching; the digest is BLAKE2b, 128 bits, since a collision would show one prompt's text to another.)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

KEY_BYTES: Final = 16


def first_key(salt: str) -> bytes:
    """What the key of the first block is chained to."""
    return blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"paceline salt").digest()


def next_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a block of these tokens behind the block with the key `parent`."""
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=KEY_BYTES).digest()


class PrefixCache:
    """Keys of blocks whose tokens are all computed and committed, owned or free.

    A block that is free keeps its key until the pool hands it out again. Of several blocks with the same content one is
    known: the first, or the first with draft KV, since one gap in it would make the draft model read all that follows.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._drafted: set[int] = set()  # whose draft KV is computed too

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest prefix that is known."""
        blocks = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_drafted(self, blocks: Iterable[int]) -> int:
        """Leading blocks whose draft KV is computed."""
        count = 0
        for block in blocks:
            if block not in self._drafted:
                break
            count += 1
        return count

    def insert(self, key: bytes, block: int) -> None:
        """The block holds what the key says, and will not change while it is known."""
        if self._blocks.setdefault(key, block) == block:
            self._keys[block] = key

    def mark_drafted(self, key: bytes, block: int) -> None:
        """The block, which holds what the key says, has draft KV too. It takes the place of one without."""
        known = self._blocks.get(key)
        if known is not None and known != block:
            if known in self._drafted:
                return
            self.forget(known)
        self._blocks[key], self._keys[block] = block, key
        self._drafted.add(block)

    def forget(self, block: int) -> None:
        """It is about to be overwritten. Not a known block: no effect."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]
            self._drafted.discard(block)

    def check_invariants(self) -> None:
        assert {block: key for key, block in self._blocks.items()} == self._keys, "one key for each block"
        assert self._drafted <= self._keys.keys(), "drafted blocks are known"
