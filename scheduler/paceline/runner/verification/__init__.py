"""Which drafts are kept, and the token behind them. Every rule is exact: what is emitted follows the target alone."""

from paceline.runner.verification.rule import Run, Verdict, VerificationRule
from paceline.runner.verification.verifier import Verifier

__all__ = ["Run", "Verdict", "VerificationRule", "Verifier"]
