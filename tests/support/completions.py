"""What gRPC still has to hand out when a test has ended."""

from __future__ import annotations

from contextlib import suppress

import grpc
import grpc.aio


async def hand_out_completions() -> None:
    """Wait until gRPC has handed out the completions that it has queued for this loop.

    A cancelled task does not wait for that of its operation, and all loops of a process have one queue: the next loop
    would find it there, and fail to hand it to one that is closed. The queue keeps their order, and so a call of our
    own comes after them; it fails at once.
    """
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with suppress(grpc.aio.AioRpcError):
            await channel.unary_unary("/test.Completions/Last")(b"", timeout=0)
