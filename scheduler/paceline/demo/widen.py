"""Make a larger Llama checkpoint that computes the same function.

    python -m paceline.demo.widen SRC DST --hidden H --layers L --heads N --kv-heads G --intermediate I

A GPU makes billions of weights in seconds (`--device cuda`): what waits is then the file, best on a RAM disk.

A benchmark needs models of a real size, and speculation needs a draft that agrees with its target. Widening a trained
pair gives both: every engine runs the full size, at the acceptance of the small pair.

Hidden dimensions are padded with zeros, so the residual stream is the source's, then zeros. RMSNorm divides by the mean
over H instead of h dimensions: norm weights scaled by sqrt(h / H) and eps by h / H undo that (exactly, in any dtype, if
H = 4^n h). The source's layers are spread among identity layers, and padding heads and neurons compute zero.

Weights that only ever meet zeros hold noise, no larger than the absmax of the row they stand in or are modelled on. No
matrix is zero and no two are equal, because engines skip or share constants, which would flatter them:

    matrix         rows          columns of the source  columns of the padding
    q, k, gate     source        source                 noise                    the normed padding is zero
    q, k, gate     padding       noise                  noise                    what they compute meets a zero below
    v, up          source        source                 noise
    v, up          padding       zero                   noise                    so they compute zero
    o, down        source        source                 noise, or zero (1)
    o, down        padding       zero                   zero                     so the stream's padding stays zero

    (1) zero for a query head that shares a KV head with source heads but is none itself: it sees real values.

In an identity layer every row of v and up is a padding row; all the rest, o and down included, is noise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InvalidArgument, PacelineError
from paceline.models import Decoder, ModelConfig, load_model_config
from paceline.models.config import read_json
from paceline.models.loader import SINGLE, STORED_DTYPES, Checkpoint
from paceline.whole_file import whole_file

COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
STAGES = 4  # pieces of tensors that are on their way to the file
STAGE_BYTES = 32 << 20


def widen(
    source: Path,
    destination: Path,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Write to `destination` a checkpoint of the given sizes that computes what the one in `source` computes.

    The head dimension, the vocabulary and the dtype of the weights stay. Memory holds a few tensors at a time. The same
    arguments give the same bytes. Files of an earlier run in `destination` are replaced, config.json last.

    Args:
        device: "cpu" or "cuda", which makes the tensors. Of the same seed, each draws another noise.

    Raises:
        InvalidArgument: a size that the source cannot be widened to, a source that is no plain Llama, or a device that
            is not there.
        ModelLoadError: the source cannot be read.
    """
    if device != "cpu" and not (device == "cuda" and torch.cuda.is_available()):
        raise InvalidArgument("device", device, "cpu, or cuda on a machine that has it")
    config = load_model_config(source)
    wide = replace(
        config,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=intermediate,
        rms_norm_eps=config.rms_norm_eps * config.hidden_size / hidden,
    )
    _validate(config, wide)
    if destination.exists() and destination.samefile(source):
        raise InvalidArgument("destination", destination, "another directory than the source")
    checkpoint = Checkpoint(source)
    destination.mkdir(parents=True, exist_ok=True)
    (destination / "config.json").unlink(missing_ok=True)
    _write(_Widening(checkpoint, config, wide, seed, torch.device(device)), destination / SINGLE)
    for pattern in COPIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, destination / file.name)
    raw = read_json(source / "config.json") | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "head_dim": config.head_dim,
        "rms_norm_eps": wide.rms_norm_eps,
    }
    raw.pop("layer_types", None)  # one entry per layer; all the same in a Llama
    (destination / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def _validate(config: ModelConfig, wide: ModelConfig) -> None:
    if config.architecture != "LlamaForCausalLM":
        raise InvalidArgument("source.architecture", config.architecture, "LlamaForCausalLM")
    if config.attention_bias or config.mlp_bias:
        raise InvalidArgument("source.attention_bias or mlp_bias", True, "false")
    for field, value, least in (
        ("hidden", wide.hidden_size, config.hidden_size),
        ("layers", wide.num_layers, config.num_layers),
        ("heads", wide.num_heads, config.num_heads),
        ("kv_heads", wide.num_kv_heads, config.num_kv_heads),
        ("intermediate", wide.intermediate_size, config.intermediate_size),
    ):
        if value < least:
            raise InvalidArgument(field, value, f"at least the source's {least}")
    # Engines that derive head_dim from these two would otherwise get another one.
    if wide.hidden_size != wide.num_heads * config.head_dim:
        allowed = f"heads * the source's head_dim = {wide.num_heads} * {config.head_dim}"
        raise InvalidArgument("hidden", wide.hidden_size, allowed)
    ratio = config.num_heads // config.num_kv_heads
    if wide.num_heads % wide.num_kv_heads or wide.num_heads // wide.num_kv_heads < ratio:
        allowed = f"a divisor of heads = {wide.num_heads} that leaves at least the source's {ratio} heads to a KV head"
        raise InvalidArgument("kv_heads", wide.num_kv_heads, allowed)
    if wide.num_layers > config.num_layers and wide.hidden_size == config.hidden_size:
        allowed = f"the source's {config.num_layers} while hidden stays: identity layers need padding to hold noise"
        raise InvalidArgument("layers", wide.num_layers, allowed)


class _Widening:
    """The tensors of the wide checkpoint: their shapes at once, their values one by one."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, wide: ModelConfig, seed: int, device: torch.device
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._wide = wide
        self._seed = seed
        self.device = device
        self._source_sizes = _sizes(config)
        ratio, wide_ratio = config.num_heads // config.num_kv_heads, wide.num_heads // wide.num_kv_heads
        heads = torch.tensor([i // ratio * wide_ratio + i % ratio for i in range(config.num_heads)], device=device)
        self._q_rows = _elements(heads, config.head_dim)  # where the source's query heads go
        self._kv_rows = _elements(torch.arange(config.num_kv_heads, device=device), config.head_dim)
        self._neurons = torch.arange(config.intermediate_size, device=device)
        self._stream = torch.arange(config.hidden_size, device=device)
        self._tokens = torch.arange(config.vocab_size, device=device)
        # Query heads that attend with a KV head of the source without being one of its heads.
        sharing = torch.arange(config.num_kv_heads * wide_ratio, device=device)
        self._idle = _elements(sharing[~torch.isin(sharing, heads)], config.head_dim)

    def tensors(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of every tensor, in the order of the file."""
        for name, size in _sizes(self._wide).items():
            yield name, self._checkpoint.dtype(self._origin(name)[0]), size

    def value(self, name: str, dtype: torch.dtype, size: tuple[int, ...]) -> Tensor:
        """One tensor of the wide checkpoint."""
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little"))
        origin, real = self._origin(name)
        model = self._checkpoint.read(origin, self._source_sizes[origin]).to(self.device).float()
        kind = name.split(".")[-2]
        if kind == "embed_tokens":
            wide = torch.zeros(size, device=self.device)
            wide[:, : model.shape[1]] = model
        elif kind.endswith("norm"):
            wide = _noise(model, size, generator)
            if real:
                wide[: len(model)] = model
            # The noise too, which so stays below the absmax of the row.
            wide *= math.sqrt(len(model) / size[0])
        else:
            wide = self._matrix(kind, real, model, size, generator)
        return wide.to(dtype)

    def _origin(self, name: str) -> tuple[str, bool]:
        """The tensor of the source that `name` holds (True) or only takes the size of its noise from (False).

        Layers with the same `index * source layers // layers` form a run: the first is real, the others identities.
        """
        parts = name.split(".")
        if parts[1] != "layers":
            return name, True
        index, fewer, more = int(parts[2]), self._config.num_layers, self._wide.num_layers
        layer = index * fewer // more
        parts[2] = str(layer)
        return ".".join(parts), index == 0 or (index - 1) * fewer // more != layer

    def _matrix(
        self, kind: str, real: bool, model: Tensor, size: tuple[int, ...], generator: torch.Generator
    ) -> Tensor:
        """Spread `model` over a larger matrix and fill the rest as the table at the top says."""
        rows, columns = {
            "q_proj": (self._q_rows, self._stream),
            "k_proj": (self._kv_rows, self._stream),
            "v_proj": (self._kv_rows, self._stream),
            "o_proj": (self._stream, self._q_rows),
            "gate_proj": (self._neurons, self._stream),
            "up_proj": (self._neurons, self._stream),
            "down_proj": (self._stream, self._neurons),
            "lm_head": (self._tokens, self._stream),
        }[kind]
        # Row i of the padding is modelled on one of the source's rows, source rows on themselves.
        origin = torch.arange(size[0], device=self.device) % len(model)
        if real:
            origin[rows] = torch.arange(len(model), device=self.device)
        wide = _noise(model[origin], size, generator)
        if kind in ("v_proj", "up_proj"):
            wide[:, columns] = 0
        if real:
            if kind in ("o_proj", "down_proj"):
                wide[len(model) :] = 0
            if kind == "o_proj":
                wide[:, self._idle] = 0
            wide[rows[:, None], columns] = model
        return wide


def _noise(model: Tensor, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal noise of the root mean square of each row of `model`, cut at the row's absmax.  # [size] float32"""
    limit = model.abs().amax(-1, keepdim=True)
    scale = model.square().mean(-1, keepdim=True).sqrt()
    return torch.randn(size, generator=generator, device=model.device).mul_(scale).clamp_(-limit, limit)


def _sizes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint; on the meta device, so that none is allocated."""
    views = Decoder(config, torch.float32, torch.device("meta")).checkpoint_views()
    return {name: tuple(view.shape) for name, view in views.items()}


def _elements(heads: Tensor, head_dim: int) -> Tensor:
    """Indices of all elements of the given heads.  # [len(heads) * head_dim] int64"""
    return (heads[:, None] * head_dim + torch.arange(head_dim, device=heads.device)).flatten()


def _write(widening: _Widening, file: Path) -> None:
    """Stream the tensors to a safetensors file, which appears under its name once it is whole.

    The format: the header's length as 8 bytes, a JSON header with the place of each tensor, then their bytes.
    """
    names = {dtype: name for name, dtype in STORED_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, size in widening.tensors():
        begin, end = end, end + math.prod(size) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": size, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    with whole_file(file) as out:
        out.write(prefix)
        out.flush()
        out.truncate(len(prefix) + end)
        with _Writer(out.fileno(), len(prefix), widening.device) as writer:
            for name, dtype, size in widening.tensors():
                writer.append(widening.value(name, dtype, size))


class _Writer:
    """Appends tensors of a device to a file, which threads write while the next tensor is made.

    Their bytes go through a few buffers that are used again and again, pinned, as copies from a device are several
    times faster so.

    Args:
        file: a descriptor of it.
        offset: where the first tensor begins.
    """

    def __init__(self, file: int, offset: int, device: torch.device, stage_bytes: int = STAGE_BYTES) -> None:
        self._file = file
        self._offset = offset
        pinned = device.type == "cuda"
        self._stages = [torch.empty(stage_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(STAGES)]
        self._written: list[Future[None] | None] = [None] * STAGES
        self._turn = 0
        self._pool = ThreadPoolExecutor(STAGES, thread_name_prefix="paceline-widen")

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for what is under way. Raises OSError, as `append` does, if some of it was not written."""
        self._pool.shutdown()
        for written in self._written:
            if kind is None and written is not None:
                written.result()

    def append(self, tensor: Tensor) -> None:
        """Raises OSError, sometimes of a tensor before."""
        for piece in tensor.contiguous().flatten().view(torch.uint8).split(len(self._stages[0])):
            if (before := self._written[self._turn]) is not None:
                before.result()
            stage = self._stages[self._turn][: len(piece)]
            stage.copy_(piece)
            self._written[self._turn] = self._pool.submit(_write_at, self._file, stage, self._offset)
            self._offset += len(piece)
            self._turn = (self._turn + 1) % STAGES


def _write_at(file: int, data: Tensor, offset: int) -> None:
    """All of it: a single call may write less, and says what is wrong only the next time."""
    view = memoryview(data.numpy())
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m paceline.demo.widen",
        description="Make a larger Llama checkpoint that computes the same function.",
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="directory of a Llama checkpoint")
    parser.add_argument("destination", type=Path, metavar="DST", help="directory to write")
    for field in ("hidden", "layers", "heads", "kv-heads", "intermediate"):
        parser.add_argument(f"--{field}", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that makes the weights (default cpu)")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    try:
        widen(**vars(arguments))
        ratio = arguments.hidden / load_model_config(arguments.source).hidden_size
    except (PacelineError, OSError) as error:
        sys.exit(f"error: {error}")
    if math.frexp(math.sqrt(ratio))[0] != 0.5:  # no power of two
        print(f"note: hidden grows {ratio:g} times, not 4^n times: 16-bit norm weights are rounded", file=sys.stderr)


if __name__ == "__main__":
    main()
