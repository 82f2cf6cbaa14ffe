"""Seeded requests: what is emitted is what would be without drafts, whatever the drafts; and drafts that are close to
the target are kept often.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from paceline.core.params import Verification
from paceline.core.plan import Admission
from paceline.core.sequence import Sequence
from paceline.runner.drafter import Draft
from paceline.runner.positions import Positions, noise_keys
from paceline.runner.sampler import distribution_, edit_
from paceline.runner.verification import Run, Verdict, Verifier
from paceline.runner.verification.coupled import Coupled, choose_
from runner.rows import make_sequence, positions_of, random_sequence

CPU = torch.device("cpu")
VOCAB = 20
LONGEST = 5


def target(token_ids: list[int]) -> Tensor:
    """A model: logits [VOCAB] that depend on every token before them."""
    digest = hashlib.sha256(repr(token_ids).encode()).digest()
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7])))


def continued(sequence: Sequence, tokens: list[int]) -> Sequence:
    """The same request when it has emitted so many more; a new one, as after a preemption."""
    known = (*sequence.token_ids, *tokens)
    return Sequence(Admission(sequence.request_id, known, sequence.num_prompt_tokens, sequence.params))


def off(sequence: Sequence, length: int) -> list[int]:
    """What is emitted without drafts, a token at a time and in a batch of its own; it ends before a dead end."""
    tokens: list[int] = []
    for _ in range(length):
        now = continued(sequence, tokens)
        logits = target(now.token_ids)[None]
        if edit_(logits, [positions_of(now)]):
            break
        tokens.extend(choose_(logits, [positions_of(now)]).tolist())
    return tokens


def verified(sequences: list[Sequence], drafts: list[list[int]]) -> list[Verdict]:
    """All in one batch."""
    runs = [Run(positions_of(s, tokens), Draft(tokens)) for s, tokens in zip(sequences, drafts, strict=True)]
    texts = [run.positions.sequence.token_ids + run.draft.token_ids[:j] for run in runs for j in range(run.depth + 1)]
    logits = torch.stack([target(text) for text in texts])
    edit_(logits, [run.positions for run in runs])
    return Verifier(0, CPU).verify(logits, runs)


@pytest.fixture(scope="module")
def requests() -> list[tuple[Sequence, list[int]]]:
    """Requests of every kind, each with its continuation."""
    rng = np.random.default_rng(1)
    sequences = [
        random_sequence(
            rng, VOCAB, temperature=float(rng.choice([1e-30, 0.5, 1.0, 1.5])), seed=int(rng.integers(2**63))
        )
        for _ in range(60)
    ]
    found = [(sequence, off(sequence, LONGEST + 1)) for sequence in sequences]
    found = [(sequence, tokens) for sequence, tokens in found if len(tokens) == LONGEST + 1]
    assert len(found) > 30
    return found


def proposals(kind: str, tokens: list[int], rng: np.random.Generator) -> list[int]:
    depth = int(rng.integers(LONGEST + 1))
    right = tokens[:depth]
    if kind == "right":
        return right
    if kind == "random":  # most of them wrong, many banned, none drawn from any model
        return rng.integers(0, VOCAB, depth).tolist()
    wrong = right.copy()  # right up to somewhere, and behind it too
    if depth:
        place = int(rng.integers(depth))
        wrong[place] = (wrong[place] + 1) % VOCAB
    return wrong


@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_the_output_is_what_it_is_without_drafts(kind: str, requests: list[tuple[Sequence, list[int]]]) -> None:
    rng = np.random.default_rng(2)
    for _ in range(3):
        drafts = [proposals(kind, tokens, rng) for _, tokens in requests]
        verdicts = verified([sequence for sequence, _ in requests], drafts)
        for (_, tokens), draft, verdict in zip(requests, drafts, verdicts, strict=True):
            same = [a == b for a, b in zip(draft, tokens, strict=False)]
            accepted = [*same, False].index(False)
            assert verdict.token_ids == tokens[: accepted + 1]
            assert verdict.num_accepted == accepted
            assert verdict.acceptance == [1.0] * accepted + [0.0] * (accepted < len(draft))
            if kind == "right":
                assert accepted == len(draft)


def test_every_way_through_a_completion_gives_the_same(requests: list[tuple[Sequence, list[int]]]) -> None:
    """Step by step with random drafts, each step from where the last one ended."""
    rng = np.random.default_rng(3)
    emitted: list[list[int]] = [[] for _ in requests]
    for _ in range(LONGEST + 1):
        now = [continued(sequence, done) for (sequence, _), done in zip(requests, emitted, strict=True)]
        drafts = []
        for (_, tokens), done in zip(requests, emitted, strict=True):
            ahead = tokens[len(done) : len(done) + int(rng.integers(3))]
            drafts.append([t if rng.random() < 0.7 else int(rng.integers(VOCAB)) for t in ahead])
        for done, verdict in zip(emitted, verified(now, drafts), strict=True):
            done.extend(verdict.token_ids)
    for (_, tokens), done in zip(requests, emitted, strict=True):
        length = min(len(tokens), len(done))
        assert done[:length] == tokens[:length]
        assert length == LONGEST + 1


def test_greedy_output_is_what_it_is_without_drafts() -> None:
    """The same of the rule beside it: argmax, behind the same edits."""
    rng = np.random.default_rng(4)
    sequences = [random_sequence(rng, VOCAB, temperature=0.0) for _ in range(40)]
    for _ in range(3):
        drafts = [rng.integers(0, VOCAB, rng.integers(4)).tolist() for _ in sequences]
        for sequence, verdict in zip(sequences, verified(sequences, drafts), strict=True):
            for j, token in enumerate(verdict.token_ids):
                now = continued(sequence, verdict.token_ids[:j])
                logits = target(now.token_ids)[None]
                if edit_(logits, [positions_of(now)]):
                    break
                assert token == int(logits.argmax())


def test_noise_hangs_on_seed_choice_and_position_alone() -> None:
    def keys(**overrides: object) -> list[list[int]]:
        request = {"prompt": (5, 6), "output": (7,), "seed": (3 << 32) + 4, "choice": 2, "request_id": 9} | overrides
        return noise_keys([Positions(make_sequence(**request), [8, 9])], CPU).tolist()  # type: ignore[arg-type]

    own = [[4, 3, 3, 2], [4, 3, 4, 2], [4, 3, 5, 2]]
    assert keys() == own
    assert keys(request_id=10) == keys(prompt=(1,), output=(2, 3)) == own
    assert keys(prompt=(5, 6, 7), output=()) == own, "the position counts from the prompt's beginning"
    assert keys(top_k=2, temperature=0.5) == own
    assert keys(seed=4) == [[4, 0, *row[2:]] for row in own]
    assert keys(choice=0) == [[*row[:3], 0] for row in own]
    assert keys(seed=(1 << 64) - 1)[0][:2] == [0xFFFFFFFF, 0xFFFFFFFF]


def test_a_draft_model_asks_for_the_noise_of_the_position_it_drafts() -> None:
    sequence = make_sequence((5, 6), (7,), seed=1)
    whole = Positions(sequence, [8, 9])
    one_at_a_time = [Positions(sequence, [8, 9][:j], j) for j in range(3)]
    assert torch.equal(noise_keys([whole], CPU), noise_keys(one_at_a_time, CPU))
    assert torch.equal(noise_keys([whole], CPU), noise_keys(whole.only(range(3)), CPU))


# -- how often drafts are kept, and what is emitted, over many seeds --------------------------------------------------

SEEDS = 4000


def over_seeds(logits: Tensor, **sampling: object) -> Tensor:
    """What each of many seeds chooses from one row of logits.  # [SEEDS]"""
    batch = [Positions(make_sequence(seed=7919 * i, **sampling), []) for i in range(SEEDS)]  # type: ignore[arg-type]
    return choose_(logits.repeat(SEEDS, 1), batch)


@pytest.mark.parametrize("noise", [0.1, 0.5, 1.0, 3.0])
def test_acceptance_is_within_the_bounds(noise: float) -> None:
    """At least (1 - TV) / (1 + TV) (Daliri et al. 2024); at most 1 - TV, as for every coupling."""
    generator = torch.Generator().manual_seed(6)
    p = torch.randn(8, generator=generator)
    q = p + noise * torch.randn(8, generator=generator)
    tv = float((p.softmax(-1) - q.softmax(-1)).abs().sum()) / 2
    kept = (over_seeds(p) == over_seeds(q)).double()
    slack = 4 * float(kept.std()) / SEEDS**0.5
    assert (1 - tv) / (1 + tv) - slack < float(kept.mean()) < 1 - tv + slack


def test_other_noise_for_the_draft_is_below_the_bound() -> None:
    """So that the test above can fail."""
    p = torch.randn(8, generator=torch.Generator().manual_seed(6))
    other = over_seeds(p, choice=1)
    assert float((over_seeds(p) == other).double().mean()) < 0.5


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.75, "min_p": 0.125}], ids=str)
def test_over_seeds_the_output_follows_the_target(sampling: dict[str, float]) -> None:
    logits = torch.randn(6, generator=torch.Generator().manual_seed(8))
    p = distribution_(logits[None].clone(), [Positions(make_sequence(**sampling), [])])[0].double().numpy()
    counts = np.bincount(over_seeds(logits, **sampling).numpy(), minlength=6)
    assert (counts[p == 0] == 0).all()
    assert chisquare(counts[p > 0], p[p > 0] / p.sum() * SEEDS).pvalue > 0.001


def test_coupled_is_the_rule_of_seeded_requests() -> None:
    sequence = make_sequence(seed=3)
    assert sequence.params.verification is Verification.COUPLED
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    run = Run(Positions(sequence, [1, 2]), Draft([1, 2]))
    assert Verifier(0, CPU).verify(logits.clone(), [run]) == Coupled().judge(logits.clone(), [run])
    assert Verifier(0, CPU).verify(logits.clone(), [run]) == Verifier(1, CPU).verify(logits.clone(), [run])
