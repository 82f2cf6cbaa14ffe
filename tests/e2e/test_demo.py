"""`make demo`: a real server process, real gRPC, texts and a table."""

from __future__ import annotations

import re
import subprocess
import sys


def test_the_main_job() -> None:
    done = subprocess.run([sys.executable, "-m", "paceline.demo"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "def fibonacci(n):" in done.stdout
    assert re.findall(r"^│\s+(off|auto) │", done.stdout, re.MULTILINE) == ["off", "auto"]
    assert "tok/s" in done.stdout
    assert "TTFT" in done.stdout
