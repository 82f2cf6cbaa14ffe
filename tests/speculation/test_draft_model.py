"""Draft KV on real tensors: whatever happened before, a draft is what the draft model says of the text as it stands."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import paceline_kernels as ops
from paceline.core.config import SchedulerConfig
from paceline.core.depth import Chosen, DepthCandidate, StepLoad, within_bounds
from paceline.core.depth_policy import DepthPolicy
from paceline.core.method import Method
from paceline.core.params import (
    Constraints,
    SamplingParams,
    SequenceParams,
    SpeculationParams,
    StopParams,
    Verification,
)
from paceline.core.plan import Admission, SequenceWork
from paceline.core.scheduler import Scheduler
from paceline.core.sequence import Sequence
from paceline.core.speculation import SpeculationControl
from paceline.models import Model, load_model, load_native
from paceline.runner import Draft, KVCache, ModelRunner
from paceline.runner.positions import Positions
from paceline.runner.sampler import distribution_, edit_
from paceline.runner.verification.coupled import choose_
from paceline.sim import Arrival, VirtualClock, simulate
from paceline.speculation import DraftModel
from runner.rows import Following
from support.native import needs_compiler
from support.pairs import tiny_pair

CPU = torch.device("cpu")
BLOCKS, BLOCK_SIZE = 22, 4
TOLERANCE = 1e-4  # of logits, between us and transformers
DRAWN = (Verification.TOKEN_WISE, Verification.BLOCK)


class Cycle(DepthPolicy):
    """Depths in turn, 0 among them, so that the draft model falls behind and has to catch up."""

    def __init__(self, *depths: int) -> None:
        self._depths = itertools.cycle(depths)

    def choose(self, candidates: Seq[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        return [within_bounds(candidate, candidate.offers[0], next(self._depths)) for candidate in candidates]


class Checked(DraftModel):
    """Compares every proposal with a forward from scratch by transformers, behind the request's own processors."""

    reference: torch.nn.Module

    def __init__(self, model: Model, kv_cache: KVCache, seed: int) -> None:
        super().__init__(model, kv_cache, seed)
        self.drafted = dict.fromkeys(Verification, 0)

    def propose(self, batch: Seq[tuple[Sequence, SequenceWork]]) -> list[Draft]:
        texts = [list(sequence.token_ids) for sequence, _ in batch]
        drafts = super().propose(batch)
        for (sequence, work), text, draft in zip(batch, texts, drafts, strict=True):
            assert sequence.token_ids == text
            assert len(draft.token_ids) == work.num_drafts
            if draft.token_ids:
                rows = self.reference(torch.tensor([text + draft.token_ids])).logits[0, len(text) - 1 : -1]
                self.compare(rows.clone(), sequence, draft)
        return drafts

    def compare(self, rows: Tensor, sequence: Sequence, draft: Draft) -> None:
        positions = Positions(sequence, draft.token_ids[:-1])
        assert edit_(rows, [positions]) == []
        rule = sequence.params.verification
        self.drafted[rule] += len(draft.token_ids)
        if rule in DRAWN:
            assert draft.probs is not None
            q = draft.probs[draft.first_row : draft.first_row + len(draft.token_ids)]
            torch.testing.assert_close(q, distribution_(rows, [positions]), atol=1e-4, rtol=1e-3)
            assert (q.gather(1, torch.tensor(draft.token_ids)[:, None]) > 0).all()
            return
        # A token that was chosen is chosen again once it is ahead of whatever was as good but for rounding.
        assert draft.probs is None
        chosen = torch.tensor(draft.token_ids)
        rows[torch.arange(len(rows)), chosen] += TOLERANCE
        again = choose_(rows, [positions]) if rule is Verification.COUPLED else ops.argmax(rows)
        assert again.tolist() == draft.token_ids


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pair(tmp_path_factory.mktemp("pair"), noise=0.01)


PENALTIES = {"repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": 0.75}
Kinds = list[tuple[SamplingParams, SpeculationParams]]
GREEDY: Kinds = [(SamplingParams(temperature=0.0), SpeculationParams())]
KINDS: Kinds = [
    *GREEDY,
    (SamplingParams(temperature=0.9, top_p=0.9), SpeculationParams()),
    (SamplingParams(temperature=0.75, top_k=40, seed=5, logit_bias=((7, 2.0),)), SpeculationParams()),
    (SamplingParams(**PENALTIES), SpeculationParams(verification=Verification.TOKEN_WISE)),
    (SamplingParams(temperature=0.0, **PENALTIES), SpeculationParams()),
    (SamplingParams(seed=6, **PENALTIES), SpeculationParams()),
    (SamplingParams(min_p=0.125, allowed_token_ids=tuple(range(0, 320, 2))), SpeculationParams()),
]


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_compiler)])
def load(request: pytest.FixtureRequest) -> Callable[[Path], Model]:
    """Both backends."""
    if request.param == "native":
        return partial(load_native, dtype=torch.float32)
    return partial(load_model, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("depths", [(3,), (0, 0, 2), (1, 5, 0, 0, 0, 0, 4)], ids=str)
@pytest.mark.parametrize("kinds", [KINDS, GREEDY], ids=["every rule", "greedy"])
def test_proposals_are_the_draft_models_own(
    pair: tuple[Path, Path], load: Callable[[Path], Model], kinds: Kinds, depths: tuple[int, ...], lag: int
) -> None:
    """For every rule, with penalties and truncation, with several sequences and rules in a batch; and by argmax alone,
    which the native backend does in one call.
    """
    target, draft = map(load, pair)
    drafter = Checked(draft, KVCache(draft, BLOCKS, BLOCK_SIZE), seed=3)
    drafter.reference = AutoModelForCausalLM.from_pretrained(pair[1], dtype=torch.float32)
    kv_cache = KVCache(target, BLOCKS, BLOCK_SIZE)
    runner = ModelRunner(target, kv_cache, {Method.DRAFT_MODEL: drafter}, seed=3)
    config = SchedulerConfig(
        BLOCKS,
        BLOCK_SIZE,
        max_num_seqs=5,
        max_num_batched_tokens=16,
        max_model_len=64,
        method=Method.DRAFT_MODEL,
        max_draft_len=60,
    )
    rng = random.Random(1)
    arrivals = [
        Arrival(
            time=0.0,
            request_id=i,
            prompt_token_ids=tuple(rng.randrange(1, 320) for _ in range(rng.choice([1, 3, 20, 33]))),
            stop=StopParams(max_tokens=rng.randint(2, 31), ignore_eos=True),
            sampling=kinds[i % len(kinds)][0],
            speculation=kinds[i % len(kinds)][1],
        )
        for i in range(14)
    ]
    with torch.inference_mode():
        scheduler = Scheduler(config, SpeculationControl(Cycle(*depths)))
        trace = simulate(scheduler, runner, arrivals, VirtualClock(), lag=lag, check=True)
    assert kinds is GREEDY or all(drafter.drafted.values()), drafter.drafted
    assert sum(drafter.drafted.values()) > 40
    assert sum(stats.accepted_tokens for stats in trace.finished.values()) > 5
    assert sum(stats.preemptions for stats in trace.finished.values()) > 0, "the pool is meant to be too small"


# -- proposals by hand ------------------------------------------------------------------------------------------------

PROMPT = (3, 1, 4, 1, 5, 9)


@pytest.fixture
def drafter(pair: tuple[Path, Path], load: Callable[[Path], Model]) -> DraftModel:
    model = load(pair[1])
    return DraftModel(model, KVCache(model, BLOCKS, BLOCK_SIZE), seed=3)


def admitted(place: int, depth: int, params: SequenceParams) -> tuple[Sequence, SequenceWork]:
    """A sequence that the draft model has not seen, with blocks of its own."""
    blocks = tuple(range(6 * place, 6 * place + 6))
    sequence = Sequence(Admission(place, PROMPT, len(PROMPT), params))
    work = SequenceWork(place, len(PROMPT), True, depth, Method.DRAFT_MODEL, len(PROMPT), blocks)
    sequence.extend(work)
    return sequence, work


def ending_in(*tokens: int) -> Constraints:
    """Each token must be followed by the next, and nothing may follow the last; `PROMPT` is not looked at."""
    table = np.zeros((320, 320), np.bool_)
    table[tokens[:-1], tokens[1:]] = True
    return Constraints(grammar=Following(table, last=tokens[0]))


def params_of(verification: Verification, constraints: Constraints = Constraints()) -> SequenceParams:
    sampling = {
        Verification.GREEDY: SamplingParams(temperature=0.0),
        Verification.COUPLED: SamplingParams(seed=1),
    }.get(verification, SamplingParams())
    return SequenceParams(sampling, constraints, verification=verification)


@pytest.mark.parametrize("verification", Verification)
def test_drafts_follow_the_mask_of_their_position(drafter: DraftModel, verification: Verification) -> None:
    """Each is forced by the one before."""
    batch = [admitted(0, 3, params_of(verification, ending_in(9, 300, 20, 7)))]
    (draft,) = drafter.propose(batch)
    assert draft.token_ids == [300, 20, 7]
    if verification in DRAWN:
        assert draft.probs is not None
        assert draft.probs[draft.first_row :][:3].tolist() == torch.eye(320)[[300, 20, 7]].tolist()


@pytest.mark.parametrize("verification", Verification)
def test_where_no_token_is_allowed_the_proposal_ends_and_others_go_on(
    drafter: DraftModel, verification: Verification
) -> None:
    """At the third, at the second, and at the first draft; beside a sequence of every rule."""
    dying = [ending_in(9, 300, 20), ending_in(9, 300), ending_in(9)]
    batch = [admitted(place, 4, params_of(verification, constraints)) for place, constraints in enumerate(dying)]
    batch.insert(1, admitted(3, 4, params_of(Verification.GREEDY)))
    drafts = drafter.propose(batch)
    assert [draft.token_ids for draft in drafts[:1] + drafts[2:]] == [[300, 20], [300], []]
    assert drafts[3].probs is None
    assert len(drafts[1].token_ids) == 4
    for draft in (drafts[0], drafts[2]):
        if verification in DRAWN:
            assert draft.probs is not None
            rows = draft.probs[draft.first_row : draft.first_row + len(draft.token_ids)]
            assert rows.argmax(-1).tolist() == draft.token_ids
        else:
            assert draft.probs is None
    (alone,) = drafter.propose([admitted(3, 4, params_of(Verification.GREEDY))])
    assert alone.token_ids == drafts[1].token_ids
    for sequence, work in batch:  # what was fed in: all known tokens, and every draft that another was drawn behind
        fed = sequence.num_draft_computed - len(PROMPT)
        assert 0 <= fed <= work.num_drafts - 1


@pytest.mark.parametrize("num_emitted", [0, 1, 2])
def test_behind_a_dead_end_the_newest_token_is_read_again(drafter: DraftModel, num_emitted: int) -> None:
    """A step planned meanwhile still drafts; its result is dropped."""
    sequence, work = admitted(0, 4, params_of(Verification.BLOCK, ending_in(9, 300, 20)))
    (draft,) = drafter.propose([(sequence, work)])
    sequence.commit(work, draft.token_ids[:num_emitted], num_emitted)
    assert sequence.num_draft_computed < len(sequence)
    drafter.propose([(sequence, SequenceWork(0, 1, True, 2, Method.DRAFT_MODEL, 2))])


def test_drawn_drafts_of_a_step_share_their_rows_of_q(drafter: DraftModel) -> None:
    """Of different depths, with drafts between them that are not drawn."""
    rules = [Verification.BLOCK, Verification.GREEDY, Verification.TOKEN_WISE, Verification.BLOCK]
    depths = [2, 3, 4, 0]
    batch = [admitted(place, depths[place], params_of(rule)) for place, rule in enumerate(rules)]
    block, greedy, token_wise, nothing = drafter.propose(batch)
    assert block.probs is token_wise.probs is not None
    assert greedy.probs is None
    assert nothing == Draft([], None, nothing.first_row)
    spans = [range(d.first_row, d.first_row + len(d.token_ids)) for d in (block, token_wise)]
    assert sorted([*spans[0], *spans[1]]) == list(range(len(block.probs)))
    torch.testing.assert_close(block.probs.sum(-1), torch.ones(6))


def test_a_seeded_draft_is_the_same_in_every_batch_and_at_every_depth(drafter: DraftModel) -> None:
    """And not that of another seed."""
    params = params_of(Verification.COUPLED)
    (whole,) = drafter.propose([admitted(0, 4, params)])
    others = [admitted(1, 3, params_of(Verification.BLOCK)), admitted(2, 2, params), admitted(3, 1, params)]
    _, two, one = drafter.propose(others)
    assert (two.token_ids, one.token_ids) == (whole.token_ids[:2], whole.token_ids[:1])
    (other,) = drafter.propose([admitted(0, 4, replace(params, sampling=SamplingParams(seed=2)))])
    assert other.token_ids != whole.token_ids


@needs_compiler
@pytest.mark.parametrize("verification", Verification)
def test_the_native_backend_drafts_in_one_call(
    pair: tuple[Path, Path], verification: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To every depth, beside a sequence that the draft model only reads: what torch drafts, pass by pass."""
    depths = [3, 0, 1, 4]
    native = load_native(pair[1], torch.float32)
    monkeypatch.setattr(native, "forward", lambda *_: pytest.fail("a pass by itself"))
    found = []
    for model in (load_model(pair[1], torch.float32, CPU), native):
        drafter = DraftModel(model, KVCache(model, BLOCKS, BLOCK_SIZE), seed=3)
        batch = [admitted(place, depth, params_of(verification)) for place, depth in enumerate(depths)]
        drafts = drafter.propose(batch)
        assert [len(draft.token_ids) for draft in drafts] == depths
        assert all((draft.probs is not None) == (verification in DRAWN and bool(draft.token_ids)) for draft in drafts)
        computed = [sequence.num_draft_computed for sequence, _ in batch]
        # Draws differ: torch makes those of a pass together, the native backend those of a sequence.
        found.append((computed, [] if verification in DRAWN else [draft.token_ids for draft in drafts]))
    assert found[0] == found[1]
