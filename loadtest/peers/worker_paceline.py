"""Paceline, in process."""

from __future__ import annotations

from dataclasses import replace

from protocol import Load, serve

import paceline
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams, StopParams
from paceline.engine import Engine, GenerationRequest
from paceline.wiring import EngineSettings, build_engine


class Paceline:
    def __init__(self) -> None:
        self._load: Load | None = None
        self._engine: Engine | None = None
        self._speculation = SpeculationParams()

    def load(self, load: Load) -> str:
        # Depth belongs to the request; all else to the engine.
        if self._load is None or replace(self._load, depth=load.depth) != load:
            # The draft's weights are those that the other engines have.
            self._engine = build_engine(
                EngineSettings(
                    model=load.target,
                    draft=load.draft,
                    draft_quantization="none",
                    max_num_seqs=load.streams,
                    prefix_cache="off",
                )
            )
        self._load = load
        if load.depth is None:
            self._speculation = SpeculationParams()
        elif load.depth == 0:
            self._speculation = SpeculationParams(method=Method.NONE)
        else:
            self._speculation = SpeculationParams(min_depth=load.depth, max_depth=load.depth)
        return f"Paceline {paceline.__version__}"

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        assert self._engine is not None, "load comes first"
        sampling = SamplingParams(temperature=0.0)
        stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
        token_ids: dict[int, list[int]] = {}
        for prompt in prompts:
            request = GenerationRequest(tuple(prompt), sampling, stop, self._speculation)
            token_ids[self._engine.add(request)] = []
        while self._engine.has_work:
            for output in self._engine.step():
                token_ids[output.request_id] += output.token_ids
        return list(token_ids.values())


if __name__ == "__main__":
    serve(Paceline())
