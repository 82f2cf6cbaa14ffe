"""The engines that are compared, each with its worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from protocol import Load
from worker import Worker, WorkerFailed

HERE = Path(__file__).parent
OFF, AUTO = "off", "auto"
OURS = "paceline"


@dataclass
class Engine:
    """One engine and its worker process, if it runs.

    Attributes:
        speculating_streams: most streams of one run with speculation; None for no limit.
        description: name and version, once it has been loaded.
    """

    name: str
    command: Sequence[str | Path]
    log: Path
    depths: tuple[str, ...]
    speculating_streams: int | None = None
    description: str = ""
    _worker: Worker | None = None
    _loaded: Load | None = None

    def supports(self, depth: str, streams: int) -> bool:
        limit = self.speculating_streams
        return depth in self.depths and (depth == OFF or limit is None or streams <= limit)

    def run(self, load: Load, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the token ids of each stream. Raises WorkerFailed; the next run starts another worker."""
        try:
            if self._worker is None:
                self._worker = Worker(self.command, self.log)
            if self._loaded != load:
                self.description = self._worker.ask({"load": asdict(load)})["engine"]
                self._loaded = load
            answer = self._worker.ask({"run": {"prompts": prompts, "max_tokens": max_tokens}})
        except WorkerFailed:
            self.close()
            raise
        if [len(token_ids) for token_ids in answer["token_ids"]] != [max_tokens] * len(prompts):
            raise WorkerFailed(f"not {max_tokens} tokens for each of {len(prompts)} prompts")
        return answer["seconds"], answer["token_ids"]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = self._loaded = None


def find_engines(names: Sequence[str], envs: Path, logs: Path, depths: Sequence[str]) -> tuple[list[Engine], list[str]]:
    """Those that are set up, and the names of those that are not."""
    fixed = tuple(depth for depth in depths if depth != AUTO)
    engines, missing = [], []
    for name in names:
        python = Path(sys.executable) if name == OURS else envs / name / "bin" / "python"
        if not python.exists():
            missing.append(name)
            continue
        engines.append(
            Engine(
                name,
                [python, HERE / f"worker_{name}.py"],
                logs / f"{name}.log",
                tuple(depths) if name == OURS else fixed,
                speculating_streams=1 if name == "transformers" else None,
            )
        )
    return engines, missing
