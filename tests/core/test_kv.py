"""Blocks: who owns which, and that the books notice when they do not balance."""

from __future__ import annotations

import pytest

from paceline.core.block_pool import BlockPool
from paceline.core.config import SchedulerConfig
from paceline.core.kv_cache_manager import KVCacheManager
from paceline.core.prefix_cache import PrefixCache


def test_a_pool_hands_out_each_block_once() -> None:
    pool = BlockPool(4, PrefixCache())
    first, second = pool.allocate(1), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert pool.num_free == 0
    pool.check_invariants()


def test_the_same_calls_give_the_same_ids() -> None:
    def ids() -> list[tuple[int, ...]]:
        pool = BlockPool(6, PrefixCache())
        taken = [pool.allocate(2), pool.allocate(2)]
        pool.release(list(taken[0]))
        return [*taken, pool.allocate(4)]

    assert ids() == ids()


def test_what_is_cached_is_reused_last_and_the_end_of_a_prefix_before_its_beginning() -> None:
    cache = PrefixCache()
    pool = BlockPool(5, cache)
    old, new = pool.allocate(3), pool.allocate(1)
    for block in old:
        cache.insert(bytes([block]), block)
    pool.release(list(old))
    pool.release(list(new))
    assert pool.allocate(2) == (3, 4)
    assert pool.allocate(3) == (2, 1, 0)
    assert not len(cache)


def test_a_cached_block_comes_back_from_the_free_ones() -> None:
    cache = PrefixCache()
    pool = BlockPool(2, cache)
    (block,) = pool.allocate(1)
    cache.insert(b"key", block)
    pool.release([block])
    pool.hold(cache.find([b"key"]))
    assert pool.num_free == 1
    assert block not in pool.allocate(1)
    pool.check_invariants()


def test_a_pool_gives_no_more_than_it_has() -> None:
    with pytest.raises(AssertionError):
        BlockPool(2, PrefixCache()).allocate(3)


def test_a_block_is_released_once() -> None:
    pool = BlockPool(2, PrefixCache())
    blocks = list(pool.allocate(1))
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_a_shared_block_is_free_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(2, PrefixCache())
    (block,) = pool.allocate(1)
    pool.ref_counts[block] += 1
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_tables_grow_by_whole_blocks(tokens: int, blocks: int) -> None:
    kv = KVCacheManager(8, block_size=4)
    assert kv.num_missing_blocks(7, tokens) == blocks
    assert len(kv.grow(7, tokens) or ()) == blocks == len(kv.table(7))
    assert kv.capacity(7) == 4 * blocks
    assert kv.num_free_blocks == 8 - blocks
    assert SchedulerConfig(num_blocks=8, block_size=4).blocks_for(tokens) == blocks


def test_growing_adds_behind_and_never_shrinks() -> None:
    kv = KVCacheManager(8, block_size=4)
    first = kv.grow(1, 6)
    assert kv.grow(1, 8) == ()
    assert kv.grow(1, 2) == ()
    second = kv.grow(1, 9)
    assert first is not None
    assert second is not None
    assert kv.table(1) == first + second
    kv.check_invariants()


def test_growth_that_does_not_fit_changes_nothing() -> None:
    kv = KVCacheManager(3, block_size=2)
    kv.grow(1, 4)
    assert kv.grow(2, 3) is None
    assert kv.grow(1, 7) is None
    assert kv.table(2) == ()
    assert kv.num_free_blocks == 1
    kv.check_invariants()


def test_free_gives_back_all_and_may_be_repeated() -> None:
    kv = KVCacheManager(3, block_size=2)
    kv.grow(1, 6)
    kv.free(1)
    kv.free(1)
    assert kv.num_free_blocks == 3
    assert kv.capacity(1) == 0
    kv.check_invariants()


def test_the_books_notice_a_leak() -> None:
    kv = KVCacheManager(3, block_size=2)
    kv.grow(1, 4)
    kv._tables.pop(1)
    with pytest.raises(AssertionError, match="0 table entries, 1 references"):
        kv.check_invariants()


def test_the_books_notice_a_block_in_two_tables() -> None:
    kv = KVCacheManager(3, block_size=2)
    kv.grow(1, 2)
    kv._tables[2] = list(kv.table(1))
    with pytest.raises(AssertionError, match="2 table entries, 1 references"):
        kv.check_invariants()
    kv.pool.ref_counts[0] = 2
    kv.check_invariants()  # shared: the scheduler knows whether that is right


def test_the_books_notice_a_block_twice_in_one_table() -> None:
    kv = KVCacheManager(3, block_size=2)
    kv.grow(1, 2)
    kv._tables[1] *= 2
    kv.pool.ref_counts[0] = 2
    with pytest.raises(AssertionError, match="in the table twice"):
        kv.check_invariants()


def test_shared_blocks_are_free_when_their_last_holder_is() -> None:
    kv = KVCacheManager(4, block_size=2)
    blocks = kv.grow(1, 6)
    assert blocks is not None
    kv.share(2, blocks[:2])
    assert kv.table(2) == blocks[:2]
    kv.check_invariants()
    kv.free(1)
    assert kv.num_free_blocks == 2
    kv.check_invariants()
    kv.free(2)
    assert kv.num_free_blocks == 4
    kv.check_invariants()


def test_the_books_notice_a_block_that_is_free_and_owned() -> None:
    pool = BlockPool(3, PrefixCache())
    (block,) = pool.allocate(1)
    pool._free[block] = None
    with pytest.raises(AssertionError, match="free and owned"):
        pool.check_invariants()


def test_the_books_notice_a_lost_block() -> None:
    pool = BlockPool(3, PrefixCache())
    pool.ref_counts[pool.allocate(1)[0]] = 0
    with pytest.raises(AssertionError, match=r"free \+ owned != total"):
        pool.check_invariants()
