"""Random load on one engine for some minutes: does it leak, and does it still say the same?

    python loadtest/gpu/random_load.py --seconds 540 --seed 1 [--small] [--pair DIR]

Requests of every kind come and go in bursts and lulls, and are aborted at any time. Now and then the engine is left to
run dry: then it may hold nothing, the process no more than before, and fixed requests have to give the tokens that they
gave at first. The same seed offers the same, step by step; where in it the engine runs dry is a matter of time.
"""

from __future__ import annotations

import argparse
import math
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from fixed import fixed_requests
from footprint import MIB, Footprint, host_growth
from offers import Offers, Tick, from_now, policies
from pair import found_or_made
from reader import Reader
from remainders import remainders
from rich.table import Table
from size import SMALL, WHOLE, settings

from paceline import demo
from paceline.bench.console import console
from paceline.core.method import Method
from paceline.core.params import SchedulingParams, SpeculationParams
from paceline.core.plan import StepRunner
from paceline.core.tenant_policy import ONE_SHARE
from paceline.device import DEVICES, choose_gpu
from paceline.engine import Engine, GenerationRequest, StepLoop
from paceline.engine.usage import TenantUsage
from paceline.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from paceline.garbage import collect_rarely
from paceline.models import NativeDecoder
from paceline.runner import ModelRunner
from paceline.wiring import build_engine

CHECK_EVERY = 32  # steps, between which the books are checked while there is work
REPEATED = 4  # completions of the load that are computed again at each drain, where that is exact
LATE = (DeadlineExceeded, Unavailable)  # refusals of what cannot be in time
EXPECTED = (*LATE, ResourceExhausted)  # and of what is too much, when it is asked for


@dataclass(slots=True)
class Counts:
    """What became of the load. `ended` is what completions have had that have ended, whoever's they were."""

    ended: TenantUsage = field(default_factory=TenantUsage)
    most_live: int = 0
    drains: int = 0
    repeated: int = 0
    ends: Counter[str] = field(default_factory=Counter)


class RandomLoad:
    """Drives an engine, which is its alone.

    Args:
        runner: the one that mirrors sequences; by default the engine's.

    Attributes:
        complaints: what was found wrong so far.
    """

    def __init__(self, engine: Engine, seed: int, say: Callable[[str], None], runner: StepRunner | None = None) -> None:
        self.engine = engine
        self.counts = Counts()
        self.complaints: list[str] = []
        self._say = say
        self._runner = engine.runner if runner is None else runner
        self._ticks = Offers(engine, seed).ticks()
        self._steps = StepLoop(engine)
        self._live: dict[int, Reader] = {}
        self._done: list[Reader] = []  # the last ones that could be computed again
        methods = [method for method in Method if method in engine.methods]
        longest = engine.scheduler.config.max_model_len
        self._fixed = fixed_requests(engine.vocab_size, longest, methods, grammars=engine.grammars is not None)
        self._expected: dict[str, list[int]] = {}
        self._footprints: list[Footprint] = []
        self._began = time.perf_counter()
        self._exact = isinstance(self._runner, ModelRunner) and isinstance(self._runner.model, NativeDecoder)
        granted = policies(engine.scheduler.config.num_blocks)
        engine.scheduler.tenants.set_policies(granted, ONE_SHARE, engine.clock())
        engine.on_end.append(lambda request, reason, now: self.counts.ended.book(request))

    def run(self, seconds: float, every: float) -> bool:
        """Load for so long, with a drain every so many seconds; twice at least. Whether all was well."""
        end = time.perf_counter() + seconds
        while self.counts.drains < 2 or time.perf_counter() < end:
            self.load(until=min(end, time.perf_counter() + every))
            patience = every if self.counts.drains % 2 == 0 else 0.0
            self.drain(until=min(end, time.perf_counter() + patience))
        self._complain([found for found in [host_growth(self._footprints)] if found])
        return not self.complaints

    def load(self, *, ticks: int | None = None, until: float = math.inf) -> None:
        """Offer what comes next: at so many steps, or until then."""
        for tick in islice(self._ticks, ticks):
            self._offer(tick)
            self._step()
            if time.perf_counter() >= until:
                return

    def drain(self, *, until: float = math.inf) -> None:
        """Let the engine run dry, by itself till then and by aborts from then on, and look at what is left."""
        self.counts.drains += 1
        while self._live and time.perf_counter() < until:
            self._step()
        self._abort(list(self._live))
        self._run_dry()
        done, self._done = self._done, []
        left = remainders(self.engine, self._runner)
        self._complain(left)  # now, since with books that do not balance the next step may be the last
        found = self._not_repeated(done) + self._changed()
        # Of all that was live before, the runner has been told by now that it has ended.
        found += [one for one in remainders(self.engine, self._runner) if one not in left]
        done.clear()  # or they would be counted with what is left
        self._done.clear()  # those that were computed again just now
        self._footprints.append(Footprint.now(self.engine))
        found += self._footprints[-1].growth(self._footprints[0])
        self._report()
        self._complain(found)

    # -- load ---------------------------------------------------------------------------------------------------------

    def _offer(self, tick: Tick) -> None:
        for request in tick.requests:
            self._add(request)
        live = list(self._live)
        if tick.deserted:
            self._abort(live)
        elif live:
            self._abort({live[int(share * len(live))] for share in tick.aborts})

    def _add(self, request: GenerationRequest) -> int | None:
        """The id of its first completion; None if it was refused."""
        try:
            first = self.engine.add(from_now(request, self.engine.clock()))
        except EXPECTED as error:
            self._end_of(f"refused: {type(error).__name__}", request.n)
            return None
        for choice in range(request.n):
            self._live[first + choice] = Reader(request)
        self.counts.most_live = max(self.counts.most_live, len(self._live))
        return first

    def _abort(self, ids: list[int] | set[int]) -> None:
        for request_id in ids:
            stage = self.engine.scheduler.requests.get(request_id)
            name = "refused meanwhile" if stage is None else stage.status.name.lower()
            if self.engine.abort(request_id):
                del self._live[request_id]
                self._end_of(f"aborted: {name}")

    def _step(self) -> bool:
        """Whether a step was through; else there was nothing to do, or everybody's tenant had to wait."""
        done = self._steps.step()
        self._take_refused()
        if done is None:
            return False
        for output in done.outputs:
            reader = self._live[output.request_id]
            reader.read(output)
            if output.finish is not None:
                del self._live[output.request_id]
                self._end_of(f"done: {output.finish.reason}")
                if self._exact and _is_certain(reader.request):
                    self._done = [*self._done, reader][-REPEATED:]
        if self.engine.totals.steps % CHECK_EVERY == 0:
            self.engine.check_invariants()
        return True

    def _take_refused(self) -> None:
        for request_id, error in self.engine.take_refused():
            del self._live[request_id]
            self._end_of(f"refused: {type(error).__name__}")
            if not isinstance(error, LATE):  # for want of memory, of which there is enough
                self._complain([f"request {request_id} failed: {error}"])

    def _end_of(self, how: str, count: int = 1) -> None:
        self.counts.ends[how] += count

    # -- drains -------------------------------------------------------------------------------------------------------

    def _run_dry(self) -> None:
        """Until no request is live, and no step under way."""
        while self._step() or self.engine.has_work:
            pass
        assert not self._live, f"{len(self._live)} requests have gone without an end"

    def _alone(self, request: GenerationRequest) -> list[int]:
        """Its tokens, with nobody beside it."""
        request_id = self._add(request)
        assert request_id is not None, "an engine without work refuses a request"
        reader = self._live[request_id]
        self._run_dry()
        return reader.token_ids

    def _changed(self) -> list[str]:
        """Fixed requests whose tokens are not those of the first drain."""
        found = {name: self._alone(request) for name, request in self._fixed.items()}
        self._expected = self._expected or found
        return [
            f"other tokens than at first: {name}: {found[name]}, not {expected}"
            for name, expected in self._expected.items()
            if found[name] != expected
        ]

    def _not_repeated(self, done: list[Reader]) -> list[str]:
        """Completions of the load that come out otherwise alone, without drafts, and with what the cache has."""
        complaints = []
        for reader in done:
            request, tenant = reader.request, SchedulingParams(tenant=reader.request.scheduling.tenant)
            found = self._alone(replace(request, speculation=SpeculationParams(Method.NONE), scheduling=tenant))
            self.counts.repeated += 1
            if found != reader.token_ids:
                complaints.append(f"other tokens alone: {found}, not {reader.token_ids}: {request}")
        return complaints

    # -- speaking -----------------------------------------------------------------------------------------------------

    def _complain(self, found: list[str]) -> None:
        for one in found:
            self.complaints.append(one)
            self._say(f"  WRONG: {one}")

    def _report(self) -> None:
        counts, now, totals, ended = self.counts, self._footprints[-1], self.engine.totals, self.counts.ended
        kinds: Counter[str] = Counter()
        for how, count in counts.ends.items():
            kinds[how.split(":")[0]] += count
        self._say(
            f"drain {counts.drains} at {time.perf_counter() - self._began:.0f} s: {totals.steps} steps, "
            f"{kinds['done']} done, {kinds['aborted']} aborted, {kinds['refused']} refused; "
            f"{totals.tokens} tokens, {ended.preemptions} preemptions, "
            f"{ended.accepted_tokens} of {ended.drafted_tokens} drafts accepted; "
            f"GPU {now.device / MIB:.1f} MiB of {now.reserved / MIB:.1f} reserved, host {now.host / MIB:.0f} MiB, "
            f"{sum(now.objects.values())} objects, {now.threads} threads, {now.files} files"
        )

    def summary(self) -> Table:
        """What became of everything."""
        counts, totals, ended = self.counts, self.engine.totals, self.counts.ended
        rows = {
            "steps": totals.steps,
            "tokens": totals.tokens,
            "live at once, at most": counts.most_live,
            "preemptions": ended.preemptions,
            "prompt tokens found in the cache": ended.cached_prompt_tokens,
            "drafts verified": ended.drafted_tokens,
            "drafts accepted": ended.accepted_tokens,
            **dict(sorted(counts.ends.items())),
            "drains": counts.drains,
            "of the load, computed again": counts.repeated,
        }
        if len(self._footprints) > 1:
            second, last = self._footprints[1], self._footprints[-1]
            rows["MiB on the host since the second drain"] = (last.host - second.host) // MIB
        rows["complaints"] = len(self.complaints)
        table = Table(title="random load")
        table.add_column("what")
        table.add_column("count", justify="right")
        for what, count in rows.items():
            table.add_row(what, str(count))
        return table


def _is_certain(request: GenerationRequest) -> bool:
    """The request alone determines its tokens."""
    return request.n == 1 and (request.sampling.greedy or request.sampling.seed is not None)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python loadtest/gpu/random_load.py", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, help="in all, loading included (default 540; small: 20)")
    parser.add_argument("--every", type=float, help="seconds between drains (default 20; small: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the load (default 0)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="default auto")
    parser.add_argument("--memory", type=float, default=0.4, help="share of the GPU's for the engine (default 0.4)")
    parser.add_argument("--pair", type=Path, help="directory of widened checkpoints (default the embedded pair itself)")
    parser.add_argument("--small", action="store_true", help="a few short streams, for a look on any machine")
    return parser.parse_args()


def main() -> int:
    began = time.perf_counter()
    arguments = _arguments()
    small: bool = arguments.small
    out = console()

    def say(text: str) -> None:
        out.print(text, highlight=False, markup=False, soft_wrap=True)
        out.file.flush()

    pair = demo.TARGET, demo.DRAFT
    if arguments.pair is not None:
        pair = found_or_made(arguments.pair, "cpu" if choose_gpu(arguments.device) is None else "cuda", say)
    engine = build_engine(settings(SMALL if small else WHOLE, pair, arguments.device, arguments.memory))
    collect_rarely()  # as a server does
    say(f"process {os.getpid()}, seed {arguments.seed}: engine ready after {time.perf_counter() - began:.1f} s")
    if engine.grammars is None:
        say("grammars are left out: their library is not installed")
    load = RandomLoad(engine, arguments.seed, say)
    seconds, every = (20.0, 3.0) if small else (540.0, 20.0)
    seconds = seconds if arguments.seconds is None else arguments.seconds
    every = every if arguments.every is None else arguments.every
    try:
        is_well = load.run(seconds - (time.perf_counter() - began), every)
    except Exception:
        # Whatever it is, it has ended the engine.
        say(traceback.format_exc())
        say(f"FAILED at step {engine.totals.steps}")
        is_well = False
    out.print(load.summary())
    say("well" if is_well else "NOT WELL" + "".join(f"\n  {one}" for one in load.complaints))
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
