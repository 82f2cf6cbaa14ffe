"""When requests are wanted, which of a tenant's goes first, and which come too late.

Requests wait in order of slack: by the latest moment at which they could start and still be in time; those that would
delay many others a little later. One without a deadline counts as if it had to start `patience` after it came, so that
it is overtaken by what is urgent and not for ever; a priority moves that moment forward. The order of two requests
never changes while they wait, and what is older comes up in the end.

What cannot be in time any more is refused as soon as that is seen, instead of being served first and late.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import Final

from paceline.core.request import Request
from paceline.core.service_rate import ServiceRate
from paceline.errors import DeadlineExceeded, PacelineError, QueueTimeout

SLACK: Final = 64  # timers of requests that have ended, before the heap is made anew
PRIORITY_SECONDS: Final = 10.0  # by which one step of priority makes a request older


class Deadlines:
    """Args:
    rate: by which it is estimated how long a request takes.
    patience: seconds after which a request without a deadline is as urgent as one whose deadline has come.
    """

    def __init__(self, rate: ServiceRate, patience: float) -> None:
        self.rate = rate
        self.patience = patience
        self._timers: list[tuple[float, int]] = []  # when to look at which request

    def rank(self, request: Request, priority: int, num_waiting: int) -> float:
        """What orders requests of one tenant, lowest first.

        Args:
            num_waiting: of the tenant, besides this one. Whoever goes before them delays all of them by what it is
                charged. For a request that has a time to miss this counts as if it could wait for so long: in a long
                queue short ones go first, since more of them can be in time.
        """
        latest = request.arrival + self.patience
        moments = self._moments(request)
        if moments:
            latest = min(latest, *(moment - seconds for moment, seconds in moments))
            room, chosen = request.max_output_tokens, request.chosen_max_tokens
            latest += num_waiting * self.rate.charge(len(request.prompt_token_ids), room, chosen)
        return latest - priority * PRIORITY_SECONDS

    def watch(self, request: Request) -> None:
        """From now on `expired` tells if it comes too late."""
        for moment, _ in self._moments(request):
            heapq.heappush(self._timers, (moment, request.request_id))

    def check(self, request: Request, now: float, busy: bool, num_cached: int = 0) -> None:
        """Could it be in time if it started now? Raises DeadlineExceeded, with the estimate, if not; where the time is
        over already, what `expired` tells.

        Args:
            busy: others run. Only then the estimate is believed: it is made by steps, and where none are made a bad one
                would stand for ever.
            num_cached: of its known tokens, those that need not be computed.
        """
        for moment, seconds in self._moments(request, num_cached):
            left = moment - now
            if left <= 0.0:
                raise self._late(request)
            if busy and seconds > left:
                raise DeadlineExceeded(f"too late: it would take about {seconds:.2f} s, and {left:.2f} s are left")

    def expired(self, requests: Mapping[int, Request], now: float) -> list[tuple[Request, PacelineError]]:
        """Live requests that have come too late, running ones included, and how they end. Each is told once."""
        if len(self._timers) > 3 * len(requests) + SLACK:
            self._timers = [(moment, one.request_id) for one in requests.values() for moment, _ in self._moments(one)]
            heapq.heapify(self._timers)
        late = {}
        while self._timers and self._timers[0][0] <= now:
            _, request_id = heapq.heappop(self._timers)
            request = requests.get(request_id)
            if request is not None and any(moment <= now for moment, _ in self._moments(request)):
                late[request_id] = request
        return [(request, self._late(request)) for request in late.values()]

    @property
    def next_timer(self) -> float:
        """When somebody may come too late; infinite if nobody can."""
        return self._timers[0][0] if self._timers else math.inf

    def _late(self, request: Request) -> PacelineError:
        """The end of a request by the first moment that it missed: who only waited for too long may come again."""
        timeout = request.scheduling.queue_timeout
        first = min(moment for moment, _ in self._moments(request))
        if not request.siblings.have_begun and timeout is not None and request.arrival + timeout == first:
            text = f"not admitted within scheduling.queue_timeout, {timeout:g} s"
            return QueueTimeout(text, self.rate.seconds_until_ends(1))
        return DeadlineExceeded("too late: the time is over")

    def _moments(self, request: Request, num_cached: int = 0) -> list[tuple[float, float]]:
        """What the request has to reach yet: until when, and in how many seconds from a start."""
        params, moments = request.scheduling, []
        to_read = request.num_tokens - num_cached
        if not request.siblings.have_begun:
            if params.queue_timeout is not None:
                moments.append((request.arrival + params.queue_timeout, 0.0))
            if params.time_to_first_token is not None:
                seconds = self.rate.seconds_to_first_token(to_read)
                moments.append((request.arrival + params.time_to_first_token, seconds))
        if params.deadline is not None:
            room, emitted = request.max_total_tokens - request.num_tokens, len(request.output_token_ids)
            seconds = self.rate.seconds_to_end(to_read, room, request.chosen_max_tokens, emitted)
            moments.append((params.deadline, seconds))
        return moments
