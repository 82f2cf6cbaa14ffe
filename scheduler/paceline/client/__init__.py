"""The async client of Paceline: needs grpcio and protobuf, nothing of the engine.

from paceline.client import AsyncClient

async with AsyncClient("127.0.0.1:50051") as client:
    async for delta in client.generate("def add(a, b):", max_tokens=64, temperature=0.0):
        print(delta.text, end="")
"""

from paceline.client.client import AsyncClient, HealthStatus
from paceline.client.errors import RpcError
from paceline.client.generation import Generation
from paceline.client.request import (
    ChatMessage,
    Content,
    GenerateOptions,
    LogprobsMode,
    Prompt,
    Speculation,
    Verification,
    build_request,
)
from paceline.client.results import (
    Completion,
    Delta,
    Finished,
    FinishReason,
    SpeculationStats,
    Started,
    Timing,
    TokenLogprobs,
    Usage,
)

__all__ = [
    "AsyncClient",
    "ChatMessage",
    "Completion",
    "Content",
    "Delta",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "Generation",
    "HealthStatus",
    "LogprobsMode",
    "Prompt",
    "RpcError",
    "Speculation",
    "SpeculationStats",
    "Started",
    "Timing",
    "TokenLogprobs",
    "Usage",
    "Verification",
    "build_request",
]
