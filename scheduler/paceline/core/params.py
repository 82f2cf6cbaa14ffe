"""What a request asks for, validated. Field names in errors are the proto's, so a client recognises them."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.core.grammar import Grammar
from paceline.core.method import NO_DRAFTS, Method
from paceline.errors import InvalidArgument, Reason

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256
LARGEST_BIAS = 100.0
LARGEST_PENALTY = 2.0
LARGEST_SEED = (1 << 64) - 1
LARGEST_PRIORITY = 1000


class Verification(enum.StrEnum):
    """The rule by which drafts are kept. All are exact; they differ in how many they keep and what noise they use."""

    GREEDY = "greedy"
    TOKEN_WISE = "token_wise"
    BLOCK = "block"
    COUPLED = "coupled"


class LogprobsMode(enum.StrEnum):
    """Of which distribution logprobs are told."""

    RAW = "raw"  # of the model, before every processor
    PROCESSED = "processed"  # of what was sampled from; for a greedy request, of what the largest was chosen from


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's logits become a distribution. Order and meaning are those of vLLM, `runner/sampler.py` has them.

    Attributes:
        temperature: 0 is greedy (argmax, ties to the lowest id).
        top_k: keep the k most probable tokens and those that tie with the last of them; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p.
        min_p: keep tokens at least this probable, relative to the most probable one.
        typical_p: keep the tokens whose surprise is nearest to the entropy, up to this mass.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the completion.
        presence_penalty: taken off the logits of tokens in the completion.
        frequency_penalty: taken off as often as a token stands in the completion.
        logit_bias: (token id, bias) pairs, each id once, added before the penalties.
        allowed_token_ids: only these may be sampled; empty allows all.
        bad_words: texts whose last token is never sampled behind the tokens before it.
        seed: makes the completion a function of weights, prompt, parameters and seed alone.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidArgument("sampling.temperature", self.temperature, "a finite number >= 0")
        if self.top_k < 0:
            raise InvalidArgument("sampling.top_k", self.top_k, "an integer >= 0 (0 keeps every token)")
        for name in ("top_p", "typical_p"):
            if not 0 < getattr(self, name) <= 1:
                raise InvalidArgument(f"sampling.{name}", getattr(self, name), "in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise InvalidArgument("sampling.min_p", self.min_p, "in [0, 1]")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise InvalidArgument("sampling.repetition_penalty", self.repetition_penalty, "a finite number > 0")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= LARGEST_PENALTY:
                raise InvalidArgument(
                    f"sampling.{name}", getattr(self, name), f"between {-LARGEST_PENALTY} and {LARGEST_PENALTY}"
                )
        self._check_bias()
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidArgument("sampling.bad_words", f"{len(self.bad_words)} words", f"at most {MAX_BAD_WORDS}")
        for word in self.bad_words:
            if not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
                raise InvalidArgument("sampling.bad_words", word, f"words of 1 to {MAX_BAD_WORD_CHARS} characters")
        if self.seed is not None and not 0 <= self.seed <= LARGEST_SEED:
            raise InvalidArgument("sampling.seed", self.seed, "an integer in 0..2^64-1")

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            allowed = f"at most {MAX_LOGIT_BIASES} tokens"
            raise InvalidArgument("sampling.logit_bias", f"{len(self.logit_bias)} tokens", allowed)
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidArgument("sampling.logit_bias", self.logit_bias, "one bias for each token")
        for token_id, bias in self.logit_bias:
            if not abs(bias) <= LARGEST_BIAS:
                allowed = f"biases between {-LARGEST_BIAS} and {LARGEST_BIAS}"
                raise InvalidArgument("sampling.logit_bias", {token_id: bias}, allowed)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Logits depend on the tokens before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def truncated(self) -> bool:
        """Improbable tokens are cut away."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.typical_p < 1.0


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a completion ends.

    Attributes:
        max_tokens: completion tokens at most; None means up to the model's length.
        strings: stop strings, matched in the text across token boundaries; cut from the text unless
            `include_stop_string`.
        token_ids: stop ids; the id itself ends the completion's ids and is no part of its text.
        ignore_eos: the model's end-of-sequence ids do not end the completion.
        min_tokens: completion tokens at least: before, stop ids and end-of-sequence ids are not sampled and stop
            strings do not count.
        include_special_tokens: special tokens are shown in the text.
    """

    max_tokens: int | None = None
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False
    min_tokens: int = 0
    include_special_tokens: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidArgument("stop.max_tokens", self.max_tokens, "an integer >= 1")
        if self.min_tokens < 0:
            raise InvalidArgument("stop.min_tokens", self.min_tokens, "an integer >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgument("stop.min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if len(self.strings) > MAX_STOP_STRINGS:
            allowed = f"at most {MAX_STOP_STRINGS} strings"
            given = f"{len(self.strings)} strings"
            raise InvalidArgument("stop.strings", given, allowed, reason=Reason.TOO_MANY_STOP_STRINGS)
        if len(self.token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidArgument("stop.token_ids", f"{len(self.token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        for string in self.strings:
            if not 1 <= len(string) <= MAX_STOP_STRING_CHARS:
                raise InvalidArgument("stop.strings", string, f"strings of 1 to {MAX_STOP_STRING_CHARS} characters")


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Bounds on speculation; within them the scheduler chooses the depth of every step.

    Attributes:
        method: how drafts are made; None leaves the choice to the server.
        min_depth: lowest depth the policy may choose (the end of a completion or of memory still goes below it). Where
            a draft model may be used, it drafts: n-grams may have nothing to propose.
        max_depth: highest depth; None leaves it to the server.
        verification: TOKEN_WISE or BLOCK for a sampled request without a seed; None for the best, BLOCK.
    """

    method: Method | None = None
    min_depth: int = 0
    max_depth: int | None = None
    verification: Verification | None = None

    def __post_init__(self) -> None:
        if self.min_depth < 0:
            raise InvalidArgument("speculation.min_draft_tokens", self.min_depth, "an integer >= 0")
        if self.max_depth is not None and self.max_depth < self.min_depth:
            raise InvalidArgument(
                "speculation.max_draft_tokens", self.max_depth, f"an integer >= min_draft_tokens ({self.min_depth})"
            )

    def rule_for(self, sampling: SamplingParams) -> Verification:
        """The rule for a request: its temperature and seed decide; `verification` chooses where they leave a choice.

        Raises:
            InvalidArgument: a rule that the request cannot be verified by.
        """
        if sampling.greedy:
            kind, possible = "a greedy", [Verification.GREEDY]
        elif sampling.seed is not None:
            kind, possible = "a seeded", [Verification.COUPLED]
        else:
            kind, possible = "an unseeded, sampled", [Verification.BLOCK, Verification.TOKEN_WISE]
        rule = possible[0] if self.verification is None else self.verification
        if rule not in possible:
            if len(possible) > 1:
                allowed = f"{' or '.join(possible)}, or unset, for {kind} request"
            else:  # it has no name in the contract
                allowed = f"unset, for {kind} request, whose rule is {possible[0]}"
            raise InvalidArgument("speculation.verification", str(rule), allowed)
        return rule

    def within(self, limits: Mapping[str, SpeculationBounds]) -> SpeculationParams:
        """The same request with the depths that are left to it: a request may always ask for less, never for more.

        Args:
            limits: by whose they are, in words.

        Raises:
            InvalidArgument: `min_depth` is above a limit's highest depth.
        """
        min_depth, max_depth, strictest = self.min_depth, self.max_depth, ""
        for whose, bounds in limits.items():
            min_depth = max(min_depth, bounds.min_depth)
            if bounds.highest is not None and (max_depth is None or bounds.highest < max_depth):
                max_depth, strictest = bounds.highest, whose
        if max_depth is not None:
            if self.min_depth > max_depth:
                allowed = f"at most {max_depth}, the highest depth of {strictest}"
                raise InvalidArgument("speculation.min_draft_tokens", self.min_depth, allowed)
            min_depth = min(min_depth, max_depth)
        if (min_depth, max_depth) == (self.min_depth, self.max_depth):
            return self
        return replace(self, min_depth=min_depth, max_depth=max_depth)


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """Whose a request is, and when its tokens are wanted. Times are in seconds.

    Attributes:
        tenant: whose request it is, by name.
        priority: higher goes first within the tenant, and as if it had come earlier; lowered to the tenant's highest.
        deadline: on the scheduler's clock, when the completion has to be whole; None if whenever.
        queue_timeout: from arrival to admission, at most.
        time_to_first_token: from arrival, at most.
        time_per_output_token: after the first. Prompts of others are read in smaller parts while it runs, but at no
            less than half their speed.
    """

    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    queue_timeout: float | None = None
    time_to_first_token: float | None = None
    time_per_output_token: float | None = None

    def __post_init__(self) -> None:
        if abs(self.priority) > LARGEST_PRIORITY:
            allowed = f"an integer in -{LARGEST_PRIORITY}..{LARGEST_PRIORITY}"
            raise InvalidArgument("scheduling.priority", self.priority, allowed)
        for name in ("queue_timeout", "time_to_first_token", "time_per_output_token"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise InvalidArgument(f"scheduling.{name}", value, "a time > 0")


ANYBODY = SchedulingParams()


@dataclass(frozen=True, slots=True)
class SpeculationBounds:
    """What an operator allows the requests of one tenant, or all requests.

    Attributes:
        methods: that may draft. Without any, speculation is off.
        min_depth: lowest depth of a request that does not ask for less.
        max_depth: highest depth; None sets no limit, with 0 speculation is off.
    """

    methods: frozenset[Method] = frozenset(Method)
    min_depth: int = 0
    max_depth: int | None = None

    def __post_init__(self) -> None:
        if self.min_depth < 0:
            raise InvalidArgument("min_depth", self.min_depth, "an integer >= 0")
        if self.max_depth is not None and self.max_depth < self.min_depth:
            raise InvalidArgument("max_depth", self.max_depth, f"an integer >= min_depth ({self.min_depth})")

    @property
    def allowed(self) -> frozenset[Method]:
        """The methods that a request may name: NONE always, the others unless speculation is off."""
        return NO_DRAFTS if self.max_depth == 0 else self.methods | NO_DRAFTS

    @property
    def highest(self) -> int | None:
        """The highest depth that a request may name: 0 where speculation is off, None without a limit."""
        return 0 if self.methods <= NO_DRAFTS else self.max_depth


@dataclass(frozen=True, slots=True)
class LogprobsParams:
    """Which logprobs come with the tokens; None means none.

    Attributes:
        completion: most probable tokens told besides each token of the completion.
        prompt: the same for each token of the prompt but the first.
    """

    completion: int | None = None
    prompt: int | None = None
    mode: LogprobsMode = LogprobsMode.RAW

    def __post_init__(self) -> None:
        for name, count in (("logprobs", self.completion), ("prompt_logprobs", self.prompt)):
            if count is not None and count < 0:
                raise InvalidArgument(f"output.{name}", count, "an integer >= 0")


@dataclass(frozen=True, slots=True)
class Constraints:
    """What a completion may not contain, in token ids; the engine makes them out of the request.

    Attributes:
        bad_words: token sequences that are not completed.
        stop_token_ids: not sampled before there are `min_tokens` tokens.
        grammar: what the completion must match.
        ends_with_grammar: the completion ends where the grammar does, since no end-of-sequence id can say so.
    """

    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    ends_with_grammar: bool = False


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """All that the runner has to know about one completion.

    Attributes:
        choice: which of the request's n completions it is.
    """

    sampling: SamplingParams = SamplingParams()
    constraints: Constraints = Constraints()
    logprobs: LogprobsParams = LogprobsParams()
    verification: Verification = Verification.BLOCK
    choice: int = 0

    @property
    def edits_logits(self) -> bool:
        """Something besides temperature and truncation changes the logits."""
        sampling, constraints = self.sampling, self.constraints
        return (
            sampling.penalised
            or bool(sampling.logit_bias or sampling.allowed_token_ids or constraints.bad_words)
            or constraints.grammar is not None
            or constraints.min_tokens > 0
        )
