"""N-grams looked up on the device, against the index of the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.plan import LONGEST_MATCH, LONGEST_NGRAM
from paceline.speculation.ngram_index import NgramIndex
from paceline_kernels.triton import ngrams
from paceline_kernels.triton.ngrams import look_up, score_and_look_up
from paceline_kernels.triton.state import UNKNOWN_END, Column, SequenceTable, StepInput, StepOutput

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEATS, DEPTH, MOST = 12, 5, 60


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is several."""
    monkeypatch.setattr(ngrams, "BLOCK", 16)


def random_texts(rng: np.random.Generator) -> list[list[int]]:
    """Of few words, so that much is found, and some of many; some that loop, and one that is a single token."""
    texts = [rng.integers(0, rng.choice([1, 2, 3, 8, 1000]), rng.integers(1, MOST)).tolist() for _ in range(SEATS - 3)]
    loop = rng.integers(0, 9, 3).tolist()
    return [*texts, [5], loop * 7, [*rng.integers(0, 9, 30).tolist(), *loop, 77, *loop]]


def make_table(texts: list[list[int]], emitted: list[list[int]]) -> SequenceTable:
    """Poisoned where nobody has written. The newest of the emitted tokens is not computed."""
    table = SequenceTable.allocate(SEATS, MOST + DEPTH + 1, 1, DEPTH, 1, DEVICE)
    for part in (table.facts, table.texts, table.proposals):
        part.fill_(-77)
    for seat, (text, news) in enumerate(zip(texts, emitted, strict=True)):
        table.texts[seat, : len(text) + len(news)] = torch.tensor(text + news)
        table.facts[seat, Column.COMPUTED] = len(text) + len(news) - 1
    return table


def index_of(text: list[int]) -> NgramIndex:
    index = NgramIndex()
    index.read(text)
    return index


@pytest.mark.parametrize("seed", range(6))
def test_proposals_and_matches_are_those_of_the_host(seed: int) -> None:
    texts = random_texts(np.random.default_rng(seed))
    table = make_table(texts, [[]] * SEATS)
    asked = [seat for seat in range(SEATS) if seat != 3]
    table.facts[5, Column.MATCH] = UNKNOWN_END  # a prompt, of which nobody knows the end yet
    look_up(table, torch.tensor(asked, device=DEVICE), LONGEST_NGRAM, LONGEST_MATCH)
    asked.remove(5)
    for seat, text in enumerate(texts):
        proposals, match = table.proposals[seat].tolist(), int(table.facts[seat, Column.MATCH])
        if seat not in asked:
            assert (set(proposals), match) == ({-77}, UNKNOWN_END if seat == 5 else -77), "nobody asked"
            continue
        assert match == index_of(text).match(text), text
        if match:
            assert proposals == index_of(text).continuation(text, DEPTH + 1), text


@pytest.mark.parametrize("seed", range(6))
def test_what_was_emitted_is_scored_and_what_comes_next_is_looked_up(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    texts = random_texts(rng)
    emitted = []
    for text in texts:
        news = index_of(text).continuation(text, int(rng.integers(1, DEPTH + 2))) or [3]
        if rng.random() < 0.7:  # else all of it is right
            news[rng.integers(len(news))] = 999
        emitted.append(news)
    table = make_table(texts, [[]] * SEATS)
    look_up(table, torch.arange(SEATS, device=DEVICE), LONGEST_NGRAM, LONGEST_MATCH)
    whole = make_table(texts, emitted)
    table.texts.copy_(whole.texts)
    table.facts[:, Column.COMPUTED] = whole.facts[:, Column.COMPUTED]
    before = table.proposals.clone()
    for seat in (0, 5):  # prompts
        table.facts[seat, Column.MATCH] = UNKNOWN_END
        table.proposals[seat] = -77

    seats = rng.permutation(SEATS).tolist()
    num_seqs = SEATS + 2
    step = StepInput.view(torch.zeros(1 << 12, dtype=torch.int32, device=DEVICE), num_seqs, num_seqs, num_seqs)
    output = StepOutput.view(torch.full((1 << 12,), -77, dtype=torch.int32, device=DEVICE), num_seqs, DEPTH)
    step.seats.copy_(torch.tensor([*seats, -1, -1]))
    step.looks_up[:SEATS] = torch.tensor([seat != 3 for seat in seats])
    samples = [seat != 4 for seat in seats]
    step.logit_starts.copy_(torch.tensor([0, *np.cumsum([*samples, 0, 0]).tolist()]))
    output.num_accepted[:SEATS] = torch.tensor([len(emitted[seat]) - 1 for seat in seats])
    score_and_look_up(table, step, output, LONGEST_NGRAM, LONGEST_MATCH)

    for i, seat in enumerate(seats):
        text, news = texts[seat], emitted[seat]
        scored, match = int(output.scored[i]), int(output.match[i])
        if seat in (3, 4):
            assert (scored, match) == (-1, 0)
            assert torch.equal(table.proposals[seat], before[seat])
            assert table.facts[seat, Column.MATCH] == UNKNOWN_END
            continue
        labels = index_of(text).score(text, news)
        assert scored == (sum(labels) if labels else -1), (text, news)
        whole_text = text + news
        assert match == index_of(whole_text).match(whole_text)
        if match:
            assert table.proposals[seat].tolist() == index_of(whole_text).continuation(whole_text, DEPTH + 1)
    assert output.scored[SEATS:].tolist() == [-1, -1]
    assert output.match[SEATS:].tolist() == [0, 0]
