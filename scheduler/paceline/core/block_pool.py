"""The KV blocks of one device: who owns which, and which are free."""

from __future__ import annotations

from collections import deque


class BlockPool:
    """Hands out block ids and takes them back.

    free + owned = total, at any moment. A block's reference count is the number of block tables that hold it; it is
    free exactly when the count is 0. Blocks come back in the order they were released, so that the same calls give the
    same ids.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` free blocks, each with one reference. The caller has checked `num_free`."""
        assert count <= self.num_free, (count, self.num_free)
        blocks = tuple(self._free.popleft() for _ in range(count))
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def hold(self, blocks: list[int]) -> None:
        """Add one reference to each block, all of them owned."""
        for block in blocks:
            assert self.ref_counts[block] > 0, f"block {block} is free"
            self.ref_counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one reference of each block, the last of a table first: later blocks are the less likely to be
        reused.
        """
        for block in reversed(blocks):
            assert self.ref_counts[block] > 0, f"block {block} released twice"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free.append(block)

    def check_invariants(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        owned = {block for block, count in enumerate(self.ref_counts) if count > 0}
        assert not free & owned, f"free and owned: {free & owned}"
        assert len(free) + len(owned) == self.num_blocks, "free + owned != total"
