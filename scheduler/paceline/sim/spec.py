"""What is simulated: machine, engine, tenants and their requests, as a TOML file says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from paceline.config_file import Count, Positive, Table, TenantTable, read_file
from paceline.core.config import PrefixScope, SchedulerConfig
from paceline.core.cost_model import LARGEST_BUCKET, CostModel
from paceline.core.method import Method
from paceline.errors import InvalidArgument
from paceline.sim.control import roofline

# Beyond any machine and any load, and within what can be computed and held.
LARGEST = 1e9
MOST_BLOCKS = 1 << 22

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Bounded = Annotated[float, Field(gt=0, le=LARGEST, strict=True)]
Pass = Annotated[float, Field(ge=1e-9, le=1000.0, strict=True)]  # seconds
Rows = Annotated[int, Field(ge=1, le=LARGEST_BUCKET, strict=True)]


def _ascending(span: tuple[float, float]) -> tuple[float, float]:
    if span[0] > span[1]:
        raise PydanticCustomError("span", "the lower of the two comes first")
    return span


Span = Annotated[tuple[Bounded, Bounded], AfterValidator(_ascending)]


class Lengths(Table):
    """Tokens: log-normal with this mean and coefficient of variation, 1 at least and `most` at most."""

    mean: Bounded
    cv: Annotated[float, Field(ge=0.0, le=10.0)] = 1.0
    most: Count = 4096


class Arrivals(Table):
    """When requests come.

    Attributes:
        kind: poisson; gamma, whose gaps vary by `cv`; trace: `file` has a second of arrival, a tenant, prompt tokens
            and completion tokens in each line, as JSON: {"time": 0.5, "tenant": "a", "prompt": 512, "completion": 128};
            backlog: `waiting` requests of each tenant wait at any time, so that the machine is never short of work.
        rate: requests per second, all tenants.
        cv: standard deviation of the gaps over their mean.
    """

    kind: Literal["poisson", "gamma", "trace", "backlog"] = "poisson"
    rate: Annotated[float, Field(ge=1e-6, le=LARGEST, strict=True)] = 10.0
    cv: Annotated[float, Field(ge=0.001, le=100.0, strict=True)] = 2.0
    waiting: Annotated[int, Field(ge=1, le=1_000_000, strict=True)] = 64
    file: Path | None = Field(default=None, validate_default=True)

    @field_validator("file")
    @classmethod
    def _check_file(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        kind = info.data.get("kind")  # absent where it is wrong itself
        if kind is not None and (kind == "trace") != (value is not None):
            raise PydanticCustomError("file", "a file goes with the kind trace, and with no other")
        return value


class SimulatedTenant(TenantTable):
    """A tenant's policy, and what it asks for.

    Attributes:
        share: of the arrivals, in proportion to those of others.
        acceptance: mean chance that a draft is kept; `acceptance_spread` is its standard deviation between requests.
        deadline: of each request: seconds from its arrival, uniform between the two.
        slowdown: the same as multiples of what the request takes alone and without drafts.
        time_to_first_token: a target for each, in seconds.
        start: in seconds; what would come earlier is left out.
    """

    share: Bounded = 1.0
    tokens_per_second: Annotated[float, Field(ge=1e-6, allow_inf_nan=False, strict=True)] | None = None
    prompt_tokens: Lengths = Lengths(mean=512)
    completion_tokens: Lengths = Lengths(mean=128)
    acceptance: Share = 0.7
    acceptance_spread: Annotated[float, Field(ge=0.0, le=0.5)] = 0.1
    deadline: Span | None = None
    slowdown: Span | None = None
    time_to_first_token: Bounded | None = None
    start: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0

    @field_validator("slowdown")
    @classmethod
    def _check_slowdown(cls, value: Span | None, info: ValidationInfo) -> Span | None:
        if value is not None and info.data.get("deadline") is not None:
            raise PydanticCustomError("slowdown", "deadline or slowdown, not both")
        return value


class Machine(Table):
    """What steps cost: a cost model's `file`, or a target bound by memory up to `free_rows` rows.

    Attributes:
        target_pass: seconds of a target forward of up to `free_rows` rows.
        free_rows: as many as no step has: arithmetic never binds.
        draft_pass: seconds of a draft pass; None for no draft model.
    """

    file: Path | None = None
    target_pass: Pass = 0.02
    free_rows: Count = 256
    draft_pass: Pass | None = 0.001

    @property
    def drafts(self) -> bool:
        """There is a draft model."""
        return self.file is not None or self.draft_pass is not None

    def costs(self) -> CostModel:
        """Raises InvalidArgument: the file is no cost model."""
        if self.file is None:
            return roofline(self.target_pass, self.free_rows, (self.draft_pass or 0.0) / self.target_pass)
        try:
            data: Any = json.loads(self.file.read_text(encoding="utf-8"))
            return CostModel.from_dict(data["costs"] if isinstance(data, dict) and "costs" in data else data)
        except OSError as error:
            raise InvalidArgument("machine.file", self.file, f"a readable file ({error.strerror})") from error
        except ValueError as error:
            raise InvalidArgument("machine.file", self.file, f"a cost model ({error})") from error


class EngineTable(Table):
    """The scheduler's settings that matter here, as in `SchedulerConfig`; `depth` is as of `paceline serve`.

    Prompts have no text, so that none is found in a prefix cache.
    """

    num_blocks: Annotated[int, Field(ge=1, le=MOST_BLOCKS, strict=True)] = 32768
    block_size: Rows = 16
    max_num_seqs: Rows = 256
    max_num_batched_tokens: Rows = Field(default=2048, validate_default=True)
    max_model_len: Annotated[int, Field(ge=2, le=1_000_000_000, strict=True)] = 8192
    max_queued: Count = 1_000_000
    depth: Annotated[str, Field(pattern="^(auto|off|[0-9]+)$")] = "auto"
    watermark: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    long_prefill_threshold: Count | None = None
    max_step_seconds: Positive | None = None
    max_slowdown: Annotated[float, Field(gt=1.0, allow_inf_nan=True)] = 1.1
    patience: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 10.0
    min_run_seconds: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0

    def config(self, drafts: bool) -> SchedulerConfig:
        """Raises InvalidArgument: settings that do not go together."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name != "depth"}
        method = Method.DRAFT_MODEL if drafts else Method.NONE
        return SchedulerConfig(**given, method=method, prefix_cache=PrefixScope.OFF)

    @field_validator("max_num_batched_tokens")
    @classmethod
    def _check_budget(cls, value: int, info: ValidationInfo) -> int:
        running = info.data.get("max_num_seqs", 0)
        if value < running:
            raise PydanticCustomError("budget", "must be at least max_num_seqs ({running})", {"running": running})
        return value


class SimulationFile(Table):
    """A whole simulation.

    Attributes:
        requests: arrivals, all tenants; of a trace all, unless a number is given, else 10,000.
        policy: ours; fcfs: first come, first served, without tenants; edf: the earliest deadline first, refusing what
            cannot be met, without tenants.
        seconds: after which it ends, whether all requests have or not.
    """

    seed: Annotated[int, Field(ge=0)] = 0
    requests: Count | None = None
    seconds: Positive | None = None
    policy: Literal["ours", "fcfs", "edf"] = "ours"
    machine: Machine = Machine()
    engine: EngineTable = EngineTable()
    arrivals: Arrivals = Arrivals()
    tenants: Annotated[dict[str, SimulatedTenant], Field(min_length=1)] = Field(
        default_factory=lambda: {"default": SimulatedTenant()}
    )


def read_simulation(path: Path) -> SimulationFile:
    """Read a file; those that it names are sought beside it. Raises InvalidArgument with every mistake."""
    file = read_file(path, SimulationFile)
    found = {}
    for name in ("machine", "arrivals"):
        table = getattr(file, name)
        if table.file is not None:
            found[name] = table.model_copy(update={"file": path.parent / table.file})
    return file.model_copy(update=found)
