"""Independent random streams from one engine seed, for requests that have no seed of their own."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Stream(enum.IntEnum):
    """Draft, acceptance and recovery noise must not be shared: under accept-if-u-below-ratio that biases the output."""

    DRAFT = 0
    ACCEPT = 1
    SAMPLE = 2


class Uniform:
    """A stream of numbers in [0, 1); the same seed gives the same numbers."""

    def __init__(self, seed: int, stream: Stream, device: torch.device) -> None:
        state = np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0]
        self._generator = torch.Generator(device).manual_seed(int(state) >> 1)

    def draw(self, shape: Sequence[int]) -> Tensor:
        """The next numbers, float64."""
        device = self._generator.device
        return torch.rand(tuple(shape), generator=self._generator, device=device, dtype=torch.float64)


class RejectionNoise:
    """What verification by rejection draws from."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._accept = Uniform(seed, Stream.ACCEPT, device)
        self._sample = Uniform(seed, Stream.SAMPLE, device)

    def accept(self, shape: Sequence[int]) -> Tensor:
        """One for each draft."""
        return self._accept.draw(shape)

    def sample(self, count: int) -> Tensor:
        """One for each recovered or bonus token."""
        return self._sample.draw((count,))
