"""One tenant floods the server with the largest requests that there are; another hardly notices.

The engine's clock goes by what steps would take, which is the longer the more they compute: nothing here depends on how
fast this machine is. `paceline sim docs/examples/flood.toml` shows the same over thousands of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest

from paceline.core.plan import StepPlan, StepTimes
from paceline.sim import StepCost, VirtualClock
from paceline.v1 import generation_pb2 as pb
from support.serving import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, Serving, request, serving

FLOOD: Final = 64  # requests, each as large as the model allows: two of them fill the KV cache
COMPLETION: Final = 256  # tokens of each of them; the rest is prompt
PROBES: Final = 60  # requests of the other tenant, one after the other
TOKENS: Final = 12  # that each of them gets
COST: Final = StepCost(target_pass=0.02, free_rows=256)  # as in docs/examples/flood.toml


class Flood:
    """A server, a clock that goes by its steps, and what was in each of them.

    Args:
        size: requests of tenant a.
    """

    def __init__(self, served: Serving, size: int) -> None:
        self.served = served
        self.size = size
        self.clock = served.engine.engine.clock = VirtualClock()
        self.steps: list[set[int]] = []  # the requests that each had work for
        self.longest_step = 0.0
        served.runner.times = self.times  # type: ignore[method-assign]

    def times(self, plan: StepPlan) -> StepTimes:
        """Nobody waits for it."""
        times = COST.times(plan)
        self.longest_step = max(self.longest_step, times.total)
        self.steps.append({work.request_id for work in plan.work})
        self.clock.advance(times.total)
        return times

    async def begin(self) -> None:
        prompt = MAX_MODEL_LEN - COMPLETION
        for index in range(self.size):
            self.served.stub.Generate(of("a", f"{index:04}" * (prompt // 4), COMPLETION))
        await self.served.until(lambda: self.served.engine.num_live == self.size)
        if self.size:
            await self.step(8)
            assert self.served.scheduler.kv.num_free_blocks < NUM_BLOCKS // 4

    async def step(self, count: int = 1) -> None:
        wanted = self.served.runner.steps + count
        self.served.runner.allow(count)
        await self.served.until(lambda: self.served.runner.steps >= wanted or not self.served.scheduler.has_requests)

    async def probe(self, number: int) -> float:
        """Seconds to the first token of a request of tenant b. From there on, it has a part in every step."""
        served = self.served
        call = served.stub.Generate(of("b", f"request {number} of b", TOKENS))

        async def read() -> pb.Finished:
            return [response async for response in call][-1].finished

        reading = asyncio.create_task(read())
        await served.until(lambda: bool(live_of(served, "b")))
        [request_id] = live_of(served, "b")
        while live_of(served, "b"):
            await self.step()
        had = [index for index, step in enumerate(self.steps) if request_id in step]
        assert had == list(range(had[0], had[-1] + 1))
        return (await reading).timing.time_to_first_token.ToNanoseconds() / 1e9


def live_of(served: Serving, tenant: str) -> list[int]:
    return [number for number, one in served.scheduler.requests.items() if one.tenant == tenant]


def of(tenant: str, text: str, max_tokens: int) -> pb.GenerateRequest:
    return request(text, max_tokens, scheduling=pb.SchedulingParams(tenant=tenant))


@asynccontextmanager
async def flooded(size: int) -> AsyncIterator[Flood]:
    async with serving() as served:
        flood = Flood(served, size)
        await flood.begin()
        yield flood
        assert len(live_of(served, "a")) >= size // 2, "the flood was over too early"
        served.scheduler.check_invariants()


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_flood_hardly_delays_another_tenant() -> None:
    async with flooded(0) as quiet:
        alone = [await quiet.probe(number) for number in range(PROBES)]
    async with flooded(FLOOD) as flood:
        beside = [await flood.probe(number) for number in range(PROBES)]
        assert len(flood.steps) > COMPLETION, "no request of the flood has followed another one"
    assert max(beside) <= 2 * max(alone) + 2 * flood.longest_step


async def test_nothing_computed_for_one_tenant_is_found_by_another(free: Serving) -> None:
    text = "a prompt of several blocks, the same for everybody"
    found: dict[str, list[int]] = {}
    for tenant in ("a", "b", "a", "b", ""):
        responses = [response async for response in free.stub.Generate(of(tenant, text, TOKENS))]
        found.setdefault(tenant, []).append(responses[-1].finished.usage.cached_prompt_tokens)
    again = len(text) // BLOCK_SIZE * BLOCK_SIZE
    assert found == {"a": [0, again], "b": [0, again], "": [0]}
