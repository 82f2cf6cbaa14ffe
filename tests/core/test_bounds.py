"""Server, tenant and request bound speculation together: who allows least decides, who asks for more is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.harness import GREEDY, Harness, prompt_of
from paceline.core.config import SchedulerConfig
from paceline.core.depth_policy import FixedDepth
from paceline.core.method import Method
from paceline.core.params import SchedulingParams, SpeculationBounds, SpeculationParams, StopParams
from paceline.core.request import Request
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.core.tenant_policy import TenantPolicy
from paceline.errors import InvalidArgument

CONFIG = SchedulerConfig(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=100)
NOTHING = frozenset[Method]()
NGRAM, MODEL = Method.NGRAM, Method.DRAFT_MODEL
OFF = [SpeculationBounds(max_depth=0), SpeculationBounds(NOTHING), SpeculationBounds(frozenset({Method.NONE}))]


def scheduler_of(
    min_depth: int = 0, max_depth: int = 8, tenant: SpeculationBounds | None = None, **config: object
) -> Scheduler:
    """With bounds for the tenant "small"."""
    wanted = replace(CONFIG, min_depth=min_depth, max_depth=max_depth, **config)
    scheduler = Scheduler(wanted, SpeculationControl(FixedDepth(3)))
    scheduler.tenants.policies = {} if tenant is None else {"small": TenantPolicy(speculation=tenant)}
    return scheduler


def add(scheduler: Scheduler, speculation: SpeculationParams, tenant: str = "small", request_id: int = 0) -> Request:
    stop = StopParams(max_tokens=20)
    return scheduler.add(
        request_id, prompt_of(4, request_id), GREEDY, stop, speculation, 0.0, scheduling=SchedulingParams(tenant)
    )


@pytest.mark.parametrize(
    ("server", "tenant", "request_", "depths"),
    [
        ((0, 8), (0, None), (0, None), (0, 8)),
        ((0, 8), (0, 3), (0, None), (0, 3)),
        ((0, 8), (0, 9), (0, None), (0, 8)),
        ((0, 8), (0, 3), (0, 5), (0, 3)),
        ((0, 8), (0, 3), (2, 2), (2, 2)),
        ((1, 8), (0, None), (0, None), (1, 8)),
        ((1, 8), (2, None), (0, None), (2, 8)),
        ((1, 8), (2, 4), (3, 6), (3, 4)),
        ((3, 8), (2, 4), (1, 6), (3, 4)),
        # A floor yields to whoever asks for less: the tenant's operator, or the request.
        ((3, 8), (0, 2), (0, None), (2, 2)),
        ((3, 8), (0, 0), (0, None), (0, 0)),
        ((3, 8), (2, 4), (0, 1), (1, 1)),
        ((3, 8), (2, 4), (0, 0), (0, 0)),
        ((0, 2), (3, None), (0, None), (2, 2)),
    ],
)
def test_the_depths_that_are_left(
    server: tuple[int, int], tenant: tuple[int, int | None], request_: tuple[int, int | None], depths: tuple[int, int]
) -> None:
    scheduler = scheduler_of(*server, SpeculationBounds(min_depth=tenant[0], max_depth=tenant[1]))
    speculation = SpeculationParams(None, *request_)
    bounded = add(scheduler, speculation).speculation
    assert (bounded.min_depth, bounded.max_depth) == depths
    others = add(scheduler, speculation, tenant="another", request_id=1).speculation
    assert others == add(scheduler_of(*server), speculation).speculation


LIMITS = st.builds(
    lambda low, more, methods: SpeculationBounds(methods, low, None if more is None else low + more),
    st.integers(0, 5),
    st.none() | st.integers(0, 5),
    st.sampled_from([frozenset(Method), frozenset({NGRAM}), NOTHING]),
)


@given(LIMITS, LIMITS, st.integers(0, 5), st.none() | st.integers(0, 5))
def test_less_may_always_be_asked_for_and_more_never(
    server: SpeculationBounds, tenant: SpeculationBounds, low: int, more: int | None
) -> None:
    asked = SpeculationParams(None, low, None if more is None else low + more)
    highest = [b.highest for b in (server, tenant) if b.highest is not None]
    try:
        got = asked.within({"the server": server, "tenant 'x'": tenant})
    except InvalidArgument:
        assert low > min(highest)
        return
    assert all(low <= depth for depth in highest)
    ceilings = highest if asked.max_depth is None else [*highest, asked.max_depth]
    assert got.max_depth == min(ceilings, default=None)
    floor = max(low, server.min_depth, tenant.min_depth)
    assert got.min_depth == min([floor, *ceilings])
    assert got == asked.within({"tenant 'x'": tenant, "the server": server}), "the order is of no matter"


@pytest.mark.parametrize(
    ("server", "tenant", "allowed"),
    [
        (4, SpeculationBounds(max_depth=6), "at most 4, the highest depth of the server"),
        (4, SpeculationBounds(max_depth=2), "at most 2, the highest depth of tenant 'small'"),
        *[(8, bounds, "at most 0, the highest depth of tenant 'small'") for bounds in OFF],
    ],
)
def test_a_lowest_depth_above_a_bound_is_refused(server: int, tenant: SpeculationBounds, allowed: str) -> None:
    scheduler = scheduler_of(0, server, tenant)
    with pytest.raises(InvalidArgument) as caught:
        add(scheduler, SpeculationParams(None, 5, 5))
    assert str(caught.value) == f"speculation.min_draft_tokens = 5: must be {allowed}"
    assert not scheduler.has_requests


@pytest.mark.parametrize(
    ("bounds", "allowed"),
    [
        (SpeculationBounds(), set(Method)),
        (SpeculationBounds(frozenset({NGRAM})), {Method.NONE, NGRAM}),
        *[(bounds, {Method.NONE}) for bounds in OFF],
    ],
)
def test_methods_that_may_be_named(bounds: SpeculationBounds, allowed: set[Method]) -> None:
    scheduler = scheduler_of(tenant=bounds)
    assert scheduler.allowed_methods("small") == allowed
    assert scheduler.allowed_methods("another") == set(Method)


@pytest.mark.parametrize(
    ("default", "hybrid", "tenant", "methods"),
    [
        (MODEL, True, {NGRAM, MODEL}, (MODEL, NGRAM)),
        (MODEL, True, {NGRAM}, (NGRAM,)),
        (MODEL, True, {MODEL}, (MODEL,)),
        (MODEL, True, set(), ()),
        (MODEL, False, {NGRAM, MODEL}, (MODEL,)),
        (MODEL, False, {NGRAM}, (NGRAM,)),
        (NGRAM, True, {NGRAM, MODEL}, (NGRAM,)),
        (NGRAM, True, {MODEL}, ()),
        (Method.NONE, True, {NGRAM, MODEL}, ()),
    ],
)
def test_an_open_choice_falls_on_what_is_allowed(
    default: Method, hybrid: bool, tenant: set[Method], methods: tuple[Method, ...]
) -> None:
    scheduler = scheduler_of(tenant=SpeculationBounds(frozenset(tenant)), method=default, hybrid=hybrid)
    assert add(scheduler, SpeculationParams()).methods == methods
    named = add(scheduler, SpeculationParams(MODEL), request_id=1)
    assert named.methods == ((MODEL,) if MODEL in tenant else ())


def test_bounds_are_those_of_the_moment_a_request_comes() -> None:
    scheduler = scheduler_of(method=NGRAM)
    before = add(scheduler, SpeculationParams())
    scheduler.tenants.policies = {"small": TenantPolicy(speculation=SpeculationBounds(max_depth=1))}
    after = add(scheduler, SpeculationParams(), request_id=1)
    assert (before.speculation.max_depth, after.speculation.max_depth) == (8, 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SpeculationBounds(min_depth=-1), "min_depth = -1: must be an integer >= 0"),
        (lambda: SpeculationBounds(min_depth=3, max_depth=2), "max_depth = 2: must be an integer >= min_depth (3)"),
        (lambda: replace(CONFIG, min_depth=-1), "min_depth = -1: must be between 0 and max_depth (8)"),
        (lambda: replace(CONFIG, min_depth=3, max_depth=2), "min_depth = 3: must be between 0 and max_depth (2)"),
    ],
)
def test_bounds_that_cannot_be(make: object, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make()  # type: ignore[operator]
    assert str(caught.value) == words


@pytest.mark.parametrize("wanted", [0, 3, 9])
def test_no_step_goes_beyond_them(wanted: int) -> None:
    """Whatever the policy wants; each request of a batch has its own."""
    harness = Harness(replace(CONFIG, min_depth=2, max_depth=5, method=MODEL), FixedDepth(wanted))
    bounds = {
        "small": SpeculationBounds(max_depth=1),
        "deep": SpeculationBounds(min_depth=4),
        "off": SpeculationBounds(max_depth=0),
    }
    harness.scheduler.tenants.policies = {name: TenantPolicy(speculation=own) for name, own in bounds.items()}
    cases = [
        ("", SpeculationParams(), (2, 5)),
        ("", SpeculationParams(max_depth=1), (1, 1)),
        ("", SpeculationParams(Method.NONE), (0, 0)),
        ("small", SpeculationParams(), (1, 1)),
        ("deep", SpeculationParams(), (4, 5)),
        ("deep", SpeculationParams(max_depth=3), (3, 3)),
        ("off", SpeculationParams(), (0, 0)),
    ]
    for request_id, (tenant, speculation, _) in enumerate(cases):
        harness.requests[request_id] = add(harness.scheduler, speculation, tenant, request_id)
    harness.step()
    drafts = [work.num_drafts for work in harness.step().work]
    assert drafts == [min(max(wanted, lowest), highest) for _, _, (lowest, highest) in cases]
    harness.drain()
