"""The decoder in C++: packed weights, and all layers of a forward in one call.

Results of a row do not depend, to the last bit, on what else is in the batch, on how a sequence is cut into runs, on
the pages it lies in or on the number of threads (the problem and the remedy: He et al., "Defeating Nondeterminism in
LLM Inference", 2025). They belong to the machine: another CPU may give other bits.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline_kernels.batch import PagedBatch
from paceline_kernels.cpu.build import load, obstacle
from paceline_kernels.cpu.memory import LargePages, largest_cache, zeros

LANES = 16  # positions of a block that lie side by side: blocks are padded to as many
TILE = 32  # outputs of one tile of packed weights

_MOST_STRUCTS = 16  # that are kept for tensors that come again
_MOST_SCORES = 1 << 24  # logits whose memory is kept for the next call

_POINTER, _INT, _BOOL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("data", _POINTER),
        ("scales", _POINTER),
        ("bias", _POINTER),
        ("outputs", _INT),
        ("inputs", _INT),
        ("streamed", _INT),
    ]


_LAYER_MATRICES = ("qkv", "output", "gate_up", "down")  # in the order of a pass


class _Layer(ctypes.Structure):
    _fields_ = [
        *[(name, _POINTER) for name in ("input_norm", "post_norm", "q_norm", "k_norm")],
        *[(name, _Matrix) for name in _LAYER_MATRICES],
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *[
            (name, _INT)
            for name in ("hidden", "intermediate", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab")
        ],
        ("eps", ctypes.c_float),
        ("layers", ctypes.POINTER(_Layer)),
        *[(name, _POINTER) for name in ("norm", "cos", "sin", "embedding")],
        ("head", _Matrix),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *[(name, _INT) for name in ("num_seqs", "max_blocks", "block_size")],
        *[(name, _POINTER) for name in ("token_ids", "query_starts", "context_lens", "block_tables", "kv")],
        ("kv_elements", _INT),
        ("num_threads", _INT),
    ]


_CHOICES = {
    "kinds": torch.int32,
    "temperatures": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "typical_p": torch.float32,
    "keys": torch.int64,
    "uniforms": torch.float64,
    "first_rows": torch.int64,
    "probs": torch.float32,
}


class _Choices(ctypes.Structure):
    _fields_ = [(name, _POINTER) for name in _CHOICES]


_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "packed_bytes": ([ctypes.c_int, _INT, _INT], _INT),
    "pack": ([ctypes.c_int, _BOOL, *[_POINTER] * 3, *[_INT] * 4], None),
    "new": ([_BOOL, ctypes.POINTER(_Model)], _POINTER),
    "delete": ([_BOOL, _POINTER], None),
    "forward": ([_BOOL, _POINTER, ctypes.POINTER(_Batch), _POINTER], None),
    "logits": ([_BOOL, _POINTER, _POINTER, _INT, _INT, _POINTER], None),
    "logits_of": ([_BOOL, _POINTER, ctypes.POINTER(_Batch), _POINTER, _INT, _POINTER], None),
    "draft": ([_BOOL, _POINTER, ctypes.POINTER(_Batch), _POINTER, _INT, ctypes.POINTER(_Choices), _POINTER], None),
    "linear": ([_BOOL, _POINTER, ctypes.POINTER(_Matrix), _INT, _INT, _POINTER], None),
    "store_kv": ([_BOOL, *[_POINTER] * 2, ctypes.POINTER(_Batch), _INT, _INT], None),
    "paged_attention": ([_BOOL, _POINTER, ctypes.POINTER(_Batch), _INT, _INT, _INT, ctypes.c_float, _POINTER], None),
}


@functools.cache
def _library() -> ctypes.CDLL:
    library = load("decoder")
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, f"paceline_{name}")
        function.argtypes = arguments
        function.restype = result
    return library


def available() -> str | None:
    """None if this machine can compile the library, else why not; the first call compiles, which takes a while."""
    return obstacle(_library)


def identity() -> str:
    """A name of the library, another one for other sources, flags and CPUs. Raises BuildError if there is none."""
    return Path(_library()._name).stem


class Kind(enum.IntEnum):
    """How packed weights are stored."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2  # with a scale for each output; multiplied by activations of 8 bits


class Matrix:
    """Packed weights [outputs, inputs] and a bias [outputs], filled by rows of a checkpoint.

    Args:
        pages: where it lies, beside the matrices that are read before and after it; by default apart.
        interleaved: two matrices of `outputs` outputs each, that take turns tile by tile: gate and up.

    Attributes:
        streamed: whether it will be gone from every cache before it is read again. A few rows then read past the
            caches, so that other things may stay, or, on CPUs of Intel, ask for what comes. Products are the same.
    """

    def __init__(
        self,
        kind: Kind,
        outputs: int,
        inputs: int,
        pages: LargePages | None = None,
        *,
        bias: bool = False,
        interleaved: bool = False,
    ) -> None:
        self.kind = kind
        self.inputs = inputs
        self._parts = 2 if interleaved else 1
        self._tiled = -(-outputs // TILE) * TILE if interleaved else outputs
        self.outputs = self._tiled * self._parts
        padded = -(-self.outputs // TILE) * TILE
        size = _library().paceline_packed_bytes(kind, self.outputs, inputs)
        self._data = zeros((size,), torch.uint8) if pages is None else pages.zeros(size)
        self._scales = torch.zeros(padded) if kind is Kind.INT8 else None
        self._bias = torch.zeros(padded) if bias else None
        self.streamed = False

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return self._data.numel()

    def fill(self, rows: Tensor, first: int = 0, part: int = 0) -> None:
        """Pack rows [n, inputs] as outputs `first` to `first + n`; part 1 is the second of two interleaved."""
        own = {Kind.FLOAT32: torch.float32, Kind.BFLOAT16: torch.bfloat16}.get(self.kind)
        if own is None:  # 8 bits are made of either
            own = torch.bfloat16 if rows.dtype == torch.bfloat16 else torch.float32
        rows = rows.to(own).contiguous()
        tile_bytes = self._data.numel() // (-(-self.outputs // TILE))
        scales = None if self._scales is None else self._scales[part * TILE :].data_ptr()
        _library().paceline_pack(
            self.kind,
            rows.dtype == torch.bfloat16,
            self._data.data_ptr() + part * tile_bytes,
            scales,
            rows.data_ptr(),
            *rows.shape,
            first,
            self._parts,
        )

    def fill_bias(self, values: Tensor, first: int = 0, part: int = 0) -> None:
        """The bias of outputs `first` to `first + len(values)`."""
        assert self._bias is not None
        outputs = torch.arange(first, first + len(values))
        self._bias[outputs // TILE * TILE * self._parts + part * TILE + outputs % TILE] = values.float()

    @property
    def has_bias(self) -> bool:
        return self._bias is not None

    @property
    def struct(self) -> _Matrix:
        """Valid while this object lives."""
        return _Matrix(
            self._data.data_ptr(),
            _pointer(self._scales, torch.float32),
            _pointer(self._bias, torch.float32),
            self.outputs,
            self.inputs,
            self.streamed,
        )


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer. Norms are float32."""

    input_norm: Tensor  # [hidden]
    post_norm: Tensor  # [hidden]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    qkv: Matrix  # outputs: heads of q, then of k, then of v
    output: Matrix
    gate_up: Matrix  # interleaved
    down: Matrix


@dataclass(frozen=True, slots=True)
class Weights:
    """Everything that a decoder multiplies and looks up. Vectors are float32.

    Attributes:
        cos, sin: [max_positions, head_dim / 2].
        embedding: [vocab, hidden] of the decoder's dtype; None if the head serves as one.
    """

    layers: list[Layer]
    norm: Tensor  # [hidden]
    cos: Tensor
    sin: Tensor
    embedding: Tensor | None
    head: Matrix

    @property
    def matrices(self) -> list[Matrix]:
        """All that a pass multiplies by, in its order."""
        return [*(getattr(layer, name) for layer in self.layers for name in _LAYER_MATRICES), self.head]


class Choice(enum.IntEnum):
    """How a draft is chosen from its logits."""

    MOST_PROBABLE = 0
    BY_KEY = 1  # cut, then `gumbel_argmax`
    DRAWN = 2  # from what `distribution_` makes of them


@dataclass(frozen=True, slots=True)
class Choices:
    """How each sequence's drafts are chosen; [num_seqs] unless said otherwise, in the sense of `sampling`. Only `kinds`
    is read of those whose choice is MOST_PROBABLE.
    """

    kinds: Tensor  # int32, of Choice
    temperatures: Tensor  # float32
    top_k: Tensor  # int64
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    typical_p: Tensor  # float32
    keys: Tensor  # [num_seqs, 4] int64: of the first draft; the position grows by one with each
    uniforms: Tensor  # [num_seqs, largest depth] float64: what draws go by
    first_rows: Tensor  # int64: where a sequence's rows of probs begin
    probs: Tensor  # [rows, vocab] float32: what its drafts are drawn from

    @property
    def struct(self) -> _Choices:
        """Valid while this object lives."""
        return _Choices(*(_pointer(getattr(self, name), dtype) for name, dtype in _CHOICES.items()))


_MOST_PROBABLE = _Choices()


class Decoder:
    """Runs a decoder of dtype float32 or bfloat16. One call at a time, from any thread. Sets whether its weights'
    matrices are streamed. Keeps the pages and some tensors of the last calls.

    KV pages are [num_layers, 2, num_blocks, elements of a block] of the decoder's dtype, where a block has its size
    padded to LANES; what lies where inside is ours alone.
    """

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        *,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        intermediate: int,
        eps: float,
    ) -> None:
        # A draft model stays in the cache, as does what Python needs, if the weights of a large target pass it by.
        # Where the cache is shared with neighbours, less stays than its size says.
        streamed = 0 < largest_cache() < sum(matrix.nbytes for matrix in weights.matrices)
        for matrix in weights.matrices:
            matrix.streamed = streamed
        layers = (_Layer * len(weights.layers))()
        for struct, layer in zip(layers, weights.layers, strict=True):
            for name in ("input_norm", "post_norm", "q_norm", "k_norm"):
                setattr(struct, name, _pointer(getattr(layer, name), torch.float32))
            for name in _LAYER_MATRICES:
                setattr(struct, name, getattr(layer, name).struct)
        self.hidden, self.vocab = len(weights.norm), weights.head.outputs
        self.dtype = dtype
        self._kept = (weights, layers)  # C++ has only pointers
        model = _Model(
            self.hidden,
            intermediate,
            len(layers),
            num_heads,
            num_kv_heads,
            head_dim,
            self.vocab,
            eps,
            layers,
            *(_pointer(tensor, torch.float32) for tensor in (weights.norm, weights.cos, weights.sin)),
            _pointer(weights.embedding, dtype),
            weights.head.struct,
        )
        self._scores = torch.empty(0, self.vocab)
        self._structs: dict[int, tuple[tuple[Tensor, ...], _Batch]] = {}  # by the id of the token ids
        self._kv_cache: Sequence[tuple[Tensor, Tensor]] = ()  # theirs
        self._library = _library()
        self._bf16 = dtype == torch.bfloat16
        self._handle = self._library.paceline_new(self._bf16, model)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._library.paceline_delete(self._bf16, self._handle)

    def forward(self, token_ids: Tensor, batch: PagedBatch, kv_cache: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """All layers over the rows of a batch -> hidden states after the final norm, [num_tokens, hidden].

        Args:
            token_ids: [num_tokens] int64.
            kv_cache: keys and values of each layer, one behind the other in memory, [num_blocks, padded block, heads,
                head_dim]. Mutated.
        """
        hidden = torch.empty(len(token_ids), self.hidden, dtype=self.dtype)
        self._library.paceline_forward(
            self._bf16, self._handle, self._batch(token_ids, batch, kv_cache), hidden.data_ptr()
        )
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, hidden] -> [rows, vocab] float32; in `out`, if that is given."""
        assert hidden.dtype == self.dtype, f"{hidden.dtype} for a decoder of {self.dtype}"
        hidden = hidden.contiguous()
        if out is None:
            out = torch.empty(len(hidden), self.vocab)
        assert out.shape == (len(hidden), self.vocab), f"{tuple(out.shape)} for {len(hidden)} rows"
        assert out.is_contiguous(), "the kernels see no strides"
        self._library.paceline_logits(
            self._bf16, self._handle, hidden.data_ptr(), len(hidden), torch.get_num_threads(), out.data_ptr()
        )
        return out

    def logits_of(
        self,
        token_ids: Tensor,
        batch: PagedBatch,
        kv_cache: Sequence[tuple[Tensor, Tensor]],
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """`forward` and `logits` in one call, of some rows, ascending, or of all -> [rows, vocab] float32. The next
        call overwrites them.
        """
        count = len(token_ids) if rows is None else len(rows)
        scores = self._scores_for(count)
        wanted = None if rows is None or count == len(token_ids) else (_INT * count)(*rows)
        self._library.paceline_logits_of(
            self._bf16, self._handle, self._batch(token_ids, batch, kv_cache), wanted, count, scores.data_ptr()
        )
        return scores

    def draft(
        self,
        token_ids: Tensor,
        batch: PagedBatch,
        kv_cache: Sequence[tuple[Tensor, Tensor]],
        depths: Sequence[int],
        choices: Choices | None = None,
    ) -> Tensor:
        """Run ahead: the rows of the batch, then each sequence's own drafts, fed back all but the last.

        Args:
            depths: tokens to draft for each sequence.
            choices: how; its `probs` are written. None: each the most probable.

        Returns:
            [num_seqs, largest depth] int64; what stands behind a sequence's depth is undefined.
        """
        count, largest = len(depths), max(depths)
        assert choices is None or choices.uniforms.shape == (count, largest)
        out = torch.empty(count, largest, dtype=torch.int64)
        self._library.paceline_draft(
            self._bf16,
            self._handle,
            self._batch(token_ids, batch, kv_cache),
            (ctypes.c_int32 * count)(*depths),
            largest,
            _MOST_PROBABLE if choices is None else choices.struct,
            out.data_ptr(),
        )
        return out

    def _scores_for(self, count: int) -> Tensor:
        """[count, vocab], in the memory of the last call, if that is not too much to be kept."""
        if count * self.vocab > _MOST_SCORES:
            return torch.empty(count, self.vocab)
        if len(self._scores) < count:
            with torch.inference_mode(False):  # whoever comes next may be in another mode
                self._scores = torch.empty(-(-count // 8) * 8, self.vocab)
        return self._scores[:count]

    def _batch(self, token_ids: Tensor, batch: PagedBatch, kv_cache: Sequence[tuple[Tensor, Tensor]]) -> _Batch:
        """The struct of an earlier call, where it had these very tensors: a step has no time to ask them all again."""
        tensors = token_ids, batch.query_starts, batch.context_lens, batch.block_tables
        if kv_cache is not self._kv_cache or len(self._structs) > _MOST_STRUCTS:
            assert kv_cache[0][0].dtype == self.dtype
            assert len(kv_cache) == len(self._kept[0].layers)
            self._kv_cache = kv_cache
            self._structs.clear()
        known = self._structs.get(id(token_ids))
        if known is None or any(map(operator.is_not, known[0], tensors)):
            known = self._structs[id(token_ids)] = tensors, _batch_struct(token_ids, batch, kv_cache)
        struct = known[1]
        struct.block_size, struct.num_threads = batch.block_size, torch.get_num_threads()
        return struct


# ---- Operations by themselves, for tests and measurements ----


def linear(x: Tensor, matrix: Matrix) -> Tensor:
    """x [rows, inputs], float32 or bfloat16, by packed weights, plus their bias -> [rows, matrix.outputs] float32."""
    stored = {Kind.FLOAT32: torch.float32, Kind.BFLOAT16: torch.bfloat16}.get(matrix.kind, x.dtype)
    assert x.dtype == stored, f"{x.dtype} by {matrix.kind.name}"
    x = x.contiguous()
    out = torch.empty(len(x), matrix.outputs)
    _library().paceline_linear(
        x.dtype == torch.bfloat16, x.data_ptr(), matrix.struct, len(x), torch.get_num_threads(), out.data_ptr()
    )
    return out


def store_kv(key: Tensor, value: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch) -> None:
    """Write key and value [num_tokens, num_kv_heads, head_dim] of a batch's rows to the pages of a layer."""
    assert key.dtype == value.dtype == kv[0].dtype, f"{key.dtype} and {value.dtype} into pages of {kv[0].dtype}"
    key, value = key.contiguous(), value.contiguous()
    struct = _batch_struct(None, batch, [kv])
    _library().paceline_store_kv(key.dtype == torch.bfloat16, key.data_ptr(), value.data_ptr(), struct, *key.shape[1:])


def paged_attention(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, scale: float) -> Tensor:
    """query [num_tokens, num_heads, head_dim] over the pages of a layer, causal -> a new tensor of that shape."""
    assert query.dtype == kv[0].dtype, f"{query.dtype} over pages of {kv[0].dtype}"
    query = query.contiguous()
    out = torch.empty_like(query)
    _library().paceline_paged_attention(
        query.dtype == torch.bfloat16,
        query.data_ptr(),
        _batch_struct(None, batch, [kv]),
        query.shape[1],
        kv[0].shape[2],
        query.shape[2],
        scale,
        out.data_ptr(),
    )
    return out


def _batch_struct(token_ids: Tensor | None, batch: PagedBatch, kv_cache: Sequence[tuple[Tensor, Tensor]]) -> _Batch:
    """Its tensors must live as long as it is used."""
    keys, values = kv_cache[0]
    elements = keys.numel()  # of a layer's keys
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert values.data_ptr() - keys.data_ptr() == elements * keys.itemsize
    assert kv_cache[-1][0].data_ptr() - keys.data_ptr() == 2 * (len(kv_cache) - 1) * elements * keys.itemsize
    num_seqs, max_blocks = batch.block_tables.shape
    assert batch.query_starts.shape == (num_seqs + 1,), tuple(batch.query_starts.shape)
    assert batch.context_lens.shape == (num_seqs,), tuple(batch.context_lens.shape)
    return _Batch(
        num_seqs,
        max_blocks,
        batch.block_size,
        _pointer(token_ids, torch.int64),
        _pointer(batch.query_starts, torch.int32),
        _pointer(batch.context_lens, torch.int32),
        _pointer(batch.block_tables, torch.int32),
        keys.data_ptr(),
        elements,
        torch.get_num_threads(),
    )


def _pointer(tensor: Tensor | None, dtype: torch.dtype) -> int | None:
    """Where elements lie that C++ takes for this type, one behind the other; None of nothing."""
    if tensor is None:
        return None
    assert tensor.dtype == dtype, f"{tensor.dtype}, where C++ reads {dtype}"
    assert tensor.is_contiguous(), "C++ sees no strides"
    return tensor.data_ptr()
