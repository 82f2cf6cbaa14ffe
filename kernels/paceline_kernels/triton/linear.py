"""Products of few rows with large matrices: what takes the time is reading the matrix, once, at the pace of memory.

Whether cuBLAS or one of these kernels does that best depends on the shape and the device, so that `CHOICE.tune` tries.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from paceline_kernels.int8 import Int8Weight
from paceline_kernels.recording import record
from paceline_kernels.triton.dependent import DEPENDENT, LAUNCH, release, wait
from paceline_kernels.triton.elementwise import gate_times, rms_norm, silu_mul

SMS: Final = 132  # of an H100 or H200; only the number of splits follows from it
MAX_SPLITS: Final = 8
BUCKETS: Final = (1, 16, 32, 64)  # rows of x are padded to one of these
BEYOND: Final = 128  # and where there are more, cut into blocks of so many
TUNED: Final = (*BUCKETS, 2 * BEYOND)  # rows that are tried
ROTATED_BYTES: Final = 400 << 20  # of weights that are read in turn while timing, which no cache holds
WARM_UPS: Final = 3  # of the device's clock, too
REPEATS: Final = 15
REDUCED: Final = 1024  # numbers that a program of the second pass adds up


@dataclass(frozen=True, slots=True)
class Config:
    """How a product is cut: programs of block_n outputs that walk the inputs in steps of block_k.

    Attributes:
        swapped: the weight is the left factor, as tensor cores of Hopper want the larger one.
        programs: for each SM at least, as far as splitting the inputs gives so many.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    swapped: bool = False
    programs: int = 2


# Each costs about a second to compile. The first one of a list is taken where nothing was tuned. 8 bits are never the
# left factor: Triton would read them in pieces of 4 bytes.
CANDIDATES: Final[dict[tuple[str, int], tuple[Config, ...]]] = {
    ("bf16", 1): (
        Config(1, 4, 1024, 4, 2, programs=8),
        Config(1, 2, 1024, 4, 3, programs=8),
        Config(1, 8, 512, 4, 3, programs=8),
        Config(1, 16, 512, 8, 1),
    ),
    ("int8", 1): (Config(1, 4, 1024, 4, 2, programs=8), Config(1, 8, 512, 4, 3, programs=8), Config(1, 8, 1024, 8, 1)),
    ("bf16", 16): (
        Config(16, 64, 128, 4, 4, swapped=True),
        Config(16, 64, 128, 4, 4, swapped=True, programs=1),
        Config(16, 128, 64, 4, 5, swapped=True),
    ),
    ("int8", 16): (Config(16, 32, 256, 4, 4), Config(16, 64, 256, 4, 4), Config(16, 64, 128, 4, 5)),
    ("bf16", 32): (Config(32, 32, 256, 4, 3), Config(32, 64, 128, 4, 4), Config(32, 64, 128, 4, 4, swapped=True)),
    ("int8", 32): (Config(32, 32, 256, 4, 4), Config(32, 64, 128, 4, 4), Config(32, 64, 256, 8, 3)),
    ("bf16", 64): (Config(64, 64, 128, 4, 4), Config(64, 128, 64, 8, 4), Config(64, 64, 128, 4, 4, swapped=True)),
    ("int8", 64): (Config(64, 64, 128, 4, 4), Config(64, 128, 128, 8, 3), Config(64, 64, 256, 8, 3)),
    ("int8", BEYOND): (
        Config(128, 128, 64, 8, 3, programs=1),
        Config(128, 128, 128, 8, 3, programs=1),
        Config(128, 64, 128, 4, 3, programs=1),
    ),
}
Key = tuple[int, int, int, str, bool]  # bucket of rows, outputs, inputs, kind of weight, half of the outputs gates


@dataclass(slots=True)
class Choice:
    """Which way is the fastest, by `Key`; None is cuBLAS. What was not tuned goes through cuBLAS where that can read
    the weight.
    """

    table: dict[Key, Config | None] = field(default_factory=dict)

    def of(self, rows: int, weight: Tensor | Int8Weight, *, gates: bool = False) -> Config | None:
        kind = kind_of(weight)
        outputs, inputs = weight.shape
        key = bucket(rows), outputs, inputs, kind, gates
        if key not in self.table:
            self.table[key] = CANDIDATES[kind, key[0]][0] if kind == "int8" else None
        return self.table[key]

    def tune(
        self,
        linears: Iterable[tuple[Tensor | Int8Weight, bool]],
        rows: Iterable[int] = TUNED,
        report: Reporter | None = None,
    ) -> None:
        """Time every candidate on the device, for x in bf16 of so many rows, and keep the fastest of each; of several
        in one bucket, those of the most rows.

        Args:
            linears: the weights of a model, all its layers, and for each whether half of its outputs gates the other.
                Those of one shape are read in turn, as a forward reads them.
        """
        groups: dict[tuple[int, int, str, bool], list[Tensor | Int8Weight]] = {}
        for weight, gates in linears:
            kind = kind_of(weight)
            if kind != "fp32" and _device(weight).type == "cuda":
                groups.setdefault((*weight.shape, kind, gates), []).append(weight)
        for count in sorted(set(rows)):
            for (outputs, inputs, kind, gates), members in groups.items():
                ways: list[Config | None] = list(CANDIDATES.get((kind, bucket(count)), ()))
                if kind == "bf16":
                    ways.insert(0, None)
                if len(ways) < 2:
                    continue
                x = torch.randn(count, inputs, dtype=torch.bfloat16, device=_device(members[0]))
                seconds = {way: _seconds(x, members, way, gates) for way in ways}
                self.table[bucket(count), outputs, inputs, kind, gates] = min(ways, key=lambda way: seconds[way])
                if report is not None:
                    report(count, outputs, inputs, kind, gates, seconds)


Reporter = Callable[[int, int, int, str, bool, dict[Config | None, float]], None]  # the arguments of a Key, seconds
CHOICE: Final = Choice()


def linear(x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear`. Weights of 8 bits are multiplied as they are, and their scales meet the sum.

    In fp32 it is cuBLAS's business, weights of 8 bits being widened before: that is for tests.
    """
    if x.dtype != torch.bfloat16:
        return F.linear(x, weight.dequantized(x.dtype) if isinstance(weight, Int8Weight) else weight, bias)
    return _linear(x, weight, bias, CHOICE.of(len(x), weight))


def linear_silu_mul(x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear_silu_mul`. Where one kernel multiplies, it gates, too."""
    if x.dtype != torch.bfloat16:
        return silu_mul(linear(x, weight, bias))
    return _linear_silu_mul(x, weight, bias, CHOICE.of(len(x), weight, gates=True))


def _linear(x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None, way: Config | None) -> Tensor:
    """None is cuBLAS."""
    if way is not None:
        return product(x, weight, bias, way)
    assert isinstance(weight, Tensor)
    return F.linear(x, weight, bias)


def _linear_silu_mul(x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None, way: Config | None) -> Tensor:
    if way is not None and _gates(weight, way, cut_of(len(x), weight, way)[1]):
        return product(x, weight, bias, way, gated=True)
    return silu_mul(_linear(x, weight, bias, way))


def _gates(weight: Tensor | Int8Weight, config: Config, splits: int) -> bool:
    """Every program has whole sums of a gate and what it gates."""
    return weight.shape[0] % 2 == 0 and config.block_n % 2 == 0 and splits == 1


def bucket(rows: int) -> int:
    return next((size for size in BUCKETS if rows <= size), BEYOND)


def kind_of(weight: Tensor | Int8Weight) -> str:
    if isinstance(weight, Int8Weight):
        return "int8"
    return "bf16" if weight.dtype == torch.bfloat16 else "fp32"


def cut_of(rows: int, weight: Tensor | Int8Weight, config: Config) -> tuple[int, int]:
    """How many steps of block_k a program of this product walks, and among how many programs its inputs are split."""
    outputs, inputs = weight.shape
    blocks = triton.cdiv(rows, config.block_m) * triton.cdiv(outputs, config.block_n)
    steps = triton.cdiv(inputs, config.block_k)
    wanted = triton.cdiv(SMS * config.programs, max(1, blocks))
    each = triton.cdiv(steps, max(1, min(wanted, MAX_SPLITS, steps // 2)))
    return each, triton.cdiv(steps, each)


def product(
    x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None, config: Config, *, gated: bool = False
) -> Tensor:
    """x [rows, inputs] bf16 times the weight, cut as `config` says; one kernel, or two where the inputs are split.

    The weight has no gaps, and no rows but one where block_m is 1.

    Args:
        gated: the first half of the outputs are gates of the second, as for `reference.silu_mul`. For inputs that are
            not split.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    values = weight.values if isinstance(weight, Int8Weight) else weight
    scales = weight.scales if isinstance(weight, Int8Weight) else None
    if not values.is_contiguous():
        raise ValueError("weight must be contiguous")
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(rows, outputs // 2 if gated else outputs)
    if not rows:
        return out
    row_blocks, output_blocks = triton.cdiv(rows, config.block_m), triton.cdiv(outputs, config.block_n)
    steps_each, splits = cut_of(rows, weight, config)
    if gated and not _gates(weight, config, splits):
        raise ValueError(
            f"gates: {outputs} outputs in blocks of {config.block_n}, {splits} splits: expected pairs, and 1"
        )
    # Sums of the splits, added by a second kernel in their order: the same bits every time.
    partial = None if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    even = inputs % config.block_k == 0
    if config.block_m == 1:
        if rows != 1:
            raise ValueError(f"{rows} rows: expected 1")
        _gemv_kernel[(output_blocks, splits)](
            x,
            values,
            scales,
            bias,
            out,
            partial,
            outputs,
            inputs,
            steps_each * config.block_k,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            EVEN=even,
            GATED=gated,
            STAGES=config.stages,
            DEPENDS=DEPENDENT,
            num_warps=config.warps,
            **LAUNCH,
        )
    else:
        _product_kernel[(row_blocks, output_blocks, splits)](
            x,
            values,
            scales,
            bias,
            out,
            partial,
            rows,
            outputs,
            inputs,
            x.stride(0),
            steps_each * config.block_k,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            EVEN=even,
            GATED=gated,
            SWAPPED=config.swapped,
            DEPENDS=DEPENDENT,
            num_warps=config.warps,
            num_stages=config.stages,
            **LAUNCH,
        )
    if partial is not None:
        grid = (triton.cdiv(outputs, REDUCED), rows)
        _add_splits_kernel[grid](
            partial,
            scales,
            bias,
            out,
            rows,
            outputs,
            SPLITS=splits,
            BLOCK=REDUCED,
            DEPENDS=DEPENDENT,
            num_warps=4,
            **LAUNCH,
        )
    return out


@triton.jit
def _column(place, outputs, GATED: tl.constexpr):
    """Which outputs a program computes. GATED: gates and what they gate alternate, so that it has both."""
    if GATED:
        return place // 2 + (place % 2) * (outputs // 2)
    else:
        return place


@triton.jit
def _finished(acc, scales, bias, column, outputs):
    """The end of a product: scales and bias of outputs `column`, of a shape that broadcasts with acc's."""
    if scales is not None:
        acc *= tl.load(scales + column, mask=column < outputs, other=0.0)
    if bias is not None:
        acc += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _gemv_kernel(
    x,
    weight,
    scales,
    bias,
    out,
    partial,
    outputs,
    inputs,
    inputs_each,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """One row. Every thread adds up products of its own, and threads meet once at the end. GATED: see `_column`."""
    column = _column(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), outputs, GATED)
    read = tl.minimum(column, outputs - 1).to(tl.int64)  # a load without a mask is a wide one
    step = tl.arange(0, BLOCK_K)
    begin = tl.program_id(1) * inputs_each
    end = tl.minimum(begin + inputs_each, inputs)
    weights = weight + read[:, None] * inputs + step[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    if DEPENDS:
        release()
        if EVEN:
            # The weight does not depend on anything: its first part is on its way while others still compute x.
            first = tl.load(weights + begin, eviction_policy="evict_first")
            wait()
            acc += first.to(tl.float32) * tl.load(x + begin + step).to(tl.float32)[None, :]
            begin += BLOCK_K
        else:
            wait()
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        if EVEN:
            w = tl.load(weights + k, eviction_policy="evict_first")
            row = tl.load(x + k + step)
        else:
            there = step < inputs - k
            w = tl.load(weights + k, mask=there[None, :], other=0, eviction_policy="evict_first")
            row = tl.load(x + k + step, mask=there, other=0.0)
        acc += w.to(tl.float32) * row.to(tl.float32)[None, :]
    total = tl.sum(acc, axis=1)
    if GATED:
        dtype = out.dtype.element_ty
        total = _finished(total, scales, bias, column, outputs).to(dtype).to(tl.float32)
        gate, up = tl.split(tl.reshape(total, (BLOCK_N // 2, 2)))
        pair = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        tl.store(out + pair, gate_times(gate, up, dtype), mask=pair < outputs // 2)
    elif partial is not None:
        tl.store(partial + tl.program_id(1) * outputs + column, total, mask=column < outputs)
    else:
        total = _finished(total, scales, bias, column, outputs)
        tl.store(out + column, total.to(out.dtype.element_ty), mask=column < outputs)


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,
    weight,
    scales,
    bias,
    out,
    partial,
    rows,
    outputs,
    inputs,
    x_stride,
    inputs_each,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    SWAPPED: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """Blocks of rows are neighbours in the grid, so that a piece of the weight is read from memory once for all. GATED:
    see `_column`.
    """
    if DEPENDS:
        release()
        wait()
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = _column(tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), outputs, GATED)
    # What lies beyond the edges is read from within and never stored: a load without a mask is a wide one.
    read_row = tl.minimum(row, rows - 1).to(tl.int64)
    read_column = tl.minimum(column, outputs - 1).to(tl.int64)
    step = tl.arange(0, BLOCK_K)
    begin = tl.program_id(2) * inputs_each
    end = tl.minimum(begin + inputs_each, inputs)
    xs = x + read_row[:, None] * x_stride + step[None, :]
    weights = weight + read_column[:, None] * inputs + step[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(begin, end, BLOCK_K):
        if EVEN:
            w = tl.load(weights + k, eviction_policy="evict_first")
            part = tl.load(xs + k)
        else:
            there = (step < inputs - k)[None, :]
            w = tl.load(weights + k, mask=there, other=0, eviction_policy="evict_first")
            part = tl.load(xs + k, mask=there, other=0.0)
        if SWAPPED:
            acc = tl.dot(w.to(x.dtype.element_ty), tl.trans(part), acc)
        else:
            acc = tl.dot(part, tl.trans(w.to(x.dtype.element_ty)), acc)
    if SWAPPED:
        acc = tl.trans(acc)
    if GATED:
        dtype = out.dtype.element_ty
        acc = _finished(acc, scales, bias, column[None, :], outputs).to(dtype).to(tl.float32)
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
        pair = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        there = (row < rows)[:, None] & (pair < outputs // 2)[None, :]
        place = row.to(tl.int64)[:, None] * (outputs // 2) + pair[None, :]
        tl.store(out + place, gate_times(gate, up, dtype), mask=there)
    else:
        there = (row < rows)[:, None] & (column < outputs)[None, :]
        place = row.to(tl.int64)[:, None] * outputs + column[None, :]
        if partial is not None:
            size = tl.cast(rows, tl.int64) * outputs
            tl.store(partial + tl.program_id(2) * size + place, acc, mask=there)
        else:
            acc = _finished(acc, scales, bias, column[None, :], outputs)
            tl.store(out + place, acc.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _add_splits_kernel(
    partial,
    scales,
    bias,
    out,
    rows,
    outputs,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """partial [SPLITS, rows, outputs] -> out [rows, outputs]."""
    if DEPENDS:
        release()
        wait()
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    there = column < outputs
    size = tl.cast(rows, tl.int64) * outputs
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(partial + split * size + row * outputs + column, mask=there, other=0.0)
    acc = _finished(acc, scales, bias, column, outputs)
    tl.store(out + row * outputs + column, acc.to(out.dtype.element_ty), mask=there)


def _device(weight: Tensor | Int8Weight) -> torch.device:
    return weight.values.device if isinstance(weight, Int8Weight) else weight.device


def _seconds(x: Tensor, weights: Sequence[Tensor | Int8Weight], way: Config | None, gates: bool) -> float:
    """Time one product, the weights read in turn; from a graph, since launching takes longer than many of them. As in a
    layer, behind a small kernel, during whose last microsecond some of the ways read already, and with the gating.
    """
    scale = torch.ones_like(x[0])
    multiply = _linear_silu_mul if gates else _linear

    def run(weight: Tensor | Int8Weight) -> None:
        multiply(rms_norm(x, scale, 1e-6), weight, None, way)

    size = weights[0].numel() * (1 if isinstance(weights[0], Int8Weight) else 2)
    turns = max(2, min(64, triton.cdiv(ROTATED_BYTES, size)))

    def run_all() -> None:
        for turn in range(turns):
            run(weights[turn % len(weights)])

    run(weights[0])  # compiles
    graph = record(run_all)
    times: list[float] = []
    for _ in range(WARM_UPS + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / turns)
    return statistics.median(times[WARM_UPS:])
