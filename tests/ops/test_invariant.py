"""Operations with one accumulation order: close to the reference, and the same to the last bit in every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline_kernels import PagedBatch, invariant, reference, store_kv
from paceline_kernels.cpu import build, model
from paceline_kernels.ops import Ops
from support.pages import Pages

DTYPES = [torch.float32, torch.bfloat16]
SCALE = 0.3
BACKENDS: list[Ops] = [reference, invariant]  # both satisfy the protocol, says mypy

pytestmark = pytest.mark.skipif(invariant.available() is not None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    tolerance = 2e-5 if ours.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


# ---- Against the reference ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 17, 64, 100])
@pytest.mark.parametrize("outputs", [1, 5, 33])
def test_linear_equals_the_reference(dtype: torch.dtype, inner: int, outputs: int) -> None:
    weight, bias = torch.randn(outputs, inner).to(dtype), torch.randn(outputs).to(dtype)
    for rows in [*range(1, 20), 31, 32, 33, 70]:
        x = torch.randn(rows, inner).to(dtype)
        exact = x.double() @ weight.double().T
        close(invariant.linear(x, weight), exact.to(dtype))
        close(invariant.linear(x, weight, bias), (exact + bias).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 17, 100, 256])
def test_rms_norm_equals_the_reference(dtype: torch.dtype, size: int) -> None:
    x, weight = (10 * torch.randn(7, 3, size)).to(dtype), torch.randn(size).to(dtype)
    close(invariant.rms_norm(x, weight, 1e-3), reference.rms_norm(x, weight, 1e-3))
    view = x[:, 1:]  # query and key of the decoder are such views
    close(invariant.rms_norm(view, weight, 1e-3), reference.rms_norm(view, weight, 1e-3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 16, 34, 128])
def test_rotary_equals_the_reference(dtype: torch.dtype, head_dim: int) -> None:
    heads = torch.randn(5, 8, head_dim).to(dtype)
    query, key, _ = torch.split(heads, [4, 2, 2], dim=1)
    angles = 100 * torch.rand(5, head_dim // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for views in ((query, key), (query.transpose(0, 1).contiguous().transpose(0, 1), key.contiguous())):
        for ours, theirs in zip(
            invariant.rotary(*views, cos, sin), reference.rotary(query, key, cos, sin), strict=True
        ):
            close(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 33, 704])
def test_silu_mul_equals_the_reference(dtype: torch.dtype, size: int) -> None:
    gate_up = (5 * torch.randn(3, 2 * size)).to(dtype)
    close(invariant.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_silu_of_extremes() -> None:
    gate = torch.tensor([[-torch.inf, -1e30, -200.0, -100.0, -88.0, -0.0, 0.0, 88.0, 1e30, torch.inf, torch.nan]])
    ours = invariant.silu_mul(torch.cat((gate, torch.ones_like(gate)), 1))[0, 1:]  # silu(-inf) is NaN in torch
    torch.testing.assert_close(ours, F.silu(gate)[0, 1:], atol=1e-6, rtol=1e-5, equal_nan=True)


def test_bfloat16_is_rounded_to_the_nearest_even() -> None:
    """x * 1 through linear: every kind of float32 that the bias adds up to is rounded as torch rounds it."""
    x = torch.tensor([[1.0]]).bfloat16()
    halfway = 2.0**-8 * torch.tensor([1.0, 3.0, -1.0, 0.5, 1.5])  # bf16 keeps 7 bits behind the point of 1
    bias = torch.cat((halfway, torch.tensor([torch.inf, -torch.inf, torch.nan]))).bfloat16()
    ours = invariant.linear(x, torch.ones(len(bias), 1).bfloat16(), bias)
    torch.testing.assert_close(ours, (1 + bias.float()).bfloat16()[None], atol=0, rtol=0, equal_nan=True)


# ---- Attention ----


def attention(
    ops: Ops,
    history: list[tuple[str, int]],
    runs: list[tuple[str, int]],
    dtype: torch.dtype,
    *,
    seed: int = 0,
    block_size: int = 8,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
) -> dict[str, Tensor]:
    """Results of the rows of `runs` by sequence, after `history`. A position's q, k and v follow from its name."""
    pages = Pages(
        num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, num_blocks=1024, block_size=block_size, seed=seed
    )
    outs: dict[str, Tensor] = {}
    for step in ([run] for run in history):
        _attend(reference, pages, step, dtype, num_heads)
    batch, out = _attend(ops, pages, runs, dtype, num_heads)
    for (name, _), part in zip(runs, torch.tensor_split(out, batch.query_starts[1:-1].long()), strict=True):
        outs[name] = part
    return outs


def _attend(
    ops: Ops, pages: Pages, runs: list[tuple[str, int]], dtype: torch.dtype, num_heads: int
) -> tuple[PagedBatch, Tensor]:
    begins = {name: pages.lengths.get(name, 0) for name, _ in runs}
    batch = pages.batch(runs)
    key_cache, value_cache = pages.kv_cache[0]
    num_kv_heads, head_dim = key_cache.shape[2:]
    parts = [_tokens(name, num_heads + 2 * num_kv_heads, head_dim)[begins[name] :][:rows] for name, rows in runs]
    query, key, value = torch.cat(parts).to(dtype).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    store_kv(key, value, key_cache, value_cache, batch.slots)
    return batch, ops.paged_attention(3 * query, key_cache, value_cache, batch, SCALE)


def _tokens(name: str, heads: int, head_dim: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(400, heads, head_dim, generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [2, 16, 20, 128])
def test_attention_equals_the_reference(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    history = [("a", 1), ("b", 63), ("c", 64), ("d", 130)]
    runs = [("a", 1), ("b", 2), ("c", 5), ("d", 40), ("e", 1), ("f", 77)]
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    ours, theirs = (attention(ops, history, runs, dtype, **shape) for ops in (invariant, reference))
    for name in theirs:
        close(ours[name], theirs[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [0, 5, 63, 64, 130, 299])
def test_attention_of_a_row_depends_on_its_own_sequence_only(dtype: torch.dtype, position: int, threads: int) -> None:
    def of(history: list[tuple[str, int]], runs: list[tuple[str, int]], seed: int = 0, block_size: int = 8) -> Tensor:
        before = sum(rows for name, rows in history if name == "x")
        return attention(invariant, history, runs, dtype, seed=seed, block_size=block_size)["x"][position - before]

    history = [("x", position)] if position else []
    alone = of(history, [("x", 1)])
    assert torch.equal(of(history, [("x", 5)]), alone), "first of five"
    assert torch.equal(of(history, [("x", 1)], seed=1), alone), "other blocks"
    assert torch.equal(of(history, [("x", 1)], block_size=1), alone), "smaller blocks"
    assert torch.equal(of([], [("x", 300)]), alone), "in a prefill"
    assert torch.equal(of(history, [("x", 300 - position)]), alone), "first of a chunk"
    others = [("a", 3), ("b", 70)]
    assert torch.equal(of([*others, *history], [("a", 5), ("x", 2), ("b", 90)]), alone), "among others"
    if position > 3:
        assert torch.equal(of([("x", position // 3)], [("x", 300 - position // 3)]), alone), "within a second chunk"
        assert torch.equal(of([("x", position - 3)], [("x", 4)]), alone), "last of four"


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_row_sees_a_later_one_even_if_that_is_nan(dtype: torch.dtype) -> None:
    pages = Pages(num_kv_heads=1, head_dim=16, dtype=dtype)
    batch = pages.batch([("x", 5)])
    key, value = torch.randn(2, 5, 1, 16).to(dtype)
    query = torch.randn(5, 2, 16).to(dtype)
    results = []
    for last in (1.0, torch.nan, torch.inf):
        key[4], value[4] = last, last
        store_kv(key, value, *pages.kv_cache[0], batch.slots)
        results.append(invariant.paged_attention(query, *pages.kv_cache[0], batch, SCALE))
    for result in results[1:]:
        assert torch.equal(result[:4], results[0][:4])
        assert result[4].isnan().all()


# ---- The same bits in every batch ----


def assert_rows_are_independent(operation: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Every row of inputs [300, ...], in batches of 1 to 40 and 300, at other places: bits as when all are computed."""
    whole = operation(*inputs)
    for rows in range(1, 41):
        for begin in (0, 7 * rows % (300 - rows), 300 - rows):
            chosen = slice(begin, begin + rows)
            assert torch.equal(operation(*(x[chosen] for x in inputs)), whole[chosen]), f"{rows} rows from {begin}"
    order = torch.randperm(300)
    assert torch.equal(operation(*(x[order] for x in inputs)), whole[order])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "outputs"), [(17, 5), (64, 33), (352, 130), (100, 2100)])
def test_linear_of_a_row_depends_on_it_alone(dtype: torch.dtype, inner: int, outputs: int, threads: int) -> None:
    weight, bias = torch.randn(outputs, inner).to(dtype), torch.randn(outputs).to(dtype)
    assert_rows_are_independent(lambda x: invariant.linear(x, weight, bias), torch.randn(300, inner).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [17, 128, 300])
def test_elementwise_operations_of_a_row_depend_on_it_alone(dtype: torch.dtype, size: int, threads: int) -> None:
    weight = torch.randn(size).to(dtype)
    x, gate_up = torch.randn(300, size).to(dtype), torch.randn(300, 2 * size).to(dtype)
    assert_rows_are_independent(lambda rows: invariant.rms_norm(rows, weight, 1e-5), x)
    assert_rows_are_independent(invariant.silu_mul, gate_up)
    heads, cos, sin = gate_up.view(300, 1, -1), x, x.flip(0)
    assert_rows_are_independent(lambda x, cos, sin: torch.cat(invariant.rotary(x, x, cos, sin), 1), heads, cos, sin)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype) -> None:
    x, weight = torch.randn(70, 200).to(dtype), torch.randn(2100, 200).to(dtype)
    before = torch.get_num_threads()
    results = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        results.append(invariant.linear(x, weight))
    torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


# ---- Where it cannot run ----


def test_says_that_it_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise build.BuildError("no C++ compiler: c++ is not on PATH")

    monkeypatch.setattr(model, "load", refuse)
    model._library.cache_clear()
    try:
        assert invariant.available() == "needs a C++ compiler: no C++ compiler: c++ is not on PATH"
    finally:
        model._library.cache_clear()
