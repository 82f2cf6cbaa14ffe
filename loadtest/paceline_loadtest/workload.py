"""What is sent, and when: a pure function of the configuration, the prompts and the seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Literal, TypeAlias

from paceline.errors import InvalidArgument
from paceline.options import check_timeout
from paceline_loadtest.prompts import Prompt

Speculation: TypeAlias = Literal["auto", "off", "ngram", "draft_model"]

LEAST_BURSTINESS = 0.05  # of smaller ones gaps come out as 0 in floating point, in the end all of them


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What every request of a run asks for.

    Attributes:
        temperature: None is the server's default, 0 is greedy.
        ignore_eos: generate up to the maximum, so that every run produces the same number of tokens.
        speculation: the method the server may use.
        timeout: deadline of a request in seconds; None is none, and so is inf.
    """

    temperature: float | None = 0.0
    ignore_eos: bool = False
    speculation: Speculation = "auto"
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """One run.

    Open loop: requests arrive at `request_rate`, whatever the server does. Closed loop: the rate is infinite and
    `max_concurrency` set, so each request waits for a free place. With both, arrivals queue here for a free place.

    Attributes:
        num_prompts: requests to measure.
        num_warmups: requests before them that are not measured.
        request_rate: requests per second.
        burstiness: shape of the gamma distribution of the gaps: 1 is Poisson, above is more even, inf is constant; at
            least 0.05.
        max_concurrency: most requests at once.
        max_tokens: fewest and most tokens to ask for; each request draws evenly from the range.
        seed: of arrivals, order of prompts and lengths.
        options: the same for every request.

    Raises:
        InvalidArgument: a value outside its range.
    """

    num_prompts: int = 64
    num_warmups: int = 0
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    max_tokens: tuple[int, int] = (128, 128)
    seed: int = 0
    options: RequestOptions = field(default_factory=RequestOptions)

    def __post_init__(self) -> None:
        _require("num_prompts", self.num_prompts, self.num_prompts >= 1, "at least 1")
        _require("num_warmups", self.num_warmups, self.num_warmups >= 0, "at least 0")
        _require("request_rate", self.request_rate, self.request_rate > 0, "above 0, or inf")
        least = f"at least {LEAST_BURSTINESS}, or inf"
        _require("burstiness", self.burstiness, self.burstiness >= LEAST_BURSTINESS, least)
        concurrency = self.max_concurrency
        _require("max_concurrency", concurrency, concurrency is None or concurrency >= 1, "at least 1")
        low, high = self.max_tokens
        _require("max_tokens", self.max_tokens, 1 <= low <= high, "at least 1, or a range LOW-HIGH of such")
        temperature = self.options.temperature
        _require("temperature", temperature, temperature is None or temperature >= 0, "at least 0")
        check_timeout(self.options.timeout)

    @property
    def closed_loop(self) -> bool:
        """Whether requests have no arrival times of their own: each is sent when one before it ends."""
        return math.isinf(self.request_rate) and self.max_concurrency is not None


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request and the time it is meant to arrive, in seconds after the start."""

    index: int
    arrival: float
    prompt: Prompt
    max_tokens: int
    options: RequestOptions


@dataclass(frozen=True, slots=True)
class Workload:
    """The plan of a run: `warmups` are sent first and not measured."""

    config: LoadConfig
    requests: tuple[PlannedRequest, ...]
    warmups: tuple[PlannedRequest, ...] = ()


def plan(config: LoadConfig, prompts: Sequence[Prompt]) -> Workload:
    """The same requests at the same times for the same arguments.

    Prompts are taken in a shuffled order, each once before any is repeated. Warm-ups take the ones after the measured
    requests, so that with enough prompts no measured prompt is in the server's prefix cache already.

    Raises:
        InvalidArgument: there is no prompt.
    """
    _require("prompts", list(prompts), len(prompts) > 0, "at least one")
    total = config.num_prompts + config.num_warmups
    chosen = list(islice(_shuffled_forever(prompts, _stream(config.seed, "prompts")), total))
    lengths = _stream(config.seed, "lengths")
    times = arrivals(config) + [0.0] * config.num_warmups
    planned = [
        PlannedRequest(index, time, prompt, lengths.randint(*config.max_tokens), config.options)
        for index, (time, prompt) in enumerate(zip(times, chosen, strict=True))
    ]
    return Workload(config, tuple(planned[: config.num_prompts]), tuple(planned[config.num_prompts :]))


def arrivals(config: LoadConfig) -> list[float]:
    """Arrival times in seconds after the start, ascending.

    The gaps are gamma distributed and then scaled so that the last request arrives at `num_prompts / request_rate`:
    the mean rate of a run is exactly the one asked for, and runs of different seeds can be compared.
    """
    count, rate, shape = config.num_prompts, config.request_rate, config.burstiness
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(shape):
        return [(index + 1) / rate for index in range(count)]
    draw = _stream(config.seed, "arrivals")
    times = list(accumulate(draw.gammavariate(shape, 1.0) for _ in range(count)))
    scale = count / rate / times[-1]
    return [time * scale for time in times]


def _shuffled_forever(prompts: Sequence[Prompt], draw: random.Random) -> Iterator[Prompt]:
    while True:
        yield from draw.sample(prompts, len(prompts))


def _stream(seed: int, purpose: str) -> random.Random:
    # One generator per purpose: asking for other lengths leaves the arrivals as they were.
    return random.Random(f"{seed}/{purpose}")


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise InvalidArgument(name, value, allowed)
