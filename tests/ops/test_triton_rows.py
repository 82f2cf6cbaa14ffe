"""Which token each row holds and where it belongs, against the texts and tables written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline_kernels.triton.rows import draft_rows, logit_rows, read_rows, step_rows
from paceline_kernels.triton.state import FIRST_PASS_ROWS, Column, SequenceTable, StepInput

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEATS, LONGEST, BLOCK_SIZE, DEPTH = 6, 300, 8, 4
NUM_BLOCKS = LONGEST // BLOCK_SIZE + 1


def random_table(rng: np.random.Generator) -> SequenceTable:
    table = SequenceTable.allocate(SEATS, LONGEST, NUM_BLOCKS, DEPTH, 1, DEVICE)
    for part, most in ((table.texts, 1000), (table.proposals, 1000), (table.drafts, 1000)):
        part.copy_(torch.from_numpy(rng.integers(0, most, part.shape)))
    table.block_tables.copy_(torch.from_numpy(rng.permutation(SEATS * NUM_BLOCKS).reshape(SEATS, NUM_BLOCKS)))
    table.facts[:, Column.COMPUTED] = torch.from_numpy(rng.integers(2, 250, SEATS)).to(DEVICE, torch.int32)
    return table


def make_input(num_seqs: int, num_rows: int) -> StepInput:
    step = StepInput.view(torch.zeros(1 << 12, dtype=torch.int32, device=DEVICE), SEATS + 1, num_seqs, num_rows)
    for part in (step.seats, step.read_seats, step.row_sequences, step.logit_sequences, step.draft_seats):
        part.fill_(-1)
    return step


def slot_of(table: SequenceTable, seat: int, position: int) -> int:
    return int(table.block_tables[seat, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_step_hold_known_tokens_then_drafts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, seats = random_table(rng), rng.permutation(SEATS)[:4].tolist()
    known, drafts = rng.integers(1, 40, 4).tolist(), rng.integers(0, DEPTH + 1, 4).tolist()
    one_hot, samples = rng.integers(0, 2, 4).tolist(), [True, True, False, True]
    drafts = [count * sampled for count, sampled in zip(drafts, samples, strict=True)]
    lengths = [a + b for a, b in zip(known, drafts, strict=True)]
    logits = [(1 + count) * sampled for count, sampled in zip(drafts, samples, strict=True)]
    num_rows = sum(lengths) + 3
    step = make_input(6, num_rows)
    step.seats[:4] = torch.tensor(seats)
    step.num_tokens[:4], step.num_drafts[:4] = torch.tensor(known), torch.tensor(drafts)
    step.one_hot[:4] = torch.tensor(one_hot)
    for starts, counts in ((step.query_starts, lengths), (step.logit_starts, logits)):
        ends = np.cumsum(counts)
        starts[1:5] = torch.from_numpy(ends)
        starts[5:] = int(ends[-1])
    step.row_sequences[: sum(lengths)] = torch.from_numpy(np.repeat(range(4), lengths))
    step.logit_sequences[: sum(logits)] = torch.from_numpy(np.repeat(range(4), logits))

    token_ids, batch = step_rows(table, step, BLOCK_SIZE, max(lengths))
    tokens, positions, slots = [], [], []
    for seat, count, more, is_proposed in zip(seats, known, drafts, one_hot, strict=True):
        first = int(table.facts[seat, Column.COMPUTED])
        behind = table.proposals if is_proposed else table.drafts
        tokens += [*table.texts[seat, first : first + count].tolist(), *behind[seat, :more].tolist()]
        positions += range(first, first + count + more)
        slots += [slot_of(table, seat, position) for position in range(first, first + count + more)]
    assert token_ids[:-3].tolist() == tokens
    assert batch.positions.tolist() == [*positions, 0, 0, 0], "the angles of padding are read, too"
    assert batch.slots.tolist() == [*slots, -1, -1, -1]
    computed = table.facts[seats, Column.COMPUTED].tolist()
    assert batch.context_lens[:4].tolist() == [a + b for a, b in zip(computed, lengths, strict=True)]

    ends = np.cumsum(lengths)
    of_samples = zip(ends, logits, strict=True)
    wanted = [row for end, count in of_samples for row in range(end - count, end)]
    assert logit_rows(step, sum(logits) + 2).tolist() == [*wanted, 0, 0]


def test_the_first_pass_of_a_draft_model_reads_the_two_newest_tokens() -> None:
    table = random_table(np.random.default_rng(9))
    table.facts[2, Column.COMPUTED] = 0
    seats = torch.tensor([4, 2, 1, -1], dtype=torch.int32, device=DEVICE)
    depths = torch.tensor([3, 2, 1, 0], dtype=torch.int32, device=DEVICE)
    table.facts[:, Column.DRAFTED] = 3  # of the step before
    starts = FIRST_PASS_ROWS * torch.arange(5, dtype=torch.int32, device=DEVICE)
    token_ids, batch = draft_rows(table, seats, depths, starts, BLOCK_SIZE, first=True)
    at = table.facts[:, Column.COMPUTED].tolist()
    for i, seat in ((0, 4), (2, 1)):
        assert token_ids[2 * i : 2 * i + 2].tolist() == table.texts[seat, at[seat] - 1 : at[seat] + 1].tolist()
        assert batch.slots[2 * i : 2 * i + 2].tolist() == [slot_of(table, seat, at[seat] + n) for n in (-1, 0)]
    assert token_ids[3] == table.texts[2, 0]
    assert batch.slots[2:4].tolist() == [-1, slot_of(table, 2, 0)], "nothing is before the first token"
    assert batch.context_lens.tolist() == [at[4] + 1, 1, at[1] + 1, 0]
    # The second pass has the first draft of those that go on.
    table.facts[:, Column.DRAFTED] = 1
    token_ids, batch = draft_rows(table, seats, depths, starts[:5] // 2, BLOCK_SIZE, first=False)
    assert token_ids[:2].tolist() == table.drafts[[4, 2], 0].tolist()
    assert batch.slots.tolist() == [slot_of(table, 4, at[4] + 1), slot_of(table, 2, 1), -1, -1]


@pytest.mark.parametrize("seed", range(4))
def test_a_draft_model_reads_what_it_has_not_and_no_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, seats = random_table(rng), rng.permutation(SEATS)[:4].tolist()
    lengths, until = [1, 200, 5, 7], [1, 0, -1, 3]
    gaps = [0, 180, 9, 4]  # of what has been computed: all is read already, room left, too little room, and a prompt
    computed = table.facts[:, Column.COMPUTED]
    computed[seats[1]] = 190
    for seat, gap in zip(seats, gaps, strict=True):
        computed[seat] = max(int(computed[seat]), gap)
        table.facts[seat, Column.DRAFT_COMPUTED] = computed[seat] - gap
    table.facts[seats[0], Column.DRAFT_COMPUTED] = computed[seats[0]] + 1
    step = make_input(1, 1)
    step.read_seats[:4], step.read_until[:4] = torch.tensor(seats), torch.tensor(until)
    step.read_starts[1:5] = torch.from_numpy(np.cumsum(lengths))
    step.read_starts[5:] = sum(lengths)

    token_ids, batch = read_rows(table, step, sum(lengths) + 11, BLOCK_SIZE, 300)
    begins = [0, *np.cumsum(lengths).tolist()]
    for i, seat in enumerate(seats):
        rows = slice(begins[i], begins[i + 1])
        read = int(table.facts[seat, Column.DRAFT_COMPUTED])
        count = max(0, min(lengths[i], int(computed[seat]) + until[i] - read))
        real = range(read, read + count)
        padding = [-1] * (lengths[i] - count)
        assert batch.slots[rows].tolist() == [*[slot_of(table, seat, position) for position in real], *padding]
        assert token_ids[rows][:count].tolist() == table.texts[seat, read : read + count].tolist()
        assert batch.positions[rows][:count].tolist() == list(real)
        # Row r of n sees all but the n - 1 - r behind it.
        assert int(batch.context_lens[i]) == read + lengths[i]
    assert batch.slots[sum(lengths) :].tolist() == [-1] * 11
    assert batch.context_lens[4:].tolist() == [0] * (SEATS + 1 - 4)
