"""Requests waiting for a place in the batch, in arrival order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from paceline.core.request import Request


class RequestQueue:
    """First come, first served; any request can leave in O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._requests

    def push(self, request: Request) -> None:
        """A new request joins behind the others."""
        self._requests[request.request_id] = request

    def push_front(self, request: Request) -> None:
        """A preempted request returns to where it was: before everything that came later."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def first(self) -> Request | None:
        return next(iter(self._requests.values()), None)

    def remove(self, request: Request) -> None:
        """Take the request out. Not in here: no effect."""
        self._requests.pop(request.request_id, None)
