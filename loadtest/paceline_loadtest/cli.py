"""`paceline-loadtest`: load a server, show a table, write JSON."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.client import ClientOptions
from paceline.command_options import as_typed, client_options, with_options
from paceline.errors import InvalidArgument, NotWritten
from paceline.whole_file import check_file, write_json
from paceline_loadtest.clients import Client, open_client
from paceline_loadtest.metrics import Report, RequestRecord, summarize
from paceline_loadtest.prompts import Prompt, load_prompts
from paceline_loadtest.report import render, to_json
from paceline_loadtest.runner import run_load
from paceline_loadtest.workload import LoadConfig, RequestOptions, Speculation, Workload, plan

INTERRUPTED: Final = 130  # the exit code: 128 and the number of SIGINT, as shells have it

_T = TypeVar("_T")

app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # which show the values of variables, keys among them
)


def main() -> None:
    """The console script. Exits with 0, with 1 if every request failed, with 2 on a bad option or file, and with 130 if
    it was interrupted.
    """
    app()


def _pairs(entries: list[str]) -> dict[str, str]:
    pairs = [entry.partition("=") for entry in entries]
    for key, separator, _ in pairs:
        if not (key and separator):
            raise InvalidArgument("metadata", key, "KEY=VALUE")
    return {key: value for key, _, value in pairs}


def _token_range(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    try:
        return int(low), int(high if dash else low)
    except ValueError as error:
        raise InvalidArgument("max_tokens", text, "a number, or a range LOW-HIGH") from error


def _prompts(path: Path | None) -> tuple[Prompt, ...]:
    try:
        return load_prompts(path)
    except OSError as error:
        raise InvalidArgument("prompts", path, f"a readable file ({error.strerror})") from error


@app.command()
@with_options("connection", client_options)
def load(
    connection: Callable[[], ClientOptions],
    target: Annotated[str, typer.Option(help="Server, as HOST:PORT.")],
    request_rate: Annotated[float, typer.Option(help="Requests per second, or inf.")] = math.inf,
    burstiness: Annotated[float, typer.Option(help="Shape of the gaps: 1 is Poisson, inf is constant.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Most requests at once.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests to measure.")] = 64,
    num_warmups: Annotated[int, typer.Option(help="Requests before them, not measured.")] = 0,
    seed: Annotated[int, typer.Option(help="Of arrivals, order of prompts and lengths.")] = 0,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines of prompt or prompt_token_ids.")] = None,
    max_tokens: Annotated[str, typer.Option(help="Tokens to ask for: a number, or a range LOW-HIGH.")] = "128",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always generate the maximum.")] = False,
    speculation: Annotated[Speculation, typer.Option(help="Method the server may use.")] = "auto",
    timeout: Annotated[float | None, typer.Option(help="Deadline of each request in seconds.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the report here, as JSON.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(help="KEY=VALUE to put into the JSON; repeatable.")] = None,
) -> None:
    """Load a streaming LLM server and report latency, throughput and speculation.

    With --request-rate requests arrive at that rate, whatever the server does (open loop); with --max-concurrency
    alone each waits for one to end (closed loop); with both, arrivals queue for a free place. Ctrl-C ends the run, and
    what has ended by then is reported.
    """
    console = Console()
    date = datetime.now().astimezone()
    try:
        labels = {"target": target, **_pairs(metadata or [])}
        config = LoadConfig(
            num_prompts=num_prompts,
            num_warmups=num_warmups,
            request_rate=request_rate,
            burstiness=burstiness,
            max_concurrency=max_concurrency,
            max_tokens=_token_range(max_tokens),
            seed=seed,
            options=RequestOptions(temperature, ignore_eos, speculation, timeout),
        )
        if json_out is not None:
            check_file("json", json_out)
        client = open_client(target, **connection())
        workload = plan(config, _prompts(prompts))
        report = _event_loop()(_run(client, workload))
        console.print(render(report))
        if json_out is not None:
            write_json(json_out, to_json(report, date=date, metadata=labels))
    except (InvalidArgument, OSError) as error:
        _complain(error)
        raise typer.Exit(2) from error
    except NotWritten as error:
        _complain(error)
        raise typer.Exit(1) from error
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if report.completed == 0:
        raise typer.Exit(1)


def _complain(error: Exception) -> None:
    Console(stderr=True).print(f"error: {as_typed(error)}", style="red", markup=False, highlight=False, soft_wrap=True)


async def _run(client: Client, workload: Workload) -> Report:
    """The report, of as much as there is when Ctrl-C cancels this."""
    records: list[RequestRecord] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with aclosing(client):
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("requests", total=len(workload.requests))

            def on_record(record: RequestRecord) -> None:
                records.append(record)
                progress.advance(task)

            try:
                return await run_load(client, workload, on_record=on_record)
            except asyncio.CancelledError:
                records.sort(key=lambda record: record.index)
                return summarize(workload.config, records, interrupted=True)


def _event_loop() -> Callable[[Coroutine[Any, Any, _T]], _T]:
    """What runs the program: uvloop where it is installed, for it takes less of the machine under test."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run
