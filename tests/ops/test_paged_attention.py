"""Paged attention against a dense softmax, one row at a time, over random mixes of runs.

Triton's kernels run on the GPU, or else are interpreted, where fewer random steps have to do.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline_kernels.reference as reference
from paceline_kernels import PagedBatch, store_kv
from support.pages import Pages

GPU = torch.cuda.is_available()
BACKENDS = ["reference", "triton"] if importlib.util.find_spec("triton") else ["reference"]
SEEDS = {"reference": 20, "triton": 20 if GPU else 4}
only_triton = pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)

MODULES = {"reference": "paceline_kernels.reference", "triton": "paceline_kernels.triton.attention"}
HEAD_DIM = 16
SCALE = 0.2
MIXES = {
    "decodes": [("a", 1), ("b", 1), ("c", 1), ("d", 1)],
    "verifications": [("a", 4), ("b", 4), ("c", 4), ("d", 4)],
    "prefill": [("new", 37)],
    "everything": [("a", 1), ("new", 23), ("b", 5), ("c", 1), ("d", 64), ("other", 1)],
}
CONTEXTS = {"a": 1, "b": 7, "c": 64, "d": 130}  # a single token, part of a block, exact blocks, many blocks


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    """The module of a backend, with its device."""
    return importlib.import_module(MODULES[request.param])


def device_of(backend: Any) -> str:
    return "cpu" if backend is reference or not GPU else "cuda"


def expected(query: Tensor, pages: Pages, runs: list[tuple[str, int]], num_heads: int, num_kv_heads: int) -> Tensor:
    """Row by row in float64."""
    out: list[Tensor] = []
    for name, rows in runs:
        length = pages.lengths[name]
        sharing = num_heads // num_kv_heads
        keys, values = (x.double().repeat_interleave(sharing, dim=1) for x in pages.context(name, length))
        for row in range(rows):
            seen = length - (rows - 1 - row)
            scores = torch.einsum("khd,hd->hk", keys[:seen], query[len(out)].double()) * SCALE
            out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[:seen]))
    return torch.stack(out)


def step(pages: Pages, runs: list[tuple[str, int]], num_heads: int, num_kv_heads: int) -> tuple[PagedBatch, Tensor]:
    """Write random K and V for the next rows of each sequence; return their batch and random queries."""
    batch = pages.batch(runs)
    num_tokens = sum(rows for _, rows in runs)
    key_cache = pages.kv_cache[0][0]
    head_dim = key_cache.shape[-1]
    key, value = (torch.randn(num_tokens, num_kv_heads, head_dim).to(key_cache) for _ in range(2))
    store_kv(key, value, *pages.kv_cache[0], batch.slots)
    return batch, (3 * torch.randn(num_tokens, num_heads, head_dim)).to(key_cache)


def filled(backend: Any, num_kv_heads: int, dtype: torch.dtype = torch.float32, head_dim: int = HEAD_DIM) -> Pages:
    torch.manual_seed(0)
    pages = Pages(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, device=device_of(backend))
    step(pages, list(CONTEXTS.items()), num_kv_heads, num_kv_heads)
    return pages


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("mix", MIXES)
def test_equals_dense_attention(
    mix: str, num_heads: int, num_kv_heads: int, dtype: torch.dtype, tolerance: float, backend: Any
) -> None:
    pages, runs = filled(backend, num_kv_heads, dtype), MIXES[mix]
    batch, query = step(pages, runs, num_heads, num_kv_heads)
    out = backend.paged_attention(query, *pages.kv_cache[0], batch, SCALE)
    assert out.dtype == dtype
    wanted = expected(query, pages, runs, num_heads, num_kv_heads)
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("backend", "seed"), [(name, seed) for name in BACKENDS for seed in range(SEEDS[name])], indirect=["backend"]
)
def test_equals_dense_attention_over_random_steps(backend: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps of random runs; limits so small that runs are cut and groups are split."""
    if backend is not reference:
        monkeypatch.setattr(backend, "MOST_READ", 16)
    monkeypatch.setattr(reference, "PIECE_ROWS", 6)
    monkeypatch.setattr(reference, "GATHERED_TOKENS", 200)
    monkeypatch.setattr(reference, "SMALLEST_WIDTH", 16)
    torch.manual_seed(seed)
    choose = random.Random(seed)
    pages = Pages(
        num_kv_heads=2,
        head_dim=HEAD_DIM,
        block_size=choose.choice([1, 3, 16]),
        num_blocks=512,
        seed=seed,
        device=device_of(backend),
    )
    for _ in range(4):
        names = choose.sample("abcdefgh", choose.randint(1, 8))
        runs = [(name, choose.choice([1, 1, 2, 3, 17])) for name in names]
        batch, query = step(pages, runs, 4, 2)
        out = backend.paged_attention(query, *pages.kv_cache[0], batch, SCALE)
        torch.testing.assert_close(out.double(), expected(query, pages, runs, 4, 2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_does_not_notice_its_batch_mates(dtype: torch.dtype) -> None:
    """Bit for bit, for every run of the largest mix. Only the reference promises so much."""
    pages, runs = filled(reference, 2, dtype), MIXES["everything"]
    batch, query = step(pages, runs, 4, 2)
    together = reference.paged_attention(query, *pages.kv_cache[0], batch, SCALE)
    for index, (begin, end) in enumerate(zip(batch.query_starts[:-1], batch.query_starts[1:], strict=True)):
        alone = PagedBatch(
            query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
            context_lens=batch.context_lens[index : index + 1],
            block_tables=batch.block_tables[index : index + 1],
            block_size=batch.block_size,
        )
        out = reference.paged_attention(query[begin:end], *pages.kv_cache[0], alone, SCALE)
        assert torch.equal(out, together[begin:end]), runs[index]


def test_padding_wastes_at_most_half() -> None:
    for context in range(reference.SMALLEST_WIDTH, 5000):
        assert context <= reference._padded(context) <= 1.5 * context
    assert len({reference._padded(context) for context in range(1, 1 << 17)}) == 24


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a backend allocates holds NaN until it is written."""
    new_empty = torch.Tensor.new_empty

    def poisoned_empty(*args: Any, **options: Any) -> Tensor:
        tensor: Tensor = new_empty(*args, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned_empty)


def plan_of(batch: PagedBatch) -> Any:
    """How Triton's kernels were launched, which only tests ask, to be sure of what they see."""
    return next(plan for key, plan in batch.derived.items() if key[0] == "triton")  # type: ignore[index]


@only_triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_tables_of_many_sequences_and_padding(backend: Any, rows: int) -> None:
    """Padding sequences, a sequence without rows, one without a context, and rows that belong to nobody."""
    pages = filled(backend, 2)
    runs = [("d", rows), ("b", 1), ("c", rows)]
    batch, query = step(pages, runs, 6, 2)
    device = query.device
    widest = batch.block_tables.shape[1]
    tables = torch.full((9, widest), 1 << 20, dtype=torch.int32, device=device)  # which would be far outside
    seats = torch.tensor([7, -1, 2, 5, 3, 4, -1], dtype=torch.int32, device=device)
    tables[[7, 2, 4]] = batch.block_tables
    lengths = batch.context_lens.tolist()
    batch = PagedBatch(
        # Sequences 1 and 3 have no rows, 4 has one but no context, 6 one but no table.
        query_starts=torch.tensor([0, rows, rows, rows + 1, rows + 1, rows + 2, 2 * rows + 2, 2 * rows + 3]).to(seats),
        context_lens=torch.tensor([lengths[0], 99, lengths[1], 50, 0, lengths[2], 9]).to(seats),
        block_tables=tables,
        block_size=batch.block_size,
        table_rows=seats,
        max_rows=rows + 3,
    )
    padded = torch.cat([query[: rows + 1], query[:1], query[rows + 1 :], query[:1].repeat(5, 1, 1)])
    out = backend.paged_attention(padded, *pages.kv_cache[0], batch, SCALE)
    unowned = [rows + 1, *range(2 * rows + 2, 2 * rows + 7)]
    assert out[unowned].isnan().all()
    owned = [row for row in range(len(padded)) if row not in unowned]
    torch.testing.assert_close(out[owned].double(), expected(query, pages, runs, 6, 2), atol=1e-5, rtol=0)


@only_triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", [1, 2, 20])
def test_splits_of_a_context(backend: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sequences fill all of them, others only the first. No row sees the whole of its context's last split."""
    monkeypatch.setattr(backend, "MOST_READ", 16)
    pages = filled(backend, 1)
    runs = [("a", rows), ("d", rows), ("new", rows), ("c", rows)]
    batch, query = step(pages, [("d", 150)], 4, 1)
    batch, query = step(pages, runs, 4, 1)
    out = backend.paged_attention(query, *pages.kv_cache[0], batch, SCALE)
    assert plan_of(batch).splits >= 8
    torch.testing.assert_close(out.double(), expected(query, pages, runs, 4, 1), atol=1e-5, rtol=0)


@only_triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("splits", [1, 4])
def test_a_row_before_the_first_token(backend: Any, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model's first pass has two rows even for a sequence of one token: the first is 0, not NaN."""
    monkeypatch.setattr(backend, "MOST_SPLITS", splits)
    monkeypatch.setattr(backend, "MOST_READ", 16)
    pages = filled(backend, 1)
    batch, query = step(pages, [("d", 1), ("new", 1)], 4, 1)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32, device=query.device)
    batch = dataclasses.replace(batch, query_starts=starts, max_rows=2, derived={})
    out = backend.paged_attention(query[[0, 1, 1]], *pages.kv_cache[0], batch, SCALE)
    assert plan_of(batch).splits == splits
    assert (out[1] == 0).all()
    wanted = expected(query, pages, [("d", 1), ("new", 1)], 4, 1)
    torch.testing.assert_close(out[[0, 2]].double(), wanted, atol=1e-5, rtol=0)


@only_triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_a_run_of_many_tiles(backend: Any, dtype: torch.dtype, tolerance: float) -> None:
    """Beside shorter ones, where tiles begin and end inside a row."""
    pages = filled(backend, 1, dtype)
    runs = [("a", 1), ("d", 110), ("b", 23), ("new", 1)]
    batch, query = step(pages, runs, 3, 1)
    out = backend.paged_attention(query, *pages.kv_cache[0], batch, SCALE)
    assert plan_of(batch).many
    torch.testing.assert_close(out.double(), expected(query, pages, runs, 3, 1), atol=tolerance, rtol=0)


@only_triton
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(2, 2, 40), (6, 2, 96), (4, 1, 80), (8, 1, 256), (8, 2, 64), (8, 4, 128)],
)
def test_shapes_of_heads(
    backend: Any, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Of a query that is a view of a larger tensor, as a fused projection makes it. Slots next to a head hold NaN."""
    pages = filled(backend, num_kv_heads, dtype, head_dim)
    runs = [("d", 1), ("b", 3)]
    batch, query = step(pages, runs, num_heads, num_kv_heads)
    query /= head_dim**0.5
    fused = torch.full((4, num_heads + 3, head_dim + 16), torch.nan).to(query)
    view = fused[:, 1 : num_heads + 1, :head_dim]
    view.copy_(query)
    out = backend.paged_attention(view, *pages.kv_cache[0], batch, SCALE)
    wanted = expected(query, pages, runs, num_heads, num_kv_heads)
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=0)


@only_triton
def test_a_sequence_does_not_notice_what_its_batch_mates_hold(backend: Any) -> None:
    """Bit for bit, where all that is not its own is NaN."""
    pages, runs = filled(backend, 2), MIXES["verifications"]
    batch, query = step(pages, runs, 4, 2)
    before = backend.paged_attention(query, *pages.kv_cache[0], batch, SCALE)
    for index, (name, _) in enumerate(runs):
        keys, values = (torch.full_like(cache, torch.nan) for cache in pages.kv_cache[0])
        own = [pages.slot(name, position) for position in range(pages.lengths[name])]
        for cache, kept in zip((keys, values), pages.kv_cache[0], strict=True):
            cache.flatten(0, 1)[own] = kept.flatten(0, 1)[own]
        rows = slice(batch.query_starts[index], batch.query_starts[index + 1])
        out = backend.paged_attention(query, keys, values, batch, SCALE)
        assert torch.equal(out[rows], before[rows]), name
