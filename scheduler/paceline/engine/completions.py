"""The live completions: where each of them stops, and what its reader gets of a step."""

from __future__ import annotations

from collections.abc import KeysView
from dataclasses import replace

from paceline.core.plan import Finish, FinishReason, SequenceResult, StepResult, TokenLogprobs
from paceline.core.request import FINISHED, Request, RequestOutput
from paceline.engine.delta import Output, PromptLogprobs
from paceline.engine.stops import StopChecker


class Completion:
    """What the engine remembers of a live completion.

    Attributes:
        choice: which of its prompt's completions it is.
        prompt_logprobs: as far as they are known, aligned with the prompt; None if they are not wanted, or told.
        text, logprobs: what its reader gets of the last step in which it emitted or ended, beside token ids.
    """

    __slots__ = ("checker", "choice", "logprobs", "prompt_logprobs", "request", "text")

    def __init__(
        self, request: Request, checker: StopChecker, prompt_logprobs: list[TokenLogprobs | None] | None
    ) -> None:
        self.request = request
        self.checker = checker
        self.choice: int = request.params.choice
        self.prompt_logprobs = prompt_logprobs
        self.text = ""
        self.logprobs: tuple[TokenLogprobs, ...] = ()

    def take_prompt_logprobs(self) -> PromptLogprobs:
        """All of them, once."""
        known, self.prompt_logprobs = self.prompt_logprobs, None
        return tuple(known) if known else ()


class Completions:
    """Mutated by the engine. A step goes through `cut`, then through the core, then through `outputs`."""

    def __init__(self) -> None:
        self._live: dict[int, Completion] = {}

    def keys(self) -> KeysView[int]:
        """The ids of their requests."""
        return self._live.keys()

    def add(self, completion: Completion) -> None:
        self._live[completion.request.request_id] = completion
        completion.request.companion = completion

    def pop(self, request_id: int) -> Request | None:
        """Forget a completion; its request, or None if it is not live."""
        completion = self._live.pop(request_id, None)
        if completion is None:
            return None
        completion.request.companion = None  # or each would keep the other
        return completion.request

    def cut(self, result: StepResult, requests: list[Request]) -> tuple[StepResult, list[Completion]]:
        """A result as the core may commit it, without what stands behind a stop; and the live completions that emit or
        end, which know what is shown of them until the next step. Results of others stay as they are.

        Args:
            requests: of each sequence of the result.
        """
        shown: list[Completion] = []
        sequences = []
        for sequence, request in zip(result.sequences, requests):
            completion = request.companion
            if isinstance(completion, Completion) and request.status is not FINISHED:
                sequence = self._cut(completion, sequence, shown)
            sequences.append(sequence)
        return StepResult(result.step_id, tuple(sequences), result.times), shown

    def _cut(self, completion: Completion, sequence: SequenceResult, shown: list[Completion]) -> SequenceResult:
        known = completion.prompt_logprobs
        if known is not None:
            end = sequence.prompt_start + len(sequence.prompt_logprobs)
            known[sequence.prompt_start : end] = sequence.prompt_logprobs
        token_ids, end_of_run = sequence.token_ids, None
        if sequence.failure is not None:
            end_of_run = Finish(FinishReason.DEAD_END, detail=sequence.failure)
        elif sequence.grammar_end is not None:
            token_ids = token_ids[: sequence.grammar_end]
            end_of_run = completion.checker.end_of_grammar(token_ids)
        if not token_ids and end_of_run is None:
            return sequence
        kept, text, finish = completion.checker.cut(completion.request, token_ids, end_of_run)
        logprobs = sequence.logprobs
        if len(logprobs) > len(kept):
            logprobs = logprobs[: len(kept)]
        completion.text, completion.logprobs = text, logprobs
        shown.append(completion)
        if finish is None and len(kept) == len(sequence.token_ids):
            return sequence
        return replace(sequence, token_ids=kept, logprobs=logprobs, finish=finish)

    def outputs(self, committed: tuple[RequestOutput, ...], shown: list[Completion]) -> list[Output]:
        """What the core has committed, as readers get it.

        Args:
            shown: by `cut`; of the same requests.
        """
        assert len(committed) == len(shown), (len(committed), len(shown))
        outputs = []
        for core, completion in zip(committed, shown):
            request = completion.request
            assert request.request_id == core.request_id, (request.request_id, core.request_id)
            outputs.append(
                Output(
                    core.request_id,
                    request.num_cached_tokens,
                    completion.text,
                    core.token_ids,
                    core.token_offset,
                    core.finish,
                    core.stats,
                    completion.logprobs,
                    completion.choice,
                    () if completion.prompt_logprobs is None else completion.take_prompt_logprobs(),
                )
            )
        return outputs
