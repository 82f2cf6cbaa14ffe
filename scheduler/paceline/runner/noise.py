"""Independent random streams from one engine seed."""

from __future__ import annotations

import enum

import numpy as np
import torch


class Stream(enum.IntEnum):
    """Draft, acceptance and recovery noise must not be shared: under accept-if-u-below-ratio that biases the output."""

    DRAFT = 0
    ACCEPT = 1
    SAMPLE = 2


def generator(seed: int, stream: Stream, device: torch.device) -> torch.Generator:
    """A generator of the stream; the same seed gives the same draws."""
    state = np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(state) >> 1)
