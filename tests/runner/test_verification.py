"""Exact verification: what is emitted is distributed as the target, whatever the draft; and wrong rules are noticed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

import paceline_kernels as ops
import paceline_kernels.reference_sampling as reference
from paceline.core.params import Constraints, Verification
from paceline.runner.drafter import Draft
from paceline.runner.noise import RejectionNoise, Stream, Uniform
from paceline.runner.positions import Positions
from paceline.runner.verification import Run, Verdict, Verifier
from paceline.runner.verification.rejection import (
    AcceptanceRule,
    Comparison,
    Rejection,
    Ruling,
    block,
    one_hot,
    token_wise,
)
from runner.enumeration import (
    VOCAB,
    Case,
    Trial,
    chosen,
    drawn,
    emitted,
    error,
    expected,
    has_dead_end,
    mean_accepted,
    p_of,
    q_of,
    random_case,
)
from runner.rows import make_sequence, random_sequence

CPU = torch.device("cpu")
EXACT = 1e-12
WRONG = 1e-3  # what a wrong rule is off by, at least

MIXED = make_sequence(
    (0, 1),
    (1,),
    temperature=0.75,
    top_p=0.875,
    min_p=0.0625,
    repetition_penalty=1.25,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    logit_bias=((2, 0.5),),
    constraints=Constraints(bad_words=((2, 2), (1, 0, 1)), min_tokens=3, stop_token_ids=(0,)),
)
FEATURES = {
    "plain": make_sequence(),
    "temperature": make_sequence(temperature=0.5),
    "top-k": make_sequence(top_k=2),
    "top-p": make_sequence(top_p=0.75),
    "min-p": make_sequence(min_p=0.25),
    "typical-p": make_sequence(typical_p=0.5),
    "repetition": make_sequence((0,), repetition_penalty=1.5),
    "presence": make_sequence((0,), (1,), presence_penalty=1.25),
    "frequency": make_sequence((0,), (1, 1), frequency_penalty=-0.75),
    "bias": make_sequence(logit_bias=((1, 2.5), (0, -1.0))),
    "allowed": make_sequence(allowed_token_ids=(0, 2)),
    "bad words": make_sequence((0,), (1,), constraints=Constraints(bad_words=((1, 2), (0, 0, 1)))),
    "minimum length": make_sequence((0,), (1,), constraints=Constraints(min_tokens=3, stop_token_ids=(2,))),
    "all": MIXED,
}


def cases_of(name: str, seed: int = 0, deepest: int = 3) -> list[Case]:
    """Random p and q of every depth."""
    generator = torch.Generator().manual_seed(1000 * seed + list(FEATURES).index(name))
    return [random_case(FEATURES[name], depth, generator) for depth in range(1, deepest + 1)]


def equal_distributions() -> list[Case]:
    return [replace(case, draft=case.target[:-1]) for case in cases_of("plain", 1) + cases_of("all", 1)]


def disjoint_supports() -> list[Case]:
    """The draft proposes what the target never says."""

    def without(tables: list[Tensor], *tokens: int) -> list[Tensor]:
        where = torch.tensor(tokens)
        return [table.index_fill(1, where, -torch.inf) for table in tables]

    return [
        replace(case, target=without(case.target, *target), draft=without(case.draft, *draft))
        for case in cases_of("plain", 2)
        for target, draft in [((0,), (1, 2)), ((0, 1), (2,))]
    ]


def banned_by_the_target() -> list[Case]:
    """A token without probability, another one at each prefix, that the draft may propose."""
    cases = cases_of("plain", 3) + cases_of("presence", 3) + cases_of("top-p", 3)
    for case in cases:
        for table in case.target:
            rows = torch.arange(len(table))
            table[rows, rows % VOCAB] = -torch.inf
    return cases


def nearly_certain() -> list[Case]:
    """The target leaves little to every token but one."""

    def sharpened(table: Tensor) -> Tensor:
        best = table.argmax(-1, keepdim=True)
        lead = torch.tensor([3.0, 10.0, 14.0, 18.0, 25.0]).double()  # 1 - p down to some 1e-11
        return table.scatter_add(1, best, lead[torch.arange(len(table)) % len(lead)][:, None])

    return [replace(case, target=[sharpened(t) for t in case.target]) for case in cases_of("plain", 4)]


def draft_without_numbers() -> list[Case]:
    """At every other prefix the draft model computes NaN."""
    starts = [(start, case) for start in (0, 1) for case in cases_of("plain", 5 + start)]
    for start, case in starts:
        for table in case.draft:
            table[start::2] = torch.nan
    return [case for _, case in starts]


SPECIAL: dict[str, Callable[[], list[Case]]] = {
    "p = q": equal_distributions,
    "disjoint supports": disjoint_supports,
    "banned tokens": banned_by_the_target,
    "nearly certain": nearly_certain,
    "a draft without numbers": draft_without_numbers,
}
RULES: dict[str, tuple[Callable[[list[Case]], Trial], AcceptanceRule]] = {
    "token-wise": (drawn, token_wise),
    "block": (drawn, block),
    "one-hot": (chosen, one_hot),
}


@pytest.fixture(scope="module")
def every_case() -> list[Case]:
    cases = [case for name in FEATURES for case in cases_of(name, deepest=4)]
    return cases + [case for make in SPECIAL.values() for case in make()]


@pytest.mark.parametrize("name", RULES)
def test_the_output_is_the_targets_for_every_feature_and_depth(name: str, every_case: list[Case]) -> None:
    """The whole distribution over runs of k + 1 tokens, for k of 1 to 4 and in one ragged batch."""
    make, rule = RULES[name]
    trial = make(every_case)
    for case, found in zip(trial.cases, emitted(trial, rule), strict=True):
        assert float((found - expected(case)).abs().max()) < EXACT, case.sequence.params


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_output_is_the_targets_for_random_parameters(name: str, seed: int) -> None:
    """Every feature with even odds, grammars among them; but no position may be left without a token."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    cases: list[Case] = []
    while len(cases) < 20:
        case = random_case(random_sequence(rng, VOCAB, temperature=0.75), int(rng.integers(1, 4)), generator)
        if not has_dead_end(case):
            cases.append(case)
    make, rule = RULES[name]
    assert error(make(cases), rule) < EXACT


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("special", SPECIAL)
def test_noise_of_zero_accepts_nothing_of_probability_zero(name: str, special: str) -> None:
    make, rule = RULES[name]
    trial = make(SPECIAL[special]())
    assert not accepts_the_impossible(trial, rule)


def accepts_the_impossible(trial: Trial, rule: AcceptanceRule) -> bool:
    drafts = Comparison(trial.p, trial.runs)
    accepted = rule(drafts, torch.zeros(drafts.real.shape, dtype=torch.float64)).accepted
    kept = torch.arange(drafts.real.shape[1]) < accepted[:, None]
    return bool((kept & (drafts.p_x == 0)).any())


def test_equal_distributions_accept_everything() -> None:
    trial = drawn(equal_distributions())
    for rule in (token_wise, block):
        depths = torch.tensor([float(case.depth) for case in trial.cases], dtype=torch.float64)
        torch.testing.assert_close(mean_accepted(trial, rule), depths, rtol=0, atol=EXACT)


def test_disjoint_supports_accept_nothing() -> None:
    trial = drawn(disjoint_supports())
    for rule in (token_wise, block):
        assert mean_accepted(trial, rule).max() < EXACT


def test_block_keeps_at_least_as_many_as_token_wise(every_case: list[Case]) -> None:
    trial = drawn(every_case)
    more = mean_accepted(trial, block) - mean_accepted(trial, token_wise)
    assert more.min() > -EXACT
    single = torch.tensor([case.depth == 1 for case in trial.cases])
    assert more[single].abs().max() < EXACT, "of one draft both rules are the same"
    assert more[~single].max() > 0.05


def test_a_depth_that_depends_on_q_alone_keeps_the_output() -> None:
    """As it may: see `test_a_depth_that_depends_on_the_drawn_token_is_noticed` below for what may not."""
    trial = cut(drawn(cases_of("plain") + cases_of("all")), lambda q, token: float(q.max()) < 0.5)
    assert len({run.depth for run in trial.runs}) > 2
    assert error(trial, token_wise) < EXACT
    assert error(trial, block) < EXACT


def cut(trial: Trial, where: Callable[[Tensor, int], bool]) -> Trial:
    """Drafts end before the first token for which `where` holds of its q and itself."""
    runs, rows = [], []
    for run, p in zip(trial.runs, trial.p.split([run.depth + 1 for run in trial.runs]), strict=True):
        draft = run.draft
        assert draft.probs is not None
        q = draft.probs[draft.first_row : draft.first_row + run.depth]
        depth = next((j for j, token in enumerate(draft.token_ids) if where(q[j], token)), run.depth)
        tokens = draft.token_ids[:depth]
        runs.append(Run(replace(run.positions, drafts=tokens), replace(draft, token_ids=tokens)))
        rows.append(p[: depth + 1])
    return replace(trial, runs=runs, p=torch.cat(rows))


# -- wrong rules, each known from somewhere, are off by far more than rounding ----------------------------------------


def recovered_from_p(drafts: Comparison, ruling: Ruling) -> Tensor:
    return drafts.p[drafts.p_rows(ruling.accepted[:, None])[:, 0]]


@pytest.mark.parametrize("name", RULES)
def test_recovering_from_p_instead_of_the_residual_is_noticed(name: str) -> None:
    make, rule = RULES[name]
    assert error(make(cases_of("plain")), rule, recovered_from_p) > WRONG


@pytest.mark.parametrize("name", ["temperature", "top-k", "top-p", "min-p", "bias", "frequency"])
@pytest.mark.parametrize("rule", [token_wise, block])
def test_comparing_with_q_before_the_processors_is_noticed(rule: AcceptanceRule, name: str) -> None:
    """transformers#47932: q has to be the distribution that was sampled."""
    cases = cases_of(name)
    raw = q_of([replace(case, sequence=make_sequence()) for case in cases])
    trial = drawn(cases)
    runs = [replace(run, draft=replace(run.draft, probs=raw)) for run in trial.runs]
    assert error(trial, rule) < EXACT
    assert error(replace(trial, runs=runs), rule) > WRONG


def with_the_drafts_noise(drafts: Comparison, u: Tensor) -> Ruling:
    """A draft is drawn by inversion, where its noise falls in [c, c + q(x)), and kept if the same noise is below
    p(x) / q(x): the share of that interval which lies below is its chance.
    """
    assert drafts.q is not None
    q = drafts.q[drafts.q_rows(torch.arange(drafts.real.shape[1]))]  # [n, k, vocab]
    c = (q.cumsum(-1) - q).gather(-1, drafts.tokens[:, :, None])[:, :, 0]
    q_x = drafts.q_x.clamp(min=1e-300)
    share = ((drafts.p_x / q_x).clamp(max=1) - c).clamp(min=0).minimum(q_x) / q_x
    accepted = until_first_failure((u < share) & drafts.real)
    return Ruling(accepted, torch.ones(len(accepted)), share)


def until_first_failure(kept: Tensor) -> Tensor:
    return kept.long().cumprod(-1).sum(-1)


def test_noise_shared_by_draft_and_acceptance_is_noticed() -> None:
    """vllm#47386."""
    assert error(drawn(cases_of("plain")), with_the_drafts_noise) > WRONG


@pytest.mark.parametrize("rule", [token_wise, block])
def test_a_depth_that_depends_on_the_drawn_token_is_noticed(rule: AcceptanceRule) -> None:
    """DSpark, OpenVINO: a draft ends where the drawn token is improbable. The bonus token behind it is then biased."""
    trial = drawn(cases_of("plain"))
    assert error(cut(trial, lambda q, token: float(q[token]) < 0.3), rule) > WRONG


@pytest.mark.parametrize("name", RULES)
def test_min_p_at_the_bonus_token_only_is_noticed(name: str) -> None:
    """vllm#42744."""
    make, rule = RULES[name]
    cases = cases_of("min-p")
    trial = make(cases)
    without = drawn([replace(case, sequence=make_sequence()) for case in cases]).p
    bonus = torch.zeros(len(trial.p), dtype=torch.bool)
    bonus[torch.tensor([run.depth + 1 for run in trial.runs]).cumsum(0) - 1] = True
    assert error(replace(trial, p=torch.where(bonus[:, None], trial.p, without)), rule) > WRONG


@pytest.mark.parametrize("feature", ["repetition", "presence", "frequency", "bad words", "minimum length", "all"])
@pytest.mark.parametrize("name", RULES)
def test_the_state_before_the_run_at_every_position_is_noticed(name: str, feature: str) -> None:
    """sglang#33643 and others: penalties that do not see the drafts before a position."""
    make, rule = RULES[name]
    cases = cases_of(feature)
    trial = make(cases)
    before = [Positions(run.positions.sequence, []) for run in trial.runs for _ in range(run.depth + 1)]
    assert error(replace(trial, p=p_of(cases, before)), rule) > WRONG


def test_a_one_hot_draft_compared_with_the_models_softmax_is_noticed() -> None:
    """ds4#482: the draft is the argmax of q, so its probability is 1 and not q(x)."""
    trial = drawn(cases_of("plain"))
    best = q_of(trial.cases).argmax(-1).split([run.depth for run in trial.runs])
    greedy = [run.draft.token_ids == tokens.tolist() for run, tokens in zip(trial.runs, best, strict=True)]
    trial = replace(trial, mass=torch.tensor(greedy, dtype=torch.float64))
    assert sum(greedy) == len(trial.cases)
    assert error(trial, token_wise) > WRONG
    assert error(trial, block) > WRONG


def against_another_sample(drafts: Comparison, u: Tensor) -> Ruling:
    """Another token y is drawn from p, and the draft x is kept with probability min(1, p(x) / p(y))."""
    p = drafts.p[drafts.p_rows(torch.arange(drafts.real.shape[1]))]  # [n, k, vocab]
    h = (p * (drafts.p_x[:, :, None] / p.clamp(min=1e-300)).clamp(max=1)).sum(-1)
    accepted = until_first_failure((u < h) & drafts.real)
    return Ruling(accepted, torch.ones(len(accepted)), h)


def the_other_sample(drafts: Comparison, ruling: Ruling) -> Tensor:
    """y, given that x was not kept."""
    p = recovered_from_p(drafts, ruling)
    last = (ruling.accepted[:, None]).clamp(max=drafts.real.shape[1] - 1)
    p_x = torch.where(ruling.accepted[:, None] < drafts.depths[:, None], drafts.p_x.gather(1, last), 0)
    other = (p - p_x).clamp(min=0)  # p(y) (1 - p(x) / p(y))
    return torch.where(other.sum(-1, keepdim=True) > 0, other, p)


def test_the_ratio_to_another_sampled_token_is_noticed() -> None:
    """OpenVINO GenAI."""
    cases = cases_of("plain")
    assert error(drawn(cases), against_another_sample, the_other_sample) > WRONG
    assert error(chosen(cases), against_another_sample, the_other_sample) > WRONG


def block_to_the_first_failure(drafts: Comparison, u: Tensor) -> Ruling:
    n, k = u.shape

    def alone(columns: Tensor) -> Ruling:
        """What block decides if noise speaks against every prefix but one."""
        here = torch.arange(k) == columns[:, None]
        return block(drafts, torch.where(here, u, 1))

    kept = torch.stack([alone(torch.full((n,), j)).accepted == j + 1 for j in range(k)], dim=1)
    return alone(until_first_failure(kept) - 1)


def test_block_that_ends_at_the_first_failure_is_noticed() -> None:
    trial = drawn(cases_of("plain"))
    assert error(trial, block_to_the_first_failure) > WRONG
    shallow = drawn(cases_of("plain")[:1])
    assert error(shallow, block_to_the_first_failure) < EXACT, "with one draft there is no difference"


def residual_without_weight(drafts: Comparison, ruling: Ruling) -> Tensor:
    return drafts.left(replace(ruling, weight=torch.ones_like(ruling.weight)))


def test_block_with_a_residual_that_is_not_weighted_is_noticed() -> None:
    trial = drawn(cases_of("plain"))
    assert error(trial, block, residual_without_weight) > WRONG
    assert error(trial, token_wise, residual_without_weight) < EXACT, "token-wise has no weight"


def at_or_below(drafts: Comparison, u: Tensor) -> Ruling:
    ratio = torch.where(drafts.q_x > 0, drafts.p_x / drafts.q_x, 0)
    accepted = until_first_failure((u <= ratio) & drafts.real)
    return Ruling(accepted, torch.ones(len(accepted)), ratio)


@pytest.mark.parametrize("special", ["disjoint supports", "banned tokens"])
def test_accepting_at_equality_is_noticed(special: str) -> None:
    """Of no weight in the distribution, but a forbidden token would come once in 2^53."""
    assert accepts_the_impossible(drawn(SPECIAL[special]()), at_or_below)


# -- drawn runs, with the engine's own noise --------------------------------------------------------------------------

DRAWS = 5_000
# p and q at the three rows of a depth-2 run, over 4 tokens; a position's distribution does not depend on the prefix.
P = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.1, 0.4, 0.4], [0.25, 0.25, 0.25, 0.25]])
Q = torch.tensor([[0.2, 0.3, 0.1, 0.4], [0.7, 0.1, 0.1, 0.1]])
DRAWN = [Verification.TOKEN_WISE, Verification.BLOCK]


def run_of(draft: Draft, verification: Verification | None = None, **sampling: object) -> Run:
    return Run(Positions(make_sequence(verification=verification, **sampling), draft.token_ids), draft)


def emit(verification: Verification, probs: Tensor | None, seed: int = 0) -> list[list[int]]:
    """Verify DRAWS runs, drafted from Q (probs = Q) or by a fixed guess (one-hot), and return what each emitted."""
    rng = np.random.default_rng(seed)
    tokens = [[1, 2]] * DRAWS
    if probs is not None:
        # Of a row without any, `ops.draw` takes the first.
        rows = [row / row.sum() if row.any() else np.eye(4)[0] for row in probs.double().numpy()]
        tokens = np.stack([rng.choice(4, DRAWS, p=row) for row in rows], axis=1).tolist()
    sequence = make_sequence(verification=verification)
    runs = [Run(Positions(sequence, ids), Draft(ids, probs)) for ids in tokens]
    verdicts = Verifier(seed, CPU).verify(P.log().repeat(DRAWS, 1), runs)
    return [verdict.token_ids for verdict in verdicts]


def pvalue(runs: list[list[int]], length: int) -> float:
    """Chi-square of the first `length` tokens; shorter runs are continued by the target itself."""
    rng = np.random.default_rng(9)
    rows = P.double().numpy()
    rows /= rows.sum(-1, keepdims=True)
    filled = [run + [int(rng.choice(4, p=rows[j])) for j in range(len(run), length)] for run in runs]
    counts = {key: 0 for key in itertools.product(range(4), repeat=length)}
    for run in filled:
        counts[tuple(run[:length])] += 1
    expected = {key: DRAWS * float(np.prod([rows[j][t] for j, t in enumerate(key)])) for key in counts}
    assert all(counts[key] == 0 for key in counts if expected[key] == 0), "a token with p = 0 was emitted"
    keys = [key for key in counts if expected[key] > 0]
    return float(chisquare([counts[k] for k in keys], [expected[k] for k in keys]).pvalue)


@pytest.mark.parametrize("probs", [Q, None], ids=["drawn", "one-hot"])
@pytest.mark.parametrize("verification", DRAWN)
def test_emitted_runs_follow_the_target(verification: Verification, probs: Tensor | None) -> None:
    assert pvalue(emit(verification, probs), length=3) > 0.001


@pytest.mark.parametrize("broken", [[0], [1], [0, 1]], ids=["first", "second", "both"])
@pytest.mark.parametrize("verification", DRAWN)
@pytest.mark.parametrize("backend", [pytest.param(ops.sampling, id="fastest"), pytest.param(reference, id="reference")])
def test_a_draft_model_whose_logits_are_no_numbers_biases_nothing(
    backend: ModuleType, verification: Verification, broken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it draws there is nothing that its row of q has any probability for."""
    for name in ("softmax_", "draw", "residual", "residual_mass", "overlap"):
        monkeypatch.setattr(ops, name, getattr(backend, name))
    logits = Q.log()
    logits[broken] = torch.nan
    ops.softmax_(logits, torch.ones(2))
    assert pvalue(emit(verification, logits), length=3) > 0.001


@pytest.mark.parametrize("probs", [Q, None], ids=["drawn", "one-hot"])
@pytest.mark.parametrize("verification", DRAWN)
def test_drawing_from_p_behind_a_rejection_is_noticed(
    verification: Verification, probs: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comparison, "left", recovered_from_p)
    assert pvalue(emit(verification, probs), length=3) < 1e-6


def test_streams_of_noise_are_independent_and_repeat() -> None:
    noise = {stream: Uniform(7, stream, CPU).draw((4000,)) for stream in Stream}
    for one, other in itertools.combinations(Stream, 2):
        assert abs(float(torch.corrcoef(torch.stack([noise[one], noise[other]]))[0, 1])) < 0.08
    for stream in Stream:
        again = Uniform(7, stream, CPU)
        assert torch.equal(noise[stream], torch.cat([again.draw((1000,)), again.draw((3000,))]))
        assert noise[stream].min() >= 0
        assert noise[stream].max() < 1
        assert not torch.equal(noise[stream], Uniform(8, stream, CPU).draw((4000,)))


def test_rejection_takes_acceptance_and_recovery_from_different_streams() -> None:
    noise = RejectionNoise(7, CPU)
    assert torch.equal(noise.accept((2, 3)).flatten(), Uniform(7, Stream.ACCEPT, CPU).draw((6,)))
    assert torch.equal(noise.sample(5), Uniform(7, Stream.SAMPLE, CPU).draw((5,)))


class Fixed(RejectionNoise):
    """The same acceptance noise for every draft, and the same for every token behind them."""

    def __init__(self, accept: float, sample: float) -> None:
        self._values = accept, sample

    def accept(self, shape: Sequence[int]) -> Tensor:
        return torch.full(tuple(shape), self._values[0], dtype=torch.float64)

    def sample(self, count: int) -> Tensor:
        return torch.full((count,), self._values[1], dtype=torch.float64)


@pytest.mark.parametrize(
    ("accept", "sample", "emitted"),
    [
        (0.0, 0.0, [1, 3, 0]),
        (0.0, 0.999, [1, 3, 3]),
        (0.5, 0.0, [1, 3, 0]),  # 0.3 / 0.3 and 0.4 / 0.1
        (0.5, 0.26, [1, 3, 1]),
    ],
)
def test_each_stream_decides_its_own_part(accept: float, sample: float, emitted: list[int]) -> None:
    rule = Rejection(token_wise, Fixed(accept, sample))
    (verdict,) = rule.judge(P.log().clone(), [run_of(Draft([1, 3], Q), Verification.TOKEN_WISE)])
    assert verdict.token_ids == emitted


@pytest.mark.parametrize(("sample", "recovered"), [(0.0, 0), (0.74, 0), (0.76, 2), (0.999, 2)])
def test_the_recovered_token_comes_from_the_residual_and_its_own_noise(sample: float, recovered: int) -> None:
    """p - q leaves 0.3 of token 0 and 0.1 of token 2."""
    rule = Rejection(token_wise, Fixed(0.5, sample))
    (verdict,) = rule.judge(P.log().clone(), [run_of(Draft([3, 0], Q), Verification.TOKEN_WISE)])
    assert verdict.token_ids == [recovered]


# -- what a verdict says ----------------------------------------------------------------------------------------------


def test_token_wise_acceptance_is_the_overlap_of_reached_positions() -> None:
    overlap = torch.minimum(P[:2], Q).sum(-1).tolist()
    runs = [run_of(Draft([0, 0], Q), Verification.TOKEN_WISE) for _ in range(200)]
    verdicts = Verifier(0, CPU).verify(P.log().repeat(200, 1), runs)
    for verdict in verdicts:
        assert verdict.acceptance == pytest.approx(overlap[: min(verdict.num_accepted + 1, 2)])
    assert {verdict.num_accepted for verdict in verdicts} >= {1, 2}


def test_one_hot_acceptance_is_p_of_the_draft() -> None:
    runs = [run_of(Draft([0, 3])) for _ in range(200)]
    verdicts = Verifier(0, CPU).verify(P.log().repeat(200, 1), runs)
    for verdict in verdicts:
        assert verdict.acceptance == pytest.approx([0.5, 0.4][: min(verdict.num_accepted + 1, 2)])
    assert {verdict.num_accepted for verdict in verdicts} == {0, 1, 2}


def test_block_acceptance_is_what_was_kept() -> None:
    runs = [run_of(Draft([0, 0], Q), Verification.BLOCK) for _ in range(200)]
    verdicts = Verifier(0, CPU).verify(P.log().repeat(200, 1), runs)
    for verdict in verdicts:
        assert verdict.acceptance == [1.0] * verdict.num_accepted + [0.0] * (verdict.num_accepted < 2)
    assert {verdict.num_accepted for verdict in verdicts} == {1, 2}, "the first draft is never rejected for good"


def test_a_verdict_is_the_accepted_drafts_and_one_token() -> None:
    for verification in DRAWN:
        draft = Draft([1, 3], P[:2])
        runs = [run_of(draft, verification) for _ in range(50)]
        for verdict in Verifier(0, CPU).verify(P.log().repeat(50, 1), runs):
            assert verdict.num_accepted == 2
            assert verdict.token_ids[:2] == [1, 3]
            assert len(verdict.token_ids) == 3


@pytest.mark.parametrize("verification", DRAWN)
def test_without_drafts_one_token_is_drawn_from_p(verification: Verification) -> None:
    runs = [run_of(Draft([]), verification) for _ in range(8000)]
    verdicts = Verifier(3, CPU).verify(P[:1].log().repeat(8000, 1), runs)
    assert all((v.num_accepted, v.acceptance, len(v.token_ids)) == (0, [], 1) for v in verdicts)
    counts = np.bincount([v.token_ids[0] for v in verdicts], minlength=4)
    assert counts[3] == 0
    assert chisquare(counts[:3], np.array([0.5, 0.3, 0.2]) * 8000).pvalue > 0.001


def test_greedy_keeps_the_agreeing_prefix() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, 1.0], [0.0, 0.0, 1.0]])  # argmax 1, 0 (a tie), 2
    verifier = Verifier(0, CPU)
    for tokens, accepted, tokens_emitted in [([1, 0], 2, [1, 0, 2]), ([1, 1], 1, [1, 0]), ([0, 0], 0, [1])]:
        (verdict,) = verifier.verify(logits, [run_of(Draft(tokens), temperature=0.0)])
        assert (verdict.num_accepted, verdict.token_ids) == (accepted, tokens_emitted)
        assert verdict.acceptance == [1.0] * accepted + [0.0] * (accepted < 2)


@pytest.mark.parametrize("q", [None, [[0.0, 1.0, 0.0]]], ids=["one-hot", "drawn"])
def test_a_rejection_by_rounding_alone_draws_from_p(q: list[list[float]] | None) -> None:
    """float32 may leave a token that has all of p a little less than 1; nothing else is drawn in its place."""
    p = torch.tensor([[0.0, 1 - 2.0**-24, 0.0], [1.0, 0.0, 0.0]])
    run = run_of(Draft([1], None if q is None else torch.tensor(q)))
    drafts = Comparison(p, [run])
    for rule in [one_hot] if q is None else [token_wise, block]:
        ruling = rule(drafts, torch.tensor([[1 - 2.0**-53]], dtype=torch.float64))
        assert ruling.accepted.tolist() == [0]
        assert ops.draw(drafts.left(ruling), torch.zeros(1, dtype=torch.float64)).tolist() == [1]


# -- batches of several rules -----------------------------------------------------------------------------------------

KINDS = [
    {"temperature": 0.0},
    {"seed": 11, "top_p": 0.875},
    {"seed": 12, "choice": 3},
    {"verification": Verification.TOKEN_WISE},
    {"verification": Verification.BLOCK, "top_k": 3},
]


def mixed_batch(seed: int) -> tuple[Tensor, list[Run]]:
    """Runs of every rule and of depths 0 to 4, in random order; some of the drafts are one-hot."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    q = torch.randn(64, 6, generator=generator).softmax(-1)
    runs: list[Run] = []
    for first in range(0, 60, 4):
        kind = KINDS[rng.integers(len(KINDS))]
        tokens = rng.integers(0, 6, rng.integers(0, 5)).tolist()
        drawn = "verification" in kind and tokens and rng.random() < 0.7
        runs.append(run_of(Draft(tokens, q if drawn else None, first), **kind))  # type: ignore[arg-type]
    return 2 * torch.randn(sum(run.depth + 1 for run in runs), 6, generator=generator), runs


def judged(logits: Tensor, runs: list[Run]) -> list[Verdict]:
    return Verifier(5, CPU).verify(logits.clone(), runs)


def test_a_mixed_batch_keeps_its_order() -> None:
    """Where p is certain there is one possible verdict, whatever the rule."""
    for seed in range(20):
        logits, runs = mixed_batch(seed)
        certain = torch.full_like(logits, -100.0).scatter(1, logits.argmax(-1, keepdim=True), 100.0)
        wanted = certain.argmax(-1).split([run.depth + 1 for run in runs])
        for run, tokens, verdict in zip(runs, wanted, judged(certain, runs), strict=True):
            same = [a == b for a, b in zip(run.draft.token_ids, tokens.tolist(), strict=False)]
            accepted = [*same, False].index(False)
            assert verdict.num_accepted == accepted
            assert verdict.token_ids == tokens.tolist()[: accepted + 1]


def test_rules_without_noise_of_their_own_say_the_same_alone_and_in_a_mixed_batch() -> None:
    for seed in range(20):
        logits, runs = mixed_batch(seed)
        pieces = logits.split([run.depth + 1 for run in runs])
        for run, rows, verdict in zip(runs, pieces, judged(logits, runs), strict=True):
            if run.positions.params.verification in (Verification.GREEDY, Verification.COUPLED):
                assert judged(rows, [run]) == [verdict]


def test_drafts_that_were_not_drawn_are_judged_as_one_hot() -> None:
    """By either rule of unseeded requests, with one result; and no q is asked for."""
    logits = P.log().repeat(50, 1)
    alone = Rejection(one_hot, RejectionNoise(5, CPU))
    for verification in DRAWN:
        runs = [run_of(Draft([0, 3]), verification) for _ in range(50)]
        assert judged(logits, runs) == alone.judge(logits.clone(), runs)
        alone = Rejection(one_hot, RejectionNoise(5, CPU))
