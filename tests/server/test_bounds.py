"""What an operator bounds, as a client and the operator meet it."""

from __future__ import annotations

import sys

import grpc
import pytest

from paceline.cli import main
from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.method import Method
from paceline.core.params import (
    SamplingParams,
    SchedulingParams,
    SpeculationBounds,
    SpeculationParams,
    StopParams,
)
from paceline.core.request import RequestStats
from paceline.core.tenant_policy import TenantPolicy
from paceline.engine import Engine, GenerationRequest
from paceline.errors import FailedPrecondition, InvalidArgument
from paceline.v1 import generation_pb2 as pb
from paceline.wiring import EngineSettings, build_engine
from support.pairs import tiny_pair
from support.serving import Serving, details_of, failure, request

NGRAM, MODEL = pb.SPECULATION_MODE_NGRAM, pb.SPECULATION_MODE_DRAFT_MODEL
POLICIES = {
    "small": TenantPolicy(speculation=SpeculationBounds(max_depth=1)),
    "off": TenantPolicy(speculation=SpeculationBounds(frozenset())),
    "model": TenantPolicy(speculation=SpeculationBounds(frozenset({Method.DRAFT_MODEL}))),
}


def of(tenant: str, **speculation: int) -> pb.GenerateRequest:
    return request(
        scheduling=pb.SchedulingParams(tenant=tenant),
        speculation=pb.SpeculationParams(**speculation),  # type: ignore[arg-type]
    )


# -- over gRPC, where n-grams are loaded ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tenant", "speculation", "said"),
    [
        ("small", {"mode": NGRAM, "min_draft_tokens": 2}, "min_draft_tokens = 2: must be at most 1, the highest depth"),
        ("small", {"min_draft_tokens": 2}, "of tenant 'small'"),
        ("off", {"min_draft_tokens": 1}, "must be at most 0, the highest depth of tenant 'off'"),
        ("", {"min_draft_tokens": 9}, "must be at most 8, the highest depth of the server"),
        ("", {"min_draft_tokens": 3, "max_draft_tokens": 2}, "max_draft_tokens = 2: must be an integer >= min_draft"),
    ],
)
async def test_a_depth_beyond_bounds(free: Serving, tenant: str, speculation: dict[str, int], said: str) -> None:
    free.scheduler.tenants.policies = POLICIES
    error = await failure(free.stub.Generate(of(tenant, **speculation)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in (error.details() or "")
    assert "speculation." in str(details_of(error)["BadRequest"])
    assert free.idle


@pytest.mark.parametrize(
    ("tenant", "mode", "said"),
    [
        ("off", NGRAM, "speculation.mode = ngram: not allowed to tenant 'off'; available: off"),
        ("model", NGRAM, "speculation.mode = ngram: not allowed to tenant 'model'; available: off"),
        ("model", MODEL, "speculation.mode = draft_model: not loaded here; available: off"),
        ("small", MODEL, "speculation.mode = draft_model: not loaded here; available: ngram, off"),
    ],
)
async def test_a_method_beyond_bounds(free: Serving, tenant: str, mode: pb.SpeculationMode, said: str) -> None:
    free.scheduler.tenants.policies = POLICIES
    error = await failure(free.stub.Generate(of(tenant, mode=mode)))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.details() == said
    assert free.idle


@pytest.mark.parametrize(
    ("tenant", "speculation", "deepest"),
    [
        ("", {}, 2),  # what the server's policy wants
        ("", {"max_draft_tokens": 1}, 1),
        ("small", {}, 1),
        ("small", {"mode": NGRAM, "max_draft_tokens": 7}, 1),
        ("small", {"mode": pb.SPECULATION_MODE_OFF}, 0),
        ("off", {}, 0),
        ("off", {"mode": pb.SPECULATION_MODE_OFF}, 0),
        ("model", {}, 0),
    ],
)
async def test_what_is_left_is_served(free: Serving, tenant: str, speculation: dict[str, int], deepest: int) -> None:
    free.scheduler.tenants.policies = POLICIES
    message = of(tenant, **speculation)
    message.stop.max_tokens = 20
    responses = [response async for response in free.stub.Generate(message)]
    stats = responses[-1].finished.speculation
    assert len(stats.depths) - 1 == deepest
    assert (stats.drafted_tokens > 0) == (deepest > 0)


# -- from settings to an engine ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, draft = tiny_pair(tmp_path_factory.mktemp("pair"))
    return str(target), str(draft)


def engine_of(pair: tuple[str, str], **settings: object) -> Engine:
    limits = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return build_engine(EngineSettings(model=pair[0], draft=pair[1], **(limits | settings)))  # type: ignore[arg-type]


def serve(engine: Engine, tenant: str = "", speculation: SpeculationParams = SpeculationParams()) -> RequestStats:
    stop = StopParams(max_tokens=30, ignore_eos=True)
    engine.add(
        GenerationRequest(
            (3, 1, 2), SamplingParams(temperature=0.0), stop, speculation, scheduling=SchedulingParams(tenant)
        )
    )
    while True:
        for output in engine.step():
            if output.stats is not None:
                return output.stats


def test_the_servers_bounds_hold_for_the_policy(pair: tuple[str, str]) -> None:
    engine = engine_of(pair, min_depth=2, max_depth=3)
    depths = serve(engine, speculation=SpeculationParams(Method.DRAFT_MODEL)).depths  # n-grams may find nothing
    assert len(depths) <= 4
    assert sum(depths[:2]) <= 2, "only the last steps have no use for two drafts"
    assert len(serve(engine, speculation=SpeculationParams(Method.DRAFT_MODEL, max_depth=1)).depths) == 2
    assert serve(engine, speculation=SpeculationParams(Method.NONE)).drafted_tokens == 0


def test_a_higher_bound_than_usual(pair: tuple[str, str]) -> None:
    engine = engine_of(pair, min_depth=10, max_depth=10)
    assert len(serve(engine, speculation=SpeculationParams(Method.DRAFT_MODEL)).depths) == 11
    policy = engine.scheduler.speculation.policy
    assert isinstance(policy, AdaptiveDepth)
    assert policy.max_depth == 10


def test_a_fixed_depth_may_be_bounded_on_both_sides(pair: tuple[str, str]) -> None:
    engine = engine_of(pair, depth="2", min_depth=1, max_depth=4)
    assert len(serve(engine).depths) == 3
    assert len(serve(engine, speculation=SpeculationParams(min_depth=4)).depths) == 5
    with pytest.raises(InvalidArgument, match="at most 4, the highest depth of the server"):
        engine.prepare(GenerationRequest("x", speculation=SpeculationParams(min_depth=5)))


@pytest.mark.parametrize("settings", [{"depth": "off"}, {"max_depth": 0}, {"depth": "0", "max_depth": 0}])
def test_off(pair: tuple[str, str], settings: dict[str, object]) -> None:
    engine = engine_of(pair, **settings)
    stats = serve(engine)
    assert (stats.method, stats.drafted_tokens) == (Method.NONE, 0)
    with pytest.raises(FailedPrecondition, match="not loaded here; available: off"):
        serve(engine, speculation=SpeculationParams(Method.NGRAM))


def test_a_limit_that_no_request_could_satisfy(pair: tuple[str, str]) -> None:
    tenants = {"a": TenantPolicy(max_blocks=1)}
    with pytest.raises(InvalidArgument, match="max_blocks of tenant 'a' = 1: must be at least 2, for the shortest"):
        engine_of(pair, block_size=1, tenants=tenants)
    engine_of(pair, block_size=2, tenants=tenants)


def test_the_warm_up_leaves_no_estimates(pair: tuple[str, str]) -> None:
    """Its first steps take long, and nobody is to be refused for that."""
    scheduler = engine_of(pair).scheduler
    assert scheduler.deadlines.rate is scheduler.rate
    assert (scheduler.rate.prompt_seconds, scheduler.rate.token_seconds, scheduler.rate.completion_tokens) == (0, 0, 0)


def test_tenants_have_their_own(pair: tuple[str, str]) -> None:
    """Even the tenant that nobody names, in whose place the engine warms up."""
    tenants = {
        "": TenantPolicy(speculation=SpeculationBounds(max_depth=0)),
        "ngram": TenantPolicy(speculation=SpeculationBounds(frozenset({Method.NGRAM}))),
        "small": TenantPolicy(speculation=SpeculationBounds(max_depth=1)),
    }
    engine = engine_of(pair, depth="3", tenants=tenants)
    assert serve(engine).drafted_tokens == 0
    assert len(serve(engine, "another").depths) == 4
    assert len(serve(engine, "small").depths) == 2
    assert serve(engine, "ngram").method is Method.NGRAM
    with pytest.raises(FailedPrecondition, match="not allowed to tenant 'ngram'; available: ngram, off"):
        serve(engine, "ngram", SpeculationParams(Method.DRAFT_MODEL))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--min-depth", "3", "--max-depth", "2"], "min_depth = 3: must be between 0 and max_depth (2)"),
        (["--min-depth", "9"], "min_depth = 9: must be between 0 and max_depth (8)"),
        (["--min-depth", "1", "--depth", "off"], "min_depth = 1: must be between 0 and max_depth (0)"),
        (["--max-depth", "-1"], "max_depth = -1: must be an integer >= 0"),
        (["--depth", "5", "--max-depth", "4"], "depth = '5': must be between min_depth (0) and max_depth (4)"),
        (["--depth", "1", "--min-depth", "2"], "depth = '1': must be between min_depth (2) and max_depth (8)"),
    ],
)
def test_contradictions_are_one_line(
    pair: tuple[str, str],
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", "generate", "x", "--model", pair[0], "--draft", "ngram", *options])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"paceline: {said}\n"
