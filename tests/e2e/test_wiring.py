"""Settings that do not go together are refused in words, before anything is served."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import backend, kv_blocks, wiring
from paceline.core.speculation_counts import SpeculationCounts
from paceline.device import GIB, Needed
from paceline.errors import FailedPrecondition, InvalidArgument, ModelLoadError
from paceline.llm import LLM
from paceline.runner import KVCache, ModelRunner
from paceline.wiring import EngineSettings, build_engine, check_engine
from paceline_kernels.cpu import memory
from support.checkpoints import tiny_checkpoint
from support.native import device_of, needs_compiler
from support.pairs import tiny_pair

MIB = 1 << 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, draft = tiny_pair(tmp_path_factory.mktemp("pair"))
    return str(target), str(draft)


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"dtype": "int3"}, "dtype", "auto, float32 or bfloat16"),
        ({"depth": "deep"}, "depth", "auto, off or an integer"),
        ({"depth": "-1"}, "depth", "auto, off or an integer"),
        ({"max_model_len": 513}, "max_model_len", "between 2 and the model's length, 512"),
        ({"max_model_len": 1}, "max_model_len", "between 2 and"),
        ({"max_num_seqs": 0}, "max_num_seqs", ">= 1"),
        ({"block_size": 0}, "block_size", ">= 1"),
        ({"seed": -1}, "seed", ">= 0"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens", "at least max_num_seqs (64)"),
        ({"threads": 0}, "threads", "1..1024"),
        ({"threads": 1025}, "threads", "1..1024"),
        ({"backend": "cuda"}, "backend", "auto, native, torch, triton"),
        ({"device": "gpu"}, "device", "auto, cpu, cuda"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization", "above 0 and at most 1"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization", "above 0 and at most 1"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization", "above 0 and at most 1"),
        ({"quantization": "int4"}, "quantization", "none or int8"),
        ({"draft_quantization": "int4"}, "draft_quantization", "auto, none, int8"),
        ({"kv_cache_memory": 1000}, "kv_cache_memory", "for one request of max_model_len = 512"),
        ({"kv_cache_memory": "512MiB"}, "kv_cache_memory", "an integer or None"),
        ({"max_num_seqs": "4"}, "max_num_seqs", "an integer"),
        ({"max_num_seqs": True}, "max_num_seqs", "an integer"),
        ({"gpu_memory_utilization": "0.5"}, "gpu_memory_utilization", "a number"),
        ({"reproducible": "yes"}, "reproducible", "True or False"),
        ({"dtype": None}, "dtype", "text"),
        ({"depth": 4.0}, "depth", "text or an integer"),
        ({"depth": -1}, "depth", "auto, off or an integer"),
    ],
)
def test_settings(pair: tuple[str, str], settings: dict[str, object], field: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        build_engine(EngineSettings(model=pair[0], draft=pair[1], **settings))  # type: ignore[arg-type]
    assert caught.value.field == field
    assert words in str(caught.value)
    assert repr(next(iter(settings.values()))) in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("torch: can't allocate memory")],
)
def test_weights_for_which_there_is_no_memory(
    pair: tuple[str, str], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(backend, "load_native", no_memory)
    with pytest.raises(FailedPrecondition, match=r"do not fit into memory: .*allocate memory"):
        backend.load(Path(pair[0]), torch.float32, torch.device("cpu"), "native", "none")


def test_sampling_that_a_checkpoint_should_not_recommend(pair: tuple[str, str], tmp_path: Path) -> None:
    path = shutil.copytree(pair[0], tmp_path / "model")
    (path / "generation_config.json").write_text('{"top_p": 5}')
    with pytest.raises(ModelLoadError, match=r"model/generation_config\.json: sampling\.top_p = 5: must be in"):
        check_engine(EngineSettings(model=path))


def test_settings_may_be_numbers_of_numpy(pair: tuple[str, str]) -> None:
    llm = LLM(pair[0], max_num_seqs=np.int64(2), max_model_len=np.int32(32), watermark=np.float32(0))
    assert len(llm.generate(["a", "b"], max_tokens=2, ignore_eos=True)[1].token_ids) == 2


@pytest.mark.parametrize("field", ["model", "draft"])
def test_unknown_path(pair: tuple[str, str], field: str) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        build_engine(EngineSettings(**{"model": pair[0], field: "nowhere"}))


def test_another_vocabulary_size(pair: tuple[str, str], tmp_path: Path) -> None:
    draft = tiny_checkpoint(tmp_path / "draft", vocab_size=300)
    with pytest.raises(InvalidArgument, match="vocabulary size, 320; it has 300"):
        build_engine(EngineSettings(model=pair[0], draft=str(draft)))


def test_another_tokenizer(pair: tuple[str, str], tmp_path: Path) -> None:
    """Same sizes, but two ids mean each other's token."""
    draft = shutil.copytree(pair[1], tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidArgument, match="tokenizer; token 'a'"):
        build_engine(EngineSettings(model=pair[0], draft=str(draft)))


@pytest.mark.parametrize("length", [2, 8])
def test_the_shortest_models_start(pair: tuple[str, str], length: int) -> None:
    engine = build_engine(EngineSettings(model=pair[0], draft=pair[1], max_model_len=length))
    [completion] = LLM.from_engine(engine).generate([(5,)], max_tokens=1)
    assert len(completion.token_ids) == 1


def test_a_queue_of_one_is_enough_to_start(pair: tuple[str, str]) -> None:
    llm = LLM(pair[0], draft=pair[1], max_queued=1)
    assert len(llm.generate([(5,), (6,)], max_tokens=3, ignore_eos=True)) == 2


def test_settings_as_python_has_them() -> None:
    with pytest.raises(TypeError, match=r"unknown option max_num_sequences \(did you mean max_num_seqs\?\)"):
        LLM("demo", max_num_sequences=4)


def test_a_depth_may_be_a_number_and_models_paths(pair: tuple[str, str]) -> None:
    llm = LLM(Path(pair[0]), draft=Path(pair[1]), depth=3)
    [completion] = llm.generate([(5,)], max_tokens=8, temperature=0.0, ignore_eos=True)
    assert completion.stats.drafted_tokens > 0
    assert llm.engine.model_name == Path(pair[0]).name


def test_warming_up_teaches_nothing(pair: tuple[str, str]) -> None:
    engine = build_engine(EngineSettings(model=pair[0], draft=pair[1]))
    assert engine.scheduler.speculation.totals == SpeculationCounts()
    assert engine.totals.steps == 0


def test_depth_off_refuses_speculation_by_name(pair: tuple[str, str]) -> None:
    llm = LLM(pair[0], draft=pair[1], depth="off")
    with pytest.raises(FailedPrecondition, match=r"speculation.mode = draft_model"):
        llm.generate("x", speculation="draft_model")
    with pytest.raises(InvalidArgument, match=r"speculation.min_draft_tokens = 1: must be at most 0"):
        llm.generate("x", min_draft_tokens=1)


def test_a_lowest_depth_above_the_servers_is_refused(pair: tuple[str, str]) -> None:
    llm = LLM(pair[0], draft=pair[1])
    with pytest.raises(InvalidArgument, match=r"speculation.min_draft_tokens = 9: must be at most 8"):
        llm.generate("x", min_draft_tokens=9)
    with pytest.raises(InvalidArgument, match="speculation = 'psychic'"):
        llm.generate("x", speculation="psychic")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "block_size", "slots"),
    [
        ("torch", 16, 16),
        ("torch", 8, 8),
        pytest.param("native", 16, 16, marks=needs_compiler),
        pytest.param("native", 8, 16, marks=needs_compiler),  # a vector has 16 lanes
        pytest.param("native", 24, 32, marks=needs_compiler),
    ],
)
def test_kv_memory_becomes_blocks(pair: tuple[str, str], backend: str, block_size: int, slots: int) -> None:
    # For target and draft each: 2 layers x (K, V) x slots x 2 heads x 16 dims x 4 bytes.
    per_block = 2 * (2 * 2 * slots * 2 * 16 * 4)
    settings = EngineSettings(
        model=pair[0],
        draft=pair[1],
        dtype="float32",
        backend=backend,
        device=device_of(backend),
        block_size=block_size,
        kv_cache_memory=70 * per_block + 100,
    )
    engine = build_engine(settings)
    assert engine.scheduler.config.num_blocks == 70
    assert isinstance(engine.runner, ModelRunner)
    [(keys, values), *_] = caches = engine.runner.kv_cache
    assert (len(caches), len(keys), keys.nbytes, values.nbytes) == (2, 70, 70 * per_block / 8, 70 * per_block / 8)


@pytest.mark.parametrize("taken", [False, True])
def test_kv_memory_is_taken_at_start_if_asked(pair: tuple[str, str], taken: bool) -> None:
    size = 128 << 20
    gc.collect()
    first = build_engine(EngineSettings(*pair, device="cpu", kv_cache_memory=1 << 20, take_memory=taken))
    before = _resident_memory()
    second = build_engine(EngineSettings(*pair, device="cpu", kv_cache_memory=size, take_memory=taken))
    grown = _resident_memory() - before
    assert first.scheduler.config.num_blocks < second.scheduler.config.num_blocks
    assert grown >= 0.99 * size if taken else grown < 0.5 * size


def _resident_memory() -> int:
    """Bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("most", "taken"), [(str(64 << 20), 8 << 20), ("max", None), ("", None)])
def test_a_container_s_limit_bounds_kv_memory(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str, taken: int | None
) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text(f"{32 << 20}\n")
    if most:
        (tmp_path / "memory.max").write_text(f"{most}\n")
    engine = build_engine(
        EngineSettings(*pair, device="cpu", dtype="float32", max_num_seqs=1024, max_num_batched_tokens=2048)
    )
    assert isinstance(engine.runner, ModelRunner)
    held = sum(layer.nbytes for cache in engine.runner.kv_cache for layer in cache)
    assert held <= taken if taken is not None else held > 64 << 20


@pytest.mark.parametrize(
    ("free", "blocks"),
    [
        (7 * GIB, "7.06 GiB are needed, and 7.00 GiB are free: weights take 6.00 GiB, the draft's 1.00 GiB, the KV "),
        (7 * GIB + 64 * MIB, 64),  # of one request
        (8 * GIB, 256),  # a quarter of what weights leave
        (80 * GIB, 64 * 16),  # all that 16 requests can use
    ],
)
def test_weights_leave_memory_for_kv(free: int, blocks: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_blocks, "free_memory", lambda: free)
    needed = Needed(weights=6 * GIB, draft_weights=GIB, request=64 * MIB, max_model_len=1024)
    settings = EngineSettings(max_num_seqs=16)
    if isinstance(blocks, int):
        assert kv_blocks.choose_num_blocks(settings, MIB, needed, None) == blocks
        return
    with pytest.raises(FailedPrecondition) as caught:
        kv_blocks.choose_num_blocks(settings, MIB, needed, None)
    assert blocks in str(caught.value)


def test_too_little_memory_is_told_before_anything_is_loaded(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_blocks, "free_memory", lambda: 100_000)
    monkeypatch.delattr(backend, "load")
    settings = EngineSettings(*pair, device="cpu")
    for refuse in (check_engine, build_engine):
        with pytest.raises(FailedPrecondition, match=r"^this machine or its container is too small: "):
            refuse(settings)


def test_no_more_kv_memory_than_a_container_has(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{32 << 20}\n")
    build_engine(EngineSettings(*pair, device="cpu", kv_cache_memory=32 << 20))
    with pytest.raises(InvalidArgument, match=f"kv_cache_memory = {33 << 20}: must be at most {32 << 20} bytes, which"):
        build_engine(EngineSettings(*pair, device="cpu", kv_cache_memory=33 << 20))


def test_kv_memory_that_the_system_refuses(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(wiring, "KVCache", refuse)
    monkeypatch.setattr(refuse, "bytes_per_block", KVCache.bytes_per_block, raising=False)
    with pytest.raises(InvalidArgument, match=r"kv_cache_memory = None: must be a size .*Cannot allocate memory"):
        build_engine(EngineSettings(*pair))


def test_a_model_is_called_by_its_directory_unless_named(pair: tuple[str, str], tmp_path: Path) -> None:
    hub = tmp_path / "models--org--a-model" / "snapshots" / "0123abc"
    plain = tmp_path / "snapshots" / "mine"
    for directory in (hub, plain):
        shutil.copytree(pair[0], directory)
    names = [build_engine(EngineSettings(model=str(directory))).model_name for directory in (hub, plain)]
    assert names == ["org/a-model", "mine"]
    assert build_engine(EngineSettings(model=str(hub), served_model_name="x/y")).model_name == "x/y"


@pytest.mark.parametrize("name", ["", "two words", "x" * 129, "caf\u00e9"])
def test_names_that_no_model_may_have(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"served_model_name = .*: must be 1 to 128 printable ASCII characters"):
        build_engine(EngineSettings(served_model_name=name))


def test_what_was_chosen_is_logged(pair: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline.wiring"):
        engine = build_engine(EngineSettings(*pair, device="cpu", dtype="float32", backend="torch", depth="2"))
    first, last = (record for record in caplog.records if record.name == "paceline.wiring")
    assert first.getMessage() == f"loading model {pair[0]}, draft {pair[1]}"
    blocks = engine.scheduler.config.num_blocks
    assert isinstance(engine.runner, ModelRunner)
    assert last.getMessage() == (
        f"loaded: model = {engine.model_name}, dtype = float32, backend = torch on cpu, "
        f"threads = {torch.get_num_threads()}, "
        "quantization = none, draft_quantization = none, max_model_len = 512, "
        f"kv_blocks = {blocks}, kv_bytes = {blocks * 2 * 2 * 2 * 16 * 2 * 16 * 4}, drafters = ngram draft_model, "
        "default_drafter = draft_model, depth = 2"
    )
    assert vars(last)["fields"]["kv_blocks"] == blocks
