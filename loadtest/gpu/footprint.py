"""What the process holds, and by how much it may hold more later on."""

from __future__ import annotations

import gc
import os
from collections import Counter
from dataclasses import dataclass

import torch

from paceline.core.request import Request
from paceline.core.sequence import Sequence
from paceline.engine import Engine
from paceline.engine.completions import Completion
from paceline.engine.stops import StopChecker
from paceline.runner.seats import Seat
from paceline.speculation.ngram_index import NgramIndex

MIB = 1 << 20
# Of a GPU's memory as torch's allocator counts it, after a collection: workspaces of libraries come at the first use of
# a shape, and are few. A block of KV is not among it, since the pool is one tensor.
MOST_DEVICE_GROWTH = 4 * MIB
# Of the host's over the second half of the drains: the allocator splits and keeps what it once had, and learns to know
# larger requests for a while. One kilobyte kept of each of the requests of minutes is more.
MOST_HOST_GROWTH = 64 * MIB
# Objects of one class of ours besides those below: accounts of tenants come with their first use. Whatever is kept of
# every request, or of every step, is soon more.
MOST_MORE = 64
# Of these there is one for each live request, and of no other.
OF_REQUESTS = (Request, Sequence, Seat, Completion, StopChecker, NgramIndex)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the process holds.

    Attributes:
        objects: of our own classes, by class, but for what is learnt of tenants and positions, of which there may be as
            much as there are. What was there when the engine was loaded is not among them, if garbage collection was
            told to leave it alone (`collect_rarely`).
        device: bytes of tensors on the GPU, 0 without one.
        reserved: bytes that torch has of it.
        host: bytes of memory.
        threads: of the process, whoever made them.
        files: that it has open.
    """

    objects: Counter[str]
    device: int
    reserved: int
    host: int
    threads: int
    files: int

    @classmethod
    def now(cls, engine: Engine) -> Footprint:
        gc.collect()
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_gpu:
            torch.cuda.synchronize()
        return cls(
            objects=_objects(ignored=_learnt(engine)),
            device=torch.cuda.memory_allocated() if on_gpu else 0,
            reserved=torch.cuda.memory_reserved() if on_gpu else 0,
            host=_resident(),
            threads=len(os.listdir("/proc/self/task")),
            files=len(os.listdir("/proc/self/fd")),
        )

    def growth(self, first: Footprint) -> list[str]:
        """What is more than at first and should not be, in words. The host's memory is another matter: it takes
        time to tell.
        """
        found = []
        if self.device > first.device + MOST_DEVICE_GROWTH:
            found.append(f"{(self.device - first.device) / MIB:.1f} MiB more on the GPU")
        names = set(map(_name, OF_REQUESTS))
        for name, count in self.objects.items():
            more = count - first.objects[name]
            if more > (0 if name in names else MOST_MORE):
                found.append(f"{more} more objects of {name}")
        for what, count, before in (
            ("threads", self.threads, first.threads),
            ("open files", self.files, first.files),
        ):
            if count > before:
                found.append(f"{count - before} more {what}")
        return found


def host_growth(footprints: list[Footprint]) -> str | None:
    """What the second half of the drains, of four or more, adds to the host's memory, if that is too much."""
    later = footprints[1:]
    growth = later[-1].host - later[len(later) // 2].host if len(later) > 2 else 0
    return f"{growth / MIB:.0f} MiB more on the host over the second half" if growth > MOST_HOST_GROWTH else None


def _learnt(engine: Engine) -> set[int]:
    """Ids of what all requests together have taught, for each rule and method by tenant and position."""
    by_rule = engine.scheduler.speculation._models.values()
    models = [model for by_method in by_rule for model in by_method.values()]
    return {id(one) for model in models for one in (*model._positions, *model._tenants.values())}


def _objects(ignored: set[int]) -> Counter[str]:
    counts: Counter[str] = Counter()
    # By class first: there are a million objects, and few classes.
    for kind, count in Counter(type(one) for one in gc.get_objects() if id(one) not in ignored).items():
        if (name := _name(kind)).startswith("paceline"):
            counts[name] += count
    return counts


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
