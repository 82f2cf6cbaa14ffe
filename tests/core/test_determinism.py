"""The same arrivals and seed give the same trace, in this process and in any other.

And what a request is sent depends on nothing but the request.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from core.workload import EOS, arrivals, digest, run
from paceline.core.method import Method
from paceline.sim import reference_output


@pytest.mark.parametrize("lag", [0, 1])
def test_the_same_arrivals_give_the_same_trace(lag: int) -> None:
    assert digest(lag) == digest(lag)


@pytest.mark.parametrize("lag", [0, 1])
def test_the_trace_is_the_same_under_any_hash_seed(lag: int) -> None:
    def in_another_process(hash_seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        program = f"from core.workload import digest; print(digest({lag}))"
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout.strip()

    assert in_another_process("0") == in_another_process("4242") == digest(lag)


def test_the_trace_depends_on_seed_and_lag() -> None:
    """Otherwise the tests above would compare nothing."""
    plans = [run(lag, seed=seed).plans for lag, seed in ((0, 1), (0, 2), (1, 1))]
    assert plans[0] != plans[1] != plans[2] != plans[0]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("method", [None, *Method])
@pytest.mark.parametrize(("num_blocks", "budget"), [(200, 500), (24, 20), (14, 6)])
def test_outputs_depend_on_the_request_alone(lag: int, method: Method | None, num_blocks: int, budget: int) -> None:
    trace = run(lag, num_blocks, budget, method)
    for arrival in arrivals(method=method):
        tokens = reference_output(arrival.prompt_token_ids, arrival.stop.max_tokens or 0)
        ends = [i for i, token in enumerate(tokens) if token in EOS and not arrival.stop.ignore_eos]
        assert trace.outputs[arrival.request_id] == (tokens[: ends[0] + 1] if ends else tokens)


def test_the_tight_runs_are_tight() -> None:
    assert sum(stats.preemptions for stats in run(num_blocks=14, budget=6).finished.values()) > 0
    assert sum(stats.preemptions for stats in run(num_blocks=200, budget=500).finished.values()) == 0
