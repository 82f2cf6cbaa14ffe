"""Every error that Paceline raises on purpose.

    PacelineError
    +- InvalidArgument        a field of a request or setting has a value that is not allowed
    +- NotFound               a name that nothing here has
    +- AlreadyExists          a name that must be new is taken
    +- FailedPrecondition     known, but not enabled or not supported here
    +- Unauthenticated        no credential, or none that is known
    +- PermissionDenied       the credential does not allow it
    +- ResourceExhausted      it can never fit, or a quota is used up
    |  +- QuotaExceeded       the quota is a tenant's
    +- Unavailable            not now: draining, full, still loading
    |  +- QueueTimeout        it waited for as long as it wanted to wait
    +- DeadlineExceeded       the caller's time ran out
    +- Cancelled              the caller, or somebody for the caller, gave up
    +- NotFinite              what the model computed for a request is no number
    +- ModelLoadError         a checkpoint that cannot be served
    +- NotWritten             a file of results, such as on a full disk
    +- EngineDead             the engine failed; every live request ends with this

This module imports nothing of ours, so that every part, the pure core included, may raise from one tree.
`server/status.py` maps it to gRPC codes, in one table with a row for each `Reason`.
"""

from __future__ import annotations

from enum import StrEnum, auto
from pathlib import PurePath
from typing import Any


class Reason(StrEnum):
    """What went wrong, as programs read it: names never change. `docs/errors.md` says what a client does about each."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[str]) -> str:
        return name

    INVALID_FIELD = auto()
    SAMPLING_PARAM_OUT_OF_RANGE = auto()
    INVALID_TOKEN_ID = auto()
    PROMPT_TOO_LONG = auto()
    TOO_MANY_STOP_STRINGS = auto()
    MALFORMED_REQUEST = auto()
    NOT_FOUND = auto()
    DUPLICATE_REQUEST_ID = auto()
    FEATURE_NOT_ENABLED = auto()
    UNAUTHENTICATED = auto()
    PERMISSION_DENIED = auto()
    TENANT_QUOTA_EXCEEDED = auto()
    EXCEEDS_KV_CACHE = auto()
    SLOW_CONSUMER = auto()
    RESOURCE_EXHAUSTED = auto()
    MODEL_LOADING = auto()
    QUEUE_FULL = auto()
    QUEUE_TIMEOUT = auto()
    DRAINING = auto()
    ENGINE_LOST = auto()
    UNAVAILABLE = auto()
    DEADLINE_EXCEEDED = auto()
    CANCELLED = auto()
    NOT_FINITE = auto()
    INTERNAL = auto()


class PacelineError(Exception):
    """Base of the tree. `str(error)` is safe to show to a client.

    Attributes:
        reason: a `Reason`: the class's, unless whoever raises the error knows better.
    """

    reason: str = Reason.INTERNAL

    def __reduce__(self) -> tuple[Any, ...]:
        """As it is: to call a constructor again that takes fields and makes a message of them is not to come back."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[PacelineError], args: tuple[object, ...], attributes: dict[str, object]) -> PacelineError:
    """An error that was pickled, as those are that come from another process."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class InvalidArgument(PacelineError):
    """A value that is not allowed.

    Args:
        field: dotted name as the client wrote it, `sampling.top_p`.
        value: what was given.
        allowed: what would have been accepted, in words.
    """

    reason = Reason.INVALID_FIELD

    def __init__(self, field: str, value: object, allowed: str, *, reason: Reason | None = None) -> None:
        super().__init__(f"{field} = {brief(value)}: must be {allowed}")
        self.field = field
        self.allowed = allowed
        if reason is None and field.startswith("sampling."):
            reason = Reason.SAMPLING_PARAM_OUT_OF_RANGE
        self.reason = reason or type(self).reason


def brief(value: object) -> str:
    """A value as errors show it, cut where it is long; a path is whole, since its end tells the most."""
    if isinstance(value, PurePath):
        return repr(str(value))
    try:
        shown = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or more digits than Python writes
        shown = f"of type {type(value).__name__}, too large to be shown"
    return cut_short(shown, 80)


def cut_short(text: str, most: int = 200) -> str:
    """A text as errors show it, at most so many characters of it: a status has to fit a header."""
    return text if len(text) <= most else text[: most - 3] + "..."


class NotFound(PacelineError):
    """A name that nothing here has.

    Args:
        kind: of the thing that was asked for, such as "model"; "" if the message says it all.
        name: of the thing.
    """

    reason = Reason.NOT_FOUND

    def __init__(self, message: str, *, kind: str = "", name: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.name = name


class AlreadyExists(PacelineError):
    """A name that must be new is taken."""

    reason = Reason.DUPLICATE_REQUEST_ID


class FailedPrecondition(PacelineError):
    """Known, but not enabled or not supported by this server."""

    reason = Reason.FEATURE_NOT_ENABLED


class Unauthenticated(PacelineError):
    """No credential, or none that is known here."""

    reason = Reason.UNAUTHENTICATED


class PermissionDenied(PacelineError):
    """The credential is known, and does not allow it."""

    reason = Reason.PERMISSION_DENIED


class _ComeAgain(PacelineError):
    """What may succeed later.

    Args:
        retry_after: seconds after which a retry may succeed, if that can be told.
    """

    def __init__(self, message: str, retry_after: float | None = None, *, reason: Reason | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.reason = reason or type(self).reason


class ResourceExhausted(_ComeAgain):
    """It can never fit, or a quota is used up; in the second case it tells when to come again."""

    reason = Reason.RESOURCE_EXHAUSTED


class QuotaExceeded(ResourceExhausted):
    """A tenant has, or asks for, more than its operator grants it. Others are not concerned.

    Args:
        tenant: whose quota it is.
        limit: its name in a tenants file, `max_queued`.
        granted: what the limit allows.
    """

    reason = Reason.TENANT_QUOTA_EXCEEDED

    def __init__(
        self, message: str, retry_after: float | None = None, *, tenant: str, limit: str, granted: int
    ) -> None:
        super().__init__(message, retry_after)
        self.tenant = tenant
        self.limit = limit
        self.granted = granted


class Unavailable(_ComeAgain):
    """Not now: draining, full or still loading. Worth a retry."""

    reason = Reason.UNAVAILABLE


class QueueTimeout(Unavailable):
    """It was not admitted within the time for which it wanted to wait."""

    reason = Reason.QUEUE_TIMEOUT


class DeadlineExceeded(PacelineError):
    """The caller's time ran out."""

    reason = Reason.DEADLINE_EXCEEDED


class Cancelled(PacelineError):
    """The caller, or somebody for the caller, gave up."""

    reason = Reason.CANCELLED


class NotFinite(PacelineError):
    """What the model computed for a request is no number: its weights are damaged, or its activations overflow."""

    reason = Reason.NOT_FINITE

    def __init__(self) -> None:
        super().__init__(
            "the model computed logits that are not finite (NaN or infinite) for this request: its weights are "
            "damaged, or numbers of its dtype cannot hold what it computes"
        )


class ModelLoadError(PacelineError):
    """A checkpoint that cannot be served: names the file, the tensor and what was expected."""


class NotWritten(PacelineError):
    """What was measured is there, and the file for it is not."""

    def __init__(self, path: PurePath, error: OSError) -> None:
        super().__init__(f"{path} cannot be written: {error.strerror or error}")


class EngineDead(PacelineError):
    """The engine failed; every live request ends with this."""

    reason = Reason.ENGINE_LOST
