"""Offline generation, in the calling thread.

llm = LLM("demo", draft="demo")
[completion] = llm.generate("def add(a, b):", max_tokens=64, temperature=0.0)
print(completion.text)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from paceline.core.params import Method, SamplingParams, SpeculationParams, StopParams
from paceline.core.plan import Finish, FinishReason
from paceline.core.request import RequestStats
from paceline.engine.delta import Output
from paceline.engine.engine import Engine
from paceline.engine.request import ChatMessage, GenerationRequest, Prompt
from paceline.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt was completed with. `stats` has the token counts, times and speculation totals."""

    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    stats: RequestStats

    @property
    def finish_reason(self) -> FinishReason:
        return self.finish.reason


class LLM:
    """A model and its engine.

    Args:
        model: a directory in Hugging Face format, or "demo", the embedded model.
        draft: None or "none", "ngram", "demo", or the directory of a draft model.
        settings: more fields of `paceline.wiring.EngineSettings`: dtype, max_model_len, max_num_seqs and so on.
    """

    def __init__(self, model: str = "demo", draft: str | None = None, **settings: Any) -> None:
        # Building an engine needs torch; generating with one that was built elsewhere does not.
        from paceline.wiring import EngineSettings, build_engine

        self.engine: Engine = build_engine(EngineSettings(model=model, draft=draft or "none", **settings))

    @classmethod
    def from_engine(cls, engine: Engine) -> Self:
        """Around an engine that exists; nobody else may step it meanwhile."""
        llm = cls.__new__(cls)
        llm.engine = engine
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        include_stop_string: bool = False,
        method: str | None = None,
        min_draft_tokens: int = 0,
        max_draft_tokens: int | None = None,
        on_text: Callable[[int, str], None] | None = None,
        on_finish: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Complete one prompt or many as one batch; completions come in the order of the prompts.

        What is not given is the model's default. Every prompt is validated before anything runs.

        Args:
            max_tokens: None for up to the model's length.
            method: "none", "ngram" or "draft_model"; None for the engine's own.
            on_text: called with (index of the prompt, new text) as text comes. If it raises, generation ends.
            on_finish: called with the index of a prompt whose completion has ended.
        """
        default = self.engine.default_sampling
        sampling = SamplingParams(
            temperature=default.temperature if temperature is None else temperature,
            top_k=default.top_k if top_k is None else top_k,
            top_p=default.top_p if top_p is None else top_p,
        )
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        stops = StopParams(max_tokens, strings, tuple(stop_token_ids), ignore_eos, include_stop_string)
        if method is not None and method not in set(Method):
            raise InvalidArgument("method", method, f"one of {', '.join(Method)}")
        drafts = SpeculationParams(None if method is None else Method(method), min_draft_tokens, max_draft_tokens)
        requests = [GenerationRequest(prompt, sampling, stops, drafts) for prompt in _as_list(prompts)]
        return self._run(requests, on_text or (lambda index, text: None), on_finish or (lambda index: None))

    def _run(
        self,
        requests: list[GenerationRequest],
        on_text: Callable[[int, str], None],
        on_finish: Callable[[int], None],
    ) -> list[Completion]:
        waiting = deque((index, request, self.engine.encode(request)) for index, request in enumerate(requests))
        index_of: dict[int, int] = {}
        outputs: list[list[Output]] = [[] for _ in requests]
        try:
            while waiting or index_of:
                while waiting and self.engine.has_room:
                    index, request, prompt = waiting.popleft()
                    index_of[self.engine.add(request, prompt)] = index
                for output in self.engine.step():
                    index = index_of[output.request_id]
                    outputs[index].append(output)
                    if output.finish is not None:
                        del index_of[output.request_id]
                    if output.text:
                        on_text(index, output.text)
                    if output.finish is not None:
                        on_finish(index)
        finally:
            # Nothing is left, unless somebody raised.
            for request_id in index_of:
                self.engine.abort(request_id)
        return [_completion(parts) for parts in outputs]


def _completion(outputs: list[Output]) -> Completion:
    last = outputs[-1]
    assert last.finish is not None
    assert last.stats is not None
    text = "".join(output.text for output in outputs)
    token_ids = tuple(token for output in outputs for token in output.token_ids)
    return Completion(text, token_ids, last.finish, last.stats)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is text, or a sequence of ids or messages; anything else is a sequence of prompts."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | ChatMessage)):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))
