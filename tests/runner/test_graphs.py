"""The sizes at which steps are recorded, and the recording."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import cost_model
from paceline.engine.profile_shapes import MOST_DRAFTED_ROWS
from paceline.runner.graphs import ROW_BUCKETS, SEQUENCE_BUCKETS, Graphs, StepSizes
from paceline_kernels.recording import record


@given(st.sampled_from([1, 3, 64, 256, 600]), st.sampled_from([0, 1, 8]), st.data())
def test_a_step_finds_a_size_that_holds_it_and_is_recorded(
    max_num_seqs: int, max_depth: int, data: st.DataObject
) -> None:
    sizes = StepSizes(max_num_seqs, max_depth)
    num_seqs = data.draw(st.integers(1, max_num_seqs))
    decodes = data.draw(st.booleans())
    drafts = data.draw(st.lists(st.integers(0, max_depth), min_size=num_seqs, max_size=num_seqs))
    tokens = [1] * num_seqs
    if not decodes:
        tokens = data.draw(st.lists(st.integers(1, 200), min_size=num_seqs, max_size=num_seqs))
    runs = [a + b for a, b in zip(tokens, drafts, strict=True)]
    size = sizes.of(num_seqs, sum(runs), max(runs), decodes)
    if size is None:
        assert sum(runs) > ROW_BUCKETS[-1], "whatever the number of sequences"
        return
    assert size.num_seqs >= num_seqs
    assert size.num_rows >= sum(runs)
    assert size.longest >= max(runs)
    assert size.num_logits is None if decodes else size.num_logits >= num_seqs + sum(drafts)
    assert size in set(sizes.all())


def test_no_size_is_recorded_twice() -> None:
    for max_num_seqs in (1, 3, 64, 256, 600):
        for max_depth in (0, 8):
            recorded = list(StepSizes(max_num_seqs, max_depth).all())
            assert len(recorded) == len(set(recorded))


def test_steps_are_priced_at_the_sizes_at_which_they_are_recorded() -> None:
    """Cost is flat up to a recorded size and rises behind it: the cost model needs a bucket at every such size, and
    where the stairs are wide, up to the rows that decodes with drafts have, one behind it, too.
    """
    priced = set(cost_model.ROW_BUCKETS)
    assert priced >= set(ROW_BUCKETS)
    assert priced >= {rows + 1 for rows in ROW_BUCKETS if 128 <= rows < MOST_DRAFTED_ROWS}


def test_passes_are_priced_at_the_sizes_that_are_recorded() -> None:
    """As far as the cost model has buckets: padded to the next size, a pass between two costs what that one does."""
    *_, largest = priced = cost_model.SEQUENCE_BUCKETS
    assert list(priced) == [count for count in SEQUENCE_BUCKETS if count <= largest]


class Recording:
    """Stands for torch's: a graph that is thrown away while another is recorded ends that recording."""

    def __init__(self) -> None:
        self.running = False
        self.ended_early = False

    @contextmanager
    def graph(self, graph: object, **options: object) -> Iterator[None]:
        self.running = True
        yield
        self.running = False


class Graph:
    def __init__(self, recording: Recording) -> None:
        self.recording, self.itself = recording, self  # garbage that only a search finds

    def __del__(self) -> None:
        self.recording.ended_early |= self.recording.running

    def pool(self) -> None: ...

    def replay(self) -> None: ...


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that the thread was on, the current one last."""
    found = ["own"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: found[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", found.append)
    return found


def test_a_recording_that_fails_leaves_its_stream(streams: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's ends the capture before it goes back, which fails too."""

    @contextmanager
    def graph(graph: object, **options: object) -> Iterator[None]:
        streams.append("of the capture")
        try:
            yield
        finally:
            raise RuntimeError("the capture was invalidated")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    with pytest.raises(RuntimeError, match="invalidated"):
        record(lambda: None)
    assert streams == ["own", "of the capture", "own"]
    assert gc.isenabled()


@pytest.mark.usefixtures("streams")
def test_nothing_is_thrown_away_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(recording))
    monkeypatch.setattr(torch.cuda, "graph", recording.graph)

    def work() -> None:
        if recording.running:
            Graph(recording)
            _ = [[] for _ in range(2 * gc.get_threshold()[0])]  # sets off a search, if there are any

    graphs = Graphs(torch.device("cuda"))
    graphs.run("size", work)
    assert "size" in graphs
    assert not recording.ended_early
    assert gc.isenabled()
