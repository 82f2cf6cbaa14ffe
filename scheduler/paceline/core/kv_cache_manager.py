"""Block tables: which blocks hold which request's tokens."""

from __future__ import annotations

from collections import Counter

from paceline.core.block_pool import BlockPool


class KVCacheManager:
    """Owns the pool and one block table per running request.

    Position i of a request lives in slot `table[i // block_size] * block_size + i % block_size`. Tables only grow, and
    go back as a whole: slots of rejected drafts stay with their request, whose next tokens overwrite them.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

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
        missing = self.num_missing_blocks(request_id, num_tokens)
        if missing > self.num_free_blocks:
            return None
        blocks = self.pool.allocate(missing)
        self._tables.setdefault(request_id, []).extend(blocks)
        return blocks

    def share(self, source_id: int, request_id: int, num_blocks: int) -> tuple[int, ...]:
        """Begin a request's table with the first blocks of another's, full ones, which both hold from now on."""
        assert request_id not in self._tables, f"request {request_id} has blocks already"
        blocks = self._tables[source_id][:num_blocks]
        self.pool.hold(blocks)
        self._tables[request_id] = blocks
        return tuple(blocks)

    def free(self, request_id: int) -> None:
        """Release every block of the request. No table: no effect."""
        self.pool.release(self._tables.pop(request_id, []))

    def table(self, request_id: int) -> tuple[int, ...]:
        return tuple(self._tables.get(request_id, ()))

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        held = Counter(block for table in self._tables.values() for block in table)
        for block, count in enumerate(self.pool.ref_counts):
            assert held[block] == count, f"block {block}: {held[block]} table entries, {count} references"
        for request_id, table in self._tables.items():
            assert len(set(table)) == len(table), f"request {request_id}: a block stands in the table twice"
