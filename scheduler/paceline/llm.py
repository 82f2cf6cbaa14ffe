"""Offline generation, in the calling thread.

llm = LLM("demo", draft="demo")
[completion] = llm.generate("def add(a, b):", max_tokens=64, temperature=0.0)
print(completion.text)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import accumulate
from numbers import Integral
from pathlib import Path
from threading import Lock
from typing import Any, Final, Self, TypeVar, Unpack, cast, get_type_hints

from paceline.chat import is_turn, read_turn
from paceline.core.grammar import GrammarKind, GrammarSpec
from paceline.core.method import Method
from paceline.core.params import (
    LogprobsMode,
    LogprobsParams,
    SamplingParams,
    SpeculationParams,
    StopParams,
    Verification,
)
from paceline.core.plan import Finish, FinishReason, TokenLogprobs
from paceline.core.request import RequestStats
from paceline.core.speculation_report import SpeculationReport
from paceline.engine.ctrl_c import CtrlC
from paceline.engine.delta import Output, PromptLogprobs
from paceline.engine.engine import Engine
from paceline.engine.request import ChatMessage, GenerationRequest, Prompt
from paceline.engine.step_loop import StepLoop
from paceline.errors import InvalidArgument
from paceline.options import (
    CompletionOptions,
    check_names,
    check_types,
    is_integer,
    is_number,
    items_of,
    json_text,
    plain_numbers,
)

Name = TypeVar("Name", bound=StrEnum)

PROMPTS: Final = "text, token ids or chat messages"
# Who drafts; the engine chooses where None does.
_MODES: Final[Mapping[str, Method | None]] = {
    "auto": None,
    "off": Method.NONE,
    "ngram": Method.NGRAM,
    "draft_model": Method.DRAFT_MODEL,
}


_HINTS: Final = get_type_hints(CompletionOptions)


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt was completed with.

    Attributes:
        stats: token counts, times and speculation totals.
        logprobs: one for each of `token_ids`, if asked for.
        choice: which of the prompt's n completions it is.
        prompt_logprobs: aligned with the prompt, with None for its first token; only of choice 0.
    """

    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    stats: RequestStats
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice: int = 0
    prompt_logprobs: PromptLogprobs = ()

    @property
    def finish_reason(self) -> FinishReason:
        return self.finish.reason


class LLM:
    """A model and its engine, for one call at a time.

    Args:
        model: a directory in Hugging Face format, or "demo", the embedded model.
        draft: None or "none", "ngram", "demo", or the directory of a draft model.
        settings: more fields of `paceline.wiring.EngineSettings`: dtype, max_model_len, max_num_seqs and so on.

    Raises:
        PacelineError: a setting that is not allowed, or a model that cannot be served so.
        TypeError: a setting that does not exist.
    """

    def __init__(self, model: str | Path = "demo", draft: str | Path | None = None, **settings: Any) -> None:
        # Building an engine needs torch; generating with one that was built elsewhere does not.
        from paceline.wiring import EngineSettings, build_engine

        hints = get_type_hints(EngineSettings)
        check_names(settings, hints)
        check_types(settings, hints)
        settings = plain_numbers(settings, hints)
        self.engine: Engine = build_engine(EngineSettings(model=model, draft=draft or "none", **settings))
        self._stepping = Lock()

    @classmethod
    def from_engine(cls, engine: Engine) -> Self:
        """Around an engine that exists; nobody else may step it meanwhile."""
        llm = cls.__new__(cls)
        llm.engine = engine
        llm._stepping = Lock()
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        on_text: Callable[[int, str], None] | None = None,
        on_finish: Callable[[int], None] | None = None,
        **options: Unpack[CompletionOptions],
    ) -> list[Completion]:
        """Complete one prompt or many as one batch; every prompt is validated before anything runs. Ctrl-C ends it
        behind the step that runs; a second one at once, and the engine with it.

        Args:
            on_text: called with (index of the completion, new text) as text comes. If it raises, generation ends.
            on_finish: called with the index of a completion that has ended.
            options: see `CompletionOptions`.

        Returns:
            Completions in the order of the prompts; with n, the n of the first prompt, then those of the second.

        Raises:
            RuntimeError: another call runs, in another thread or around this one; it goes on.
        """
        requests = [build_request(p, self.engine.default_sampling, options) for p in _as_list(prompts)]
        return self.complete(requests, on_text or (lambda index, text: None), on_finish or (lambda index: None))

    def speculation_report(self) -> SpeculationReport:
        """What speculation has brought so far, and what is expected of each drafter and tenant."""
        return self.engine.scheduler.speculation_report()

    def complete(
        self,
        requests: Sequence[GenerationRequest],
        on_text: Callable[[int, str], None] = lambda index, text: None,
        on_finish: Callable[[int], None] = lambda index: None,
    ) -> list[Completion]:
        """`generate` for requests that may differ in more than their prompts."""
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError("this LLM is generating already: one call at a time, and none from on_text or on_finish")
        try:
            with CtrlC() as ctrl_c:
                return self._complete(requests, on_text, on_finish, ctrl_c)
        finally:
            self._stepping.release()

    def _complete(
        self,
        requests: Sequence[GenerationRequest],
        on_text: Callable[[int, str], None],
        on_finish: Callable[[int], None],
        ctrl_c: CtrlC,
    ) -> list[Completion]:
        waiting = deque((index, request, self.engine.prepare(request)) for index, request in enumerate(requests))
        firsts = list(accumulate((request.n for request in requests), initial=0))
        index_of: dict[int, int] = {}
        outputs: list[list[Output]] = [[] for request in requests for _ in range(request.n)]
        steps = StepLoop(self.engine)
        try:
            while waiting or index_of:
                ctrl_c.hold()  # a step that is broken off is the end of the engine
                while waiting and self.engine.has_room_for(waiting[0][1]):
                    index, request, prepared = waiting.popleft()
                    first_id = self.engine.add(request, prepared)
                    index_of.update((first_id + choice, firsts[index] + choice) for choice in range(request.n))
                finished = steps.step_at_once()
                ctrl_c.release()
                if finished is None:
                    self.engine.wait_for_turns()  # for as long as a day
                for _, error in self.engine.take_refused():
                    raise error
                for output in finished.outputs if finished is not None else ():
                    index = index_of[output.request_id]
                    outputs[index].append(output)
                    if output.finish is not None:
                        del index_of[output.request_id]
                    if output.text:
                        on_text(index, output.text)
                    if output.finish is not None:
                        on_finish(index)
        finally:
            ctrl_c.hold()
            # Nothing is left, unless somebody raised. A dead engine is left alone: its books may be in any state, and
            # what it says of them would hide what it died of.
            if not self.engine.has_failed:
                for request_id in index_of:
                    self.engine.abort(request_id)
                steps.drain()  # one that was launched ahead brings nobody anything
        return [_completion(parts) for parts in outputs]


def build_request(prompt: Prompt, default: SamplingParams, options: CompletionOptions) -> GenerationRequest:
    """A request out of keyword arguments; `default` is the model's own sampling.

    Raises:
        InvalidArgument: a value of another type, or one that no model allows.
        TypeError: an option that does not exist.
    """
    check_names(options, CompletionOptions.__annotations__)
    given = {name: value for name, value in options.items() if value is not None}
    check_types(given, _HINTS)  # others would fail in the middle of a step, and the engine with it
    given = plain_numbers(given, _HINTS)
    prompt = _as_prompt(prompt)
    get = given.get
    allowed_token_ids = _tuple("allowed_token_ids", given, Integral)
    if "allowed_token_ids" in given and not allowed_token_ids:
        raise InvalidArgument("allowed_token_ids", [], "at least one token id; leave it out to allow all")
    own: dict[str, Any] = given | {
        "logit_bias": _biases(given),
        "allowed_token_ids": allowed_token_ids,
        "bad_words": _tuple("bad_words", given, str),
    }
    sampling = replace(default, **{item.name: own[item.name] for item in fields(SamplingParams) if item.name in own})
    stop = get("stop", ())
    stops = StopParams(
        max_tokens=cast("int | None", get("max_tokens")),
        strings=(stop,) if isinstance(stop, str) else _tuple("stop", given, str),
        token_ids=_tuple("stop_token_ids", given, Integral),
        ignore_eos=bool(get("ignore_eos")),
        include_stop_string=bool(get("include_stop_string")),
        min_tokens=cast(int, get("min_tokens", 0)),
        include_special_tokens=bool(get("include_special_tokens")),
    )
    mode, rule = get("speculation", "auto"), get("verification")
    if mode not in list(_MODES):
        raise InvalidArgument("speculation", mode, f"one of {', '.join(_MODES)}")
    speculation = SpeculationParams(
        method=_MODES[mode],
        min_depth=cast(int, get("min_draft_tokens", 0)),
        max_depth=cast("int | None", get("max_draft_tokens")),
        verification=None if rule is None else _member("verification", rule, Verification),
    )
    logprobs = LogprobsParams(
        completion=cast("int | None", get("logprobs")),
        prompt=cast("int | None", get("prompt_logprobs")),
        mode=_member("logprobs_mode", get("logprobs_mode", "raw"), LogprobsMode),
    )
    return GenerationRequest(prompt, sampling, stops, speculation, logprobs, _grammar(given), cast(int, get("n", 1)))


def _grammar(given: Mapping[str, Any]) -> GrammarSpec | None:
    kinds = {
        "json_schema": GrammarKind.JSON_SCHEMA,
        "regex": GrammarKind.REGEX,
        "grammar": GrammarKind.GRAMMAR,
        "choices": GrammarKind.CHOICE,
    }
    chosen = [name for name in kinds if name in given]
    if not chosen:
        return None
    if len(chosen) > 1:
        raise InvalidArgument(" and ".join(chosen), "together", f"one of {', '.join(kinds)}")
    [name] = chosen
    value = given[name]
    if name == "choices":
        return GrammarSpec(GrammarKind.CHOICE, choices=_tuple(name, given, str))
    return GrammarSpec(kinds[name], value if isinstance(value, str) else json_text(name, value))


def _member(field: str, value: object, kind: type[Name]) -> Name:
    try:
        return kind(str(value))
    except ValueError as error:
        raise InvalidArgument(field, value, f"one of {', '.join(kind)}") from error


def _as_prompt(prompt: object) -> Prompt:
    """With ids and messages as the engine's own, which is compiled."""
    if isinstance(prompt, str):
        return prompt
    items = items_of(prompt)
    if items is not None and all(map(is_integer, items)):
        return [int(item) for item in items]
    if items is None or not all(is_turn(item) for item in items):
        raise InvalidArgument("prompt", prompt, PROMPTS)
    return [ChatMessage(*read_turn(f"chat.messages[{index}]", item)) for index, item in enumerate(items)]


def _tuple(name: str, given: Mapping[str, Any], kind: type) -> tuple[Any, ...]:
    """A list option's values. One string is none: its letters would pass for them."""
    values = given.get(name, ())
    items = "texts" if kind is str else "token ids"
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InvalidArgument(name, values, f"a sequence of {items}")
    values = tuple(values)
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidArgument(name, value, f"a sequence of {items}")
    return values if kind is str else tuple(map(int, values))


def _biases(given: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    biases = given.get("logit_bias", {})
    is_mapping = isinstance(biases, Mapping)
    if not is_mapping or not all(is_integer(k) and is_number(v) for k, v in biases.items()):
        raise InvalidArgument("logit_bias", biases, "a mapping of token ids to numbers")
    try:
        return tuple((int(token_id), float(bias)) for token_id, bias in biases.items())
    except OverflowError as error:
        raise InvalidArgument("logit_bias", biases, "numbers that a float can hold") from error


def _completion(outputs: list[Output]) -> Completion:
    last = outputs[-1]
    assert last.finish is not None
    assert last.stats is not None
    return Completion(
        "".join(output.text for output in outputs),
        tuple(token for output in outputs for token in output.token_ids),
        last.finish,
        last.stats,
        tuple(item for output in outputs for item in output.logprobs),
        last.choice,
        next((output.prompt_logprobs for output in outputs if output.prompt_logprobs), ()),
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is text, or a sequence of ids or messages; anything else is a sequence of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    items = items_of(prompts)
    if items is None:
        raise InvalidArgument("prompt", prompts, PROMPTS)
    return [items] if items and (isinstance(items[0], Integral) or is_turn(items[0])) else items
