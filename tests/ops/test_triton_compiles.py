"""Every kernel compiles for a GPU, where there is none: the interpreter takes more than the compiler does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")  # there is none but for Linux

PATHS = [str(Path(__file__).parents[1]), *filter(None, sys.path)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "support.compiling", str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said["launched"]) > 20
    assert said["compiled"] == said["launched"]
