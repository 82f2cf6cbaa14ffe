"""The operations of sampling in Triton against the torch reference; test_sampling_ops has what holds for all."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import paceline_kernels.reference_sampling as reference
import paceline_kernels.sampling as public
from ops.test_sampling_ops import MAKERS, STEPS, Parameters, keys, off, temperatures
from paceline_kernels.triton import sampling
from paceline_kernels.triton.sampling import draw_from
from support import triton_sampling as mine

ROWS_EACH, VOCABS = 2, [1, 90]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is several."""
    monkeypatch.setattr(sampling, "LARGEST_BLOCK", 64)


@pytest.fixture(params=VOCABS)
def logits(request: pytest.FixtureRequest) -> Tensor:
    """Rows of every kind."""
    torch.manual_seed(0)
    return torch.cat([make(request.param)[:ROWS_EACH] for make in MAKERS])


def some_temperatures(rows: int) -> Tensor:
    """The smallest and the largest, too."""
    return temperatures(rows)[torch.randperm(rows)].index_fill(0, torch.tensor([1]), 1e30)


def test_argmax_equals_reference(logits: Tensor) -> None:
    assert torch.equal(mine.argmax(logits), reference.argmax(logits))


@pytest.mark.parametrize("step", [step for step in STEPS if step != "large top_k"])
def test_truncate_equals_reference(step: str, logits: Tensor) -> None:
    """What ties with the last kept stays; nothing lies so near a threshold that rounding decides."""
    rows = len(logits)
    values: Parameters = {name: value[:rows] for name, value in STEPS[step]().items()}
    if "top_k" in values:
        values["top_k"] = values["top_k"] % 100
    parameters = off(rows) | {"temperature": some_temperatures(rows)} | values
    found, wanted = logits.clone(), logits.clone()
    mine.truncate_(found, **parameters)
    reference.truncate_(wanted, **parameters)
    assert torch.equal(found, wanted)


def test_extreme_limits_keep_what_the_reference_keeps(logits: Tensor) -> None:
    rows = len(logits)
    parameters = off(rows)
    for name, values in {
        "top_p": [1e-50, 1e-30, 1 - 2.0**-24, 0.5],
        "typical_p": [1.0, 1e-50],
        "min_p": [1.0, 1e-30, 0.5],
    }.items():
        parameters[name] = torch.tensor(values).repeat(rows)[:rows]
    found, wanted = logits.clone(), logits.clone()
    mine.truncate_(found, **parameters)
    reference.truncate_(wanted, **parameters)
    assert torch.equal(found, wanted)


def test_both_zeros_are_one_value() -> None:
    logits = torch.tensor([[0.0, -0.0, -1.0, -0.0]]).repeat(2, 1)
    parameters = off(2) | {"top_k": torch.tensor([1, 0]), "top_p": torch.tensor([1.0, 0.3])}
    mine.truncate_(logits, **parameters)
    assert (logits > -torch.inf).tolist() == [[True, True, False, True]] * 2


def test_softmax_equals_reference(logits: Tensor) -> None:
    found, wanted, warmth = logits.clone(), logits.double(), some_temperatures(len(logits))
    mine.softmax_(found, warmth)
    reference.softmax_(wanted, warmth)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=1e-37)
    assert bool((found[logits == -torch.inf] == 0).all())


def test_the_distribution_is_both_steps(logits: Tensor) -> None:
    rows = len(logits)
    limits = off(rows) | {"temperature": some_temperatures(rows), "top_k": torch.arange(rows) % 9}
    expected, found = logits.clone(), logits.clone()
    mine.truncate_(expected, **limits)
    mine.softmax_(expected, limits["temperature"])
    mine.distribution_(found, **limits)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("vocab", [1, 7, 700])
def test_gumbel_argmax_equals_reference(vocab: int) -> None:
    """Of many blocks, most of which are never looked at closely."""
    torch.manual_seed(2)
    logits = torch.cat([make(vocab)[:ROWS_EACH] for make in MAKERS])
    warmth, key = some_temperatures(len(logits)), keys(len(logits))
    assert torch.equal(mine.gumbel_argmax(logits, warmth, key), reference.gumbel_argmax(logits, warmth, key))


def test_draw_equals_reference(logits: Tensor) -> None:
    weights = 3 * logits.softmax(-1).nan_to_num(0)
    u = torch.rand(len(weights), dtype=torch.float64)
    assert torch.equal(mine.draw(weights, u), reference.draw(weights, u))


@triton.jit
def _draw_left(p, q, scale, skips, u, out, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    skip = tl.load(skips + i)
    row = i * VOCAB
    token = draw_from(p + row, q + row, skip < 0, tl.load(scale + i), skip, True, tl.load(u + i), VOCAB, BLOCK)
    tl.store(out + i, token)


def drawn_from_left(p: Tensor, q: Tensor, scale: Tensor, skips: Tensor, u: Tensor) -> Tensor:
    rows, vocab = p.shape
    out = torch.empty(rows, dtype=torch.int32, device=mine.DEVICE)
    there = [x.to(mine.DEVICE) for x in (p, q, scale, skips, u)]
    _draw_left[(rows,)](*there, out, VOCAB=vocab, BLOCK=64)
    return out.cpu().long()


@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_from_what_is_left_equal_reference(vocab: int) -> None:
    """Of the target less the draft's weights, and of the target alone where nothing is."""
    torch.manual_seed(0)
    p, q = torch.rand(9, vocab), torch.rand(9, vocab)
    q[:3] = p[:3]
    scale, u = torch.tensor([1.0, 0.5, 2.0] * 3), torch.rand(9, dtype=torch.float64)
    rows, skips = torch.arange(9), torch.full((9,), -1, dtype=torch.int32)
    wanted = reference.draw(reference.residual(p, q, rows, rows, scale, torch.empty_like(p)), u)
    assert torch.equal(drawn_from_left(p, q, scale, skips, u), wanted)


def test_a_skipped_token_is_drawn_only_where_there_is_no_other() -> None:
    p = torch.zeros(2, 90)
    p[:, 70], p[1, 3] = 1 - 2.0**-24, 1e-9
    u, skips = torch.full((2,), 0.5, dtype=torch.float64), torch.full((2,), 70, dtype=torch.int32)
    assert drawn_from_left(p, torch.ones_like(p), torch.ones(2), skips, u).tolist() == [70, 3]


# --- which rows come here ---


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """One, or what passes for one."""
    monkeypatch.setattr(public, "_on_gpu", lambda logits: True)
    public._triton.cache_clear()
    yield mine.DEVICE
    public._triton.cache_clear()


def test_contiguous_float32_on_a_gpu_is_computed_here(gpu: torch.device) -> None:
    torch.manual_seed(0)
    logits = torch.cat([make(90)[:ROWS_EACH] for make in MAKERS]).to(gpu)
    assert public._rows(logits) is sampling
    assert public._rows(logits.double()) is reference
    assert public._rows(logits.T) is reference
    rows = len(logits)
    limits = {name: x.to(gpu) for name, x in off(rows).items()} | {"top_k": torch.arange(rows, device=gpu) % 9}
    found, expected = logits.clone(), logits.clone()
    public.distribution_(found, **limits)
    sampling.distribution_(expected, **limits)
    assert torch.equal(found, expected)
    assert torch.equal(public.argmax(logits).cpu(), reference.argmax(logits.cpu()))


def test_no_number_is_no_crash(gpu: torch.device) -> None:
    logits = torch.full((3, 90), torch.nan, device=gpu)
    logits[1, 70] = 1.0
    logits[2] = -torch.inf
    limits = {name: x.to(gpu) for name, x in (off(3) | {"top_p": torch.full((3,), 0.5)}).items()}
    key, u = keys(3).to(gpu), torch.full((3,), 0.5, dtype=torch.float64, device=gpu)
    assert public.argmax(logits).tolist() == [0, 70, 0]
    assert public.gumbel_argmax(logits, limits["temperature"], key).tolist() == [0, 70, 0]
    public.truncate_(logits, **limits)
    public.softmax_(logits, limits["temperature"])
    assert logits.sum(-1).tolist() == [0, 1, 0]
    assert public.draw(logits, u).tolist() == [0, 70, 0]


@pytest.mark.parametrize("broken", ["not installed", "no compiler"])
def test_without_triton_torch_computes(
    broken: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(logits: Tensor) -> Tensor:
        raise RuntimeError("Failed to find C compiler")

    if broken == "not installed":
        monkeypatch.delattr("paceline_kernels.triton.sampling")
        monkeypatch.setitem(sys.modules, "paceline_kernels.triton.sampling", None)
    else:
        monkeypatch.setattr(sampling, "argmax", fail)
    with caplog.at_level(logging.WARNING):
        assert public.argmax(torch.eye(3, device=gpu)).tolist() == [0, 1, 2]
        assert public._rows(torch.eye(3, device=gpu)) is reference
    assert len(caplog.records) == 1, "it is said once"


def test_a_gpu_without_memory_is_asked_again(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(logits: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(sampling, "argmax", fail)
        with pytest.raises(torch.OutOfMemoryError):
            public._rows(torch.eye(3, device=gpu))
    assert public._rows(torch.eye(3, device=gpu)) is sampling
