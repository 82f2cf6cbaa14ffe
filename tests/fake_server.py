"""A gRPC server without an engine, for tests of the client and of the load generator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc

STARTED = pb.Started(request_id="r-1", model="demo", prompt_tokens=5, cached_prompt_tokens=2)
FINISHED = pb.Finished(
    reason=pb.FINISH_REASON_STOP_STRING,
    stop_string="END",
    usage=pb.Usage(prompt_tokens=5, cached_prompt_tokens=2, completion_tokens=4),
    speculation=pb.SpeculationStats(
        mode=pb.SPECULATION_MODE_NGRAM,
        verify_steps=2,
        draft_steps=2,
        drafted_tokens=6,
        accepted_tokens=3,
        accepted_by_position=[2, 1, 0],
        acceptance_length=2.5,
        engine_seconds=0.5,
        rejected_seconds=0.25,
        depths=[0, 0, 0, 2],
        saved_seconds=1.5,
    ),
    timing=pb.Timing(
        queue=Duration(nanos=250_000_000),
        time_to_first_token=Duration(seconds=1),
        total=Duration(seconds=2, nanos=500_000_000),
        preemptions=1,
    ),
)
CANNED = (
    pb.GenerateResponse(started=STARTED),
    pb.GenerateResponse(token_offset=0, token_ids=[7], text="a"),
    pb.GenerateResponse(token_offset=1, token_ids=[8, 9], text="bc"),
    pb.GenerateResponse(token_offset=3, token_ids=[10], finished=FINISHED),
)
LOGPROBS = pb.TokenLogprobs(logprob=-0.5, rank=2, top_token_ids=[9, 7], top_logprobs=[-0.25, -0.5])
# Two choices, mixed; the second begins and ends first.
SEVERAL = (
    pb.GenerateResponse(choice=1, token_ids=[7], text="x", started=STARTED, logprobs=[LOGPROBS]),
    pb.GenerateResponse(choice=0, token_ids=[8], text="a"),
    pb.GenerateResponse(choice=1, token_offset=1, token_ids=[9], text="y", finished=FINISHED, logprobs=[LOGPROBS]),
    pb.GenerateResponse(choice=0, token_offset=1, token_ids=[10], text="b"),
    pb.GenerateResponse(choice=0, finished=pb.Finished(reason=pb.FINISH_REASON_DEAD_END, detail="no way on")),
)


class FakeServer(generation_pb2_grpc.GenerationServiceServicer):
    """Does what the prompt says: "hang" sends one token and waits for ever, "truncate" leaves the end out,
    "fail CODE [PUSHBACK_MS]" ends with that status, "busy TIMES CODE [PUSHBACK_MS]" does so as often as that and is
    canned afterwards, "fail later" ends with UNAVAILABLE after a token, "several" has two choices, all else is canned.

    Attributes:
        address: "HOST:PORT".
        requests: every request that came, in order.
        metadata: what came with each.
        time_left: of each when it came, in seconds; None without a deadline.
        ended: set when a hanging handler ends, which only a cancellation makes it do.
    """

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.time_left: list[float | None] = []
        self.ended = asyncio.Event()
        self.health = health.HealthServicer()

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.time_left.append(context.time_remaining())
        match request.prompt_text.split():
            case ["hang"]:
                try:
                    yield CANNED[0]
                    yield CANNED[1]
                    await asyncio.Event().wait()
                finally:
                    self.ended.set()
            case ["truncate"]:
                yield CANNED[0]
                yield CANNED[1]
            case ["fail", "later"]:
                yield CANNED[0]
                yield CANNED[1]
                await context.abort(grpc.StatusCode.UNAVAILABLE, "engine lost")
            case ["fail", code, *pushback]:
                trailing = tuple(("grpc-retry-pushback-ms", value) for value in pushback)
                await context.abort(grpc.StatusCode[code], f"no [{code}] today", trailing)
            case ["busy", times, code, *pushback] if self.requests.count(request) <= int(times):
                trailing = tuple(("grpc-retry-pushback-ms", value) for value in pushback)
                await context.abort(grpc.StatusCode[code], "busy", trailing)
            case ["several"]:
                for response in SEVERAL:
                    yield response
            case _:
                for response in CANNED:
                    yield response


@asynccontextmanager
async def fake_server(port: int = 0) -> AsyncIterator[FakeServer]:
    """A running `FakeServer`, whose health is SERVING; 0 takes a free port."""
    fake = FakeServer()
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(fake, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(fake.health, server)
    await fake.health.set("", health_pb2.HealthCheckResponse.SERVING)
    fake.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(None)
