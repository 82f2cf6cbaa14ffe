"""The synchronous engine: what goes in, what comes out, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.toy import VOCAB_SIZE, FailingRunner, ToyTokenizer, decode, expected, make_engine, make_request, num_free
from paceline.core.config import SchedulerConfig
from paceline.core.depth_policy import FixedDepth
from paceline.core.grammar import Grammar, GrammarKind, GrammarSpec
from paceline.core.method import Method
from paceline.core.params import (
    Constraints,
    LogprobsParams,
    SamplingParams,
    SchedulingParams,
    SpeculationParams,
    Verification,
)
from paceline.core.plan import (
    Finish,
    FinishReason,
    SequenceResult,
    SequenceWork,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.core.tenant_policy import ONE_SHARE, TenantPolicy
from paceline.engine import ChatMessage, Engine, GenerationRequest, Output
from paceline.errors import EngineDead, FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from paceline.sim import ScriptedRunner, SimulatedRunner, StepCost, VirtualClock


def run(engine: Engine) -> dict[int, list[Output]]:
    """Step until nothing is left; every request's outputs."""
    outputs: dict[int, list[Output]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_invariants()
    return outputs


def joined(outputs: Sequence[Output]) -> tuple[tuple[int, ...], str]:
    return tuple(t for output in outputs for t in output.token_ids), "".join(output.text for output in outputs)


@pytest.mark.parametrize("method", Method)
def test_a_batch_gives_each_request_its_own_completion(method: Method) -> None:
    engine = make_engine(method=method)
    prompts = [[1], [2, 3], list(range(30)), [5] * 9]
    ids = [engine.add(make_request(prompt, 10 + index)) for index, prompt in enumerate(prompts)]
    outputs = run(engine)
    for index, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        assert joined(outputs[request_id]) == expected(prompt, 10 + index)
    assert num_free(engine) == 64


def test_offsets_and_the_end_of_a_completion() -> None:
    engine = make_engine()
    request_id = engine.add(make_request(max_tokens=13))
    outputs = run(engine)[request_id]
    count = 0
    for output in outputs:
        assert output.token_offset == count
        count += len(output.token_ids)
    assert [output.finish is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [output.stats is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    stats = outputs[-1].stats
    assert stats is not None
    assert (stats.prompt_tokens, stats.completion_tokens) == (3, 13)


@pytest.mark.parametrize("depth", range(7))
def test_a_stop_string_inside_an_accepted_run(depth: int) -> None:
    """Cases 9, 10, 11 and 22: wherever the run is cut, ids, text, usage and accepted counts tell the same story."""
    token_ids, _ = expected([7, 8], 30)
    tokenizer = ToyTokenizer()
    for at in range(2, 30):
        text = decode(token_ids[: at + 1])
        if not tokenizer.token_bytes(token_ids[at]).isalnum() or text.find(text[-3:]) < len(text) - 3:
            continue
        engine = make_engine(depth=depth, draft_is_right=lambda request_id, position: True)
        request_id = engine.add(make_request([7, 8], max_tokens=30, strings=(text[-3:],)))
        outputs = run(engine)[request_id]
        last = outputs[-1]
        assert joined(outputs) == (token_ids[: at + 1], text[:-3])
        assert last.finish is not None
        assert (last.finish.reason, last.finish.stop_string) == (FinishReason.STOP_STRING, text[-3:])
        assert last.stats is not None
        assert last.stats.completion_tokens == at + 1
        # Each step emits one token more than it accepts, unless the last run was cut inside its accepted drafts.
        assert last.stats.accepted_tokens <= at + 1 - (last.stats.verify_steps - 1)
        assert last.stats.accepted_tokens == sum(last.stats.accepted_by_position)
        assert last.stats.accepted_tokens <= last.stats.drafted_tokens


def test_eos_inside_an_accepted_run_counts_no_draft_behind_it() -> None:
    """Cases 9 and 22."""
    token_ids, _ = expected([7, 8], 30)
    at = next(index for index in range(9, 30) if token_ids.index(token_ids[index]) == index)
    engine = make_engine(depth=6, eos_token_ids=(token_ids[at],), draft_is_right=lambda request_id, position: True)
    request_id = engine.add(make_request([7, 8], max_tokens=30))
    outputs = run(engine)[request_id]
    assert joined(outputs) == (token_ids[: at + 1], decode(token_ids[:at]))
    stats = outputs[-1].stats
    assert stats is not None
    # The prompt's step emits 1 token, full runs of depth 6 emit 7, and all tokens of the run with the EOS are drafts.
    assert stats.accepted_tokens == at + 1 - 1 - (at - 1) // 7
    assert outputs[-1].finish is not None
    assert outputs[-1].finish.stop_token_id == token_ids[at]


def test_an_abort_frees_blocks_at_once_and_says_so_once() -> None:
    engine = make_engine()
    kept, gone = engine.add(make_request([1, 2])), engine.add(make_request([3, 4]))
    engine.step()
    owned = 64 - num_free(engine)
    assert engine.abort(gone)
    assert 64 - num_free(engine) < owned
    assert not engine.abort(gone)
    engine.check_invariants()
    outputs = run(engine)
    assert outputs.keys() == {kept}
    assert num_free(engine) == 64


def test_an_abort_during_a_step_drops_its_result() -> None:
    engine = make_engine()
    request_id = engine.add(make_request())
    plan = engine.plan()
    assert plan is not None
    result = engine.runner.execute(plan)
    engine.abort(request_id)
    assert engine.finish(plan, result) == []
    engine.check_invariants()


def test_a_request_that_has_ended_keeps_nothing() -> None:
    """What the engine holds beside it holds it, too: together they would live until Python looks for cycles."""
    engine = make_engine()
    finished, aborted = (engine.add(make_request()) for _ in range(2))
    requests = [engine.scheduler.requests[request_id] for request_id in (finished, aborted)]
    assert all(request.companion is not None for request in requests)
    engine.abort(aborted)
    run(engine)
    assert [request.companion for request in requests] == [None, None]


def test_ids_are_never_used_twice() -> None:
    engine = make_engine()
    first = engine.add(make_request())
    engine.abort(first)
    assert engine.add(make_request()) != first


def test_without_work_there_is_nothing_to_plan() -> None:
    engine = make_engine()
    assert engine.plan() is None
    assert engine.step() == []
    assert engine.totals.steps == 0


class TestRefused:
    @pytest.mark.parametrize(
        ("request_", "field"),
        [
            (make_request([1, VOCAB_SIZE]), "prompt_tokens.ids"),
            (make_request([-1]), "prompt_tokens.ids"),
            (make_request([]), "prompt_tokens.ids"),
            (make_request(""), "prompt_text"),
            (make_request("a\ud800b"), "prompt_text"),
            (make_request(strings=("a\udfff",)), "stop.strings"),
            (make_request(token_ids=(5, VOCAB_SIZE)), "stop.token_ids"),
            (GenerationRequest([ChatMessage("user", "a"), ChatMessage("robot", "b")]), "chat.messages[1].role"),
            (GenerationRequest([ChatMessage("user", "\ud800")]), "chat.messages[0].content"),
            (GenerationRequest([ChatMessage("user", "a"), 5]), "chat.messages"),  # type: ignore[arg-type]
            (make_request([1] * 200), "prompt_tokens.ids"),
            (make_request("x" * 200), "prompt_text"),
            (GenerationRequest([ChatMessage("user", "x" * 200)]), "chat.messages"),
            (GenerationRequest([ChatMessage("user", "x")] * 200), "chat.messages"),
            (make_request([1] * 150, max_tokens=None, min_tokens=51), "stop.min_tokens"),
            (replace(make_request(), sampling=SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),))), "sampling.logit_bias"),
            (replace(make_request(), sampling=SamplingParams(logit_bias=((-1, 1.0),))), "sampling.logit_bias"),
            (
                replace(make_request(), sampling=SamplingParams(allowed_token_ids=(1, VOCAB_SIZE))),
                "sampling.allowed_token_ids",
            ),
            (
                replace(make_request(), sampling=SamplingParams(allowed_token_ids=(1,) * (VOCAB_SIZE + 1))),
                "sampling.allowed_token_ids",
            ),
            (replace(make_request(), sampling=SamplingParams(bad_words=("a\ud800",))), "sampling.bad_words"),
            (replace(make_request(), logprobs=LogprobsParams(completion=21)), "output.logprobs"),
            (replace(make_request(), logprobs=LogprobsParams(prompt=21)), "output.prompt_logprobs"),
            (
                replace(make_request(), speculation=SpeculationParams(verification=Verification.BLOCK)),
                "speculation.verification",
            ),
            (replace(make_request(), speculation=SpeculationParams(min_depth=9)), "speculation.min_draft_tokens"),
            (replace(make_request(), speculation=SpeculationParams(min_depth=9), n=3), "speculation.min_draft_tokens"),
        ],
    )
    def test_the_field_is_named(self, request_: GenerationRequest, field: str) -> None:
        engine = make_engine()
        with pytest.raises(InvalidArgument) as caught:
            engine.add(request_)
        assert caught.value.field == field
        str(caught.value).encode()
        assert not engine.has_work
        engine.check_invariants()

    def test_a_model_vocabulary_smaller_than_the_tokenizers(self) -> None:
        engine = make_engine()
        small = Engine(engine.scheduler, engine.runner, ToyTokenizer(), "toy", vocab_size=100)
        with pytest.raises(InvalidArgument, match="prompt_text = 122"):
            small.add(make_request("az"))

    def test_a_method_that_is_not_loaded(self) -> None:
        engine = make_engine(method=Method.NGRAM)
        request = replace(make_request(), speculation=SpeculationParams(Method.DRAFT_MODEL))
        with pytest.raises(FailedPrecondition, match=r"speculation\.mode = draft_model.*ngram, off"):
            engine.add(request)

    def test_what_can_never_fit(self) -> None:
        engine = make_engine(num_blocks=8)
        with pytest.raises(ResourceExhausted, match="can never fit"):
            engine.add(make_request([1] * 20, max_tokens=13))
        assert not engine.has_work
        request_id = engine.add(make_request([1] * 20, max_tokens=12))
        assert joined(run(engine)[request_id]) == expected([1] * 20, 12)

    def test_a_full_queue(self) -> None:
        engine = make_engine(max_queued=2)
        engine.add(make_request())
        assert engine.has_room_for(make_request())
        engine.add(make_request())
        assert not engine.has_room_for(make_request())
        with pytest.raises(Unavailable):
            engine.add(make_request())
        assert len(run(engine)) == 2


class TestSeveralCompletions:
    PROMPT = tuple(range(3, 14))

    def request(self, n: int, max_tokens: int = 12) -> GenerationRequest:
        return replace(make_request(self.PROMPT, max_tokens), n=n)

    @pytest.mark.parametrize("method", Method)
    def test_ids_and_choices_follow_one_another(self, method: Method) -> None:
        engine = make_engine(method=method)
        before, first, behind = (engine.add(self.request(n)) for n in (1, 4, 1))
        assert (first, behind) == (before + 1, before + 5)
        outputs = run(engine)
        assert outputs.keys() == set(range(before, behind + 1))
        for choice in range(4):
            assert {output.choice for output in outputs[first + choice]} == {choice}
            assert joined(outputs[first + choice]) == expected(self.PROMPT, 12)
        assert num_free(engine) == 64

    def test_the_account_of_each_counts_what_it_shared(self) -> None:
        engine = make_engine()
        first = engine.add(self.request(3))
        outputs = run(engine)
        stats = [outputs[first + choice][-1].stats for choice in range(3)]
        assert [(s.prompt_tokens, s.cached_prompt_tokens, s.completion_tokens) for s in stats if s is not None] == [
            (11, 0, 12),
            (11, 8, 12),
            (11, 8, 12),
        ]
        assert engine.totals.tokens == 36

    @pytest.mark.parametrize("weight", [0.1, 1.0])
    @pytest.mark.parametrize("n", [1, 2, 3, 4])
    def test_others_give_way_to_all_completions_or_to_none(self, n: int, weight: float) -> None:
        """Whoever has most for its weight gives way, and with every request that leaves it may be another."""
        for a, b in [(a, 12 - a) for a in range(13)]:
            engine = make_engine(max_queued=12)
            engine.scheduler.tenants.set_policies({"b": TenantPolicy(weight=weight)}, ONE_SHARE, 0.0)
            for tenant in ["a"] * a + ["b"] * b:
                engine.add(replace(make_request(), scheduling=SchedulingParams(tenant)))
            late = replace(make_request(), n=n, scheduling=SchedulingParams("late"))
            try:
                engine.add(late)
            except Unavailable:
                queued, gone = 0, 0
            else:
                queued, gone = n, n
            assert [one.tenant for one in engine.scheduler.waiting].count("late") == queued, (a, b)
            assert len(engine.take_refused()) == gone, (a, b)
            assert len(engine.scheduler.requests) == len(list(engine._completions.keys())) == 12

    def test_all_are_queued_or_none(self) -> None:
        engine = make_engine(max_queued=4)
        engine.add(self.request(2))
        with pytest.raises(Unavailable, match="2 requests are waiting, and max_queued is 4"):
            engine.add(self.request(3))
        assert len(engine.scheduler.waiting) == 2
        engine.check_invariants()
        assert engine.has_room_for(self.request(2))
        assert not engine.has_room_for(self.request(3))
        engine.add(self.request(2))
        assert len(run(engine)) == 4

    def test_more_than_the_queue_ever_holds(self) -> None:
        engine = make_engine(max_queued=4)
        with pytest.raises(InvalidArgument, match="at most 4") as caught:
            engine.add(self.request(5))
        assert caught.value.field == "n"
        assert not engine.has_work
        engine.add(self.request(4))
        assert len(run(engine)) == 4

    @pytest.mark.parametrize("steps", [0, 1, 3])
    @pytest.mark.parametrize("gone", [0, 1, 2])
    def test_an_abort_of_one_leaves_the_others(self, steps: int, gone: int) -> None:
        engine = make_engine(max_num_batched_tokens=8)
        first = engine.add(self.request(3))
        for _ in range(steps):
            engine.step()
        assert engine.abort(first + gone)
        engine.check_invariants()
        outputs = run(engine)
        assert outputs.keys() == {first, first + 1, first + 2} - {first + gone}
        assert num_free(engine) == 64

    def test_an_abort_of_all_frees_everything(self) -> None:
        engine = make_engine()
        first = engine.add(self.request(3))
        for _ in range(3):
            engine.step()
        assert all(engine.abort(first + choice) for choice in range(3))
        assert num_free(engine) == 64
        assert not engine.has_work
        engine.check_invariants()


class EditedRunner:
    """The scripted runner, with more in its results: `edit` gets the runner, the work and the scripted result."""

    def __init__(
        self, runner: ScriptedRunner, edit: Callable[[ScriptedRunner, SequenceWork, SequenceResult], SequenceResult]
    ) -> None:
        self.runner = runner
        self.edit = edit

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.runner.execute(plan)
        sequences = zip(plan.work, result.sequences, strict=True)
        return replace(result, sequences=tuple(self.edit(self.runner, work, sequence) for work, sequence in sequences))


def logprob_of(token_id: int, position: int) -> TokenLogprobs:
    """Different wherever it matters."""
    return TokenLogprobs(-float(token_id), position + 1)


def with_logprobs(runner: ScriptedRunner, work: SequenceWork, result: SequenceResult) -> SequenceResult:
    """As a model's runner tells them: of each emitted token, and of the prompt token behind each row of the prompt."""
    sequence = runner.sequences[work.request_id]
    known = len(sequence) - len(result.token_ids)
    if sequence.params.logprobs.completion is not None:
        emitted = tuple(logprob_of(token, position) for position, token in enumerate(result.token_ids, known))
        result = replace(result, logprobs=emitted)
    if sequence.params.logprobs.prompt is not None:
        start = (known if work.samples else sequence.num_computed) - work.num_tokens + 1
        tokens = sequence.prompt[start : start + work.num_tokens]
        told = tuple(logprob_of(token, position) for position, token in enumerate(tokens, start))
        result = replace(result, prompt_start=start, prompt_logprobs=told)
    return result


def with_finish_at(
    count: int, **ending: str | int | None
) -> Callable[[ScriptedRunner, SequenceWork, SequenceResult], SequenceResult]:
    """The completion's tokens end behind `count`: with `failure`, or where the grammar ends."""

    def edit(runner: ScriptedRunner, work: SequenceWork, result: SequenceResult) -> SequenceResult:
        left = count - (runner.sequences[work.request_id].num_output - len(result.token_ids))
        if not work.samples or len(result.token_ids) < left:
            return result
        if "failure" in ending:
            return replace(result, token_ids=result.token_ids[:left], failure=ending["failure"])  # type: ignore[arg-type]
        return replace(result, grammar_end=left)

    return edit


class TestLogprobs:
    @pytest.mark.parametrize("depth", [0, 3, 6])
    @pytest.mark.parametrize("stop", ["string", "eos", "length"])
    def test_they_are_cut_with_the_tokens(self, depth: int, stop: str) -> None:
        """Case 11: a stop inside a run cut the text, and not the ids or their logprobs."""
        token_ids, _ = expected([7, 8], 30)
        at = next(index for index in range(10, 30) if token_ids.index(token_ids[index]) == index)
        strings: tuple[str, ...] = ()
        if stop == "string":
            at = next(i for i in range(10, 30) if decode(token_ids[: i + 1])[-2:].isalnum())
            strings = (decode(token_ids[: at + 1])[-2:],)
        engine = make_engine(
            depth=depth,
            eos_token_ids=(token_ids[at],) if stop == "eos" else (),
            draft_is_right=lambda request_id, position: True,
            wrap=lambda runner: EditedRunner(runner, with_logprobs),
        )
        max_tokens = at + 1 if stop == "length" else 30
        request = replace(make_request([7, 8], max_tokens, strings), logprobs=LogprobsParams(0))
        request_id = engine.add(request)
        outputs = run(engine)[request_id]
        ids, _ = joined(outputs)
        assert 0 < len(ids) <= at + 1
        assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
        told = [item for output in outputs for item in output.logprobs]
        assert told == [logprob_of(token, 2 + index) for index, token in enumerate(ids)]

    @pytest.mark.parametrize("budget", [8, 64])
    @pytest.mark.parametrize("num_blocks", [13, 64])
    def test_the_prompts_are_told_once_and_aligned(self, budget: int, num_blocks: int) -> None:
        """Over chunks, and after preemptions in the prompt and behind it."""
        prompt = tuple(range(100, 121))
        engine = make_engine(
            num_blocks=num_blocks,
            max_model_len=50,
            max_num_batched_tokens=budget,
            wrap=lambda runner: EditedRunner(runner, with_logprobs),
        )
        older = engine.add(make_request([5] * 9, max_tokens=40))
        first = engine.add(replace(make_request(prompt, 20), logprobs=LogprobsParams(prompt=3), n=2))
        outputs = run(engine)
        assert joined(outputs[older]) == expected([5] * 9, 40)
        whole = (None, *(logprob_of(token, position) for position, token in enumerate(prompt[1:], 1)))
        assert [output.prompt_logprobs for output in outputs[first]] == [whole] + [()] * (len(outputs[first]) - 1)
        assert all(output.prompt_logprobs == () == output.logprobs for output in outputs[first + 1])
        stats = outputs[first][-1].stats
        assert stats is not None
        assert (stats.preemptions > 0) is (num_blocks == 13)

    def test_the_prompts_of_a_completion_that_breaks_down_at_once(self) -> None:
        def edit(runner: ScriptedRunner, work: SequenceWork, result: SequenceResult) -> SequenceResult:
            return with_finish_at(0, failure="no")(runner, work, with_logprobs(runner, work, result))

        engine = make_engine(wrap=lambda runner: EditedRunner(runner, edit))
        request_id = engine.add(replace(make_request([4, 5]), logprobs=LogprobsParams(2, 2)))
        [output] = run(engine)[request_id]
        assert output.prompt_logprobs == (None, logprob_of(5, 1))
        assert (output.token_ids, output.finish) == ((), Finish(FinishReason.DEAD_END, detail="no"))


class TestTheEndOfAGrammar:
    @pytest.mark.parametrize("count", [0, 1, 2, 5, 8])
    def test_a_dead_end_says_why(self, count: int) -> None:
        engine = make_engine(wrap=lambda runner: EditedRunner(runner, with_finish_at(count, failure="nothing fits")))
        request_id = engine.add(make_request([7, 8], min_tokens=10))
        outputs = run(engine)[request_id]
        token_ids, text = joined(outputs)
        assert token_ids == expected([7, 8], count)[0]
        assert text == decode(token_ids)
        assert outputs[-1].finish == Finish(FinishReason.DEAD_END, detail="nothing fits")
        stats = outputs[-1].stats
        assert stats is not None
        assert stats.completion_tokens == count
        assert stats.accepted_tokens <= max(0, count - 1)
        assert num_free(engine) == 64

    @pytest.mark.parametrize("count", [1, 2, 5, 8])
    def test_a_grammar_that_ends_without_an_id_is_an_eos(self, count: int) -> None:
        engine = make_engine(wrap=lambda runner: EditedRunner(runner, with_finish_at(count)))
        request_id = engine.add(make_request([7, 8]))
        outputs = run(engine)[request_id]
        assert joined(outputs) == expected([7, 8], count)
        assert outputs[-1].finish == Finish(FinishReason.EOS)

    @pytest.mark.parametrize(("at", "reason"), [(4, FinishReason.STOP_TOKEN), (7, FinishReason.EOS)])
    def test_a_stop_before_the_end_comes_first(self, at: int, reason: FinishReason) -> None:
        token_ids, _ = expected([7, 8], 20)
        engine = make_engine(
            depth=6,
            draft_is_right=lambda request_id, position: True,
            wrap=lambda runner: EditedRunner(runner, with_finish_at(6)),
        )
        request_id = engine.add(make_request([7, 8], token_ids=(token_ids[at - 1],)))
        outputs = run(engine)[request_id]
        assert joined(outputs)[0] == token_ids[: min(at, 6)]
        assert outputs[-1].finish is not None
        assert outputs[-1].finish.reason is reason

    @pytest.mark.parametrize(("max_tokens", "reason"), [(4, FinishReason.MAX_TOKENS), (5, FinishReason.EOS)])
    def test_a_length_before_the_end_comes_first(self, max_tokens: int, reason: FinishReason) -> None:
        engine = make_engine(
            draft_is_right=lambda request_id, position: True,
            wrap=lambda runner: EditedRunner(runner, with_finish_at(5)),
        )
        request_id = engine.add(make_request([7, 8], max_tokens=max_tokens))
        outputs = run(engine)[request_id]
        assert joined(outputs) == expected([7, 8], max_tokens)
        assert outputs[-1].finish == Finish(reason)

    def test_one_of_several_breaks_down_alone(self) -> None:
        def edit(runner: ScriptedRunner, work: SequenceWork, result: SequenceResult) -> SequenceResult:
            breaks = runner.sequences[work.request_id].params.choice == 1
            return with_finish_at(5, failure="no")(runner, work, result) if breaks else result

        engine = make_engine(wrap=lambda runner: EditedRunner(runner, edit))
        first = engine.add(replace(make_request(range(9)), n=3))
        outputs = run(engine)
        finishes = [outputs[first + choice][-1].finish for choice in range(3)]
        assert [finish.reason for finish in finishes if finish is not None] == [
            FinishReason.MAX_TOKENS,
            FinishReason.DEAD_END,
            FinishReason.MAX_TOKENS,
        ]


class ToyGrammar:
    """Implements `Grammar` and its matcher: allows everything."""

    def matcher(self) -> Any:
        return self

    def advance(self, token_ids: Sequence[int]) -> bool:
        return True


class ToyCompiler:
    """Implements `GrammarCompiler`."""

    def __init__(self) -> None:
        self.specs: list[GrammarSpec] = []
        self.closed = threading.Event()

    def compile(self, spec: GrammarSpec) -> Grammar:
        self.specs.append(spec)
        return ToyGrammar()

    def close(self) -> None:
        self.closed.set()


class TestConstraints:
    SPEC = GrammarSpec(GrammarKind.REGEX, "a+")

    def params_of(self, engine: Engine, request: GenerationRequest) -> list[Constraints]:
        first = engine.add(request)
        return [engine.scheduler.requests[first + choice].params.constraints for choice in range(request.n)]

    def test_without_any(self) -> None:
        assert self.params_of(make_engine(eos_token_ids=(9,)), make_request(token_ids=(5,))) == [Constraints()]

    @pytest.mark.parametrize(("ignore_eos", "stops"), [(False, (5, 9, 8)), (True, (5, 9))])
    def test_min_tokens_keep_every_stop_away(self, ignore_eos: bool, stops: tuple[int, ...]) -> None:
        engine = make_engine(eos_token_ids=(9, 8))
        request = make_request(token_ids=(5, 9), min_tokens=4, ignore_eos=ignore_eos)
        assert self.params_of(engine, request) == [Constraints(min_tokens=4, stop_token_ids=stops)]

    def test_bad_words_are_spelt_with_and_without_a_space(self) -> None:
        request = replace(make_request(), sampling=SamplingParams(bad_words=("ab", " ab", "é")))
        [constraints] = self.params_of(make_engine(), request)
        words = ("ab", " ab", "é", " é")
        assert constraints.bad_words == tuple(tuple(word.encode()) for word in words)

    def test_bad_words_of_white_space_forbid_no_other_blank(self) -> None:
        request = replace(make_request(), sampling=SamplingParams(bad_words=("\n", "  ")))
        [constraints] = self.params_of(make_engine(), request)
        assert constraints.bad_words == ((ord("\n"),), (ord(" "), ord(" ")))

    def test_a_grammar_is_compiled_once_for_all_completions(self) -> None:
        engine = make_engine()
        engine.grammars = compiler = ToyCompiler()
        made = self.params_of(engine, replace(make_request(), grammar=self.SPEC, n=3))
        assert compiler.specs == [self.SPEC]
        assert len({id(constraints.grammar) for constraints in made}) == 1
        assert len(run(engine)) == 3

    @pytest.mark.parametrize(
        ("eos", "ignore_eos", "ends"), [((9,), False, False), ((9,), True, True), ((), False, True)]
    )
    def test_a_grammar_ends_a_completion_where_no_id_can(
        self, eos: tuple[int, ...], ignore_eos: bool, ends: bool
    ) -> None:
        engine = make_engine(eos_token_ids=eos)
        engine.grammars = ToyCompiler()
        [constraints] = self.params_of(engine, replace(make_request(ignore_eos=ignore_eos), grammar=self.SPEC))
        assert constraints.ends_with_grammar is ends

    def test_where_no_grammars_are_served(self) -> None:
        with pytest.raises(FailedPrecondition, match=r"structured\.regex"):
            make_engine().add(replace(make_request(), grammar=self.SPEC))


@pytest.mark.parametrize("depth", [0, 3, 6])
@pytest.mark.parametrize("min_tokens", range(4, 12, 3))
def test_min_tokens_hold_off_stop_strings_and_ids_by_tokens(depth: int, min_tokens: int) -> None:
    """Case 12, with text: the first match that ends behind so many tokens ends the completion."""
    token_ids, _ = expected([7, 8], 30)
    string = next(c for c in decode(token_ids[:3]) if c.isalnum())
    engine = make_engine(depth=depth, draft_is_right=lambda request_id, position: True)
    request = make_request([7, 8], 30, (string,), token_ids=(token_ids[1],), min_tokens=min_tokens)
    request_id = engine.add(request)
    outputs = run(engine)[request_id]
    kept, text = joined(outputs)
    behind = [
        i for i in range(min_tokens, 30) if string in decode(token_ids[i : i + 1]) or token_ids[i] == token_ids[1]
    ]
    assert len(kept) == min([*behind, 29]) + 1
    assert text.startswith(decode(token_ids[:min_tokens])[:-1])
    assert string in text


def test_chat_messages_are_rendered_by_the_template() -> None:
    engine = make_engine()
    request = make_request(max_tokens=5)
    chat = replace(request, prompt=(ChatMessage("user", "hi"),))
    request_id = engine.add(chat)
    assert joined(run(engine)[request_id]) == expected(list(b"<user>hi<assistant>"), 5)


def test_totals_add_up_on_a_virtual_clock() -> None:
    clock = VirtualClock()
    cost = StepCost(overhead=0.5, target_pass=4.0, free_rows=64, draft_pass=1.0)
    runner = SimulatedRunner(64, 4, clock, cost)
    scheduler = Scheduler(SchedulerConfig(64, 4, method=Method.DRAFT_MODEL), SpeculationControl(FixedDepth(2)))
    engine = Engine(scheduler, runner, ToyTokenizer(), "toy", methods=[Method.DRAFT_MODEL], clock=clock)
    request_id = engine.add(make_request(max_tokens=12))
    outputs = run(engine)[request_id]
    totals = engine.totals
    assert totals.tokens == 12
    assert totals.steps == len(outputs)
    assert totals.verify == pytest.approx(4.0 * totals.steps)
    assert totals.python == pytest.approx(0.5 * totals.steps)
    assert totals.draft + totals.verify + totals.sample + totals.python == pytest.approx(clock())
    assert outputs[-1].stats is not None
    assert outputs[-1].stats.total_seconds == pytest.approx(clock())


def test_a_failed_step_leaves_a_dead_engine() -> None:
    engine = make_engine(wrap=lambda runner: FailingRunner(runner, at_step=1))
    engine.add(make_request())
    engine.step()
    with pytest.raises(RuntimeError):
        engine.step()
    with pytest.raises(EngineDead):
        engine.add(make_request())


def test_defaults_of_the_model_are_kept_for_callers() -> None:
    engine = make_engine()
    settings: dict[str, Any] = {"default_sampling": SamplingParams(0.5, 7, 0.9)}
    assert Engine(engine.scheduler, engine.runner, ToyTokenizer(), "m", **settings).default_sampling.top_k == 7
    assert engine.default_sampling == SamplingParams()
