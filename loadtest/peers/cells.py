"""What was measured of each engine at each depth and concurrency, and what it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from engines import AUTO, OFF, OURS


@dataclass(frozen=True)
class Sample:
    """One measurement of one cell: the same streams twice, once for their first token only, which takes less time.

    Attributes:
        prefill_seconds: the time with max_tokens 1.
        seconds: the whole run.
        token_ids: of the whole run, by stream.
    """

    prefill_seconds: float
    seconds: float
    token_ids: list[list[int]]

    @property
    def decode_rate(self) -> float:
        """Tokens per second of decode alone."""
        tokens = sum(map(len, self.token_ids)) - len(self.token_ids)
        return tokens / (self.seconds - self.prefill_seconds)

    @property
    def rate(self) -> float:
        """Tokens per second of the whole run."""
        return sum(map(len, self.token_ids)) / self.seconds


@dataclass
class Cell:
    """Every measurement of one engine at one depth and concurrency.

    Attributes:
        samples: one a round.
        error: why the engine failed here; it is not measured here again.
    """

    engine: str
    depth: str
    concurrency: int
    samples: list[Sample] = field(default_factory=list)
    error: str | None = None

    def median(self, name: str) -> float:
        return float(median(getattr(sample, name) for sample in self.samples))


@dataclass(frozen=True)
class Ratio:
    """Ours over the best peer's decode rate; median of the ratios within each round."""

    concurrency: int
    speculation: str
    ours: Cell
    peer: Cell

    @property
    def value(self) -> float:
        pairs = zip(self.ours.samples, self.peer.samples, strict=True)
        return float(median(a.decode_rate / b.decode_rate for a, b in pairs))


def same_text(cells: Sequence[Cell], cell: Cell) -> tuple[int, int]:
    """How many of the cell's streams have all tokens of the first engine's with speculation off, and of how many."""
    reference = next(
        (c for c in cells if (c.depth, c.concurrency) == (OFF, cell.concurrency) and c.error is None), cell
    )
    pairs = [
        pair
        for sample, expected in zip(cell.samples, reference.samples, strict=True)
        for pair in zip(sample.token_ids, expected.token_ids, strict=True)
    ]
    return sum(a == b for a, b in pairs), len(pairs)


def ratios(cells: Sequence[Cell]) -> list[Ratio]:
    """For each concurrency: speculation off on both sides; each side at its best depth; and our own choice of depth,
    if it was measured, beside the peers' best.
    """
    found = []
    for concurrency in sorted({cell.concurrency for cell in cells}):
        done = [cell for cell in cells if cell.concurrency == concurrency and cell.error is None]
        ours = [cell for cell in done if cell.engine == OURS]
        peers = [cell for cell in done if cell.engine != OURS]
        for name, ours_there, peers_there in (
            (OFF, [c for c in ours if c.depth == OFF], [c for c in peers if c.depth == OFF]),
            ("best", ours, peers),
            (AUTO, [c for c in ours if c.depth == AUTO], peers),
        ):
            if ours_there and peers_there:
                found.append(Ratio(concurrency, name, fastest(ours_there), fastest(peers_there)))
    return found


def fastest(cells: Sequence[Cell]) -> Cell:
    return max(cells, key=lambda cell: cell.median("decode_rate"))
