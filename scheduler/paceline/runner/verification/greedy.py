"""Greedy requests: a draft is kept while it is the argmax."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

import paceline_kernels as ops
from paceline.runner.verification.rule import Run, Verdict, agreeing


class Greedy:
    """Implements `VerificationRule`. Ties go to the lowest id."""

    def judge(self, logits: Tensor, runs: Seq[Run]) -> list[Verdict]:
        return agreeing(runs, ops.argmax(logits).tolist())
