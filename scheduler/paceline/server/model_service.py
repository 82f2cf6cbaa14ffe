"""`paceline.v1.ModelService`: what is served, and its tokenizer."""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeAlias

import grpc

from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationBounds
from paceline.engine import AsyncEngine, Engine
from paceline.errors import InvalidArgument
from paceline.server.calls import current_call, loaded
from paceline.server.convert import MODES, check_model, read_chat
from paceline.v1 import generation_pb2, model_pb2_grpc
from paceline.v1 import model_pb2 as pb

MODEL_SERVICE: Final = pb.DESCRIPTOR.services_by_name["ModelService"].full_name

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

# Ids of more tokens than this are written in another thread: about a millisecond's worth.
MANY_IDS: Final = 1 << 15


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """Answers UNAVAILABLE until `open` gives it an engine; while that drains, and when it has failed, it answers on."""

    def __init__(self) -> None:
        self._engine: AsyncEngine | None = None

    def open(self, engine: AsyncEngine) -> None:
        """From now on, tell of `engine`."""
        self._engine = engine

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        engine = self._serving(request.model).engine
        return pb.GetModelResponse(model=describe(engine, current_call().caller.tenant))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        engine = loaded(self._engine).engine
        caller = current_call().caller
        usable = caller.may_use(engine.model_name, caller.tenant or "")
        return pb.ListModelsResponse(models=[describe(engine, caller.tenant)] if usable else [])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        engine, tenant = self._serving(request.model), current_call().caller.tenant or ""
        match request.WhichOneof("prompt"):
            case "text":
                ids = await engine.tokenize(request.text, "text", tenant=tenant)
            case "chat":
                ids = await engine.tokenize(read_chat(request.chat), tenant=tenant)
            case _:
                raise InvalidArgument("prompt", None, "one of text and chat")
        if len(ids) > MANY_IDS:
            return await asyncio.to_thread(pb.TokenizeResponse, token_ids=ids)
        return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        engine, tenant = self._serving(request.model), current_call().caller.tenant or ""
        text = await engine.detokenize(request.token_ids, request.include_special_tokens, tenant=tenant)
        return pb.DetokenizeResponse(text=text)

    def _serving(self, model: str) -> AsyncEngine:
        """The engine of that model, if it is for the caller."""
        engine = loaded(self._engine)
        check_model(model, engine.engine.model_name)
        caller = current_call().caller
        caller.check_model(engine.engine.model_name, caller.tenant or "")
        return engine


def describe(engine: Engine, tenant: str | None) -> pb.Model:
    """The model, as far as the tenant may use it; None: who may act for any."""
    config = engine.scheduler.config
    bounds = SpeculationBounds() if tenant is None else engine.scheduler.tenants.policy(tenant).speculation
    methods = [method for method in Method if method in engine.methods & bounds.allowed]
    methods.sort(key=lambda method: method is not config.method)
    depths = [depth for depth in (config.max_depth, bounds.highest) if depth is not None]
    return pb.Model(
        name=engine.model_name,
        max_model_len=config.max_model_len,
        vocab_size=engine.vocab_size,
        eos_token_ids=config.eos_token_ids,
        speculation_modes=[MODES[method] for method in methods],
        max_draft_tokens=min(depths),
        default_sampling=write_sampling(engine.default_sampling),
        has_chat_template=engine.tokenizer.has_chat_template,
        has_structured_output=engine.grammars is not None,
        max_logprobs=engine.max_logprobs,
    )


def write_sampling(sampling: SamplingParams) -> generation_pb2.SamplingParams:
    """With every scalar set, but a seed only where there is one."""
    # Both sides have the same names.
    fields = generation_pb2.SamplingParams.DESCRIPTOR.fields
    given = {field.name: getattr(sampling, field.name) for field in fields}
    return generation_pb2.SamplingParams(**given | {"logit_bias": dict(sampling.logit_bias)})
