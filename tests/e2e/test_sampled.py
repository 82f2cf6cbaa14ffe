"""Sampled output follows the target's exact distribution, with every feature, with speculation off and on."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import AutoModelForCausalLM

import paceline_kernels as ops
from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.cost_model import CostModel
from paceline.core.depth import Chosen, DepthCandidate, Outcome, StepLoad, within_bounds
from paceline.core.depth_policy import DepthPolicy
from paceline.core.grammar import GrammarKind, GrammarSpec
from paceline.core.method import Method
from paceline.core.params import Constraints, SamplingParams, SpeculationParams, StopParams, Verification
from paceline.core.plan import SequenceWork
from paceline.core.sequence import Sequence
from paceline.core.standing import Standing
from paceline.core.token_counts import TokenCounts
from paceline.engine import GenerationRequest
from paceline.runner import noise
from paceline.runner.drafter import Draft
from paceline.runner.noise import Stream
from paceline.runner.positions import Positions
from paceline.runner.sampler import distribution_
from paceline.runner.verification import rejection
from paceline.runner.verification.rejection import Comparison
from paceline.speculation import DraftModel, draft_model
from paceline.structured.matcher import LLGuidanceMatcher
from paceline.wiring import EngineSettings, build_engine
from support.chain import ChainState, Mask, Row, distribution, process
from support.pairs import letter_pair

DRAWS = 5_000  # of each feature
TOKENS = 3  # that are looked at
DEPTH = 2  # so that the three are sampled behind a prompt, behind a draft and behind two
SMALLEST_P = 1e-4  # of 46 chi-squares
MAX_RUNNING = 500
MAX_ROWS = 20 * MAX_RUNNING  # so that every draft has its row, whoever else is read
ROOMY = 64  # tokens that a request may have, for whom KV is held ready

LETTERS = "\0acdefhilnorstw "  # the vocabulary: the end of text, then letters
VOCAB = len(LETTERS)
END = 0
CHOICES = ("a", "an", "ant", "the", "then", "tin", "on", "one", "onto", "i", "so", "sow", "we", "wear", " a", "find")

Run = tuple[int, ...]


def ids(text: str) -> Run:
    return tuple(LETTERS.index(letter) for letter in text)


PROMPT = ids(" oc cr al ")  # behind " ", o, c and a an n-gram has something to propose


def any_token(output: Run) -> Mask:
    return np.ones(VOCAB, bool)


def a_choice(output: Run) -> Mask:
    """What may stand next so that one of CHOICES comes of it."""
    text = "".join(LETTERS[token] for token in output)
    return np.array([text in CHOICES, *(any(c.startswith(text + letter) for c in CHOICES) for letter in LETTERS[1:])])


def two_letters(output: Run) -> Mask:
    """`[a-z ]{2,}`."""
    return np.array([len(output) >= 2] + [True] * (VOCAB - 1))


@dataclass(frozen=True)
class Feature:
    """A way to sample, and the same in the oracle's words."""

    sampling: SamplingParams = SamplingParams()
    stop_token_ids: Run = ()
    min_tokens: int = 0
    ignore_eos: bool = True
    grammar: GrammarSpec | None = None
    allows: Callable[[Run], Mask] = any_token
    bad_words: tuple[Run, ...] = ()
    verification: Verification | None = None
    seeded: bool = False

    def request(self, method: Method, index: int, depth: int = DEPTH, lowest: int = DEPTH) -> GenerationRequest:
        return GenerationRequest(
            PROMPT,
            replace(self.sampling, seed=index) if self.seeded else self.sampling,
            StopParams(
                max_tokens=TOKENS + (method is not Method.NONE),  # depth 2 needs room for 3 behind the first
                token_ids=self.stop_token_ids,
                ignore_eos=self.ignore_eos,
                min_tokens=self.min_tokens,
            ),
            SpeculationParams(method, min(lowest, depth), depth, verification=self.verification),
            grammar=self.grammar,
        )

    @property
    def ends(self) -> Run:
        return self.stop_token_ids + (() if self.ignore_eos else (END,))

    def next_token(self, logits: Row, output: Run) -> Row:
        """Its exact distribution, [vocab]."""
        constraints = Constraints(self.bad_words, self.min_tokens, self.ends)
        state = ChainState(PROMPT, output)
        return distribution(process(logits, self.sampling, constraints, state, self.allows(output)), self.sampling)


ALL = Feature(
    SamplingParams(
        temperature=1.2,
        top_k=11,
        top_p=0.97,
        min_p=0.02,
        typical_p=0.98,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.5,
        logit_bias=((2, 1.5), (9, -1.0)),
        allowed_token_ids=tuple(range(14)),
        bad_words=("oc", "d"),
    ),
    stop_token_ids=ids("e"),
    min_tokens=2,
    ignore_eos=False,
    grammar=GrammarSpec(GrammarKind.REGEX, "[a-z ]{2,}"),
    allows=two_letters,
    bad_words=(ids("oc"), ids("d")),
)
FEATURES = {
    "temperature": Feature(SamplingParams(temperature=0.7)),
    "top_k": Feature(SamplingParams(top_k=4)),
    "top_p": Feature(SamplingParams(top_p=0.8)),
    "min_p": Feature(SamplingParams(min_p=0.15)),
    "typical_p": Feature(SamplingParams(typical_p=0.7)),
    "repetition_penalty": Feature(SamplingParams(repetition_penalty=2.5)),
    # Repetitions grow likelier, which shows more than if they grew rarer.
    "presence_penalty": Feature(SamplingParams(presence_penalty=-2.0)),
    "frequency_penalty": Feature(SamplingParams(frequency_penalty=-2.0)),
    "logit_bias": Feature(SamplingParams(logit_bias=((2, 2.0), (3, -1.5), (15, -100.0)))),
    "allowed_token_ids": Feature(SamplingParams(allowed_token_ids=(1, 2, 3, 8, 15))),
    "bad_words": Feature(SamplingParams(bad_words=("oc", "d")), bad_words=(ids("oc"), ids("d"))),
    "min_tokens": Feature(stop_token_ids=ids("d"), min_tokens=2, ignore_eos=False),
    "grammar": Feature(ignore_eos=False, grammar=GrammarSpec(GrammarKind.CHOICE, choices=CHOICES), allows=a_choice),
    "all": ALL,
    "all, token-wise": replace(ALL, verification=Verification.TOKEN_WISE),
    "all, seeded": replace(ALL, seeded=True),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("sampled")
    return letter_pair(folder, LETTERS[1:], noise=0.05, num_hidden_layers=1)


@pytest.fixture(scope="module")
def logits(pair: tuple[Path, Path]) -> dict[Run, Row]:
    """transformers' logits behind the prompt and each output of 0 to 2 tokens."""
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    outputs: list[Run] = [()]
    found: dict[Run, Row] = {}
    for _ in range(TOKENS):
        with torch.inference_mode():
            rows = model(torch.tensor([PROMPT + output for output in outputs])).logits[:, -1]
        found.update(zip(outputs, rows.double().numpy(), strict=True))
        outputs = [(*output, token) for output in outputs for token in range(VOCAB)]
    return found


def enumerate_runs(logits: Mapping[Run, Row], feature: Feature) -> dict[Run, float]:
    """Every run of three tokens, or fewer up to a stop, and its probability."""
    open_runs: dict[Run, float] = {(): 1.0}
    ended: dict[Run, float] = {}
    for _ in range(TOKENS):
        longer: dict[Run, float] = {}
        for run, before in open_runs.items():
            for token, p in enumerate(feature.next_token(logits[run], run)):
                if p > 0:
                    (ended if token in feature.ends else longer)[(*run, token)] = before * float(p)
        open_runs = longer
    return open_runs | ended


def draw(
    pair: tuple[Path, Path],
    method: Method,
    names: Collection[str],
    draws: int,
    depth: int = DEPTH,
    backend: str = "auto",
    policy: DepthPolicy | None = None,
    depths: Counter[int] | None = None,
    max_model_len: int = len(PROMPT) + TOKENS + 1,
) -> dict[str, Counter[Run]]:
    """The first tokens of so many requests of each feature, all in one engine and in turn.

    Args:
        policy: chooses depths from 0 to `depth`; without it, all are `depth`.
        depths: told how many runs of each depth were verified.
    """
    engine = build_engine(
        EngineSettings(
            model=str(pair[0]),
            draft=str(pair[1]),
            dtype="float32",
            max_model_len=max_model_len,
            max_num_seqs=MAX_RUNNING,
            max_num_batched_tokens=MAX_ROWS,
            seed=17,
            backend=backend,
        )
    )
    if policy is not None:
        engine.scheduler.speculation.policy = policy
    lowest = depth if policy is None else 0
    todo = [(name, index) for index in range(draws) for name in names][::-1]
    name_of: dict[int, str] = {}
    runs: dict[int, list[int]] = defaultdict(list)
    while todo or engine.has_work:
        while todo and engine.scheduler.tenants.num_waiting < MAX_RUNNING:
            name, index = todo.pop()
            name_of[engine.add(FEATURES[name].request(method, index, depth, lowest))] = name
        for output in engine.step():
            runs[output.request_id].extend(output.token_ids)
    if method is not Method.NONE:
        for name in names:
            request = FEATURES[name].request(method, 0)
            rule = request.speculation.rule_for(request.sampling)
            accepted = engine.scheduler.speculation.drafters[method, rule].counts.accepted
            assert accepted > 0, f"{name}: nothing was ever accepted"
    if depths is not None:
        totals = engine.scheduler.speculation.totals
        depths[0] += totals.plain_steps
        for (drafted, _), steps in totals.steps.items():
            depths[drafted] += steps
    counts: dict[str, Counter[Run]] = {name: Counter() for name in names}
    for request_id, run in runs.items():
        counts[name_of[request_id]][tuple(run[:TOKENS])] += 1
    return counts


def p_value(counts: Counter[Run], exact: Mapping[Run, float]) -> float:
    """Of a chi-square over runs; the rare ones, expected less than 5 times, share a cell."""
    draws = counts.total()
    if counts.keys() - exact.keys():
        return 0.0  # a run of probability 0
    common = [run for run, p in exact.items() if p * draws >= 5]
    observed = [counts[run] for run in common]
    expected = [exact[run] * draws for run in common]
    rest = draws - sum(expected)
    if rest > 1e-6:
        observed.append(draws - sum(observed))
        expected.append(rest)
    return float(chisquare(observed, expected).pvalue)


@pytest.mark.timeout(1200)  # a minute for all three, where nothing else runs
@pytest.mark.parametrize("method", list(Method))
def test_chi_square(
    pair: tuple[Path, Path], logits: dict[Run, Row], method: Method, record_property: pytest.RecordProperty
) -> None:
    """Each feature alone and all at once, in one batch."""
    # Only a draft model's drafts are drawn; for the others this is "all" once more.
    names = [name for name in FEATURES if name != "all, token-wise" or method is Method.DRAFT_MODEL]
    counts = draw(pair, method, names, DRAWS)
    found = {name: p_value(counts[name], enumerate_runs(logits, FEATURES[name])) for name in names}
    record_property("p_values", found)
    assert {name: p for name, p in found.items() if p <= SMALLEST_P} == {}


class DepthByHistory(DepthPolicy):
    """Other depths in every step, and from request to request: by how many drafts each had accepted before, its id, and
    the number of the step.
    """

    def __init__(self) -> None:
        self._accepted: dict[int, int] = {}
        self._num_steps = 0
        self.depths: Counter[int] = Counter()

    def choose(self, candidates: Seq[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        self._num_steps += 1
        return [self._choose(candidate) for candidate in candidates]

    def _choose(self, candidate: DepthCandidate) -> Chosen:
        accepted = self._accepted.get(candidate.request_id, 0)
        depth = (candidate.request_id + self._num_steps + 2 * accepted) % (candidate.highest + 1)
        self.depths[depth] += 1
        return within_bounds(candidate, candidate.offers[0], depth)

    def observe(self, outcome: Outcome) -> None:
        for request_id, _, accepted in outcome.drafts:
            self._accepted[request_id] = self._accepted.get(request_id, 0) + accepted

    def forget(self, request_id: int) -> None:
        self._accepted.pop(request_id, None)


@pytest.mark.timeout(600)
def test_depths_that_follow_from_history_bias_nothing(pair: tuple[Path, Path], logits: dict[Run, Row]) -> None:
    """In a batch whose depths vary."""
    policy, names = DepthByHistory(), ("temperature", "all", "all, token-wise", "all, seeded")
    counts = draw(pair, Method.DRAFT_MODEL, names, DRAWS, policy=policy)
    assert all(policy.depths[depth] > DRAWS / 10 for depth in range(DEPTH + 1))
    found = {name: p_value(counts[name], enumerate_runs(logits, FEATURES[name])) for name in names}
    assert {name: p for name, p in found.items() if p <= SMALLEST_P} == {}


@pytest.mark.parametrize("name", FEATURES)
def test_the_enumeration_is_complete_and_each_feature_does_something(logits: dict[Run, Row], name: str) -> None:
    exact = enumerate_runs(logits, FEATURES[name])
    assert sum(exact.values()) == pytest.approx(1.0)
    plain = enumerate_runs(logits, Feature())
    distance = sum(abs(exact.get(run, 0.0) - plain.get(run, 0.0)) for run in exact.keys() | plain.keys()) / 2
    assert distance > 0.05
    assert len([p for p in exact.values() if p * DRAWS >= 5]) >= 10, "cells to compare"


class Auto(DepthPolicy):
    """The server's policy, told that every step took as long as it expects: depths are the same on any machine."""

    def __init__(self) -> None:
        self._costs = CostModel.from_functions(lambda rows: 0.2 + 1e-4 * rows, lambda sequences: 1e-4)
        self._policy = AdaptiveDepth(self._costs)

    def choose(self, candidates: Seq[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        return self._policy.choose(candidates, load, slot_price=slot_price)

    def standing(self, load: StepLoad, *, slot_price: float = 0.0) -> Standing | None:
        return self._policy.standing(load, slot_price=slot_price)

    def join(self, candidates: Seq[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        return self._policy.join(candidates, load, slot_price=slot_price)

    def observe(self, outcome: Outcome) -> None:
        outcome.seconds = self._costs.step(outcome.shape)
        self._policy.observe(outcome)

    def forget(self, request_id: int) -> None:
        self._policy.forget(request_id)


@pytest.mark.timeout(600)
def test_auto_biases_nothing(pair: tuple[Path, Path], logits: dict[Run, Row]) -> None:
    """In a batch whose depths vary. With KV to spare: where it is short, no draft is worth a block."""
    depths, names = Counter[int](), ("temperature", "all", "all, token-wise", "all, seeded")
    counts = draw(pair, Method.DRAFT_MODEL, names, DRAWS, policy=Auto(), depths=depths, max_model_len=ROOMY)
    assert all(depths[depth] > DRAWS / 10 for depth in range(DEPTH + 1)), depths
    found = {name: p_value(counts[name], enumerate_runs(logits, FEATURES[name])) for name in names}
    assert {name: p for name, p in found.items() if p <= SMALLEST_P} == {}


# -- the chi-square must be able to fail: wrong rules of ours and of others --------------------------------------------


def assert_noticed(pair: tuple[Path, Path], logits: dict[Run, Row], *names: str, depth: int = DEPTH) -> None:
    """By every one of the features. With torch: the native backend takes by itself some of the steps broken here."""
    counts = draw(pair, Method.DRAFT_MODEL, names, 3_000, depth, backend="torch")
    found = {name: p_value(counts[name], enumerate_runs(logits, FEATURES[name])) for name in names}
    assert all(p < 1e-6 for p in found.values()), found


def test_recovered_tokens_from_p_are_noticed(
    pair: tuple[Path, Path], logits: dict[Run, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of the residual."""
    monkeypatch.setattr(Comparison, "left", lambda self, ruling: self.p[self.p_rows(ruling.accepted[:, None])[:, 0]])
    assert_noticed(pair, logits, "temperature", "all, token-wise")


def test_a_depth_that_looks_at_the_drawn_token_is_noticed(
    pair: tuple[Path, Path], logits: dict[Run, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are cut before the first that does not look promising, as by a threshold on its own probability."""
    propose = DraftModel.propose

    def up_to_the_first_odd(draft: Draft) -> Draft:
        promising = list(itertools.takewhile(lambda token: token % 2 == 0, draft.token_ids))
        return replace(draft, token_ids=promising) if promising else Draft([])

    monkeypatch.setattr(
        DraftModel, "propose", lambda self, batch: [up_to_the_first_odd(draft) for draft in propose(self, batch)]
    )
    assert_noticed(pair, logits, "temperature", "all, token-wise")


def test_prefixes_kept_whatever_is_left_are_noticed(
    pair: tuple[Path, Path], logits: dict[Run, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block verification weighs what is left behind a prefix. (Finer mistakes in it show where every outcome is
    enumerated, in `tests/runner`: in some thousand draws they drown.)
    """
    monkeypatch.setattr(ops, "residual_mass", lambda *operands: torch.full_like(operands[-1], 1e9))
    assert_noticed(pair, logits, "temperature")


def test_peer_13_penalties_from_before_the_run_are_noticed(
    pair: tuple[Path, Path], logits: dict[Run, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = TokenCounts.behind
    monkeypatch.setattr(TokenCounts, "behind", lambda self, drafts: behind(self, ()))
    assert_noticed(pair, logits, "presence_penalty", "frequency_penalty")


def test_peer_15_noise_that_drafts_and_acceptance_share_is_noticed(
    pair: tuple[Path, Path], logits: dict[Run, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are drawn and kept with the same numbers; at depth 1 each meets its own again."""
    monkeypatch.setattr(noise, "Stream", SimpleNamespace(ACCEPT=Stream.DRAFT, SAMPLE=Stream.SAMPLE))
    assert_noticed(pair, logits, "temperature", depth=1)


def test_peer_16_drafts_that_are_not_drawn_from_q_are_noticed(
    pair: tuple[Path, Path], logits: dict[Run, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's argmax is a one-hot draft, whatever its q."""
    drawn_by_argmax = SimpleNamespace(argmax=ops.argmax, draw=lambda q, u: ops.argmax(q))
    monkeypatch.setattr(draft_model, "ops", drawn_by_argmax)
    assert_noticed(pair, logits, "temperature")


def test_peer_16_q_before_its_processors_is_noticed(
    pair: tuple[Path, Path], logits: dict[Run, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn as the request wants it, verified as if drawn from the bare softmax."""
    bare: list[Tensor] = []

    def distribution(logits: Tensor, batch: list[Positions]) -> Tensor:
        bare[:] = [logits.softmax(-1)]
        return distribution_(logits, batch)

    keep = draft_model._Proposal.keep
    monkeypatch.setattr(draft_model, "distribution_", distribution)
    monkeypatch.setattr(draft_model._Proposal, "keep", lambda self, indexes, q: keep(self, indexes, bare[0]))
    assert_noticed(pair, logits, "temperature", "top_k", "min_p")


def test_peer_17_a_depth_that_depends_on_the_drawn_token_is_noticed(
    pair: tuple[Path, Path], logits: dict[Run, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Improbable drafts are not sent to verification."""
    propose = DraftModel.propose

    def confident(self: DraftModel, batch: list[tuple[Sequence, SequenceWork]]) -> list[Draft]:
        drafts = propose(self, batch)
        for index, draft in enumerate(drafts):
            if draft.probs is not None:
                q = draft.probs[range(draft.first_row, draft.first_row + len(draft.token_ids)), draft.token_ids]
                depth = [*(q > 0.2).tolist(), False].index(False)
                drafts[index] = Draft(draft.token_ids[:depth], draft.probs if depth else None, draft.first_row)
        return drafts

    monkeypatch.setattr(DraftModel, "propose", confident)
    assert_noticed(pair, logits, "temperature")


def test_peer_18_a_grammar_that_stays_at_the_first_position_is_noticed(
    pair: tuple[Path, Path], logits: dict[Run, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mask for a whole run."""
    masks = LLGuidanceMatcher.masks
    monkeypatch.setattr(LLGuidanceMatcher, "forced", lambda self, limit: [])
    monkeypatch.setattr(LLGuidanceMatcher, "masks", lambda self, drafts: masks(self, drafts)[[0] * (len(drafts) + 1)])
    assert_noticed(pair, logits, "grammar")


def test_peer_24_min_p_on_the_bonus_row_alone_is_noticed(
    pair: tuple[Path, Path], logits: dict[Run, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(logits: Tensor, batch: list[Positions]) -> Tensor:
        last = torch.tensor([len(positions) for positions in batch]).cumsum(0) - 1
        bonus = distribution_(logits[last], [positions.only([len(positions) - 1])[0] for positions in batch])
        found = distribution_(logits, [_without_min_p(positions) for positions in batch])
        found[last] = bonus
        return found

    def _without_min_p(positions: Positions) -> Positions:
        sequence = copy.copy(positions.sequence)
        sequence.params = replace(sequence.params, sampling=replace(sequence.params.sampling, min_p=0.0))
        return replace(positions, sequence=sequence)

    monkeypatch.setattr(rejection, "distribution_", wrong)
    assert_noticed(pair, logits, "min_p")
