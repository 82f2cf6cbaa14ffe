"""What a GPU is asked before it serves, with GPUs that are made up: refusals come before any weights are read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import backend, device, kv_blocks, wiring
from paceline.core.config import SchedulerConfig
from paceline.device import Gpu, Needed, check_memory, choose_gpu, find_gpu
from paceline.errors import FailedPrecondition, InvalidArgument
from paceline.kv_blocks import gpu_blocks
from paceline.llm import LLM
from paceline.models import Decoder, Model, load_model, load_model_config
from paceline.models.weights import num_parameters, weight_bytes
from paceline.runner import memory as gpu_memory
from paceline.runner.memory import LargestStep, Measured, kv_bytes, run_largest
from paceline.wiring import EngineSettings, build_engine
from support.checkpoints import tiny_checkpoint
from support.pairs import tiny_pair

CPU = torch.device("cpu")
GIB = 1 << 30
H100 = Gpu("NVIDIA H100", (9, 0), 80 * GIB, 79 * GIB, "12.8")
TESLA = Gpu("Tesla V100", (7, 0), 32 * GIB, 31 * GIB, "12.8")
MEASURED = Measured(total=80 * GIB, outside=1 * GIB, peak=20 * GIB)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, draft = tiny_pair(tmp_path_factory.mktemp("pair"))
    return str(target), str(draft)


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object, **options: object) -> Model:
        raise AssertionError("weights are loaded")

    for name in ("load_model", "load_native"):
        monkeypatch.setattr(backend, name, load)


def pretend(monkeypatch: pytest.MonkeyPatch, gpu: Gpu | str) -> None:
    """That torch finds this, whatever there is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "find_gpu", lambda: gpu)


# -- which device -----------------------------------------------------------------------------------------------------


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, H100)
    assert [choose_gpu(name) for name in ("auto", "cuda", "cpu")] == [H100, H100, None]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_gpu("auto") is None


def test_a_build_for_cpus_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert find_gpu() == f"torch {torch.__version__} is a build for CPUs only; install one for CUDA"
    with pytest.raises(FailedPrecondition, match=r"device = cuda: there is no GPU .* a build for CPUs only"):
        choose_gpu("cuda")


def test_what_torch_says_of_a_driver_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(FailedPrecondition, match=r"built for CUDA 12\.8, cannot use one: .*too old \(found version 1"):
        choose_gpu("cuda")


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("there is none", "there is no GPU to compute on: there is none"),
        (TESLA, "Tesla V100 has compute capability 7.0, and 8.0 or more is needed"),
        (Gpu("Small", (8, 6), 1 << 16, 1 << 16), "Small is too small: "),
    ],
)
def test_a_gpu_that_will_not_do(
    pair: tuple[str, str], gpu: Gpu | str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, gpu)
    with pytest.raises(FailedPrecondition) as caught:
        build_engine(EngineSettings(*pair, device="cuda"))
    assert words in str(caught.value)


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("field", ["model", "draft"])
@pytest.mark.parametrize("size", [8, 272])
def test_a_head_size_without_a_kernel(field: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, H100)
    good, bad = tiny_checkpoint(tmp_path / "good"), tiny_checkpoint(tmp_path / "bad", head_dim=size)
    settings = {"model": str(good), "draft": str(good), field: str(bad)}
    with pytest.raises(InvalidArgument, match=f"multiple of 16 up to 256; it is {size}; backend = torch") as caught:
        build_engine(EngineSettings(**settings))  # type: ignore[arg-type]
    assert caught.value.field == field


# -- which backend ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "triton"),
        ({"backend": "triton"}, "triton"),
        ({"backend": "torch"}, "torch"),
        ({"quantization": "int8", "draft_quantization": "int8"}, "triton"),
    ],
)
def test_backends_of_a_gpu(settings: dict[str, Any], name: str) -> None:
    assert backend.choose_backend(EngineSettings(**settings), H100) == name


def test_int8_needs_kernels_on_a_gpu_too() -> None:
    with pytest.raises(FailedPrecondition, match=r"quantization = int8: the triton backend is needed: backend = torch"):
        backend.choose_backend(EngineSettings(backend="torch", quantization="int8"), H100)


def test_without_triton_torch_serves_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    assert backend.choose_backend(EngineSettings(), H100) == "torch"
    [warning] = caplog.records
    assert (warning.levelno, "triton is not installed" in warning.getMessage()) == (logging.WARNING, True)
    with pytest.raises(FailedPrecondition, match=r"backend = triton: .*triton is not installed"):
        backend.choose_backend(EngineSettings(backend="triton"), H100)


@pytest.mark.parametrize("int8", [False, True])
def test_kernels_compute_where_triton_is_chosen(
    pair: tuple[str, str], int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole engine, its kernels interpreted."""
    loaded: list[tuple[str, bool]] = []

    def load(path: Path, dtype: torch.dtype, on: torch.device, *, ops: Any, int8: bool) -> Decoder:
        loaded.append((ops.__name__, int8))
        return load_model(path, dtype, on, ops, int8=int8)

    monkeypatch.setattr(backend, "load_model", load)
    quantization = "int8" if int8 else "none"
    engine = build_engine(EngineSettings(*pair, backend="triton", quantization=quantization, depth="2"))
    assert loaded == [("paceline_kernels.triton.ops", int8), ("paceline_kernels.triton.ops", False)]
    [completion] = LLM.from_engine(engine).generate([(5, 6)], max_tokens=4, ignore_eos=True)
    assert len(completion.token_ids) == 4


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_told_by_the_config(family: str, tied: bool, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, family, tie_word_embeddings=tied)
    config = load_model_config(path)
    count = load_model(path, torch.float32, CPU).num_parameters
    assert num_parameters(config) == count
    assert weight_bytes(config, torch.bfloat16) == 2 * count
    assert count < weight_bytes(config, torch.bfloat16, int8=True) < 2 * count


def test_too_small_a_gpu_is_told_with_all_sizes() -> None:
    needed = Needed(weights=60 * GIB, draft_weights=8 * GIB, request=4 * GIB, max_model_len=4096)
    check_memory(H100, needed, 0.9)
    with pytest.raises(FailedPrecondition) as caught:
        check_memory(H100, needed, 0.8)
    for words in ("72.00 GiB are needed", "64.00 GiB may be used", "80.00", "60.00", "8.00", "4.00", "4096", "0.8"):
        assert words in str(caught.value)
    held_by_others = Gpu("NVIDIA H100", (9, 0), 80 * GIB, 10 * GIB)
    with pytest.raises(FailedPrecondition, match=r"10\.00 GiB may be used"):
        check_memory(held_by_others, needed, 0.9)


def test_what_is_left_for_kv() -> None:
    assert kv_bytes(MEASURED, 0.9, reserve=2 * GIB) == (72 - 1 - 20 - 2) * GIB
    assert kv_bytes(MEASURED, 0.25, reserve=2 * GIB) == 0


def test_kv_bytes_become_blocks() -> None:
    config = SchedulerConfig(num_blocks=8, block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)
    assert gpu_blocks(1000, 100, config, 0.9) == 10
    assert gpu_blocks(10**9, 100, config, 0.9) == kv_blocks.MOST_CACHED * 4 * 7
    with pytest.raises(FailedPrecondition, match=r"0\.9 leaves .* one request of max_model_len = 100 tokens needs"):
        gpu_blocks(699, 100, config, 0.9)


def test_the_largest_step_has_all_rows(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(Path(pair[0]), torch.float32, CPU)
    rows: list[int] = []
    forward, logits = model.forward, model.logits
    monkeypatch.setattr(model, "forward", lambda ids, batch, kv: (rows.append(len(ids)), forward(ids, batch, kv))[1])
    monkeypatch.setattr(model, "logits", lambda hidden: (rows.append(len(hidden)), logits(hidden))[1])
    run_largest(model, LargestStep(rows=150, sampled=36, max_model_len=64, block_size=16))
    assert rows == [150, 36]


def test_the_largest_step_stays_within_the_positions_of_a_draft_model(tmp_path: Path) -> None:
    model = load_model(tiny_checkpoint(tmp_path / "draft", max_position_embeddings=64), torch.float32, CPU)
    run_largest(model, LargestStep(rows=200, sampled=8, max_model_len=128, block_size=16))


@pytest.mark.parametrize("asked", [None, 1 << 22])
def test_an_engine_has_the_blocks_that_were_measured(
    pair: tuple[str, str], asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU of 16 MiB, as far as anybody can tell; what computes is the CPU."""
    steps: list[LargestStep] = []

    def measure(models: Sequence[Model], step: LargestStep) -> Measured:
        steps.append(step)
        return Measured(16 << 20, 1 << 20, 2 << 20)

    monkeypatch.setattr(kv_blocks, "measure", measure)
    monkeypatch.setattr(wiring, "choose_gpu", lambda name: Gpu("Pretended", (9, 0), 16 << 20, 15 << 20))
    monkeypatch.setattr(wiring, "GRAPH_RESERVE", 1 << 20)
    monkeypatch.setattr(backend, "load", lambda path, dtype, device, *rest: load_model(path, dtype, CPU))
    settings = EngineSettings(
        *pair, backend="torch", gpu_memory_utilization=0.5, kv_cache_memory=asked, take_memory=True, depth="2"
    )
    engine = build_engine(settings)
    per_block = 2 * (2 * 2 * 16 * 2 * 16 * 2)
    assert engine.scheduler.config.num_blocks == (asked or 4 << 20) // per_block
    assert steps == ([] if asked else [LargestStep(2048, 64 * 9, 512, 16)])
    [completion] = LLM.from_engine(engine).generate([(5, 6)], max_tokens=4, ignore_eos=True)
    assert len(completion.token_ids) == 4


def test_more_kv_memory_than_the_gpu_has(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "choose_gpu", lambda name: H100)
    with pytest.raises(InvalidArgument, match=r"kv_cache_memory = \d+: .* which is all that NVIDIA H100 has"):
        build_engine(EngineSettings(*pair, kv_cache_memory=81 * GIB))


def test_a_step_too_large_for_the_gpu(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(models: Sequence[Model], step: LargestStep) -> Measured:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kv_blocks, "measure", measure)
    monkeypatch.setattr(wiring, "choose_gpu", lambda name: H100)
    monkeypatch.setattr(backend, "load", lambda path, dtype, device, *rest: load_model(path, dtype, CPU))
    with pytest.raises(FailedPrecondition, match=r"too small for a step of max_num_batched_tokens = 2048 rows"):
        build_engine(EngineSettings(*pair))


def test_measuring_books_what_others_hold(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(Path(pair[0]), torch.float32, CPU)
    answers = {
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "synchronize": None,
        "max_memory_reserved": 20,
        "mem_get_info": (60, 100),
        "memory_reserved": 15,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(gpu_memory.torch.cuda, name, lambda *_, answer=answer: answer)
    found = gpu_memory.measure([model], LargestStep(32, 8, 64, 16))
    assert found == Measured(total=100, outside=25, peak=20)
