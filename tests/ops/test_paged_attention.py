"""Paged attention against a dense softmax, one row at a time, over random mixes of runs."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import paceline_kernels.reference as reference
from paceline_kernels import PagedBatch, paged_attention, store_kv
from support.pages import Pages

HEAD_DIM = 16
SCALE = 0.2
MIXES = {
    "decodes": [("a", 1), ("b", 1), ("c", 1), ("d", 1)],
    "verifications": [("a", 4), ("b", 4), ("c", 4), ("d", 4)],
    "prefill": [("new", 37)],
    "everything": [("a", 1), ("new", 23), ("b", 5), ("c", 1), ("d", 64), ("other", 1)],
}
CONTEXTS = {"a": 1, "b": 7, "c": 64, "d": 130}  # a single token, part of a block, exact blocks, many blocks


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
    dtype = pages.kv_cache[0][0].dtype
    key, value = (torch.randn(num_tokens, num_kv_heads, HEAD_DIM).to(dtype) for _ in range(2))
    store_kv(key, value, *pages.kv_cache[0], batch.slots)
    return batch, (3 * torch.randn(num_tokens, num_heads, HEAD_DIM)).to(dtype)


def filled(num_kv_heads: int, dtype: torch.dtype = torch.float32) -> Pages:
    torch.manual_seed(0)
    pages = Pages(num_kv_heads=num_kv_heads, head_dim=HEAD_DIM, dtype=dtype)
    step(pages, list(CONTEXTS.items()), num_kv_heads, num_kv_heads)
    return pages


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("mix", MIXES)
def test_equals_dense_attention(
    mix: str, num_heads: int, num_kv_heads: int, dtype: torch.dtype, tolerance: float
) -> None:
    pages, runs = filled(num_kv_heads, dtype), MIXES[mix]
    batch, query = step(pages, runs, num_heads, num_kv_heads)
    out = paged_attention(query, *pages.kv_cache[0], batch, SCALE)
    assert out.dtype == dtype
    wanted = expected(query, pages, runs, num_heads, num_kv_heads)
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize("seed", range(20))
def test_equals_dense_attention_over_random_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps of random runs; limits so small that runs are cut and groups are split."""
    monkeypatch.setattr(reference, "PIECE_ROWS", 6)
    monkeypatch.setattr(reference, "GATHERED_TOKENS", 200)
    monkeypatch.setattr(reference, "SMALLEST_WIDTH", 16)
    torch.manual_seed(seed)
    choose = random.Random(seed)
    pages = Pages(num_kv_heads=2, head_dim=HEAD_DIM, block_size=choose.choice([1, 3, 16]), num_blocks=512, seed=seed)
    for _ in range(4):
        names = choose.sample("abcdefgh", choose.randint(1, 8))
        runs = [(name, choose.choice([1, 1, 2, 3, 17])) for name in names]
        batch, query = step(pages, runs, 4, 2)
        out = paged_attention(query, *pages.kv_cache[0], batch, SCALE)
        torch.testing.assert_close(out.double(), expected(query, pages, runs, 4, 2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_does_not_notice_its_batch_mates(dtype: torch.dtype) -> None:
    """Bit for bit, for every run of the largest mix."""
    pages, runs = filled(2, dtype), MIXES["everything"]
    batch, query = step(pages, runs, 4, 2)
    together = paged_attention(query, *pages.kv_cache[0], batch, SCALE)
    for index, (begin, end) in enumerate(zip(batch.query_starts[:-1], batch.query_starts[1:], strict=True)):
        alone = PagedBatch(
            query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
            context_lens=batch.context_lens[index : index + 1],
            block_tables=batch.block_tables[index : index + 1],
            block_size=batch.block_size,
        )
        out = paged_attention(query[begin:end], *pages.kv_cache[0], alone, SCALE)
        assert torch.equal(out, together[begin:end]), runs[index]


def test_padding_wastes_at_most_half() -> None:
    for context in range(reference.SMALLEST_WIDTH, 5000):
        assert context <= reference._padded(context) <= 1.5 * context
    assert len({reference._padded(context) for context in range(1, 1 << 17)}) == 24
