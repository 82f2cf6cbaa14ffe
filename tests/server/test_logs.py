"""Logs: a line for each RPC, who it was for, and nothing that anybody wrote or should not know."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.server.calls import Call, Caller, Context, OpenGate
from paceline.server.logs import TEXT, JsonFormatter, configure, log_access
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc
from support.checkpoints import tiny_checkpoint
from support.serving import Serving, failure, request

PATIENCE = 120
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
GENERATE = "/paceline.v1.GenerationService/Generate"
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What has been logged as JSON, from DEBUG on."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.removeHandler(handler)
    root.setLevel(level)


async def access_lines(served: Serving, lines: Lines, count: int) -> list[dict[str, Any]]:
    """The server tells at its end of an RPC, which may come after the client's."""

    def told() -> list[dict[str, Any]]:
        return [line for line in lines() if line["logger"] == "paceline.access"]

    await served.until(lambda: len(told()) >= count)
    return told()


async def test_a_line_for_each_rpc(free: Serving, lines: Lines) -> None:
    asked = request("the prompt", 8, request_id="mine", scheduling=pb.SchedulingParams(tenant="acme"))
    before = datetime.now(UTC)
    assert [one async for one in free.stub.Generate(asked, metadata=(("traceparent", TRACEPARENT),))]
    [line] = await access_lines(free, lines, 1)
    assert 0 < line.pop("seconds") < 60
    assert before.replace(microsecond=0) <= datetime.fromisoformat(line.pop("time")) <= datetime.now(UTC)
    message = line.pop("message")
    assert re.fullmatch(rf"{GENERATE} OK in \d+\.\d\d\d s: request mine of tenant acme, 8 tokens", message)
    assert line == {
        "level": "INFO",
        "logger": "paceline.access",
        "request_id": "mine",
        "method": GENERATE,
        "tenant": "acme",
        "traceparent": TRACEPARENT,
        "code": "OK",
        "caller": "anybody",
        "tokens": 8,
    }


async def test_rpcs_that_fail(serving: Serving, lines: Lines) -> None:
    await failure(serving.stub.Generate(request(sampling=pb.SamplingParams(temperature=-1.0))))
    await failure(serving.stub.Generate(request("x" * 5000, scheduling=pb.SchedulingParams(tenant="t%s"))))
    call = serving.stub.Generate(request(n=2))
    serving.runner.allow(1)
    await serving.until(lambda: serving.engine.engine.totals.tokens > 0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    refused, too_long, cancelled = await access_lines(serving, lines, 3)
    assert (refused["code"], refused["tenant"], "tokens" in refused) == ("INVALID_ARGUMENT", "", False)
    assert (too_long["code"], too_long["tenant"], too_long["tokens"]) == ("INVALID_ARGUMENT", "t%s", 0)
    assert "of tenant t%s, 0 tokens" in too_long["message"]
    assert (cancelled["code"], cancelled["tokens"]) == ("CANCELLED", 1)
    assert "traceparent" not in cancelled


async def test_many_on_one_stream(free: Serving, lines: Lines) -> None:
    call = free.stub.GenerateMany()
    for key in range(3):
        await call.write(pb.GenerateManyRequest(key=key, start=request(max_tokens=5)))
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass
    [line] = await access_lines(free, lines, 1)
    assert (line["code"], line["tokens"]) == ("OK", 15)


async def test_the_tenant_of_the_credential(serving: Serving, lines: Lines) -> None:
    class Gate(OpenGate):
        def admit(self, method: str, context: Context) -> Caller:
            return Caller("tenants.acme", "acme")

    serving.server.calls.gate = Gate()
    await model_pb2_grpc.ModelServiceStub(serving.channel).Tokenize(model_pb2.TokenizeRequest(text="a"))  # type: ignore[no-untyped-call]
    [line] = await access_lines(serving, lines, 1)
    assert (line["caller"], line["tenant"], "tokens" in line) == ("tenants.acme", "acme", False)


async def test_what_is_logged_on_the_way_names_the_rpc(
    free: Serving, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another thread, too."""
    prepare = free.engine.engine.prepare

    def loud(*args: Any) -> Any:
        logging.getLogger("paceline.test").warning("slow")
        return prepare(*args)

    monkeypatch.setattr(free.engine.engine, "prepare", loud)
    for text, request_id in (("hi", "here"), ("x" * 5000, "elsewhere")):
        asked = request(text, request_id=request_id, scheduling=pb.SchedulingParams(tenant="acme"))
        call = free.stub.Generate(asked)
        try:
            assert [one async for one in call]
        except grpc.aio.AioRpcError:
            assert request_id == "elsewhere"
    found = [line for line in lines() if line["logger"] == "paceline.test"]
    assert [(line["request_id"], line["tenant"]) for line in found] == [("here", "acme"), ("elsewhere", "acme")]
    assert {line["method"] for line in found} == {GENERATE}
    logging.getLogger("paceline.test").warning("outside")
    assert "request_id" not in lines()[-1]


async def test_health_is_asked_for_too_often(serving: Serving, lines: Lines) -> None:
    await health_pb2_grpc.HealthStub(serving.channel).Check(health_pb2.HealthCheckRequest())
    [line] = await access_lines(serving, lines, 1)
    assert line["level"] == "DEBUG"


async def test_nothing_that_anybody_wrote(free: Serving, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, key = "my diary of 1987", "Bearer pl-0123456789abcdef"
    metadata = (("authorization", key),)
    completion = "".join([one.text async for one in free.stub.Generate(request(secret, 12), metadata=metadata)])
    for fields in ({"structured": pb.StructuredOutput(regex=f"({secret}")}, {"stop": pb.StopParams(min_tokens=99)}):
        await failure(free.stub.Generate(request(secret, **fields), metadata=metadata))
    # Nor when something in here breaks.
    monkeypatch.setattr(free.engine.engine, "prepare", lambda wanted: 1 // 0)
    assert (await failure(free.stub.Generate(request(secret), metadata=metadata))).code() is grpc.StatusCode.INTERNAL
    await access_lines(free, lines, 4)
    written = json.dumps(lines())
    assert "ZeroDivisionError" in written, "the test sees tracebacks"
    assert len(completion) == 12
    for text in (secret, "diary", key, "pl-0123456789", completion):
        assert text not in written


# -- the formatter by itself ------------------------------------------------------------------------------------------


def entry(message: str, *args: object, **fields: Any) -> dict[str, Any]:
    record = logging.LogRecord("a.b", logging.ERROR, "file.py", 1, message, args, None)
    record.__dict__.update(fields)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_one_line_whatever_is_said() -> None:
    assert entry("two\nlines of %s", 'quotes " and \ud800')["message"] == 'two\nlines of quotes " and \ud800'


def test_exceptions() -> None:
    try:
        raise ValueError("of the test")
    except ValueError:
        found = entry("failed", exc_info=sys.exc_info())
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("ValueError: of the test")


def test_text_is_for_people(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_access(Call(GENERATE, "mine"), grpc.StatusCode.NOT_FOUND, 0.25)
    [record] = caplog.records
    line = logging.Formatter(TEXT).format(record)
    assert line.endswith(f" INFO paceline.access: {GENERATE} NOT_FOUND in 0.250 s: request mine")


def test_configured() -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    root.handlers = []
    try:
        for log_format in ("text", "json", "text"):
            configure(log_format)
            [handler] = root.handlers
            assert isinstance(handler.formatter, JsonFormatter) == (log_format == "json")
        assert root.level == logging.INFO
    finally:
        root.handlers, root.level = before, level


# -- all of it, as an operator starts it ------------------------------------------------------------------------------


def test_serve_with_json_and_metrics(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", "llama")
    small = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--kv-cache-memory", "4MiB", "--depth", "off"]
    options = ["--port", "0", "--metrics-port", "0", "--log-format", "json"]
    command = [sys.executable, "-m", "paceline", "serve", "--model", str(model), *small, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().removeprefix("serving on ").strip()
            with grpc.insecure_channel(address) as channel:
                asked = pb.GenerateRequest(prompt_text="a secret", stop=pb.StopParams(max_tokens=3))
                assert list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(asked))  # type: ignore[no-untyped-call]
            assert process.stderr is not None
            told = list[dict[str, Any]]()
            while not told or told[-1]["logger"] != "paceline.access":
                told.append(json.loads(process.stderr.readline()))
            [url] = [found[0] for line in told if (found := re.search(r"http://\S+", line["message"]))]
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
                assert 'vllm:generation_tokens_total{model_name="model"} 3.0' in answer.read().decode()
            process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=PATIENCE)
            told += map(json.loads, rest.splitlines())
        finally:
            process.kill()
    assert process.returncode == 0
    assert "a secret" not in json.dumps(told)
    assert told[-1]["message"].startswith("stopping")
