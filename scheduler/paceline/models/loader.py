"""Reading safetensors checkpoints, one tensor at a time, straight into the weights they belong to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import ModelLoadError
from paceline.models.config import load_model_config, read_json
from paceline.models.decoder import Decoder
from paceline_kernels import reference
from paceline_kernels.ops import Ops

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Old checkpoints carry the rotary frequencies, which follow from the config.
IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")


class Checkpoint:
    """The tensors of a model directory. Files are memory-mapped; only tensors that are read take memory."""

    def __init__(self, path: Path) -> None:
        """Raises ModelLoadError for a file that is missing, truncated or not safetensors."""
        self.path = path
        self._files: dict[str, Path] = {}  # tensor name -> the file it is in
        self._handles: dict[Path, Any] = {}
        for file in _weight_files(path):
            try:
                handle: Any = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{file}: cannot be read as safetensors: {error}") from error
            self._handles[file] = handle
            self._files.update(dict.fromkeys(handle.keys(), file))

    @property
    def names(self) -> Iterable[str]:
        """Every tensor that the files hold, in their order."""
        return self._files.keys()

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._files[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype a tensor is stored in. Raises ModelLoadError if it is missing or stored in another than these."""
        stored = self._handle(name).get_slice(name).get_dtype()
        if stored not in STORED_DTYPES:
            expected = ", ".join(STORED_DTYPES)
            raise ModelLoadError(f"{self.file(name)}: {name}: found dtype {stored}, expected one of {expected}")
        return STORED_DTYPES[stored]

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """One tensor on the CPU, in the dtype it is stored in.

        Raises ModelLoadError, naming the file and the tensor, if it is missing or its shape or dtype is another.
        """
        expected = list(shape)
        handle = self._handle(name, f" of shape {expected}")
        found = list(handle.get_slice(name).get_shape())
        if found != expected:
            raise ModelLoadError(f"{self.file(name)}: {name}: found shape {found}, expected {expected}")
        self.dtype(name)
        return cast(Tensor, handle.get_tensor(name))

    def _handle(self, name: str, expected: str = "") -> Any:
        if name not in self._files:
            raise ModelLoadError(f"{self.path}: {name}: found in no file, expected a tensor{expected}")
        return self._handles[self._files[name]]


def load_model(path: Path, dtype: torch.dtype, device: torch.device, ops: Ops = reference) -> Decoder:
    """Load a Hugging Face model directory and convert its weights to `dtype` on `device`, computing with `ops`.

    Beside the model itself, memory holds one tensor of the checkpoint at a time.

    Raises:
        ModelLoadError: the directory cannot be served; names the file, the tensor and what was expected.
    """
    config = load_model_config(path)
    checkpoint = Checkpoint(path)
    model = Decoder(config, dtype, device, ops)
    views = model.checkpoint_views()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name in checkpoint.names:
        if name not in views and name not in tied and not IGNORED.search(name):
            file = checkpoint.file(name)
            raise ModelLoadError(f"{file}: {name}: unexpected: {config.architecture} as configured has no such tensor")
    for name, view in views.items():
        view.copy_(checkpoint.read(name, view.shape))
    return model


def _weight_files(path: Path) -> list[Path]:
    if (path / SINGLE).exists():
        return [path / SINGLE]
    if not (path / INDEX).exists():
        raise ModelLoadError(f"{path}: found neither {SINGLE} nor {INDEX}; only safetensors checkpoints are supported")
    shards = read_json(path / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise ModelLoadError(f"{path / INDEX}: weight_map: expected an object of tensor names and file names")
    return [path / shard for shard in dict.fromkeys(shards.values())]
