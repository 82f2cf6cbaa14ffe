"""What a step holds besides its logits, counted as torch allocates it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.core.params import SamplingParams, SequenceParams, Verification
from paceline.core.plan import Admission
from paceline.core.sequence import Sequence
from paceline.runner.drafter import Draft
from paceline.runner.memory import SAMPLING_COPIES
from paceline.runner.positions import Positions
from paceline.runner.verification import Run, Verifier
from paceline_kernels import sampling
from paceline_kernels.cpu import sampling as cpu
from support.native import needs_compiler

VOCAB, DEPTH = 2000, 8


class Counted(TorchDispatchMode):
    """Bytes that operations allocate, and hold at the most; without what is there already."""

    def __init__(self, there: torch.Tensor) -> None:
        super().__init__()
        self._held = {there.untyped_storage()._cdata: 0}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage())._cdata not in self._held:
                self._held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._held.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self._held.values()))
        return out


def sequence(request_id: int, rule: Verification) -> Sequence:
    return Sequence(Admission(request_id, (1, 2, 3), 3, SequenceParams(SamplingParams(), verification=rule)))


@needs_compiler
@pytest.mark.parametrize("rule", [Verification.BLOCK, Verification.TOKEN_WISE])
def test_what_judging_drafts_holds_is_reserved(rule: Verification, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rules, so that rows are taken apart, and logprobs, for which the logits are kept."""
    # What Triton computes is done in place, as C++ does it; all else on a GPU is the reference's.
    monkeypatch.setattr(sampling, "_rows", lambda logits: cpu)
    monkeypatch.setattr(sampling, "_fast", lambda *tensors: False)
    num_seqs, verifier = 4, Verifier(0, torch.device("cpu"))
    logits = torch.randn(num_seqs * (1 + DEPTH) + 1, VOCAB)
    with Counted(logits) as counted:
        raw = logits.clone()
        probs = torch.full((num_seqs * DEPTH, VOCAB), 1 / VOCAB)
        drafts = [Draft([1] * DEPTH, probs, DEPTH * i) for i in range(num_seqs)]
        runs = [Run(Positions(sequence(i, rule), draft.token_ids), draft) for i, draft in enumerate(drafts)]
        runs.append(Run(Positions(sequence(num_seqs, Verification.GREEDY), []), Draft([])))
        verifier.verify(logits, runs)
    copies = counted.peak / raw.nbytes
    assert 5 < copies <= SAMPLING_COPIES
