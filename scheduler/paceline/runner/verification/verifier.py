"""Each run of a step to the rule of its request."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from paceline.core.params import Verification
from paceline.runner.noise import RejectionNoise
from paceline.runner.verification.coupled import Coupled
from paceline.runner.verification.greedy import Greedy
from paceline.runner.verification.rejection import Rejection, block, one_hot, token_wise
from paceline.runner.verification.rule import Run, Verdict, VerificationRule


class Verifier:
    """Owns the rules, and through them the noise of unseeded requests."""

    def __init__(self, seed: int, device: torch.device) -> None:
        noise = RejectionNoise(seed, device)
        self._one_hot = Rejection(one_hot, noise)
        self._rules: dict[Verification, VerificationRule] = {
            Verification.GREEDY: Greedy(),
            Verification.COUPLED: Coupled(),
            Verification.TOKEN_WISE: Rejection(token_wise, noise),
            Verification.BLOCK: Rejection(block, noise),
        }

    def verify(self, logits: Tensor, runs: Seq[Run]) -> list[Verdict]:
        """Judge every run, in order.

        Args:
            logits: [rows, vocab] float32, after every edit; run i has depth + 1 consecutive rows. Overwritten.
        """
        groups: dict[int, tuple[VerificationRule, list[int]]] = {}
        for index, run in enumerate(runs):
            rule = self._rule(run)
            groups.setdefault(id(rule), (rule, []))[1].append(index)
        if len(groups) == 1:  # nothing to take apart
            [(rule, _)] = groups.values()
            return rule.judge(logits, runs)
        pieces = torch.split(logits, [run.depth + 1 for run in runs])
        verdicts: dict[int, Verdict] = {}
        for rule, members in groups.values():
            rows = torch.cat([pieces[i] for i in members])
            verdicts.update(zip(members, rule.judge(rows, [runs[i] for i in members]), strict=True))
        return [verdicts[i] for i in range(len(runs))]

    def _rule(self, run: Run) -> VerificationRule:
        """The request's rule; where no draft was drawn, both rules of unseeded requests come down to one."""
        rule = run.positions.params.verification
        if rule in (Verification.TOKEN_WISE, Verification.BLOCK) and run.draft.probs is None:
            return self._one_hot
        return self._rules[rule]
