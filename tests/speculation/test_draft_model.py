"""Draft KV on real tensors: whatever happened before, a draft is what the draft model says of the text as it stands."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.core.config import SchedulerConfig
from paceline.core.depth import DepthCandidate
from paceline.core.params import Method, SamplingParams, StopParams
from paceline.core.plan import SequenceWork
from paceline.core.scheduler import Scheduler
from paceline.core.sequence import Sequence
from paceline.models import load_model
from paceline.runner import Draft, KVCache, ModelRunner
from paceline.runner.sampler import distribution
from paceline.sim import Arrival, VirtualClock, simulate
from paceline.speculation import DraftModel
from support.pairs import tiny_pair

CPU = torch.device("cpu")
BLOCKS, BLOCK_SIZE = 24, 4


class Cycle:
    """Depths in turn, 0 among them, so that the draft model falls behind and has to catch up."""

    def __init__(self, *depths: int) -> None:
        self._depths = itertools.cycle(depths)

    def choose(self, candidates: Seq[DepthCandidate]) -> list[int]:
        return [min(next(self._depths), candidate.highest) for candidate in candidates]


class Checked(DraftModel):
    """Compares every proposal with a forward from scratch by transformers."""

    reference: torch.nn.Module
    drafted = 0

    def propose(self, batch: Seq[tuple[Sequence, SequenceWork]]) -> list[Draft]:
        texts = [list(sequence.token_ids) for sequence, _ in batch]
        drafts = super().propose(batch)
        for (sequence, work), text, draft in zip(batch, texts, drafts, strict=True):
            assert len(draft.token_ids) == work.num_drafts
            if not draft.token_ids:
                continue
            rows = self.reference(torch.tensor([text + draft.token_ids])).logits[0, len(text) - 1 : -1]
            if sequence.sampling.greedy:
                assert draft.probs is None
                for row, token in zip(rows, draft.token_ids, strict=True):
                    assert row[token] > row.max() - 1e-4
            else:
                assert draft.probs is not None
                expected = distribution(rows, [sequence.sampling] * len(rows))
                torch.testing.assert_close(draft.probs, expected, atol=1e-4, rtol=1e-3)
            self.drafted += len(draft.token_ids)
        return drafts


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pair(tmp_path_factory.mktemp("pair"), noise=0.01)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("depths", [(3,), (0, 0, 2), (1, 5, 0, 0, 0, 0, 4)], ids=str)
def test_proposals_are_the_draft_models_own(pair: tuple[Path, Path], depths: tuple[int, ...], lag: int) -> None:
    target, draft = (load_model(path, torch.float32, CPU) for path in pair)
    drafter = Checked(draft, KVCache(draft.config, BLOCKS, BLOCK_SIZE, torch.float32, CPU), seed=3)
    drafter.reference = AutoModelForCausalLM.from_pretrained(pair[1], dtype=torch.float32)
    kv_cache = KVCache(target.config, BLOCKS, BLOCK_SIZE, torch.float32, CPU)
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
            sampling=SamplingParams(temperature=0.0 if i % 2 else 0.9, top_p=0.9),
        )
        for i in range(10)
    ]
    with torch.inference_mode():
        trace = simulate(Scheduler(config, Cycle(*depths)), runner, arrivals, VirtualClock(), lag=lag, check=True)
    assert drafter.drafted > 20
    assert sum(stats.accepted_tokens for stats in trace.finished.values()) > 5
    assert sum(stats.preemptions for stats in trace.finished.values()) > 0, "the pool is meant to be too small"
