"""Keeps measured cost models from one start to the next, beside the compiled libraries.

One JSON file for each key. What cannot be read or kept is said once, as a warning, and does no harm: the costs are
measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.core.config import SchedulerConfig
from paceline.core.cost_model import CostModel
from paceline.whole_file import whole_file
from paceline_kernels.cpu.build import cache_folder, forget_oldest
from paceline_kernels.cpu.identity import cpu_name

logger = logging.getLogger(__name__)

FORMAT = 5  # of the file and of what is measured
MOST_KEPT = 64  # files, of checkpoints and limits that were tried once, too; a few kilobytes each


def key_of(
    config: SchedulerConfig,
    model: Path,
    draft: Path | None,
    *,
    dtype: str,
    quantization: str,
    draft_quantization: str,
    backend: str,
    threads: int,
    device: str,
) -> str:
    """All that measured costs depend on, as a hexadecimal digest.

    Args:
        model, draft: directories of the checkpoints.
        backend: what computes, by a name that changes with its code.
        threads: that compute.
        device: its name, as exact as can be had.

    Raises:
        OSError: a checkpoint cannot be read.
    """
    facts = {
        "format": FORMAT,
        "version": __version__,
        "model": _checkpoint(model),
        "draft": None if draft is None else _checkpoint(draft),
        "dtype": dtype,
        "quantization": quantization,
        "draft_quantization": draft_quantization,
        "backend": backend,
        "threads": threads,
        "device": device,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        # Not the number of blocks, which follows what memory is free.
        "limits": [
            config.block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            config.max_depth,
        ],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def load(key: str, *, drafts: bool) -> CostModel | None:
    """The model that was saved under a key; None if there is none that can be used.

    Args:
        drafts: it has to know what passes of a draft model cost.
    """
    folder = cache_folder()
    if folder is None:
        return None
    path = folder / _file(key)
    try:
        model = _read(json.loads(path.read_bytes()), key, drafts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("costs are measured again, %s is of no use: %s", path, error)
        return None
    with suppress(OSError):
        path.touch()  # those that were used last are kept
    return model


def save(key: str, model: CostModel) -> None:
    """Keep a model under a key, in place of another, and of the rest those that were used last. Where that cannot be
    done there is a warning.
    """
    folder = cache_folder()
    try:
        if folder is None:
            raise FileNotFoundError("this user has no home directory")
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / _file(key)) as file:
            file.write(json.dumps({"key": key, "costs": model.as_dict()}).encode())
    except OSError as error:
        logger.warning("measured costs cannot be kept, every start measures anew: %s", error)
        return
    forget_oldest(folder, _file("*"), MOST_KEPT)


def _file(key: str) -> str:
    return f"costs-{key[:16]}.json"


def _read(data: Any, key: str, drafts: bool) -> CostModel:
    if not isinstance(data, dict) or data.keys() != {"key", "costs"}:
        raise ValueError("it holds something else")
    if data["key"] != key:
        raise ValueError("it was measured for something else")
    model = CostModel.from_dict(data["costs"])
    if drafts and not data["costs"]["sequences"]:
        raise ValueError("it says nothing of passes of the draft model")
    return model


def _checkpoint(folder: Path) -> list[Any]:
    """What tells a checkpoint from another, without reading its weights."""
    config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    files = [(path.name, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    return [config, [[name, stat.st_size, stat.st_mtime_ns] for name, stat in files]]
