"""Where plans meet tensors: input batches, KV cache, sampling and verification."""

from paceline.compiled import path_of

__path__ = path_of("runner", __path__)

from paceline.runner.drafter import Draft, Drafter
from paceline.runner.kv_cache import KVCache
from paceline.runner.model_runner import ModelRunner

__all__ = ["Draft", "Drafter", "KVCache", "ModelRunner"]
