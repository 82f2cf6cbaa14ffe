"""Random load, on small engines; and that leaks are told, each of a kind made on purpose."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from paceline.core.acceptance import Residual
from paceline.core.params import StopParams, Verification
from paceline.core.request import Request
from paceline.engine import Engine
from paceline.runner.device_runner import DeviceRunner
from paceline.wiring import build_engine
from support.launching import LaunchingRunner
from support.native import needs_compiler
from support.pairs import tiny_pair

sys.path.append(str(Path(__file__).parents[2] / "loadtest" / "gpu"))  # last: its bench.py is not the only one

import random_load
from footprint import MIB, MOST_HOST_GROWTH, MOST_MORE, Footprint, host_growth
from offers import Offers
from random_load import RandomLoad
from reader import Reader
from size import Size, settings

MAX_LEN = 96


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pair(tmp_path_factory.mktemp("random"), noise=0.01, vocab_size=4096)


def build(pair: tuple[Path, Path], backend: str) -> Engine:
    size = Size(max_num_seqs=4, max_model_len=MAX_LEN, max_num_batched_tokens=32, num_blocks=8, max_queued=12)
    return build_engine(settings(size, pair, "cpu", 0.4, backend))


@pytest.fixture
def load(pair: tuple[Path, Path]) -> RandomLoad:
    return RandomLoad(build(pair, "torch"), seed=0, say=print)


def test_nothing_is_left_of_it(load: RandomLoad) -> None:
    for until in (math.inf, 0.0):
        load.load(ticks=150)
        load.drain(until=until)
    assert not load.complaints
    counts = load.counts
    assert {"aborted: running", "aborted: waiting", "done: max_tokens"} <= counts.ends.keys()
    assert counts.ended.accepted_tokens > 0


@needs_compiler
def test_what_was_computed_again_is_not_held_while_objects_are_counted(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the native backend gives the same tokens in every batch, so that there is anything to compute again."""
    held, now = [], Footprint.now

    def counted(engine: Engine) -> Footprint:
        held.extend(one for one in gc.get_objects() if type(one) is Reader)
        return now(engine)

    monkeypatch.setattr(Footprint, "now", counted)
    load = RandomLoad(build(pair, "native"), seed=0, say=print)
    load.load(ticks=150)
    load.drain()
    assert load.counts.repeated > 0
    assert held == []


def test_it_runs_for_so_long_and_twice_at_least(load: RandomLoad) -> None:
    assert load.run(seconds=0.0, every=0.5)
    assert load.counts.drains == 2


def test_steps_that_are_launched_ahead_leave_nothing(pair: tuple[Path, Path]) -> None:
    engine = build(pair, "torch")
    host = engine.runner
    engine.runner = runner = LaunchingRunner(host)
    load = RandomLoad(engine, seed=1, say=print, runner=host)
    for _ in range(2):
        load.load(ticks=200)
        load.drain(until=0.0)
    assert not load.complaints
    assert runner.most == 2
    assert not runner.running


def test_the_runner_of_gpus_is_left_empty(tmp_path: Path) -> None:
    """Its kernels are interpreted here, or run on a GPU: few steps, but launched ahead."""
    engine = build(tiny_pair(tmp_path, vocab_size=4096, num_hidden_layers=1), "triton")
    assert isinstance(engine.runner, DeviceRunner)
    load = RandomLoad(engine, seed=2, say=print)
    # All would take half a minute; one tells the runner that the others have ended.
    name, one = next(iter(load._fixed.items()))
    load._fixed = {name: replace(one, stop=StopParams(max_tokens=2, ignore_eos=True))}
    for _ in range(2):
        load.load(ticks=8)
        load.drain(until=0.0)
    assert not load.complaints
    assert any(how.startswith("aborted") for how in load.counts.ends)


def test_the_same_seed_offers_the_same(load: RandomLoad) -> None:
    one, another = (list(islice(Offers(load.engine, seed=5).ticks(), 500)) for _ in range(2))
    assert one == another
    assert one != list(islice(Offers(load.engine, seed=6).ticks(), 500))
    requests = [request for tick in one for request in tick.requests]
    assert {request.scheduling.tenant for request in requests} > {"", "heavy", "small"}
    assert {request.n for request in requests} > {1}
    assert any(tick.aborts for tick in one)


def keep_a_block(engine: Engine) -> None:
    engine.scheduler.kv.pool.allocate(1)


def keep_a_mirror(engine: Engine) -> None:
    runner = engine.runner
    engine.runner.sequences[1 << 40] = next(iter(runner.sequences.values()))  # type: ignore[attr-defined]


def keep_an_index(engine: Engine) -> None:
    engine.runner.scorer._indexes[1 << 40] = None  # type: ignore[attr-defined]


def keep_a_choice(engine: Engine) -> None:
    engine.scheduler.speculation.policy._reviewed.add(1 << 40)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("keep", "told"),
    [
        (keep_a_block, "1 blocks of KV are not free"),
        (keep_a_mirror, "mirrors of 1 requests (1099511627776)"),
        (keep_an_index, "1 indexes of ngram"),
        (keep_a_choice, "1 reviewed depths"),
    ],
)
def test_what_an_engine_keeps_is_told(load: RandomLoad, keep: Callable[[Engine], None], told: str) -> None:
    load.drain()
    assert not load.complaints
    keep(load.engine)
    with suppress(AssertionError):  # books that do not balance end the run, but not before that is told
        load.drain()
    assert any(told in one for one in load.complaints), load.complaints


def test_requests_that_somebody_keeps_are_told(load: RandomLoad) -> None:
    load.load(ticks=30)
    load.drain()
    kept: list[Request] = []
    load.engine.on_end.append(lambda request, reason, now: kept.append(request))
    load.load(ticks=30)
    load.drain()
    assert kept
    assert any("more objects of paceline.core.request.Request" in one for one in load.complaints), load.complaints


def test_what_is_learnt_of_tenants_and_positions_may_grow_and_what_nobody_has_may_not(load: RandomLoad) -> None:
    def told() -> list[str]:
        return Footprint.now(load.engine).growth(first)

    first = Footprint.now(load.engine)
    more = [Residual() for _ in range(MOST_MORE + 1)]
    assert told() == [f"{MOST_MORE + 1} more objects of paceline.core.acceptance.Residual"]
    models = load.engine.scheduler.speculation._models
    next(iter(models[Verification.GREEDY].values()))._positions.extend(more)
    assert told() == []


def test_other_tokens_than_at_first_are_told(load: RandomLoad) -> None:
    load.drain()
    name, tokens = next(iter(load._expected.items()))
    load._expected[name] = [*tokens[:-1], tokens[-1] + 1]
    load.drain()
    assert [one for one in load.complaints if one.startswith(f"other tokens than at first: {name}: ")]


def test_memory_that_grows_on_the_host_is_told(load: RandomLoad) -> None:
    now = Footprint.now(load.engine)

    def drains(*extra: int) -> list[Footprint]:
        return [Footprint(now.objects, 0, 0, now.host + more, now.threads, now.files) for more in extra]

    much = MOST_HOST_GROWTH + MIB
    assert host_growth(drains(0, 0, 0)) is None
    assert host_growth(drains(0, much, 2 * much, 2 * much, 2 * much)) is None
    assert host_growth(drains(0, 0, 0, 0, much)) == f"{much // MIB} MiB more on the host over the second half"


def test_a_failed_step_fails_the_run(load: RandomLoad, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("made up")

    monkeypatch.setattr(load.engine.runner, "execute", fails)
    with pytest.raises(RuntimeError, match="made up"):
        load.run(seconds=1.0, every=0.5)


def test_the_program() -> None:
    command = [sys.executable, str(Path(random_load.__file__)), "--small", "--seconds", "1", "--every", "0.5"]
    done = subprocess.run([*command, "--seed", "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("well")
    assert "drain 2 at" in done.stdout
