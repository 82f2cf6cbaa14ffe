"""The engine's synchronous heart: requests in, steps, outputs out.

plan = engine.plan()            the core chooses the work
result = runner.execute(plan)   anywhere, in the order of plans
engine.finish(plan, result)     stops are cut, the core commits, outputs come back
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from paceline.core.params import Method, SamplingParams
from paceline.core.plan import StepPlan, StepResult, StepRunner
from paceline.core.scheduler import Scheduler
from paceline.engine.delta import Output
from paceline.engine.request import ChatMessage, GenerationRequest, Prompt
from paceline.engine.stops import Cut, StopChecker
from paceline.engine.tokenizer import ROLES, Tokenizer
from paceline.engine.totals import Totals
from paceline.errors import EngineDead, FailedPrecondition, InvalidArgument


class Engine:
    """Owns the scheduler, the runner and the stop state of every live request. One caller at a time, except for
    `encode`.

    Args:
        model_name: what clients call the model.
        vocab_size: ids that the model knows; by default those that the tokenizer has.
        methods: drafting methods that the runner offers, besides none.
        default_sampling: the model's own settings, for whoever builds a request's parameters.
        clock: seconds; read, never waited for.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        tokenizer: Tokenizer,
        model_name: str,
        *,
        vocab_size: int | None = None,
        methods: Collection[Method] = (Method.NGRAM,),
        default_sampling: SamplingParams | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.methods = frozenset(methods) | {Method.NONE}
        self.default_sampling = default_sampling or SamplingParams()
        self.clock = clock
        self.totals = Totals()
        self._ids = itertools.count()
        self._checkers: dict[int, StopChecker] = {}
        self._failed = False

    # -- requests -----------------------------------------------------------------------------------------------------

    def encode(self, request: GenerationRequest) -> tuple[int, ...]:
        """Validate a request and give its prompt's ids. Changes nothing, so it may run in any thread.

        Raises:
            InvalidArgument: a token id outside the vocabulary, an empty prompt, text that is not Unicode, an unknown
            role. FailedPrecondition: a drafting method that is not loaded, a conversation for a model without a chat
            template.
        """
        method = request.speculation.method
        if method is not None and method not in self.methods:
            available = ", ".join(sorted(self.methods))
            raise FailedPrecondition(f"speculation.mode = {method}: not loaded here; available: {available}")
        for string in request.stop.strings:
            _check_unicode("stop.strings", string)
        self._check_ids("stop.token_ids", request.stop.token_ids)
        if request.prompt and not isinstance(request.prompt, str):
            # Each id or message is a token or more: what is too long is refused before every one is looked at.
            self.scheduler.check(len(request.prompt), request.stop)
        prompt = self._encode_prompt(request.prompt)
        self.scheduler.check(len(prompt), request.stop)
        return prompt

    def add(self, request: GenerationRequest, prompt_token_ids: tuple[int, ...] | None = None) -> int:
        """Queue a request; its id, which is never used again.

        Args:
            prompt_token_ids: what `encode` gave for the request, if it was called before.

        Raises:
            EngineDead: a step has failed.
            PacelineError: whatever `encode` and `Scheduler.add` refuse; nothing is queued then.
        """
        if self._failed:
            raise EngineDead("the engine failed and serves no more requests")
        prompt = self.encode(request) if prompt_token_ids is None else prompt_token_ids
        request_id = next(self._ids)
        sampling, stop, speculation = request.sampling, request.stop, request.speculation
        self.scheduler.add(request_id, prompt, sampling, stop, speculation, self.clock())
        self._checkers[request_id] = StopChecker(stop, self.tokenizer, self.scheduler.config.eos_token_ids)
        return request_id

    def abort(self, request_id: int) -> bool:
        """End a request; its blocks are free on return, and it has no more outputs. False if it is not live."""
        self._checkers.pop(request_id, None)
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """A request is live."""
        return self.scheduler.has_requests

    @property
    def has_room(self) -> bool:
        """The queue takes another request."""
        return len(self.scheduler.waiting) < self.scheduler.config.max_queued

    # -- steps --------------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do before an outstanding result is in.

        At most one plan may be outstanding. Every plan must be executed and finished, in order.
        """
        start = self.clock()
        plan = self.scheduler.schedule(start)
        self.totals.python += self.clock() - start
        return plan if plan.work else None

    def finish(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Commit a step's result: what each request has gained. Requests aborted meanwhile have no output."""
        start = self.clock()
        cuts: dict[int, Cut] = {}
        sequences = []
        for sequence in result.sequences:
            request = self.scheduler.requests.get(sequence.request_id)
            if request is not None and sequence.token_ids:
                cut = self._checkers[request.request_id].cut(request, sequence.token_ids)
                cuts[request.request_id] = cut
                sequence = replace(sequence, token_ids=cut.token_ids, finish=cut.finish)
            sequences.append(sequence)
        outputs = []
        for core in self.scheduler.update(plan, replace(result, sequences=tuple(sequences)), start):
            text = cuts[core.request_id].text
            outputs.append(
                Output(text, core.token_ids, core.token_offset, core.finish, core.stats, request_id=core.request_id)
            )
            if core.finish is not None:
                del self._checkers[core.request_id]
        self.totals.add_step(result.times, sum(len(output.token_ids) for output in outputs))
        self.totals.python += self.clock() - start
        return outputs

    def step(self) -> list[Output]:
        """Plan, execute and finish one step, with none outstanding. Without work, nothing happens.

        Once it has raised, whatever it was, the engine is dead.
        """
        if not self.has_work:
            return []
        try:
            plan = self.plan()
            assert plan is not None, "requests are left, but nothing can be planned"
            return self.finish(plan, self.runner.execute(plan))
        except BaseException:
            self._failed = True
            raise

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance. Mutates nothing."""
        self.scheduler.check_invariants()
        assert self._checkers.keys() == self.scheduler.requests.keys(), "one stop checker per live request"

    # -- validation ---------------------------------------------------------------------------------------------------

    def _encode_prompt(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidArgument("prompt_text", prompt, "at least one character")
            _check_unicode("prompt_text", prompt)
            return self._check_ids("prompt_text", self.tokenizer.encode(prompt))
        messages = [item for item in prompt if isinstance(item, ChatMessage)]
        if messages:
            if len(messages) < len(prompt):
                raise InvalidArgument("chat.messages", prompt, "messages only")
            for index, message in enumerate(messages):
                if message.role not in ROLES:
                    raise InvalidArgument(f"chat.messages[{index}].role", message.role, f"one of {', '.join(ROLES)}")
                _check_unicode(f"chat.messages[{index}].content", message.content)
            return self._check_ids("chat.messages", self.tokenizer.apply_chat_template(messages))
        if not prompt:
            raise InvalidArgument("prompt_tokens.ids", [], "at least one token")
        return self._check_ids("prompt_tokens.ids", [item for item in prompt if not isinstance(item, ChatMessage)])

    def _check_ids(self, field: str, token_ids: Sequence[int]) -> tuple[int, ...]:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidArgument(field, token_id, f"token ids from 0 to {self.vocab_size - 1}")
        return tuple(token_ids)


def _check_unicode(field: str, text: str) -> None:
    """A lone surrogate has no UTF-8: no model has seen it and no client can receive it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, text[error.start], "text without lone surrogates") from error
