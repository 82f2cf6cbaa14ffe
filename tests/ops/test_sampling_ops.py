"""The operations of sampling: the C++ against the torch reference, and the reference against the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from transformers import TypicalLogitsWarper

import paceline_kernels.reference_sampling as reference
from paceline_kernels import sampling
from paceline_kernels.cpu import sampling as cpu
from support import triton_sampling

VOCABS = [1, 7, 16, 1000, 4097]
NUM_ROWS = 24
JUST_BELOW_1 = 1 - 2.0**-53

needs_compiler = pytest.mark.skipif(not cpu.available(), reason="no C++ compiler")
BACKENDS = [pytest.param(cpu, id="cpu", marks=needs_compiler), pytest.param(reference, id="reference")]
# Without a GPU Triton takes seconds for what others do in a moment.
ALL_BACKENDS = [*BACKENDS, pytest.param(triton_sampling, id="triton")]


def random(vocab: int) -> Tensor:
    return torch.randn(NUM_ROWS, vocab)


def peaked(vocab: int) -> Tensor:
    return 8 * torch.randn(NUM_ROWS, vocab)


def tied(vocab: int) -> Tensor:
    return (2 * torch.randn(NUM_ROWS, vocab)).round()


def masked(vocab: int) -> Tensor:
    logits = random(vocab).masked_fill(torch.rand(NUM_ROWS, vocab) < 0.7, -torch.inf)
    logits[0] = -torch.inf
    return logits


def rounded(vocab: int) -> Tensor:
    return (4 * torch.randn(NUM_ROWS, vocab)).bfloat16().float()


def outliers(vocab: int) -> Tensor:
    logits = random(vocab)
    logits[:, ::3] = -1e30
    return logits


MAKERS = [random, peaked, tied, masked, rounded, outliers]
Parameters = dict[str, Tensor]


@pytest.fixture(params=[(make, vocab) for make in MAKERS for vocab in VOCABS], ids=lambda p: f"{p[0].__name__}-{p[1]}")
def logits(request: pytest.FixtureRequest) -> Tensor:
    torch.manual_seed(0)
    make, vocab = request.param
    return make(vocab)  # type: ignore[no-any-return]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def temperatures(rows: int = NUM_ROWS) -> Tensor:
    """From the smallest allowed to hot."""
    return torch.cat([torch.tensor([1e-30, 1.0, 0.1]), 2 * torch.rand(rows)])[:rows].clamp(min=1e-30)


def keys(rows: int = NUM_ROWS) -> Tensor:
    return torch.randint(0, 1 << 32, (rows, 4))


def off(rows: int) -> Parameters:
    return {
        "temperature": torch.ones(rows),
        "top_k": torch.zeros(rows, dtype=torch.int64),
        "top_p": torch.ones(rows),
        "min_p": torch.zeros(rows),
        "typical_p": torch.ones(rows),
    }


def shares(rows: int = NUM_ROWS) -> Tensor:
    return torch.rand(rows).clamp(min=1e-3)


STEPS: dict[str, Callable[[], Parameters]] = {
    "min_p": lambda: {"min_p": 0.3 * torch.rand(NUM_ROWS)},
    "typical_p": lambda: {"typical_p": shares()},
    "top_k": lambda: {"top_k": torch.randint(0, 200, (NUM_ROWS,))},
    "large top_k": lambda: {"top_k": torch.randint(200, 5000, (NUM_ROWS,))},
    "top_p": lambda: {"top_p": shares()},
    "all": lambda: {
        "min_p": 0.1 * torch.rand(NUM_ROWS),
        "typical_p": shares(),
        "top_k": torch.randint(0, 50, (NUM_ROWS,)),
        "top_p": shares(),
    },
    "some rows": lambda: {"top_k": torch.arange(NUM_ROWS) % 2 * 3, "top_p": 1 - torch.arange(NUM_ROWS) % 3 / 4},
}


def truncated(backend: ModuleType, logits: Tensor, parameters: Parameters) -> Tensor:
    out = logits.clone()
    backend.truncate_(out, **parameters)
    return out


# --- C++ against the reference ---


@needs_compiler
def test_argmax_equals_reference(logits: Tensor) -> None:
    assert torch.equal(cpu.argmax(logits), reference.argmax(logits))


@needs_compiler
def test_mask_equals_reference(logits: Tensor) -> None:
    rows = torch.randperm(NUM_ROWS)[:10]
    words = (logits.shape[1] + 31) // 32
    bitmask = torch.randint(-(1 << 31), 1 << 31, (10, words), dtype=torch.int32)
    bitmask[0], bitmask[1] = -1, 0
    mine, wanted = logits.clone(), logits.clone()
    cpu.mask_(mine, rows, bitmask)
    reference.mask_(wanted, rows, bitmask)
    assert torch.equal(mine, wanted)


@needs_compiler
@pytest.mark.parametrize("step", STEPS)
def test_truncate_equals_reference(step: str, logits: Tensor) -> None:
    """Rounding may only move tokens whose mass lies on the threshold; none of these does."""
    parameters = off(NUM_ROWS) | {"temperature": temperatures()} | STEPS[step]()
    assert torch.equal(truncated(cpu, logits, parameters), truncated(reference, logits, parameters))


@needs_compiler
def test_softmax_equals_reference(logits: Tensor) -> None:
    mine, wanted = logits.clone(), logits.double()
    warmth = temperatures()
    cpu.softmax_(mine, warmth)
    reference.softmax_(wanted, warmth)
    # float32 holds x to a relative 2^-23 or so, which at x = -87 is 1e-5 of e^x.
    torch.testing.assert_close(mine.double(), wanted, rtol=2e-5, atol=1e-37)
    assert bool((mine[logits == -torch.inf] == 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_distribution_is_both_steps(backend: ModuleType, logits: Tensor) -> None:
    rows = len(logits)
    limits = off(rows) | {
        "temperature": temperatures(rows),
        "top_k": torch.randint(0, 9, (rows,)),
        "top_p": shares(rows),
    }
    expected, found = logits.clone(), logits.clone()
    backend.truncate_(expected, *limits.values())
    backend.softmax_(expected, limits["temperature"])
    backend.distribution_(found, *limits.values())
    assert torch.equal(found, expected)


@needs_compiler
def test_gumbel_argmax_equals_reference(logits: Tensor) -> None:
    warmth = temperatures()
    for _ in range(4):
        key = keys()
        assert torch.equal(cpu.gumbel_argmax(logits, warmth, key), reference.gumbel_argmax(logits, warmth, key))


@needs_compiler
def test_sums_equal_reference(logits: Tensor) -> None:
    p = logits.softmax(-1).nan_to_num(0)
    q, scale = p.flip(0).contiguous(), 2 * torch.rand(40)
    pairs = torch.randint(NUM_ROWS, (40,)), torch.randint(NUM_ROWS, (40,))
    close = torch.testing.assert_close
    close(cpu.residual_mass(p, q, *pairs, scale), reference.residual_mass(p, q, *pairs, scale), rtol=1e-13, atol=1e-16)
    close(cpu.overlap(p, q, *pairs), reference.overlap(p, q, *pairs), rtol=1e-13, atol=1e-16)
    pairs[1][::3] = -1
    ours, theirs = torch.empty(40, p.shape[1]), torch.empty(40, p.shape[1])
    close(
        cpu.residual(p, q, *pairs, scale, ours), reference.residual(p, q, *pairs, scale, theirs), rtol=1e-6, atol=1e-7
    )
    same = torch.arange(NUM_ROWS)
    nothing = cpu.residual(p, p, same, same, torch.ones(NUM_ROWS), torch.empty_like(p))
    assert torch.equal(nothing, p), "nothing is left: p"


@needs_compiler
def test_draw_equals_reference(logits: Tensor) -> None:
    weights = 3 * logits.softmax(-1).nan_to_num(0)
    for _ in range(4):
        u = torch.rand(NUM_ROWS, dtype=torch.float64)
        assert torch.equal(cpu.draw(weights, u), reference.draw(weights, u))


# --- the reference against the definitions ---


@pytest.mark.parametrize(
    ("word", "wanted"),
    [(0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"), (0xFFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd")],
)
def test_philox_has_the_published_values(word: int, wanted: str) -> None:
    """Of the known-answer tests of Random123."""
    words = torch.full((1,), word)
    out = reference.philox((words, words, words, words), (words, words))
    assert " ".join(f"{int(x):08x}" for x in out) == wanted


def test_gumbel_argmax_is_its_definition() -> None:
    """Token by token, from the words on."""
    torch.manual_seed(1)
    logits, warmth, key = torch.randn(6, 37, dtype=torch.float64), temperatures(6), keys(6)
    for row, winner in enumerate(reference.gumbel_argmax(logits, warmth, key).tolist()):
        seed_low, seed_high, position, choice = key[row].split(1)
        scores = []
        for v in range(37):
            counter = (torch.tensor([v >> 2]), position, choice, torch.tensor([0x50414345]))
            word = int(reference.philox(counter, (seed_low, seed_high))[v & 3])
            w = min((word + 0.5) * 2.0**-32, 1 - 2.0**-24)
            x = float(logits[row, v] - logits[row].max()) / float(warmth[row])
            scores.append(x - math.log(-math.log1p(-w)))
        assert winner == int(np.argmax(scores))


def kept_by_definition(logits: list[float], k: int, top_p: float, min_p: float, typical_p: float) -> set[int]:
    """Token sets and plain sums, at temperature 1."""

    def probs(tokens: set[int]) -> dict[int, float]:
        total = math.fsum(math.exp(logits[v]) for v in tokens)
        return {v: math.exp(logits[v]) / total for v in tokens}

    def first_reaching(p: dict[int, float], rank: Callable[[int], float], share: float) -> set[int]:
        mass, last = 0.0, math.inf
        for v in sorted(p, key=rank):
            if mass >= share and rank(v) != last:
                break
            mass, last = mass + p[v], rank(v)
        return {v for v in p if rank(v) <= last}

    p = probs({v for v, x in enumerate(logits) if x > -math.inf})
    p = probs({v for v in p if p[v] >= min_p * max(p.values())})
    if typical_p < 1:
        entropy = -math.fsum(x * math.log(x) for x in p.values())
        p = probs(first_reaching(p, lambda v: abs(-math.log(p[v]) - entropy), typical_p))
    if 0 < k < len(p):
        limit = sorted((logits[v] for v in p), reverse=True)[k - 1]
        p = probs({v for v in p if logits[v] >= limit})
    if top_p < 1:
        p = probs(first_reaching(p, lambda v: -logits[v], top_p))
    return set(p)


@pytest.mark.parametrize("make", [random, peaked, tied, masked])
@pytest.mark.parametrize("seed", range(5))
def test_truncate_is_its_definition(make: Callable[[int], Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    logits = make(50).double()[1:]
    rows = len(logits)
    parameters = off(rows) | {
        "top_k": torch.randint(0, 30, (rows,)),
        "top_p": shares(rows),
        "min_p": 0.05 * torch.rand(rows),
        # Ties of surprise are ties of float64 rounding in the definition, so tied logits go without.
        "typical_p": torch.ones(rows) if make is tied else shares(rows),
    }
    out = truncated(reference, logits, parameters)
    for row in range(rows):
        arguments = (float(parameters[name][row]) for name in ("top_p", "min_p", "typical_p"))
        wanted = kept_by_definition(logits[row].tolist(), int(parameters["top_k"][row]), *arguments)
        kept = out[row] > -torch.inf
        assert set(kept.nonzero().flatten().tolist()) == wanted
        assert torch.equal(out[row][kept], logits[row][kept])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_typical_equals_transformers(share: float) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(NUM_ROWS, 300, dtype=torch.float64)
    parameters = off(NUM_ROWS) | {"typical_p": torch.full((NUM_ROWS,), share)}
    wanted = TypicalLogitsWarper(mass=share)(torch.zeros(NUM_ROWS, 1, dtype=torch.int64), logits)
    assert torch.equal(truncated(reference, logits, parameters), wanted)


def test_sums_are_their_definitions() -> None:
    torch.manual_seed(0)
    p, q = torch.rand(3, 40, dtype=torch.float64), torch.rand(3, 40, dtype=torch.float64)
    for row, scale in enumerate((0.0, 0.7, 2.0)):
        pairs = list(zip(p[row].tolist(), q[row].tolist(), strict=True))
        where, weight = (torch.tensor([row]), torch.tensor([row])), torch.tensor([scale], dtype=torch.float64)
        mass = reference.residual_mass(p, q, *where, weight).item()
        assert mass == pytest.approx(math.fsum(max(scale * x - y, 0) for x, y in pairs), rel=1e-13)
        left = [max(scale * x - y, 0) for x, y in pairs]
        wanted = left if any(left) else [x for x, _ in pairs]
        found = reference.residual(p, q, *where, weight, torch.empty(1, 40, dtype=torch.float64))
        assert found[0].tolist() == pytest.approx(wanted, rel=1e-13)
        overlap = reference.overlap(p, q, *where).item()
        assert overlap == pytest.approx(math.fsum(min(x, y) for x, y in pairs), rel=1e-13)


# --- what holds for every backend ---


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_depend_on_each_other(backend: ModuleType, two_threads: None) -> None:
    """Alone with one thread, or among others at another alignment with two: the same bits."""
    torch.manual_seed(0)
    vocab = 4097
    logits = torch.cat([random(vocab), peaked(vocab), masked(vocab)])
    rows = len(logits)
    parameters = off(rows) | {
        "temperature": temperatures(rows),
        "top_k": torch.randint(0, 100, (rows,)),
        "top_p": shares(rows),
        "typical_p": shares(rows),
    }
    key, u, scale = keys(rows), torch.rand(rows, dtype=torch.float64), torch.rand(rows)

    def outcome(pick: slice) -> list[Tensor]:
        mine = {name: value[pick] for name, value in parameters.items()}
        probs = logits[pick].clone()
        backend.softmax_(probs, mine["temperature"])
        other = probs.flip(1).contiguous()
        pairs = torch.arange(len(probs)), torch.arange(len(probs))
        return [
            probs,
            truncated(backend, logits[pick], mine),
            backend.argmax(logits[pick]),
            backend.gumbel_argmax(logits[pick], mine["temperature"], key[pick]),
            backend.residual_mass(probs, other, *pairs, scale[pick]),
            backend.residual(probs, other, *pairs, scale[pick], torch.empty_like(probs)),
            backend.overlap(probs, other, *pairs),
            backend.draw(probs, u[pick]),
        ]

    together = outcome(slice(None))
    torch.set_num_threads(1)
    for row in range(0, rows, 5):
        for whole, alone in zip(together, outcome(slice(row, row + 1)), strict=True):
            assert torch.equal(whole[row], alone[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("make", [random, peaked, tied, rounded])
def test_a_permutation_of_the_vocabulary_permutes_what_is_kept(
    backend: ModuleType, step: str, make: Callable[[int], Tensor]
) -> None:
    torch.manual_seed(0)
    logits = make(4097)
    parameters = off(NUM_ROWS) | STEPS[step]()
    order = torch.randperm(4097)
    permuted = truncated(backend, logits[:, order].contiguous(), parameters)
    assert torch.equal(permuted, truncated(backend, logits, parameters)[:, order])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", STEPS)
def test_at_least_one_token_stays(backend: ModuleType, step: str) -> None:
    for value in (1e-30, 1.0, 100.0):
        logits = peaked(1000)
        parameters = off(NUM_ROWS) | STEPS[step]() | {"temperature": torch.full((NUM_ROWS,), value)}
        out = truncated(backend, logits, parameters)
        assert bool((out > -torch.inf).any(-1).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", ["top_p", "typical_p"])
@pytest.mark.parametrize("top_k", [0, 50])
def test_a_share_that_rounds_to_0_keeps_a_token(backend: ModuleType, step: str, top_k: int) -> None:
    torch.manual_seed(0)
    parameters = off(NUM_ROWS) | {"top_k": torch.full((NUM_ROWS,), top_k), step: torch.full((NUM_ROWS,), 1e-50)}
    kept = truncated(backend, random(1000), parameters) > -torch.inf
    assert bool((kept.sum(-1) == 1).all())


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_ties_are_kept_together(backend: ModuleType) -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]]).expand(4, -1).contiguous()
    parameters = off(4) | {
        "top_k": torch.tensor([2, 0, 1, 5]),
        "top_p": torch.tensor([1.0, 0.6, 1.0, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 1.0]),
    }
    kept = truncated(backend, logits, parameters) > -torch.inf
    assert kept.sum(-1).tolist() == [4, 4, 1, 1]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_rows_with_everything_off_stay(backend: ModuleType) -> None:
    """top_k of the whole vocabulary or more is off too; NaN would not survive a comparison."""
    logits = torch.full((3, 100), torch.nan)
    parameters = off(3) | {"top_k": torch.tensor([0, 100, 1000])}
    assert bool(truncated(backend, logits, parameters).isnan().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_gumbel_argmax_samples_the_softmax(backend: ModuleType) -> None:
    count, vocab = 20_000, 23
    torch.manual_seed(0)
    logits, warmth = torch.randn(vocab), 0.7
    key = torch.stack([torch.full((count,), 5), torch.full((count,), 9), torch.arange(count), torch.ones(count)], 1)
    winners = backend.gumbel_argmax(logits.repeat(count, 1), torch.full((count,), warmth), key.long())
    wanted = (logits.double() / warmth).softmax(-1) * count
    assert scipy.stats.chisquare(winners.bincount(minlength=vocab), wanted).pvalue > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_draw_samples_the_weights(backend: ModuleType) -> None:
    count, vocab = 20_000, 23
    torch.manual_seed(0)
    weights = torch.rand(vocab)
    drawn = backend.draw(weights.repeat(count, 1), torch.rand(count, dtype=torch.float64))
    wanted = weights.double() / weights.double().sum() * count
    assert scipy.stats.chisquare(drawn.bincount(minlength=vocab), wanted).pvalue > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("word", range(4))
def test_every_part_of_a_key_changes_the_noise(backend: ModuleType, word: int) -> None:
    logits, warmth = torch.zeros(64, 1000), torch.ones(64)
    key = torch.arange(4).repeat(64, 1)
    key[:, word] = torch.arange(64) * 0x1000001
    assert len(set(backend.gumbel_argmax(logits, warmth, key).tolist())) > 48


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_the_smallest_temperature_draws_among_the_largest(backend: ModuleType) -> None:
    logits = torch.tensor([1e-3, 5.0, -torch.inf, 5.0]).repeat(64, 1)
    winners = backend.gumbel_argmax(logits, torch.full((64,), 1e-30), keys(64))
    assert set(winners.tolist()) == {1, 3}
    backend.softmax_(logits, torch.full((64,), 1e-30))
    assert logits[0].tolist() == [0.0, 0.5, 0.0, 0.5]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("vocab", [8, 4096, 4097, 10_000])
def test_draw_never_takes_a_weight_of_0(backend: ModuleType, vocab: int) -> None:
    """Whatever u: the first positive at 0, one of the positive just below 1."""
    torch.manual_seed(0)
    weights = torch.rand(2, vocab)
    weights[:, :3] = weights[:, -3:] = 0
    zero, one = backend.draw(weights, torch.tensor([0.0, JUST_BELOW_1], dtype=torch.float64)).tolist()
    assert zero == 3
    assert weights[1, one] > 0
    assert one >= vocab - 10


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_reaching_the_total_draws_the_last_positive(backend: ModuleType) -> None:
    """u = 1 stands for a u * total that rounds up to the total."""
    weights = torch.cat([torch.rand(1, 5000), torch.zeros(1, 5000)], dim=1)
    assert backend.draw(weights, torch.tensor([1.0], dtype=torch.float64)).item() == 4999


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_empty_rows_do_not_crash(backend: ModuleType) -> None:
    logits = torch.full((2, 100), -torch.inf)
    warmth = torch.ones(2)
    parameters = off(2) | {"top_k": torch.tensor([3, 0]), "top_p": torch.full((2,), 0.5)}
    parameters |= {"typical_p": torch.full((2,), 0.5), "min_p": torch.full((2,), 0.1)}
    assert torch.equal(truncated(backend, logits, parameters), logits)
    assert backend.argmax(logits).tolist() == [0, 0]
    assert backend.gumbel_argmax(logits, warmth, keys(2)).tolist() == [0, 0]
    backend.softmax_(logits, warmth)
    assert bool((logits == 0).all())
    assert backend.draw(logits, torch.tensor([0.0, 0.9], dtype=torch.float64)).tolist() == [0, 0]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_not_a_number_gives_ids_in_range(backend: ModuleType) -> None:
    logits = torch.full((2, 100), torch.nan)
    warmth = torch.ones(2)
    truncated(backend, logits, off(2) | {"top_p": torch.full((2,), 0.5), "top_k": torch.tensor([5, 5])})
    for ids in (
        backend.argmax(logits),
        backend.gumbel_argmax(logits, warmth, keys(2)),
        backend.draw(logits, torch.tensor([0.0, 0.9], dtype=torch.float64)),
    ):
        assert bool(((ids >= 0) & (ids < 100)).all())
    backend.softmax_(logits, warmth)
    assert bool((logits == 0).all())


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("others", [1.0, torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("top_k", [0, 3])
def test_rows_are_distributions_or_all_zero(backend: ModuleType, bad: float, others: float, top_k: int) -> None:
    logits = torch.full((1, 100), others)
    logits[0, 7] = bad
    backend.distribution_(logits, **off(1) | {"top_k": torch.tensor([top_k])})
    total = float(logits.sum())
    if bad == -torch.inf and others == 1:
        assert total == pytest.approx(1)
    assert total == 0 or (total == pytest.approx(1) and others == 1), logits
    assert logits[0, 7] == 0


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_no_rows_are_fine(backend: ModuleType) -> None:
    logits = torch.zeros(0, 10)
    backend.truncate_(logits, **off(0))
    backend.softmax_(logits, torch.ones(0))
    assert backend.argmax(logits).shape == (0,)
    assert backend.gumbel_argmax(logits, torch.ones(0), keys(0)).shape == (0,)


@needs_compiler
def test_row_numbers_of_32_bits_are_taken_as_they_are() -> None:
    p, q = (torch.rand(4, 40, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    rows = torch.tensor([3, 1, 2], dtype=torch.int32)
    assert torch.equal(cpu.overlap(p, q, rows, rows), cpu.overlap(p, q, rows.long(), rows.long()))


@needs_compiler
def test_what_is_read_by_address_is_looked_at() -> None:
    """A tensor of another type or with strides would give numbers all the same."""
    logits, one, rows = torch.rand(4, 40), torch.ones(4), torch.arange(4)
    with pytest.raises(AssertionError, match="float64"):
        cpu.argmax(logits.double())
    with pytest.raises(AssertionError, match="strides"):
        cpu.softmax_(logits[:, ::2], one)
    with pytest.raises(AssertionError, match="float64"):
        cpu.overlap(logits, logits.double(), rows, rows)
    with pytest.raises(AssertionError, match="float64"):
        cpu.residual(logits, logits, rows, rows, one, torch.empty(4, 40).double())


# --- the dispatch ---


@needs_compiler
def test_only_contiguous_float32_goes_to_the_cpu_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(cpu, "argmax", lambda logits: seen.append("cpu") or reference.argmax(logits))
    logits = torch.randn(4, 10)
    for some in (logits, logits.double(), logits.t(), logits[:, ::2]):
        assert torch.equal(sampling.argmax(some), some.argmax(-1))
    assert seen == ["cpu"]


def test_everything_works_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_library", lambda: None)
    logits = torch.randn(2, 10)
    probs = logits.clone()
    sampling.softmax_(probs, torch.ones(2))
    torch.testing.assert_close(probs, logits.softmax(-1))
    assert torch.equal(sampling.argmax(probs), logits.argmax(-1))
