"""What there is to compute on, and whether it will do: said before any weights are loaded.

Everything that is known of a GPU is in `Gpu`, so that what follows from it can be tried without one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import torch

from paceline.errors import FailedPrecondition, InvalidArgument

DEVICES: Final = ("auto", "cpu", "cuda")
LEAST_CAPABILITY: Final = (8, 0)  # bf16 in the matrix units, and asynchronous copies: Ampere and later
HEAD_MULTIPLE, LARGEST_HEAD = 16, 256  # what a tile of the attention kernels can be
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as it was found, before anything of ours was on it.

    Attributes:
        capability: compute capability, (9, 0) for an H100.
        total_memory, free_memory: bytes; others may hold some.
        cuda: the version that torch was built for.
    """

    name: str
    capability: tuple[int, int]
    total_memory: int
    free_memory: int
    cuda: str = ""


def find_gpu() -> Gpu | str:
    """The GPU that torch would use, or why there is none, in words."""
    version = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        return f"{version} is a build for CPUs only; install one for CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # unlike is_available, it says what is wrong
        device = torch.device("cuda", torch.cuda.current_device())
        found = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError) as error:
        return f"{version}, built for CUDA {torch.version.cuda}, cannot use one: {_first_line(error)}"
    return Gpu(found.name, (found.major, found.minor), total, free, torch.version.cuda)


def choose_gpu(device: str) -> Gpu | None:
    """What the setting `device` comes to; None is the CPU.

    Raises:
        InvalidArgument: there is no such setting.
        FailedPrecondition: a GPU is asked for and there is none, or the one that there is is too old.
    """
    if device not in DEVICES:
        raise InvalidArgument("device", device, ", ".join(DEVICES))
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return None
    gpu = find_gpu()
    if isinstance(gpu, str):
        raise FailedPrecondition(f"device = {device}: there is no GPU to compute on: {gpu}")
    if gpu.capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, capability)) for capability in (gpu.capability, LEAST_CAPABILITY))
        raise FailedPrecondition(
            f"device = {device}: {gpu.name} has compute capability {found}, and {least} or more is needed; "
            "device = cpu serves without it"
        )
    return gpu


def triton_obstacle(gpu: Gpu | None) -> str | None:
    """Why Triton kernels cannot run, in words; None if they can."""
    if gpu is None and os.environ.get("TRITON_INTERPRET") != "1":
        return "it runs on GPUs only, and this server uses the CPU"
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    return None


def check_head_dim(field: str, model: object, head_dim: int) -> None:
    """Raises InvalidArgument where the attention kernels have no tile for the heads of the model that `field` names."""
    if head_dim % HEAD_MULTIPLE or head_dim > LARGEST_HEAD:
        sizes = f"a multiple of {HEAD_MULTIPLE} up to {LARGEST_HEAD}"
        raise InvalidArgument(
            field,
            model,
            f"of a head size that the triton backend takes, {sizes}; it is {head_dim}; backend = torch takes any",
        )


@dataclass(frozen=True, slots=True)
class Needed:
    """Bytes that serving takes at the least.

    Attributes:
        request: KV of one request of `max_model_len` tokens, the draft's included.
    """

    weights: int
    draft_weights: int
    request: int
    max_model_len: int

    def check(self, left: int, machine: str, why: str) -> None:
        """Raises FailedPrecondition, with the sizes, where these take more than the bytes that a machine has left."""
        total = self.weights + self.draft_weights + self.request
        if total > left:
            draft = f", the draft's {in_gib(self.draft_weights)}" if self.draft_weights else ""
            raise FailedPrecondition(
                f"{machine} is too small: {in_gib(total)} are needed, and {in_gib(left)} {why}: weights take "
                f"{in_gib(self.weights)}{draft}, the KV of one request of max_model_len = {self.max_model_len} "
                f"{in_gib(self.request)}; a shorter max_model_len or quantization = int8 takes less"
            )


def check_memory(gpu: Gpu, needed: Needed, utilization: float) -> None:
    """Raises FailedPrecondition, with the sizes, where the weights and one request cannot fit."""
    granted = min(int(gpu.total_memory * utilization), gpu.free_memory)
    why = (
        f"may be used (gpu_memory_utilization = {utilization:g} of {in_gib(gpu.total_memory)}, of which "
        f"{in_gib(gpu.free_memory)} are free)"
    )
    needed.check(granted, gpu.name, why)


def in_gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _first_line(error: BaseException) -> str:
    """The first line of what torch says: the rest is a stack, or advice for who builds it."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
