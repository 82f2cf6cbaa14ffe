"""The harness against scripted clients, and against a real gRPC server without an engine."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from itertools import count, pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fake_server import FakeServer, fake_server
from paceline.client import AsyncClient
from paceline.config_file import TenantsFile
from paceline.errors import InvalidArgument
from paceline.server.auth import KeyGate, hash_key
from paceline.server.tls import TlsFiles
from paceline_loadtest import (
    Chunk,
    GrpcClient,
    LoadConfig,
    PlannedRequest,
    RequestFailed,
    RequestOptions,
    RequestRecord,
    open_client,
    plan,
    run_load,
)
from paceline_loadtest.cli import app
from paceline_loadtest.clients import Outcome
from support.certificates import Authority
from support.serving import serving


class ScriptedClient:
    """Answers at once with one token; `hold` keeps answers back, prompts "fail" and "crash" do what they say.

    Attributes:
        live: requests under way; `most` is the largest number ever.
        sent: prompts in the order in which they were sent.
    """

    def __init__(self) -> None:
        self.live = self.most = 0
        self.sent: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def stream(self, request: PlannedRequest) -> AsyncGenerator[Chunk, None]:
        self.sent.append(str(request.prompt))
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            await self.hold.wait()
            await asyncio.sleep(0)
            if request.prompt == "fail":
                raise RequestFailed("UNAVAILABLE", "not today")
            if request.prompt == "crash":
                raise ZeroDivisionError
            yield Chunk(1, Outcome(3, 1, "eos"))
        finally:
            self.live -= 1

    async def aclose(self) -> None:
        raise AssertionError("the caller's client stays open")


async def test_a_limit_is_kept_and_used() -> None:
    client = ScriptedClient()
    report = await run_load(client, plan(LoadConfig(num_prompts=20, max_concurrency=3), ["x"]))
    assert (report.completed, client.most, client.live) == (20, 3, 0)
    assert report.max_concurrent_requests <= 3


async def test_without_a_limit_everything_runs_at_once() -> None:
    client = ScriptedClient()
    report = await run_load(client, plan(LoadConfig(num_prompts=20), ["x"]))
    assert (report.completed, client.most) == (20, 20)


async def test_in_a_closed_loop_requests_arrive_when_they_are_sent() -> None:
    report = await run_load(ScriptedClient(), plan(LoadConfig(num_prompts=5, max_concurrency=1), ["x"]))
    records = report.records
    assert all(record.sent >= record.arrival for record in records)
    assert all(later.arrival >= earlier.ended for earlier, later in pairwise(records))


async def test_a_queue_before_the_server_is_visible() -> None:
    # Arrivals come much faster than answers, one at a time: coordinated omission would hide the wait.
    client = ScriptedClient()
    client.hold.clear()
    config = LoadConfig(num_prompts=4, request_rate=1000.0, burstiness=float("inf"), max_concurrency=1)
    workload = plan(config, ["x"])
    run = asyncio.create_task(run_load(client, workload))
    await asyncio.sleep(0.05)
    client.hold.set()
    report = await run
    records = report.records
    assert [record.arrival for record in records] == [request.arrival for request in workload.requests]
    assert all(later.sent >= earlier.ended for earlier, later in pairwise(records))
    assert records[-1].sent > records[0].ended > records[-1].arrival
    assert report.distributions["arrival_e2el"].mean > report.distributions["e2el"].mean


async def test_failures_are_counted_and_do_not_stop_the_run() -> None:
    seen: list[RequestRecord] = []
    workload = plan(LoadConfig(num_prompts=6, max_concurrency=2), ["x", "fail"])
    report = await run_load(ScriptedClient(), workload, on_record=seen.append)
    assert (report.completed, report.failed, report.errors_by_code) == (3, 3, {"UNAVAILABLE": 3})
    assert [record.index for record in report.records] == list(range(6))
    assert sorted(record.index for record in seen) == list(range(6))


async def test_a_bug_in_a_client_ends_the_run() -> None:
    client = ScriptedClient()
    with pytest.raises(ExceptionGroup):
        await run_load(client, plan(LoadConfig(num_prompts=2), ["x", "crash"]))
    assert client.live == 0


async def test_warmups_come_first_and_are_not_measured() -> None:
    client = ScriptedClient()
    workload = plan(LoadConfig(num_prompts=2, num_warmups=1), ["a", "b", "c"])
    report = await run_load(client, workload)
    assert client.sent[0] == workload.warmups[0].prompt
    assert (len(client.sent), report.completed) == (3, 2)


# ---- gRPC ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with fake_server() as fake:
        yield fake


async def test_paceline(server: FakeServer) -> None:
    options = RequestOptions(temperature=0.5, ignore_eos=True, speculation="ngram")
    config = LoadConfig(num_prompts=6, max_concurrency=3, max_tokens=(4, 4), options=options)
    async with aclosing(open_client(f"grpc://{server.address}")) as client:
        report = await run_load(client, plan(config, ["a", (1, 2), "fail UNAVAILABLE"]))
    assert (report.completed, report.errors_by_code) == (4, {"UNAVAILABLE": 2})
    assert (report.total_input_tokens, report.total_output_tokens) == (4 * 5, 4 * 4)
    assert [record.chunk_tokens for record in report.records if record.completed] == [(1, 2, 1)] * 4
    totals = report.speculation
    assert totals is not None
    assert (totals.acceptance_rate, totals.acceptance_length, totals.per_position) == (0.5, 2.5, (1.0, 0.5, 0.0))
    sent = server.requests[0]
    assert (sent.sampling.temperature, sent.stop.max_tokens, sent.stop.ignore_eos) == (0.5, 4, True)


async def test_a_request_that_cannot_be_built_is_a_failure_of_its_own(server: FakeServer) -> None:
    async with aclosing(open_client(f"grpc://{server.address}")) as client:
        report = await run_load(client, plan(LoadConfig(num_prompts=2), ["fine", (2**40,)]))
    assert (report.completed, report.errors_by_code) == (1, {"INVALID_ARGUMENT": 1})


async def test_ending_a_run_cancels_what_the_server_does(server: FakeServer) -> None:
    async with AsyncClient(server.address) as client:
        run = asyncio.create_task(run_load(GrpcClient(client), plan(LoadConfig(num_prompts=1), ["hang"])))
        while not server.requests:  # noqa: ASYNC110 the server has no event for this
            await asyncio.sleep(0.01)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        async with asyncio.timeout(30):
            await server.ended.wait()


@pytest.mark.parametrize(
    "target", ["", "localhost", "http://h:1", "grpc://h", "grpc://:1", "grpc://h:x", "grpc://h:1/path", "grpc://["]
)
def test_targets_that_nothing_speaks(target: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^target = .*must be HOST:PORT or one of grpc://HOST:PORT"):
        open_client(target)


# ---- Command line --------------------------------------------------------------------------------------------------


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline_loadtest", *arguments, stdout=-1, stderr=-1
    )


async def command(*arguments: str) -> tuple[int, str, str]:
    process = await start(*arguments)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_the_command(server: FakeServer, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "fail UNAVAILABLE"}\n')
    options = {
        "--target": f"grpc://{server.address}",
        "--prompts": str(prompts),
        "--num-prompts": "4",
        "--num-warmups": "1",
        "--max-concurrency": "2",
        "--request-rate": "inf",
        "--max-tokens": "3-5",
        "--speculation": "off",
        "--json": str(out),
        "--metadata": "machine=here",
    }
    code, text, errors = await command(*(part for pair in options.items() for part in pair))
    assert code == 0, errors
    assert "2 / 2" in text
    result = json.loads(out.read_text())
    assert (result["completed"], result["failed"], result["errors_by_code"]) == (2, 2, {"UNAVAILABLE": 2})
    assert result["interrupted"] is False
    assert (result["machine"], result["speculation"], result["max_tokens"]) == ("here", "off", [3, 5])
    assert len(server.requests) == 5


async def test_the_command_fails_when_every_request_did(server: FakeServer, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "fail INTERNAL"}\n')
    target = f"grpc://{server.address}"
    code, text, _ = await command("--target", target, "--num-prompts", "2", "--prompts", str(prompts))
    assert code == 1
    assert "INTERNAL" in text


async def test_control_c_ends_the_run_and_loses_nothing(server: FakeServer, tmp_path: Path) -> None:
    lines, out = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts = ["a", "hang"]
    lines.write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts))
    configs = (LoadConfig(num_prompts=2, seed=seed) for seed in count())
    seed = next(config.seed for config in configs if [one.prompt for one in plan(config, prompts).requests] == prompts)
    options = ["--num-prompts", "4", "--max-concurrency", "1", "--seed", f"{seed}", "--json", f"{out}"]
    # Where tests run in the background, SIGINT is ignored, and by what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = await start("--target", f"grpc://{server.address}", "--prompts", f"{lines}", *options)
    finally:
        signal.signal(signal.SIGINT, before)
    while len(server.requests) < 2:  # noqa: ASYNC110 the server has no event for this
        await asyncio.sleep(0.01)
    process.send_signal(signal.SIGINT)
    text, errors = await process.communicate()
    assert (process.returncode, b"Traceback" in errors) == (130, False)
    assert "after 1 of 4 requests" in text.decode()
    result = json.loads(out.read_text())
    assert (result["interrupted"], result["completed"], result["failed"]) == (True, 1, 0)
    assert (result["num_prompts"], result["output_lens"]) == (4, [4])
    assert result["duration"] == pytest.approx(result["start_times"][0] + result["latencies"][0])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--target", "http://h:1", "error: target = 'http://h:1': must be HOST:PORT or one of grpc://HOST:PORT"),
        ("--max-tokens", "9-3", "error: max_tokens = (9, 3): must be at least 1"),
        ("--max-tokens", "few", "error: max_tokens = 'few': must be a number"),
        ("--request-rate", "0", "error: request_rate = 0.0: must be above 0"),
        ("--metadata", "novalue", "error: metadata = 'novalue': must be KEY=VALUE"),
        ("--prompts", "nowhere.jsonl", "error: prompts = 'nowhere.jsonl': must be a readable file (No such file"),
        ("--api-key", "a key", "error: api_key = '(not shown)': must be printable"),
        ("--tls-ca", "nowhere.pem", "error: tls_ca = 'nowhere.pem': must be a PEM file"),
        ("--tls-cert", "nowhere.pem", "error: tls_cert = 'nowhere.pem': must be given with tls_key"),
    ],
)
def test_bad_options_are_named(option: str, value: str, message: str) -> None:
    result = CliRunner().invoke(app, ["--target", "grpc://127.0.0.1:1", option, value])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(("below", "why"), [("", "Is a directory"), ("nowhere/out", "No such file")])
def test_where_the_report_cannot_be_written_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str, why: str
) -> None:
    monkeypatch.setattr("paceline_loadtest.cli.open_client", lambda *_, **__: pytest.fail("it was opened"))
    path = str(tmp_path / below)
    result = CliRunner().invoke(app, ["--target", "grpc://127.0.0.1:1", "--json", path])
    assert result.exit_code == 2
    assert f"error: json = '{path}': must be a file in a folder" in result.stderr
    assert why in result.stderr


def test_a_full_disk_is_told_behind_the_report() -> None:
    options = ["--target", "grpc://127.0.0.1:1", "--num-prompts", "1", "--timeout", "0.1", "--json", "/dev/full"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 1
    assert "failed" in result.stdout
    assert result.stderr.strip().endswith("error: /dev/full cannot be written: No space left on device")


@pytest.fixture
def encrypted(tmp_path: Path) -> TlsFiles:
    """Of a server whose authority is in ca.pem."""
    authority = Authority()
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    return TlsFiles(*authority.issue("server").write(tmp_path, "server"), None)


async def test_a_server_with_keys_and_tls(encrypted: TlsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, out = f"paceline_{'K' * 43}", tmp_path / "out.json"
    named = TenantsFile.model_validate({"tenants": {"load": {"keys": [hash_key(key)]}}})
    async with serving(gate=KeyGate(named), credentials=encrypted.credentials()) as served:
        served.runner.open()
        plain = ["--target", f"grpc://{served.address}", "--num-prompts", "2", "--max-tokens", "4", "--json", f"{out}"]
        options = [*plain, "--tls-ca", str(tmp_path / "ca.pem")]
        code, text, errors = await command(*options)
        assert code == 1, errors
        assert "UNAUTHENTICATED" in text
        monkeypatch.setenv("PACELINE_API_KEY", key)
        code, text, errors = await command(*options)
        assert code == 0, errors
        written = out.read_text()
        assert json.loads(written)["completed"] == 2
        assert key not in text + errors + written
        code, text, _ = await command(*plain)
        assert code == 1
        assert "UNAVAILABLE" in text
