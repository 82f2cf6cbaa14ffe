"""What random load offers: requests of every kind, in bursts and lulls, drawn step by step and not by the clock."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from paceline import demo
from paceline.core.adaptive_depth import MAX_DEPTH
from paceline.core.grammar import GrammarKind, GrammarSpec
from paceline.core.method import Method
from paceline.core.params import (
    LogprobsMode,
    LogprobsParams,
    SamplingParams,
    SchedulingParams,
    SpeculationBounds,
    SpeculationParams,
    StopParams,
    Verification,
)
from paceline.core.tenant_policy import TenantPolicy
from paceline.engine import Engine, GenerationRequest

MEAN_STEPS = 0.125  # of the model's length, for which a stream runs, about: so streams are told by a rate of arrivals
# Streams that arrivals would keep running, in units of the places that there are: nobody, a few, all, far too many.
LEVELS = (0.0, 0.0, 0.05, 0.3, 0.6, 0.8, 1.0, 1.0, 1.5, 3.0)
SHORTEST_PHASE, LONGEST_PHASE = 10, 300  # steps at one level
BURST = 0.004  # how probable at a step: many come at once
DESERTION = 0.002  # likewise: all that there are are aborted
ABORTED = 0.15  # of as many as come
NUM_PREFIXES = 6
# A few, so that what is kept of compiled ones stays as it is.
GRAMMARS = (
    GrammarSpec(GrammarKind.REGEX, r"[a-z]{1,12}( [a-z]{1,12}){0,20}"),
    GrammarSpec(GrammarKind.CHOICE, choices=("yes", "no", "perhaps, if nothing else comes to mind")),
    GrammarSpec(
        GrammarKind.JSON_SCHEMA,
        '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "n": {"type": "integer"}},'
        ' "required": ["name", "n"], "additionalProperties": false}',
    ),
)


def policies(num_blocks: int) -> dict[str, TenantPolicy]:
    """Tenants who are granted this or that, beside those with nothing of their own."""
    return {
        "heavy": TenantPolicy(weight=3.0, max_priority=5),
        "few": TenantPolicy(max_running=2, max_queued=8),
        "poor": TenantPolicy(tokens_per_second=2000.0, burst_tokens=1000.0),
        "small": TenantPolicy(max_blocks=num_blocks // 4),
        "wary": TenantPolicy(speculation=SpeculationBounds(frozenset({Method.NGRAM}), max_depth=2)),
    }


TENANTS = ("", "", "a", "b", "heavy", "few", "poor", "small", "wary")


@dataclass(frozen=True, slots=True)
class Tick:
    """What happens before a step.

    Attributes:
        requests: that come. Their deadlines count from now.
        aborts: which are aborted, of all live ones in the order in which they came: shares of their number.
        deserted: all of them are.
    """

    requests: tuple[GenerationRequest, ...]
    aborts: tuple[float, ...]
    deserted: bool


class Offers:
    """The same ticks for the same seed, whatever the engine does meanwhile.

    Args:
        engine: for which the requests are meant: its vocabulary, methods, grammars and limits.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        config = engine.scheduler.config
        self._random = random.Random(seed)
        self._places = config.max_num_seqs
        self._longest = config.max_model_len
        self._small = (config.num_blocks // 4) * config.block_size  # tokens that the tenant may hold
        self._vocab = range(engine.vocab_size)
        self._methods = [method for method in Method if method in engine.methods]
        self._grammars = GRAMMARS if engine.grammars is not None else ()
        lines = demo.HELD_OUT_PROMPTS.read_text(encoding="utf-8").splitlines()
        self._texts = [json.loads(line)["prompt"] for line in lines]
        self._known = [engine.tokenize(text) for text in self._texts]  # which the draft model often continues alike
        self._prefixes = [self._cut(self._length(self._longest // 2)) for _ in range(NUM_PREFIXES)]
        self._kinds: tuple[Callable[[int], tuple[int, ...] | str], ...] = (
            self._cut,
            self._cut,
            self._text,
            self._shared,
            self._shared,
            self._copied,
            self._copied,
            self._anything,
        )

    def ticks(self) -> Iterator[Tick]:
        """One for each step, without end."""
        choose = self._random
        while True:
            rate = choose.choice(LEVELS) * self._places / (MEAN_STEPS * self._longest)
            for _ in range(choose.randint(SHORTEST_PHASE, LONGEST_PHASE)):
                count = int(rate) + (choose.random() < rate % 1.0)
                if choose.random() < BURST:
                    count += choose.randint(1, self._places)
                requests = tuple(self._request() for _ in range(count))
                aborts = tuple(choose.random() for _ in range(max(1, count)) if choose.random() < ABORTED)
                yield Tick(requests, aborts if count or choose.random() < rate else (), choose.random() < DESERTION)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _request(self) -> GenerationRequest:
        choose = self._random
        tenant = choose.choice(TENANTS)
        longest = self._small if tenant == "small" else self._longest
        room = self._length(longest - 1) if choose.random() < 0.8 else choose.randint(longest // 2, longest - 1)
        prompt = choose.choice(self._kinds)(room)
        # A text's tokens are fewer than its characters, of which it has no more than there is room for.
        left = longest - len(prompt)
        max_tokens: int | None = self._length(min(left, longest // 4))
        if choose.random() < 0.5:
            max_tokens = choose.randint(1, min(left, longest // 2))
        elif choose.random() < 0.05 and tenant != "small":
            max_tokens = None
        n = choose.choice((2, 3, 4)) if choose.random() < 0.08 else 1
        sampling = self._sampling()
        return GenerationRequest(
            prompt=prompt,
            sampling=sampling,
            stop=self._stop(max_tokens),
            speculation=self._speculation(tenant, sampling),
            logprobs=self._logprobs(),
            grammar=choose.choice(self._grammars) if self._grammars and choose.random() < 0.05 else None,
            n=n,
            scheduling=self._scheduling(tenant),
        )

    def _length(self, most: int) -> int:
        """From 1 on; short ones are as frequent as long ones."""
        return max(1, int(most ** self._random.random()))

    def _cut(self, length: int) -> tuple[int, ...]:
        """Out of a text that the models might go on with; all of it if it is shorter."""
        tokens = self._random.choice(self._known)
        start = self._random.randrange(max(0, len(tokens) - length) + 1)
        return tokens[start : start + length]

    def _text(self, length: int) -> str:
        text: str = self._random.choice(self._texts)
        return text[:length]

    def _shared(self, length: int) -> tuple[int, ...]:
        """A prompt that begins as others do."""
        prefix = self._random.choice(self._prefixes)[:length]
        return (prefix + self._cut(self._length(length)))[:length]

    def _copied(self, length: int) -> tuple[int, ...]:
        """The same again and again, for n-grams to find."""
        period = self._cut(self._random.randint(1, 24))
        return (period * (1 + length // len(period)))[:length]

    def _anything(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.choices(self._vocab, k=length))

    def _sampling(self) -> SamplingParams:
        choose = self._random

        def maybe(share: float) -> bool:
            return choose.random() < share

        sampling = SamplingParams(temperature=0.0)
        if maybe(0.65):
            sampling = SamplingParams(
                temperature=choose.choice((0.3, 0.7, 1.0, 1.5)),
                top_k=choose.choice((0, 0, 1, 20, 100)),
                top_p=choose.choice((1.0, 1.0, 0.9, 0.3)),
                min_p=choose.choice((0.0, 0.0, 0.05)),
                typical_p=choose.choice((1.0, 1.0, 1.0, 0.9)),
                seed=choose.choice((None, choose.getrandbits(64))),
            )
        # Few of these: a step with one of them waits for the step before it.
        if maybe(0.06):
            sampling = replace(
                sampling,
                repetition_penalty=choose.choice((1.0, 1.1)),
                presence_penalty=choose.choice((0.0, 0.5)),
                frequency_penalty=choose.choice((0.2, -0.1)),
            )
        if maybe(0.03):
            biased = choose.sample(self._vocab, choose.randint(1, 8))
            sampling = replace(sampling, logit_bias=tuple((token, choose.uniform(-5.0, 5.0)) for token in biased))
        if maybe(0.02):
            sampling = replace(sampling, allowed_token_ids=tuple(choose.sample(self._vocab, 50)))
        if maybe(0.03):
            sampling = replace(sampling, bad_words=("self", "\n\n", "return")[: choose.randint(1, 3)])
        return sampling

    def _stop(self, max_tokens: int | None) -> StopParams:
        choose = self._random
        return StopParams(
            max_tokens=max_tokens,
            strings=choose.choice(((), (), (), ("\n\n", "def "), ("self.",))),
            token_ids=tuple(choose.sample(self._vocab, 3)) if choose.random() < 0.1 else (),
            ignore_eos=choose.random() < 0.3,
            include_stop_string=choose.random() < 0.3,
            min_tokens=choose.randint(1, max_tokens) if max_tokens and choose.random() < 0.05 else 0,
        )

    def _speculation(self, tenant: str, sampling: SamplingParams) -> SpeculationParams:
        choose = self._random
        method = None if tenant == "wary" else choose.choice((None, None, *self._methods))
        rule = None
        if not sampling.greedy and sampling.seed is None:
            rule = choose.choice((None, Verification.BLOCK, Verification.TOKEN_WISE))
        if tenant == "wary" or method is Method.NONE or choose.random() < 0.4:
            return SpeculationParams(method, verification=rule)
        depth = choose.randint(0, MAX_DEPTH)
        return SpeculationParams(method, choose.choice((0, depth)), depth, rule)

    def _logprobs(self) -> LogprobsParams:
        choose = self._random
        return LogprobsParams(
            completion=choose.choice((0, 1, 5)) if choose.random() < 0.05 else None,
            prompt=choose.choice((0, 3)) if choose.random() < 0.04 else None,
            mode=choose.choice(list(LogprobsMode)),
        )

    def _scheduling(self, tenant: str) -> SchedulingParams:
        choose = self._random

        def seconds(share: float) -> float | None:
            return 10.0 ** choose.uniform(-1.5, 1.5) if choose.random() < share else None

        return SchedulingParams(
            tenant=tenant,
            priority=choose.choice((0, 0, 0, -2, 1, 5)),
            deadline=seconds(0.08),
            queue_timeout=seconds(0.08),
            time_to_first_token=seconds(0.08),
            time_per_output_token=seconds(0.05),
        )


def from_now(request: GenerationRequest, now: float) -> GenerationRequest:
    """The request with its deadline on the engine's clock."""
    deadline = request.scheduling.deadline
    if deadline is None:
        return request
    return replace(request, scheduling=replace(request.scheduling, deadline=now + deadline))
