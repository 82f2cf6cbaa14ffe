"""transformers: a left-padded batch; with a draft model, assisted generation of one stream."""

from __future__ import annotations

import torch
import transformers
from protocol import THREADS, Load, serve
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel


class Transformers:
    def __init__(self) -> None:
        self._depth: int | None = 0
        self._paths: tuple[str, str] | None = None
        self._target: PreTrainedModel | None = None
        self._draft: PreTrainedModel | None = None
        torch.set_num_threads(THREADS)

    def load(self, load: Load) -> str:
        if self._paths != (load.target, load.draft):
            self._paths = (load.target, load.draft)
            self._target, self._draft = (
                AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in self._paths
            )
        self._depth = load.depth
        if load.depth:
            self._draft.generation_config.num_assistant_tokens = load.depth
            self._draft.generation_config.num_assistant_tokens_schedule = "constant"
            self._draft.generation_config.assistant_confidence_threshold = 0.0
        return f"transformers {transformers.__version__}, torch {torch.__version__}"

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        mask = torch.arange(width) >= width - lengths[:, None]
        self._target.generation_config.eos_token_id = None
        output = self._target.generate(
            padded,
            attention_mask=mask.long(),
            generation_config=GenerationConfig(max_new_tokens=max_tokens, do_sample=False, pad_token_id=0),
            assistant_model=None if self._depth == 0 else self._draft,
        )
        return output[:, width:].tolist()


if __name__ == "__main__":
    serve(Transformers())
