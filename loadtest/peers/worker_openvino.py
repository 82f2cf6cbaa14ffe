"""OpenVINO GenAI: continuous batching on a model that optimum-intel converted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from protocol import THREADS, Load, converted, serve

PROPERTIES = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": THREADS}


class OpenVINO:
    def __init__(self) -> None:
        self._load: Load | None = None
        self._pipeline: openvino_genai.ContinuousBatchingPipeline | None = None

    def load(self, load: Load) -> str:
        # Depth belongs to the request, but a pipeline with a draft model always drafts.
        if self._load is None or (self._load.depth == 0) != (load.depth == 0):
            self._pipeline = None
            self._pipeline = _pipeline(load)
        self._load = load
        return f"OpenVINO GenAI {openvino_genai.__version__}"

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True)
        if self._load.depth:
            config.num_assistant_tokens = self._load.depth
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [config] * len(inputs))
        return [list(result.m_generation_ids[0]) for result in results]


def _pipeline(load: Load) -> openvino_genai.ContinuousBatchingPipeline:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = load.streams
    scheduler.max_num_batched_tokens = 2048
    scheduler.cache_size = 2  # GB; the default grows it while serving
    scheduler.enable_prefix_caching = False
    properties = dict(PROPERTIES)
    if load.depth != 0:
        properties["draft_model"] = openvino_genai.draft_model(converted(load.draft, _convert), "CPU", **PROPERTIES)
    return openvino_genai.ContinuousBatchingPipeline(converted(load.target, _convert), scheduler, "CPU", properties)


def _convert(source: Path, destination: Path) -> None:
    command = [Path(sys.prefix) / "bin" / "optimum-cli", "export", "openvino", "--model", source]
    command += ["--task", "text-generation-with-past", "--weight-format", "fp16", destination]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    serve(OpenVINO())
