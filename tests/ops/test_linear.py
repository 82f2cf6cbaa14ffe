"""Products with packed weights against float64, and the same to the last bit in every batch."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline_kernels.cpu.decoder import TILE, Kind, Matrix, linear
from support.native import needs_compiler, quantized_activations, quantized_weights, threads

pytestmark = needs_compiler

# Weights, and the activations that they are multiplied by.
FORMATS = [
    (Kind.FLOAT32, torch.float32),
    (Kind.BFLOAT16, torch.bfloat16),
    (Kind.INT8, torch.float32),
    (Kind.INT8, torch.bfloat16),
]
# Most of them small; some beyond what is computed in one go.
ROWS = st.one_of(st.integers(1, 70), st.integers(71, 300))
INPUTS = st.one_of(st.integers(1, 300), st.integers(301, 1300))
STORED = [torch.float32, torch.float16, torch.bfloat16]
ACCURACY = 2e-6  # of a sum, relative to the sum of magnitudes


def packed(kind: Kind, weight: Tensor, bias: Tensor | None, cuts: list[int]) -> Matrix:
    """Filled in parts, the last one first."""
    matrix = Matrix(kind, *weight.shape, bias=bias is not None)
    bounds = sorted({0, len(weight), *(cut % len(weight) for cut in cuts)})
    for begin, end in reversed(list(pairwise(bounds))):
        matrix.fill(weight[begin:end], begin)
        if bias is not None:
            matrix.fill_bias(bias[begin:end], begin)
    return matrix


def assert_close(found: Tensor, kind: Kind, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """To the sum in float64 over what the formats stand for."""
    added = torch.zeros(len(weight)).double() if bias is None else bias.double()
    slack = torch.zeros(1)
    if kind is Kind.INT8:
        rounded_x, rounded_weight = quantized_activations(x), quantized_weights(weight)
        x, weight = rounded_x.values, rounded_weight.values
        slack = rounded_x.slack @ weight.abs().T + (x.abs() + rounded_x.slack) @ rounded_weight.slack.T
    elif kind is Kind.BFLOAT16:
        weight = weight.bfloat16()
    x, weight = x.double(), weight.double()
    assert found.dtype == torch.float32
    allowed = ACCURACY * (x.abs() @ weight.abs().T + added.abs()) + slack
    assert ((found - (x @ weight.T + added)).abs() <= allowed).all()


def spread(*shape: int) -> Tensor:
    """Rows of very different sizes, one of them zeros, with outliers."""
    rows = torch.randn(shape) * torch.logspace(-2, 2, shape[0])[torch.randperm(shape[0])][:, None]
    rows[torch.rand(shape) < 0.02] *= 50
    if shape[0] > 2:
        rows[1] = 0
    return rows


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("kind", "dtype"), FORMATS)
def test_a_weight_that_is_not_finite_shows(kind: Kind, dtype: torch.dtype, stored: torch.dtype, value: float) -> None:
    """In its own output, and in no other."""
    weight = torch.randn(40, 70).to(stored)
    weight[3, 5] = value
    found = linear(torch.ones(2, 70, dtype=dtype), packed(kind, weight, None, []))
    assert not found[:, 3].isfinite().any()
    assert found[:, [i for i in range(40) if i != 3]].isfinite().all()


def test_weights_that_are_all_tiny_have_their_levels() -> None:
    weight = torch.tensor([[1e-38, -1e-38, 1e-40, 0.0]])
    found = linear(torch.full((1, 4), 1e30), packed(Kind.INT8, weight, None, []))
    assert found.isfinite().all()
    assert found.abs().item() < 1e-8


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    format_=st.sampled_from(FORMATS),
    stored=st.sampled_from(STORED),
    rows=ROWS,
    inputs=INPUTS,
    outputs=st.integers(1, 100),
    with_bias=st.booleans(),
    cuts=st.lists(st.integers(0, 99), max_size=3),
    seed=st.integers(0, 999),
)
def test_equals_float64(
    format_: tuple[Kind, torch.dtype],
    stored: torch.dtype,
    rows: int,
    inputs: int,
    outputs: int,
    with_bias: bool,
    cuts: list[int],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    kind, dtype = format_
    x, weight = spread(rows, inputs).to(dtype), spread(outputs, inputs).to(stored)
    bias = torch.randn(outputs).to(stored) if with_bias else None
    assert_close(linear(x, packed(kind, weight, bias, cuts)), kind, x, weight, bias)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    format_=st.sampled_from(FORMATS),
    rows=ROWS,
    inputs=INPUTS,
    outputs=st.integers(1, 100),
    seed=st.integers(0, 999),
)
def test_two_interleaved_matrices(
    format_: tuple[Kind, torch.dtype], rows: int, inputs: int, outputs: int, seed: int
) -> None:
    torch.manual_seed(seed)
    kind, dtype = format_
    x, parts, biases = spread(rows, inputs).to(dtype), spread(2 * outputs, inputs), torch.randn(2, outputs)
    matrix = Matrix(kind, outputs, inputs, bias=True, interleaved=True)
    for part, (weight, bias) in enumerate(zip(parts.chunk(2), biases, strict=True)):
        middle = outputs // 2
        for chosen, first in ((slice(None, middle), 0), (slice(middle, None), middle)):
            if len(weight[chosen]):
                matrix.fill(weight[chosen], first, part)
                matrix.fill_bias(bias[chosen], first, part)
    tiles = linear(x, matrix).view(rows, -1, 2, TILE)
    for part, (weight, bias) in enumerate(zip(parts.chunk(2), biases, strict=True)):
        mine = tiles[:, :, part].flatten(1)
        assert_close(mine[:, :outputs], kind, x, weight, bias)
        assert (mine[:, outputs:] == 0).all()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    format_=st.sampled_from(FORMATS),
    rows=st.integers(1, 16),
    inputs=st.integers(1, 300),
    outputs=st.integers(101, 700),
    seed=st.integers(0, 999),
)
def test_many_outputs(format_: tuple[Kind, torch.dtype], rows: int, inputs: int, outputs: int, seed: int) -> None:
    """Enough for several turns of a thread at tiles side by side, and some that are left over."""
    torch.manual_seed(seed)
    kind, dtype = format_
    x, weight = spread(rows, inputs).to(dtype), spread(outputs, inputs)
    with threads(2):
        assert_close(linear(x, packed(kind, weight, None, [])), kind, x, weight, None)


@pytest.mark.parametrize("outputs", [513, 600])
@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_interleaved_matrices_have_the_products_of_each(format_: tuple[Kind, torch.dtype], outputs: int) -> None:
    """To the bit, with so many outputs that their tiles are walked side by side too."""
    torch.manual_seed(0)
    kind, dtype = format_
    x, parts = torch.randn(13, 100).to(dtype), torch.randn(2, outputs, 100)
    matrix = Matrix(kind, outputs, 100, interleaved=True)
    for part, weight in enumerate(parts):
        matrix.fill(weight, 0, part)
    with threads(2):
        alone = [linear(x, packed(kind, weight, None, [])) for weight in parts]
        for rows in range(1, 14):
            tiles = linear(x[:rows], matrix).view(rows, -1, 2, TILE)
            for part in (0, 1):
                assert torch.equal(tiles[:, :, part].flatten(1)[:, :outputs], alone[part][:rows])


@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_no_rows_have_no_products(format_: tuple[Kind, torch.dtype]) -> None:
    """As in a step that samples nothing."""
    kind, dtype = format_
    assert linear(torch.zeros(0, 64, dtype=dtype), Matrix(kind, 300, 64)).shape == (0, 300)


# ---- The same bits in every batch ----


@pytest.mark.parametrize("inputs", [100, 352, 2200])
@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_products_are_the_same_past_the_caches(format_: tuple[Kind, torch.dtype], inputs: int) -> None:
    torch.manual_seed(0)
    kind, dtype = format_
    x, matrix = torch.randn(13, inputs).to(dtype), packed(kind, torch.randn(130, inputs), None, [])
    for rows in range(1, len(x) + 1):
        matrix.streamed = False
        kept = linear(x[:rows], matrix)
        matrix.streamed = True
        assert torch.equal(linear(x[:rows], matrix), kept)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("inputs", "outputs"), [(17, 5), (64, 33), (352, 130), (100, 2100), (2200, 70)])
@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_a_row_depends_on_itself_alone(
    format_: tuple[Kind, torch.dtype], inputs: int, outputs: int, num_threads: int
) -> None:
    """In batches of 1 to 300 rows, at other places: bits as when all are computed."""
    torch.manual_seed(0)
    kind, dtype = format_
    matrix = packed(kind, torch.randn(outputs, inputs), torch.randn(outputs), [])
    x = torch.randn(300, inputs).to(dtype)
    with threads(num_threads):
        whole = linear(x, matrix)
        for rows in (*range(1, 41), 48, 49, 64, 80, 96, 97, 128):
            for begin in (0, 7 * rows % (300 - rows), 300 - rows):
                chosen = slice(begin, begin + rows)
                assert torch.equal(linear(x[chosen], matrix), whole[chosen]), f"{rows} rows from {begin}"
        order = torch.randperm(300)
        assert torch.equal(linear(x[order], matrix), whole[order])


@pytest.mark.parametrize("inputs", [512, 1024, 1056, 2080])
@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_a_sum_goes_on_where_inputs_are_cut(format_: tuple[Kind, torch.dtype], inputs: int) -> None:
    """Several rows walk a tile in pieces, part by part: bits as of single rows, which walk it at once."""
    torch.manual_seed(0)
    kind, dtype = format_
    x, matrix = torch.randn(100, inputs).to(dtype), packed(kind, torch.randn(70, inputs), None, [])
    alone = torch.cat([linear(x[row : row + 1], matrix) for row in range(len(x))])
    for rows in (3, 6, 7, 13, 31, 48, 79, 100):
        assert torch.equal(linear(x[:rows], matrix), alone[:rows]), f"{rows} rows"


@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_the_number_of_threads_changes_nothing(format_: tuple[Kind, torch.dtype]) -> None:
    torch.manual_seed(0)
    kind, dtype = format_
    x, matrix = torch.randn(70, 200).to(dtype), packed(kind, torch.randn(2100, 200), None, [])
    results = []
    for count in (1, 2, 3, 5):
        with threads(count):
            results.append(linear(x, matrix))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_rows_that_are_not_finite_spoil_no_other(format_: tuple[Kind, torch.dtype], bad: float) -> None:
    torch.manual_seed(0)
    kind, dtype = format_
    x, matrix = torch.randn(40, 100).to(dtype), packed(kind, torch.randn(50, 100), None, [])
    clean = linear(x, matrix)
    spoiled = random.Random(0).sample(range(40), 9)
    others = [row for row in range(40) if row not in spoiled]
    x[spoiled] = bad
    out = linear(x, matrix)
    assert torch.equal(out[others], clean[others])
    assert not out[spoiled].isfinite().any(), "and they say so themselves"


@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_nothing_is_left_of_calls_before(format_: tuple[Kind, torch.dtype]) -> None:
    """Memory that they used is used again, for rows of other sizes."""
    torch.manual_seed(0)
    kind, dtype = format_
    large = packed(kind, torch.randn(90, 300), None, [])
    weight = torch.randn(21, 35)
    small = packed(kind, weight, None, [])
    for rows in (5, 18, 40):
        x = torch.randn(rows, 35).to(dtype)
        linear(torch.full((70, 300), torch.nan, dtype=dtype), large)
        assert_close(linear(x, small), kind, x, weight, None)
