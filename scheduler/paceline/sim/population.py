"""The requests of a simulation, drawn one by one: equal for equal files and seeds, and never all in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paceline.core.params import SamplingParams, SchedulingParams, SpeculationParams, StopParams
from paceline.errors import InvalidArgument
from paceline.sim.spec import Lengths, SimulatedTenant, SimulationFile

BATCH = 4096  # arrivals drawn at a time
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """Attributes:
    time: of arrival, in seconds.
    acceptance: chance that a draft is kept if all before it were.
    """

    time: float
    tenant: str
    prompt_tokens: int
    completion_tokens: int
    acceptance: float
    deadline: float | None
    time_to_first_token: float | None

    @property
    def scheduling(self) -> SchedulingParams:
        return SchedulingParams(self.tenant, deadline=self.deadline, time_to_first_token=self.time_to_first_token)

    @property
    def stop(self) -> StopParams:
        return StopParams(max_tokens=self.completion_tokens)


DEFAULT_SPECULATION = SpeculationParams()


def draw_requests(file: SimulationFile) -> Iterator[SimulatedRequest]:
    """In order of arrival. Raises InvalidArgument: a line of a trace is not as it should be."""
    random = np.random.Generator(np.random.Philox(file.seed))
    if file.arrivals.kind == "trace":
        yield from _trace(file, random)
        return
    names = list(file.tenants)
    shares = np.array([file.tenants[name].share for name in names])
    now, left = 0.0, file.requests
    while left:
        count = min(left, BATCH)
        left -= count
        times = now + np.cumsum(_gaps(file, random, count))
        now = float(times[-1])
        owners = random.choice(len(names), size=count, p=shares / shares.sum())
        yield from _batch(file, random, times, [names[owner] for owner in owners])


def _gaps(file: SimulationFile, random: np.random.Generator, count: int) -> np.ndarray:
    arrivals = file.arrivals
    if arrivals.kind == "backlog":
        return np.zeros(count)
    if arrivals.kind == "gamma":
        shape = 1.0 / arrivals.cv**2
        return random.gamma(shape, 1.0 / (arrivals.rate * shape), size=count)
    return random.exponential(1.0 / arrivals.rate, size=count)


def _batch(
    file: SimulationFile, random: np.random.Generator, times: np.ndarray, names: list[str]
) -> Iterator[SimulatedRequest]:
    room = file.engine.max_model_len
    normal = random.standard_normal((3, len(names)))
    waits = random.random(len(names))
    for index, name in enumerate(names):
        tenant = file.tenants[name]
        prompt = min(_length(tenant.prompt_tokens, normal[0, index]), room - 1)
        completion = min(_length(tenant.completion_tokens, normal[1, index]), room - prompt)
        time = float(times[index])
        if time < tenant.start:
            continue
        yield SimulatedRequest(
            time, name, prompt, completion, _acceptance(tenant, normal[2, index]), *_wanted(tenant, time, waits[index])
        )


def _length(lengths: Lengths, normal: float) -> int:
    variance = math.log(1.0 + lengths.cv**2)
    tokens = lengths.mean * math.exp(math.sqrt(variance) * normal - variance / 2.0)
    return max(1, min(round(tokens), lengths.most))


def _acceptance(tenant: SimulatedTenant, normal: float) -> float:
    return min(max(tenant.acceptance + tenant.acceptance_spread * float(normal), 0.0), 1.0)


def _wanted(tenant: SimulatedTenant, time: float, share: float) -> tuple[float | None, float | None]:
    """The deadline and the target for the first token."""
    deadline = None
    if tenant.deadline is not None:
        shortest, longest = tenant.deadline
        deadline = time + shortest + (longest - shortest) * float(share)
    return deadline, tenant.time_to_first_token


def _trace(file: SimulationFile, random: np.random.Generator) -> Iterator[SimulatedRequest]:
    path = file.arrivals.file
    assert path is not None, "checked with the file"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("arrivals.file", str(path), f"a readable file ({error})") from error
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            tenant = file.tenants[data["tenant"]]
            time, prompt, completion = float(data["time"]), int(data["prompt"]), int(data["completion"])
            if not (
                time >= 0.0 and prompt >= 1 and completion >= 1 and prompt + completion <= file.engine.max_model_len
            ):
                raise ValueError("out of range")
        except (KeyError, TypeError, ValueError) as error:
            allowed = 'a known "tenant", a "time" >= 0, and "prompt" and "completion" that fit max_model_len'
            raise InvalidArgument(f"arrivals.file, line {number}", line, allowed) from error
        wanted = _wanted(tenant, time, random.random())
        acceptance = _acceptance(tenant, random.standard_normal())
        requests.append(SimulatedRequest(time, data["tenant"], prompt, completion, acceptance, *wanted))
    yield from sorted(requests, key=lambda request: request.time)
