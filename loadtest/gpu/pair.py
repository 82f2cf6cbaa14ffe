"""The widened pair: checkpoints that `paceline.demo.widen` makes of the embedded one, kept from run to run."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from paceline import demo
from paceline.demo.widen import widen

# 7 and 1 billion parameters in bf16: 14 and 2 GB.
TARGET_SIZES = {"hidden": 4096, "layers": 32, "heads": 64, "kv_heads": 16, "intermediate": 14336}
DRAFT_SIZES = {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "intermediate": 8192}
BYTES = 18 << 30


def found_or_made(home: Path, device: str, say: Callable[[str], None]) -> tuple[Path, Path]:
    """Target and draft as an earlier run has left them there, or as this one makes them.

    Args:
        device: cuda or cpu, which makes them.
    """
    for source, sizes in ((demo.TARGET, TARGET_SIZES), (demo.DRAFT, DRAFT_SIZES)):
        path = home / source.name
        if (path / "config.json").exists():  # which is written last
            continue
        began = time.perf_counter()
        widen(source, path, **sizes, device=device)
        size = (path / "model.safetensors").stat().st_size
        say(f"{path}: {size / 1e9:.1f} GB made in {time.perf_counter() - began:.1f} s")
    return home / demo.TARGET.name, home / demo.DRAFT.name


def roomy() -> Path:
    """A RAM disk if it has room, which in containers it often has not; else where temporary files are.

    Raises:
        OSError: neither has room.
    """
    shared = Path("/dev/shm")
    for home in (shared, Path(tempfile.gettempdir())):
        made = home / "paceline-pair"
        if made.exists() or (home.is_dir() and shutil.disk_usage(home).free > BYTES):
            return made
    raise OSError(f"no room for {BYTES} bytes, neither in {shared} nor in {tempfile.gettempdir()}")
