"""Seeded and greedy output is a function of weights, prompt, parameters and seed: whatever the batch, the depth, the
drafter, the chunks, preemption or a restart.

On the native backend to the last token, in every format. In torch and on GPUs, in float32, but for near-ties of the
reference, noise added: transformers' logits, the oracle of the chain, and noise worked out anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline import demo
from paceline.client import AsyncClient
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams, StopParams, Verification
from paceline.engine import Engine, GenerationRequest
from paceline.models import NativeDecoder, load_model_config
from paceline.models.config import DTYPES
from paceline.runner import KVCache
from paceline.wiring import EngineSettings, build_engine
from support.backends import DEVICE
from support.native import device_of, needs_compiler
from support.reference import Asked, Completed, complete, same_but_for_near_ties

BATCH = 16
TOKENS = 24
MAX_LEN = 96
BLOCK_SIZE = 8
MAX_NEAR_TIES = 2  # of 16 requests
PATIENCE = 120  # seconds until a server that hangs is a failure; nothing is asserted about time

Outputs = list[tuple[int, ...]]


@cache
def prompts() -> list[tuple[int, ...]]:
    """16 pieces of held-out source text, of 2 to 60 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(demo.TARGET)
    lines = demo.HELD_OUT_PROMPTS.read_text().splitlines()[:BATCH]
    rng = random.Random(3)
    return [tuple(tokenizer.encode(json.loads(line)["prompt"])[: rng.randint(2, 60)]) for line in lines]


def sampling(index: int) -> SamplingParams:
    """Every fourth request is greedy, the others have seeds; each has features of its own."""
    greedy = index % 4 == 3
    return SamplingParams(
        temperature=0.0 if greedy else 0.4 + 0.05 * index,
        seed=None if greedy else (index << 33) + 7 * index,
        top_k=(0, 40)[index % 2],
        top_p=(1.0, 0.95, 0.9)[index % 3],
        min_p=0.02 if index % 5 == 1 else 0.0,
        typical_p=0.95 if index % 7 == 2 else 1.0,
        repetition_penalty=1.2 if index % 3 == 1 else 1.0,
        frequency_penalty=0.5 if index % 4 == 2 else 0.0,
        presence_penalty=-0.3 if index % 5 == 3 else 0.0,
    )


@dataclass(frozen=True)
class Variation:
    """Circumstances that change nothing.

    Attributes:
        depth: None is auto.
        small: KV memory for a few requests only, so that some are preempted.
    """

    method: Method = Method.NONE
    depth: int | None = 0
    alone: bool = False
    max_num_batched_tokens: int = 512
    small: bool = False
    n: int = 1
    company: bool = False

    def requests(self) -> list[GenerationRequest]:
        speculation = SpeculationParams(method=self.method, min_depth=self.depth or 0, max_depth=self.depth)
        stop = StopParams(max_tokens=TOKENS, ignore_eos=True)
        return [
            GenerationRequest(prompt, sampling(index), stop, speculation, n=self.n)
            for index, prompt in enumerate(prompts())
        ]


NGRAM, DRAFT_MODEL = Method.NGRAM, Method.DRAFT_MODEL
VARIATIONS = {
    "alone": Variation(alone=True),
    "alone, draft_model 4": Variation(DRAFT_MODEL, 4, alone=True),
    **{
        f"{method} {depth or 'auto'}": Variation(method, depth)
        for method in (NGRAM, DRAFT_MODEL)
        for depth in (1, 4, 8, None)
    },
    "chunks": Variation(max_num_batched_tokens=BATCH),
    "chunks, draft_model 4": Variation(DRAFT_MODEL, 4, max_num_batched_tokens=BATCH),
    "preempted": Variation(small=True),
    "preempted, ngram auto": Variation(NGRAM, None, small=True),
    "preempted, draft_model 4": Variation(DRAFT_MODEL, 4, small=True),
    "n = 2": Variation(n=2),
    "n = 2, draft_model 4": Variation(DRAFT_MODEL, 4, n=2),
    "among others": Variation(DRAFT_MODEL, 4, company=True),
}


@dataclass(frozen=True)
class Mode:
    backend: str
    dtype: str
    quantization: str = "none"

    def __str__(self) -> str:
        return f"{self.backend}, {self.dtype}{'' if self.quantization == 'none' else ', ' + self.quantization}"

    def settings(self, variation: Variation) -> EngineSettings:
        num_blocks = 2 * MAX_LEN // BLOCK_SIZE if variation.small else BATCH * MAX_LEN // BLOCK_SIZE * 2
        lanes = NativeDecoder.kv_lanes if self.backend == "native" else 1
        per_block = sum(
            KVCache.bytes_per_block(load_model_config(path), BLOCK_SIZE, DTYPES[self.dtype], lanes)
            for path in (demo.TARGET, demo.DRAFT)
        )
        return EngineSettings(
            model="demo",
            draft="demo",
            dtype=self.dtype,
            backend=self.backend,
            quantization=self.quantization,
            draft_quantization=self.quantization,
            reproducible=self.backend == "native",
            device=device_of(self.backend),
            max_model_len=MAX_LEN,
            max_num_seqs=BATCH,
            max_num_batched_tokens=variation.max_num_batched_tokens,
            block_size=BLOCK_SIZE,
            kv_cache_memory=num_blocks * per_block,
        )


TORCH = Mode("torch", "float32")
NATIVE = [Mode("native", "float32"), Mode("native", "bfloat16"), Mode("native", "bfloat16", "int8")]
MODES = [
    *(pytest.param(mode, id=str(mode), marks=needs_compiler) for mode in NATIVE),
    *(pytest.param(mode, id=str(mode)) for mode in [Mode("triton", "float32")] if DEVICE.type == "cuda"),
    pytest.param(TORCH, id="torch"),
]


@cache
def engine_for(settings: EngineSettings) -> Engine:
    return build_engine(settings)


def generate(engine: Engine, requests: Sequence[GenerationRequest]) -> tuple[Outputs, int]:
    """The completions, the n of each request side by side; and how often one was preempted."""
    firsts = [engine.add(request) for request in requests]
    ids = [first + choice for first, request in zip(firsts, requests, strict=True) for choice in range(request.n)]
    outputs: dict[int, list[int]] = {request_id: [] for request_id in ids}
    preemptions = 0
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].extend(output.token_ids)
            preemptions += 0 if output.stats is None else output.stats.preemptions
    return [tuple(outputs[request_id]) for request_id in ids], preemptions


def vary(mode: Mode, variation: Variation) -> Outputs:
    """What the 16 requests are completed with, choice 0 of each."""
    engine = engine_for(mode.settings(variation))
    requests = variation.requests()
    if variation.alone:
        return [generate(engine, [request])[0][0] for request in requests]
    if variation.company:
        others = [replace(request, sampling=SamplingParams()) for request in requests]
        return generate(engine, [*others, *requests])[0][BATCH:]
    outputs, preemptions = generate(engine, requests)
    assert bool(preemptions) == variation.small
    return outputs[:: variation.n]


@cache
def baseline(mode: Mode) -> Outputs:
    """With speculation off, in a batch of 16."""
    return vary(mode, Variation())


@cache
def reference() -> list[Completed]:
    model = AutoModelForCausalLM.from_pretrained(demo.TARGET, dtype=torch.float32)
    return complete(model, [Asked(prompt, TOKENS, sampling(index)) for index, prompt in enumerate(prompts())])


def count_near_ties(found: Outputs) -> int:
    return sum(not same_but_for_near_ties(ids, known) for ids, known in zip(found, reference(), strict=True))


@pytest.mark.parametrize("name", VARIATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_circumstances_change_nothing(mode: Mode, name: str, record_property: pytest.RecordProperty) -> None:
    found = vary(mode, VARIATIONS[name])
    if mode.backend == "native":
        assert found == baseline(mode)
        return
    near_ties = count_near_ties(found)
    record_property("near_ties", near_ties)
    print(f"{near_ties} near-ties")
    assert near_ties <= MAX_NEAR_TIES, "near-ties are rare: so many are a mistake"


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.values[0].dtype == "float32"])
def test_the_baseline_is_the_oracle(mode: Mode, record_property: pytest.RecordProperty) -> None:
    near_ties = count_near_ties(baseline(mode))
    record_property("near_ties", near_ties)
    assert near_ties <= MAX_NEAR_TIES


def test_drafts_are_accepted_by_the_coupled_rule() -> None:
    """Or the variations above would show little."""
    engine = engine_for(TORCH.settings(Variation()))
    for method in (NGRAM, DRAFT_MODEL):
        counts = engine.scheduler.speculation.drafters[method, Verification.COUPLED].counts
        before = counts.accepted
        generate(engine, Variation(method, 4).requests())
        assert counts.accepted > before


@pytest.mark.parametrize("method", list(Method))
def test_choices_of_a_seed_differ(method: Method) -> None:
    engine = engine_for(TORCH.settings(Variation()))
    requests = Variation(method, 0 if method is Method.NONE else 4, n=3).requests()
    outputs, _ = generate(engine, requests)
    for index, request in enumerate(requests):
        choices = set(outputs[3 * index : 3 * index + 3])
        assert len(choices) == (1 if request.sampling.greedy else 3)


def test_seeds_differ() -> None:
    engine = engine_for(TORCH.settings(Variation()))
    plain = SamplingParams(temperature=1.0)
    [request, *_] = Variation().requests()
    # Seeds that are the same in one half of their 64 bits.
    seeds = (0, 1, 1 << 32, (1 << 32) + 1, (1 << 64) - 1)
    outputs, _ = generate(engine, [replace(request, sampling=replace(plain, seed=seed)) for seed in seeds])
    assert len(set(outputs)) == len(seeds)


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@needs_compiler
async def test_a_restart_changes_nothing(dtype: str) -> None:
    """Two server processes one after the other, with other numbers of threads, and the engine of this process."""
    expected = await asyncio.to_thread(baseline, Mode("native", dtype))
    assert [await _ask_a_server(dtype, num_threads) for num_threads in (1, 2)] == [expected] * 2


async def _ask_a_server(dtype: str, num_threads: int) -> Outputs:
    async with _server("--dtype", dtype, num_threads=num_threads) as target, AsyncClient(target) as client:
        calls = (
            client.complete(prompt, max_tokens=TOKENS, ignore_eos=True, **_options(sampling(index)))
            for index, prompt in enumerate(prompts())
        )
        completions = await asyncio.gather(*calls)
    return [tuple(completion.token_ids) for completion in completions]


def _options(params: SamplingParams) -> dict[str, Any]:
    return {name: value for name, value in asdict(params).items() if value not in (None, ())}


@asynccontextmanager
async def _server(*options: str, num_threads: int) -> AsyncIterator[str]:
    """`paceline serve` in a process of its own, started as quickly as engines are in this one; yields HOST:PORT."""
    program = "from support import quick_start; from paceline.__main__ import main; main()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, "serve", "--model", "demo", "--draft", "demo", "--port", "0"),
        *("--device", "cpu", "--reproducible", "--max-model-len", str(MAX_LEN), *options),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": str(num_threads), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE):
            line = (await process.stdout.readline()).decode().strip()
        assert line.startswith("serving on "), line
        yield line.removeprefix("serving on ")
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            await process.wait()
