"""A real gRPC server on a real port, around the scripted runner: no model, no torch, steps under the test's control."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from paceline.core.config import SchedulerConfig
from paceline.core.depth_policy import FixedDepth
from paceline.core.method import Method
from paceline.core.params import SamplingParams
from paceline.core.plan import StepPlan, StepResult
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.engine import AsyncEngine, ChatMessage, Engine
from paceline.server import GrpcServer, ServerSettings
from paceline.server.calls import Gate
from paceline.server.watch import ReaderBounds
from paceline.sim import ScriptedRunner
from paceline.sim.scripted_runner import VOCAB_SIZE
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc

MODEL = "scripted"
NUM_BLOCKS = 1024
BLOCK_SIZE = 4
MAX_MODEL_LEN = 2048
EOS = 990
PATIENCE = 60.0  # seconds after which a test that waits has failed; nothing is asserted about time


class ToyDecoder:
    def __init__(self, width: int = 1) -> None:
        self.width = width

    def push(self, token_id: int) -> str:
        return "" if token_id == EOS else chr(ord("a") + token_id % 26) * self.width

    def flush(self) -> str:
        return ""


class ToyTokenizer:
    """Prompts are their bytes; every token but EOS is shown as one letter, `width` times."""

    vocab_size = VOCAB_SIZE
    has_chat_template = True

    def __init__(self, width: int = 1) -> None:
        self.width = width

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self.encode("".join(f"{message.role}: {message.content}\n" for message in messages))

    def encode_words(self, text: str) -> list[int]:
        return self.encode(text)

    def decoder(self, prompt_token_ids: Sequence[int], *, special_tokens: bool) -> ToyDecoder:
        return ToyDecoder(self.width)


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(map(ToyDecoder().push, token_ids))


class GatedRunner(ScriptedRunner):
    """Executes steps as the test allows them, in the engine's worker thread.

    Attributes:
        steps: steps executed.
        failure: raised by the next step, if set.
    """

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE)
        self.steps = 0
        self.failure: Exception | None = None
        self._permits = threading.Semaphore(0)
        self._open = threading.Event()

    def allow(self, steps: int) -> None:
        self._permits.release(steps)

    def open(self) -> None:
        """Let every step run."""
        self._open.set()

    def close(self) -> None:
        """Let no more steps begin."""
        self._open.clear()

    def execute(self, plan: StepPlan) -> StepResult:
        while not self._open.is_set() and not self._permits.acquire(timeout=0.01):
            pass
        self.steps += 1
        if self.failure is not None:
            raise self.failure
        return super().execute(plan)


class Serving:
    """A server, its parts and a channel to it.

    Attributes:
        address: "HOST:PORT".
    """

    def __init__(
        self,
        lag: int,
        max_queued: int,
        width: int,
        settings: ServerSettings | None,
        gate: Gate | None,
        credentials: grpc.ServerCredentials | None,
        bounds: ReaderBounds,
    ) -> None:
        config = SchedulerConfig(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_queued=max_queued,
            method=Method.NGRAM,
            eos_token_ids=(EOS,),
        )
        self.scheduler = Scheduler(config, SpeculationControl(FixedDepth(2)))
        self.runner = GatedRunner()
        default = SamplingParams(temperature=0.0)
        engine = Engine(self.scheduler, self.runner, ToyTokenizer(width), MODEL, default_sampling=default)
        self.engine = AsyncEngine(engine, lag=lag)
        self.server = GrpcServer(gate, settings, bounds)
        self.address = f"127.0.0.1:{self.server.bind('127.0.0.1', 0, credentials)}"
        self.channel = grpc.aio.insecure_channel(self.address)
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let everything else run until the condition holds."""
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110, the scheduler has no event for a test to wait on
                await asyncio.sleep(0.001)

    @property
    def idle(self) -> bool:
        """No request is live, and no block is taken."""
        return not self.scheduler.has_requests and self.scheduler.kv.num_free_blocks == NUM_BLOCKS


@asynccontextmanager
async def serving(
    lag: int = 0,
    max_queued: int = 4096,
    width: int = 1,
    open_engine: bool = True,
    settings: ServerSettings | None = None,
    gate: Gate | None = None,
    credentials: grpc.ServerCredentials | None = None,
    bounds: ReaderBounds = ReaderBounds(),
) -> AsyncIterator[Serving]:
    """A server whose steps are not allowed to begin with.

    Args:
        width: letters that a token is shown as.
        open_engine: whether the server has its engine from the start.
        credentials: for TLS; the channel that comes along is of no use then.
    """
    made = Serving(lag, max_queued, width, settings, gate, credentials, bounds)
    await made.server.start()
    made.engine.start()
    if open_engine:
        made.server.open(made.engine)
    try:
        yield made
    finally:
        made.runner.open()
        await made.channel.close()
        await made.server.stop(0)
        await made.engine.stop()


def request(text: str = "hello", max_tokens: int = 8, **fields: object) -> pb.GenerateRequest:
    """A request that wants text and ids, and ends by its length alone."""
    made = pb.GenerateRequest(
        prompt_text=text,
        stop=pb.StopParams(max_tokens=max_tokens, ignore_eos=True),
        output=pb.OutputParams(content=pb.OUTPUT_CONTENT_TEXT_AND_TOKEN_IDS),
    )
    made.MergeFrom(pb.GenerateRequest(**fields))  # type: ignore[arg-type]
    return made


async def failure(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> grpc.aio.AioRpcError:
    """The status of a call that must fail."""
    try:
        responses = [response async for response in call]
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"the call succeeded: {responses}")


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Message]:
    """The typed details of a status, by name; checks that they belong to it."""
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    names = ("ErrorInfo", "BadRequest", "QuotaFailure", "ResourceInfo", "RetryInfo")
    kinds = [getattr(error_details_pb2, name) for name in names]
    found: dict[str, Message] = {}
    for packed in status.details:
        kind = next(kind for kind in kinds if packed.Is(kind.DESCRIPTOR))
        found[kind.DESCRIPTOR.name] = message = kind()
        packed.Unpack(message)
    return found
