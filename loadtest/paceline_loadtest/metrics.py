"""From what happened to each request to the numbers of a report: pure functions. Times are seconds, statistics are ms.

TTFT: from sending to the first token. TPOT: (end - first token) / (tokens - 1). ITL: the gap between two messages,
divided evenly among the tokens of the second. ICL: the same gap undivided. E2EL: from sending to the end of the stream.

Sending may come later than the arrival that was planned: because `max_concurrency` held the request back, or because
this program could not keep up. The statistics `arrival_ttft` and `arrival_e2el` start at the planned arrival, so that a
slow server cannot hide its queue by slowing down those who measure it (coordinated omission).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from paceline_loadtest.clients import Outcome
from paceline_loadtest.workload import LoadConfig


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What happened to one request; times are seconds after the start of the run.

    Attributes:
        index: of the planned request.
        arrival: when it was meant to be sent; in a closed loop, when it was.
        sent: when it was sent.
        ended: when its stream ended.
        chunk_times: when each message with tokens came.
        chunk_tokens: tokens in each of them.
        outcome: what the server said at the end, if it did.
        error_code: empty if it completed.
        error: message of the error, empty if it completed.
    """

    index: int
    arrival: float
    sent: float
    ended: float
    chunk_times: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    outcome: Outcome | None = None
    error_code: str = ""
    error: str = ""

    @property
    def completed(self) -> bool:
        """Whether it ended without an error."""
        return not self.error_code

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompt as the server counted them; 0 if it did not say."""
        return self.outcome.input_tokens if self.outcome else 0

    @property
    def output_tokens(self) -> int:
        """Tokens generated as the server counted them; those received if it did not say."""
        return self.outcome.output_tokens if self.outcome else sum(self.chunk_tokens)

    @property
    def latency(self) -> float:
        """Seconds from sending to the end."""
        return self.ended - self.sent

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token; 0 if there was none."""
        return self.chunk_times[0] - self.sent if self.chunk_times else 0.0

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 if there was at most one."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def icls(self) -> tuple[float, ...]:
        """Seconds between consecutive messages."""
        return tuple(later - earlier for earlier, later in pairwise(self.chunk_times))

    @property
    def itls(self) -> tuple[float, ...]:
        """Seconds per token, for each token after the first message."""
        gaps = zip(self.icls, self.chunk_tokens[1:], strict=True)
        return tuple(gap / count for gap, count in gaps for _ in range(count))


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics in milliseconds; all zero if there was nothing to measure."""

    mean: float = 0.0
    median: float = 0.0
    std: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeculationTotals:
    """Speculation over the completed requests.

    Attributes:
        num_drafts: verify steps that had a draft to verify.
        draft_tokens: tokens drafted.
        accepted_tokens: tokens of them kept.
        per_position: share of those steps in which draft position i was accepted.
    """

    num_drafts: int
    draft_tokens: int
    accepted_tokens: int
    per_position: tuple[float, ...]

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted, 0..1."""
        return _ratio(self.accepted_tokens, self.draft_tokens)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per verify step, 1 of them not drafted."""
        return 1 + _ratio(self.accepted_tokens, self.num_drafts)

    @property
    def mean_depth(self) -> float:
        """Tokens drafted per verify step."""
        return _ratio(self.draft_tokens, self.num_drafts)


@dataclass(frozen=True, slots=True)
class Report:
    """A run, measured. Throughputs are per second; tokens and latencies are those of completed requests.

    Attributes:
        config: what was asked for.
        records: one per request that has ended, in the order of the plan.
        duration: seconds from the start to the end of the last of them.
        distributions: by name: ttft, tpot, itl, icl, e2el, arrival_ttft, arrival_e2el.
        errors_by_code: failed requests, most frequent first.
        max_concurrent_requests: most requests under way at once.
        speculation: None if nothing was drafted.
        interrupted: somebody has ended the run early, and requests that had not ended are not counted.
    """

    config: LoadConfig
    records: tuple[RequestRecord, ...]
    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    distributions: Mapping[str, Distribution]
    errors_by_code: Mapping[str, int]
    max_concurrent_requests: int
    speculation: SpeculationTotals | None
    interrupted: bool = False

    @property
    def request_throughput(self) -> float:
        """Completed requests per second."""
        return _ratio(self.completed, self.duration)

    @property
    def output_throughput(self) -> float:
        """Generated tokens per second."""
        return _ratio(self.total_output_tokens, self.duration)

    @property
    def total_token_throughput(self) -> float:
        """Tokens read and generated per second."""
        return _ratio(self.total_input_tokens + self.total_output_tokens, self.duration)


def summarize(config: LoadConfig, records: Sequence[RequestRecord], *, interrupted: bool = False) -> Report:
    """The report of a run from its records, in the order of the plan."""
    done = [record for record in records if record.completed]
    return Report(
        config=config,
        records=tuple(records),
        duration=max((record.ended for record in records), default=0.0),
        completed=len(done),
        failed=len(records) - len(done),
        total_input_tokens=sum(record.input_tokens for record in done),
        total_output_tokens=sum(record.output_tokens for record in done),
        distributions=_distributions(done),
        errors_by_code=dict(Counter(record.error_code for record in records if not record.completed).most_common()),
        max_concurrent_requests=_max_concurrent(records),
        speculation=_speculation(done),
        interrupted=interrupted,
    )


def describe(seconds: Sequence[float]) -> Distribution:
    """Statistics of a sample in seconds: population deviation, percentiles interpolated linearly."""
    if not seconds:
        return Distribution()
    ordered = sorted(1000 * value for value in seconds)
    median = percentile(ordered, 50)
    return Distribution(
        mean=statistics.fmean(ordered),
        median=median,
        std=statistics.pstdev(ordered),
        p50=median,
        p90=percentile(ordered, 90),
        p99=percentile(ordered, 99),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` of an ascending, non-empty sample lies, interpolated between its neighbours."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _distributions(done: Sequence[RequestRecord]) -> dict[str, Distribution]:
    # A request without a token has no TTFT, and one with a single token no time per token: they are left out.
    with_token = [record for record in done if record.chunk_times]
    return {
        "ttft": describe([record.ttft for record in with_token]),
        "tpot": describe([record.tpot for record in with_token if record.output_tokens > 1]),
        "itl": describe([itl for record in with_token for itl in record.itls]),
        "icl": describe([icl for record in with_token for icl in record.icls]),
        "e2el": describe([record.latency for record in done]),
        "arrival_ttft": describe([record.chunk_times[0] - record.arrival for record in with_token]),
        "arrival_e2el": describe([record.ended - record.arrival for record in done]),
    }


def _max_concurrent(records: Sequence[RequestRecord]) -> int:
    # At the same instant an end (-1) sorts before a start: the place was handed over, not shared.
    changes = sorted([(record.sent, 1) for record in records] + [(record.ended, -1) for record in records])
    most = current = 0
    for _, change in changes:
        current += change
        most = max(most, current)
    return most


def _speculation(done: Sequence[RequestRecord]) -> SpeculationTotals | None:
    counts = [record.outcome.speculation for record in done if record.outcome and record.outcome.speculation]
    num_drafts = sum(count.drafts for count in counts)
    draft_tokens = sum(count.draft_tokens for count in counts)
    if not draft_tokens:
        return None
    by_position = zip_longest(*(count.accepted_by_position for count in counts), fillvalue=0)
    return SpeculationTotals(
        num_drafts=num_drafts,
        draft_tokens=draft_tokens,
        accepted_tokens=sum(count.accepted_tokens for count in counts),
        per_position=tuple(_ratio(sum(accepted), num_drafts) for accepted in by_position),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
