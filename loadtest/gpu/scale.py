"""How large everything is that `bench.py` measures: on a GPU, or for a look on any machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is.

    Attributes:
        is_widened: the pair is; else it is the embedded one itself.
        memory: share of the GPU's that the engine takes. The rest is for the peer.
        kv_bytes: of the engine's KV; None for what there is room for.
        max_num_batched_tokens: of a step of the engine.
        seconds: that each part of a section takes, about; 0 measures twice.
        copied: bytes that a copy reads, which is the ceiling of bandwidth.
        matmul: rows and columns of the matrices that are multiplied, which is the ceiling of operations.
        batches: (streams, tokens of context) of decodes; the host's time is measured with the same streams.
        steps: of such a batch, in each round.
        prefill: tokens of the prompt.
        draft_depths: between which draft passes are counted.
        depths: of speculation, comma-separated; auto and 0 are among them.
        concurrencies: streams of speculation.
        prompts: of speculation in each round and by each setting, at least.
        company: streams, one of which asks for more than the others.
        peer_streams: beside transformers.
        max_tokens: of each stream of `draft`, `speculation`, `company` and `peer`.
    """

    is_widened: bool
    memory: float
    kv_bytes: int | None
    max_num_batched_tokens: int
    seconds: float
    copied: int
    matmul: int
    batches: tuple[tuple[int, int], ...]
    steps: int
    prefill: int
    draft_depths: tuple[int, int]
    depths: str
    concurrencies: tuple[int, ...]
    prompts: int
    company: int
    peer_streams: int
    max_tokens: int


WHOLE = Scale(
    is_widened=True,
    memory=0.6,
    kv_bytes=None,
    max_num_batched_tokens=4096,  # at the deepest, the largest batch verifies more rows than by default
    seconds=10.0,
    copied=4 << 30,
    matmul=8192,
    batches=((1, 128), (64, 2048)),
    steps=128,
    prefill=2048,
    draft_depths=(2, 8),
    depths="auto,0,1,2,3,5,8",
    concurrencies=(1, 8, 64, 256),
    prompts=4,
    company=64,
    peer_streams=16,
    max_tokens=128,
)
SMALL = Scale(
    is_widened=False,
    memory=0.6,
    kv_bytes=1 << 28,
    max_num_batched_tokens=2048,
    seconds=0.0,
    copied=64 << 20,
    matmul=512,
    batches=((1, 64), (4, 128)),
    steps=16,
    prefill=256,
    draft_depths=(1, 4),
    depths="auto,0,2,4",
    concurrencies=(1, 4),
    prompts=2,
    company=4,
    peer_streams=4,
    max_tokens=24,
)
