"""The contract by our own client, as its users use it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable

from paceline import errors
from paceline.client import AsyncClient, Client, RpcError

PATIENCE = 60.0
ADDRESS, TENANT = os.environ["PACELINE_ADDRESS"], os.environ["PACELINE_TENANT"]
KEY, ADMIN_KEY = os.environ["PACELINE_KEY"], os.environ["PACELINE_ADMIN_KEY"]
PROMPT = "def add(a, b):"


async def stream() -> None:
    async with AsyncClient(ADDRESS, api_key=KEY) as client:
        generation = client.generate(PROMPT, max_tokens=32, ignore_eos=True, temperature=0.0)
        text = "".join([delta.text async for delta in generation])
        assert generation.finished is not None
        assert generation.finished.usage.completion_tokens == 32
    with Client(ADDRESS, api_key=KEY) as blocking:
        assert blocking.complete(PROMPT, max_tokens=32, ignore_eos=True, temperature=0.0).text == text


async def cancel() -> None:
    async with AsyncClient(ADDRESS, api_key=KEY) as client, AsyncClient(ADDRESS, api_key=ADMIN_KEY) as operator:

        async def num_cancelled() -> int:
            stats = await operator.admin.stats(TENANT)
            return sum(tenant.ended.get("CANCELLED", 0) for tenant in stats.tenants)

        before = await num_cancelled()
        async with client.generate(PROMPT, max_tokens=100, ignore_eos=True, n=24) as generation:
            async for _ in generation:
                break
        while await num_cancelled() == before:  # noqa: ASYNC110, the server is another process
            await asyncio.sleep(0.01)
        load = await operator.admin.load()
        assert (load.running_requests, load.waiting_requests) == (0, 0), load
        assert load.free_kv_blocks == load.kv_blocks, load


async def deadline() -> None:
    async with AsyncClient(ADDRESS, api_key=KEY) as client:
        error = await refused(client, timeout=0.05, max_tokens=100, ignore_eos=True, n=24)
        assert isinstance(error, errors.DeadlineExceeded), error


async def wrong_key() -> None:
    for key in ("paceline_" + "x" * 43, None):
        async with AsyncClient(ADDRESS, api_key=key) as client:
            error = await refused(client)
            assert isinstance(error, errors.Unauthenticated), error
            assert error.reason == "UNAUTHENTICATED"
    async with AsyncClient(ADDRESS, api_key=KEY) as client:
        error = await failure(client.admin.load())
        assert isinstance(error, errors.PermissionDenied), error
        assert error.reason == "PERMISSION_DENIED"


async def details() -> None:
    async with AsyncClient(ADDRESS, api_key=KEY) as client:
        error = await refused(client, top_p=1.5)
        assert isinstance(error, errors.InvalidArgument), error
        assert (error.reason, error.field) == ("SAMPLING_PARAM_OUT_OF_RANGE", "sampling.top_p")
        error = await refused(client, max_tokens=1 << 20)
        assert isinstance(error, errors.ResourceExhausted), error
        assert (error.reason, error.retry_after) == ("TENANT_QUOTA_EXCEEDED", -1.0)
        assert error.request_id


async def refused(client: AsyncClient, **options: object) -> RpcError:
    return await failure(client.generate(PROMPT, **options).collect_all())  # type: ignore[arg-type]


async def failure(call: Awaitable[object]) -> RpcError:
    """What a call that must fail raises."""
    try:
        await call
    except RpcError as error:
        return error
    raise AssertionError("the call succeeded")


async def main() -> None:
    for check in (stream, cancel, deadline, wrong_key, details):
        async with asyncio.timeout(PATIENCE):
            await check()
        print(f"ok {check.__name__}")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
