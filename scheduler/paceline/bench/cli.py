"""`paceline bench ...`"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from paceline.command_options import parse_size
from paceline.errors import InvalidArgument, NotWritten
from paceline.whole_file import check_file, write_json


def check_output(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Check an option that names a file to write. Raises InvalidArgument, before anything is measured for it."""
    if path is not None:
        check_file(option.opts[0].removeprefix("--"), path)
    return path


def check_plot(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """The same, of a PNG file. Raises InvalidArgument without what draws it, too."""
    check_output(option, path)
    if path is not None:
        from paceline.sim.report import require_plots

        require_plots(path)
    return path


def check_temperature(value: float) -> float:
    """Raises InvalidArgument, before an engine is built for it."""
    if not 0.0 <= value < math.inf:
        raise InvalidArgument("temperature", value, "a finite number >= 0")
    return value


Model = Annotated[str, typer.Option(help="Model directory, or demo.")]
Draft = Annotated[str, typer.Option(help="Draft directory, demo, ngram or none.")]
DraftModel = Annotated[str, typer.Option(help="Draft directory, or demo.")]
Concurrency = Annotated[str, typer.Option(help="Streams at once, comma-separated.")]
Streams = Annotated[int, typer.Option(min=1, help="Requests at once.")]
Depth = Annotated[str, typer.Option(help="off, auto or fixed depths, comma-separated.")]
FixedDepth = Annotated[int, typer.Option(min=1, help="Drafts of every step.")]
StreamTokens = Annotated[int, typer.Option(min=2, help="Completion tokens of every stream.")]
RequestTokens = Annotated[int, typer.Option(min=2, help="Completion tokens of every request.")]
DraftedTokens = Annotated[int, typer.Option(min=3, help="Completion tokens of every request; of 2 none is drafted.")]
Rounds = Annotated[int, typer.Option(min=1, help="Times that every cell is measured; medians are shown.")]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
Drafter = Annotated[
    str,
    typer.Option(
        "--method",
        help="draft_model or ngram: the only drafter of auto and fixed depths; auto: auto has all that there are, "
        "and fixed depths draft with the model if there is one.",
    ),
]
Synthetic = Annotated[
    str | None,
    typer.Option(help="Keep drafts with this probability instead of the models'; several: requests in turn."),
]
Temperature = Annotated[float, typer.Option(callback=check_temperature, help="0 is greedy.")]
JsonOut = Annotated[
    Path | None,
    typer.Option("--json", callback=check_output, help="Write everything measured to this file."),
]

app = typer.Typer(help="Measure the engine against itself, in one run.", no_args_is_help=True)


@app.command(short_help="Decode and whole runs by streams and depth.")
def throughput(
    model: Model = "demo",
    draft: Draft = "demo",
    concurrency: Concurrency = "1,4,16",
    depth: Depth = "off,2,4,auto",
    prompts: Annotated[Path | None, typer.Option(help='{"prompt": ...} or {"prompt_token_ids": [...]} a line.')] = None,
    max_tokens: StreamTokens = 96,
    rounds: Rounds = 5,
    dtype: Dtype = "auto",
    temperature: Temperature = 0.0,
    json_out: JsonOut = None,
) -> None:
    """Throughput of the offline engine by concurrency and depth, decode alone and whole run, as ratios to depth off."""
    from paceline.bench.depth_names import parse_depths
    from paceline.bench.number_lists import parse_sizes
    from paceline.bench.report import render, to_json
    from paceline.bench.throughput import measure
    from paceline.core.params import SamplingParams
    from paceline.wiring import EngineSettings, build_engine
    from paceline_loadtest.prompts import load_prompts

    sizes, depths = parse_sizes(concurrency), parse_depths(depth)
    try:
        texts = load_prompts(prompts)
    except OSError as error:
        raise InvalidArgument("prompts", prompts, f"a readable file ({error.strerror})") from error
    engine = build_engine(
        EngineSettings(model=model, draft=draft, dtype=dtype, max_num_seqs=max(64, *sizes), prefix_cache="off")
    )
    cells = measure(engine, texts, sizes, depths, max_tokens, rounds, SamplingParams(temperature=temperature))
    render(cells, title=f"{model} with draft {draft}: {max_tokens} tokens a stream, medians of {rounds} rounds")
    if json_out is not None:
        settings = {"model": model, "draft": draft, "dtype": dtype, "max_tokens": max_tokens, "rounds": rounds}
        write_json(json_out, to_json(cells, settings))


@app.command(short_help="Cost of sampling, in reads of its logits.")
def sampling(
    requests: Annotated[int, typer.Option(min=1, help="Sequences in the step.")] = 64,
    depth: Annotated[int, typer.Option(min=1, help="Drafts of each.")] = 4,
    vocab: Annotated[int, typer.Option(min=2, help="Tokens in the vocabulary.")] = 151_936,
    rounds: Annotated[int, typer.Option(min=1, help="Times that every case is measured; medians are shown.")] = 7,
) -> None:
    """Cost of sampling and verifying one step, as a ratio to one read of its logits (and of q, where it is used)."""
    from paceline.bench.sampling import measure, render

    render(measure(requests, depth, vocab, rounds), title=f"{requests} requests, depth {depth}, vocabulary {vocab}")


@app.command(short_help="Drafts kept by each verification rule.")
def acceptance(
    model: Model = "demo",
    draft: DraftModel = "demo",
    temperatures: Annotated[str, typer.Option(help="Above 0, comma-separated.")] = "0.7,1.0",
    depth: FixedDepth = 4,
    max_tokens: DraftedTokens = 96,
    samples: Annotated[int, typer.Option(min=1, help="Completions of every prompt under each rule.")] = 8,
) -> None:
    """Drafts kept by each verification rule, with 95 % intervals over requests."""
    from paceline.bench.acceptance import measure, parse_temperatures, render
    from paceline.bench.depth_names import check_depth
    from paceline.wiring import EngineSettings, build_engine
    from paceline_loadtest.prompts import load_prompts

    if draft in ("none", "ngram"):
        raise InvalidArgument("draft", draft, "a directory or demo: rules are compared by what a model drafts")
    check_depth(depth)
    values = parse_temperatures(temperatures)
    engine = build_engine(EngineSettings(model=model, draft=draft, dtype="float32", prefix_cache="off"))
    cells = measure(engine, load_prompts(None), values, depth, max_tokens, samples)
    render(cells, title=f"{model} with draft {draft}, depth {depth}, {len(cells[0].tallies)} requests a rule")


@app.command(short_help="What a JSON schema adds to a step.")
def grammar(
    model: Model = "demo",
    draft: Draft = "demo",
    depth: Depth = "off,4",
    streams: Streams = 16,
    max_tokens: RequestTokens = 128,
    rounds: Rounds = 5,
    dtype: Dtype = "auto",
) -> None:
    """What a JSON schema adds to the time of a step, against the same streams without one."""
    from paceline.bench.console import num_streams
    from paceline.bench.depth_names import parse_depths
    from paceline.bench.grammar import measure, render
    from paceline.wiring import EngineSettings, build_engine
    from paceline_loadtest.prompts import load_prompts

    depths = parse_depths(depth)
    engine = build_engine(EngineSettings(model=model, draft=draft, dtype=dtype, prefix_cache="off"))
    cells = measure(engine, load_prompts(None), depths, streams, max_tokens, rounds)
    render(cells, title=f"{model} with draft {draft}, {num_streams(streams)}")


@app.command(short_help="auto against fixed depths and other rules.")
def depth(
    model: Model = "demo",
    draft: Draft = "demo",
    concurrency: Concurrency = "1,2,4,8,16,32",
    depths: Annotated[
        str, typer.Option("--depth", help="off, auto, other fixed depths and names of baselines, comma-separated.")
    ] = "off,1,2,3,4,5,6,7,8,auto",
    method: Drafter = "auto",
    max_tokens: StreamTokens = 96,
    prompts_per_cell: Annotated[
        int, typer.Option(min=1, help="Streams of every repetition, at least; served in batches of the concurrency.")
    ] = 8,
    explore: Annotated[
        int, typer.Option(min=1, help="Repetitions with every setting, to choose the best fixed depth.")
    ] = 1,
    rounds: Annotated[
        int, typer.Option(min=2, help="Repetitions after that with auto, off and the best fixed depth, in turn.")
    ] = 6,
    dtype: Dtype = "auto",
    temperature: Temperature = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of the first sampled stream, others count up: all settings emit the same tokens."),
    ] = None,
    mixed: Annotated[
        bool,
        typer.Option("--mixed", help="Half of the streams copy, half are wild; fixed depths draft by the model."),
    ] = False,
    synthetic: Synthetic = None,
    json_out: JsonOut = None,
) -> None:
    """The adaptive depth against the best fixed one, no drafts, and other rules: decode alone, of the same streams."""
    from paceline.bench.depth import describe, measure, render, to_json
    from paceline.bench.number_lists import parse_sizes
    from paceline.bench.setting import default_method, parse_method, parse_settings
    from paceline.bench.synthetic import decree, parse_rates
    from paceline.core.params import SamplingParams
    from paceline.wiring import EngineSettings, build_engine
    from paceline_loadtest.prompts import load_prompts

    if mixed and seed is not None:
        raise InvalidArgument("seed", seed, "none with --mixed, whose streams have no seeds")
    sizes, drafter = parse_sizes(concurrency), parse_method(method)
    fixed_drafter = drafter or (None if mixed else default_method(draft))
    settings = parse_settings(depths, fixed_drafter, drafter)
    rates = None if synthetic is None else parse_rates(synthetic)
    most = max(64, *sizes)
    engine = build_engine(EngineSettings(model=model, draft=draft, dtype=dtype, max_num_seqs=most, take_memory=True))
    sampling = None if mixed else SamplingParams(temperature=temperature, seed=seed)
    seeded = "" if seed is None else f", seeds from {seed}"
    kind = "copying and wild streams" if mixed else f"temperature {temperature}{seeded}"
    title = f"{model} with draft {draft}, method {method}, {kind}: {max_tokens} tokens a stream"
    if rates is not None:
        decree(engine, rates)
        title = f"SYNTHETIC ACCEPTANCE {synthetic}: {title}"
    described = {
        "model": model,
        "draft": draft,
        "method": method,
        "dtype": dtype,
        "streams": kind,
        "max_tokens": max_tokens,
        "prompts_per_cell": prompts_per_cell,
        "explore": explore,
        "rounds": rounds,
        "synthetic_acceptance": synthetic,
    }
    cells = []
    for cell in measure(
        engine, load_prompts(None), sizes, settings, max_tokens, prompts_per_cell, explore, rounds, sampling
    ):
        cells.append(cell)
        typer.echo(describe(cell), err=True)
        if json_out is not None:  # anew for each: what a run has measured outlives it
            with suppress(NotWritten):  # which the last one tells
                write_json(json_out, to_json(cells, described))
    render(cells, title=title)
    if json_out is not None:
        write_json(json_out, to_json(cells, described))


@app.command(short_help="Load that swings between few and many streams.")
def swing(
    model: Model = "demo",
    draft: Draft = "demo",
    low: Annotated[int, typer.Option(min=1, help="Streams in the first phase, the third, ...")] = 1,
    high: Annotated[int, typer.Option(min=1, help="Streams in the second phase, the fourth, ...")] = 32,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of every phase.")] = 20.0,
    swings: Annotated[int, typer.Option(min=1, help="Pairs of phases.")] = 2,
    depths: Annotated[
        str, typer.Option("--depth", help="off, auto, other fixed depths and names of baselines, comma-separated.")
    ] = "off,1,2,3,4,5,6,auto",
    method: Drafter = "auto",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="To which prompts are cut.")] = 64,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Of the longest stream, after which a new one begins; others have half or more.")
    ] = 256,
    dtype: Dtype = "auto",
    temperature: Temperature = 0.0,
    synthetic: Synthetic = None,
    json_out: JsonOut = None,
) -> None:
    """Load that swings between few streams and many: does the depth follow, and what is lost meanwhile?"""
    from paceline.bench.setting import default_method, parse_method, parse_settings
    from paceline.bench.swing import measure, render, to_json
    from paceline.bench.synthetic import decree, parse_rates
    from paceline.core.params import SamplingParams
    from paceline.wiring import EngineSettings, build_engine
    from paceline_loadtest.prompts import load_prompts

    drafter = parse_method(method)
    settings = parse_settings(depths, drafter or default_method(draft), drafter)
    rates = None if synthetic is None else parse_rates(synthetic)
    if rates is not None and len(rates) > 1:
        raise InvalidArgument("synthetic", synthetic, "one probability here: settings take turns, and so would rates")
    most = max(64, low, high)
    engine = build_engine(
        EngineSettings(model=model, draft=draft, dtype=dtype, max_num_seqs=most, prefix_cache="off", take_memory=True)
    )
    title = f"{model} with draft {draft}, method {method}, temperature {temperature}: {seconds:g} s a phase"
    if rates is not None:
        decree(engine, rates)
        title = f"SYNTHETIC ACCEPTANCE {synthetic}: {title}"
    sampling = SamplingParams(temperature=temperature)
    sizes = [low, high] * swings
    rides = measure(engine, load_prompts(None), settings, sizes, seconds, prompt_tokens, max_tokens, sampling)
    render(rides, title)
    if json_out is not None:
        described = {
            **{"model": model, "draft": draft, "method": method, "dtype": dtype, "temperature": temperature},
            **{"seconds": seconds, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens},
            "synthetic_acceptance": synthetic,
        }
        write_json(json_out, to_json(rides, described))


@app.command(short_help="Acceptance as predicted, against observed.")
def calibration(
    model: Model = "demo",
    draft: Annotated[str, typer.Option(help="Draft directory, demo or ngram.")] = "demo",
    streams: Streams = 16,
    max_tokens: RequestTokens = 96,
    dtype: Dtype = "auto",
    temperature: Temperature = 0.0,
    json_out: JsonOut = None,
    plot_out: Annotated[
        Path | None,
        typer.Option("--plot", callback=check_plot, help="Write both curves to this PNG file; needs paceline[plots]."),
    ] = None,
) -> None:
    """The acceptance that was predicted before each step, against what was observed after it."""
    from paceline.bench.calibration import measure, plot, render, to_json
    from paceline.core.params import SamplingParams
    from paceline.wiring import EngineSettings, build_engine
    from paceline_loadtest.prompts import load_prompts

    if draft == "none":
        raise InvalidArgument("draft", draft, "a directory, demo or ngram: without drafts nothing is predicted")
    engine = build_engine(
        EngineSettings(model=model, draft=draft, dtype=dtype, max_num_seqs=streams, prefix_cache="off")
    )
    measured = measure(engine, load_prompts(None), max_tokens, SamplingParams(temperature=temperature))
    title = f"{model} with draft {draft}, temperature {temperature}, {streams} streams: {max_tokens} tokens a request"
    render(measured, title)
    if json_out is not None:
        described = {"model": model, "draft": draft, "streams": streams, "dtype": dtype}
        described |= {"temperature": temperature, "max_tokens": max_tokens}
        write_json(json_out, to_json(measured, described))
    if plot_out is not None:
        plot(measured, title, plot_out)


@app.command(short_help="Rules for the depth, in simulation.")
def policy(
    acceptance: Annotated[
        str, typer.Option(help="Chance of each draft, comma-separated; 0.3/0.9 for requests of two classes.")
    ] = "0.3,0.5,0.7,0.8,0.9,0.95",
    concurrency: Concurrency = "1,4,16,64,256",
    ratio: Annotated[str, typer.Option(help="Draft pass over target pass, comma-separated.")] = "0.02,0.05,0.1,0.2,0.4",
    free_rows: Annotated[
        int, typer.Option(min=1, help="Rows of a target pass at the price of one; about 24 on a CPU, 200 on a GPU.")
    ] = 24,
    steps: Annotated[
        int, typer.Option(min=2, max=10_000_000, help="From a cold start; the second half is the long run.")
    ] = 2000,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="After which a request ends and a new one comes; without it, nobody ends.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws; all policies meet the same.")] = 0,
    json_out: JsonOut = None,
    plot_out: Annotated[
        Path | None,
        typer.Option("--plot", callback=check_plot, help="Write heat maps to this PNG file; needs paceline[plots]."),
    ] = None,
) -> None:
    """Each rule for the depth against the best stationary depths, in simulation: true chances and prices, no model."""
    from paceline.bench.number_lists import parse_sizes
    from paceline.bench.policy import measure, parse_rates, parse_ratios, plot, render, to_json

    rates, sizes, ratios = parse_rates(acceptance), parse_sizes(concurrency), parse_ratios(ratio)
    cells = measure(rates, sizes, ratios, free_rows, steps, max_tokens, seed)
    title = f"{free_rows} free rows, {steps} steps"
    render(cells, title)
    if json_out is not None:
        settings = {"free_rows": free_rows, "steps": steps, "max_tokens": max_tokens, "seed": seed}
        write_json(json_out, to_json(cells, settings))
    if plot_out is not None:
        plot(cells, title, plot_out)


@app.command(short_help="Served streams against offline ones.")
def serving(
    model: Model = "demo",
    draft: Draft = "demo",
    concurrency: Concurrency = "1,16",
    depth: Depth = "off,4",
    max_tokens: StreamTokens = 96,
    rounds: Rounds = 5,
    dtype: Dtype = "auto",
) -> None:
    """Streams over gRPC, to a client on the same cores, as a ratio to the same streams offline."""
    from paceline.bench.depth_names import parse_depths
    from paceline.bench.number_lists import parse_sizes
    from paceline.bench.serving import measure, render
    from paceline.wiring import EngineSettings, build_engine
    from paceline_loadtest.prompts import load_prompts

    sizes, depths = parse_sizes(concurrency), parse_depths(depth)
    settings = EngineSettings(model=model, draft=draft, dtype=dtype, prefix_cache="off")
    cells = measure(lambda: build_engine(settings), load_prompts(None), sizes, depths, max_tokens, rounds)
    render(cells, title=f"{model} with draft {draft}: {max_tokens} tokens a stream")


@app.command(short_help="The native backend against torch.")
def backends(
    model: Model = "demo",
    draft: Draft = "demo",
    concurrency: Concurrency = "1,16",
    depth: Depth = "off,4",
    max_tokens: StreamTokens = 64,
    rounds: Rounds = 5,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of both.")] = "bfloat16",
) -> None:
    """Speed of the native backend, as a ratio to torch's."""
    from paceline.bench.backends import measure, render
    from paceline.bench.depth_names import parse_depths
    from paceline.bench.number_lists import parse_sizes
    from paceline.wiring import EngineSettings, build_engine
    from paceline_loadtest.prompts import load_prompts

    if dtype not in ("float32", "bfloat16"):  # auto is not the same for both
        raise InvalidArgument("dtype", dtype, "float32 or bfloat16")
    sizes, depths = parse_sizes(concurrency), parse_depths(depth)
    torch, native = (
        build_engine(
            EngineSettings(
                model=model,
                draft=draft,
                dtype=dtype,
                backend=backend,
                draft_quantization="none",  # which torch cannot do
                prefix_cache="off",
            )
        )
        for backend in ("torch", "native")
    )
    cells = measure(torch, native, load_prompts(None), sizes, depths, max_tokens, rounds)
    render(cells, title=f"{model} with draft {draft}, {dtype}: {max_tokens} tokens a stream")


@app.command(short_help="How near the kernels come to this machine's limits.")
def limits(
    model: Model = "demo",
    draft: DraftModel = "demo",
    rounds: Rounds = 5,
    dtype: Dtype = "auto",
    kv_cache_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory for KV of each engine.")] = "256MiB",
    json_out: JsonOut = None,
) -> None:
    """How near the native backend comes to this machine's bandwidth, arithmetic and memory."""
    from paceline.bench.limits import measure, render, to_json
    from paceline.wiring import EngineSettings

    settings = EngineSettings(
        model=model, draft=draft, dtype=dtype, kv_cache_memory=parse_size(kv_cache_memory), prefix_cache="off"
    )
    measured = measure(settings, rounds)
    render(measured, title=f"{model} with draft {draft}: medians of {rounds} rounds")
    if json_out is not None:
        said = {"model": model, "draft": draft, "dtype": dtype, "kv_cache_memory": kv_cache_memory, "rounds": rounds}
        write_json(json_out, to_json(measured, said))


@app.command(short_help="What int8 weights cost.")
def quantization(
    model: Model = "demo",
    draft: DraftModel = "demo",
    depth: FixedDepth = 4,
    max_tokens: DraftedTokens = 96,
    samples: Annotated[int, typer.Option(min=1, help="Completions of every prompt at temperature 1.")] = 8,
    json_out: JsonOut = None,
) -> None:
    """What int8 weights cost: perplexity of held-out text, and drafts kept."""
    from paceline import demo
    from paceline.bench.depth_names import check_depth
    from paceline.bench.quantization import encode, measure_acceptance, measure_accuracy, render, summary
    from paceline_loadtest.prompts import load_prompts

    if draft in ("none", "ngram"):
        raise InvalidArgument("draft", draft, "a directory or demo: only a model has weights")
    check_depth(depth)
    prompts = load_prompts(None)
    target_path = demo.TARGET if model == "demo" else Path(model)
    draft_path = demo.DRAFT if draft == "demo" else Path(draft)
    # First, because the engine refuses what does not go together.
    lengths = measure_acceptance(model, draft, prompts, depth, max_tokens, samples)
    texts = encode(target_path, prompts)
    accuracies = {
        name: measure_accuracy(path, texts) for name, path in (("target", target_path), ("draft", draft_path))
    }
    render(accuracies, lengths, title=f"{model} with draft {draft}, depth {depth}")
    if json_out is not None:
        settings = {"model": model, "draft": draft, "depth": depth, "max_tokens": max_tokens, "samples": samples}
        write_json(json_out, {"settings": settings, **summary(accuracies, lengths)})


@app.command(short_help="The scheduler's own time per step.")
def core(
    running: Annotated[int, typer.Option(min=1, help="Requests in the batch.")] = 256,
    waiting: Annotated[str, typer.Option(help="Requests in queues, comma-separated.")] = "10,10000,100000",
    tenants: Annotated[int, typer.Option(min=1, help="Tenants that they belong to.")] = 50,
    steps: Annotated[int, typer.Option(min=2, help="Steps that are timed in each round.")] = 100,
    rounds: Rounds = 3,
    json_out: JsonOut = None,
) -> None:
    """The scheduler's own time per step, without a model; beside it a loop that tells how fast this Python is."""
    from dataclasses import asdict

    from paceline.bench.core import measure_core, merge, render_core
    from paceline.bench.number_lists import parse_sizes
    from paceline.compiled import is_compiled

    sizes = parse_sizes(waiting, "waiting", least=0, most=1_000_000)
    # Sizes in turn: a machine that slows down slows all of them.
    measured = [[measure_core(running, size, tenants, steps) for size in sizes] for _ in range(rounds)]
    times = [merge(of_size) for of_size in zip(*measured, strict=True)]
    how = "compiled" if is_compiled() else "interpreted"
    render_core(times, title=f"{running} running, {tenants} tenants, {how}")
    if json_out is not None:
        write_json(json_out, [asdict(one) for one in times])
