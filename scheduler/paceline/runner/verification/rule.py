"""The seam between a step and the rules."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.runner.drafter import Draft
from paceline.runner.positions import Positions


# Of these two there is one for every request in every step. Nobody changes them, but to freeze them takes time.
@dataclass(slots=True)
class Run:
    """One sequence's part of a verification: its draft, and the position of every draft and of the bonus token."""

    positions: Positions
    draft: Draft

    @property
    def depth(self) -> int:
        return len(self.draft.token_ids)


@dataclass(slots=True)
class Verdict:
    """What one sequence emits.

    Attributes:
        token_ids: the accepted drafts, and the recovered or bonus token behind them.
        acceptance: see `SequenceResult.acceptance`.
    """

    token_ids: list[int]
    num_accepted: int
    acceptance: list[float]


class VerificationRule(Protocol):
    """Judges the runs that were given to it; other runs of the step may have other rules."""

    def judge(self, logits: Tensor, runs: Seq[Run]) -> list[Verdict]:
        """One verdict for each run.

        Args:
            logits: [rows, vocab] float32, after every edit; each run has depth + 1 consecutive rows, row j the target's
                view of the token at draft position j, the last row that of the bonus token. May be overwritten.
        """
        ...


def agreeing(runs: Seq[Run], choices: list[int]) -> list[Verdict]:
    """Verdicts of rules that keep a draft while it is what the target itself chose at its row.

    Args:
        choices: the target's token at every row.
    """
    verdicts, row = [], 0
    for run in runs:
        wanted = choices[row : row + run.depth + 1]
        count = next((j for j, token in enumerate(run.draft.token_ids) if token != wanted[j]), run.depth)
        verdicts.append(Verdict(wanted[: count + 1], count, [1.0] * count + [0.0] * (count < run.depth)))
        row += run.depth + 1
    return verdicts
