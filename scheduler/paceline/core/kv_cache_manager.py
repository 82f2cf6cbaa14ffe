"""Block tables: which blocks hold which request's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.core.block_pool import BlockPool
from paceline.core.prefix_cache import PrefixCache


class KVCacheManager:
    """Owns the pool, the cache of prefixes and one block table per running request.

    Position i of a request lives in slot `table[i // block_size] * block_size + i % block_size`. Tables only grow, and
    go back as a whole: slots of rejected drafts stay with their request, whose next tokens overwrite them.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cache = PrefixCache()
        self.pool = BlockPool(num_blocks, self.cache)
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """How many of these are free."""
        return sum(self.pool.ref_counts[block] == 0 for block in blocks)

    def capacity(self, request_id: int) -> int:
        """Token positions that the request's blocks hold."""
        return len(self._tables.get(request_id, ())) * self.block_size

    def num_missing_blocks(self, request_id: int, num_tokens: int) -> int:
        """Blocks to add before the request holds `num_tokens` positions."""
        return max(0, -(-(num_tokens - self.capacity(request_id)) // self.block_size))

    def grow(self, request_id: int, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for `num_tokens` positions; the new block ids, or None, with nothing changed, if too few are
        free.
        """
        table = self._tables.get(request_id)
        if table is not None and num_tokens <= len(table) * self.block_size:
            return ()  # almost always
        missing = self.num_missing_blocks(request_id, num_tokens)
        if missing > self.num_free_blocks:
            return None
        blocks = self.pool.allocate(missing)
        self._tables.setdefault(request_id, []).extend(blocks)
        return blocks

    def share(self, request_id: int, blocks: Sequence[int]) -> None:
        """Begin a request's table with blocks that hold its first tokens: another's, or free ones that are cached."""
        assert request_id not in self._tables, f"request {request_id} has blocks already"
        self.pool.hold(blocks)
        self._tables[request_id] = list(blocks)

    def free(self, request_id: int) -> None:
        """Release every block of the request. No table: no effect."""
        self.pool.release(self._tables.pop(request_id, []))

    def block(self, request_id: int, index: int) -> int:
        """One block of the request's table."""
        return self._tables[request_id][index]

    def table(self, request_id: int) -> tuple[int, ...]:
        return tuple(self._tables.get(request_id, ()))

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        self.cache.check_invariants()
        held = Counter(block for table in self._tables.values() for block in table)
        for block, count in enumerate(self.pool.ref_counts):
            assert held[block] == count, f"block {block}: {held[block]} table entries, {count} references"
        for request_id, table in self._tables.items():
            assert len(set(table)) == len(table), f"request {request_id}: a block stands in the table twice"
