"""The engine's synchronous heart: requests in, steps, outputs out.

plan = engine.plan()            the core chooses the work
result = runner.execute(plan)   anywhere, in the order of plans
engine.finish(plan, result)     stops are cut, the core commits, outputs come back
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

from paceline.core.grammar import Grammar, GrammarCompiler
from paceline.core.method import Method
from paceline.core.params import Constraints, SamplingParams
from paceline.core.places import Places
from paceline.core.plan import FinishReason, Pending, StepPlan, StepResult, StepRunner, TokenLogprobs
from paceline.core.request import Request
from paceline.core.scheduler import Scheduler
from paceline.engine.completions import Completion, Completions
from paceline.engine.delta import Output
from paceline.engine.request import ChatMessage, GenerationRequest, Prompt
from paceline.engine.stop_matcher import StopMatcher
from paceline.engine.stops import StopChecker
from paceline.engine.tokenizer import ROLES, Tokenizer
from paceline.engine.totals import Totals
from paceline.engine.usage import Usage
from paceline.errors import (
    EngineDead,
    FailedPrecondition,
    InvalidArgument,
    PacelineError,
    Reason,
    ResourceExhausted,
    Unavailable,
)

# Told of a completion that has ended, why it finished, or None if it was ended from outside, and when.
EndObserver: TypeAlias = Callable[[Request, FinishReason | None, float], None]

# Texts have 3 to 5; only long runs of blanks and the like come near it.
MAX_CHARS_PER_TOKEN = 32
SHORTEST_WAIT = 0.001  # seconds; rounding could make a shorter one end before the moment it leads up to
LONGEST_WAIT = 86400.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request in the model's own terms: `Engine.prepare` makes it, `Engine.add` takes it.

    Attributes:
        stop_strings: finds them, for all of its completions; None without any.
    """

    prompt_token_ids: tuple[int, ...]
    constraints: Constraints
    stop_strings: StopMatcher | None


class Engine:
    """Owns the scheduler, the runner, the grammars and the stop state of every live request. One caller at a time,
    except for `prepare` and `close`.

    Args:
        model_name: what clients call the model.
        vocab_size: ids that the model knows; by default those that the tokenizer has.
        methods: drafting methods that the runner offers, besides none.
        default_sampling: the model's own settings, for whoever builds a request's parameters.
        grammars: compiles constraints; None refuses them.
        max_logprobs: alternatives that a request may ask for at each token.
        clock: seconds.
        wait: passes so many of them, where `step` has nothing else to do.

    Attributes:
        on_end: called at the one end of every completion; they must not raise. Append to it.
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
        grammars: GrammarCompiler | None = None,
        max_logprobs: int = 20,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.methods = frozenset(methods) | {Method.NONE}
        self.default_sampling = default_sampling or SamplingParams()
        self.grammars = grammars
        self.max_logprobs = max_logprobs
        self.clock = clock
        self.wait = wait
        self.totals = Totals()
        self.usage = Usage(scheduler)
        self.on_end: list[EndObserver] = []
        self._ids = itertools.count()
        self._completions = Completions()
        self._failed = False

    # -- requests -----------------------------------------------------------------------------------------------------

    def prepare(self, request: GenerationRequest) -> Prepared:
        """Validate a request and put it in the model's terms. Changes nothing, so it may run in any thread; a grammar
        may take a while.

        Raises:
            InvalidArgument: a token id outside the vocabulary, an empty prompt, text that is not Unicode, an unknown
                role or tenant, more logprobs than allowed, a grammar that cannot be, a lowest depth above what is
                allowed, more completions than may ever wait.
            FailedPrecondition: a drafting method that is not loaded or that the tenant may not use, a conversation for
                a model without a chat template, a grammar where none are served.
            Unavailable: a grammar that cannot be tried now.
        """
        self._check_method(request)
        request.speculation.rule_for(request.sampling)
        tenant, field = request.scheduling.tenant, _field_of(request.prompt)
        self.scheduler.bounded(request.speculation, tenant)
        for string in request.stop.strings:
            _check_unicode("stop.strings", string)
        self._check_ids("stop.token_ids", request.stop.token_ids)
        self._check_ids("sampling.logit_bias", [token_id for token_id, _ in request.sampling.logit_bias])
        self._check_allowed_ids(request.sampling.allowed_token_ids)
        self._check_logprobs(request)
        self._check_n(request)
        if request.prompt and not isinstance(request.prompt, str):
            # Each id or message is a token or more: what is too long is refused before every one is looked at.
            self.scheduler.check(len(request.prompt), request.stop, tenant, field)
        prompt = self.tokenize(request.prompt)
        room = self.scheduler.check(len(prompt), request.stop, tenant, field) - len(prompt)
        if request.stop.min_tokens > room:
            allowed = f"at most {room}, the room behind the prompt"
            raise InvalidArgument("stop.min_tokens", request.stop.min_tokens, allowed, reason=Reason.PROMPT_TOO_LONG)
        stop_strings = StopMatcher(request.stop.strings) if request.stop.strings else None
        return Prepared(prompt, self._constraints(request), stop_strings)

    @contextmanager
    def places_kept(
        self, request: GenerationRequest, arrival: float, on_loss: Callable[[PacelineError], None]
    ) -> Iterator[None]:
        """While a request is prepared, its completions count as waiting. To be left before it is added.

        Args:
            arrival: now, on the engine's clock.
            on_loss: told why its places went to another tenant: then the request is refused with that.

        Raises:
            InvalidArgument: an unknown tenant, more completions than may ever wait.
            ResourceExhausted, Unavailable: the queue is full, the tenant's or the server's.
        """
        self._check_n(request)
        places = Places(request.scheduling.tenant, request.n, on_loss)
        self.scheduler.keep(places, arrival)
        try:
            yield
        finally:
            self.scheduler.give_back(places)

    def close(self) -> None:
        """No request will be prepared any more: one that waits for its grammar is Unavailable, and no process is left
        that tried it. For any thread; takes a moment. More calls have no effect.
        """
        if self.grammars is not None:
            self.grammars.close()

    def tokenize(self, prompt: Prompt, field: str = "prompt_text") -> tuple[int, ...]:
        """The ids of a prompt. Changes nothing, like `prepare`, and refuses what that refuses of a prompt.

        Args:
            field: what errors call a text.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidArgument(field, prompt, "at least one character")
            self._check_chars(field, len(prompt))
            _check_unicode(field, prompt)
            return self._check_ids(field, self.tokenizer.encode(prompt))
        messages = [item for item in prompt if isinstance(item, ChatMessage)]
        if messages:
            if len(messages) < len(prompt):
                raise InvalidArgument("chat.messages", prompt, "messages only")
            self._check_chars("chat.messages", sum(len(message.content) for message in messages))
            for index, message in enumerate(messages):
                if message.role not in ROLES:
                    raise InvalidArgument(f"chat.messages[{index}].role", message.role, f"one of {', '.join(ROLES)}")
                _check_unicode(f"chat.messages[{index}].content", message.content)
            return self._check_ids("chat.messages", self.tokenizer.apply_chat_template(messages))
        if not prompt:
            raise InvalidArgument("prompt_tokens.ids", [], "at least one token")
        return self._check_ids("prompt_tokens.ids", [item for item in prompt if not isinstance(item, ChatMessage)])

    def detokenize(self, token_ids: Sequence[int], special_tokens: bool) -> str:
        """The text of tokens as a completion would show it. Changes nothing, so it may run in any thread.

        Args:
            special_tokens: shows them, too.

        Raises:
            InvalidArgument: a token id outside the vocabulary, or more tokens than a completion may have.
        """
        most = self.scheduler.config.max_model_len
        if len(token_ids) > most:  # before each is looked at
            raise InvalidArgument("token_ids", f"{len(token_ids)} ids", f"at most {most}, the model's length")
        decoder = self.tokenizer.decoder((), special_tokens=special_tokens)
        pieces = [decoder.push(token_id) for token_id in self._check_ids("token_ids", token_ids)]
        return "".join(pieces) + decoder.flush()

    def add(self, request: GenerationRequest, prepared: Prepared | None = None, arrival: float | None = None) -> int:
        """Queue a request, all of its completions or none.

        Args:
            prepared: what `prepare` gave for the request, if it was called before.
            arrival: when it came, on the engine's clock, which its times count from; None: now.

        Returns:
            The id of its first completion; those of the others follow. Ids are never used again.

        Raises:
            EngineDead: a step has failed.
            ResourceExhausted, Unavailable: the queue is full, the tenant's or the server's.
            DeadlineExceeded: by the estimate it would come too late.
            PacelineError: whatever `prepare` and `Scheduler.add` refuse; nothing is queued then.
        """
        if self._failed:
            raise EngineDead("the engine failed and serves no more requests")
        prepared = self.prepare(request) if prepared is None else prepared
        now = self.clock()  # the same for all, so that what the first may do the others may too
        arrival = now if arrival is None else arrival
        ids = [next(self._ids) for _ in range(request.n)]
        for choice, request_id in enumerate(ids):
            self._add_completion(request, prepared, choice, request_id, ids[0], now, arrival)
        return ids[0]

    def _add_completion(
        self,
        request: GenerationRequest,
        prepared: Prepared,
        choice: int,
        request_id: int,
        first_id: int,
        now: float,
        arrival: float,
    ) -> None:
        prompt, logprobs = prepared.prompt_token_ids, request.logprobs
        if choice:
            logprobs = replace(logprobs, prompt=None)  # it is one prompt
        added = self.scheduler.add(
            request_id,
            prompt,
            request.sampling,
            request.stop,
            request.speculation,
            now,
            constraints=prepared.constraints,
            logprobs=logprobs,
            choice=choice,
            sibling_id=first_id if choice else None,
            num_siblings=request.n - 1 - choice,
            scheduling=request.scheduling,
            arrival=arrival,
        )
        eos_token_ids = self.scheduler.config.eos_token_ids
        checker = StopChecker(request.stop, self.tokenizer, prompt, eos_token_ids, prepared.stop_strings)
        known: list[TokenLogprobs | None] | None = None if logprobs.prompt is None else [None] * len(prompt)
        self._completions.add(Completion(added, checker, known))
        self.usage.of(added.tenant).completions += 1

    def abort(self, request_id: int) -> bool:
        """End a request; its blocks are free on return, and it has no more outputs. False if it is not live."""
        request = self._completions.pop(request_id)
        aborted = self.scheduler.abort(request_id)
        if request is not None:
            self._ended(request, None, self.clock())
        return aborted

    def _ended(self, request: Request, reason: FinishReason | None, now: float) -> None:
        self.usage.of(request.tenant).book(request)
        for observe in self.on_end:
            observe(request, reason, now)

    def forget(self) -> None:
        """Start every estimate, count and account anew, as after a warm-up. No request is live."""
        self.scheduler.forget()
        self.totals = Totals()
        self.usage = Usage(self.scheduler)

    @property
    def has_work(self) -> bool:
        """A request is live."""
        return self.scheduler.has_requests

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def launch(self) -> Callable[[StepPlan], Pending] | None:
        """How a `PipelinedRunner` starts a step before the one that runs is through; None with any other runner."""
        launch: Callable[[StepPlan], Pending] | None = getattr(self.runner, "launch", None)
        return launch

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do before an outstanding result is in.

        At most one plan may be outstanding. Every plan must be executed and finished, in order.
        """
        start = self.clock()
        plan = self.scheduler.schedule(start)
        self.totals.python += self.clock() - start
        return plan if plan.work else None

    def has_room_for(self, request: GenerationRequest) -> bool:
        """The queues take all of its completions."""
        try:
            self.scheduler.check_queue(request.scheduling.tenant, request.n, self.clock())
        except (ResourceExhausted, Unavailable):
            return False
        return True

    def take_refused(self) -> list[tuple[int, PacelineError]]:
        """Completions that came too late, as `plan` has found, gave way in a full queue to one that `add` took, or
        failed in a step that others came through: each once, with the reason. They have no more outputs.
        """
        refused = self.scheduler.take_refused()
        for request_id, _ in refused:
            request = self._completions.pop(request_id)
            if request is not None:
                self._ended(request, None, self.clock())
        return refused

    def seconds_to_wait(self) -> float:
        """Until it is worth planning again, where `plan` found nothing to do for the live requests and no result is
        outstanding: they wait for their tenant's tokens. Another request may be worth it sooner. A day at most: clocks
        do not take every number.
        """
        now = self.clock()
        seconds = self.scheduler.wake_at(now) - now
        assert seconds < math.inf, "requests are left, but nothing can be planned"
        return min(max(SHORTEST_WAIT, seconds), LONGEST_WAIT)

    def finish(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Commit a step's result: what each request has gained. Requests aborted meanwhile have no output."""
        start = self.clock()
        to_commit, shown = self._completions.cut(result, self.scheduler.requests_of(plan))
        outputs = self._completions.outputs(self.scheduler.update(plan, to_commit, start), shown)
        for output in outputs:
            if output.finish is not None:
                request = self._completions.pop(output.request_id)
                assert request is not None
                self._ended(request, output.finish.reason, start)
        self.totals.add_step(result.times, sum([len(output.token_ids) for output in outputs]))
        self.totals.python += self.clock() - start
        return outputs

    def step(self) -> list[Output]:
        """Plan, execute and finish one step, with none outstanding. Without work, nothing happens; where every request
        waits for its tenant's tokens, it waits for them instead, unless there is somebody for `take_refused`.

        Once it has raised, whatever it was, the engine is dead.
        """
        if not self.has_work:
            return []
        try:
            plan = self.plan()
            if plan is not None:
                return self.finish(plan, self.runner.execute(plan))
            self.wait_for_turns()
            return []
        except BaseException:
            self.fail()
            raise

    def wait_for_turns(self) -> None:
        """Where every live request waits for its tenant's tokens, wait for them, unless there is somebody for
        `take_refused`.
        """
        if self.has_work and not self.scheduler.refused:
            self.wait(self.seconds_to_wait())

    @property
    def has_failed(self) -> bool:
        """A step went wrong; see `fail`."""
        return self._failed

    def fail(self) -> None:
        """A step went wrong, and the books may be in any state: no request is taken any more."""
        self._failed = True

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance. Mutates nothing."""
        self.scheduler.check_invariants()
        refused = {request_id for request_id, _ in self.scheduler.refused}
        assert self._completions.keys() - refused == self.scheduler.requests.keys(), "one stop checker each"

    # -- validation ---------------------------------------------------------------------------------------------------

    def _check_n(self, request: GenerationRequest) -> None:
        """All completions wait at first, however short the queues are."""
        tenant, most = request.scheduling.tenant, self.scheduler.config.max_queued
        own = self.scheduler.tenants.policy(tenant).max_queued
        if request.n > most:
            raise InvalidArgument("n", request.n, f"at most {most}, the server's max_queued")
        if own is not None and request.n > own:
            raise InvalidArgument("n", request.n, f"at most {own}, max_queued of tenant {tenant!r}")

    def _check_method(self, request: GenerationRequest) -> None:
        method = request.speculation.method
        available = self.methods & self.scheduler.allowed_methods(request.scheduling.tenant)
        if method is not None and method not in available:
            reason = (
                f"not allowed to tenant {request.scheduling.tenant!r}" if method in self.methods else "not loaded here"
            )
            names = ", ".join(sorted("off" if one is Method.NONE else one for one in available))  # as requests say
            raise FailedPrecondition(f"speculation.mode = {method}: {reason}; available: {names}")

    def _constraints(self, request: GenerationRequest) -> Constraints:
        stop, eos_token_ids = request.stop, self.scheduler.config.eos_token_ids
        ends = () if stop.ignore_eos else eos_token_ids
        grammar = self._compile(request)
        return Constraints(
            bad_words=tuple(dict.fromkeys(self._spellings(request.sampling.bad_words))),
            min_tokens=stop.min_tokens,
            stop_token_ids=tuple(dict.fromkeys(stop.token_ids + ends)) if stop.min_tokens else (),
            grammar=grammar,
            ends_with_grammar=grammar is not None and not ends,
        )

    def _compile(self, request: GenerationRequest) -> Grammar | None:
        if request.grammar is None:
            return None
        if self.grammars is None:
            raise FailedPrecondition(f"structured.{request.grammar.kind} is set, but no grammars are served here")
        return self.grammars.compile(request.grammar)

    def _spellings(self, words: Sequence[str]) -> Iterable[tuple[int, ...]]:
        """The ids of each word as a text begins with it, and as it stands behind a space."""
        for word in words:
            _check_unicode("sampling.bad_words", word)
            # White space stands for itself alone: without it, only the blank would be left.
            for text in (word, " " + word.lstrip()) if word.strip() else (word,):
                ids = self._check_ids("sampling.bad_words", self.tokenizer.encode_words(text))
                if not ids:
                    raise InvalidArgument("sampling.bad_words", word, "words that the tokenizer has tokens for")
                yield ids

    def _check_logprobs(self, request: GenerationRequest) -> None:
        wanted = request.logprobs
        for name, count in (("logprobs", wanted.completion), ("prompt_logprobs", wanted.prompt)):
            if count is not None and count > self.max_logprobs:
                raise InvalidArgument(f"output.{name}", count, f"in 0..{self.max_logprobs}, which this server allows")

    def _check_allowed_ids(self, token_ids: Sequence[int]) -> None:
        field = "sampling.allowed_token_ids"
        if len(token_ids) > self.vocab_size:  # before each is looked at
            allowed = f"at most {self.vocab_size}, the size of the vocabulary"
            raise InvalidArgument(field, f"{len(token_ids)} ids", allowed)
        self._check_ids(field, token_ids)

    def _check_chars(self, field: str, num_chars: int) -> None:
        """Refuse a text that no tokenizer makes fit, before one spends seconds on it, and gigabytes."""
        most = MAX_CHARS_PER_TOKEN * self.scheduler.config.max_model_len
        if num_chars > most:
            allowed = f"at most {most} characters ({MAX_CHARS_PER_TOKEN} for each token of the model's length)"
            raise InvalidArgument(field, f"{num_chars} characters", allowed, reason=Reason.PROMPT_TOO_LONG)

    def _check_ids(self, field: str, token_ids: Sequence[int]) -> tuple[int, ...]:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                allowed = f"token ids from 0 to {self.vocab_size - 1}"
                raise InvalidArgument(field, token_id, allowed, reason=Reason.INVALID_TOKEN_ID)
        return tuple(token_ids)


def _field_of(prompt: Prompt) -> str:
    """What the contract calls it."""
    if isinstance(prompt, str):
        return "prompt_text"
    return "chat.messages" if prompt and isinstance(prompt[0], ChatMessage) else "prompt_tokens.ids"


def _check_unicode(field: str, text: str) -> None:
    """A lone surrogate has no UTF-8: no model has seen it and no client can receive it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, text[error.start], "text without lone surrogates") from error
