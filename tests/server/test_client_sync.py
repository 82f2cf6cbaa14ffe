"""The blocking client against a real gRPC server without an engine."""

from __future__ import annotations

import asyncio
import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator

import pytest

from fake_server import FakeServer, fake_server
from paceline import errors
from paceline.client import AsyncClient, Client, Delta, Generation, HealthStatus, RpcError, SyncGeneration
from paceline.client.admin import Admin, AsyncAdmin

PATIENCE = 60  # seconds until a test that waits has failed


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with fake_server() as fake:
        yield fake


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[Client]:
    connected = Client(server.address, max_retries=0)
    try:
        yield connected
    finally:
        await asyncio.to_thread(connected.close)  # it waits for calls that are just being cancelled


async def handler_ended(server: FakeServer) -> None:
    async with asyncio.timeout(PATIENCE):
        await server.ended.wait()


# ---- As the other one ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocking", "asynchronous", "renamed"),
    [
        (Client, AsyncClient, {"many": None}),
        (Admin, AsyncAdmin, {}),
        (SyncGeneration, Generation, {}),
    ],
)
def test_both_have_the_same_methods(blocking: type, asynchronous: type, renamed: dict[str, str | None]) -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(made).parameters) for name, made in found if not name.startswith("_")}

    renamed = {**renamed, "aclose": "close"}
    expected = {renamed.get(name, name): parameters for name, parameters in methods(asynchronous).items()}
    expected.pop(None, None)  # type: ignore[call-overload]
    assert methods(blocking) == expected


async def test_deltas_then_how_it_ended(client: Client) -> None:
    def read() -> list[Delta]:
        generation = client.generate("hello", max_tokens=4)
        assert (generation.started, generation.finished) == (None, None)
        deltas = list(generation)
        assert generation.started is not None
        assert generation.finished is not None
        assert generation.finished.stop_string == "END"
        with pytest.raises(RuntimeError, match="only once"):
            generation.collect()
        return deltas

    assert await asyncio.to_thread(read) == [Delta("a", (7,), 0), Delta("bc", (8, 9), 1), Delta("", (10,), 3)]


async def test_both_collect_the_same(client: Client, server: FakeServer) -> None:
    async with AsyncClient(server.address) as other:
        assert await asyncio.to_thread(client.complete, "hello") == await other.complete("hello")
        several = await asyncio.to_thread(lambda: client.complete_all("several", n=2))
        assert several == await other.complete_all("several", n=2)
    with pytest.raises(errors.InvalidArgument, match="complete_all"):
        client.complete("several", n=2)
    with pytest.raises(RpcError, match="without a `finished` message"):
        await asyncio.to_thread(client.complete, "truncate")


async def test_health(client: Client) -> None:
    assert await asyncio.to_thread(client.health) is HealthStatus.SERVING
    with pytest.raises(errors.NotFound):
        await asyncio.to_thread(client.health, "no.such.Service")


async def test_a_status_becomes_the_error_of_the_tree(client: Client) -> None:
    with pytest.raises(errors.Unavailable) as caught:
        await asyncio.to_thread(client.complete, "fail UNAVAILABLE 300")
    assert caught.value.retry_after == 0.3
    with pytest.raises(errors.DeadlineExceeded):
        await asyncio.to_thread(lambda: client.complete("hang", timeout=0.2))


async def test_an_error_after_some_output_has_the_id_that_was_told(client: Client) -> None:
    with pytest.raises(errors.Unavailable, match="engine lost") as caught:
        await asyncio.to_thread(lambda: client.complete("fail later"))
    assert caught.value.request_id == "r-1"  # type: ignore[attr-defined]


# ---- Leaving early -------------------------------------------------------------------------------------------------


async def test_break_cancels_the_rpc(client: Client, server: FakeServer) -> None:
    generation = client.generate("hang")  # held on to, so that no garbage collection ends it

    def read() -> str:
        for delta in generation:
            return delta.text
        return ""

    assert await asyncio.to_thread(read) == "a"
    await handler_ended(server)
    assert generation.finished is None


async def test_an_exception_in_the_loop_cancels_the_rpc(client: Client, server: FakeServer) -> None:
    def read() -> None:
        for _ in client.generate("hang"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(read)
    await handler_ended(server)


async def test_leaving_the_context_cancels_the_rpc(client: Client, server: FakeServer) -> None:
    def read() -> None:
        with client.generate("hang") as generation:
            deltas = iter(generation)  # held on to, so that no garbage collection closes it
            next(deltas)
        with pytest.raises(errors.Cancelled):
            next(deltas)

    await asyncio.to_thread(read)
    await handler_ended(server)


@pytest.mark.parametrize("what", ["generation", "client"])
async def test_closing_under_a_reader_is_an_error_to_it(client: Client, server: FakeServer, what: str) -> None:
    reading = threading.Event()

    def read(generation: SyncGeneration) -> None:
        for _ in generation:
            reading.set()

    generation = client.generate("hang")
    task = asyncio.create_task(asyncio.to_thread(read, generation))
    await asyncio.to_thread(reading.wait)
    await asyncio.to_thread((generation if what == "generation" else client).close)
    with pytest.raises(errors.Cancelled):
        await task
    await handler_ended(server)


async def test_what_is_closed_says_so(client: Client, server: FakeServer) -> None:
    generation = client.generate("hello")
    generation.close()
    with pytest.raises(RuntimeError, match="only once"):
        generation.collect()
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.complete("hello")
    assert server.requests == []


@pytest.mark.parametrize("ask", ["complete", "tokenize"])
async def test_closing_just_before_a_call_is_an_error_to_it(
    client: Client, ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, once the channel is at hand."""
    connect = client._connect

    def close_then() -> object:
        channel = connect()
        client.close()
        return channel

    monkeypatch.setattr(client, "_connect", close_then)
    with pytest.raises(errors.Cancelled, match="the client was closed"):
        getattr(client, ask)("hello")


async def test_an_interrupt_cancels_the_rpc(server: FakeServer) -> None:
    """As Ctrl-C in a terminal: the main thread waits for a delta that does not come."""
    code = f"""
import signal
from paceline.client import Client
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start what runs in the background without it
try:
    with Client({server.address!r}) as client:
        for delta in client.generate("hang"):
            print(delta.text, flush=True)
except KeyboardInterrupt:
    print("interrupted")
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"a\n"
    process.send_signal(signal.SIGINT)
    await handler_ended(server)
    output, stderr = await process.communicate()
    assert (output, stderr, process.returncode) == (b"interrupted\n", b"", 0)


# ---- Threads -------------------------------------------------------------------------------------------------------


async def test_threads_share_a_client(client: Client, server: FakeServer) -> None:
    texts = await asyncio.gather(
        *(asyncio.to_thread(lambda number=number: client.complete(f"prompt {number}").text) for number in range(16))
    )
    assert texts == ["abc"] * 16
    assert {request.prompt_text for request in server.requests} == {f"prompt {number}" for number in range(16)}
