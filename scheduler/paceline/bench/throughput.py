"""The grid of concurrency and depth, measured in turns so that drift of the machine hits every cell alike."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from rich.progress import track

from paceline.bench.depth_names import OFF
from paceline.bench.prompts import encode
from paceline.core.params import SamplingParams, SpeculationParams, StopParams
from paceline.core.request import RequestStats
from paceline.engine import Engine, GenerationRequest
from paceline.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one cell: the same streams twice, once for their first token only.

    Attributes:
        prefill_seconds: the time with max_tokens 1.
        seconds: the whole run.
        tokens: completion tokens of the whole run.
        draft, verify, sample: seconds of the whole run; the rest is Python.
    """

    streams: int
    prefill_seconds: float
    seconds: float
    tokens: int
    verify_steps: int
    drafted: int
    draft: float
    verify: float
    sample: float

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second of decode alone; None where the whole run took no longer than its prefill."""
        seconds = self.seconds - self.prefill_seconds
        return (self.tokens - self.streams) / seconds if seconds > 0.0 else None

    @property
    def rate(self) -> float:
        """Tokens per second of the whole run."""
        return self.tokens / self.seconds


@dataclass(slots=True)
class Cell:
    """Every measurement of one concurrency and depth; `off` holds those of depth off in the same rounds."""

    concurrency: int
    depth: str
    samples: list[Sample] = field(default_factory=list)
    off: list[Sample] = field(default_factory=list)

    def median(self, name: str) -> float | None:
        """None if a round has no such value."""
        return _median([getattr(sample, name) for sample in self.samples])

    def ratio(self, name: str) -> float | None:
        """Median over rounds of this cell's value over depth off's of the same round; None if a round has none."""
        if not self.off:
            return None
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(self.samples, self.off, strict=True)]
        return _median([None if a is None or b is None else a / b for a, b in pairs])

    def share(self, name: str) -> float:
        """Share of the whole run spent in draft, verify or sample."""
        return float(sum(getattr(s, name) for s in self.samples) / sum(s.seconds for s in self.samples))

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify step; the first of each stream comes from its prompt."""
        return sum(s.tokens - s.streams for s in self.samples) / sum(s.verify_steps for s in self.samples)

    @property
    def mean_depth(self) -> float:
        return sum(s.drafted for s in self.samples) / sum(s.verify_steps for s in self.samples)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(median(known)) if known and len(known) == len(values) else None


def measure(
    engine: Engine,
    prompts: Sequence[str | tuple[int, ...]],
    sizes: Sequence[int],
    depths: dict[str, SpeculationParams],
    max_tokens: int,
    rounds: int,
    sampling: SamplingParams,
) -> list[Cell]:
    """Measure every cell `rounds` times: depths in turn within a round (A B A B), with other prompts each round.

    Each turn of depths is preceded by an unmeasured run of its prompts, or the first depth alone would pay for whatever
    a library sets up at the first sight of a shape; an unmeasured round comes first of all. A setting that the engine
    refuses raises its error before anything is measured.
    """
    encoded = encode(engine, prompts)
    _check_lengths(max(map(len, encoded)), max_tokens, engine.scheduler.config.max_model_len)
    cells = {(size, name): Cell(size, name) for size in sizes for name in depths}
    turns = [(number, size, name) for size in sizes for number in range(-1, rounds) for name in depths]
    for number, size, name in track(turns, description="measuring"):
        first = max(0, number) * size
        streams = [encoded[(first + i) % len(encoded)] for i in range(size)]
        if name == next(iter(depths)):
            run(engine, streams, 1, depths[name], sampling)
        sample = _measure_once(engine, streams, max_tokens, depths[name], sampling)
        if number >= 0:
            cells[size, name].samples.append(sample)
    for cell in cells.values():
        if (cell.concurrency, OFF) in cells:
            cell.off = cells[cell.concurrency, OFF].samples
    return list(cells.values())


def _check_lengths(longest: int, max_tokens: int, max_model_len: int) -> None:
    """Raises InvalidArgument: the longest prompt and its completion are longer than the model allows."""
    room = max_model_len - longest
    if max_tokens > room:
        raise InvalidArgument(
            "max_tokens", max_tokens, f"at most {room}, beside the longest prompt of {longest} tokens"
        )


def _measure_once(
    engine: Engine,
    prompts: list[tuple[int, ...]],
    max_tokens: int,
    speculation: SpeculationParams,
    sampling: SamplingParams,
) -> Sample:
    prefill_seconds, _ = run(engine, prompts, 1, speculation, sampling)
    before = replace(engine.totals)
    seconds, stats = run(engine, prompts, max_tokens, speculation, sampling)
    after = engine.totals
    return Sample(
        streams=len(prompts),
        prefill_seconds=prefill_seconds,
        seconds=seconds,
        tokens=sum(s.completion_tokens for s in stats),
        verify_steps=sum(s.verify_steps for s in stats),
        drafted=sum(s.drafted_tokens for s in stats),
        draft=after.draft - before.draft,
        verify=after.verify - before.verify,
        sample=after.sample - before.sample,
    )


def run(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    speculation: SpeculationParams,
    sampling: SamplingParams | Sequence[SamplingParams],
) -> tuple[float, list[RequestStats]]:
    """Complete all prompts together, each with one of the samplings in turn; seconds, and the account of each."""
    stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
    samplings = [sampling] if isinstance(sampling, SamplingParams) else sampling
    began = time.perf_counter()
    for token_ids, own in zip(prompts, itertools.cycle(samplings), strict=False):
        engine.add(GenerationRequest(token_ids, own, stop, speculation))
    stats = []
    while engine.has_work:
        stats += [output.stats for output in engine.step() if output.stats is not None]
    return time.perf_counter() - began, stats
