"""The sizes at which steps are recorded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.runner.graphs import ROW_BUCKETS, StepSizes


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
