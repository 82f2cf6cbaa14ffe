"""Seeded requests: draft and target choose with the same noise, and a draft is kept while they agree.

Both take argmax(log probability + G), with Gumbel noise G that hangs on the seed, the choice, the absolute position and
the token alone. So the target's choice at a position is the same whatever was drafted, and the completion is a function
of weights, prompt, parameters and seed. A draft is accepted with probability at least (1 - TV) / (1 + TV) (Daliri et
al. 2024, "Coupling without communication and drafter-invariant speculative decoding").
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

import paceline_kernels as ops
from paceline.runner.positions import Positions, noise_keys
from paceline.runner.sampler import temperatures, truncate_
from paceline.runner.verification.rule import Run, Verdict, agreeing


class Coupled:
    """Implements `VerificationRule`; holds no state, and no noise of its own."""

    def judge(self, logits: Tensor, runs: Seq[Run]) -> list[Verdict]:
        return agreeing(runs, choose_(logits, [run.positions for run in runs]).tolist())


def choose_(logits: Tensor, batch: Seq[Positions]) -> Tensor:
    """The token that a seeded sequence takes at each row, [rows] int64; for target and draft alike.

    Args:
        logits: [rows, vocab] float32, after every edit; truncated in place.
    """
    truncate_(logits, batch)
    return ops.gumbel_argmax(logits, temperatures(batch, logits.device), noise_keys(batch, logits.device))
