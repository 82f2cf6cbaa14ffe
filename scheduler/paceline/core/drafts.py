"""The drafts of a step: optional work behind its decodes, for which rows and blocks are left."""

from __future__ import annotations

from paceline.core.batch import Batch
from paceline.core.config import SchedulerConfig
from paceline.core.depth import StepLoad
from paceline.core.method import DRAFT_MODEL, NGRAM, Method
from paceline.core.request import Request
from paceline.core.share import Share
from paceline.core.speculation import SpeculationControl
from paceline.core.step_builder import StepBuilder


def add_drafts(step: StepBuilder, batch: Batch, speculation: SpeculationControl) -> None:
    """Let the policy choose depths for the decodes of this step, then grant them while rows and blocks last. Mutates
    the step's shares and budget, and the tables of those who draft.
    """
    shares, highest = [], []
    for share in step.shares:
        if share.rows > 1 or not share.samples or not share.request.methods:
            continue
        if step.crowd.bound(share.request.tenant) is not None:
            continue
        if limits := _drafters(share.request, batch.config):
            shares.append(share)
            highest.append(limits)
    if not shares:
        return
    requests = [share.request for share in shares]
    choices = speculation.choose(requests, highest, _load(step), batch.slot_price)
    for share, chosen in zip(shares, choices):
        request, depth = share.request, chosen.depth
        if not depth:
            continue
        # What a draft model has yet to read counts as rows too; where that alone is too much, it reads what fits.
        gap = request.draft_gap if chosen.method is DRAFT_MODEL else 0
        behind = max(0, gap - speculation.first_rows)
        depth = _grow(share, min(depth, step.budget - behind), batch) if behind < step.budget else 0
        if not depth:  # with a single row left it would fall behind as fast as it reads
            gap = behind = min(gap, step.budget) if step.budget > 1 else 0
        step.budget -= depth + behind
        share.depth, share.catch_up = depth, gap
        if depth or gap:
            share.method = chosen.method


def draft_limits(request: Request, config: SchedulerConfig) -> dict[Method, int]:
    """How deep the request may draft, by each method that it may use, if at all: no draft may be of use behind its
    last token, nor lie behind the draft model's length.
    """
    most = request.most_tokens
    bound = request.speculation.max_depth
    assert bound is not None, "the server has a highest depth, so every request has one"
    if most + bound < request.max_total_tokens and most + bound <= config.max_draft_len:
        return request.limits
    highest = min(bound, request.max_total_tokens - most - 1)
    limits = {}
    for method in request.methods:
        limit = min(highest, config.max_draft_len - most) if method is DRAFT_MODEL else highest
        if limit > 0:
            limits[method] = limit
    return limits


def _drafters(request: Request, config: SchedulerConfig) -> dict[Method, int]:
    """The same of those that have something to propose, n-grams as of the last result."""
    limits = draft_limits(request, config)
    if NGRAM not in limits or request.match:
        return limits
    return {DRAFT_MODEL: limits[DRAFT_MODEL]} if DRAFT_MODEL in limits else {}


def _load(step: StepBuilder) -> StepLoad:
    """What drafts come on top of. Where heavy tenants fill up what others have left, they choose as if those were not
    there, lest every step asked for other depths.
    """
    shares = step.shares
    if step.crowd.slowdown is not None:
        shares = [share for share in shares if step.crowd.bound(share.request.tenant) is None]
    rows = context = sampling = 0
    for share in shares:
        rows += share.rows
        context += share.end
        sampling += share.samples
    return StepLoad(rows, context, sampling, step.budget)


def _grow(share: Share, depth: int, batch: Batch) -> int:
    """Slots for drafts, allocated before drafting: the depth there is room for."""
    request_id, known = share.request.request_id, share.request.most_tokens
    capacity = batch.kv.capacity(request_id)
    if known + depth > capacity:
        room = capacity + batch.spare_blocks * batch.config.block_size - known
        depth = max(0, min(depth, room))
        blocks = batch.kv.grow(request_id, known + depth)
        assert blocks is not None
        share.blocks += blocks
    return depth
