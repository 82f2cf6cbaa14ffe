"""Which drafts are kept, and the token behind them. Every rule is exact: what is emitted follows the target alone."""

from paceline.compiled import path_of

__path__ = path_of("runner/verification", __path__)

from paceline.runner.verification.rule import Run, Verdict, VerificationRule
from paceline.runner.verification.verifier import Verifier

__all__ = ["Run", "Verdict", "VerificationRule", "Verifier"]
