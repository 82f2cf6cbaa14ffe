"""The worker computes what was asked for, elsewhere and in order."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from paceline.core.grammar import Mask, Matcher
from paceline.structured import LLGuidanceCompiler, MaskWorker
from structured.vocabularies import follows, regex


@pytest.fixture
def worker() -> Iterator[MaskWorker]:
    worker = MaskWorker()
    yield worker
    worker.close()


class Recorder:
    """A matcher that says where and when it was asked."""

    ended = False
    failure = None

    def __init__(self, calls: list[tuple[int, int]], gate: threading.Event | None = None) -> None:
        self.calls = calls
        self.gate = gate

    def advance(self, token_ids: Sequence[int]) -> bool:
        raise AssertionError("masks do not advance")

    def forced(self, limit: int) -> list[int]:
        raise AssertionError("masks force nothing")

    def masks(self, drafts: Sequence[int]) -> Mask:
        if self.gate is not None:
            assert self.gate.wait(10)
        self.calls.append((threading.get_ident(), drafts[0]))
        return np.full((len(drafts) + 1, 2), drafts[0], np.int32)


def test_masks_are_those_of_the_matchers(compiler: LLGuidanceCompiler, worker: MaskWorker) -> None:
    grammar = compiler.compile(regex("[a-z]{3,9}-[0-9]+"))
    rng = random.Random(2)
    jobs: list[tuple[Matcher, list[int]]] = []
    for depth in (0, 1, 4, 9):
        jobs.append((grammar.matcher(), [rng.choice(follows(grammar.matcher())) for _ in range(depth)]))
    found = worker.start(jobs).result(10)
    assert len(found) == len(jobs)
    for masks, (_, drafts) in zip(found, jobs, strict=True):
        assert np.array_equal(masks, grammar.matcher().masks(drafts))


def test_jobs_run_in_order_in_one_other_thread(worker: MaskWorker) -> None:
    calls: list[tuple[int, int]] = []
    gate = threading.Event()
    first = worker.start([(Recorder(calls, gate), [1]), (Recorder(calls), [2, 2])])
    second = worker.start([(Recorder(calls), [3])])
    assert not first.done()  # the caller goes on
    gate.set()
    assert [masks.shape for masks in first.result(10)] == [(2, 2), (3, 2)]
    assert second.result(10)[0][0, 0] == 3
    assert [number for _, number in calls] == [1, 2, 3]
    assert {thread for thread, _ in calls}.isdisjoint({threading.get_ident()})
    assert len({thread for thread, _ in calls}) == 1


def test_no_jobs_no_masks(worker: MaskWorker) -> None:
    assert worker.start([]).result(10) == []


def test_jobs_may_be_reused_by_the_caller(worker: MaskWorker) -> None:
    calls: list[tuple[int, int]] = []
    gate = threading.Event()
    jobs: list[tuple[Matcher, list[int]]] = [(Recorder(calls, gate), [1])]
    pending = worker.start(jobs)
    jobs.clear()
    gate.set()
    assert len(pending.result(10)) == 1


def test_an_error_is_raised_where_masks_are_collected(worker: MaskWorker) -> None:
    broken = Recorder([])
    pending = worker.start([(broken, [])])  # drafts[0] does not exist
    with pytest.raises(IndexError):
        pending.result(10)
    assert len(worker.start([(Recorder([]), [1])]).result(10)) == 1


def test_a_closed_worker_has_no_thread() -> None:
    worker = MaskWorker()
    calls: list[tuple[int, int]] = []
    pending = worker.start([(Recorder(calls), [1])])
    worker.close()
    assert pending.done()
    assert calls[0][0] not in {thread.ident for thread in threading.enumerate()}
