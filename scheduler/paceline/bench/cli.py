"""`paceline bench ...`"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Measure the engine against itself, in one run.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Keeps `throughput` a subcommand while it is the only one."""


@app.command()
def throughput(
    model: Annotated[str, typer.Option(help="Model directory, or demo.")] = "demo",
    draft: Annotated[str, typer.Option(help="Draft directory, demo, ngram or none.")] = "demo",
    concurrency: Annotated[str, typer.Option(help="Streams at once, comma-separated.")] = "1,4,16",
    depth: Annotated[str, typer.Option(help="off, auto or fixed depths, comma-separated.")] = "off,2,4,auto",
    prompts: Annotated[Path | None, typer.Option(help='{"prompt": ...} or {"prompt_token_ids": [...]} a line.')] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Completion tokens of every stream.")] = 96,
    rounds: Annotated[
        int, typer.Option(min=1, help="Times that every cell is measured, in turn; medians are shown.")
    ] = 5,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
) -> None:
    """Throughput of the offline engine by concurrency and depth, decode alone and whole run, as ratios to depth off."""
    from paceline.bench.report import render, to_json
    from paceline.bench.throughput import measure, parse_depths, parse_sizes
    from paceline.core.params import SamplingParams
    from paceline.errors import InvalidArgument
    from paceline.wiring import EngineSettings, build_engine
    from paceline_loadtest.prompts import load_prompts

    sizes, depths = parse_sizes(concurrency), parse_depths(depth)
    try:
        texts = load_prompts(prompts)
    except OSError as error:
        raise InvalidArgument("prompts", str(prompts), f"a readable file ({error.strerror})") from error
    engine = build_engine(EngineSettings(model=model, draft=draft, dtype=dtype, max_num_seqs=max(64, *sizes)))
    cells = measure(engine, texts, sizes, depths, max_tokens, rounds, SamplingParams(temperature=temperature))
    render(cells, title=f"{model} with draft {draft}: {max_tokens} tokens a stream, medians of {rounds} rounds")
    if json_out is not None:
        settings = {"model": model, "draft": draft, "dtype": dtype, "max_tokens": max_tokens, "rounds": rounds}
        json_out.write_text(json.dumps(to_json(cells, settings), indent=2) + "\n")
