"""Ways to choose depths, which benchmarks compare in one engine: `auto`, `off`, fixed depths, and rules of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from paceline.bench import trim
from paceline.bench.baselines import BASELINES
from paceline.bench.depth_names import AUTO, OFF, check_depth
from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.cost_model import CostModel
from paceline.core.depth_policy import DepthPolicy, FixedDepth
from paceline.core.method import Method
from paceline.core.params import SpeculationParams
from paceline.core.speculation import SpeculationControl
from paceline.engine import Engine
from paceline.errors import InvalidArgument

PolicyMaker = Callable[[CostModel | None, int], DepthPolicy]  # of prices, if there are any, and the highest depth


@dataclass(frozen=True, slots=True)
class Setting:
    """Bounds of every request, and the policy if it is not the engine's own."""

    name: str
    bounds: SpeculationParams
    make_policy: PolicyMaker | None = None

    @property
    def is_fixed(self) -> bool:
        return self.name == OFF or self.name.isdecimal()

    def control(self, engine: Engine) -> SpeculationControl:
        """What chooses and learns for this setting: the engine's own, or a new one with a copy of its prices, so that
        no setting learns from what another does.

        Raises:
            InvalidArgument: a rule that needs prices, which the engine does not have.
        """
        own = engine.scheduler.speculation
        if self.make_policy is None:
            return own
        costs = None if own.costs is None else CostModel.from_dict(own.costs.as_dict())
        return SpeculationControl(self.make_policy(costs, engine.scheduler.config.max_depth), costs)


def parse_method(text: str) -> Method | None:
    """draft_model or ngram; auto is None. Raises InvalidArgument."""
    methods = {AUTO: None, Method.DRAFT_MODEL.value: Method.DRAFT_MODEL, Method.NGRAM.value: Method.NGRAM}
    if text not in methods:
        raise InvalidArgument("method", text, ", ".join(methods))
    return methods[text]


def default_method(draft: str) -> Method:
    """Who drafts at a fixed depth if nobody says: the draft model, if there is one."""
    return Method.NGRAM if draft in ("none", "ngram") else Method.DRAFT_MODEL


def parse_settings(text: str, fixed: Method | None, auto: Method | None = None) -> list[Setting]:
    """auto, off and other fixed depths, and names of baselines.

    Args:
        fixed, auto: who drafts at fixed depths and for baselines, and for auto; None lets the server choose.

    Raises:
        InvalidArgument: an unknown name, or auto and off are not both among them.
    """
    settings = {}
    for name in (part.strip() for part in text.split(",")):
        if name in (OFF, "0"):
            settings[OFF] = Setting(OFF, SpeculationParams(Method.NONE), _within_bounds)
        elif name.isdecimal():
            depth = check_depth(int(name))
            bounds = SpeculationParams(fixed, min_depth=depth, max_depth=depth)
            settings[name] = Setting(name, bounds, _within_bounds)
        elif name == AUTO:
            settings[name] = Setting(name, SpeculationParams(auto))
        elif name in BASELINES:
            settings[name] = Setting(name, SpeculationParams(fixed), _rule(name))
        elif name == trim.NAME:
            settings[name] = Setting(name, SpeculationParams(fixed), _full_depth)
        else:
            raise InvalidArgument("depth", name, f"off, auto, a number, or one of {', '.join([*BASELINES, trim.NAME])}")
    if not {AUTO, OFF} <= settings.keys():
        raise InvalidArgument("depth", text, "a list with auto and off in it: one is compared with the other")
    return list(settings.values())


def _within_bounds(costs: CostModel | None, max_depth: int) -> DepthPolicy:
    """Where bounds decide: the one that serves otherwise, so that all settings have the same to do between steps."""
    return FixedDepth(max_depth) if costs is None else AdaptiveDepth(costs, max_depth=max_depth)


def _rule(name: str) -> PolicyMaker:
    return lambda costs, max_depth: BASELINES[name]()


def _full_depth(costs: CostModel | None, max_depth: int) -> DepthPolicy:
    if costs is None:
        raise InvalidArgument("depth", trim.NAME, "a rule that needs no prices, as the engine has none")
    return trim.FullDepth(costs, max_depth)


@contextmanager
def steered(engine: Engine, control: SpeculationControl) -> Iterator[None]:
    """Meanwhile that one chooses depths and learns."""
    own = engine.scheduler.speculation
    engine.scheduler.speculation = control
    try:
        with trim.trimming(engine, control.policy) if isinstance(control.policy, trim.FullDepth) else nullcontext():
            yield
    finally:
        engine.scheduler.speculation = own
