"""The requests of a simulation, drawn one by one: equal for equal files and seeds, and never all in memory."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.config_file import BadFile
from paceline.core.params import SamplingParams, SchedulingParams, SpeculationParams, StopParams
from paceline.errors import InvalidArgument
from paceline.sim.spec import Lengths, SimulatedTenant, SimulationFile

BATCH: Final = 4096  # requests drawn at a time
REQUESTS: Final = 10_000  # unless the file says how many
MOST_MISTAKES: Final = 20  # of a trace: the rest of it is not looked at
GREEDY: Final = SamplingParams(temperature=0.0)
DEFAULT_SPECULATION: Final = SpeculationParams()


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request as it will come.

    Attributes:
        time: of arrival, in seconds; of a backlog 0, since these come when there is room.
        acceptance: chance that a draft is kept if all before it were.
        within, time_to_first_token: seconds from arrival to the deadline and to the target for the first token, if any.
    """

    time: float
    tenant: str
    prompt_tokens: int
    completion_tokens: int
    acceptance: float
    within: float | None
    time_to_first_token: float | None

    def scheduling(self, tenant: str, now: float) -> SchedulingParams:
        """What the scheduler is told of it if it comes now."""
        deadline = None if self.within is None else now + self.within
        return SchedulingParams(tenant, deadline=deadline, time_to_first_token=self.time_to_first_token)

    @property
    def stop(self) -> StopParams:
        return StopParams(max_tokens=self.completion_tokens)


class Population:
    """Draws requests.

    Args:
        stream: of random numbers: those of different streams have nothing to do with each other.
    """

    def __init__(self, file: SimulationFile, stream: int = 0) -> None:
        self.file = file
        self._costs = file.machine.costs()
        self._random = np.random.Generator(np.random.Philox(np.random.SeedSequence([file.seed, stream])))

    def arrivals(self) -> Iterator[SimulatedRequest]:
        """In order of arrival, of any kind but a backlog. Raises BadFile: a trace has lines that are not as they should
        be.
        """
        file, random = self.file, self._random
        if file.arrivals.kind == "trace":
            yield from self._trace()
            return
        names = list(file.tenants)
        shares = np.array([file.tenants[name].share for name in names])
        now, left = 0.0, file.requests or REQUESTS
        while left:
            count = min(left, BATCH)
            left -= count
            times = now + np.cumsum(self._gaps(count))
            now = float(times[-1])
            owners = random.choice(len(names), size=count, p=shares / shares.sum()).tolist()
            drawn = self._draw([names[owner] for owner in owners], times.tolist())
            yield from (request for request in drawn if request.time >= file.tenants[request.tenant].start)

    def backlog(self, tenant: str) -> Iterator[SimulatedRequest]:
        """One request of the tenant after the other, without end."""
        while True:
            yield from self._draw([tenant] * BATCH, [0.0] * BATCH)

    def _gaps(self, count: int) -> np.ndarray:
        """Seconds between arrivals."""
        arrivals = self.file.arrivals
        if arrivals.kind == "gamma":
            shape = 1.0 / arrivals.cv**2
            return self._random.gamma(shape, 1.0 / (arrivals.rate * shape), size=count)
        return self._random.exponential(1.0 / arrivals.rate, size=count)

    def _draw(self, names: list[str], times: list[float]) -> Iterator[SimulatedRequest]:
        room = self.file.engine.max_model_len
        normal = self._random.standard_normal((len(names), 3)).tolist()
        shares = self._random.random(len(names)).tolist()
        for name, time, (of_prompt, of_completion, of_acceptance), share in zip(
            names, times, normal, shares, strict=True
        ):
            tenant = self.file.tenants[name]
            prompt = min(_length(tenant.prompt_tokens, of_prompt), room - 1)
            completion = min(_length(tenant.completion_tokens, of_completion), room - prompt)
            yield self._request(time, name, prompt, completion, of_acceptance, share)

    def _request(
        self, time: float, name: str, prompt: int, completion: int, normal: float, share: float
    ) -> SimulatedRequest:
        """Make a request of a tenant's table.

        Args:
            normal: of a normal distribution: the place among the acceptances.
            share: of a uniform one: the place between the shortest and the longest deadline.
        """
        tenant = self.file.tenants[name]
        acceptance = min(max(tenant.acceptance + tenant.acceptance_spread * normal, 0.0), 1.0)
        within = self._within(tenant, prompt, completion, share)
        return SimulatedRequest(time, name, prompt, completion, acceptance, within, tenant.time_to_first_token)

    def _within(self, tenant: SimulatedTenant, prompt: int, completion: int, share: float) -> float | None:
        """Seconds to the deadline."""
        span = tenant.deadline or tenant.slowdown
        if span is None:
            return None
        seconds = span[0] + (span[1] - span[0]) * share
        return seconds if tenant.slowdown is None else seconds * self._alone(prompt, completion)

    def _alone(self, prompt: int, completion: int) -> float:
        """Seconds that a request takes if no other is there, and nobody drafts."""
        costs, most = self._costs, self.file.engine.max_num_batched_tokens
        whole, rest = divmod(prompt, most)
        reading = whole * costs.target(most, prompt // 2, 1) + (costs.target(rest, prompt, 1) if rest else 0.0)
        return reading + (completion - 1) * costs.target(1, prompt + completion // 2, 1)

    def _trace(self) -> Iterator[SimulatedRequest]:
        path = self.file.arrivals.file
        assert path is not None, "checked with the file"
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise InvalidArgument("arrivals.file", path, f"a readable file ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise InvalidArgument("arrivals.file", path, f"text in UTF-8 ({error})") from error
        requests, mistakes = [], []
        told = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        for number, line in itertools.islice(told, self.file.requests):
            try:
                requests.append(self._line(json.loads(line)))
            except (KeyError, TypeError, ValueError, OverflowError):
                allowed = 'a known "tenant", a "time" >= 0, and "prompt" and "completion" that fit max_model_len'
                mistakes.append(str(InvalidArgument(f"line {number}", line, allowed)))
                if len(mistakes) == MOST_MISTAKES:
                    break
        if mistakes:
            raise BadFile(path, mistakes)
        if not requests:
            raise InvalidArgument("arrivals.file", path, "a trace of at least one request")
        yield from sorted(requests, key=lambda request: request.time)

    def _line(self, data: dict[str, object]) -> SimulatedRequest:
        time, name, prompt, completion = (data[key] for key in ("time", "tenant", "prompt", "completion"))
        if not (isinstance(time, int | float) and isinstance(prompt, int) and isinstance(completion, int)):
            raise TypeError("not a number")
        fits = prompt >= 1 and completion >= 1 and prompt + completion <= self.file.engine.max_model_len
        if not (fits and 0.0 <= time < math.inf and isinstance(name, str) and name in self.file.tenants):
            raise ValueError("out of range")
        normal, share = self._random.standard_normal(), self._random.random()
        return self._request(float(time), name, prompt, completion, normal, share)


def _length(lengths: Lengths, normal: float) -> int:
    """Log-normal."""
    variance = math.log(1.0 + lengths.cv**2)
    tokens = lengths.mean * math.exp(math.sqrt(variance) * normal - variance / 2.0)
    return max(1, min(round(tokens), lengths.most))
