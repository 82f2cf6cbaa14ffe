"""What this machine has for serving, how fast that is, and what to do about whatever is missing."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline import compiled
from paceline.core.cost_model import CostModel, Error, StepShape
from paceline.core.params import SamplingParams, StopParams
from paceline.cores import usable_cores
from paceline.device import LEAST_CAPABILITY, Gpu, find_gpu, in_gib, triton_obstacle
from paceline.engine import Engine, GenerationRequest
from paceline.errors import InvalidArgument
from paceline.wiring import EngineSettings, build_engine, check_engine
from paceline_kernels.cpu import build, ceilings, decoder, memory
from paceline_kernels.cpu.ceilings import ReadCeiling, median_seconds
from paceline_kernels.cpu.decoder import Kind, Matrix

# What the kernels look for, best first. Linux's names for them.
INSTRUCTIONS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "fma")
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
OPENMP = re.compile(r"/lib(?:gomp|omp5?|iomp5)(?:-\w+)?\.so[.\d]*$")
FEATURES = 4096  # inputs and outputs of the synthetic matrices
ROWS = (1, 4, 16)
STACK = 768 << 20  # bytes of matrices, so that caches do not help
ROUNDS = 3
SEQUENCES = (1, 4, 16, 64)
DEPTHS = (0, 2, 4)
CONTEXT = 256  # tokens of each sequence, where steps are told
SERVED = (1, 4, 16)  # requests at once, by which predictions are judged
SERVED_TOKENS = 64  # of each
GIGA, TERA = 1e9, 1e12
COPIED = 1 << 30  # bytes that a GPU copies within its memory, many times its caches
MULTIPLIED = 8192  # rows, columns and depth of its product


@dataclass(frozen=True, slots=True)
class Fact:
    """Something found, and what to do about it if it is not as it should be."""

    name: str
    value: str
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Linear:
    """How near a product of few rows comes to reading its weights at the ceiling, in the same rounds."""

    kind: str
    rows: int
    gigabytes_per_second: float
    fraction: float


@dataclass(frozen=True, slots=True)
class Measured:
    """GB/s and GFLOP/s."""

    read_one_thread: float
    read: float
    multiply: dict[str, float]  # by kind of number
    linear: list[Linear]


@dataclass(frozen=True, slots=True)
class GpuMeasured:
    """What nothing that runs on a GPU can exceed.

    Attributes:
        copy: GB/s, bytes read and bytes written together.
        multiply: TFLOP/s of a large product in bf16.
    """

    copy: float
    multiply: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds, by the cost model, of a step of so many sequences with `CONTEXT` tokens each.

    Attributes:
        steps: by the depth at which all of them draft.
        draft_pass: one pass of the draft model behind the first; 0 without a draft model.
    """

    sequences: int
    steps: dict[int, float]
    draft_pass: float


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps of a model cost, and how well that was predicted over some requests, by kind of step."""

    steps: list[StepCost]
    errors: dict[str, Error]


@dataclass(slots=True)
class Report:
    facts: list[Fact] = field(default_factory=list)
    measured: Measured | None = None  # None where nothing was measured
    gpu: GpuMeasured | None = None  # None without one, too
    costs: Costs | None = None  # None without a model


def examine(quick: bool = False, model: str | None = None, draft: str = "none") -> Report:
    """Find out everything; unless `quick`, measure too, which takes about a minute. With a model, what its steps cost.

    Raises:
        PacelineError: whatever `build_engine` refuses; a draft without a model.
    """
    settings = None if model is None else EngineSettings(model=model, draft=draft)
    if settings is not None:
        check_engine(settings)
    elif draft != "none":
        raise InvalidArgument("draft", draft, "given with --model: without one, nobody drafts")
    missing, unsampled = _native_obstacle(), build.obstacle(partial(build.load, "sampling"))
    gpu = find_gpu()
    facts = [*_machine(), *_gpu(gpu), *_compiler(), *_torch(), *_backend(missing, gpu), *_sampling(unsampled)]
    report = Report([*facts, _scheduler()])
    if missing is None and not quick:
        report.measured = _measure()
    if isinstance(gpu, Gpu) and not quick:
        report.gpu = _measure_gpu()
    if settings is not None:
        report.costs = _costs(build_engine(settings))
    return report


# ---- What there is ----


def _machine() -> list[Fact]:
    info = _cpu_info()
    flags = set(info.get("flags", "").split())
    found = [name for name in INSTRUCTIONS if name in flags]
    slow = "without AVX2, products run several times slower than on CPUs of the last ten years"
    return [
        Fact("CPU", info.get("model name", "unknown")),
        _cores(),
        Fact("instructions", ", ".join(found) or "none of interest", None if "avx2" in found else slow),
        _large_pages(),
    ]


def _cpu_info() -> dict[str, str]:
    """Of the first core."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _cores() -> Fact:
    usable, quota, load = usable_cores(), _quota(), os.getloadavg()[0]
    value = f"{usable} of {os.cpu_count()} usable, load {load:.1f}"
    if quota is None:
        busy = "others use them too: what is measured now is too low" if load > usable / 2 else None
        return Fact("cores", value, busy)
    value += f", quota of {quota:g}"
    advice = f"start the server with --threads {max(1, int(quota))}: more threads than the quota wait for each other"
    return Fact("cores", value, advice if quota < torch.get_num_threads() else None)


def _quota() -> float | None:
    """Cores' worth of time that the control group of a container allows; None if it does not say."""
    try:
        limit, period = (memory.CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)


def _large_pages() -> Fact:
    try:
        text = LARGE_PAGES.read_text()
    except OSError:
        return Fact("large pages", "unknown", "this kernel has none: weights are read more slowly")
    chosen = text[text.index("[") + 1 : text.index("]")]
    advice = f"weights are read more slowly without; as root: echo madvise > {LARGE_PAGES}"
    return Fact("large pages", chosen, advice if chosen == "never" else None)


def _gpu(gpu: Gpu | str) -> list[Fact]:
    """Nothing to say where torch is made for CPUs."""
    if isinstance(gpu, str):
        return [] if torch.version.cuda is None else [Fact("GPU", "none", f"if there is one: {gpu}")]
    capability, least = (".".join(map(str, version)) for version in (gpu.capability, LEAST_CAPABILITY))
    memory_of = f"{in_gib(gpu.total_memory)}, {in_gib(gpu.free_memory)} of them free"
    old = f"it is too old to serve on: compute capability {least} is needed; serve with --device cpu"
    return [
        Fact(
            "GPU",
            f"{gpu.name}, compute capability {capability}, {memory_of}, CUDA {gpu.cuda}",
            old if gpu.capability < LEAST_CAPABILITY else None,
        )
    ]


def _compiler() -> list[Fact]:
    try:
        command = build.find_compiler()
    except build.BuildError as error:
        advice = f"install g++ (Debian: apt-get install g++), or name a compiler in {build.COMPILER_VARIABLE}"
        return [Fact("compiler", str(error), advice), _cache()]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    version = (done.stdout.splitlines() or ["no version"])[0]
    return [Fact("compiler", f"{shlex.join(command)}: {version}, -march={build.march()}"), _cache()]


def _cache() -> Fact:
    folder = build.cache_folder()
    advice = f"every process compiles anew; name a folder that can be written in {build.CACHE_VARIABLE}"
    if folder is None:
        return Fact("compiled code", "nowhere: this user has no home directory", advice)
    nearest = next(parent for parent in (folder, *folder.parents) if build.is_there(parent))
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        return Fact("compiled code", str(folder))
    return Fact("compiled code", f"{folder}, which cannot be written", advice)


def _torch() -> list[Fact]:
    """After the libraries were loaded: it counts what they brought."""
    runtimes = openmp_runtimes()
    advice = "several pools of threads work against each other; compile by g++, and import nothing that brings another"
    threads = torch.get_num_threads()
    return [
        Fact("torch", f"{torch.__version__}, {threads} threads"),
        Fact("OpenMP", ", ".join(map(str, runtimes)) or "none", advice if len(runtimes) > 1 else None),
    ]


def openmp_runtimes() -> list[Path]:
    """Shared libraries of OpenMP that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted({Path(file).resolve() for file in files if OPENMP.search(file)})


def _native_obstacle() -> str | None:
    """Why there is no native backend here, if there is none. Compiles and loads what it consists of."""
    return decoder.available() or ceilings.available()


def _scheduler() -> Fact:
    if compiled.is_compiled():
        return Fact("scheduler", "compiled")
    return Fact("scheduler", "interpreted", "it takes twice the time; to compile it: python -m paceline.compiled")


def _backend(missing: str | None, gpu: Gpu | str) -> list[Fact]:
    if isinstance(gpu, Gpu) and gpu.capability >= LEAST_CAPABILITY:
        obstacle = triton_obstacle(gpu)
        if obstacle is None:
            return [Fact("backend", f"triton on {gpu.name}")]
        return [Fact("backend", f"torch on {gpu.name}, because: {obstacle}", "torch is several times slower")]
    if missing is not None:
        advice = "torch computes instead, several times slower; see what is said above about the compiler"
        return [Fact("backend", f"torch, because: {missing}", advice)]
    family = ceilings.family()
    unused = "amx_bf16" in _cpu_info().get("flags", "").split() and family != "AMX"
    advice = "this CPU has a matrix unit, which the compiler does not know or the kernel does not let processes use"
    return [
        Fact("backend", "native"),
        Fact("kernels", family, advice if unused and build.march() == "native" else None),
    ]


def _sampling(missing: str | None) -> list[Fact]:
    """Nothing to say where it is native."""
    if missing is None:
        return []
    advice = "torch samples instead, which is slower, whatever else is native"
    return [Fact("sampling", f"torch, because: {missing}", advice)]


# ---- What it can do ----


def _measure() -> Measured:
    threads = torch.get_num_threads()
    data = ceilings.buffer(ceilings.uncached_bytes())
    ceiling = ReadCeiling(data, threads)
    return Measured(
        read_one_thread=ReadCeiling(data, 1).measure() / GIGA,
        read=ceiling.measure() / GIGA,
        multiply={kind.name.lower(): ceilings.multiply_rate(kind, threads) / GIGA for kind in Kind},
        linear=[figure for kind in Kind for figure in _measure_linear(kind, ceiling.measure)],
    )


def _measure_gpu() -> GpuMeasured:
    device = torch.device("cuda")
    copied = torch.empty(2, COPIED, dtype=torch.uint8, device=device)
    seconds = _gpu_seconds(lambda: copied[1].copy_(copied[0]))
    factor = torch.randn(MULTIPLIED, MULTIPLIED, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(factor)
    multiplying = _gpu_seconds(lambda: torch.mm(factor, factor, out=product))
    return GpuMeasured(2 * COPIED / seconds / GIGA, 2 * MULTIPLIED**3 / multiplying / TERA)


def _gpu_seconds(call: Callable[[], object], rounds: int = 10) -> float:
    """By the GPU's own clock; the median, after one that may set things up."""
    call()
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    milliseconds: float = median(begin.elapsed_time(end) for begin, end in itertools.pairwise(events))
    return milliseconds / 1e3


def _measure_linear(kind: Kind, ceiling: Callable[[], float]) -> list[Linear]:
    """Products with a stack of matrices, one after the other, and the ceiling, in turns."""
    dtype = torch.float32 if kind is Kind.FLOAT32 else torch.bfloat16
    weights = torch.randn(FEATURES, FEATURES).to(dtype)
    size = FEATURES * FEATURES * {Kind.FLOAT32: 4, Kind.BFLOAT16: 2, Kind.INT8: 1}[kind]
    room = min(STACK, ceilings.uncached_bytes())
    stack = [Matrix(kind, FEATURES, FEATURES) for _ in range(max(1, room // size))]
    for matrix in stack:
        matrix.fill(weights)
    figures = []
    for rows in ROWS:
        x = torch.randn(rows, FEATURES).to(dtype)
        rounds = [(ceiling(), size * len(stack) / median_seconds(partial(_multiply, x, stack))) for _ in range(ROUNDS)]
        rate = median(rate for _, rate in rounds) / GIGA
        figures.append(Linear(kind.name.lower(), rows, rate, median(rate / most for most, rate in rounds)))
    return figures


def _multiply(x: torch.Tensor, stack: list[Matrix]) -> None:
    for matrix in stack:
        decoder.linear(x, matrix)


def _costs(engine: Engine) -> Costs:
    """As predicted at first, and the errors over requests that are served now."""
    costs = engine.scheduler.speculation.costs
    assert costs is not None, "depths are chosen by cost"
    limit = engine.scheduler.config.max_num_seqs
    steps = [_step_cost(costs, count) for count in SEQUENCES if count <= limit]
    stop = StopParams(max_tokens=SERVED_TOKENS, ignore_eos=True)
    for count in SERVED:
        for index in range(min(count, limit)):
            engine.add(GenerationRequest((index % engine.vocab_size,) * 32, SamplingParams(temperature=0.0), stop))
        while engine.has_work:
            engine.step()
    return Costs(steps, costs.errors())


def _step_cost(costs: CostModel, count: int) -> StepCost:
    def shape(depth: int) -> StepShape:
        has_model = costs.draft_pass(1, 1) > 0
        passes = (count,) * depth if has_model else ()
        return StepShape(count * (1 + depth), count * CONTEXT, passes, sequences=count)

    steps = {depth: 1e3 * costs.step(shape(depth)) for depth in DEPTHS}
    return StepCost(count, steps, 1e3 * costs.draft_pass(1, count))


# ---- Saying it ----


def render(report: Report) -> None:
    console = Console()
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")
    for fact in report.facts:
        table.add_row(fact.name, fact.value)
    console.print(table)
    if report.measured is not None:
        _render_measured(report.measured, console)
    if report.gpu is not None:
        console.print(
            f"\nthe GPU copies {report.gpu.copy:.0f} GB/s (read and written together) and multiplies "
            f"{report.gpu.multiply:.0f} TFLOP/s in bf16"
        )
    if report.costs is not None:
        _render_costs(report.costs, console)
    console.print()
    for fact in report.facts:
        if fact.advice is not None:
            console.print(f"[bold]{fact.name}[/bold]: {fact.advice}", highlight=False)


def _render_measured(measured: Measured, console: Console) -> None:
    console.print(f"\nreads {measured.read:.1f} GB/s, with one thread {measured.read_one_thread:.1f} GB/s")
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in measured.multiply.items())
    console.print(f"computes in registers, GFLOP/s: {rates}")
    console.print("products read their weights, at so many % of that:")
    table = Table(box=None)
    table.add_column("")
    for rows in ROWS:
        table.add_column("1 row" if rows == 1 else f"{rows} rows", justify="right")
    for kind in dict.fromkeys(figure.kind for figure in measured.linear):
        table.add_row(kind, *(f"{100 * figure.fraction:.0f}" for figure in measured.linear if figure.kind == kind))
    console.print(table)


def _render_costs(costs: Costs, console: Console) -> None:
    console.print(f"\na step of sequences with {CONTEXT} tokens each, ms:")
    table = Table(box=None)
    for heading in ("sequences", *(f"depth {depth}" for depth in DEPTHS), "one more draft pass"):
        table.add_column(heading, justify="right")
    for step in costs.steps:
        cells = [f"{milliseconds:.2f}" for milliseconds in step.steps.values()]
        table.add_row(str(step.sequences), *cells, f"{step.draft_pass:.2f}")
    console.print(table)
    for kind, error in costs.errors.items():
        console.print(
            f"{kind} steps: predicted within {100 * error.median:.0f} % (median of {error.count}); the same step "
            f"taken again differs by {100 * error.repeatability:.0f} %",
            highlight=False,
        )


def to_json(report: Report) -> dict[str, Any]:
    """`facts` by name; `measured`, `gpu` and `costs`, null where there are none."""
    return {
        "facts": {fact.name: {"value": fact.value, "advice": fact.advice} for fact in report.facts},
        "measured": None if report.measured is None else asdict(report.measured),
        "gpu": None if report.gpu is None else asdict(report.gpu),
        "costs": None if report.costs is None else asdict(report.costs),
    }
