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
from paceline.models.config import ModelConfig, load_model_config, read_json
from paceline.models.decoder import Decoder
from paceline.models.model import Slot
from paceline.models.native import NativeDecoder
from paceline_kernels import reference
from paceline_kernels.ops import Ops

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Old checkpoints carry the rotary frequencies, which follow from the config.
IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")


class Checkpoint:
    """The tensors of a model directory. Files are mapped while a tensor is read, and no longer: the pages of a mapping
    that were read once count as memory of the process.
    """

    def __init__(self, path: Path) -> None:
        """Raises ModelLoadError for a file that is missing, truncated or not safetensors."""
        self.path = path
        self._files: dict[str, Path] = {}  # tensor name -> the file it is in
        for file in _weight_files(path):
            try:
                self._files.update(dict.fromkeys(_open(file).keys(), file))
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{file}: cannot be read as safetensors: {error}") from error

    @property
    def names(self) -> Iterable[str]:
        """Every tensor that the files hold, in their order."""
        return self._files.keys()

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._files[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype a tensor is stored in. Raises ModelLoadError if it is missing or stored in another than these."""
        return _known_dtype(self.file(name), name, self._handle(name))

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """One tensor on the CPU, in the dtype it is stored in.

        Raises ModelLoadError, naming the file and the tensor, if it is missing or its shape or dtype is another.
        """
        expected = list(shape)
        handle = self._handle(name, f" of shape {expected}")
        found = list(handle.get_slice(name).get_shape())
        if found != expected:
            raise ModelLoadError(f"{self.file(name)}: {name}: found shape {found}, expected {expected}")
        _known_dtype(self.file(name), name, handle)
        return cast(Tensor, handle.get_tensor(name))

    def _handle(self, name: str, expected: str = "") -> Any:
        if name not in self._files:
            raise ModelLoadError(f"{self.path}: {name}: found in no file, expected a tensor{expected}")
        return _open(self._files[name])


def _open(file: Path) -> Any:
    return safe_open(file, framework="pt")


def _known_dtype(file: Path, name: str, handle: Any) -> torch.dtype:
    stored = handle.get_slice(name).get_dtype()
    if stored not in STORED_DTYPES:
        raise ModelLoadError(f"{file}: {name}: found dtype {stored}, expected one of {', '.join(STORED_DTYPES)}")
    return STORED_DTYPES[stored]


def load_model(
    path: Path, dtype: torch.dtype, device: torch.device, ops: Ops = reference, *, int8: bool = False
) -> Decoder:
    """Load a Hugging Face model directory and convert its weights to `dtype`, or matrices to 8 bits, on `device`,
    computing with `ops`.

    Raises:
        ModelLoadError: the directory cannot be served; names the file, the tensor and what was expected.
    """
    config = load_model_config(path)
    model = Decoder(config, dtype, device, ops, int8=int8)
    _fill(model.slots(), path, config)
    return model


def load_native(path: Path, dtype: torch.dtype, *, int8: bool = False) -> NativeDecoder:
    """The same into packed weights for the CPU, of `dtype` or of 8 bits.

    Raises:
        ModelLoadError: as `load_model`.
        BuildError: there is no native code on this machine; ask `paceline_kernels.cpu.decoder.available` first.
    """
    config = load_model_config(path)
    model = NativeDecoder(config, dtype, int8=int8)
    _fill(model.slots(), path, config)
    return model


def _fill(slots: dict[str, Slot], path: Path, config: ModelConfig) -> None:
    """Beside the model itself, memory holds one tensor of the checkpoint at a time."""
    checkpoint = Checkpoint(path)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name in checkpoint.names:
        if name not in slots and name not in tied and not IGNORED.search(name):
            file = checkpoint.file(name)
            raise ModelLoadError(f"{file}: {name}: unexpected: {config.architecture} as configured has no such tensor")
    for name, slot in slots.items():
        slot.fill(checkpoint.read(name, slot.shape))


def _weight_files(path: Path) -> list[Path]:
    if (path / SINGLE).exists():
        return [path / SINGLE]
    if not (path / INDEX).exists():
        raise ModelLoadError(f"{path}: found neither {SINGLE} nor {INDEX}; only safetensors checkpoints are supported")
    shards = read_json(path / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise ModelLoadError(f"{path / INDEX}: weight_map: expected an object of tensor names and file names")
    return [path / shard for shard in dict.fromkeys(shards.values())]
