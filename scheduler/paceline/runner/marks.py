"""When a launched step began on the device, had its drafts and ended."""

from __future__ import annotations

import time

import torch

from paceline.core.plan import StepTimes


class Marks:
    """Moments of one step, marked by `begin`, `drafted` and `ended` in this order; then `wait`, from any thread, and
    `times`.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._moments: list[float] = []
        self._on_gpu = device.type == "cuda"

    def begin(self) -> None:
        """Its work is about to be launched: time for which the device waits is not the step's."""
        self._mark()

    def drafted(self) -> None:
        self._mark()

    def ended(self) -> None:
        self._mark()

    def _mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._moments.append(time.perf_counter())

    def wait(self) -> None:
        """Until the step has ended."""
        if self._on_gpu:
            self._events[-1].synchronize()

    def times(self) -> StepTimes:
        if self._on_gpu:
            began, drafted, ended = self._events
            draft, verify = began.elapsed_time(drafted) / 1e3, drafted.elapsed_time(ended) / 1e3
        else:
            began_at, drafted_at, ended_at = self._moments
            draft, verify = drafted_at - began_at, ended_at - drafted_at
        return StepTimes(draft, verify, 0.0, draft + verify)
