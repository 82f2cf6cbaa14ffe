"""What an engine without work holds, and what the process does: nothing of the first, and of the second no more than
before.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.deadlines import SLACK
from paceline.core.plan import StepRunner
from paceline.core.request import Request
from paceline.core.sequence import Sequence
from paceline.engine import Engine
from paceline.engine.completions import Completion
from paceline.engine.stops import StopChecker
from paceline.runner.seats import Seat
from paceline.speculation import Ngram
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
TIMERS = 3  # of one request, at most
# Of these there is one for each live request, and of no other.
OF_REQUESTS = (Request, Sequence, Seat, Completion, StopChecker, NgramIndex)


def remainders(engine: Engine, runner: StepRunner) -> list[str]:
    """What an engine without work still holds, in words. The runner is told of ends by the next plan, so it may mirror
    what the scheduler is about to tell.

    Args:
        runner: the one that mirrors sequences, which may stand behind another.
    """
    return [*_books(engine), *_held(engine), *_mirrored(engine, runner)]


def _books(engine: Engine) -> Iterator[str]:
    try:
        engine.check_invariants()
    except AssertionError as error:
        yield f"the books do not balance: {error}"


def _held(engine: Engine) -> Iterator[str]:
    """What the scheduler, its policy and the engine hold."""
    scheduler, kv = engine.scheduler, engine.scheduler.kv
    if kv.num_free_blocks != kv.pool.num_blocks:
        yield f"{kv.pool.num_blocks - kv.num_free_blocks} blocks of KV are not free"
    policy = scheduler.speculation.policy
    holders: dict[str, Any] = {
        "block tables": kv._tables,
        "requests": scheduler.requests,
        "running requests": scheduler.running,
        "waiting requests": scheduler.waiting,
        "outstanding steps": scheduler._outstanding,
        "refused requests that nobody was told of": scheduler.refused,
        "paces": scheduler.batch._paced,
        "completions": engine._completions.keys(),
    }
    if isinstance(policy, AdaptiveDepth):
        adaptive: Any = policy  # of which this looks at more than it shows
        holders |= {
            "chosen depths": adaptive._standing.by_model,
            "looks at n-grams": adaptive._standing.looks,
            "reviewed depths": adaptive._reviewed,
            "bounds of depths": adaptive._bound,
            "intervals of probes": adaptive._probes._intervals,
        }
    yield from _not_empty(holders)
    # Those of ended requests go when a step is planned with too many of them for all that are live.
    most = SLACK + TIMERS * (scheduler.config.max_num_seqs + scheduler.config.max_queued)
    if len(scheduler.deadlines._timers) > most:
        yield f"{len(scheduler.deadlines._timers)} timers"


def _mirrored(engine: Engine, runner: StepRunner) -> Iterator[str]:
    """What the runner holds besides the requests that the next plan releases."""
    told = set(engine.scheduler._released)
    host: Any = getattr(runner, "host", runner)
    if host.sequences.keys() != told:
        yield f"mirrors of {_some(host.sequences.keys() ^ told)}, other than those that the next plan releases"
    holders = {"failed requests": host._failed.keys() - told}
    for method, drafter in host.drafters.items():
        if isinstance(drafter, Ngram):
            holders[f"indexes of {method}"] = drafter._indexes.keys() - told
    if host is not runner:
        device: Any = runner
        seats = device._seats
        if seats._taken.keys() != told:
            yield f"seats of {_some(seats._taken.keys() ^ told)}, other than those that the next plan releases"
        places = sorted([*seats._free, *(seat.index for seat in seats._taken.values())])
        if places != list(range(len(seats.table.facts))):
            yield "seats that are neither free nor taken, or both"
        holders["launched steps"] = device._launched
    yield from _not_empty(holders)


def _not_empty(holders: dict[str, Any]) -> Iterator[str]:
    for name, held in holders.items():
        if held:
            yield f"{len(held)} {name}"


def _some(ids: set[int]) -> str:
    return f"{len(ids)} requests ({', '.join(map(str, sorted(ids)[:5]))})"


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
    models: Any = [model for by_method in engine.scheduler.speculation._models.values() for model in by_method.values()]
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
