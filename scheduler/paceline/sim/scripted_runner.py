"""A step runner whose model is a formula and whose KV cache remembers which token lies where.

It executes plans by the runner's contract and checks every read: at each step, all slots that a row would attend to
must hold exactly the sequence's own tokens, in the target's cache and in the draft's. A block given away too early, a
slot not reserved, draft KV that fell behind: each ends in an AssertionError that names the request and the position.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from paceline.core.method import Method
from paceline.core.plan import SequenceResult, SequenceWork, StepPlan, StepResult, StepTimes
from paceline.core.sequence import Sequence

VOCAB_SIZE = 997
EMPTY = -1


def next_token(token_ids: Seq[int]) -> int:
    """The scripted model's greedy choice: any function of the whole prefix would do, this one is cheap."""
    return (token_ids[-1] * 31 + len(token_ids) * 17 + 7) % VOCAB_SIZE


def reference_output(prompt: Seq[int], num_tokens: int) -> list[int]:
    """What the scripted model emits after a prompt, one token at a time."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class ScriptedRunner:
    """Implements `StepRunner`.

    Args:
        num_blocks, block_size: as the scheduler has them.
        draft_is_right: (request id, position) -> does the draft at this position match the model?
        max_ngram: most drafts that the n-gram method ever proposes.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        draft_is_right: Callable[[int, int], bool] = lambda request_id, position: True,
        max_ngram: int = 1 << 30,
    ) -> None:
        self.block_size = block_size
        self.draft_is_right = draft_is_right
        self.max_ngram = max_ngram
        self.sequences: dict[int, Sequence] = {}
        self.target_kv = [EMPTY] * (num_blocks * block_size)
        self.draft_kv = [EMPTY] * (num_blocks * block_size)

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            self.sequences.pop(request_id, None)
        for admission in plan.admitted:
            assert admission.request_id not in self.sequences, f"request {admission.request_id} is admitted twice"
            self.sequences[admission.request_id] = Sequence(admission)
        drafts = []
        for work in plan.work:
            sequence = self.sequences[work.request_id]
            sequence.extend(work)
            drafts.append(self._draft(sequence, work))
        # As in a real forward, the rows of all sequences are written before any of them reads.
        for work, draft in zip(plan.work, drafts, strict=True):
            sequence = self.sequences[work.request_id]
            self._write(self.target_kv, sequence, sequence.num_computed, sequence.rows(work) + draft)
        results = tuple(self._verify(work, draft) for work, draft in zip(plan.work, drafts, strict=True))
        return StepResult(plan.step_id, results, self.times(plan))

    def times(self, plan: StepPlan) -> StepTimes:
        return StepTimes()

    def _draft(self, sequence: Sequence, work: SequenceWork) -> list[int]:
        if work.method is Method.NONE:
            assert work.num_drafts == 0 == work.draft_catch_up, work
            return []
        if work.method is Method.DRAFT_MODEL and work.draft_catch_up:
            gap = sequence.draft_gap(work)
            self._write(self.draft_kv, sequence, sequence.num_draft_computed, gap)
            sequence.num_draft_computed += len(gap)
        depth = min(work.num_drafts, self.max_ngram) if work.method is Method.NGRAM else work.num_drafts
        drafts: list[int] = []
        for _ in range(depth):
            prefix = sequence.token_ids + drafts
            if work.method is Method.DRAFT_MODEL:
                if drafts:
                    self._write(self.draft_kv, sequence, len(prefix) - 1, drafts[-1:])
                    sequence.num_draft_computed = len(prefix)
                assert sequence.num_draft_computed == len(prefix), f"request {sequence.request_id}: draft KV is behind"
                self._check(self.draft_kv, "draft", sequence, prefix)
            right = next_token(prefix)
            drafts.append(right if self.draft_is_right(sequence.request_id, len(prefix)) else (right + 1) % VOCAB_SIZE)
        return drafts

    def _verify(self, work: SequenceWork, drafts: list[int]) -> SequenceResult:
        sequence = self.sequences[work.request_id]
        self._check(
            self.target_kv, "target", sequence, sequence.token_ids[: sequence.num_computed + work.num_tokens] + drafts
        )
        emitted: list[int] = []
        if work.samples:
            emitted.append(next_token(sequence.token_ids))
            for draft in drafts:
                if draft != emitted[-1]:
                    break
                emitted.append(next_token(sequence.token_ids + emitted))
        accepted = max(0, len(emitted) - 1)
        reached = (1.0,) * accepted + ((0.0,) if accepted < len(drafts) else ())
        free = work.scores_ngram and not (drafts and work.method is Method.NGRAM)
        scored = (float(self.draft_is_right(sequence.request_id, len(sequence))),) if free else ()
        sequence.commit(work, emitted, accepted)
        return SequenceResult(
            work.request_id,
            tuple(emitted),
            len(drafts),
            accepted,
            reached,
            sequence.num_draft_computed,
            scored=scored,
            match=int(work.scores_ngram),
        )

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, kv: list[int], sequence: Sequence, start: int, token_ids: list[int]) -> None:
        end = start + len(token_ids)
        room = len(sequence.block_ids) * self.block_size
        assert end <= room, f"request {sequence.request_id}: position {end - 1} has no slot ({room} allocated)"
        for position, token in enumerate(token_ids, start):
            kv[self._slot(sequence, position)] = token

    def _check(self, kv: list[int], name: str, sequence: Sequence, token_ids: list[int]) -> None:
        for position, token in enumerate(token_ids):
            found = kv[self._slot(sequence, position)]
            assert found == token, (
                f"request {sequence.request_id}: {name} KV at {position} is {found}, expected {token}"
            )
