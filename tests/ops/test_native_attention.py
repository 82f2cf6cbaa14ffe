"""Native attention against the reference in float64, and the same to the last bit in every batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline_kernels import PagedBatch, reference
from paceline_kernels.cpu import decoder
from support.native import needs_compiler, threads
from support.pages import Pages

pytestmark = needs_compiler

DTYPES = [torch.float32, torch.bfloat16]
# Values are within -1 and 1: the error is that of rounding the weights, and then the result.
ACCURACY = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}
LONGEST = 400
Runs = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Shape:
    sharing: int = 2  # heads for each KV head
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 8
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return 3 / math.sqrt(self.head_dim)

    @lru_cache(maxsize=8)  # noqa: B019, a shape is a value
    def tokens(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of every position of a sequence, which follow from its name."""
        generator = torch.Generator().manual_seed(ord(name))
        heads = self.sharing * self.num_kv_heads, self.num_kv_heads, self.num_kv_heads
        query, key, value = (torch.randn(LONGEST, n, self.head_dim, generator=generator) for n in heads)
        return query.to(self.dtype), key.to(self.dtype), value.clamp(-1, 1).to(self.dtype)

    def rows(self, pages: Pages, runs: Runs) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the rows of a batch that `pages` is at the end of."""
        spans = [(name, pages.lengths[name] - rows, pages.lengths[name]) for name, rows in runs]
        parts = [[x[begin:end] for x in self.tokens(name)] for name, begin, end in spans]
        query, key, value = (torch.cat(rows) for rows in zip(*parts, strict=True))
        return query, key, value


class Native:
    """Sequences whose K and V grow run by run, in pages full of NaN."""

    def __init__(self, shape: Shape, seed: int = 0, lanes: int = decoder.LANES) -> None:
        self.shape = shape
        self.pages = Pages(
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            num_blocks=sum(-(-LONGEST // shape.block_size) for _ in "abcdx"),
            dtype=shape.dtype,
            lanes=lanes,
            seed=seed,
        )

    def step(self, runs: Runs) -> dict[str, Tensor]:
        """What the next rows of each sequence attend to."""
        batch = self.pages.batch(runs)
        out = self.compute(batch, *self.shape.rows(self.pages, runs))
        return dict(zip([name for name, _ in runs], out.split([rows for _, rows in runs]), strict=True))

    def compute(self, batch: PagedBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        decoder.store_kv(key, value, self.pages.kv_cache[0], batch)
        return decoder.paged_attention(query, self.pages.kv_cache[0], batch, self.shape.scale)


class Exact(Native):
    """The reference in float64."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__(shape, seed, lanes=1)
        self.pages.kv_cache = [(keys.double(), values.double()) for keys, values in self.pages.kv_cache]

    def compute(self, batch: PagedBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        reference.store_kv(key.double(), value.double(), *self.pages.kv_cache[0], batch.slots)
        return reference.paged_attention(query.double(), *self.pages.kv_cache[0], batch, self.shape.scale)


def last(steps: Sequence[Runs], shape: Shape, seed: int = 0) -> dict[str, Tensor]:
    """Results of the last of some steps."""
    native = Native(shape, seed)
    return [native.step(runs) for runs in steps][-1]


# ---- Against the reference ----

SHAPES = st.builds(
    Shape,
    sharing=st.integers(1, 9),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.one_of(st.integers(1, 40).map(lambda half: 2 * half), st.sampled_from([16, 32, 64, 96, 128])),
    block_size=st.one_of(st.integers(1, 40), st.sampled_from([16, 32, 64])),
    dtype=st.sampled_from(DTYPES),
)
STEPS = st.lists(
    st.dictionaries(st.sampled_from("abcd"), st.one_of(st.integers(0, 6), st.integers(0, 130)), min_size=1),
    min_size=1,
    max_size=3,
).map(lambda steps: [[*runs.items()] for runs in steps if any(runs.values())])


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(shape=SHAPES, steps=STEPS, seed=st.integers(0, 999))
def test_equals_the_reference(shape: Shape, steps: list[Runs], seed: int) -> None:
    """Step by step: prefill, decodes and verifications side by side, and sequences that have no rows."""
    native, exact = Native(shape, seed), Exact(shape, seed)
    for runs in steps:
        found, wanted = native.step(runs), exact.step(runs)
        for name, _ in runs:
            assert found[name].dtype == shape.dtype
            torch.testing.assert_close(found[name].double(), wanted[name], atol=ACCURACY[shape.dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16, 200])
def test_scores_of_any_size(dtype: torch.dtype, rows: int) -> None:
    """Where one position outweighs all others, by more than any exponent, wherever it stands."""
    shape = Shape(dtype=dtype)
    native, exact = Native(shape), Exact(shape)
    query, key, value = (x[:rows] for x in shape.tokens("x"))
    for factor in (1e-6, 100.0, 1e6):
        batch = native.pages.batch([("x", rows)])
        native.pages.lengths.clear()
        found, wanted = (pages.compute(batch, factor * query, key, value) for pages in (native, exact))
        # What float32 makes of a score decides between positions that are all but equal.
        torch.testing.assert_close(found.double(), wanted, atol=max(2e-2, ACCURACY[dtype]), rtol=0)


@pytest.mark.parametrize("head_dim", [2, 34, 64])
def test_bfloat16_is_rounded_to_the_nearest_even(head_dim: int) -> None:
    """Two positions of equal weight, whose mean lies between two numbers of bfloat16."""
    shape = Shape(head_dim=head_dim, dtype=torch.bfloat16)
    native = Native(shape)
    first = torch.tensor([1.0, 1 + 2.0**-7, -1.0, -1 - 2.0**-7, 1e38, torch.inf, torch.nan]).bfloat16()
    second = torch.tensor([1 + 2.0**-7, 1 + 2.0**-6, -1 - 2.0**-7, -1 - 2.0**-6, 1e38, 1.0, 1.0]).bfloat16()
    for a, b in zip(first, second, strict=True):
        native.pages.lengths.clear()
        value = torch.stack((a, b)).view(2, 1, 1).expand(2, shape.num_kv_heads, head_dim)
        zeros = torch.zeros(2, 2 * shape.num_kv_heads, head_dim).bfloat16()
        out = native.compute(native.pages.batch([("x", 2)]), zeros, zeros[:, :2], value)
        mean = ((a.double() + b.double()) / 2).bfloat16().expand_as(out[1])
        torch.testing.assert_close(out[1], mean, atol=0, rtol=0, equal_nan=True)


# ---- The same bits in every batch ----

INVARIANT = [
    Shape(),
    Shape(dtype=torch.bfloat16),
    Shape(sharing=1, head_dim=64, block_size=16, dtype=torch.bfloat16),
    Shape(sharing=7, num_kv_heads=1, head_dim=34, block_size=20, dtype=torch.bfloat16),
    Shape(sharing=3, head_dim=20, block_size=5),
]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("position", [0, 5, 63, 64, 130, 299])
@pytest.mark.parametrize("shape", INVARIANT, ids=str)
def test_a_row_depends_on_its_own_sequence_alone(shape: Shape, position: int, num_threads: int) -> None:
    def of(history: list[Runs], runs: Runs, seed: int = 0) -> Tensor:
        before = sum(rows for step in history for name, rows in step if name == "x")
        return last([*history, runs], shape, seed)["x"][position - before]

    history: list[Runs] = [[("x", position)]] if position else []
    with threads(num_threads):
        alone = of(history, [("x", 1)])
        assert torch.equal(of(history, [("x", 5)]), alone), "first of five"
        assert torch.equal(of(history, [("x", 1)], seed=1), alone), "other blocks"
        assert torch.equal(of([], [("x", 300)]), alone), "in a prefill"
        assert torch.equal(of(history, [("x", 300 - position)]), alone), "first of a chunk"
        others: list[Runs] = [[("a", 3), ("b", 70), ("c", 9)]]
        mixed = [("a", 5), ("x", 2), ("c", 0), ("b", 90)]
        assert torch.equal(of([*others, *history], mixed), alone), "among others"
        if position > 3:
            third = position // 3
            assert torch.equal(of([[("x", third)]], [("x", 300 - third)]), alone), "within a second chunk"
            assert torch.equal(of([[("x", position - 3)]], [("x", 4)]), alone), "last of four"


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(shape=SHAPES, steps=STEPS, seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)))
def test_every_run_is_what_its_rows_are_one_by_one(shape: Shape, steps: list[Runs], seeds: tuple[int, int]) -> None:
    """Alone, in other blocks."""
    native = Native(shape, seeds[0])
    found: dict[str, list[Tensor]] = {}
    for runs in steps:
        for name, out in native.step(runs).items():
            found.setdefault(name, []).extend(out)
    for name, rows in found.items():
        alone = Native(shape, seeds[1])
        first = max(0, len(rows) - 20)  # the last ones see most
        if first:
            alone.step([(name, first)])
        for index in range(first, len(rows)):
            assert torch.equal(alone.step([(name, 1)])[name][0], rows[index]), f"{name}, {index}"


@pytest.mark.parametrize("shape", INVARIANT, ids=str)
def test_the_number_of_threads_changes_nothing(shape: Shape) -> None:
    steps = [[("a", 70), ("b", 1), ("x", 200)], [("a", 1), ("b", 40), ("c", 5), ("x", 2)]]
    one, *others = (_with_threads(count, steps, shape) for count in (1, 2, 3, 5))
    for other in others:
        assert all(torch.equal(other[name], one[name]) for name in one)


def _with_threads(count: int, steps: Sequence[Runs], shape: Shape) -> dict[str, Tensor]:
    with threads(count):
        return last(steps, shape)


# ---- What is not seen ----


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [5, 16, 40, 160])
@pytest.mark.parametrize("shape", INVARIANT, ids=str)
def test_no_row_sees_a_later_one(shape: Shape, rows: int, bad: float) -> None:
    native = Native(shape)
    query, key, value = (x[:rows].clone() for x in shape.tokens("x"))
    clean = native.compute(native.pages.batch([("x", rows)]), query, key, value)
    for position in (rows - 1, rows // 2):
        key[position], value[position] = bad, bad
        native.pages.lengths.clear()
        spoiled = native.compute(native.pages.batch([("x", rows)]), query, key, value)
        assert torch.equal(spoiled[:position], clean[:position])
        assert spoiled[position:].isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("shape", INVARIANT, ids=str)
def test_nobody_sees_other_sequences_or_what_was_rejected(shape: Shape, bad: float) -> None:
    """Whatever other blocks hold, and the own ones behind the context."""
    native = Native(shape)
    clean = Native(shape)
    for pages in (native, clean):
        pages.step([("a", 30), ("x", 37)])
    native.step([("x", 60)])  # drafts, all of them rejected
    drafts = native.pages.batch([("x", 0)])
    native.pages.lengths["x"] = 37
    rejected = replace(drafts, query_starts=torch.tensor([0, 60], dtype=torch.int32), derived={})
    _, key, value = (torch.full_like(x[:60], bad) for x in shape.tokens("x"))
    decoder.store_kv(key, value, native.pages.kv_cache[0], rejected)
    for keys, values in native.pages.kv_cache:
        keys[native.pages.tables["a"]], values[native.pages.tables["a"]] = bad, bad
    for rows in (1, 4):
        assert torch.equal(native.step([("x", rows)])["x"], clean.step([("x", rows)])["x"])


@pytest.mark.parametrize("shape", INVARIANT, ids=str)
def test_a_query_that_is_nan_spoils_its_own_row_alone(shape: Shape) -> None:
    native = Native(shape)
    query, key, value = (x[:50] for x in shape.tokens("x"))
    batch = native.pages.batch([("x", 50)])
    clean = native.compute(batch, query, key, value)
    query = query.clone()
    query[[3, 20]] = torch.nan
    spoiled = native.compute(batch, query, key, value)
    assert spoiled[[3, 20]].isnan().all()
    others = [row for row in range(50) if row not in (3, 20)]
    assert torch.equal(spoiled[others], clean[others])


def test_what_is_read_by_address_is_looked_at() -> None:
    """A tensor of another type or with strides would give numbers all the same."""
    native = Native(Shape())
    batch = native.pages.batch([("a", 20)])
    query, key, value = native.shape.rows(native.pages, [("a", 20)])
    native.compute(batch, query, key, value)
    with pytest.raises(AssertionError, match="float32 into pages"):
        native.compute(batch, query, key.bfloat16(), value)
    with pytest.raises(AssertionError, match="bfloat16 over pages"):
        native.compute(batch, query.bfloat16(), key, value)
    wide = batch.block_tables.repeat_interleave(2, 1)[:, ::2]
    for wrong, said in (
        (replace(batch, context_lens=batch.context_lens.long()), "int64, where C\\+\\+ reads torch.int32"),
        (replace(batch, block_tables=wide), "strides"),
        (replace(batch, query_starts=batch.query_starts[:-1]), r"\(1,\)"),
    ):
        with pytest.raises(AssertionError, match=said):
            native.compute(wrong, query, key, value)
