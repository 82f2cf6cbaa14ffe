"""The engines that are measured: the models in them, and the requests that they serve."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams, StopParams
from paceline.engine import Engine, GenerationRequest
from paceline.models import NativeDecoder
from paceline.runner import ModelRunner
from paceline.speculation import DraftModel
from paceline_kernels.cpu.decoder import Kind

GREEDY = SamplingParams(temperature=0.0)
STEPS = 8  # of an engine, of which the median counts


def target(engine: Engine) -> NativeDecoder:
    assert isinstance(engine.runner, ModelRunner)
    assert isinstance(engine.runner.model, NativeDecoder)
    return engine.runner.model


def draft_model(engine: Engine) -> NativeDecoder:
    assert isinstance(engine.runner, ModelRunner)
    drafter = engine.runner.drafters[Method.DRAFT_MODEL]
    assert isinstance(drafter, DraftModel)
    assert isinstance(drafter.model, NativeDecoder)
    return drafter.model


def kind_of(model: NativeDecoder) -> Kind:
    if model.int8:
        return Kind.INT8
    return Kind.BFLOAT16 if model.dtype == torch.bfloat16 else Kind.FLOAT32


def name_of(model: NativeDecoder) -> str:
    return kind_of(model).name.lower()


def itemsize(model: NativeDecoder) -> int:
    return 1 if model.int8 else model.dtype.itemsize


def random_prompts(engine: Engine, count: int, length: int) -> list[tuple[int, ...]]:
    """Random, so that none begins like another."""
    return [tuple(random.choices(range(engine.vocab_size), k=length)) for _ in range(count)]


def add_requests(engine: Engine, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> None:
    stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
    for prompt in prompts:
        engine.add(GenerationRequest(prompt, GREEDY, stop, SpeculationParams(method=Method.NONE)))
