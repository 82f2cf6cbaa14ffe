"""Drafts chosen and judged on the device, against the rules of the runner given the same noise."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import paceline_kernels as ops
from paceline.core.params import Constraints, Verification
from paceline.core.sequence import Sequence
from paceline.runner.drafter import Draft
from paceline.runner.noise import RejectionNoise
from paceline.runner.positions import Positions
from paceline.runner.sampler import distribution_, edit_
from paceline.runner.verification import Run, Verdict, VerificationRule
from paceline.runner.verification.coupled import Coupled, choose_
from paceline.runner.verification.greedy import Greedy
from paceline.runner.verification.rejection import Rejection, block, one_hot, token_wise
from paceline_kernels.triton import sampling
from paceline_kernels.triton.state import (
    COLUMNS,
    FIRST_PASS_ROWS,
    Column,
    Noise,
    Rule,
    SequenceTable,
    StepInput,
    StepOutput,
    float_bits,
)
from paceline_kernels.triton.verification import choose_drafts, judge, uniform
from runner.rows import make_sequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, DEPTH, SEATS, NUM_SEQS, LONGEST = 21, 4, 9, 7, 40
MIXED: list[Rule | None] = [None] * 12
POISON = 0x7FC12345  # as a float32, NaN

RULES = {
    Rule.GREEDY: Verification.GREEDY,
    Rule.COUPLED: Verification.COUPLED,
    Rule.TOKEN_WISE: Verification.TOKEN_WISE,
    Rule.BLOCK: Verification.BLOCK,
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is several."""
    monkeypatch.setattr(sampling, "LARGEST_BLOCK", 16)


@dataclass
class Seated:
    """A sequence of a step: `sequence` as the host would have it, `samples` if it has rows of logits."""

    seat: int
    rule: Rule
    sequence: Sequence
    num_tokens: int
    drafts: list[int]
    one_hot: bool
    samples: bool
    draft_computed: int = 0
    num_read: int = 0
    is_judged: bool = True

    @property
    def computed(self) -> int:
        return len(self.sequence) - self.num_tokens

    @property
    def positions(self) -> Positions:
        return Positions(self.sequence, self.drafts)


def random_seated(rng: np.random.Generator, seat: int, only: Rule | None) -> Seated:
    """Of any kind; or with drafts that were drawn, by one rule and without limits."""
    rule = Rule(int(rng.integers(len(Rule)))) if only is None else only
    sampling: dict[str, Any] = {"temperature": 0.0}
    if rule != Rule.GREEDY:
        sampling = {"temperature": float(rng.choice([0.5, 1.0, 1.25]))}
        if only is None and rng.random() < 0.5:
            some: list[dict[str, float | int]] = [{"top_k": 4}, {"top_p": 0.75}, {"min_p": 0.125}, {"typical_p": 0.5}]
            sampling |= some[rng.integers(4)]
    if rule == Rule.COUPLED:
        sampling["seed"] = int(rng.integers(1 << 63))
    verification = RULES[rule] if rule >= Rule.TOKEN_WISE else None
    num_tokens = int(rng.integers(1, 4))
    text = rng.integers(0, VOCAB, num_tokens + int(rng.integers(0, 30))).tolist()
    num_output = int(rng.integers(len(text)))
    constraints = Constraints()
    if only is None:
        edits = {
            "frequency_penalty": 0.5,
            "presence_penalty": -1.25,
            "repetition_penalty": 1.5,
            "logit_bias": tuple((int(token), float(rng.normal())) for token in rng.permutation(VOCAB)[:5]),
        }
        sampling |= {name: value for name, value in edits.items() if rng.random() < 0.4}
        if rng.random() < 0.5:
            constraints = Constraints(min_tokens=num_output + int(rng.integers(1, 4)), stop_token_ids=(3, 5, 8, 13))
    sequence = make_sequence(
        text[: len(text) - num_output],
        text[len(text) - num_output :],
        constraints=constraints,
        verification=verification,
        choice=int(rng.integers(3)),
        **sampling,
    )
    assert sequence.params.verification == RULES[rule]
    samples = only is not None or bool(rng.random() < 0.8)
    drafts = rng.integers(0, VOCAB, rng.integers(0 if only is None else 1, DEPTH + 1)).tolist() if samples else []
    one_hot = only is None and bool(rng.random() < 0.4)
    # The draft model has read nearly all, and reads on: too little now and then.
    draft_computed = max(0, len(text) - int(rng.integers(0, 6)))
    num_read = int(rng.integers(0, 4))
    is_judged = only is not None or bool(rng.random() < 0.8)
    return Seated(seat, rule, sequence, num_tokens, drafts, one_hot, samples, draft_computed, num_read, is_judged)


def fact_row(seated: Seated) -> Tensor:
    """[COLUMNS] int32"""
    own = seated.sequence.params.sampling
    row = np.zeros(COLUMNS, np.int64)
    row[Column.COMPUTED] = seated.computed
    row[Column.DRAFT_COMPUTED] = seated.draft_computed
    row[Column.RULE] = seated.rule
    row[Column.TOP_K] = own.top_k
    row[Column.SEED_LOW], row[Column.SEED_HIGH] = (own.seed or 0) & 0xFFFFFFFF, (own.seed or 0) >> 32
    row[Column.CHOICE] = seated.sequence.params.choice
    row[Column.TEMPERATURE] = float_bits(1.0 if own.greedy else own.temperature)
    row[Column.TOP_P], row[Column.MIN_P] = float_bits(own.top_p), float_bits(own.min_p)
    row[Column.TYPICAL_P] = float_bits(own.typical_p)
    row[Column.EDITED] = len(edit_rows(seated)) + 1 if seated.sequence.params.edits_logits else 0
    row[Column.COUNTED] = own.penalised
    row[Column.REPETITION] = float_bits(own.repetition_penalty)
    row[Column.FREQUENCY] = float_bits(own.frequency_penalty)
    row[Column.PRESENCE] = float_bits(own.presence_penalty)
    return torch.from_numpy(row.astype(np.int32))


def edit_rows(seated: Seated) -> list[list[int]]:
    """By `Edit`."""
    sequence = seated.sequence
    biases = dict(sequence.params.sampling.logit_bias)
    until = sequence.num_prompt_tokens + sequence.params.constraints.min_tokens
    stops = sequence.params.constraints.stop_token_ids
    return [[t, float_bits(biases.get(t, 0.0)), until * (t in stops)] for t in {*stops, *biases}]


def count_row(prompt: list[int], output: list[int]) -> Tensor:
    """[VOCAB] int32"""
    text = [*prompt, *output]
    return torch.tensor([2 * output.count(token) + (token in text) for token in range(VOCAB)], dtype=torch.int32)


def make_table(batch: Seq[Seated]) -> SequenceTable:
    table = SequenceTable.allocate(SEATS, LONGEST, 1, DEPTH, VOCAB, DEVICE)
    table.facts.fill_(-77)
    table.texts.fill_(-77)
    table.drafts.fill_(-77)
    table.probs.fill_(torch.nan)
    table.edits.fill_(-77)
    table.counts.fill_(-77)
    for seated in batch:
        if rows := edit_rows(seated):
            table.edits[seated.seat, : len(rows)] = torch.tensor(rows, dtype=torch.int32)
        if seated.sequence.counts is not None:
            table.counts[seated.seat] = count_row(seated.sequence.prompt, seated.sequence.output)
        table.facts[seated.seat] = fact_row(seated).to(DEVICE)
        table.texts[seated.seat, : len(seated.sequence)] = torch.tensor(seated.sequence.token_ids)
    return table


def make_step(batch: Seq[Seated], noise_key: Seq[int], padding: int = 2) -> StepInput:
    """The sequences, then padding."""
    num_seqs = len(batch) + padding
    lengths = [s.num_tokens + len(s.drafts) for s in batch]
    num_rows = sum(lengths) + padding
    buffer = torch.zeros(StepInput.size(num_seqs + 1, num_seqs, num_rows), dtype=torch.int32)
    step = StepInput.view(buffer, num_seqs + 1, num_seqs, num_rows)
    num_logits = [len(s.drafts) + 1 if s.samples else 0 for s in batch]

    def fill(part: Tensor, values: Seq[int], other: int) -> None:
        part.fill_(other)[: len(values)] = torch.tensor(values)

    fill(step.seats, [s.seat for s in batch], -1)
    fill(step.num_tokens, [s.num_tokens for s in batch], 0)
    fill(step.num_drafts, [len(s.drafts) for s in batch], 0)
    fill(step.num_read, [s.num_read for s in batch], 0)
    fill(step.one_hot, [s.one_hot for s in batch], 0)
    fill(step.is_judged, [s.is_judged for s in batch], 0)
    fill(step.query_starts, np.cumsum([0, *lengths]).tolist(), sum(lengths))
    fill(step.logit_starts, np.cumsum([0, *num_logits]).tolist(), sum(num_logits))
    fill(step.row_sequences, np.repeat(range(len(batch)), lengths).tolist(), -1)
    fill(step.logit_sequences, np.repeat(range(len(batch)), num_logits).tolist(), -1)
    deepest = sorted(batch, key=lambda s: -len(s.drafts))
    fill(step.draft_seats, [s.seat for s in deepest], -1)
    fill(step.draft_depths, [len(s.drafts) for s in deepest], 0)
    step.noise_key[:] = torch.tensor([*noise_key, 0])
    return StepInput(*(getattr(step, field.name).to(DEVICE) for field in fields(step)))


def random_batch(rng: np.random.Generator, only: Rule | None) -> list[Seated]:
    seats = rng.permutation(SEATS)[: NUM_SEQS - 2].tolist()
    return [random_seated(rng, seat, only) for seat in seats]


class Given(RejectionNoise):
    """What the device draws for one sequence."""

    def __init__(self, noise_key: Tensor, seat: int) -> None:
        self._noise_key, self._seat = noise_key, torch.tensor([seat])

    def accept(self, shape: Seq[int]) -> Tensor:
        rows, depth = shape
        assert rows == 1
        return uniform(self._noise_key, Noise.ACCEPT, self._seat, torch.arange(depth))[None]

    def sample(self, count: int) -> Tensor:
        assert count == 1
        return uniform(self._noise_key, Noise.SAMPLE, self._seat, 0)


def verdict_of(seated: Seated, logits: Tensor, q: Tensor, noise_key: Tensor) -> Verdict:
    """By the runner.  # logits [depth + 1, vocab], q [depth, vocab]"""
    drawn = seated.rule >= Rule.TOKEN_WISE and not seated.one_hot and len(seated.drafts) > 0
    noise = Given(noise_key, seated.seat)
    rules: dict[Rule, VerificationRule] = {
        Rule.GREEDY: Greedy(),
        Rule.COUPLED: Coupled(),
        Rule.TOKEN_WISE: Rejection(token_wise if drawn else one_hot, noise),
        Rule.BLOCK: Rejection(block if drawn else one_hot, noise),
    }
    run = Run(seated.positions, Draft(seated.drafts, q if drawn else None))
    (verdict,) = rules[seated.rule].judge(edited(logits, seated.positions), [run])
    return verdict


def edited(logits: Tensor, positions: Positions) -> Tensor:
    """By the runner, a copy.  # [rows, vocab]"""
    logits = logits.clone()
    assert edit_(logits, [positions]) == []
    return logits


def likely(seated: Seated, logits: Tensor, rng: np.random.Generator, generator: torch.Generator) -> Tensor:
    """Replace most drafts by what the target may say -> what they were drawn from, [depth, vocab]."""
    depth = len(seated.drafts)
    logits = edited(logits, seated.positions)
    if seated.rule == Rule.GREEDY:
        wanted = logits.argmax(-1)
    elif seated.rule == Rule.COUPLED:
        wanted = choose_(logits.clone(), [seated.positions])
    else:
        wanted = distribution_(logits.clone(), [seated.positions]).multinomial(1, generator=generator)[:, 0]
    near = logits[:depth] + rng.choice([0.0, 0.5, 2.0]) * torch.randn(depth, VOCAB, generator=generator)
    if seated.rule >= Rule.TOKEN_WISE and not seated.one_hot and depth:
        q = distribution_(near, [Positions(seated.sequence, seated.drafts[:-1])])
        seated.drafts[:] = q.multinomial(1, generator=generator)[:, 0].tolist()
        return q
    seated.drafts[:] = [int(w) if rng.random() < 0.7 else d for d, w in zip(seated.drafts, wanted, strict=False)]
    return near


@pytest.mark.parametrize(("seed", "only"), list(enumerate([*MIXED, *Rule, *[Rule.BLOCK] * 9, *[Rule.TOKEN_WISE] * 4])))
def test_judge_is_the_rules_of_the_runner(seed: int, only: Rule | None) -> None:
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    batch = random_batch(rng, only)
    noise_key = [int(x) for x in rng.integers(-(1 << 31), 1 << 31, 3)]
    table = make_table(batch)
    starts = np.cumsum([0, *(len(s.drafts) + 1 if s.samples else 0 for s in batch)])
    logits = 2 * torch.randn(int(starts[-1]) + 1, VOCAB, generator=generator)
    if rng.random() < 0.5:
        logits = logits.round()  # ties
    logits[-1] = torch.nan
    drawn = []
    for seated, start in zip(batch, starts, strict=False):
        rows = logits[start : start + len(seated.drafts) + 1]
        q = likely(seated, rows, rng, generator) if seated.samples else torch.empty(0, VOCAB)
        if seed % 4 == 3:
            q[:1] = 0  # the draft's logits were no numbers
        drawn.append(q)
        if not seated.one_hot:
            table.probs[seated.seat, : len(q)] = q.to(DEVICE)
    step = make_step(batch, noise_key)
    token_ids = torch.tensor(
        [t for s in batch for t in [*s.sequence.token_ids[-s.num_tokens :], *s.drafts]] + [0, 0],
        dtype=torch.int32 if seed % 2 else torch.int64,
    )
    output = StepOutput.view(
        torch.full((StepOutput.size(NUM_SEQS, DEPTH),), POISON, dtype=torch.int32, device=DEVICE), NUM_SEQS, DEPTH
    )
    facts, kept, texts, counts = table.facts.clone(), table.probs.clone(), table.texts.cpu(), table.counts.cpu().clone()
    there = logits.to(DEVICE, copy=True)
    judge(there, token_ids.to(DEVICE), table, step, output)
    wanted = facts.cpu()
    key = step.noise_key.cpu()
    for i, (seated, start, q) in enumerate(zip(batch, starts, drawn, strict=False)):
        rows = slice(start, start + (len(seated.drafts) + 1) * seated.samples)
        if not seated.is_judged:
            assert output.num_accepted[i] == 0
            assert torch.equal(there[rows].cpu(), logits[rows]), "the host is to see them"
            continue
        row = wanted[seated.seat]
        row[Column.COMPUTED] += seated.num_tokens
        by_model = bool(seated.drafts) and not seated.one_hot
        size = len(seated.sequence)
        until = size - FIRST_PASS_ROWS * by_model
        read = max(seated.draft_computed, min(seated.draft_computed + seated.num_read, until))
        row[Column.DRAFT_COMPUTED] = read
        if not seated.samples:
            assert output.num_accepted[i] == 0
            continue
        verdict = verdict_of(seated, logits[start : start + len(seated.drafts) + 1], q, key)
        count = verdict.num_accepted
        assert output.num_accepted[i] == count, seated
        assert output.tokens[i, : count + 1].tolist() == verdict.token_ids, seated
        labels = output.labels[i, : len(verdict.acceptance)].view(torch.float32).tolist()
        assert labels == pytest.approx(verdict.acceptance, abs=1e-5), seated
        row[Column.COMPUTED] += count
        if by_model and read >= until:
            row[Column.DRAFT_COMPUTED] = size + min(len(seated.drafts) - 1, count)
        texts[seated.seat, size : size + count + 1] = torch.tensor(verdict.token_ids)
        if seated.sequence.counts is not None:
            counts[seated.seat] = count_row(seated.sequence.prompt, seated.sequence.output + verdict.token_ids)
    assert torch.equal(table.facts.cpu(), wanted)
    assert torch.equal(table.texts.cpu(), texts)
    assert torch.equal(table.counts.cpu(), counts)
    assert output.num_accepted[len(batch) :].tolist() == [0, 0]
    assert not output.broken.any()
    assert torch.equal(table.probs.nan_to_num(9), kept.nan_to_num(9)), "read, and no more"
    assert bool((table.drafts == -77).all())


@pytest.mark.parametrize("rule", [Rule.TOKEN_WISE, Rule.BLOCK])
def test_behind_a_rejection_that_leaves_nothing_p_is_drawn_from(rule: Rule) -> None:
    """p = q, and a draft that neither would say."""
    sequence = make_sequence((1, 2), verification=RULES[rule])
    seated = Seated(3, rule, sequence, 1, [5], False, True)
    table = make_table([seated])
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, 18] = 1.0
    q = logits.softmax(-1)[:1]
    table.probs[3, :1] = q.to(DEVICE)
    step = make_step([seated], [1, 2, 3], padding=0)
    output = StepOutput.view(torch.zeros(StepOutput.size(1, DEPTH), dtype=torch.int32, device=DEVICE), 1, DEPTH)
    verdict = verdict_of(seated, logits, q, step.noise_key.cpu())
    judge(logits.to(DEVICE, copy=True), torch.tensor([2, 5], device=DEVICE), table, step, output)
    assert (output.num_accepted.tolist(), output.tokens[0, 0].item()) == ([0], 18)
    assert verdict.token_ids == [18]


@pytest.mark.parametrize("rule", [Rule.TOKEN_WISE, Rule.BLOCK])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_draft_from_logits_that_are_no_numbers_is_not_kept(rule: Rule, bad: float) -> None:
    """Though the target says nothing else."""
    sequence = make_sequence((1, 2), verification=RULES[rule])
    seated = Seated(3, rule, sequence, 1, [0], False, True)
    table, step = make_table([seated]), make_step([seated], [1, 2, 3], padding=0)
    choose_drafts(torch.full((1, VOCAB), bad, device=DEVICE), table, step, first=True)
    assert not table.probs[3, 0].any()
    assert table.drafts[3, 0].item() == 0
    logits = torch.full((2, VOCAB), -torch.inf, device=DEVICE)
    logits[:, 0] = 1.0
    output = StepOutput.view(torch.zeros(StepOutput.size(1, DEPTH), dtype=torch.int32, device=DEVICE), 1, DEPTH)
    judge(logits, torch.tensor([2, 0], device=DEVICE), table, step, output)
    assert (output.num_accepted.tolist(), output.tokens[0, 0].item()) == ([0], 0)
    assert output.labels[0, 0].item() == 0


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_are_told_of_where_they_choose_a_token(rule: Rule, bad: float) -> None:
    """Sequences with two drafts each: the first of A and B is rejected, those of C and D are kept."""
    sampling: dict[str, Any] = {
        Rule.GREEDY: {"temperature": 0.0},
        Rule.COUPLED: {"temperature": 0.5, "seed": 3},
    }.get(rule, {"verification": RULES[rule]})
    drafts = {"A": [4, 6], "B": [4, 6], "C": [5, 6], "D": [5, 6]}
    batch = [
        Seated(i, rule, make_sequence((1, 2), **sampling), 1, own, True, True) for i, own in enumerate(drafts.values())
    ]
    logits = torch.zeros(12, VOCAB)
    for row, wanted in enumerate([5, 6, 7] * 4):
        logits[row, wanted] = 90.0
    logits[[2, 3, 8]] = bad  # the last of A, the first of B, the last of C
    output = StepOutput.view(torch.zeros(StepOutput.size(4, DEPTH), dtype=torch.int32, device=DEVICE), 4, DEPTH)
    token_ids = torch.tensor([token for own in drafts.values() for token in [2, *own]], device=DEVICE)
    table = make_table(batch)
    judge(logits.to(DEVICE), token_ids, table, make_step(batch, [1, 2, 3], padding=0), output)
    assert output.broken.tolist() == [0, 1, 1, 0]
    assert output.tokens[0, 0].item() == 5
    assert output.tokens[3, :3].tolist() == [5, 6, 7]
    assert 0 <= table.texts[1, 2].item() < VOCAB, "the next step may read it"


@pytest.mark.parametrize(("seed", "only"), list(enumerate([*MIXED[:6], *Rule])))
def test_drafts_are_chosen_as_the_draft_model_does(seed: int, only: Rule | None) -> None:
    rng, generator = np.random.default_rng(100 + seed), torch.Generator().manual_seed(seed)
    batch = [replace(seated, num_tokens=1) for seated in random_batch(rng, only)]
    table, step = make_table(batch), make_step(batch, [int(x) for x in rng.integers(-(1 << 31), 1 << 31, 3)])
    deepest = sorted(batch, key=lambda s: -len(s.drafts))
    wanted, probs = table.drafts.clone().cpu(), table.probs.clone().cpu()
    facts = table.facts.clone()
    proposed: dict[int, list[int]] = {s.seat: [] for s in batch}
    for j in range(DEPTH):
        # Fewer rows than sequences, and some behind those that go on.
        rows = min(len(batch), sum(len(s.drafts) > j for s in batch) + 1)
        logits = 2 * torch.randn(rows, VOCAB, generator=generator)
        for row, seated in enumerate(deepest[:rows]):
            if len(seated.drafts) <= j:
                continue
            positions = [Positions(seated.sequence, proposed[seated.seat], j)]
            mine = edited(logits[row : row + 1], *positions)
            if seated.rule == Rule.GREEDY:
                token = ops.argmax(mine)
            elif seated.rule == Rule.COUPLED:
                token = choose_(mine, positions)
            else:
                probs[seated.seat, j] = distribution_(mine, positions)[0]
                u = uniform(step.noise_key.cpu(), Noise.DRAFT, torch.tensor([seated.seat]), j)
                token = ops.draw(mine, u)
            wanted[seated.seat, j] = token
            proposed[seated.seat].append(int(token))
        choose_drafts(logits.to(DEVICE), table, step, first=j == 0)
    assert torch.equal(table.drafts.cpu(), wanted)
    torch.testing.assert_close(table.probs.cpu(), probs, equal_nan=True, rtol=1e-5, atol=1e-9)
    for seated in batch:
        if seated.drafts:
            facts[seated.seat, Column.DRAFTED] = len(seated.drafts)
    assert torch.equal(table.facts, facts)


def test_uniform_noise_is_uniform_and_hangs_on_all_of_its_key() -> None:
    key = torch.tensor([1, -2, 3, 0], dtype=torch.int32)
    seats, j = torch.arange(50)[:, None], torch.arange(40)
    values = torch.stack([uniform(key, stream, seats, j) for stream in Noise])
    values = torch.cat([values, *(uniform(key + bump, Noise.DRAFT, seats, j)[None] for bump in torch.eye(4)[:3].int())])
    assert len(values.unique()) == values.numel()
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean().item() - 0.5) < 0.01
