"""An engine without a model: the scripted runner, and a tokenizer whose vocabulary is as hard on text as any."""

from __future__ import annotations

import codecs
import threading
from collections.abc import Callable, Sequence

from paceline.core.config import SchedulerConfig
from paceline.core.depth_policy import FixedDepth
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams, StopParams
from paceline.core.plan import StepPlan, StepResult, StepRunner
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.engine.engine import Engine
from paceline.engine.request import ChatMessage, GenerationRequest
from paceline.sim import ScriptedRunner, VirtualClock, reference_output

VOCAB_SIZE = 997
SPECIAL = 996

# Pieces behind the 256 bytes: whole words, whole characters, and characters cut in two.
PIECES = (
    *(b" the", b"ab", b"bc", b"c", b"\n\n", b"", b" a", b"END"),
    *("é".encode(), "é".encode()[:1], "é".encode()[1:]),
    *("€".encode(), "€".encode()[:2], "€".encode()[2:]),
    *("🚴".encode(), "🚴".encode()[:3], b"\x80\xb4x", b"y\xf0\x9f"),
)


class ToyDecoder:
    """Implements `TokenDecoder` with Python's own incremental UTF-8."""

    def __init__(self, special_text: bytes) -> None:
        self._special_text = special_text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._special_text if token_id == SPECIAL else ToyTokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class ToyTokenizer:
    """Implements `Tokenizer`. Ids below 256 are bytes, the others are pieces in turn, and the last one is special."""

    vocab_size = VOCAB_SIZE
    has_chat_template = True

    def __init__(self) -> None:
        self.threads: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread().name)
        return list(text.encode())

    def apply_chat_template(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self.encode("".join(f"<{message.role}>{message.content}" for message in messages) + "<assistant>")

    def encode_words(self, text: str) -> list[int]:
        return list(text.encode())

    def decoder(self, prompt_token_ids: Sequence[int], *, special_tokens: bool) -> ToyDecoder:
        return ToyDecoder(b"<special>" if special_tokens else b"")

    @staticmethod
    def token_bytes(token_id: int) -> bytes:
        if token_id == SPECIAL:
            return b""
        return bytes([token_id]) if token_id < 256 else PIECES[(token_id - 256) % len(PIECES)]


def decode(token_ids: Sequence[int]) -> str:
    """All ids at once."""
    return b"".join(map(ToyTokenizer.token_bytes, token_ids)).decode(errors="replace")


def make_engine(
    *,
    num_blocks: int = 64,
    depth: int = 3,
    method: Method = Method.DRAFT_MODEL,
    eos_token_ids: tuple[int, ...] = (),
    draft_is_right: Callable[[int, int], bool] = lambda request_id, position: position % 5 != 0,
    wrap: Callable[[ScriptedRunner], StepRunner] = lambda runner: runner,
    **settings: int,
) -> Engine:
    """Blocks of 4 tokens; drafts are wrong at every fifth position unless told otherwise."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 200} | settings
    config = SchedulerConfig(num_blocks, 4, method=method, eos_token_ids=eos_token_ids, **limits)
    runner = ScriptedRunner(num_blocks, 4, draft_is_right)
    methods = [Method.NGRAM, method]
    scheduler = Scheduler(config, SpeculationControl(FixedDepth(depth)))
    return Engine(scheduler, wrap(runner), ToyTokenizer(), "toy", methods=methods, clock=VirtualClock())


def make_request(
    prompt: str | Sequence[int] = (1, 2, 3), max_tokens: int | None = 20, strings: tuple[str, ...] = (), **stop: object
) -> GenerationRequest:
    params = StopParams(max_tokens, strings, **stop)  # type: ignore[arg-type]
    return GenerationRequest(prompt, SamplingParams(temperature=0.0), params, SpeculationParams())


def expected(prompt: Sequence[int], num_tokens: int) -> tuple[tuple[int, ...], str]:
    """The ids and the text that the scripted model gives."""
    token_ids = reference_output(prompt, num_tokens)
    return tuple(token_ids), decode(token_ids)


def num_free(engine: Engine) -> int:
    return engine.scheduler.kv.num_free_blocks


class GatedRunner:
    """Each step waits in its worker thread until the test lets it run; `started` counts the steps that wait or ran."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner
        self.gate = threading.Semaphore(0)
        self.started = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.started += 1
        assert self.gate.acquire(timeout=60), "nobody opened the gate"
        return self.runner.execute(plan)


class FailingRunner:
    """Fails at one step, and at every one after it."""

    def __init__(self, runner: StepRunner, at_step: int) -> None:
        self.runner = runner
        self.at_step = at_step

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step_id >= self.at_step:
            raise RuntimeError("secret of the house")
        return self.runner.execute(plan)
