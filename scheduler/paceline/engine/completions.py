"""The live completions: where each of them stops, and what its reader gets of a step."""

from __future__ import annotations

from collections.abc import KeysView, Mapping, Sequence
from dataclasses import replace

from paceline.core.plan import Finish, FinishReason, SequenceResult, StepResult, TokenLogprobs
from paceline.core.request import Request, RequestOutput
from paceline.engine.delta import Output, PromptLogprobs
from paceline.engine.stops import StopChecker


class Completion:
    """What the engine remembers of a live completion.

    Attributes:
        prompt_logprobs: as far as they are known, aligned with the prompt; None if they are not wanted, or told.
    """

    __slots__ = ("checker", "prompt_logprobs", "request")

    def __init__(
        self, request: Request, checker: StopChecker, prompt_logprobs: list[TokenLogprobs | None] | None
    ) -> None:
        self.request = request
        self.checker = checker
        self.prompt_logprobs = prompt_logprobs

    def take_prompt_logprobs(self) -> PromptLogprobs:
        """All of them, once."""
        known, self.prompt_logprobs = self.prompt_logprobs, None
        return tuple(known) if known else ()


class Shown:
    """What readers get of a step beside token ids, by request.

    Attributes:
        texts: of requests that emit.
        logprobs: of those that asked for some.
    """

    __slots__ = ("logprobs", "texts")

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}


class Completions:
    """Mutated by the engine. A step goes through `cut`, then through the core, then through `outputs`."""

    def __init__(self) -> None:
        self._live: dict[int, Completion] = {}

    def keys(self) -> KeysView[int]:
        """The ids of their requests."""
        return self._live.keys()

    def add(self, completion: Completion) -> None:
        self._live[completion.request.request_id] = completion

    def pop(self, request_id: int) -> Request | None:
        """Forget a completion; its request, or None if it is not live."""
        completion = self._live.pop(request_id, None)
        return None if completion is None else completion.request

    def cut(self, result: StepResult, requests: Mapping[int, Request]) -> tuple[StepResult, Shown]:
        """A result as the core may commit it: without what stands behind a stop.

        Args:
            requests: the core's live ones; results of others stay as they are.
        """
        shown = Shown()
        sequences = []
        for sequence in result.sequences:
            if sequence.request_id in requests:
                sequence = self._cut(self._live[sequence.request_id], sequence, shown)
            sequences.append(sequence)
        return replace(result, sequences=tuple(sequences)), shown

    def _cut(self, completion: Completion, sequence: SequenceResult, shown: Shown) -> SequenceResult:
        known = completion.prompt_logprobs
        if known is not None:
            end = sequence.prompt_start + len(sequence.prompt_logprobs)
            known[sequence.prompt_start : end] = sequence.prompt_logprobs
        token_ids, end_of_run = sequence.token_ids, None
        if sequence.failure is not None:
            end_of_run = Finish(FinishReason.DEAD_END, detail=sequence.failure)
        elif sequence.grammar_end is not None:
            token_ids, end_of_run = token_ids[: sequence.grammar_end], Finish(FinishReason.EOS)
        if not token_ids and end_of_run is None:
            return sequence
        cut = completion.checker.cut(completion.request, token_ids, end_of_run)
        kept, finish = cut.token_ids, cut.finish
        shown.texts[sequence.request_id] = cut.text
        if sequence.logprobs:
            shown.logprobs[sequence.request_id] = sequence.logprobs[: len(kept)]
        if finish is None and len(kept) == len(sequence.token_ids):
            return sequence
        logprobs = sequence.logprobs[: len(kept)]
        return sequence._replace(token_ids=kept, logprobs=logprobs, finish=finish)

    def outputs(self, committed: Sequence[RequestOutput], shown: Shown) -> list[Output]:
        """What the core has committed, as readers get it."""
        outputs = []
        for core in committed:
            completion = self._live[core.request_id]
            request = completion.request
            outputs.append(
                Output(
                    core.request_id,
                    request.num_cached_tokens,
                    shown.texts[core.request_id],
                    core.token_ids,
                    core.token_offset,
                    core.finish,
                    core.stats,
                    shown.logprobs.get(core.request_id, ()),
                    request.params.choice,
                    () if completion.prompt_logprobs is None else completion.take_prompt_logprobs(),
                )
            )
        return outputs
