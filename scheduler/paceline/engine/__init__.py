"""From a prompt to a stream of text: tokens, stops and the step loop, around the pure core.

engine = AsyncEngine(Engine(scheduler, runner, tokenizer, "demo"))
engine.start()
stream = await engine.submit(GenerationRequest("def add(a, b):"))
async with contextlib.aclosing(stream):
    async for delta in stream:
        print(delta.text, end="")
"""

from paceline.compiled import path_of

__path__ = path_of("engine", __path__)

from paceline.engine.async_engine import IDLE_SECONDS, AsyncEngine, forward_worker
from paceline.engine.delta import Delta, Output
from paceline.engine.engine import Engine
from paceline.engine.interruption import Interrupt, interruptible
from paceline.engine.request import ChatMessage, GenerationRequest, Prompt
from paceline.engine.step_loop import StepLoop
from paceline.engine.stream import Stream
from paceline.engine.tokenizer import Tokenizer, TransformersTokenizer
from paceline.engine.totals import Totals

__all__ = [
    "IDLE_SECONDS",
    "AsyncEngine",
    "ChatMessage",
    "Delta",
    "Engine",
    "GenerationRequest",
    "Interrupt",
    "Output",
    "Prompt",
    "StepLoop",
    "Stream",
    "Tokenizer",
    "Totals",
    "TransformersTokenizer",
    "forward_worker",
    "interruptible",
]
