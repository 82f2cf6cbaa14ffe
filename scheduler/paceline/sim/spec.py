"""What is simulated: machine, engine, tenants and their requests, as a TOML file says it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.config_file import Count, Positive, Table, TenantTable
from paceline.core.config import SchedulerConfig
from paceline.core.cost_model import CostModel
from paceline.core.params import Method
from paceline.errors import InvalidArgument
from paceline.sim.control import roofline

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Lengths(Table):
    """Tokens: log-normal with this mean and coefficient of variation, 1 at least and `most` at most."""

    mean: Positive
    cv: Annotated[float, Field(ge=0.0, le=10.0)] = 1.0
    most: Count = 4096


class Arrivals(Table):
    """When requests come.

    Attributes:
        kind: poisson; gamma, whose gaps vary by `cv`; trace: `file` has a second of arrival, a tenant, prompt tokens
            and completion tokens in each line, as JSON: {"time": 0.5, "tenant": "a", "prompt": 512, "completion": 128};
            backlog: all at once.
        rate: requests per second.
    """

    kind: Literal["poisson", "gamma", "trace", "backlog"] = "poisson"
    rate: Positive = 10.0
    cv: Positive = 2.0
    file: Path | None = None

    @model_validator(mode="after")
    def _check(self) -> Arrivals:
        if (self.kind == "trace") != (self.file is not None):
            raise ValueError("a file goes with the kind trace, and with no other")
        return self


class SimulatedTenant(TenantTable):
    """A tenant's policy, and what it asks for.

    Attributes:
        share: of the arrivals, in proportion to those of others.
        acceptance: mean chance that a draft is kept; `acceptance_spread` is its standard deviation between requests.
        deadline: of each request: seconds from its arrival, uniform between the two.
        time_to_first_token: likewise, a target.
        start: in seconds; what would come earlier is left out.
    """

    share: Positive = 1.0
    prompt_tokens: Lengths = Lengths(mean=512)
    completion_tokens: Lengths = Lengths(mean=128)
    acceptance: Share = 0.7
    acceptance_spread: Annotated[float, Field(ge=0.0, le=0.5)] = 0.1
    deadline: tuple[Positive, Positive] | None = None
    time_to_first_token: Positive | None = None
    start: Annotated[float, Field(ge=0.0)] = 0.0


class Machine(Table):
    """What steps cost: a cost model's `file`, or a target bound by memory up to `free_rows` rows.

    Attributes:
        target_pass: seconds of a target forward of up to `free_rows` rows.
        draft_pass: seconds of a draft pass; None for no draft model.
    """

    file: Path | None = None
    target_pass: Positive = 0.02
    free_rows: Count = 256
    draft_pass: Positive | None = 0.001

    def costs(self) -> CostModel:
        """Raises InvalidArgument: the file is no cost model."""
        if self.file is None:
            return roofline(self.target_pass, self.free_rows, (self.draft_pass or 0.0) / self.target_pass)
        try:
            data: Any = json.loads(self.file.read_text(encoding="utf-8"))
            return CostModel.from_dict(data["costs"] if isinstance(data, dict) and "costs" in data else data)
        except (OSError, ValueError) as error:
            raise InvalidArgument("machine.file", str(self.file), f"a cost model ({error})") from error


class EngineTable(Table):
    """The scheduler's settings that matter here, as in `SchedulerConfig`; `depth` is as of `paceline serve`."""

    num_blocks: Count = 32768
    block_size: Count = 16
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 2048
    max_model_len: Count = 8192
    max_queued: Count = 1_000_000
    depth: Annotated[str, Field(pattern="^(auto|off|[0-9]+)$")] = "auto"
    watermark: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    long_prefill_threshold: Count | None = None
    max_step_seconds: Positive | None = None
    patience: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 10.0
    min_run_seconds: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0

    def config(self, drafts: bool) -> SchedulerConfig:
        """Raises InvalidArgument: settings that do not go together."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name != "depth"}
        return SchedulerConfig(**given, method=Method.DRAFT_MODEL if drafts else Method.NONE)


class SimulationFile(Table):
    """A whole simulation.

    Attributes:
        requests: arrivals, all tenants.
        policy: ours; fcfs: first come, first served, without tenants; edf: the earliest deadline first, refusing what
            cannot be met, without tenants.
        seconds: after which it ends, whether all requests have or not.
    """

    seed: Annotated[int, Field(ge=0)] = 0
    requests: Count = 10_000
    seconds: Annotated[float, Field(gt=0)] = math.inf
    policy: Literal["ours", "fcfs", "edf"] = "ours"
    machine: Machine = Machine()
    engine: EngineTable = EngineTable()
    arrivals: Arrivals = Arrivals()
    tenants: dict[str, SimulatedTenant] = Field(default_factory=lambda: {"default": SimulatedTenant()})

    @model_validator(mode="after")
    def _check(self) -> SimulationFile:
        if not self.tenants:
            raise ValueError("at least one tenant is needed")
        return self
