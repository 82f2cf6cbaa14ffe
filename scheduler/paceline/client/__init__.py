"""The clients of Paceline: they need grpcio and protobuf, nothing of the engine. docs/client.md shows them.

from paceline.client import AsyncClient

async with AsyncClient("127.0.0.1:50051") as client:
    async for delta in client.generate("def add(a, b):", max_tokens=64, temperature=0.0):
        print(delta.text, end="")
"""

from paceline.client.admin import (
    DrafterStats,
    Drained,
    LiveRequest,
    Load,
    ServerStats,
    SpeculationReport,
    TenantStats,
)
from paceline.client.client import AsyncClient
from paceline.client.connection import CallOptions, ClientOptions
from paceline.client.errors import RpcError
from paceline.client.generation import Generation
from paceline.client.health import HealthStatus
from paceline.client.many import ManyGenerations
from paceline.client.models import Model
from paceline.client.request import (
    ChatMessage,
    Content,
    GenerateOptions,
    Prompt,
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
from paceline.client.sync import Client, SyncGeneration
from paceline.options import LogprobsMode, Speculation, Verification

__all__ = [
    "AsyncClient",
    "CallOptions",
    "ChatMessage",
    "Client",
    "ClientOptions",
    "Completion",
    "Content",
    "Delta",
    "DrafterStats",
    "Drained",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "Generation",
    "HealthStatus",
    "LiveRequest",
    "Load",
    "LogprobsMode",
    "ManyGenerations",
    "Model",
    "Prompt",
    "RpcError",
    "ServerStats",
    "Speculation",
    "SpeculationReport",
    "SpeculationStats",
    "Started",
    "SyncGeneration",
    "TenantStats",
    "Timing",
    "TokenLogprobs",
    "Usage",
    "Verification",
    "build_request",
]
