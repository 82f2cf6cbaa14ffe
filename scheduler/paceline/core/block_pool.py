"""The KV blocks of one device: who owns which, and which are free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from paceline.core.prefix_cache import PrefixCache


class BlockPool:
    """Hands out block ids and takes them back.

    free + owned = total, at any moment. A block's reference count is the number of block tables that hold it; it is
    free exactly when the count is 0. Free blocks are handed out in one order: first those that hold nothing of use, the
    newest in front, then those that the cache knows, the oldest in front. So the same calls give the same ids.

    Args:
        cache: is told of every block that is handed out, for it will be overwritten.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._cache = cache
        self._free = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` free blocks, each with one reference. The caller has checked `num_free`."""
        assert count <= self.num_free, (count, self.num_free)
        blocks = tuple([self._free.popitem(last=False)[0] for _ in range(count)])
        for block in blocks:
            self.ref_counts[block] = 1
            self._cache.forget(block)
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block; a free one keeps what it holds."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._free[block]
            self.ref_counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one reference of each block, the last of a table first: later blocks are the less likely to be
        reused.
        """
        for block in reversed(blocks):
            assert self.ref_counts[block] > 0, f"block {block} released twice"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._cache:
                    self._free.move_to_end(block, last=False)

    def check_invariants(self) -> None:
        owned = {block for block, count in enumerate(self.ref_counts) if count > 0}
        assert not self._free.keys() & owned, f"free and owned: {self._free.keys() & owned}"
        assert len(self._free) + len(owned) == self.num_blocks, "free + owned != total"
