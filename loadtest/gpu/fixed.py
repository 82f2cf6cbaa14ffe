"""The fixed requests of random load, by whose tokens it sees whether the engine still says the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from offers import GRAMMARS

from paceline.core.method import Method
from paceline.core.params import LogprobsParams, SamplingParams, SpeculationParams, StopParams
from paceline.engine import GenerationRequest


def fixed_requests(
    vocab_size: int, longest: int, methods: Sequence[Method], *, grammars: bool
) -> dict[str, GenerationRequest]:
    """Requests that have to give the same tokens whenever they are served alone; whatever starts threads is among them.

    Prompts are shorter than a block of KV, or want logprobs: nothing of them is found in the prefix cache, which would
    leave other rows to compute, and on a GPU another rounding. Depths are fixed for the same reason.
    """
    choose = random.Random(0)
    period = tuple(choose.choices(range(vocab_size), k=4))
    stop = StopParams(max_tokens=40, ignore_eos=True)
    depths = [(method, 0 if method is Method.NONE else 4) for method in methods]
    requests = {}
    for what, sampling in (
        ("greedy", SamplingParams(temperature=0.0)),
        ("seeded", SamplingParams(temperature=0.9, top_p=0.95, seed=7)),
    ):
        for method, depth in depths:
            bounds = SpeculationParams(method, depth, depth)
            requests[f"{what}, {method}"] = GenerationRequest(period * 3, sampling, stop, bounds)
    bounds = SpeculationParams(Method.NONE)
    penalised = SamplingParams(temperature=0.0, frequency_penalty=0.4, bad_words=("self",))
    requests["greedy, penalties"] = GenerationRequest(period * 2, penalised, stop, bounds)
    long = tuple(choose.choices(range(vocab_size), k=min(100, longest // 2)))
    requests["greedy, logprobs of a long prompt"] = GenerationRequest(
        long, SamplingParams(temperature=0.0), replace(stop, max_tokens=16), bounds, LogprobsParams(0, 0)
    )
    if grammars:
        words = GRAMMARS[0]
        requests["seeded, words"] = GenerationRequest(period, SamplingParams(seed=8), stop, bounds, grammar=words)
    return requests
