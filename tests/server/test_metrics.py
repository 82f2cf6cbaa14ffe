"""What Prometheus reads, scraped over HTTP from a server that serves."""

from __future__ import annotations

import asyncio
import re
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.cost_model import CostModel
from paceline.core.depth import Decision
from paceline.core.plan import FinishReason, StepPlan, StepTimes
from paceline.core.tenant_policy import TenantPolicy
from paceline.engine.usage import ALL_OTHERS
from paceline.errors import PacelineError
from paceline.server import GrpcServer, ServerSettings, metrics, metrics_endpoint
from paceline.v1 import admin_pb2, admin_pb2_grpc
from paceline.v1 import generation_pb2 as pb
from support.serving import MODEL, NUM_BLOCKS, PATIENCE, Serving, failure, request
from support.serving import serving as serving_context

GENERATE = "/paceline.v1.GenerationService/Generate"
METRICS = ServerSettings(metrics_port=0)
# Of a sample, its name and labels; `model_name` is left out, where it is the model's.
Key = tuple[str, tuple[tuple[str, str], ...]]


@pytest.fixture
async def watched() -> AsyncIterator[Serving]:
    """A server with metrics, whose steps take a quarter of a second each, as the runner reports them."""
    async with serving_context(settings=METRICS) as served:

        def times(plan: StepPlan) -> StepTimes:
            return StepTimes(total=0.25, draft=0.0, verify=0.125, sample=0.0625)

        served.runner.times = times  # type: ignore[method-assign]
        yield served


def fetch(port: int, path: str = "/metrics", method: str = "GET") -> tuple[str, dict[str, str]]:
    wanted = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    with urllib.request.urlopen(wanted, timeout=60) as answer:
        return answer.read().decode(), dict(answer.headers)


async def scrape(served: Serving) -> dict[Key, float]:
    port = served.server.metrics_port
    assert port
    text, _ = await asyncio.to_thread(fetch, port)
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {}
    for sample in samples:
        labels = dict(sample.labels)
        assert labels.pop("model_name", MODEL) == MODEL
        key = sample.name, tuple(sorted(labels.items()))
        assert key not in found, "told twice"
        found[key] = sample.value
    return found


def at(found: dict[Key, float], name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def of(tenant: str, text: str = "hello", max_tokens: int = 10, **fields: object) -> pb.GenerateRequest:
    return request(text, max_tokens, scheduling=pb.SchedulingParams(tenant=tenant), **fields)


async def whole(call: Any) -> list[pb.GenerateResponse]:
    return [response async for response in call]


# -- what is told -----------------------------------------------------------------------------------------------------


async def test_after_real_requests(watched: Serving) -> None:
    watched.runner.open()
    watched.scheduler.tenants.set_policies({"a": TenantPolicy(weight=2.0)}, TenantPolicy(), 0.0)
    finished = [(await whole(watched.stub.Generate(of("a", "x" * 20))))[-1].finished for _ in range(3)]
    finished += [one.finished for one in await whole(watched.stub.Generate(of("b", n=2))) if one.HasField("finished")]
    await failure(watched.stub.Generate(of("a", sampling=pb.SamplingParams(temperature=-1.0))))
    await failure(watched.stub.Generate(of("a", "x" * 5000)))
    await watched.until(lambda: not len(watched.server.live))
    found = await scrape(watched)

    assert at(found, "vllm:prompt_tokens_total") == 70
    assert at(found, "vllm:generation_tokens_total") == 50
    assert at(found, "vllm:prefix_cache_queries_total") == 70
    cached = sum(one.usage.cached_prompt_tokens for one in finished)
    assert at(found, "vllm:prefix_cache_hits_total") == cached > 0
    drafted = sum(one.speculation.drafted_tokens for one in finished)
    assert at(found, "vllm:spec_decode_num_draft_tokens_total") == drafted > 0
    accepted = sum(one.speculation.accepted_tokens for one in finished)
    assert at(found, "vllm:spec_decode_num_accepted_tokens_total") == accepted > 0
    assert at(found, "vllm:spec_decode_num_drafts_total") == sum(one.speculation.draft_steps for one in finished)
    assert at(found, "vllm:num_preemptions_total") == 0
    assert at(found, "vllm:request_success_total", finished_reason="length") == 5
    for name, seconds in (
        ("vllm:time_to_first_token_seconds", [one.timing.time_to_first_token for one in finished]),
        ("vllm:e2e_request_latency_seconds", [one.timing.total for one in finished]),
        ("vllm:request_queue_time_seconds", [one.timing.queue for one in finished]),
    ):
        assert at(found, f"{name}_count") == 5, name
        assert at(found, f"{name}_sum") == pytest.approx(sum(one.ToNanoseconds() for one in seconds) / 1e9), name
        assert at(found, f"{name}_bucket", le="+Inf") == 5, name
    per_token = [one.timing.total.ToNanoseconds() - one.timing.time_to_first_token.ToNanoseconds() for one in finished]
    assert at(found, "vllm:request_time_per_output_token_seconds_count") == 5
    assert at(found, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(sum(per_token) / 9e9)

    charged = {"a": finished[:3], "b": finished[3:]}
    for tenant, own in charged.items():
        seconds = at(found, "paceline_tenant_engine_seconds_total", tenant=tenant)
        assert seconds == pytest.approx(sum(one.speculation.engine_seconds for one in own))
        assert at(found, "paceline_tenant_generation_tokens_total", tenant=tenant) == 10 * len(own)
    assert at(found, "paceline_tenant_prompt_tokens_total", tenant="a") == 60
    assert at(found, "paceline_tenant_service_seconds", tenant="a") == pytest.approx(
        at(found, "paceline_tenant_engine_seconds_total", tenant="a") / 2.0
    )
    steps = at(found, "paceline_engine_steps_total")
    assert steps == watched.engine.engine.totals.steps > 0
    assert at(found, "paceline_engine_step_seconds_total", phase="verify") == steps / 8
    assert at(found, "paceline_engine_step_seconds_total", phase="sample") == steps / 16
    assert at(found, "paceline_generations_total", tenant="a", code="OK") == 3
    assert at(found, "paceline_generations_total", tenant="a", code="INVALID_ARGUMENT") == 1
    assert at(found, "paceline_rpcs_total", method=GENERATE, code="OK") == 4
    assert at(found, "paceline_rpcs_total", method=GENERATE, code="INVALID_ARGUMENT") == 2
    assert at(found, "paceline_rpc_duration_seconds_count", method=GENERATE) == 6
    assert at(found, "process_resident_memory_bytes") > 1e6
    assert not [name for name, _ in found if name.endswith("_created")]


async def test_while_requests_live(watched: Serving) -> None:
    watched.scheduler.tenants.set_policies({"a": TenantPolicy(max_running=1)}, TenantPolicy(), 0.0)
    first = watched.stub.Generate(of("a"))
    watched.runner.allow(1)
    await watched.until(lambda: watched.engine.engine.totals.tokens == 1)
    second = watched.stub.Generate(of("a"))
    await watched.until(lambda: watched.engine.num_live == 2)
    found = await scrape(watched)
    for name, value in (("running", 1), ("waiting", 1)):
        assert at(found, f"vllm:num_requests_{name}") == value
        assert at(found, f"paceline_tenant_requests_{name}", tenant="a") == value
    used = NUM_BLOCKS - watched.scheduler.kv.num_free_blocks
    assert at(found, "vllm:kv_cache_usage_perc") == pytest.approx(used / NUM_BLOCKS)
    assert used > 0
    assert at(found, "vllm:generation_tokens_total") == 1
    assert at(found, "paceline_serving") == 1
    assert ("paceline_rpcs_total", (("code", "OK"), ("method", GENERATE))) not in found
    second.cancel()
    await watched.until(lambda: len(watched.server.live) == 1)
    first.cancel()
    watched.runner.open()
    await watched.until(lambda: watched.idle and not len(watched.server.live))
    found = await scrape(watched)
    assert at(found, "vllm:num_requests_running") == at(found, "vllm:num_requests_waiting") == 0
    assert at(found, "vllm:request_success_total", finished_reason="abort") == 2
    assert at(found, "vllm:request_queue_time_seconds_count") == 1, "one of them was admitted"
    assert at(found, "vllm:time_to_first_token_seconds_count") == 1
    assert at(found, "vllm:e2e_request_latency_seconds_count") == 0, "neither has finished"
    assert at(found, "paceline_generations_total", tenant="a", code="CANCELLED") == 2
    assert at(found, "paceline_rpcs_total", method=GENERATE, code="CANCELLED") == 2


async def test_ends_by_a_stop(watched: Serving) -> None:
    watched.runner.open()
    await whole(watched.stub.Generate(of("a", max_tokens=2000, stop=pb.StopParams(strings=["a"]))))
    found = await scrape(watched)
    assert at(found, "vllm:request_success_total", finished_reason="stop") == 1


def test_every_end_has_a_name() -> None:
    assert metrics.FINISHED_REASONS.keys() == set(FinishReason)


async def test_speculation(watched: Serving) -> None:
    assert at(await scrape(watched), "paceline_speculation_depth") == 0
    watched.scheduler.speculation.policy = policy = AdaptiveDepth(CostModel([1], [0.01]))
    policy.decision = Decision(4, 9, 120.0)
    watched.engine.engine.usage.of("t").saved_seconds = -1.5
    watched.engine.engine.usage.of("t").rejected_seconds = 2.5
    found = await scrape(watched)
    assert at(found, "paceline_speculation_depth") == 4
    assert at(found, "paceline_price_of_time_tokens_per_second") == 120.0
    assert at(found, "paceline_saved_seconds") == -1.5
    assert at(found, "paceline_rejected_seconds_total") == at(
        found, "paceline_tenant_rejected_seconds_total", tenant="t"
    )
    assert at(found, "paceline_rejected_seconds_total") == 2.5


async def test_names_do_not_grow_without_bound(watched: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.usage.MAX_TENANTS", 2)
    watched.runner.open()
    for index in range(4):
        await whole(watched.stub.Generate(of(f'"{index}\\', max_tokens=2)))
    with pytest.raises(grpc.aio.AioRpcError):
        await watched.channel.unary_unary("/paceline.v1.GenerationService/Unheard")(b"")
    found = await scrape(watched)
    labels = [label for _, pairs in found for label in pairs]
    assert {value for name, value in labels if name == "tenant"} == {'"0\\', '"1\\', ALL_OTHERS}
    assert {value for name, value in labels if name == "method"} == {GENERATE}


@pytest.mark.parametrize("how", ["drained", "dead"])
async def test_who_does_not_serve_is_told_of(watched: Serving, how: str) -> None:
    assert at(await scrape(watched), "paceline_serving") == 1
    if how == "drained":
        await watched.server.drain(0)
    else:
        watched.runner.failure = RuntimeError("of the test")
        watched.runner.open()
        await failure(watched.stub.Generate(of("a")))
    assert at(await scrape(watched), "paceline_serving") == 0


async def test_before_there_is_an_engine() -> None:
    async with serving_context(settings=METRICS, open_engine=False) as served:
        await failure(served.stub.Generate(request()))
        found = await scrape(served)
        assert at(found, "paceline_rpcs_total", method=GENERATE, code="UNAVAILABLE") == 1
        assert not [name for name, _ in found if name.startswith("vllm:")]
        served.server.open(served.engine)
        assert at(await scrape(served), "vllm:num_requests_running") == 0


async def test_told_as_stats_are(watched: Serving) -> None:
    watched.runner.open()
    for tenant in ("a", "b"):
        await whole(watched.stub.Generate(of(tenant)))
    found = await scrape(watched)
    stub = admin_pb2_grpc.AdminServiceStub(watched.channel)  # type: ignore[no-untyped-call]
    for stats in (await stub.GetStats(admin_pb2.GetStatsRequest())).tenants:
        for name, value in (
            ("paceline_tenant_prompt_tokens_total", stats.prompt_tokens),
            ("paceline_tenant_cached_prompt_tokens_total", stats.cached_prompt_tokens),
            ("paceline_tenant_generation_tokens_total", stats.completion_tokens),
            ("paceline_tenant_engine_seconds_total", stats.engine_seconds),
            ("paceline_tenant_rejected_seconds_total", stats.rejected_seconds),
            ("paceline_tenant_queue_seconds_total", stats.queue_seconds),
            ("paceline_tenant_preemptions_total", stats.preemptions),
            ("paceline_tenant_service_seconds", stats.service_seconds),
            ("paceline_generations_total", stats.ended["OK"]),
        ):
            labels = {"code": "OK"} if "generations" in name else {}
            assert at(found, name, tenant=stats.tenant, **labels) == value, name


async def test_the_manual_has_them_all(watched: Serving) -> None:
    watched.runner.open()
    await whole(watched.stub.Generate(of("a")))
    assert watched.server.metrics_port
    text, _ = await asyncio.to_thread(fetch, watched.server.metrics_port)
    told = set()
    for family in text_string_to_metric_families(text):
        told.add(family.name + "_total" if family.type == "counter" else family.name)
    manual = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    table = "\n".join(line.split("|")[1] for line in manual.splitlines() if line.startswith("| `"))
    documented = set[str]()
    for name in re.findall(r"`((?:vllm:|paceline_)[^`]+)`", table):
        head, braces, tail = re.fullmatch(r"([^{]*)(?:\{(.*)\})?(.*)", name).groups()  # type: ignore[union-attr]
        documented.update(head + part + tail for part in (braces or "").split(","))
    assert {name for name in told if not name.startswith("process_")} == documented


# -- how it is asked for ----------------------------------------------------------------------------------------------


async def raw(served: Serving, sent: bytes) -> bytes:
    """What comes back on a connection, until it is hung up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.server.metrics_port)
    try:
        writer.write(sent)
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
        with suppress(ConnectionResetError):
            await writer.wait_closed()


async def test_http(watched: Serving, caplog: pytest.LogCaptureFixture) -> None:
    port = watched.server.metrics_port
    assert port
    text, headers = await asyncio.to_thread(fetch, port, "/metrics?name=x")
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert int(headers["Content-Length"]) == len(text.encode())
    head = await raw(watched, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert head.endswith(b"\r\nConnection: close\r\n\r\n")
    for path, method, status in (("/", "GET", 404), ("/metrics/x", "GET", 404), ("/metrics", "POST", 405)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            await asyncio.to_thread(fetch, port, path, method)
        caught.value.close()
        assert caught.value.code == status
    assert (await raw(watched, b"\x16\x03\x01\r\n\r\n")).startswith(b"HTTP/1.1 404")
    assert await raw(watched, b"x" * (2 * metrics_endpoint.MOST_BYTES)) == b""
    assert await scrape(watched)
    assert "could not be told" not in caplog.text


async def test_who_says_nothing_is_hung_up_on(watched: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, "SCRAPE_SECONDS", 0.05)
    assert await raw(watched, b"GET /metr") == b""


async def test_many_at_once(watched: Serving) -> None:
    """While requests are served; scrapers that say nothing hold up nobody."""
    watched.runner.open()
    silent = [await asyncio.open_connection("127.0.0.1", watched.server.metrics_port) for _ in range(20)]
    calls = [asyncio.ensure_future(whole(watched.stub.Generate(of(f"t{index}", max_tokens=50)))) for index in range(8)]
    asked = b"GET /metrics HTTP/1.1\r\n\r\n"
    for answer in await asyncio.gather(*(raw(watched, asked) for _ in range(20))):
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert answer.endswith(b"\n")
    await asyncio.gather(*calls)
    await watched.until(lambda: not len(watched.server.live))
    assert at(await scrape(watched), "vllm:generation_tokens_total") == 400
    for _, writer in silent:
        writer.close()
        await writer.wait_closed()


async def test_a_failure_to_tell_is_logged(
    watched: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(engine: object) -> metrics.Snapshot:
        raise ZeroDivisionError

    monkeypatch.setattr(metrics.Snapshot, "of", broken)
    assert await raw(watched, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
    assert "ZeroDivisionError" in caplog.text


async def test_nothing_is_left_behind(watched: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tasks, which every test here looks for, nor threads, nor the port."""
    monkeypatch.setattr(metrics_endpoint, "SCRAPE_SECONDS", 1e6)
    port = watched.server.metrics_port
    assert port
    assert await scrape(watched)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\n")  # the rest never comes
    await watched.until(lambda: bool(watched.server._endpoint._answering))
    async with asyncio.timeout(PATIENCE):
        await watched.server.stop(0)
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    assert not watched.server._endpoint._answering
    await watched.until(lambda: not [one for one in threading.enumerate() if "metrics" in one.name])
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(fetch, port)


async def test_off_unless_asked_for(serving: Serving) -> None:
    assert serving.server.metrics_port is None
    assert not serving.engine.engine.on_end


async def test_a_port_that_is_taken(watched: Serving) -> None:
    assert watched.server.metrics_port
    server = GrpcServer(settings=ServerSettings(metrics_port=watched.server.metrics_port))
    with pytest.raises(PacelineError, match=f"metrics on 127.0.0.1 port {watched.server.metrics_port}"):
        await server.start()
    await server.stop(0)
