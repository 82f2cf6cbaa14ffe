"""When a call that failed is made again.

gRPC's own retries are off (`grpc.enable_retries`): they hang on a pushback of 0, and know nothing of a generation that
starts with its first delta.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc

from paceline.client.errors import RpcError
from paceline.options import check_timeout

RETRIED: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
FIRST_BACKOFF: Final = 0.2  # seconds, doubled with every retry
LONGEST_BACKOFF: Final = 5.0
JITTER: Final = 0.5  # of a delay, added at most, so that those who were refused together do not come back together


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What every call of a client goes by.

    Args:
        max_retries: of one call; 0 switches retries off.
        jitter: gives a number in [0, 1).
        clock: gives seconds.
    """

    max_retries: int = 3
    jitter: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic

    def begin(self, timeout: float | None) -> Attempts:
        """A call begins, which may take `timeout` seconds, its retries and the time between them included.

        Raises:
            InvalidArgument: see `check_timeout`.
        """
        return self.plan(timeout)()

    def plan(self, timeout: float | None) -> Callable[[], Attempts]:
        """`begin` for later: the timeout is checked now, and counts from the call of what this returns."""
        limit = check_timeout(timeout)
        return lambda: Attempts(self, limit)


class Attempts:
    """The attempts of one call. The first is made at once."""

    def __init__(self, policy: RetryPolicy, timeout: float | None) -> None:
        self._policy = policy
        self._deadline = None if timeout is None else policy.clock() + timeout
        self._retries = 0
        self._was_cut_off = False  # the server may still be at an attempt of ours

    def remaining(self) -> float | None:
        """Seconds that are left: the deadline of the next attempt."""
        return None if self._deadline is None else max(0.0, self._deadline - self._policy.clock())

    def delay_after(self, error: RpcError) -> float | None:
        """Seconds to wait before the next attempt, or None: the call has failed for good.

        Only to be asked while the server has answered nothing. A server that is busy says when to come again; what says
        nothing is a server that cannot be reached, which is tried again after a time of our own. So is, behind that, an
        id that is taken: by the attempt that was cut off, until the server notices. A quota or a size that says nothing
        will say the same again.
        """
        pushback = error.retry_after
        is_own = self._was_cut_off and error.code is grpc.StatusCode.ALREADY_EXISTS
        if not (error.code in RETRIED or is_own) or self._retries >= self._policy.max_retries:
            return None
        if pushback is None and error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return None
        if pushback is not None and pushback < 0:
            return None
        delay = pushback or min(FIRST_BACKOFF * 2**self._retries, LONGEST_BACKOFF)
        delay *= 1 + JITTER * self._policy.jitter()
        remaining = self.remaining()
        if remaining is not None and delay >= remaining:
            return None
        self._retries += 1
        self._was_cut_off = self._was_cut_off or pushback is None
        return delay
