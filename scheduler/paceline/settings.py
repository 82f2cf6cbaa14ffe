"""What an operator chooses of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, get_type_hints

from paceline.core.config import PrefixScope
from paceline.core.tenant_policy import ONE_SHARE, TenantPolicy
from paceline.errors import InvalidArgument
from paceline.headers import check_name
from paceline.options import check_types

BACKENDS: Final = ("auto", "native", "torch", "triton")
QUANTIZATIONS: Final = ("none", "int8")
MOST_THREADS: Final = 1024  # where the system cannot start as many as are asked for, the process crashes
DRAFT_QUANTIZATIONS: Final = ("auto", *QUANTIZATIONS)
DTYPE_NAMES: Final = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class EngineSettings:
    """What an operator chooses; None lets the model or the machine decide.

    Attributes:
        model: a Hugging Face directory, or "demo" for the embedded target.
        draft: a directory, "demo" for the embedded draft, "ngram" or "none".
        dtype: "auto", "float32" or "bfloat16".
        device: "auto", "cpu" or "cuda"; auto is a GPU where torch finds one.
        gpu_memory_utilization: share of a GPU's memory that weights, steps and KV may take together.
        kv_cache_memory: bytes for target and draft KV together; None takes what is left of the share above, on a CPU
            a quarter of what weights leave free.
        take_memory: all of it from the system at start, for which no step has to wait then.
        depth: "auto", "off", or a number of drafts for every request.
        min_depth: lowest depth of a request that does not ask for less.
        max_depth: highest depth of any request; None takes MAX_DEPTH, or `depth` if that is higher. 0 is off.
        tenants: what is granted to whom, by name.
        default_tenant: what everybody else is granted; None refuses them.
        backend: "auto", "native" (compiled here, CPUs only), "triton" (GPUs only) or "torch"; auto is native on a CPU
            and triton on a GPU, where that can be.
        quantization: of the target's weights, "none" or "int8".
        draft_quantization: of the draft's, "auto", "none" or "int8"; auto is int8 for a bfloat16 draft on the native
            backend, whose passes take two thirds of the time so. Neither greedy and seeded output depends on it nor the
            distribution of any other.
        threads: that compute; None takes torch's number.
        reproducible: greedy and seeded output is the same, to the bit, whatever the batch, the chunks and the depth;
            refuse to start where that cannot be had. The native backend always works so.
        max_logprobs: alternatives that a request may ask for at each token.
        prefix_cache: whose KV is kept and found again: "tenant" (of the same tenant), "shared" (of everybody) or "off".
        watermark, long_prefill_threshold, max_step_seconds, max_slowdown, max_queued: as in `SchedulerConfig`.
        served_model_name: what clients call the model; None takes the name of its directory, or ORG/NAME of one in the
            hub's cache.
    """

    model: str | Path = "demo"
    draft: str | Path = "none"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    device: str = "auto"
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None
    take_memory: bool = False
    block_size: int = 16
    seed: int = 0
    depth: str | int = "auto"
    min_depth: int = 0
    max_depth: int | None = None
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict, hash=False)
    default_tenant: TenantPolicy | None = ONE_SHARE
    backend: str = "auto"
    quantization: str = "none"
    draft_quantization: str = "auto"
    threads: int | None = None
    reproducible: bool = False
    max_logprobs: int = 20
    prefix_cache: str = PrefixScope.TENANT
    watermark: float = 0.01
    long_prefill_threshold: int | None = None
    max_step_seconds: float | None = None
    max_slowdown: float = 1.1
    max_queued: int = 4096
    served_model_name: str | None = None

    def check(self) -> None:
        """Raise InvalidArgument for a value that no machine and no model allows."""
        check_types(vars(self), get_type_hints(type(self)))
        if self.seed < 0:
            raise InvalidArgument("seed", self.seed, "an integer >= 0")
        if self.max_logprobs < 0:
            raise InvalidArgument("max_logprobs", self.max_logprobs, "an integer >= 0")
        if self.prefix_cache not in list(PrefixScope):
            raise InvalidArgument("prefix_cache", self.prefix_cache, ", ".join(PrefixScope))
        if self.dtype not in DTYPE_NAMES:
            raise InvalidArgument("dtype", self.dtype, "auto, float32 or bfloat16")
        if self.served_model_name is not None:
            check_name("served_model_name", self.served_model_name)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidArgument("gpu_memory_utilization", self.gpu_memory_utilization, "above 0 and at most 1")
        if self.block_size < 1:
            raise InvalidArgument("block_size", self.block_size, "an integer >= 1")
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise InvalidArgument("threads", self.threads, f"an integer in 1..{MOST_THREADS}")
        if self.backend not in BACKENDS:
            raise InvalidArgument("backend", self.backend, ", ".join(BACKENDS))
        if self.quantization not in QUANTIZATIONS:
            raise InvalidArgument("quantization", self.quantization, " or ".join(QUANTIZATIONS))
        if self.draft_quantization not in DRAFT_QUANTIZATIONS:
            raise InvalidArgument("draft_quantization", self.draft_quantization, ", ".join(DRAFT_QUANTIZATIONS))
