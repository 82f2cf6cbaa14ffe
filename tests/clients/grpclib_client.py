"""The contract by grpclib, which shares no code with gRPC's own libraries: its HTTP/2 is h2."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, RetryInfo
from grpclib import GRPCError, Status
from grpclib.client import Channel, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.events import RecvTrailingMetadata, listen
from grpclib.exceptions import StreamTerminatedError

from paceline.v1 import admin_pb2
from paceline.v1 import generation_pb2 as pb

PATIENCE = 60.0
KEY, ADMIN_KEY = os.environ["PACELINE_KEY"], os.environ["PACELINE_ADMIN_KEY"]
TENANT = os.environ["PACELINE_TENANT"]


def authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def request(max_tokens: int, **fields: Any) -> pb.GenerateRequest:
    stop = pb.StopParams(max_tokens=max_tokens, ignore_eos=True)
    sampling = pb.SamplingParams(temperature=0)
    return pb.GenerateRequest(prompt_text="def add(a, b):", stop=stop, **{"sampling": sampling, **fields})


async def failure(call: Awaitable[Any]) -> GRPCError:
    """The status of a call that must fail."""
    try:
        await call
    except GRPCError as error:
        return error
    raise AssertionError("the call succeeded")


class Client:
    def __init__(self, channel: Channel) -> None:
        self.generate = UnaryStreamMethod(
            channel, "/paceline.v1.GenerationService/Generate", pb.GenerateRequest, pb.GenerateResponse
        )
        admin = "/paceline.v1.AdminService/"
        self.get_load = UnaryUnaryMethod(
            channel, admin + "GetLoad", admin_pb2.GetLoadRequest, admin_pb2.GetLoadResponse
        )
        self.get_stats = UnaryUnaryMethod(
            channel, admin + "GetStats", admin_pb2.GetStatsRequest, admin_pb2.GetStatsResponse
        )
        self.trailers: dict[str, Any] = {}
        listen(channel, RecvTrailingMetadata, self.keep_trailers)

    async def keep_trailers(self, event: RecvTrailingMetadata) -> None:
        self.trailers = dict(event.metadata)

    async def refused(self, message: pb.GenerateRequest, key: str | None = KEY) -> GRPCError:
        return await failure(self.generate(message, metadata=authorization(key) if key else {}, timeout=PATIENCE))

    # -- what is checked ----------------------------------------------------------------------------------------------

    async def stream(self) -> None:
        async with self.generate.open(metadata=authorization(KEY), timeout=PATIENCE) as call:
            await call.send_message(request(32), end=True)
            responses = [response async for response in call]
        assert responses[0].started.request_id == call.initial_metadata["x-request-id"]
        assert responses[0].started.prompt_tokens > 0
        assert responses[-1].finished.usage.completion_tokens == 32
        assert responses[-1].finished.reason == pb.FINISH_REASON_MAX_TOKENS
        assert "".join(response.text for response in responses)

    async def cancel(self) -> None:
        before = await self.num_cancelled()
        async with self.generate.open(metadata=authorization(KEY), timeout=PATIENCE) as call:
            await call.send_message(request(100, n=24), end=True)
            assert await call.recv_message() is not None
            await call.cancel()
        while await self.num_cancelled() == before:  # noqa: ASYNC110, the server is another process
            await asyncio.sleep(0.01)
        load = await self.get_load(admin_pb2.GetLoadRequest(), metadata=authorization(ADMIN_KEY))
        assert (load.running_requests, load.waiting_requests) == (0, 0), load
        assert load.free_kv_blocks == load.kv_blocks, load

    async def num_cancelled(self) -> int:
        stats = await self.get_stats(
            admin_pb2.GetStatsRequest(tenant=TENANT), metadata=authorization(ADMIN_KEY), timeout=PATIENCE
        )
        return sum(tenant.ended["CANCELLED"] for tenant in stats.tenants)

    async def deadline(self) -> None:
        """grpclib watches it itself, and the server refuses what it cannot do by then."""
        call = self.generate(request(100, n=24), metadata=authorization(KEY), timeout=0.05)
        with suppress(TimeoutError, StreamTerminatedError):
            error = await failure(call)
            assert error.status is Status.DEADLINE_EXCEEDED, error

    async def wrong_key(self) -> None:
        for key in ("paceline_" + "x" * 43, None):
            error = await self.refused(request(1), key)
            assert error.status is Status.UNAUTHENTICATED, error
            assert self.reason(error) == "UNAUTHENTICATED"
        error = await failure(self.get_load(admin_pb2.GetLoadRequest(), metadata=authorization(KEY)))
        assert error.status is Status.PERMISSION_DENIED, error
        assert self.reason(error) == "PERMISSION_DENIED"

    async def details(self) -> None:
        error = await self.refused(request(1, sampling=pb.SamplingParams(top_p=1.5)))
        assert error.status is Status.INVALID_ARGUMENT, error
        assert self.reason(error) == "SAMPLING_PARAM_OUT_OF_RANGE"
        [bad] = [detail for detail in error.details or () if isinstance(detail, BadRequest)]
        assert [violation.field for violation in bad.field_violations] == ["sampling.top_p"]
        error = await self.refused(pb.GenerateRequest(prompt_text="x", stop=pb.StopParams(max_tokens=1 << 20)))
        assert error.status is Status.RESOURCE_EXHAUSTED, error
        assert self.reason(error) == "TENANT_QUOTA_EXCEEDED"
        [quota] = [detail for detail in error.details or () if isinstance(detail, QuotaFailure)]
        assert quota.violations[0].subject == f"tenant:{TENANT}"
        # grpclib keeps the pushback, whose name begins with "grpc-", to itself; RetryInfo says the same.
        assert not [detail for detail in error.details or () if isinstance(detail, RetryInfo)]

    def reason(self, error: GRPCError) -> str:
        [info] = [detail for detail in error.details or () if isinstance(detail, ErrorInfo)]
        assert info.domain == "paceline"
        assert info.metadata["request_id"] == self.trailers["x-request-id"]
        return str(info.reason)


async def main() -> None:
    host, _, port = os.environ["PACELINE_ADDRESS"].rpartition(":")
    async with Channel(host, int(port)) as channel:
        client = Client(channel)
        for check in (client.stream, client.cancel, client.deadline, client.wrong_key, client.details):
            async with asyncio.timeout(PATIENCE):
                await check()
            print(f"ok {check.__name__}")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
