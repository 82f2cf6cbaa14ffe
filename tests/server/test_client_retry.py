"""Calls that are made again: when, how often, and for how long."""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from fractions import Fraction
from functools import partial
from typing import Any, Self

import grpc
import numpy as np
import pytest

from fake_server import FakeServer, fake_server
from paceline import errors
from paceline.client import AsyncClient, Client, Completion
from paceline.client.errors import error_for
from paceline.client.retry import FIRST_BACKOFF, JITTER, LONGEST_BACKOFF, Attempts, RetryPolicy
from paceline.options import LONGEST_TIME
from support.serving import serving as serving_context

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

# ---- The decision --------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def attempts(timeout: float | None = None, max_retries: int = 3, jitter: float = 0.0) -> tuple[Attempts, Clock]:
    clock = Clock()
    return RetryPolicy(max_retries, lambda: jitter, clock).begin(timeout), clock


@pytest.mark.parametrize(
    ("code", "retry_after", "delay"),
    [
        (UNAVAILABLE, 1.5, 1.5),
        (UNAVAILABLE, None, FIRST_BACKOFF),
        (UNAVAILABLE, 0.0, FIRST_BACKOFF),
        (UNAVAILABLE, -1.0, None),
        (RESOURCE_EXHAUSTED, 0.25, 0.25),
        (RESOURCE_EXHAUSTED, None, None),
        (RESOURCE_EXHAUSTED, -1.0, None),
        (grpc.StatusCode.INTERNAL, 1.0, None),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 1.0, None),
        (grpc.StatusCode.CANCELLED, None, None),
    ],
)
def test_what_is_tried_again(code: grpc.StatusCode, retry_after: float | None, delay: float | None) -> None:
    made, _ = attempts()
    assert made.delay_after(error_for(code, "no", retry_after)) == delay


def test_as_often_as_allowed() -> None:
    made, _ = attempts(max_retries=2)
    assert [made.delay_after(error_for(UNAVAILABLE, "no", 1.0)) for _ in range(4)] == [1.0, 1.0, None, None]


def test_our_own_delays_double_up_to_a_bound() -> None:
    made, _ = attempts(max_retries=7)
    delays = [made.delay_after(error_for(UNAVAILABLE, "no")) for _ in range(7)]
    assert delays == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_BACKOFF, LONGEST_BACKOFF])


@pytest.mark.parametrize("retry_after", [None, 2.0])
def test_nobody_comes_before_the_time_that_was_said(retry_after: float | None) -> None:
    least, _ = attempts(jitter=0.0)
    most, _ = attempts(jitter=1.0)
    error = error_for(UNAVAILABLE, "no", retry_after)
    delay = least.delay_after(error)
    assert delay == (retry_after or FIRST_BACKOFF)
    assert most.delay_after(error) == pytest.approx(delay * (1 + JITTER))


def test_the_time_that_is_left_shrinks_over_the_attempts() -> None:
    made, clock = attempts(timeout=10.0)
    error = error_for(UNAVAILABLE, "no", 4.0)
    assert made.remaining() == 10.0
    for remaining in (6.0, 2.0):
        delay = made.delay_after(error)
        assert delay == 4.0
        clock.now += delay
        assert made.remaining() == remaining
    assert made.delay_after(error) is None, "the deadline would come first"
    clock.now += 5.0
    assert made.remaining() == 0.0


def test_no_deadline_is_none() -> None:
    made, clock = attempts()
    clock.now += 1e9
    assert made.remaining() is None


def test_an_id_that_an_attempt_of_ours_may_hold() -> None:
    made, _ = attempts(max_retries=4)
    taken = error_for(grpc.StatusCode.ALREADY_EXISTS, "taken")
    assert made.delay_after(taken) is None, "somebody else's"
    assert made.delay_after(error_for(UNAVAILABLE, "busy", 1.0)) == 1.0
    assert made.delay_after(taken) is None, "the server has refused ours"
    assert made.delay_after(error_for(UNAVAILABLE, "cut off")) is not None
    assert [made.delay_after(taken) is None for _ in range(3)] == [False, False, True]


# ---- Both clients --------------------------------------------------------------------------------------------------


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with fake_server() as fake:
        yield fake


Complete = Callable[..., "asyncio.Future[Completion]"]


@pytest.fixture(params=["async", "sync"])
async def complete(server: FakeServer, request: pytest.FixtureRequest) -> AsyncIterator[Complete]:
    """`complete` of one client and the other, to be awaited."""
    if request.param == "async":
        async with AsyncClient(server.address) as client:
            yield client.complete  # type: ignore[misc]
    else:
        with Client(server.address) as blocking:
            yield lambda *args, **options: asyncio.to_thread(blocking.complete, *args, **options)  # type: ignore


@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED"])
async def test_a_busy_server_gets_what_it_asked_for(complete: Complete, server: FakeServer, code: str) -> None:
    assert (await complete(f"busy 3 {code} 1")).text == "abc"
    assert len(server.requests) == 4


async def test_at_last_the_error_is_the_servers(complete: Complete, server: FakeServer) -> None:
    with pytest.raises(errors.Unavailable, match="busy") as caught:
        await complete("busy 9 UNAVAILABLE 1")
    assert caught.value.retry_after == 0.001
    assert len(server.requests) == 4


@pytest.mark.parametrize("prompt", ["fail UNAVAILABLE -1", "fail RESOURCE_EXHAUSTED", "fail INTERNAL 1", "fail later"])
async def test_what_is_not_tried_again(complete: Complete, server: FakeServer, prompt: str) -> None:
    with pytest.raises(errors.PacelineError):
        await complete(prompt)
    assert len(server.requests) == 1


async def test_every_attempt_has_the_time_that_is_left(complete: Complete, server: FakeServer) -> None:
    await complete("busy 2 UNAVAILABLE 500", timeout=10.0)
    first, second, third = (left or 0.0 for left in server.time_left)
    assert 10.1 > first > second + 0.25 > third + 0.5, "gRPC rounds deadlines"


async def test_no_attempt_that_would_be_too_late(complete: Complete, server: FakeServer) -> None:
    with pytest.raises(errors.Unavailable, match="busy"):
        await complete("busy 9 UNAVAILABLE 60000", timeout=30.0)
    assert len(server.requests) == 1


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.parametrize("kind", ["generation", "question"])
@pytest.mark.parametrize("blocking", [False, True])
async def test_a_server_that_is_not_there_yet(blocking: bool, kind: str) -> None:
    """The first attempt finds nobody; only then is there a server."""
    refused = asyncio.Event()
    loop = asyncio.get_running_loop()

    def jitter() -> float:
        loop.call_soon_threadsafe(refused.set)
        return 0.0

    port = free_port()
    client = Client(f"127.0.0.1:{port}") if blocking else AsyncClient(f"127.0.0.1:{port}")
    client._connection.retries = RetryPolicy(max_retries=20, jitter=jitter)
    if isinstance(client, Client):
        call = client.complete if kind == "generation" else client.tokenize
        waiting = asyncio.create_task(asyncio.to_thread(call, "hello"))  # type: ignore[arg-type]
    else:
        waiting = asyncio.create_task(client.complete("hello") if kind == "generation" else client.tokenize("hello"))  # type: ignore[arg-type]
    await refused.wait()
    async with fake_server(port):
        if kind == "generation":
            completion = await waiting
            assert isinstance(completion, Completion)
            assert completion.text == "abc"
        else:
            with pytest.raises(errors.PacelineError, match="UNIMPLEMENTED"):  # it got there
                await waiting
        client.close() if isinstance(client, Client) else await client.aclose()


async def test_closing_ends_the_wait_between_attempts(server: FakeServer) -> None:
    async with AsyncClient(server.address) as client:
        generation = client.generate("busy 9 UNAVAILABLE 60000")
        reading = asyncio.create_task(generation.collect())
        while not server.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await generation.aclose()
        with pytest.raises(errors.Cancelled):
            await reading


async def test_closing_ends_the_wait_of_a_thread(server: FakeServer) -> None:
    with Client(server.address) as client:
        generation = client.generate("busy 9 UNAVAILABLE 60000")
        reading = asyncio.create_task(asyncio.to_thread(generation.collect))
        while not server.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        generation.close()
        with pytest.raises(errors.Cancelled):
            await reading


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_client_that_is_closed_between_attempts_cancels(blocking: bool, server: FakeServer) -> None:
    client = Client(server.address) if blocking else AsyncClient(server.address)
    generation = client.generate("busy 9 UNAVAILABLE 100")
    collect: Any = partial(asyncio.to_thread, generation.collect) if blocking else generation.collect
    reading = asyncio.create_task(collect())
    while not server.requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)  # for the answer: then it waits for its next attempt
    client.close() if isinstance(client, Client) else await client.aclose()
    with pytest.raises(errors.Cancelled):
        await reading


async def test_health_is_asked_once() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        client._connection.retries = RetryPolicy(jitter=lambda: pytest.fail("a retry"))
        with pytest.raises(errors.Unavailable):
            await client.health()


# ---- Timeouts ------------------------------------------------------------------------------------------------------

NO_TIMEOUTS = [0, 0.0, -1.0, -math.inf, math.nan, True, "5", [5.0]]


@pytest.mark.parametrize("timeout", NO_TIMEOUTS, ids=repr)
def test_what_is_no_timeout(timeout: Any) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        attempts(timeout)
    assert str(caught.value) == f"timeout = {timeout!r}: must be seconds above 0, or None"


@pytest.mark.parametrize("timeout", [np.int64(5), np.float32(5.0), Fraction(5)])
def test_a_timeout_may_be_any_number(timeout: Any) -> None:
    assert attempts(timeout)[0].remaining() == 5.0


@pytest.mark.parametrize("timeout", [None, math.inf, 1e300, 10**400, 9e9])
def test_more_than_can_be_counted_has_no_end(timeout: float | None) -> None:
    assert attempts(timeout)[0].remaining() is None


async def test_the_longest_timeout_there_is(complete: Complete, server: FakeServer) -> None:
    await complete("hello", timeout=LONGEST_TIME)
    await complete("hello", timeout=math.inf)
    longest, endless = server.time_left
    assert longest is not None
    assert longest > 9e7, "gRPC sends at most 27000 hours"
    assert endless is None


async def test_every_call_checks_its_timeout(server: FakeServer) -> None:
    refused = pytest.raises(errors.InvalidArgument, match=r"timeout = nan: must be")
    async with AsyncClient(server.address) as client, client.many() as many:
        with refused:
            client.generate("hello", timeout=math.nan)  # before it is read
        for call in (client.complete, client.complete_all, many.start, client.tokenize):
            with refused:
                await call("hello", timeout=math.nan)
        for ask in (client.models, client.health, client.admin.load, client.admin.drain):
            with refused:
                await ask(timeout=math.nan)
        with refused:
            await client.admin.cancel("r-1", timeout=math.nan)
    with Client(server.address) as blocking:
        with refused:
            blocking.generate("hello", timeout=math.nan)
        for question in (blocking.models, blocking.health, blocking.admin.load):
            with refused:
                question(timeout=math.nan)
    assert server.requests == []


class Pipe:
    """Connections to a server, which may break on the client's side alone."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._ours: list[asyncio.StreamWriter] = []
        self._servers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection(self._host, int(self._port))
        self._ours.append(writer)
        self._servers.append(their_writer)
        for source, target in ((reader, their_writer), (their_reader, writer)):
            self._tasks.append(asyncio.create_task(self._copy(source, target)))

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                target.write(data)

    def cut(self) -> None:
        """The first connection, as the client sees it."""
        self._ours[0].transport.abort()

    def tell_server(self) -> None:
        self._servers[0].transport.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for writer in self._ours + self._servers:
            writer.transport.abort()
        await asyncio.wait(self._tasks)


@pytest.mark.parametrize("many", [False, True])
async def test_an_id_is_ours_again_once_the_server_has_seen_that_the_connection_broke(many: bool) -> None:
    async with serving_context() as served, Pipe(served.address) as pipe:
        retries = itertools.count(1)

        def jitter() -> float:
            if next(retries) == 2:  # the id was taken
                pipe.tell_server()
                served.runner.open()
            return 0.0

        async with await asyncio.start_server(pipe.accept, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            async with AsyncClient(f"127.0.0.1:{port}") as client:
                client._connection.retries = RetryPolicy(max_retries=9, jitter=jitter)
                async with client.many() as stream:
                    if many:
                        generation = await stream.start("hello", request_id="mine", max_tokens=4)
                    else:
                        generation = client.generate("hello", request_id="mine", max_tokens=4)
                    waiting = asyncio.create_task(generation.collect())
                    await served.until(lambda: served.scheduler.has_requests)
                    pipe.cut()
                    assert len((await waiting).token_ids) == 4
    assert next(retries) > 2
