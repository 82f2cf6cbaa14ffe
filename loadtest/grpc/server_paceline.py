"""Paceline around a model that takes its time and computes nothing. Prints its port first.

server_paceline.py NUM_SEQS STEP_SECONDS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import uvloop
from servers import TOKEN, answer_stdin

from paceline.core.config import SchedulerConfig
from paceline.core.depth_policy import FixedDepth
from paceline.core.params import SamplingParams
from paceline.core.plan import SequenceResult, StepPlan, StepResult
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.engine import AsyncEngine, ChatMessage, Engine, Output
from paceline.garbage import collect_rarely
from paceline.server import GrpcServer

BLOCK_SIZE, CONTEXT = 64, 1 << 14


class Words:
    """Every token is the same word."""

    vocab_size = 1024
    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [0] * len(text)

    encode_words = encode

    def apply_chat_template(self, messages: Sequence[ChatMessage]) -> list[int]:
        return [0] * len(messages)

    def decoder(self, prompt_token_ids: Sequence[int], *, special_tokens: bool) -> Words:
        return self

    def push(self, token_id: int) -> str:
        return TOKEN

    def flush(self) -> str:
        return ""


class PacedRunner:
    """A step ends so many seconds after the one before it, as long as the server keeps up. What it brings a request is
    always the same, and made once: what a model costs is not what is measured.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._due = 0.0
        self._token: dict[int, SequenceResult] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            self._token.pop(request_id, None)
        for admission in plan.admitted:
            self._token[admission.request_id] = SequenceResult(admission.request_id, (0,))
        results = tuple(
            [self._token[work.request_id] if work.samples else SequenceResult(work.request_id) for work in plan.work]
        )
        now = time.monotonic()
        self._due = max(self._due + self.seconds, now)
        time.sleep(self._due - now)
        return StepResult(plan.step_id, results)


class Measured(Engine):
    """An engine that notes what it costs.

    Attributes:
        seconds: of CPU time in planning and committing steps.
        freed: when completions were aborted, in seconds of `time.monotonic()`.
    """

    def __init__(self, scheduler: Scheduler, runner: PacedRunner) -> None:
        super().__init__(scheduler, runner, Words(), "paced", default_sampling=SamplingParams(temperature=0.0))
        self.seconds = 0.0
        self.freed: list[float] = []

    def plan(self) -> StepPlan | None:
        start = time.thread_time()
        plan = super().plan()
        self.seconds += time.thread_time() - start
        return plan

    def finish(self, plan: StepPlan, result: StepResult) -> list[Output]:
        start = time.thread_time()
        outputs = super().finish(plan, result)
        self.seconds += time.thread_time() - start
        return outputs

    def abort(self, request_id: int) -> bool:
        aborted = super().abort(request_id)
        self.freed.append(time.monotonic())
        return aborted


async def main(num_seqs: int, step_seconds: float) -> None:
    config = SchedulerConfig(
        num_blocks=num_seqs * 32,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=1 << 14,
        max_model_len=CONTEXT,
        max_queued=1 << 14,
    )
    scheduler = Scheduler(config, SpeculationControl(FixedDepth(0)))
    runner = PacedRunner(step_seconds)
    measured = Measured(scheduler, runner)
    engine = AsyncEngine(measured)
    server = GrpcServer()
    port = server.bind("127.0.0.1", 0)
    await server.start()
    collect_rarely()
    engine.start()
    server.open(engine)
    print(port, flush=True)
    await answer_stdin(
        lambda: {"engine_seconds": measured.seconds, "tokens": measured.totals.tokens, "freed": measured.freed}
    )
    runner.seconds = 0.0
    await server.stop(0)


if __name__ == "__main__":
    assert "torch" not in sys.modules
    sys.exit(uvloop.run(main(int(sys.argv[1]), float(sys.argv[2]))))
