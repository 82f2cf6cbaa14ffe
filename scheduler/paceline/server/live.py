"""The generations that have not ended, by the ids that clients know them by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.engine import Stream
from paceline.errors import AlreadyExists


@dataclass(slots=True)
class LiveGeneration:
    """Attributes:
    stream: None until the engine has taken it.
    """

    request_id: str
    tenant: str
    stream: Stream | None = None


class LiveGenerations:
    """Who claims an id holds it until it leaves."""

    def __init__(self) -> None:
        self._by_id: dict[str, LiveGeneration] = {}

    @contextmanager
    def claim(self, request_id: str, tenant: str) -> Iterator[LiveGeneration]:
        """Hold the id while the generation lives. Raises AlreadyExists if another holds it."""
        if request_id in self._by_id:
            raise AlreadyExists(f"request_id {request_id!r} belongs to a request that is still running")
        live = self._by_id[request_id] = LiveGeneration(request_id, tenant)
        try:
            yield live
        finally:
            del self._by_id[request_id]

    def get(self, request_id: str) -> LiveGeneration | None:
        return self._by_id.get(request_id)

    def __iter__(self) -> Iterator[LiveGeneration]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)
