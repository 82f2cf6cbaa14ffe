"""The synchronous engine: what goes in, what comes out, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.toy import VOCAB_SIZE, FailingRunner, ToyTokenizer, decode, expected, make_engine, make_request, num_free
from paceline.core.config import SchedulerConfig
from paceline.core.depth import FixedDepth
from paceline.core.params import Method, SamplingParams, SpeculationParams
from paceline.core.plan import FinishReason
from paceline.core.scheduler import Scheduler
from paceline.engine import ChatMessage, Engine, GenerationRequest, Output
from paceline.errors import EngineDead, FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from paceline.sim import SimulatedRunner, StepCost, VirtualClock


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
            (make_request([1] * 200), "prompt"),
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
        with pytest.raises(FailedPrecondition, match=r"speculation\.mode = draft_model.*ngram, none"):
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
        assert engine.has_room
        engine.add(make_request())
        assert not engine.has_room
        with pytest.raises(Unavailable):
            engine.add(make_request())
        assert len(run(engine)) == 2


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
    scheduler = Scheduler(SchedulerConfig(64, 4, method=Method.DRAFT_MODEL), FixedDepth(2))
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
