"""Every error that Paceline raises on purpose.

    PacelineError
    +- InvalidArgument        a field of a request or setting has a value that is not allowed
    +- NotFound               a name that nothing here has
    +- AlreadyExists          a name that must be new is taken
    +- FailedPrecondition     known, but not enabled or not supported here
    +- Unauthenticated        no credential, or none that is known
    +- PermissionDenied       the credential does not allow it
    +- ResourceExhausted      it can never fit, or a quota is used up
    +- Unavailable            not now: draining, full, still loading
    +- DeadlineExceeded       the caller's time ran out
    +- Cancelled              the caller, or somebody for the caller, gave up
    +- ModelLoadError         a checkpoint that cannot be served
    +- EngineDead             the engine failed; every live request ends with this

This module imports nothing of ours, so that every part, the pure core included, may raise from one tree.
`server/status.py` maps it to gRPC codes, in one table.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of the tree. `str(error)` is safe to show to a client."""


class InvalidArgument(PacelineError):
    """A value that is not allowed.

    Args:
        field: dotted name as the client wrote it, `sampling.top_p`.
        value: what was given.
        allowed: what would have been accepted, in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} = {brief(value)}: must be {allowed}")
        self.field = field
        self.allowed = allowed


def brief(value: object) -> str:
    """A value as errors show it, cut where it is long."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


class NotFound(PacelineError):
    """A name that nothing here has."""


class AlreadyExists(PacelineError):
    """A name that must be new is taken."""


class FailedPrecondition(PacelineError):
    """Known, but not enabled or not supported by this server."""


class Unauthenticated(PacelineError):
    """No credential, or none that is known here."""


class PermissionDenied(PacelineError):
    """The credential is known, and does not allow it."""


class _ComeAgain(Exception):
    """Args:
    retry_after: seconds after which a retry may succeed, if that can be told.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ResourceExhausted(_ComeAgain, PacelineError):
    """It can never fit, or a quota is used up; in the second case it tells when to come again."""


class Unavailable(_ComeAgain, PacelineError):
    """Not now: draining, full or still loading. Worth a retry."""


class DeadlineExceeded(PacelineError):
    """The caller's time ran out."""


class Cancelled(PacelineError):
    """The caller, or somebody for the caller, gave up."""


class ModelLoadError(PacelineError):
    """A checkpoint that cannot be served: names the file, the tensor and what was expected."""


class EngineDead(PacelineError):
    """The engine failed; every live request ends with this."""
