"""The main job on the embedded pair: a real server, concurrent streams over gRPC, and a table. `make demo` runs it."""

from __future__ import annotations

import asyncio
import sys
from statistics import median

import uvloop
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.client import AsyncClient, Completion
from paceline.demo.server import server
from paceline_loadtest import GrpcClient, LoadConfig, Report, RequestOptions, load_prompts, plan, run_load

STREAMS = 8
ROUNDS = 3
SHOWN = 3
PROMPTS = (
    "def fibonacci(n):",
    "class Stack:\n    def __init__(self):",
    '"""Utilities for reading and writing files.',
    "import os\nimport sys\n\ndef main():",
    "class StackTest(unittest.TestCase):\n    def test_empty(self):",
    "for name in sorted(os.listdir(path)):",
    "try:\n    import",
    "# Return the number of bytes",
)
CONSOLE = Console()


def main() -> int:
    return uvloop.run(_run())


async def _run() -> int:
    async with server("--model", "demo", "--draft", "demo") as target:
        CONSOLE.print(f"[bold]server[/] on {target}, embedded pair, {STREAMS} streams at once\n")
        async with AsyncClient(target) as client:
            await _show_texts(client)
            reports = await _measure(client)
    CONSOLE.print(_table(reports))
    return 0 if all(report.failed == 0 for rounds in reports.values() for report in rounds) else 1


async def _show_texts(client: AsyncClient) -> None:
    """Several completions of different lengths at once, and the first few of them."""
    calls = (
        client.complete(prompt, max_tokens=24 + 12 * index, temperature=0.0) for index, prompt in enumerate(PROMPTS)
    )
    completions: list[Completion] = await asyncio.gather(*calls)
    for prompt, completion in list(zip(PROMPTS, completions, strict=True))[:SHOWN]:
        CONSOLE.print(prompt, style="bold cyan", end="", markup=False, highlight=False)
        CONSOLE.print(completion.text, markup=False, highlight=False)
        CONSOLE.rule(style="dim")


async def _measure(client: AsyncClient) -> dict[str, list[Report]]:
    """The same load with speculation off and on, in turns."""
    reports: dict[str, list[Report]] = {"off": [], "auto": []}
    prompts = load_prompts()
    turns = [(number, mode) for number in range(ROUNDS) for mode in ("off", "auto")]
    for number, mode in track(turns, description="measuring", console=CONSOLE):
        options = RequestOptions(temperature=0.0, ignore_eos=True, speculation="off" if mode == "off" else "auto")
        config = LoadConfig(
            num_prompts=3 * STREAMS, max_concurrency=STREAMS, max_tokens=(32, 128), seed=number, options=options
        )
        reports[mode].append(await run_load(GrpcClient(client), plan(config, prompts)))
    return reports


def _table(reports: dict[str, list[Report]]) -> Table:
    table = Table(title=f"{STREAMS} concurrent streams of 32 to 128 tokens, medians of {ROUNDS} rounds in turns")
    for name in ("mode", "tok/s", "x off", "TTFT p50 ms", "TPOT p50 ms", "acceptance", "mean depth"):
        table.add_column(name, justify="right")
    off = median(report.output_throughput for report in reports["off"])
    for mode, rounds in reports.items():
        rate = median(report.output_throughput for report in rounds)
        drafted = [report.speculation for report in rounds if report.speculation is not None]
        table.add_row(
            mode,
            f"{rate:.0f}",
            f"{rate / off:.2f}",
            *(f"{median(report.distributions[name].p50 for report in rounds):.1f}" for name in ("ttft", "tpot")),
            f"{median(s.acceptance_rate for s in drafted):.2f}" if drafted else "",
            f"{median(s.mean_depth for s in drafted):.2f}" if drafted else "",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
