"""Products with few rows, in every way that they may be cut, against float64; interpreted where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline_kernels import Int8Weight
from support.backends import DEVICE, ULP

pytest.importorskip("triton")

from paceline_kernels.triton import linear as module
from paceline_kernels.triton.elementwise import silu_mul
from paceline_kernels.triton.linear import (
    BEYOND,
    CANDIDATES,
    Choice,
    Config,
    bucket,
    linear,
    linear_silu_mul,
    product,
)

# Small tiles, which the interpreter walks in a moment; on a GPU the real ones too.
SMALL = [Config(1, 4, 32, 4, 2), Config(16, 16, 32, 4, 2), Config(16, 16, 32, 4, 2, swapped=True)]
GATING = [*(("bf16", config) for config in SMALL), *(("int8", config) for config in SMALL if not config.swapped)]
REAL = [(kind, config) for (kind, _), configs in CANDIDATES.items() for config in configs]


def matrices(outputs: int, inputs: int, kind: str) -> tuple[Tensor | Int8Weight, Tensor]:
    """A weight, and what it stands for in float64."""
    values = torch.randn(outputs, inputs).to(DEVICE, torch.bfloat16)
    if kind == "bf16":
        return values, values.double()
    weight = Int8Weight.empty(outputs, inputs, DEVICE)
    weight.copy_(values)
    return weight, weight.values.double() * weight.scales.double()[:, None]


def assert_product(config: Config, rows: int, outputs: int, inputs: int, kind: str, with_bias: bool) -> None:
    weight, exact = matrices(outputs, inputs, kind)
    # A view of wider rows with NaN between them.
    wide = torch.full((rows, inputs + 16), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[:, :inputs] = torch.randn(rows, inputs)
    x = wide[:, :inputs]
    bias = torch.randn(outputs).to(DEVICE, torch.bfloat16) if with_bias else None
    found = product(x, weight, bias, config)
    assert found.shape == (rows, outputs)
    expected = x.double() @ exact.T + (0 if bias is None else bias.double())
    torch.testing.assert_close(found.double(), expected, rtol=ULP, atol=1e-3)
    assert torch.equal(product(x, weight, bias, config), found), "the same bits every time"


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    config=st.sampled_from(SMALL),
    programs=st.sampled_from([0, 2]),
    rows=st.integers(1, 35),
    outputs=st.integers(1, 50),
    inputs=st.one_of(st.integers(1, 140), st.sampled_from([64, 128, 256])),
    kind=st.sampled_from(["bf16", "int8"]),
    with_bias=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_size_with_and_without_splits(
    config: Config,
    programs: int,
    rows: int,
    outputs: int,
    inputs: int,
    kind: str,
    with_bias: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    cut = replace(config, programs=programs)
    assert_product(cut, 1 if cut.block_m == 1 else rows, outputs, inputs, kind, with_bias)


@pytest.mark.parametrize(("kind", "config"), GATING)
@pytest.mark.parametrize("size", [1, 6, 35])
def test_what_one_kernel_multiplies_it_gates(
    monkeypatch: pytest.MonkeyPatch, size: int, kind: str, config: Config
) -> None:
    """To the bit, since it is rounded where that is."""
    torch.manual_seed(size)
    inputs, rows, choice = 96, min(config.block_m, 5), Choice()
    key = bucket(rows), 2 * size, inputs, kind, True
    choice.table[key] = config = replace(config, programs=0)
    monkeypatch.setattr(module, "CHOICE", choice)
    weight, _ = matrices(2 * size, inputs, kind)
    x, bias = (torch.randn(*shape).to(DEVICE, torch.bfloat16) for shape in ((rows, inputs), (2 * size,)))
    taken: list[bool] = []
    monkeypatch.setattr(module, "product", lambda *args, **more: taken.append(bool(more)) or product(*args, **more))
    for more in (None, 20 * bias):
        found = linear_silu_mul(x, weight, more)
        assert torch.equal(found, silu_mul(product(x, weight, more, config)))
    assert taken == [True, True]
    # What is split is gated by a kernel of its own.
    choice.table[key] = split = replace(config, block_k=16, programs=8)
    assert torch.equal(linear_silu_mul(x, weight), silu_mul(product(x, weight, None, split)))
    assert not any(taken[2:])
    with pytest.raises(ValueError, match=r"gates: .* splits: expected pairs, and 1"):
        product(x, weight, None, split, gated=True)
    with pytest.raises(ValueError, match=f"gates: {2 * size - 1} outputs in blocks of {config.block_n}"):
        product(x, matrices(2 * size - 1, inputs, kind)[0], None, config, gated=True)


@pytest.mark.parametrize(("kind", "config"), REAL, ids=str)
def test_the_ways_that_are_tried(kind: str, config: Config) -> None:
    torch.manual_seed(0)
    outputs, inputs = (140, 1100) if DEVICE.type == "cpu" else (6144, 4096)
    rows = min(config.block_m, 67)
    assert_product(config, rows, outputs, inputs, kind, with_bias=True)
    weight, x = matrices(outputs, inputs, kind)[0], torch.randn(rows, inputs).to(DEVICE, torch.bfloat16)
    whole = replace(config, programs=0)
    assert torch.equal(product(x, weight, None, whole, gated=True), silu_mul(product(x, weight, None, whole)))


def test_rows_fall_into_buckets() -> None:
    assert [bucket(rows) for rows in (0, 1, 2, 16, 17, 33, 64, 65, 4096)] == [1, 1, 16, 16, 32, 64, 64, 128, 128]
    assert {block_m for _, block_m in CANDIDATES} == {1, 16, 32, 64, BEYOND}
    assert all(config.block_m == block_m for (_, block_m), configs in CANDIDATES.items() for config in configs)


def test_a_choice_that_was_made_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was not tuned goes through cuBLAS, if it can."""
    torch.manual_seed(0)
    taken: list[Config] = []
    choice = Choice()
    monkeypatch.setattr(module, "CHOICE", choice)
    monkeypatch.setattr(module, "product", lambda *args: taken.append(args[-1]) or product(*args))
    x = torch.randn(3, 64).to(DEVICE, torch.bfloat16)
    weight, exact = matrices(20, 64, "bf16")
    linear(x, weight)
    assert taken == []
    choice.table[16, 20, 64, "bf16", False] = SMALL[1]
    torch.testing.assert_close(linear(x, weight).double(), x.double() @ exact.T, rtol=ULP, atol=1e-3)
    assert taken == [SMALL[1]]
    linear(x, matrices(20, 64, "int8")[0])
    assert taken == [SMALL[1], CANDIDATES["int8", 16][0]]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_tuning_takes_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROTATED_BYTES", 32 << 20)
    choice, reported = Choice(), []
    kinds = [(kind, gates) for kind in ("bf16", "int8") for gates in (False, True)]
    linears = [(matrices(1024, 1024, kind)[0], gates) for kind, gates in kinds for _ in range(2)]
    choice.tune(linears, (1, 5), lambda *args: reported.append(args))
    assert choice.table.keys() == {(rows, 1024, 1024, *kind) for rows in (1, 16) for kind in kinds}
    for rows, *shape, seconds in reported:
        assert all(value > 0 for value in seconds.values())
        assert seconds[choice.table[bucket(rows), *shape]] == min(seconds.values())
