"""vLLM on the CPU, offline."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from protocol import Load, serve

# Defaults, so that the harness's caller may try others.
for name, value in {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # vLLM would leave one CPU idle
    "VLLM_NO_USAGE_STATS": "1",
    # Recommended by vLLM's manual; for the processes it starts.
    "LD_PRELOAD": ":".join(str(library) for library in sorted((Path(sys.prefix) / "preload").glob("*.so*"))),
}.items():
    os.environ.setdefault(name, value)

import vllm  # noqa: E402


class VLLM:
    def __init__(self) -> None:
        self._load: Load | None = None
        self._llm: vllm.LLM | None = None

    def load(self, load: Load) -> str:
        if load != self._load:  # requests cannot choose their depth
            if self._llm is not None:
                self._llm.llm_engine.engine_core.shutdown()
            self._llm = vllm.LLM(
                load.target,
                dtype="bfloat16",
                max_model_len=load.length,
                max_num_seqs=load.streams,
                enable_prefix_caching=False,
                speculative_config=_speculative_config(load),
            )
            self._load = load
        return f"vLLM {vllm.__version__}"

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def _speculative_config(load: Load) -> dict[str, object] | None:
    if load.depth == 0:
        return None
    return {"method": "draft_model", "model": load.draft, "num_speculative_tokens": load.depth}


if __name__ == "__main__":
    serve(VLLM())
