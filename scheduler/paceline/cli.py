"""The `paceline` command.

torch and everything above it is imported inside the commands, so that `paceline --help` answers at once.
"""

from __future__ import annotations

import errno
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from paceline import __version__
from paceline.bench import app as bench_app
from paceline.bench.cli import check_output, check_plot
from paceline.command_options import as_typed, client_options, parse_size, with_options
from paceline.errors import EngineDead, InvalidArgument, NotWritten, PacelineError
from paceline.screen import Screen
from paceline.whole_file import write_json

if TYPE_CHECKING:
    from paceline.client import ClientOptions
    from paceline.engine import Engine
    from paceline.wiring import EngineSettings

# What errors call otherwise than the options here.
OPTIONS: Final = {"target": "server", "sampling.seed": "request_seed"}
ENGINE_ERROR: Final = 1
USER_ERROR: Final = 2

Server = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Which does the work; see `paceline serve`.")]

app = typer.Typer(
    name="paceline",
    help="Serve large language models over gRPC, with speculation that adapts to every request.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's tables cut the names of options where the terminal is narrow
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_app, name="bench")
keys_app = typer.Typer(help="API keys.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")


def main() -> None:
    """Run the command line. An error ends in one line on stderr; exit code 2 is a mistake of the user, 1 is ours."""
    try:
        app()
    except (EngineDead, NotWritten) as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(ENGINE_ERROR)
    except PacelineError as error:
        print(f"paceline: {as_typed(error, OPTIONS)}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        print(f"paceline: {error.strerror}: the output is not whole", file=sys.stderr)
        sys.stdout = None  # what it still holds would fail again on the way out
        sys.exit(ENGINE_ERROR)


def parse_schema(text: str) -> str:
    """A JSON schema: an object as it stands, or else the file of that name. Raises typer.BadParameter."""
    if text.lstrip().startswith("{"):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{text!r} is neither a JSON object nor a file that can be read: {error}") from error


# -- options of every command that runs an engine ---------------------------------------------------------------------


def engine_settings(
    model: Annotated[str, typer.Option(metavar="DIR|demo", help="Hugging Face model directory.")] = "demo",
    draft: Annotated[
        str, typer.Option(metavar="DIR|demo|ngram|none", help="Who drafts: a smaller model, prompt lookup or nobody.")
    ] = "none",
    dtype: Annotated[str, typer.Option(metavar="auto|float32|bfloat16", help="Of weights and KV cache.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Prompt and completion at most (the model's own limit).")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(metavar="N", help="Requests that run at once.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(metavar="TOKENS", help="Computed per step at most.")] = 2048,
    kv_cache_memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size, metavar="SIZE", help="Memory for KV, such as 512MiB (a share of what is free)."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda", help="What computes; auto: a GPU if there is one.")
    ] = "auto",
    gpu_memory_utilization: Annotated[
        float, typer.Option(metavar="SHARE", help="Of a GPU's memory, for weights, steps and KV together.")
    ] = 0.9,
    block_size: Annotated[int, typer.Option(metavar="TOKENS", help="Per KV block.")] = 16,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the engine's random numbers.")] = 0,
    depth: Annotated[
        str, typer.Option(metavar="auto|off|N", help="Draft tokens per step: chosen, none, or N.")
    ] = "auto",
    min_depth: Annotated[int, typer.Option(metavar="N", help="Lowest depth, unless a request asks for less.")] = 0,
    max_depth: Annotated[int | None, typer.Option(metavar="N", help="Highest depth of any request (8).")] = None,
    backend: Annotated[
        str,
        typer.Option(
            metavar="auto|native|torch|triton",
            help="What computes: code compiled for this CPU, torch, or kernels for GPUs.",
        ),
    ] = "auto",
    quantization: Annotated[str, typer.Option(metavar="none|int8", help="Of the model's weights.")] = "none",
    draft_quantization: Annotated[
        str, typer.Option(metavar="auto|none|int8", help="Of the draft's weights; auto: int8 of bfloat16 on CPUs.")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(metavar="N", help="Threads that compute (one for each core).")] = None,
    reproducible: Annotated[
        bool,
        typer.Option("--reproducible", help="Greedy and seeded output to the bit, whatever runs beside it."),
    ] = False,
    max_logprobs: Annotated[int, typer.Option(metavar="N", help="Alternatives per token that may be asked for.")] = 20,
    prefix_cache: Annotated[
        str, typer.Option(metavar="tenant|shared|off", help="Whose prompts a request may find computed already.")
    ] = "tenant",
    watermark: Annotated[
        float, typer.Option(metavar="SHARE", help="Of the KV blocks, kept free at admission for those that run.")
    ] = 0.01,
    long_prefill_threshold: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Of one prompt, read in a step at most.")
    ] = None,
    max_step_seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="That decodes wait for prompts in a step (no limit).")
    ] = None,
    max_slowdown: Annotated[
        float,
        typer.Option(metavar="TIMES", help="As long a step may become for tenants that ask for too much; inf: any."),
    ] = 1.1,
    max_queued: Annotated[int, typer.Option(metavar="N", help="Requests that wait at most.")] = 4096,
    tenants: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML: what is granted to whom; see docs/scheduling.md.")
    ] = None,
) -> EngineSettings:
    """The settings that the options stand for: these are declared here and nowhere else."""
    from paceline.config_file import TenantsFile, read_tenants
    from paceline.wiring import EngineSettings

    granted = TenantsFile() if tenants is None else read_tenants(tenants)
    return EngineSettings(
        model=model,
        draft=draft,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory=kv_cache_memory,
        device=device,
        gpu_memory_utilization=gpu_memory_utilization,
        block_size=block_size,
        seed=seed,
        depth=depth,
        min_depth=min_depth,
        max_depth=max_depth,
        backend=backend,
        quantization=quantization,
        draft_quantization=draft_quantization,
        threads=threads,
        reproducible=reproducible,
        max_logprobs=max_logprobs,
        prefix_cache=prefix_cache,
        watermark=watermark,
        long_prefill_threshold=long_prefill_threshold,
        max_step_seconds=max_step_seconds,
        max_slowdown=max_slowdown,
        max_queued=max_queued,
        tenants=granted.policies,
        default_tenant=granted.default_policy,
    )


# -- commands ---------------------------------------------------------------------------------------------------------


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=lambda on: _print_version(on), help="Print it and exit."),
    ] = False,
) -> None:
    pass


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.command(short_help="Serve a model over gRPC.")
@with_options("settings", engine_settings)
def serve(
    settings: Callable[..., EngineSettings],
    tenants: Path | None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 or :: for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 50051,
    grace: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Given to live requests when the server is stopped.")
    ] = 30.0,
    tls_cert: Annotated[Path | None, typer.Option(metavar="PEM", help="Certificate chain; turns on TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PEM", help="Its key.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Demand client certificates that these have signed (mTLS).")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines in without TLS, or without credentials.")
    ] = False,
    reflection: Annotated[bool, typer.Option(help="Tell clients what services there are.")] = True,
    health: Annotated[bool, typer.Option(help="Serve grpc.health.v1, to everybody.")] = True,
    max_message_size: Annotated[int, typer.Option(parser=parse_size, metavar="SIZE", help="Of one request.")] = "4MiB",  # type: ignore[assignment]
    keepalive: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Silence after which a peer has half as long to give a sign of life."),
    ] = 2.0,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Where metrics are served (nowhere).")
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="Address to serve them on.")] = "127.0.0.1",
    log_format: Annotated[str, typer.Option(metavar="text|json", help="Of the log, on stderr.")] = "text",
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What clients call the model (the name of its directory).")
    ] = None,
) -> None:
    """Serve a model over gRPC; prints `serving on HOST:PORT` once it can answer. Keys and TLS: docs/security.md."""
    from paceline.config_file import TenantsFile
    from paceline.server import ServerSettings, run_server
    from paceline.server.logs import configure
    from paceline.wiring import build_engine

    served = ServerSettings(
        host=host,
        port=port,
        grace=grace,
        tls_cert=tls_cert,
        tls_key=tls_key,
        client_ca=client_ca,
        insecure=insecure,
        reflection=reflection,
        health=health,
        max_message_size=max_message_size,
        keepalive=keepalive,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        log_format=log_format,
        tenants=tenants,
    )
    # It is the server that reads the tenants file.
    built = replace(settings(tenants=None), take_memory=True, served_model_name=served_model_name)

    def build(granted: TenantsFile) -> Engine:
        return build_engine(replace(built, tenants=granted.policies, default_tenant=granted.default_policy))

    configure(log_format)
    run_server(build, served)


@keys_app.command("new", short_help="Print a new API key, and the line that lets it in.")
def new_key() -> None:
    """Print a new API key, and the line that lets it in: into the tenants file, under whose it is."""
    from paceline.server.auth import hash_key, make_key

    key = make_key()
    print(key)
    print(f'keys = ["{hash_key(key)}"]')
    print("The key is shown this once; the tenants file needs the second line alone.", file=sys.stderr)


@app.command(short_help="Complete prompts, offline or by a server.")
@with_options("connection", client_options)
@with_options("settings", engine_settings)
def generate(
    context: typer.Context,
    settings: Callable[[], EngineSettings],
    connection: Callable[[], ClientOptions],
    model: str,
    draft: str,
    depth: str,
    prompts: Annotated[
        list[str],
        typer.Argument(
            metavar="PROMPT...",
            help="Completed together, as one batch; - is what stdin has, without a line break at its end.",
        ),
    ],
    max_tokens: Annotated[int, typer.Option(metavar="TOKENS", help="Completion tokens at most.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy (the model's default).")] = None,
    top_p: Annotated[float | None, typer.Option(help="In (0, 1] (the model's default).")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 keeps every token (the model's default).")] = None,
    min_p: Annotated[float | None, typer.Option(help="In [0, 1], of the most probable token's share.")] = None,
    request_seed: Annotated[
        int | None, typer.Option(metavar="N", help="Makes each text a function of prompt, options and this number.")
    ] = None,
    n: Annotated[int, typer.Option("--n", metavar="N", help="Completions of each prompt.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop string; may be repeated.")] = None,
    json_schema: Annotated[
        str | None, typer.Option(parser=parse_schema, metavar="JSON|FILE", help="What every text must be valid under.")
    ] = None,
    regex: Annotated[str | None, typer.Option(metavar="PATTERN", help="What every text must match.")] = None,
    server: Server = None,
) -> None:
    """Complete prompts as one batch, offline or by a server; texts stream to the terminal in the prompts' order."""
    _check_effect(context, server, draft, depth)
    prompts = [_from_stdin() if prompt == "-" else prompt for prompt in prompts]
    screen = Screen(prompts, n)
    options: Any = {
        "n": n,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": request_seed,
        "stop": stop,
        "json_schema": json_schema,
        "regex": regex,
    }
    if server is not None:
        from paceline.terminal import complete_prompts

        options["model"] = model if _is_written(context, "model") else ""
        complete_prompts(server, connection(), prompts, options, screen)
        return
    from paceline.llm import LLM
    from paceline.wiring import build_engine

    llm = LLM.from_engine(build_engine(settings()))
    llm.generate(prompts, on_text=screen.add, on_finish=screen.finish, **options)


def _check_effect(context: typer.Context, server: str | None, draft: str, depth: str) -> None:
    """No option of `generate` is taken that would do nothing. Raises InvalidArgument."""
    reach = _written(context, client_options)
    if server is None and reach:
        raise InvalidArgument("server", server, f"given with {', '.join(reach)}: that is how one is reached")
    own = [option for option in _written(context, engine_settings) if option != "--model"]
    if server is not None and own:
        raise InvalidArgument("server", server, f"given without {', '.join(own)}: a server has its own settings")
    depths = [option for option in own if option in ("--min-depth", "--max-depth")]
    if depth.isdecimal() and int(depth) > 0:
        depths.append("--depth")
    if draft == "none" and depths:
        raise InvalidArgument("draft", draft, f"a model or ngram with {', '.join(depths)}: else nobody drafts")


def _written(context: typer.Context, options: Callable[..., Any]) -> list[str]:
    """Those of the options that a function declares that stand on the command line."""
    names = inspect.signature(options).parameters
    return [f"--{name.replace('_', '-')}" for name in names if _is_written(context, name)]


def _is_written(context: typer.Context, name: str) -> bool:
    """It was not left to its default, nor to the environment."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _from_stdin() -> str:
    """What is not UTF-8 becomes what it becomes in an argument, which is refused as such."""
    if sys.stdin is None:  # closed by whoever started this
        raise InvalidArgument("PROMPT", "-", "given with an open stdin")
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape").removesuffix("\n")


@app.command(short_help="Chat with a model that a server serves.")
@with_options("connection", client_options)
def chat(
    connection: Callable[[], ClientOptions],
    server: Server = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Of a server that has several.")] = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="What the model is told about itself.")] = "",
    max_tokens: Annotated[int | None, typer.Option(metavar="TOKENS", help="Of one answer at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy (the model's default).")] = None,
    top_p: Annotated[float | None, typer.Option(help="In (0, 1] (the model's default).")] = None,
) -> None:
    """Chat with a model that a server serves; /help lists what can be said besides."""
    from paceline.client import Client
    from paceline.terminal import Chat

    if server is None:
        text = "start a server by `paceline serve --model DIR`, then `paceline chat --server 127.0.0.1:50051`"
        raise PacelineError(f"there is no server to chat with: {text}")
    with Client(server, **connection()) as client:
        conversation = Chat(
            client,
            {
                "model": model,
                "max_tokens": max_tokens,
                "temperature": temperature,
                "top_p": top_p,
                "content": "text",
            },
            system,
        )
        served = client.model(model or "")
        print(f"{served.name} at {server}; /help lists what can be said besides")
        conversation.run()


@app.command(short_help="Say what this machine has for serving.")
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Measure nothing of the machine.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    model: Annotated[str | None, typer.Option(metavar="DIR|demo", help="Say what its steps cost, too.")] = None,
    draft: Annotated[str, typer.Option(metavar="DIR|demo|ngram|none", help="Who drafts for it.")] = "none",
) -> None:
    """Say what this machine has for serving, how fast it is, and what to do about whatever is missing."""
    try:
        from paceline.doctor import examine, render, to_json
    except ImportError as error:
        sys.exit(f"paceline: nothing can be served here: {error}; try: pip install 'paceline[serve]'")

    report = examine(quick, model, draft)
    if as_json:
        print(json.dumps(to_json(report), indent=2))
    else:
        render(report)


@app.command()
def sim(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="What to simulate, as TOML.")] = None,
    policy: Annotated[str | None, typer.Option(metavar="ours|fcfs|edf", help="Instead of the file's.")] = None,
    requests: Annotated[int | None, typer.Option(metavar="N", help="Instead of the file's.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Instead of the file's.")] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", callback=check_output, help="Write every figure to this file.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="PNG", callback=check_plot, help="Draw requests, depth and memory over time."),
    ] = None,
) -> None:
    """Simulate the scheduler under load: no model, no waiting. docs/simulating.md describes the file."""
    from paceline.config_file import replaced
    from paceline.sim import report
    from paceline.sim.spec import SimulationFile, read_simulation
    from paceline.sim.study import run_study

    wanted = SimulationFile() if file is None else read_simulation(file)
    wanted = replaced(wanted, policy=policy, requests=requests, seed=seed)
    with _progress("simulating") as advance:
        study = run_study(wanted, advance)
    title = f"{wanted.policy}: {file.name if file else 'default'}, seed {wanted.seed}"
    report.render(study, title)
    if json_out is not None:
        figures = {"settings": wanted.model_dump(mode="json"), **study.summary()}
        write_json(json_out, figures)
    if plot is not None:
        report.plot(study, title, plot)


@contextmanager
def _progress(text: str) -> Iterator[Callable[[int], None]]:
    """A line that counts, on a terminal."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), TextColumn("{task.completed:.0f} requests")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=None)
        yield lambda count: progress.advance(task, count)
