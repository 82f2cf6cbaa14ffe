"""What an engine without work still holds, and should not.

Fields are read here that are nobody else's business: what is left behind is what no interface tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized

from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.deadlines import SLACK
from paceline.core.plan import StepRunner
from paceline.engine import Engine
from paceline.runner import ModelRunner
from paceline.runner.device_runner import DeviceRunner
from paceline.speculation import Ngram

TIMERS = 3  # of one request, at most


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
    holders: dict[str, Sized] = {
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
        holders |= {
            "chosen depths": policy._standing.by_model,
            "looks at n-grams": policy._standing.looks,
            "reviewed depths": policy._reviewed,
            "bounds of depths": policy._bound,
            "intervals of probes": policy._probes._intervals,
        }
    yield from _not_empty(holders)
    # Those of ended requests go when a step is planned with too many of them for all that are live.
    most = SLACK + TIMERS * (scheduler.config.max_num_seqs + scheduler.config.max_queued)
    if len(scheduler.deadlines._timers) > most:
        yield f"{len(scheduler.deadlines._timers)} timers"


def _mirrored(engine: Engine, runner: StepRunner) -> Iterator[str]:
    """What the runner holds besides the requests that the next plan releases."""
    told = set(engine.scheduler._released)
    if isinstance(runner, DeviceRunner):
        yield from _on_the_device(runner, told)
        runner = runner.host
    assert isinstance(runner, ModelRunner), "a runner that mirrors sequences"
    yield from _on_the_host(runner, told)


def _on_the_host(host: ModelRunner, told: set[int]) -> Iterator[str]:
    if host.sequences.keys() != told:
        yield f"mirrors of {_some(host.sequences.keys() ^ told)}, other than those that the next plan releases"
    holders: dict[str, Sized] = {"failed requests": host._failed.keys() - told}
    for method, drafter in host.drafters.items():
        if isinstance(drafter, Ngram):
            holders[f"indexes of {method}"] = drafter._indexes.keys() - told
    yield from _not_empty(holders)


def _on_the_device(device: DeviceRunner, told: set[int]) -> Iterator[str]:
    seats = device._seats
    if seats._taken.keys() != told:
        yield f"seats of {_some(seats._taken.keys() ^ told)}, other than those that the next plan releases"
    places = sorted([*seats._free, *(seat.index for seat in seats._taken.values())])
    if places != list(range(len(seats.table.facts))):
        yield "seats that are neither free nor taken, or both"
    yield from _not_empty({"launched steps": device._launched})


def _not_empty(holders: Mapping[str, Sized]) -> Iterator[str]:
    for name, held in holders.items():
        if held:
            yield f"{len(held)} {name}"


def _some(ids: set[int]) -> str:
    return f"{len(ids)} requests ({', '.join(map(str, sorted(ids)[:5]))})"
