"""The `paceline` command, as processes where processes matter."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import grpc
import pytest
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from paceline import __version__, cli
from paceline.cli import app, engine_settings, main
from paceline.client import Client
from paceline.command_options import parse_size
from paceline.core.config import SchedulerConfig
from paceline.errors import InvalidArgument, NotFound
from paceline.screen import Screen
from paceline.server import ServerSettings
from paceline.settings import EngineSettings
from paceline.sim.spec import EngineTable
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc
from support import quick_start  # noqa: F401
from support.checkpoints import tiny_checkpoint

PATIENCE = 120  # seconds until a process that hangs is a failure; nothing is asserted about time
PACELINE = [sys.executable, "-m", "paceline"]
QUICK = [sys.executable, "-m", "support.quick_command"]
TESTS = Path(__file__).parents[1]
# The little that these runs need; `--kv-cache-memory` also shows that sizes have units.
SMALL = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--kv-cache-memory", "4MiB", "--dtype", "float32"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PACELINE, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False)


# -- sizes and options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("512M", 512 << 20),
        ("2GiB", 2 << 30),
        ("0.5 GiB", 1 << 29),
        ("1kib", 1024),
        ("3MB", 3_000_000),
        ("1TiB", 1 << 40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "1 PiB", "1e9", "MiB", "9" * 400])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_size(text)


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"paceline {__version__}\n")


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, paceline.cli; print([name for name in ('torch', 'transformers', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == "[]\n"


def test_defaults_are_the_same_wherever_they_stand() -> None:
    assert engine_settings() == EngineSettings()
    options = {name: option.default for name, option in inspect.signature(cli.serve).parameters.items()}
    options["max_message_size"] = parse_size(options["max_message_size"])
    assert ServerSettings(**{field.name: options[field.name] for field in fields(ServerSettings)}) == ServerSettings()

    core = {field.name: field.default for field in fields(SchedulerConfig)}
    in_settings = core.keys() & vars(EngineSettings()).keys() - {"max_model_len", "max_depth"}  # the model's, or chosen
    assert {name: getattr(EngineSettings(), name) for name in in_settings} == {name: core[name] for name in in_settings}
    larger = {"num_blocks", "max_num_seqs", "max_model_len", "max_queued"}  # what is simulated is a larger machine
    in_sim = core.keys() & EngineTable.model_fields.keys() - larger
    assert {name: getattr(EngineTable(), name) for name in in_sim} == {name: core[name] for name in in_sim}


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_both_commands_have_the_engine_options(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    options = ("model", "draft", "dtype", "max-model-len", "max-num-seqs", "max-num-batched-tokens", "kv-cache-memory")
    for option in (*options, "block-size", "seed", "depth", "reproducible", "max-logprobs"):
        assert f"--{option}" in text


@pytest.mark.parametrize(
    "command", [[], ["serve"], ["generate"], ["chat"], ["bench"], ["bench", "depth"], ["keys", "new"]]
)
def test_help_is_short_to_ask_for_and_cuts_no_option_at_80_columns(command: list[str]) -> None:
    asked = [CliRunner().invoke(app, [*command, flag], env={"COLUMNS": "80"}) for flag in ("-h", "--help")]
    assert (asked[0].exit_code, asked[0].output) == (0, asked[1].output)
    assert "Usage: " in asked[0].output
    assert all(len(line) <= 80 for line in asked[0].output.splitlines())
    assert not re.search(r"--\S*…", asked[0].output)
    if command == ["serve"]:
        for name in ("max-num-batched-tokens", "long-prefill-threshold", "draft-quantization", "max-message-size"):
            assert f"--{name} " in asked[0].output


# -- generate ---------------------------------------------------------------------------------------------------------


def test_one_prompt_streams(checkpoint: str) -> None:
    arguments = ["generate", "A line", "--model", checkpoint, *SMALL, "--max-tokens", "5", "--temperature", "0"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    again = CliRunner().invoke(app, [*arguments, "--draft", "ngram"])
    assert result.output == again.output
    assert result.output.endswith("\n")
    assert result.output.strip()


@pytest.mark.parametrize(("typed", "prompt"), [("A line", "A line"), ("A line\n", "A line"), ("A\n\n", "A\n")])
def test_a_prompt_from_stdin(checkpoint: str, typed: str, prompt: str) -> None:
    options = ["--model", checkpoint, *SMALL, "--max-tokens", "5", "--temperature", "0"]
    read = CliRunner().invoke(app, ["generate", "-", *options], input=typed)
    assert (read.exit_code, read.output) == (0, CliRunner().invoke(app, ["generate", prompt, *options]).output)


def test_a_prompt_from_a_closed_stdin() -> None:
    command = f"{shlex.join(PACELINE)} generate - <&-"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (result.returncode, result.stderr) == (2, "paceline: PROMPT = '-': must be given with an open stdin\n")


def test_what_stdin_has_must_be_text(checkpoint: str) -> None:
    result = CliRunner().invoke(app, ["generate", "-", "--model", checkpoint, *SMALL], input=b"caf\xe9")
    assert isinstance(result.exception, InvalidArgument)
    assert "prompt_text = '\\udce9'" in str(result.exception)


def test_a_key_in_the_environment_disturbs_nothing(checkpoint: str) -> None:
    options = ["--model", checkpoint, *SMALL, "--max-tokens", "5", "--temperature", "0"]
    assert CliRunner().invoke(app, ["generate", "x", *options], env={"PACELINE_API_KEY": "k"}).exit_code == 0


def test_a_seed_makes_it_again(checkpoint: str) -> None:
    arguments = ["generate", "A line", "--model", checkpoint, *SMALL, "--max-tokens", "9", "--n", "2"]
    seeded = [*arguments, "--temperature", "1", "--request-seed", "7"]
    first, again = (CliRunner().invoke(app, [*seeded, "--seed", seed]) for seed in ("0", "1"))
    assert first.exit_code == 0, first.output
    assert first.output == again.output
    texts = first.output.split("==> A line\n")[1:]
    assert len(texts) == 2
    assert texts[0].strip() != texts[1].strip()


def test_texts_have_a_form(checkpoint: str, tmp_path: Path) -> None:
    arguments = ["generate", "A line", "--model", checkpoint, *SMALL, "--max-tokens", "20", "--temperature", "0"]
    assert CliRunner().invoke(app, [*arguments, "--regex", "[0-9]{3}"]).output.strip().isdigit()
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["yes", "no"]}')
    for schema in (str(file), file.read_text()):
        assert json.loads(CliRunner().invoke(app, [*arguments, "--json-schema", schema]).output) in ("yes", "no")


def test_a_schema_that_is_neither_text_nor_file() -> None:
    result = CliRunner().invoke(app, ["generate", "x", "--json-schema", "no such file"])
    assert result.exit_code == 2
    assert "neither a JSON object nor a file" in " ".join(result.output.replace("│", " ").split())


def test_texts_stream_in_the_order_of_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    """The first that has not ended is shown as it comes; the others wait for their turn."""
    screen = Screen(["a", "b"])
    shown = []
    for step in (
        lambda: screen.add(1, "later"),
        lambda: screen.add(0, "now"),
        lambda: screen.finish(1),
        lambda: screen.finish(0),
    ):
        step()
        shown.append(capsys.readouterr().out)
    assert shown == ["==> a\n", "now", "", "\n\n==> b\nlater\n\n"]


def test_several_prompts_come_in_turn(checkpoint: str) -> None:
    prompts = ["A line", "of cyclists", "who draft"]
    options = ["--model", checkpoint, *SMALL, "--max-tokens", "5", "--temperature", "0"]
    output = CliRunner().invoke(app, ["generate", *prompts, *options]).output
    assert re.findall(r"^==> (.*)$", output, re.MULTILINE) == prompts
    first = CliRunner().invoke(app, ["generate", prompts[0], *options]).output
    assert first.rstrip("\n") in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x", "--top-p", "1.5"], "sampling.top_p = 1.5"),
        (["x", "--temperature", "-1"], "sampling.temperature = -1.0"),
        (["x", "--max-tokens", "0"], "stop.max_tokens = 0"),
        (["x", "--min-p", "2"], "sampling.min_p = 2.0"),
        (["x", "--request-seed", "-1"], "request_seed = -1"),
        (["x", "--n", "65"], "n = 65"),
        (["x", "--n", "1000000000"], "n = 1000000000"),
        (["x", "--regex", "("], "structured.regex = '('"),
        (["x", "--json-schema", '{"type": 3}'], "structured.json_schema = "),
        (["x", "--max-logprobs", "-1"], "max_logprobs = -1"),
        (["x", "--depth", "deep"], "depth = 'deep'"),
        (["x", "--depth", "3"], "draft = 'none': must be a model or ngram with --depth: else nobody drafts"),
        (["x", "--min-depth", "1", "--max-depth", "2"], "a model or ngram with --min-depth, --max-depth: else"),
        (["x", "--api-key", "foo", "--tls"], "server = None: must be given with --api-key, --tls: that is how one is"),
        (["x", "--server", "127.0.0.1"], "server = '127.0.0.1': must be HOST:PORT"),
        (["x", "--server", "h:1", "--tls-ca", "client_key"], "tls_ca = 'client_key': must be a PEM file that can be"),
        (["x", "--server", "h:1", "--tls-cert", "me.pem"], "tls_cert = 'me.pem': must be given with tls_key, and"),
        (["x", "--tenants", "nowhere.toml"], "tenants = 'nowhere.toml': must be a readable file"),
        (["x", "--dtype", "int4"], "dtype = 'int4'"),
        (["x", "--kv-cache-memory", "10TiB"], "kv_cache_memory = 10995116277760: must be at most "),
        ([""], "prompt_text = ''"),
        (["caf\udce9"], "prompt_text = '\\udce9'"),  # how Python passes on an argument that is not UTF-8
    ],
)
def test_bad_values_are_one_line(
    checkpoint: str,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = [] if "--server" in arguments else SMALL
    monkeypatch.setattr(sys, "argv", ["paceline", "generate", "--model", checkpoint, *own, *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("paceline: ")
    assert said in error
    assert "foo" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("number", ["0", "-1"])
def test_no_choices_are_refused_before_a_server_is_asked(
    number: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", "generate", "x", "--server", "127.0.0.1:1", "--n", number])
    with pytest.raises(SystemExit) as caught:
        main()
    assert (caught.value.code, capsys.readouterr().err) == (2, f"paceline: n = {number}: must be an integer in 1..64\n")


def test_unknown_model(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    done = run("serve", "--model", missing)
    assert done.returncode == 2
    assert missing in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


# -- serve ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(checkpoint: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [*QUICK, "serve", "--model", checkpoint, *SMALL, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=TESTS)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.fullmatch(r"serving on (127\.0\.0\.1:\d+)\n", line)
    assert match, (line, process.stderr.read() if process.stderr else "")
    return match[1]


def test_serves_and_stops_gracefully(serve: Callable[..., subprocess.Popen[str]]) -> None:
    process = serve("--port", "0", "--draft", "ngram")
    with grpc.insecure_channel(address_of(process)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        stop = pb.StopParams(max_tokens=400, ignore_eos=True)
        live = stub.Generate(pb.GenerateRequest(prompt_text="A line", stop=stop), timeout=PATIENCE)
        first = next(live)
        assert first.started.prompt_tokens > 0
        process.send_signal(signal.SIGTERM)
        *_, last = live
        assert last.finished.usage.completion_tokens == 400
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert output == "", "stdout is one line"
    assert "Traceback" not in errors


def test_tells_what_it_serves_and_by_what_name(serve: Callable[..., subprocess.Popen[str]], checkpoint: str) -> None:
    process = serve("--port", "0", "--log-format", "json", "--served-model-name", "acme/line-1")
    with Client(address_of(process)) as client:
        assert [model.name for model in client.models()] == ["acme/line-1"]
        assert client.complete("A line", model="acme/line-1", max_tokens=2).token_ids
        with pytest.raises(NotFound):
            client.complete("A line", model=Path(checkpoint).name, max_tokens=2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    lines = [json.loads(line) for line in errors.splitlines()]
    loading, loaded = (line for line in lines if line["logger"] == "paceline.wiring")
    assert loading["message"] == f"loading model {checkpoint}, draft none"
    assert loaded["message"].startswith("loaded: model = acme/line-1, dtype = float32, backend = ")
    assert (loaded["level"], loaded["model"], loaded["drafters"]) == ("INFO", "acme/line-1", "ngram")
    assert loaded["kv_bytes"] <= 4 << 20


def test_all_kv_memory_is_taken_before_anybody_is_served(serve: Callable[..., subprocess.Popen[str]]) -> None:
    resident = []
    for mebibytes in (4, 132):
        process = serve("--port", "0", "--kv-cache-memory", f"{mebibytes}MiB")
        address_of(process)
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident.append(int(status.split("VmRSS:")[1].split()[0]) / 1024)
    assert resident[1] - resident[0] > 0.8 * 128


def test_second_signal_kills(serve: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    # Streams of 60,000 tokens: they do not end by themselves between two signals.
    model = tiny_checkpoint(tmp_path, "llama", max_position_embeddings=1 << 16)
    process = serve("--port", "0", "--grace", "1000", "--model", str(model), "--kv-cache-memory", "64MiB")
    with grpc.insecure_channel(address_of(process)) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        stop = pb.StopParams(ignore_eos=True)
        calls = [stub.Generate(pb.GenerateRequest(prompt_text="A line", stop=stop)) for _ in range(4)]
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        for call in calls:
            next(call)
        process.send_signal(signal.SIGINT)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGTERM


def test_port_that_is_taken(serve: Callable[..., subprocess.Popen[str]]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = serve("--port", str(port))
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    # Nothing of gRPC's own, which would be no line of a log.
    assert errors == f"paceline: cannot listen on 127.0.0.1:{port}: in use, not allowed, or not this machine's\n"
    assert output == ""
