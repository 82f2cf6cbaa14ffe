"""The float64 oracle of the sampler chain against transformers' processors, and against cases worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from support.chain import ChainState, Row, distribution, greedy, process

VOCAB = 60
NUM_ROWS = 200
EMPTY = ChainState(prompt_token_ids=(), output_token_ids=())
OUT = -np.inf


def params(**overrides: Any) -> Any:
    """Sampling parameters that change nothing, but for the overrides."""
    neutral = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": (),
        "allowed_token_ids": (),
    }
    assert overrides.keys() <= neutral.keys()
    return SimpleNamespace(**neutral | overrides)


def constraints(**overrides: Any) -> Any:
    """Constraints that forbid nothing, but for the overrides."""
    neutral = {"bad_words": (), "min_tokens": 0, "stop_token_ids": ()}
    assert overrides.keys() <= neutral.keys()
    return SimpleNamespace(**neutral | overrides)


def random_rows(seed: int, count: int = NUM_ROWS, *, ties: bool = False) -> Iterator[tuple[np.random.Generator, Row]]:
    """Flat to peaked logits, a third of the rows with some -inf; `ties` rounds them to halves."""
    rng = np.random.default_rng(seed)
    for index in range(count):
        row = rng.normal(size=VOCAB) * rng.choice([0.3, 1.0, 4.0])
        if ties:
            row = np.round(2 * row) / 2
        if index % 3 == 0:
            row[rng.choice(VOCAB, size=VOCAB // 3, replace=False)] = -np.inf
        yield rng, row


def random_state(rng: np.random.Generator) -> ChainState:
    """A prompt of 1 to 8 tokens and an output of 0 to 12, from few ids, so that they repeat."""
    prompt = rng.integers(0, 20, size=rng.integers(1, 9))
    output = rng.integers(0, 20, size=rng.integers(0, 13))
    return ChainState(tuple(prompt.tolist()), tuple(output.tolist()))


def theirs(row: Row, state: ChainState, *processors: LogitsProcessor) -> Row:
    """transformers' processors, in the order given, in float64."""
    input_ids: Any = torch.tensor([state.prompt_token_ids + state.output_token_ids], dtype=torch.int64)
    scores = LogitsProcessorList(processors)(input_ids, torch.from_numpy(row)[None])
    found: Row = scores[0].numpy()
    return found


def probabilities(scores: Row) -> Row:
    found: Row = torch.from_numpy(scores).softmax(dim=-1).numpy()
    return found


def assert_same_row(found: Row, expected: Row) -> None:
    """The same tokens are out (-inf, or probability 0), and the others agree."""
    for gone in (-np.inf, 0.0):
        np.testing.assert_array_equal(found == gone, expected == gone)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


# What only matters when sampling.


@pytest.mark.parametrize(
    ("name", "warper", "values"),
    [
        ("temperature", TemperatureLogitsWarper, [0.1, 0.7, 1.0, 1.9]),
        ("top_k", TopKLogitsWarper, [1, 2, 17, VOCAB - 1, VOCAB, VOCAB + 1]),
        ("top_p", TopPLogitsWarper, [0.01, 0.3, 0.9, 0.999]),
        ("min_p", MinPLogitsWarper, [1e-3, 0.05, 0.5, 1.0]),
        ("typical_p", TypicalLogitsWarper, [0.01, 0.2, 0.9, 0.999]),
    ],
)
def test_each_truncation_is_transformers(
    name: str, warper: Callable[[Any], LogitsProcessor], values: list[Any]
) -> None:
    for rng, row in random_rows(seed=1):
        value = values[rng.integers(len(values))]
        expected = probabilities(theirs(row, EMPTY, warper(value)))
        assert_same_row(distribution(row, params(**{name: value})), expected)


@pytest.mark.parametrize(
    ("name", "warper", "values"),
    [
        ("top_k", TopKLogitsWarper, [1, 2, 17]),
        ("min_p", MinPLogitsWarper, [0.04, 0.5, 0.99]),
        ("typical_p", TypicalLogitsWarper, [0.01, 0.2, 0.9]),
    ],
)
def test_ties_at_the_cut_stay_as_in_transformers(
    name: str, warper: Callable[[Any], LogitsProcessor], values: list[Any]
) -> None:
    """Not top-p: there transformers drops some of the tied tokens, by their place in a sorted list."""
    for rng, row in random_rows(seed=2, ties=True):
        value = values[rng.integers(len(values))]
        expected = probabilities(theirs(row, EMPTY, warper(value)))
        assert_same_row(distribution(row, params(**{name: value})), expected)


def test_truncations_together_are_transformers_in_our_order() -> None:
    for rng, row in random_rows(seed=3, count=500):
        temperature, min_p = float(rng.uniform(0.2, 2.0)), float(rng.uniform(0.0, 0.1))
        typical_p, top_k, top_p = float(rng.uniform(0.3, 0.99)), int(rng.integers(1, 30)), float(rng.uniform(0.2, 0.99))
        expected = theirs(
            row,
            EMPTY,
            TemperatureLogitsWarper(temperature),
            MinPLogitsWarper(min_p),
            TypicalLogitsWarper(typical_p),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
        )
        found = distribution(
            row, params(temperature=temperature, min_p=min_p, typical_p=typical_p, top_k=top_k, top_p=top_p)
        )
        assert_same_row(found, probabilities(expected))


# What also changes greedy output.


def random_biases(rng: np.random.Generator) -> tuple[tuple[int, float], ...]:
    """Multiples of 1/8: transformers keeps biases in float32."""
    ids = rng.choice(VOCAB - 1, size=rng.integers(1, 8), replace=False) + 1  # transformers 5.17 refuses token 0
    return tuple((int(token), float(rng.integers(-40, 40)) / 8) for token in ids)


def sequence_bias(biases: tuple[tuple[int, float], ...]) -> SequenceBiasLogitsProcessor:
    return SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases])


def random_bad_words(rng: np.random.Generator, state: ChainState) -> tuple[tuple[int, ...], ...]:
    """Words of 1 to 4 tokens; some of them are about to be completed by the output."""
    words = [tuple(rng.integers(0, 20, size=rng.integers(1, 5)).tolist()) for _ in range(4)]
    words += [(*state.output_token_ids[-n:], int(rng.integers(VOCAB))) for n in range(1, 4)]
    return tuple(words)


def with_prompt_no_word_can_match(state: ChainState) -> ChainState:
    """transformers looks for bad words in prompt and output, we (as vLLM) in the output alone. Both agree when the
    prompt ends with a token that is in no word, since a match that reaches into the prompt has to contain it.
    """
    return ChainState((*state.prompt_token_ids, VOCAB - 1), state.output_token_ids)


def no_bad_words(words: tuple[tuple[int, ...], ...]) -> NoBadWordsLogitsProcessor:
    return NoBadWordsLogitsProcessor([list(word) for word in words])


def test_repetition_penalty_is_transformers() -> None:
    for rng, row in random_rows(seed=4):
        state, penalty = random_state(rng), float(rng.uniform(0.5, 2.0))
        expected = theirs(row, state, RepetitionPenaltyLogitsProcessor(penalty))
        assert_same_row(process(row, params(repetition_penalty=penalty), constraints(), state), expected)


def test_min_tokens_is_transformers() -> None:
    for rng, row in random_rows(seed=5):
        state, min_tokens = random_state(rng), int(rng.integers(0, 13))
        stop_token_ids = tuple(rng.choice(VOCAB, size=3, replace=False).tolist())
        processor = MinNewTokensLengthLogitsProcessor(len(state.prompt_token_ids), min_tokens, list(stop_token_ids))
        found = process(row, params(), constraints(min_tokens=min_tokens, stop_token_ids=stop_token_ids), state)
        assert_same_row(found, theirs(row, state, processor))


def test_bad_words_are_transformers() -> None:
    completed = 0
    for rng, row in random_rows(seed=6):
        state = with_prompt_no_word_can_match(random_state(rng))
        words = tuple(word for word in random_bad_words(rng, state) if VOCAB - 1 not in word)
        found = process(row, params(), constraints(bad_words=words), state)
        assert_same_row(found, theirs(row, state, no_bad_words(words)))
        longer = tuple(word for word in words if len(word) > 1)
        completed += not np.array_equal(process(row, params(), constraints(bad_words=longer), state), row)
    assert completed > NUM_ROWS / 2, "hardly any word of several tokens was about to be completed"


def test_logit_bias_is_transformers() -> None:
    for rng, row in random_rows(seed=7):
        biases = random_biases(rng)
        # transformers asks for some context, though one-token biases do not look at it.
        expected = theirs(row, random_state(rng), sequence_bias(biases))
        assert_same_row(process(row, params(logit_bias=biases), constraints(), EMPTY), expected)


def test_the_whole_chain_is_transformers_in_our_order() -> None:
    """All but the allowed ids, frequency and presence, which transformers does not have."""
    for rng, row in random_rows(seed=8, count=500):
        state = with_prompt_no_word_can_match(random_state(rng))
        words = tuple(word for word in random_bad_words(rng, state) if VOCAB - 1 not in word)
        min_tokens = int(rng.integers(0, 13))
        stop_token_ids = tuple(rng.choice(VOCAB, size=3, replace=False).tolist())
        biases = random_biases(rng)
        p = params(
            temperature=float(rng.uniform(0.2, 2.0)),
            top_k=int(rng.integers(1, 30)),
            top_p=float(rng.uniform(0.2, 0.99)),
            min_p=float(rng.uniform(0.0, 0.1)),
            typical_p=float(rng.uniform(0.3, 0.99)),
            repetition_penalty=float(rng.uniform(0.5, 2.0)),
            logit_bias=biases,
        )
        c = constraints(bad_words=words, min_tokens=min_tokens, stop_token_ids=stop_token_ids)
        expected = theirs(
            row,
            state,
            no_bad_words(words),
            MinNewTokensLengthLogitsProcessor(len(state.prompt_token_ids), min_tokens, list(stop_token_ids)),
            sequence_bias(biases),
            RepetitionPenaltyLogitsProcessor(p.repetition_penalty),
        )
        processed = process(row, p, c, state)
        assert_same_row(processed, expected)
        assert greedy(processed) == int(torch.from_numpy(expected).argmax())
        expected = theirs(
            expected,
            state,
            TemperatureLogitsWarper(p.temperature),
            MinPLogitsWarper(p.min_p),
            TypicalLogitsWarper(p.typical_p),
            TopKLogitsWarper(p.top_k),
            TopPLogitsWarper(p.top_p),
        )
        assert_same_row(distribution(processed, p), probabilities(expected))


# By hand.


def processed(
    logits: list[float], p: Any, c: Any = None, state: ChainState = EMPTY, allowed: Any = None
) -> list[float]:
    """`process` on lists; also sees that the logits given are not written to."""
    row = np.array(logits)
    found = process(row, p, c or constraints(), state, allowed)
    assert row.tolist() == logits
    return list(map(float, found))


def kept(probs: list[float], **overrides: Any) -> list[int]:
    """The tokens that are left of a distribution given by its probabilities."""
    return np.flatnonzero(distribution(np.log(probs), params(**overrides))).tolist()


def test_neutral_parameters_change_nothing() -> None:
    row = [0.5, -1.25, OUT, 3.0]
    assert processed(row, params(), state=ChainState((0, 1), (3, 3, 1))) == row
    np.testing.assert_allclose(distribution(np.log([0.5, 0.2, 0.3]), params()), [0.5, 0.2, 0.3], rtol=1e-15)


def test_frequency_and_presence_count_the_output_alone() -> None:
    state = ChainState(prompt_token_ids=(0, 0, 1), output_token_ids=(1, 2, 2, 2))
    assert processed([1.0, 1.0, 1.0, 1.0], params(frequency_penalty=0.5), state=state) == [1.0, 0.5, -0.5, 1.0]
    assert processed([1.0, 1.0, 1.0, 1.0], params(presence_penalty=0.5), state=state) == [1.0, 0.5, 0.5, 1.0]
    both = params(frequency_penalty=-0.25, presence_penalty=0.5)
    assert processed([1.0, 1.0, 1.0, 1.0], both, state=state) == [1.0, 0.75, 1.25, 1.0]


def test_repetition_counts_prompt_and_output_once() -> None:
    state = ChainState(prompt_token_ids=(0, 0, 1), output_token_ids=(1, 2, 2))
    row = [4.0, -4.0, 0.0, 4.0]
    assert processed(row, params(repetition_penalty=2.0), state=state) == [2.0, -8.0, 0.0, 4.0]


def test_repetition_comes_before_frequency_and_presence() -> None:
    p = params(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    # 4 / 2 - 3 * 0.5 - 0.25; the other way round it would be (4 - 1.75) / 2 = 1.125.
    assert processed([4.0, 4.0], p, state=ChainState((), (0, 0, 0))) == [0.25, 4.0]


def test_bias_comes_before_penalties() -> None:
    p = params(repetition_penalty=2.0, logit_bias=((0, -3.0), (2, 1.5)))
    # (1 - 3) * 2; the other way round it would be 1 / 2 - 3 = -2.5.
    assert processed([1.0, 1.0, 1.0], p, state=ChainState((0,), (1,))) == [-4.0, 0.5, 2.5]


def test_allowed_ids_and_grammar_both_hold_and_no_bias_brings_a_token_back() -> None:
    row = [1.0, 2.0, 3.0, 4.0]
    p = params(allowed_token_ids=(0, 2), logit_bias=((0, 1.0), (3, 100.0)))
    assert processed(row, p) == [2.0, OUT, 3.0, OUT]
    grammar = np.array([True, True, False, True])
    assert processed(row, p, allowed=grammar) == [2.0, OUT, OUT, OUT]
    assert processed(row, params(), allowed=grammar) == [1.0, 2.0, OUT, 4.0]
    forbidden = constraints(bad_words=((0,),), min_tokens=1, stop_token_ids=(2,))
    bias = params(logit_bias=((0, 100.0), (2, 100.0)), repetition_penalty=0.5)
    assert processed(row, bias, forbidden, ChainState((0, 2), ())) == [OUT, 2.0, OUT, 4.0]


@pytest.mark.parametrize(
    ("output", "out"),
    [
        ((), [3]),  # what the prompt ends with counts for nothing, and the word of one token always counts
        ((0,), [3]),  # half of the prefix is in the prompt
        ((0, 1), [2, 3]),
        ((4, 0, 1), [2, 3]),
        ((0, 1, 4), [3]),
        ((0, 4, 1), [3]),
    ],
)
def test_bad_words_look_at_the_output_alone(output: tuple[int, ...], out: list[int]) -> None:
    c = constraints(bad_words=((0, 1, 2), (3,)))
    for prompt in [(0, 1), (0,), ()]:
        found = processed([0.0] * 5, params(), c, ChainState(prompt, output))
        assert np.flatnonzero(np.isneginf(found)).tolist() == out


def test_min_tokens_ends_when_they_exist() -> None:
    c = constraints(min_tokens=2, stop_token_ids=(0, 2))
    for output, expected in [((), [OUT, 1.0, OUT]), ((1,), [OUT, 1.0, OUT]), ((1, 1), [1.0, 1.0, 1.0])]:
        assert processed([1.0, 1.0, 1.0], params(), c, ChainState((1, 1, 1), output)) == expected


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    assert greedy(np.array([OUT, 1.0, 2.0, 2.0])) == 2


def test_top_k_comes_before_top_p() -> None:
    # Of the two that stay the first has 4/7 > 0.55; of all four it would take two.
    assert kept([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.55) == [0]
    assert kept([0.4, 0.3, 0.2, 0.1], top_p=0.55) == [0, 1]


def test_top_p_keeps_one_at_least_and_ties_with_the_last() -> None:
    assert kept([0.2, 0.5, 0.3], top_p=1e-9) == [1]
    assert kept([0.2, 0.2, 0.4, 0.2], top_p=0.5) == [0, 1, 2, 3]
    assert kept([0.3, 0.3, 0.3, 0.1], top_p=0.1) == [0, 1, 2]


def test_top_k_keeps_ties_with_the_last() -> None:
    assert kept([0.2, 0.2, 0.4, 0.2], top_k=2) == [0, 1, 2, 3]
    assert kept([0.2, 0.2, 0.4, 0.2], top_k=1) == [2]


def test_typical_may_drop_the_most_probable_token() -> None:
    # The entropy is 1.75 bits, the surprises are 1, 2, 3 and 3: so the second token is nearest, then the first.
    probs = [0.5, 0.25, 0.125, 0.125]
    assert kept(probs, typical_p=0.2) == [1]
    assert kept(probs, typical_p=0.5) == [0, 1]
    assert kept(probs, typical_p=0.8) == [0, 1, 2, 3]


def test_typical_comes_after_min_p_and_before_top_k() -> None:
    probs = [0.5, 0.25, 0.125, 0.125]
    assert kept(probs, typical_p=0.2, top_k=1) == [1]  # top-k first would leave the first token
    # Of 2/3 and 1/3 the entropy is 0.918 bits, the surprises are 0.585 and 1.585: min-p turned the choice round.
    assert kept(probs, typical_p=0.2, min_p=0.4) == [0]


def test_temperature_comes_before_min_p() -> None:
    assert kept([0.6, 0.3, 0.1], min_p=0.4) == [0, 1]
    assert kept([0.6, 0.3, 0.1], min_p=0.4, temperature=0.5) == [0]  # 0.3 / 0.6, squared
    assert kept([0.6, 0.3, 0.1], min_p=0.4, temperature=2.0) == [0, 1, 2]  # the root of 0.1 / 0.6 is 0.408


def test_a_temperature_near_zero_is_greedy() -> None:
    assert distribution(np.array([1.0, 3.0, 2.999, OUT]), params(temperature=1e-30)).tolist() == [0, 1, 0, 0]
    tied = distribution(np.array([5.0, -5.0, 5.0]), params(temperature=1e-30, typical_p=0.5, top_p=0.5, min_p=0.1))
    np.testing.assert_allclose(tied, [0.5, 0, 0.5])


def test_a_permutation_of_the_vocabulary_permutes_the_result() -> None:
    for rng, row in random_rows(seed=9, ties=True):
        p = params(
            temperature=float(rng.uniform(0.2, 2.0)),
            top_k=int(rng.integers(1, 40)),
            top_p=float(rng.uniform(0.2, 0.99)),
            min_p=float(rng.uniform(0.0, 0.1)),
            typical_p=float(rng.uniform(0.3, 0.99)),
        )
        order = rng.permutation(VOCAB)
        assert_same_row(distribution(row[order], p), distribution(row, p)[order])
