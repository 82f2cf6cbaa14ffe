"""Which backend computes; where the native one cannot, torch does, and what only the native one can do is refused."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline import wiring
from paceline.core.method import Method
from paceline.device import Gpu
from paceline.engine import Engine
from paceline.errors import FailedPrecondition
from paceline.llm import LLM
from paceline.models import Decoder, NativeDecoder
from paceline.runner import ModelRunner
from paceline.speculation import DraftModel
from paceline.wiring import EngineSettings, build_engine
from paceline_kernels.cpu import build, decoder, sampling
from support.native import needs_compiler, threads
from support.pairs import tiny_pair

PROMPTS = [(3, 1, 4, 1, 5), (9,), tuple(range(40, 70))]
TOKENS = 12
BROKEN = {"no compiler": "no-such-compiler", "a compiler that fails": shutil.which("false") or "false"}
H100 = Gpu("NVIDIA H100", (9, 0), 80 << 30, 79 << 30)
NATIVE_ONLY: list[dict[str, Any]] = [
    {"backend": "native"},
    {"reproducible": True},
    {"quantization": "int8"},
    {"draft_quantization": "int8"},
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, draft = tiny_pair(tmp_path_factory.mktemp("pair"))
    return str(target), str(draft)


@pytest.fixture
def _nothing_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process on a new machine."""
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_told", [])
    for loaded in (build._found, decoder._library, sampling._library):
        loaded.cache_clear()
    yield
    for loaded in (build._found, decoder._library, sampling._library):
        loaded.cache_clear()


def settings(pair: tuple[str, str], **more: Any) -> EngineSettings:
    wanted = {"device": "cpu", "dtype": "float32", "max_model_len": 128, **more}
    return EngineSettings(model=pair[0], draft=pair[1], **wanted)


def target_of(found: EngineSettings) -> object:
    runner = build_engine(found).runner
    assert isinstance(runner, ModelRunner)
    return runner.model


@needs_compiler
def test_auto_is_native(pair: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(target_of(settings(pair)), NativeDecoder)
    assert isinstance(target_of(settings(pair, backend="torch")), Decoder)
    assert [record for record in caplog.records if record.name == "paceline.backend"] == []


@pytest.mark.usefixtures("_nothing_loaded")
@pytest.mark.parametrize("compiler", BROKEN.values(), ids=BROKEN)
def test_without_it_torch_serves_and_says_so_once(
    pair: tuple[str, str], compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(build.COMPILER_VARIABLE, compiler)
    engine = build_engine(settings(pair, depth="3"))
    completions = LLM.from_engine(engine).generate(PROMPTS, temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    [warning] = [record for record in said if "compiling" not in record.getMessage()]
    assert warning.name == "paceline.backend"
    assert compiler in warning.getMessage()
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
        assert list(completion.token_ids) == expected[0, len(prompt) :].tolist()
        assert completion.stats.drafted_tokens > 0


@pytest.mark.usefixtures("_nothing_loaded")
@pytest.mark.parametrize("asked", NATIVE_ONLY, ids=str)
@pytest.mark.parametrize("compiler", BROKEN.values(), ids=BROKEN)
def test_what_only_it_can_do_is_refused_without_a_compiler(
    pair: tuple[str, str], compiler: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(build.COMPILER_VARIABLE, compiler)
    assert_refused(settings(pair, **asked), asked, compiler)


@pytest.mark.parametrize("asked", NATIVE_ONLY[1:], ids=str)
def test_what_only_it_can_do_is_refused_in_torch(pair: tuple[str, str], asked: dict[str, Any]) -> None:
    assert_refused(settings(pair, backend="torch", **asked), asked, "backend = torch")


@pytest.mark.parametrize("asked", [{"backend": "native"}, {"reproducible": True}], ids=str)
def test_what_only_it_can_do_is_refused_on_a_gpu(
    pair: tuple[str, str], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "choose_gpu", lambda device: H100)
    assert_refused(settings(pair, **asked), asked, "CPUs only, and this server uses cuda")


def test_triton_is_refused_on_a_cpu(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    asked = {"backend": "triton"}
    assert_refused(settings(pair, **asked), asked, "GPUs only, and this server uses the CPU")


def assert_refused(wanted: EngineSettings, asked: dict[str, Any], reason: str) -> None:
    """By the name of what was asked for, with the reason."""
    with pytest.raises(FailedPrecondition) as caught:
        build_engine(wanted)
    [(name, value)] = asked.items()
    assert str(caught.value).startswith(name if value is True else f"{name} = {value}")
    assert reason in str(caught.value)


@needs_compiler
@pytest.mark.parametrize("quantized", [("int8", "none"), ("none", "int8"), ("int8", "int8")])
def test_weights_of_8_bits_are_asked_for_one_by_one(pair: tuple[str, str], quantized: tuple[str, str]) -> None:
    """And what the draft's are changes no greedy token."""
    target, draft = quantized
    engine = build_engine(settings(pair, depth="3", quantization=target, draft_quantization=draft))
    alone = build_engine(settings(pair, depth="off", quantization=target))
    found, expected = (
        [c.token_ids for c in LLM.from_engine(made).generate(PROMPTS, temperature=0.0, max_tokens=TOKENS)]
        for made in (engine, alone)
    )
    assert found == expected
    assert models_of(engine) == [target == "int8", draft == "int8"]


@needs_compiler
@pytest.mark.parametrize(("dtype", "int8"), [("bfloat16", True), ("float32", False)])
def test_a_bfloat16_draft_has_8_bits_unless_told_otherwise(pair: tuple[str, str], dtype: str, int8: bool) -> None:
    assert models_of(build_engine(settings(pair, dtype=dtype))) == [False, int8]
    assert models_of(build_engine(settings(pair, dtype=dtype, draft_quantization="none"))) == [False, False]
    assert not models_of(build_engine(settings(pair, dtype=dtype, backend="torch")))


def models_of(engine: Engine) -> list[bool]:
    """Whether the weights of target and draft have 8 bits each; empty of models that are not the native backend's."""
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    draft = runner.drafters[Method.DRAFT_MODEL]
    assert isinstance(draft, DraftModel)
    return [model.int8 for model in (runner.model, draft.model) if isinstance(model, NativeDecoder)]


def test_threads_are_those_asked_for(pair: tuple[str, str]) -> None:
    with threads(2):
        build_engine(settings(pair, threads=1))
        assert torch.get_num_threads() == 1
