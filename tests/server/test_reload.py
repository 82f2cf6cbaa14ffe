"""A server as a process: what SIGHUP reads again, peers that hang, and that nothing secret is logged."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.server.auth import hash_key
from paceline.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc
from paceline.v1 import generation_pb2 as pb
from support.certificates import Authority
from support.serving import PATIENCE, request

TESTS = Path(__file__).parents[1]
CHAT, OTHER, OPS = (f"paceline_{letter * 43}" for letter in "CDO")
FILE = f"""
[tenants.chat]
keys = ["{hash_key(CHAT)}"]
[admins.ops]
keys = ["{hash_key(OPS)}"]
"""
CHANGED = f"""
unknown = "refuse"
[tenants.other]
keys = ["{hash_key(OTHER)}"]
max_priority = 7
[admins.ops]
keys = ["{hash_key(OPS)}"]
"""
OK = grpc.StatusCode.OK
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


class Server:
    """A process, and what it logs.

    Attributes:
        address: "HOST:PORT".
    """

    def __init__(self, folder: Path, **settings: object) -> None:
        self._log = folder / "log"
        command = [sys.executable, "-m", "support.scripted_server", json.dumps({"port": 0, **settings})]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, stderr=log, text=True)
        self.address = ""

    def wait(self) -> None:
        """Until it serves."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving on "), self.log
        self.address = line.removeprefix("serving on ").strip()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def hang_up(self, said: str) -> str:
        """Have it read its files again; the log since then, once it says so."""
        before = len(self.log)
        self.process.send_signal(signal.SIGHUP)
        until(lambda: said in self.log[before:])
        return self.log[before:]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(**settings: object) -> Server:
        started.append(Server(tmp_path, **settings))
        started[-1].wait()
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    return path


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def generate(channel: grpc.Channel, key: str, **fields: Any) -> grpc.StatusCode:
    """What a short request gets."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    try:
        *_, last = stub.Generate(request(max_tokens=2, **fields), metadata=bearer(key), timeout=PATIENCE)
    except grpc.RpcError as error:
        return error.code()  # type: ignore[attr-defined,no-any-return]
    assert last.HasField("finished")
    return OK


def num_live(channel: grpc.Channel) -> int:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    return len(stub.ListRequests(admin_pb2.ListRequestsRequest(), metadata=bearer(OPS), timeout=PATIENCE).requests)


# -- the tenants file -------------------------------------------------------------------------------------------------


def test_another_file(serve: Callable[..., Server], tenants: Path) -> None:
    server = serve(tenants=str(tenants))
    with grpc.insecure_channel(server.address) as channel:
        assert (generate(channel, CHAT), generate(channel, OTHER)) == (OK, UNAUTHENTICATED)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        live = stub.Generate(request(max_tokens=300), metadata=bearer(CHAT), timeout=PATIENCE)
        next(live)
        tenants.write_text(CHANGED)
        server.hang_up("the tenants file has been read again: 1 tenants")
        assert (generate(channel, CHAT), generate(channel, OTHER)) == (UNAUTHENTICATED, OK)
        # Policies are replaced as well, for gateways and admins too.
        named = {"scheduling": pb.SchedulingParams(tenant="chat")}
        assert generate(channel, OPS, **named) is grpc.StatusCode.INVALID_ARGUMENT
        *_, last = live  # what is admitted goes on
        assert last.finished.usage.completion_tokens == 300
        tenants.write_text(FILE)
        server.hang_up("the tenants file has been read again")
        assert (generate(channel, CHAT), generate(channel, OTHER)) == (OK, UNAUTHENTICATED)


def test_a_key_that_was_taken_out_starts_nothing_more_on_an_open_stream(
    serve: Callable[..., Server], tenants: Path
) -> None:
    server = serve(tenants=str(tenants))
    asked: queue.SimpleQueue[pb.GenerateManyRequest | None] = queue.SimpleQueue()
    with grpc.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        answers = stub.GenerateMany(iter(asked.get, None), metadata=bearer(CHAT), timeout=PATIENCE)
        asked.put(pb.GenerateManyRequest(key=1, start=request(max_tokens=300)))
        next(answers)
        tenants.write_text(CHANGED)
        server.hang_up("the tenants file has been read again")
        asked.put(pb.GenerateManyRequest(key=2, start=request(max_tokens=2)))
        asked.put(None)
        outcomes = [keyed for answer in answers for keyed in answer.responses]
    [refused] = [keyed.error for keyed in outcomes if keyed.key == 2]
    assert (refused.code, refused.reason) == (UNAUTHENTICATED.value[0], "UNAUTHENTICATED")
    [finished] = [keyed.response.finished for keyed in outcomes if keyed.response.HasField("finished")]
    assert finished.usage.completion_tokens == 300  # what is admitted goes on


def test_models_that_are_not_served_are_warned_of(serve: Callable[..., Server], tenants: Path) -> None:
    """They keep a tenant out, and may be misspelt."""
    tenants.write_text(FILE + '[tenants.a]\nmodels = ["scripted", "nope"]')
    server = serve(tenants=str(tenants))
    assert "WARNING paceline.server.tenants: tenants.a.models: not served here: nope; there is 'scripted'" in server.log
    tenants.write_text(FILE + '[default]\nmodels = ["b", "a"]')
    log = server.hang_up("the tenants file has been read again")
    assert "WARNING paceline.server.tenants: default.models: not served here: a, b; there is 'scripted'" in log


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            FILE + "[tenants.other]\nweight = -1\nmax_queued = 0\ncolour = 'red'",
            [
                "tenants.toml has 3 mistakes:",
                "tenants.other.weight = -1: must be greater than or equal to 0.0001",
                "tenants.other.max_queued = 0: must be greater than or equal to 1",
                "tenants.other.colour = 'red': unknown key; known: ",
            ],
        ),
        (
            FILE + "[tenants.a]\nmax_blocks = 1\n[tenants.b]\nmax_blocks = 1",
            [
                "max_blocks of tenant 'a' = 1: must be at least 2, for the shortest request",
                "max_blocks of tenant 'b' = 1: must be at least 2, for the shortest request",
            ],
        ),
        ("tenants = [", ["must be TOML in UTF-8"]),
        ("", ["must be one with keys or common names, like the one in use"]),
        (None, ["must be a readable file (No such file or directory)"]),
    ],
    ids=["mistakes", "too few blocks", "no TOML", "empty", "gone"],
)
def test_a_bad_file_changes_nothing(
    serve: Callable[..., Server], tenants: Path, text: str | None, said: list[str]
) -> None:
    server = serve(tenants=str(tenants))
    with grpc.insecure_channel(server.address) as channel:
        if text is None:
            tenants.unlink()
        else:
            tenants.write_text(text)
        log = server.hang_up("the old tenants file stays in force: ")
        until(lambda: all(line in server.log for line in said))
        assert "Traceback" not in log
        assert (generate(channel, CHAT), generate(channel, OTHER)) == (OK, UNAUTHENTICATED)
        tenants.write_text(CHANGED)
        server.hang_up("the tenants file has been read again")
        assert (generate(channel, CHAT), generate(channel, OTHER)) == (UNAUTHENTICATED, OK)


def test_a_server_without_files_hangs_up(serve: Callable[..., Server]) -> None:
    """Its terminal is gone, and there is nothing to read again."""
    server = serve()
    server.process.send_signal(signal.SIGHUP)
    assert server.process.wait(PATIENCE) == -signal.SIGHUP


# -- TLS --------------------------------------------------------------------------------------------------------------


def test_a_certificate_and_a_file_of_tenants(serve: Callable[..., Server], tenants: Path, tmp_path: Path) -> None:
    old, new = Authority("Old CA"), Authority("New CA")
    certificate, key = old.issue("server").write(tmp_path, "server")
    server = serve(tenants=str(tenants), tls_cert=str(certificate), tls_key=str(key))

    def get(authority: Authority) -> grpc.StatusCode:
        shown = grpc.ssl_channel_credentials(authority.certificate)
        with grpc.secure_channel(server.address, shown, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            return generate(channel, CHAT)

    assert (get(old), get(new)) == (OK, grpc.StatusCode.UNAVAILABLE)
    key.write_bytes(new.issue("server").key)
    server.hang_up("the old TLS certificate stays in use: ")
    assert get(old) is OK
    new.issue("server").write(tmp_path, "server")
    server.hang_up("the TLS certificate has been read again")
    assert (get(old), get(new)) == (grpc.StatusCode.UNAVAILABLE, OK)
    assert "PRIVATE" not in server.log


# -- peers that hang --------------------------------------------------------------------------------------------------

CLIENT = """
import sys, time
import grpc
from paceline.v1 import generation_pb2_grpc
from support.serving import request
channel = grpc.insecure_channel(sys.argv[1])
stub = generation_pb2_grpc.GenerationServiceStub(channel)
for response in stub.Generate(request(max_tokens=2000), metadata=(("authorization", "Bearer " + sys.argv[2]),)):
    print("began", flush=True)
    time.sleep(1000)
"""


def test_a_peer_that_hangs_loses_its_place(serve: Callable[..., Server], tenants: Path) -> None:
    """A stopped process: its kernel acknowledges whatever is sent, and nobody answers."""
    server = serve(tenants=str(tenants), keepalive=2.0)
    command = [sys.executable, "-c", CLIENT, server.address, CHAT]
    client = subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "began\n"
        with grpc.insecure_channel(server.address) as channel:
            assert num_live(channel) == 1
            client.send_signal(signal.SIGSTOP)
            until(lambda: num_live(channel) == 0)
        until(lambda: "Generate CANCELLED" in server.log)
    finally:
        client.kill()
        client.communicate()


# -- logs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_log_has_a_secret(serve: Callable[..., Server], tenants: Path, log_format: str) -> None:
    """Everything is logged, down to DEBUG."""
    server = serve(tenants=str(tenants), log_format=log_format)
    prompt, wrong = "the prompt that nobody else may read", f"paceline_{'w' * 43}"
    with grpc.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        assert generate(channel, CHAT, prompt_text=prompt) is OK
        assert generate(channel, wrong, prompt_text=prompt) is UNAUTHENTICATED
        assert generate(channel, CHAT, prompt_text=prompt, model=prompt[:9]) is grpc.StatusCode.NOT_FOUND
        message = request(sampling=pb.SamplingParams(top_p=3), prompt_text=prompt)
        for metadata in (bearer(CHAT), (("authorization", CHAT),), bearer(hash_key(CHAT)), ()):
            with pytest.raises(grpc.RpcError):
                list(stub.Generate(message, metadata=metadata, timeout=PATIENCE))
        left = stub.Generate(request(max_tokens=1000, prompt_text=prompt), metadata=bearer(CHAT))
        text = next(left).text
        left.cancel()
        until(lambda: "CANCELLED" in server.log)
        for mistake in (f"tenants.chat.keys = ['{CHAT}']", f"[tenants.chat]\nkey = '{CHAT}'"):
            tenants.write_text(mistake)
            server.hang_up("has 1 mistake")
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(PATIENCE)
    log = server.log
    assert "UNAUTHENTICATED" in log
    assert "tenants.chat" in log, "who called is told"
    for secret in (CHAT, wrong, OPS, prompt, hash_key(CHAT), CHAT[9:30], wrong[9:30]):
        assert secret not in log
    assert text
