"""Where the input of a launched step is laid out on the host, and where it lies on the device."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline_kernels.triton.state import StepInput

MAX_LAUNCHED: Final = 2  # steps that may be under way


class StepArrays:
    """The parts of a `StepInput` in host memory, as arrays of int32."""

    def __init__(self, step: StepInput) -> None:
        self.seats = _array(step.seats)
        self.num_tokens = _array(step.num_tokens)
        self.num_drafts = _array(step.num_drafts)
        self.num_read = _array(step.num_read)
        self.one_hot = _array(step.one_hot)
        self.looks_up = _array(step.looks_up)
        self.is_judged = _array(step.is_judged)
        self.query_starts = _array(step.query_starts)
        self.logit_starts = _array(step.logit_starts)
        self.row_sequences = _array(step.row_sequences)
        self.logit_sequences = _array(step.logit_sequences)
        self.draft_seats = _array(step.draft_seats)
        self.draft_depths = _array(step.draft_depths)
        self.read_seats = _array(step.read_seats)
        self.read_until = _array(step.read_until)
        self.read_starts = _array(step.read_starts)
        self.noise_key = _array(step.noise_key)

    def clear(self) -> None:
        """Fill in what stands for padding: a step in which nothing happens."""
        for array in (self.num_tokens, self.num_drafts, self.num_read, self.one_hot, self.looks_up, self.is_judged):
            array.fill(0)
        for array in (self.seats, self.row_sequences, self.logit_sequences, self.draft_seats, self.read_seats):
            array.fill(-1)
        for array in (self.query_starts, self.logit_starts, self.read_starts, self.read_until, self.draft_depths):
            array.fill(0)


class Stage:
    """Host memory in which a step's input is laid out, and its place on the device, which recorded steps read.

    Each of the steps that may be under way has host memory of its own.
    """

    def __init__(self, device: torch.device, most_seqs: int, most_rows: int) -> None:
        size = StepInput.size(most_seqs, most_seqs, most_rows)
        self._most_seqs = most_seqs
        self._here = [pinned(size, device) for _ in range(MAX_LAUNCHED)]
        self._there = torch.zeros(size, dtype=torch.int32, device=device)

    def begin(self, turn: int, num_seqs: int, num_rows: int) -> StepArrays:
        """Room for a step, filled with padding."""
        arrays = StepArrays(StepInput.view(self._here[turn], self._most_seqs, num_seqs, num_rows))
        arrays.clear()
        return arrays

    def send(self, turn: int, num_seqs: int, num_rows: int) -> StepInput:
        """What was laid out there, on the device, as soon as that comes to it."""
        size = StepInput.size(self._most_seqs, num_seqs, num_rows)
        self._there[:size].copy_(self._here[turn][:size], non_blocking=True)
        return StepInput.view(self._there, self._most_seqs, num_seqs, num_rows)


def pinned(size: int, device: torch.device) -> Tensor:
    """Host memory that the device can read and write by itself, [size] int32."""
    return torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")


def _array(tensor: Tensor) -> NDArray[np.int32]:
    """The same memory."""
    array: NDArray[np.int32] = tensor.numpy()
    return array
