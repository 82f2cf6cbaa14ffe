"""Errors on their way between processes."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from grpc import StatusCode

from paceline.client.errors import RpcInvalidArgument
from paceline.config_file import BadFile, BadValue
from paceline.errors import (
    InvalidArgument,
    NotFound,
    PacelineError,
    QuotaExceeded,
    Reason,
    Unavailable,
)

ERRORS = [
    InvalidArgument("stop.max_tokens", -1, "an integer >= 1", reason=Reason.PROMPT_TOO_LONG),
    NotFound("no such model", kind="model", name="x"),
    Unavailable("full", 2.5),
    QuotaExceeded("too many", 1.0, tenant="t", limit="max_queued", granted=3),
    RpcInvalidArgument(StatusCode.INVALID_ARGUMENT, "stop.max_tokens = -1"),
    BadValue("must be at least 1"),
    BadFile(Path("tenants.toml"), ["one", "two"]),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_back_from_a_pickle_as_it_was(error: PacelineError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def _refuse(value: int) -> None:
    raise InvalidArgument("value", value, "another")


def test_an_error_in_a_pool_of_processes_breaks_nothing_else() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        refused, fine = pool.submit(_refuse, 3), pool.submit(abs, -3)
        with pytest.raises(InvalidArgument, match="value = 3: must be another"):
            refused.result()
        assert fine.result() == 3
