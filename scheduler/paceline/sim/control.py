"""The control of depth alone: true chances, true prices, and no scheduler, no KV and no model between them.

What a policy loses here it loses by its own rule, its estimates and its probes, and the best that any stationary rule
could do is known from a search.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.core.acceptance import AcceptanceModel, Residual
from paceline.core.cost_model import DECODE, LARGEST_BUCKET, VERIFY, CostModel, StepShape
from paceline.core.depth import DepthCandidate, Offer, Outcome, StepLoad
from paceline.core.depth_choices import choose_depths
from paceline.core.depth_policy import DepthPolicy
from paceline.core.method import Method

BUDGET = 8192  # rows of a step that drafts and catching up may take: more than any choice here should want
TENANT = "all"


@dataclass(frozen=True, slots=True)
class Population:
    """The requests that decode at once, in equal parts of each class.

    Attributes:
        size: requests at once, N; place i is always taken by one of class i mod the number of classes.
        acceptance: by class, K long: the true probability that a position's draft is accepted if all before it were.
        tokens: completion tokens after which a request ends and a new one takes its place; None: nobody ends.
    """

    size: int
    acceptance: tuple[tuple[float, ...], ...]
    tokens: int | None = None

    @property
    def highest(self) -> int:
        """The highest depth, K."""
        return len(self.acceptance[0])

    def rates(self) -> np.ndarray:
        """[N, K] float64: conditional acceptance of each place."""
        return np.array([self.acceptance[i % len(self.acceptance)] for i in range(self.size)])

    def survivals(self) -> np.ndarray:
        """[N, K] float64: probability that a position and all before it are accepted."""
        return np.cumprod(self.rates(), axis=1)


def roofline(target_pass: float, free_rows: int, ratio: float) -> CostModel:
    """Prices of a target that is bound by memory up to `free_rows` rows and by arithmetic beyond, without context.

    Args:
        target_pass: seconds of a target forward of up to `free_rows` rows.
        free_rows: as many as no step has: arithmetic never binds.
        ratio: seconds of a pass of the draft model, of however many sequences, over `target_pass`. Rows that it reads
            besides cost it a pass for every `free_rows`.
    """
    free_rows = min(free_rows, LARGEST_BUCKET)
    # Which is exact: linear between them, and beyond the last.
    rows = sorted({1, free_rows, min(2 * free_rows, LARGEST_BUCKET)})
    return CostModel(
        rows,
        [target_pass * max(1.0, count / free_rows) for count in rows],
        sequences=[1],
        pass_seconds=[target_pass * ratio],
        per_draft_row=target_pass * ratio / free_rows,
    )


@dataclass(frozen=True, slots=True)
class Stationary:
    """Depths that never change: by place, and the tokens per second that they earn in the mean."""

    depths: tuple[int, ...]
    rate: float


def best_stationary(survivals: np.ndarray, costs: CostModel) -> Stationary:
    """The depths with the highest mean rate, by search of every highest depth D and number of slots B.

    Among all choices of B slots no deeper than D, the B likeliest earn most. So nothing is left out where a draft pass
    costs the same for any number of sequences.

    Args:
        survivals: [N, K] float64, non-increasing along K.
    """
    size, highest = survivals.shape
    seconds = np.array(costs.targets(size, size * highest, 0, size))
    first, later = np.array(costs.first_passes(size)), np.array(costs.draft_passes(size))
    best = Stationary((0,) * size, size / seconds.item(0))
    for deepest in range(1, highest + 1):
        # By position first: of equal survivals the shallower one must come first.
        slots = survivals[:, :deepest].T.ravel()
        order = np.argsort(-slots, kind="stable")
        sequences = np.cumsum(order[:, None] // size == np.arange(deepest), axis=0)  # [B, D]: in each pass
        drafting = first[sequences[:, 0]] + later[sequences[:, 1:]].sum(axis=1)
        rates = (size + np.cumsum(slots[order])) / (seconds[1 : len(slots) + 1] + drafting)
        count = int(np.argmax(rates))
        if rates[count] > best.rate:
            depths = np.bincount(order[: count + 1] % size, minlength=size)
            best = Stationary(tuple(depths.tolist()), float(rates[count]))
    return best


@dataclass(frozen=True, slots=True)
class ControlTrace:
    """What happened, step by step: equal for equal arguments.

    Attributes:
        tokens: [steps] int64, emitted.
        expected_tokens: [steps] float64, their mean given the depths. A rate of these has the same mean as one of
            `tokens` and lacks the luck of the draws.
        seconds: [steps] float64.
        histogram: [K + 1] int64, decodes by depth.
    """

    tokens: np.ndarray
    expected_tokens: np.ndarray
    seconds: np.ndarray
    histogram: np.ndarray

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return float(self.tokens.sum() / self.seconds.sum())

    def expected_rate(self, first: int = 0) -> float:
        """Expected tokens per second from step `first` on."""
        return float(self.expected_tokens[first:].sum() / self.seconds[first:].sum())

    @property
    def mean_depth(self) -> float:
        """Drafts per decode."""
        return float(self.histogram @ np.arange(len(self.histogram)) / self.histogram.sum())


@dataclass(slots=True)
class _Stream:
    """A request that decodes.

    Attributes:
        truth: its true survivals.
        left: tokens until it ends; None: it does not.
        behind: tokens that the draft model has not read, besides the one that any draft begins with.
    """

    request_id: int
    truth: tuple[float, ...]
    left: int | None
    residual: Residual = field(default_factory=Residual)
    steps_without_model: int = 0
    behind: int = 0

    @property
    def highest(self) -> int:
        """The last token of a request needs no draft."""
        return len(self.truth) if self.left is None else min(len(self.truth), self.left - 1)

    def advance(self, depth: int, emitted: int) -> None:
        """Book one decode."""
        self.steps_without_model = 0 if depth else self.steps_without_model + 1
        self.behind = 0 if depth else self.behind + emitted
        if self.left is not None:
            self.left -= emitted


def simulate_control(
    population: Population,
    costs: CostModel,
    policy: DepthPolicy,
    steps: int,
    estimator: AcceptanceModel | None = None,
    known: CostModel | None = None,
    seed: int = 0,
) -> ControlTrace:
    """Let a policy choose, draw what is accepted, and show it what came of it.

    All policies meet the same draws under the same seed. Requests all belong to one tenant and draft with the draft
    model; every verified draft is labelled 0 or 1.

    Args:
        costs: the true prices; only read.
        policy: learns from every step.
        estimator: makes the survivals that the policy sees, and learns from every step; None: the policy sees the
            true ones.
        known: the prices that the policy asks, if any: they learn from every step. Not the same object as `costs`.
    """
    generator = np.random.default_rng(seed)
    rates, survivals = population.rates(), population.survivals()
    mean_tokens = 1.0 + np.cumsum(np.pad(survivals, ((0, 0), (1, 0))), axis=1)  # [N, K + 1], by depth
    places = np.arange(population.size)
    request_ids = itertools.count()
    streams = [_Stream(next(request_ids), tuple(truth), population.tokens) for truth in survivals.tolist()]

    tokens = np.zeros(steps, np.int64)
    expected_tokens = np.zeros(steps)
    seconds = np.zeros(steps)
    histogram = np.zeros(population.highest + 1, np.int64)
    for step in range(steps):
        hits = generator.random(rates.shape) < rates
        longest = np.cumprod(hits, axis=1).sum(axis=1).tolist()  # accepted, if all that could be were drafted
        depths = _choose(policy, streams, estimator)
        catch_up = sum(stream.behind for stream, depth in zip(streams, depths, strict=True) if depth)
        shape = _shape(depths, catch_up)
        taken = costs.step(shape)

        drafts, emitted = [], 0
        for stream, depth, limit in zip(streams, depths, longest, strict=True):
            accepted = min(depth, limit)
            emitted += accepted + 1
            if depth:
                drafts.append((stream.request_id, depth, accepted))
            if estimator is not None:
                _learn(estimator, stream.residual, depth, accepted)
            stream.advance(depth, accepted + 1)
        draft_seconds = taken - costs.target(shape.rows, shape.context, shape.sequences)
        if known is not None:
            known.observe(shape, draft_seconds, taken)
        policy.observe(Outcome(shape, draft_seconds, taken, len(streams), emitted, tuple(drafts)))

        tokens[step], seconds[step] = emitted, taken
        expected_tokens[step] = mean_tokens[places, depths].sum()
        histogram += np.bincount(depths, minlength=len(histogram))
        for place, stream in enumerate(streams):
            if stream.left == 0:
                policy.forget(stream.request_id)
                streams[place] = _Stream(next(request_ids), stream.truth, population.tokens)
    return ControlTrace(tokens, expected_tokens, seconds, histogram)


def _choose(policy: DepthPolicy, streams: Sequence[_Stream], estimator: AcceptanceModel | None) -> list[int]:
    """The policy's depth for each stream; it is asked for those that have room for a draft."""
    drafting = [stream for stream in streams if stream.highest]

    def candidate(stream: _Stream) -> DepthCandidate:
        highest = stream.highest
        if estimator is None:
            survivals = list(stream.truth[:highest])
        else:
            survivals = estimator.survivals(TENANT, stream.residual, highest)
        offer = Offer(Method.DRAFT_MODEL, survivals, stream.behind)
        return DepthCandidate(stream.request_id, (offer,), 0, highest, stream.steps_without_model)

    load = StepLoad(rows=len(streams), context=0, sampling=len(streams), budget=BUDGET)
    chosen = choose_depths(
        policy,
        load,
        [stream.request_id for stream in drafting],
        [{Method.DRAFT_MODEL: stream.highest} for stream in drafting],
        [0] * len(drafting),  # no n-grams
        lambda indices: [candidate(drafting[index]) for index in indices],
    )
    depth_of = {stream.request_id: choice.depth for stream, choice in zip(drafting, chosen, strict=True)}
    return [depth_of.get(stream.request_id, 0) for stream in streams]


def _shape(depths: Sequence[int], catch_up: int) -> StepShape:
    """The step of these depths, all by the draft model."""
    size = len(depths)
    passes = size - np.cumsum(np.bincount(depths))[:-1]
    kind = VERIFY if len(passes) else DECODE
    return StepShape(size + sum(depths), 0, tuple(passes.tolist()), catch_up, kind, size)


def _learn(estimator: AcceptanceModel, residual: Residual, depth: int, accepted: int) -> None:
    """Positions behind the first rejection were not reached and say nothing."""
    if depth == 0:
        residual.age()
    else:
        estimator.observe(TENANT, residual, [1.0] * accepted + [0.0] * (accepted < depth))
