"""The contract and what is generated from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "proto").rglob("*.proto"))


def test_generated_code_is_what_the_contract_generates(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    sources = [str(proto.relative_to(ROOT / "proto")) for proto in PROTOS]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", *outputs, *sources], cwd=ROOT, check=True)

    fresh = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.py*")}
    folders = {(ROOT / "scheduler" / path).parent for path in fresh}
    committed = {
        path.relative_to(ROOT / "scheduler"): path.read_bytes()
        for folder in folders
        for path in folder.glob("*.py*")
        if path.name != "__init__.py"
    }
    assert fresh.keys() == committed.keys()
    assert [path for path in fresh if fresh[path] != committed[path]] == [], "run `make proto`"


@pytest.mark.parametrize("folder", ["kernels", "proto"])
def test_a_source_root_is_not_a_package(folder: str) -> None:
    # transformers probes for a package named `kernels`, and proto-plus is imported as `proto`.
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_test_folder_is_called_kernels() -> None:
    assert not (ROOT / "tests" / "kernels").exists()
