"""What a tenant notices of another's flood, on a served model.

    python loadtest/grpc/isolation.py --model demo --draft demo

One tenant sends one request after the other; another keeps requests of the greatest size waiting. With and without the
flood in turns (A B A B). The longest step is taken for the longest gap between two messages of a stream of the flood.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated

import numpy as np
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from paceline.client import AsyncClient, RpcError
from paceline.demo.server import server

TENANTS = """
[tenants.steady]
[tenants.flood]
max_queued = 64
"""
PROMPT = "def add(a, b):\n    "


@dataclass(slots=True)
class Seen:
    """Seconds.

    Attributes:
        first: to the first token of each request.
        per_token: mean time of the tokens after it, of each request.
        longest_gap: between two messages of the flood.
    """

    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    longest_gap: float = 0.0

    def p99(self) -> float:
        return float(np.percentile(self.first, 99))


async def _steady(client: AsyncClient, seen: Seen, requests: int, prompt: list[int], tokens: int) -> None:
    for _ in range(requests):
        began = time.perf_counter()
        times: list[tuple[float, int]] = []
        generation = client.generate(
            prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, tenant="steady", content="token_ids"
        )
        async for delta in generation:
            times.append((time.perf_counter(), len(delta.token_ids)))
        seen.first.append(times[0][0] - began)
        seen.per_token.append((times[-1][0] - times[0][0]) / max(1, sum(count for _, count in times[1:])))


async def _flood(client: AsyncClient, seen: Seen, prompt: list[int], tokens: int) -> None:
    while True:
        last = None
        try:
            async for _ in client.generate(
                prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, tenant="flood", content="token_ids"
            ):
                now = time.perf_counter()
                if last is not None:
                    seen.longest_gap = max(seen.longest_gap, now - last)
                last = now
        except RpcError:
            await asyncio.sleep(0.05)


async def _measure(address: str, requests: int, rounds: int, streams: int, tokens: int) -> tuple[Seen, Seen]:
    alone, beside = Seen(), Seen()
    async with AsyncClient(address) as client:
        [model] = await client.models()
        short = list(await client.tokenize(PROMPT))
        room = model.max_model_len - tokens - 1
        whole = (short * (room // len(short) + 1))[:room]
        await _steady(client, Seen(), 3, short, tokens)
        for _ in range(rounds):
            await _steady(client, alone, requests, short, tokens)
            floods = [
                asyncio.create_task(_flood(client, beside, [number % model.vocab_size, *whole[1:]], tokens))
                for number in range(streams)
            ]
            await asyncio.sleep(5.0)
            await _steady(client, beside, requests, short, tokens)
            for task in floods:
                task.cancel()
            await asyncio.gather(*floods, return_exceptions=True)
            await asyncio.sleep(1.0)
    return alone, beside


def main(
    model: Annotated[str, typer.Option(metavar="DIR|demo")] = "demo",
    draft: Annotated[str, typer.Option(metavar="DIR|demo|ngram|none")] = "demo",
    requests: Annotated[int, typer.Option(min=1, help="Of the steady tenant, in each round.")] = 40,
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    streams: Annotated[int, typer.Option(min=1, help="Requests that the flood keeps up.")] = 96,
    tokens: Annotated[int, typer.Option(min=2, help="Of each completion.")] = 64,
    option: Annotated[list[str] | None, typer.Option(help="Of the server: --option=--max-slowdown=inf")] = None,
) -> None:
    """Measure, and print a table with the bars."""

    async def run() -> tuple[Seen, Seen]:
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(TENANTS)
            file.flush()
            options = ("--model", model, "--draft", draft, "--tenants", file.name, *(option or []))
            async with server(*options) as address:
                return await _measure(address, requests, rounds, streams, tokens)

    alone, beside = uvloop.run(run())
    bound = 2.0 * alone.p99() + 2.0 * beside.longest_gap
    per_token = median(beside.per_token) / median(alone.per_token)
    table = Table(title=f"{model} with draft {draft}: one tenant alone, and beside a flood of {streams} requests")
    for name in ("", "alone", "beside", "bar", ""):
        table.add_column(name, justify="right")
    first = f"{1000 * alone.p99():.0f}", f"{1000 * beside.p99():.0f}", f"<= {1000 * bound:.0f}"
    table.add_row("first token p99, ms", *first, "holds" if beside.p99() <= bound else "missed")
    times = f"{1000 * median(alone.per_token):.1f}", f"{1000 * median(beside.per_token):.1f}"
    table.add_row("per token p50, ms", *times, f"{per_token:.2f} x <= 1.5", "holds" if per_token <= 1.5 else "missed")
    table.add_row("longest gap of the flood, ms", "", f"{1000 * beside.longest_gap:.0f}", "", "")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
