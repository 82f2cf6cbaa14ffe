"""Where plans meet tensors: input batches, KV cache, sampling and verification."""

from paceline.runner.drafter import Draft, Drafter
from paceline.runner.kv_cache import KVCache
from paceline.runner.model_runner import ModelRunner

__all__ = ["Draft", "Drafter", "KVCache", "ModelRunner"]
