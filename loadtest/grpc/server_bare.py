"""The least that grpc.aio can do: a token of text for every stream at every step. Prints its port first."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop
from servers import STEP_SECONDS, TOKEN, answer_stdin

from paceline.server.app import OPTIONS
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc


class Bare(generation_pb2_grpc.GenerationServiceServicer):
    """What a stream has missed while a write was blocked goes out in one message."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.freed: list[float] = []  # when streams ended, in seconds of `time.monotonic()`
        self._next = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + STEP_SECONDS, loop.time())
            await asyncio.sleep(due - loop.time())
            self.steps += 1
            self._next.set()
            self._next = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        sent, began = 0, self.steps
        try:
            while True:
                if self.steps - began == sent:
                    await self._next.wait()
                new = self.steps - began - sent
                response = pb.GenerateResponse()
                response.token_offset = sent
                response.text = TOKEN * new
                await context.write(response)
                sent += new
                self.tokens += new
        finally:
            self.freed.append(time.monotonic())

    async def GenerateMany(self, requests: AsyncIterator[pb.GenerateManyRequest], context: Any) -> None:
        began: dict[int, int] = {}  # key -> the step before its first

        async def read() -> None:
            async for request in requests:
                began[request.key] = self.steps

        reader = asyncio.create_task(read())
        sent = self.steps
        try:
            while True:
                if self.steps == sent:
                    await self._next.wait()
                now = self.steps
                message = pb.GenerateManyResponse()
                for key, start in began.items():
                    first = max(sent, start)
                    if first < now:
                        keyed = message.responses.add()
                        keyed.key = key
                        keyed.response.token_offset = first - start
                        keyed.response.text = TOKEN * (now - first)
                        self.tokens += now - first
                sent = now
                if message.responses:
                    await context.write(message)
        finally:
            reader.cancel()


async def main() -> None:
    server = grpc.aio.server(options=OPTIONS)
    bare = Bare()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(bare, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    steps = asyncio.create_task(bare.run())
    print(port, flush=True)
    await answer_stdin(lambda: {"engine_seconds": 0.0, "tokens": bare.tokens, "freed": bare.freed})
    steps.cancel()
    await server.stop(0)


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
