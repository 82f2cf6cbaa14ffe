"""Requests of one tenant that wait for a place in the batch, the most urgent first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from paceline.core.request import Request, Siblings

SLACK: Final = 64  # entries of requests that have left, before the heap is made anew


class RequestQueue:
    """By rank, and by arrival where ranks are equal. Anybody can leave: its entry is dropped when it comes up.

    A rank never changes while its request waits, so no order has to be made anew as time goes by.
    """

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=lambda request: (request.rank, request.request_id)))

    def push(self, request: Request) -> None:
        """A new request, or one that was preempted and returns to where it was."""
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, (request.rank, request.request_id))

    def first(self) -> Request | None:
        """The most urgent of those that are not held; None without any."""
        while self._heap:
            request = self._requests.get(self._heap[0][1])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def hold_first(self) -> None:
        """Let `first`, which has just told one, pass over it until its siblings are released. It goes on waiting."""
        request = self._requests[heapq.heappop(self._heap)[1]]
        request.siblings.held.append(request)

    def release(self, siblings: Siblings) -> None:
        """Hold none of them any more."""
        for request in siblings.held:
            if request.request_id in self._requests:
                heapq.heappush(self._heap, (request.rank, request.request_id))
        siblings.held.clear()

    def newest(self, count: int) -> list[Request]:
        """Of those of whose request nothing has ever run, so many that came last, or all."""
        fresh = [request for request in self._requests.values() if not request.siblings.have_begun]
        return heapq.nlargest(count, fresh, key=lambda request: (request.arrival, request.request_id))

    def remove(self, request: Request) -> bool:
        """Take the request out. Not in here: False."""
        if self._requests.pop(request.request_id, None) is None:
            return False
        if self._heap and self._heap[0][1] == request.request_id:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._requests) + SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._requests]
            heapq.heapify(self._heap)
        return True

    def check_invariants(self) -> None:
        entries = [request_id for _, request_id in self._heap if request_id in self._requests]
        groups = {id(request.siblings): request.siblings for request in self._requests.values()}
        held = [one.request_id for group in groups.values() for one in group.held if one.request_id in self._requests]
        assert sorted([*entries, *held]) == sorted(self._requests), "every request has one entry, or is held"
