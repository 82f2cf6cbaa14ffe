"""What the sections share: the pair of checkpoints, the ceilings and the engine, each made when first asked for."""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import device
import pair
import torch
from rich.table import Table
from scale import Scale

from paceline import demo
from paceline.bench.console import console
from paceline.bench.turns import Stream
from paceline.core.params import SamplingParams
from paceline.engine import Engine
from paceline.garbage import collect_rarely
from paceline.models import ModelConfig, load_model_config
from paceline.wiring import EngineSettings, build_engine

MOST_BUILDS = 3  # of an engine, which a section that failed has left in nobody knows which state
GREEDY = SamplingParams(temperature=0.0)


class Rig:
    """What the sections share, made when first asked for.

    Args:
        home: where the widened checkpoints are, or will be; None for where there is room.
    """

    def __init__(self, scale: Scale, home: Path | None) -> None:
        self.scale = scale
        self.device = device.device()
        self.console = console()
        self._home = home
        self._engine: Engine | None = None
        self._ceilings: device.Ceilings | None = None
        self._builds = 0
        self._random = random.Random(0)

    # -- what is made once --------------------------------------------------------------------------------------------

    @property
    def ceilings(self) -> device.Ceilings:
        if self._ceilings is None:
            self._ceilings = device.measure(self.device, self.scale.copied, self.scale.matmul)
        return self._ceilings

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            assert self._builds < MOST_BUILDS, "the engine was built too often"
            self._builds += 1
            _ = self.ceilings  # which need the memory that an engine takes
            target, draft = self.paths()
            began = time.perf_counter()
            self._engine = build_engine(self._settings(target, draft))
            collect_rarely()  # as a server does
            config = self._engine.scheduler.config
            self.say(
                f"engine: loaded, warmed up and priced in {time.perf_counter() - began:.1f} s, "
                f"{config.num_blocks * config.block_size} tokens of KV"
            )
        return self._engine

    def discard(self) -> None:
        """Forget the engine, which has failed."""
        self._engine = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _settings(self, target: Path, draft: Path) -> EngineSettings:
        return EngineSettings(
            model=str(target),
            draft=str(draft),
            max_num_seqs=max(*self.scale.concurrencies, *(streams for streams, _ in self.scale.batches)),
            max_num_batched_tokens=self.scale.max_num_batched_tokens,
            kv_cache_memory=self.scale.kv_bytes,
            gpu_memory_utilization=self.scale.memory,
        )

    def paths(self) -> tuple[Path, Path]:
        """Target and draft; made, or found as an earlier run has left them."""
        if not self.scale.is_widened:
            return demo.TARGET, demo.DRAFT
        return pair.found_or_made(self._home or pair.roomy(), self.device.type, self.say)

    @property
    def configs(self) -> tuple[ModelConfig, ModelConfig]:
        """The configs of target and draft."""
        target, draft = self.paths()
        return load_model_config(target), load_model_config(draft)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of weights and of KV: bf16, as the checkpoints are."""
        return torch.bfloat16.itemsize

    # -- streams ------------------------------------------------------------------------------------------------------

    def random_streams(self, count: int, length: int) -> list[Stream]:
        """Streams with random prompts, such that none begins like another, and no cache knows them."""
        vocab = range(self.engine.vocab_size)
        return [(tuple(self._random.choices(vocab, k=length)), GREEDY) for _ in range(count)]

    def held_out(self) -> list[tuple[int, ...]]:
        """The prompts that neither model was trained on, as ids."""
        lines = demo.HELD_OUT_PROMPTS.read_text(encoding="utf-8").splitlines()
        return [self.engine.tokenize(json.loads(line)["prompt"]) for line in lines]

    def rounds(self, least: int = 2) -> Iterator[int]:
        """Numbers of rounds, until the time of a part is over."""
        began, number = time.perf_counter(), 0
        while number < least or time.perf_counter() - began < self.scale.seconds:
            yield number
            number += 1

    # -- speaking -----------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)
        self.console.file.flush()

    def table(self, title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
        table = Table(title=title)
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)
        self.console.file.flush()
