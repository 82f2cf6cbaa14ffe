"""The operations of sampling in Triton, for tensors of the CPU: on a GPU if there is one, else in its interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline_kernels.triton import sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def argmax(logits: Tensor) -> Tensor:
    return sampling.argmax(logits.to(DEVICE)).cpu()


def truncate_(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
) -> None:
    there = logits.to(DEVICE)
    sampling.truncate_(there, *(x.to(DEVICE) for x in (temperature, top_k, top_p, min_p, typical_p)))
    logits.copy_(there)


def softmax_(logits: Tensor, temperature: Tensor) -> None:
    there = logits.to(DEVICE)
    sampling.softmax_(there, temperature.to(DEVICE))
    logits.copy_(there)


def distribution_(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
) -> None:
    there = logits.to(DEVICE)
    sampling.distribution_(there, *(x.to(DEVICE) for x in (temperature, top_k, top_p, min_p, typical_p)))
    logits.copy_(there)


def gumbel_argmax(logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    return sampling.gumbel_argmax(logits.to(DEVICE), temperature.to(DEVICE), keys.to(DEVICE)).cpu()


def draw(weights: Tensor, u: Tensor) -> Tensor:
    return sampling.draw(weights.to(DEVICE), u.to(DEVICE)).cpu()
