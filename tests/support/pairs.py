"""A target and a draft that agree now and then."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.checkpoints import tiny_checkpoint


def tiny_pair(folder: Path, family: str = "llama", *, noise: float = 0.02, **overrides: Any) -> tuple[Path, Path]:
    """A tiny random target, and as its draft a copy with noise on every weight: the more, the fewer drafts are
    right.
    """
    target = tiny_checkpoint(folder / "target", family, **overrides)
    draft = folder / "draft"
    shutil.copytree(target, draft)
    generator = torch.Generator().manual_seed(99)
    tensors = load_file(target / "model.safetensors")
    noisy = {name: t + noise * torch.randn(t.shape, generator=generator).to(t.dtype) for name, t in tensors.items()}
    save_file(noisy, draft / "model.safetensors", metadata={"format": "pt"})
    return target, draft
