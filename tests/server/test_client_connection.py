"""Keys, certificates and what never shows them."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from fake_server import FakeServer, fake_server
from paceline import errors
from paceline.client import AsyncClient, Client, HealthStatus
from paceline.client.connection import Connection, is_local
from support.certificates import Authority

KEY = "sk-a-secret-of-theirs"


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with fake_server() as fake:
        yield fake


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority()
    (folder / "ca.pem").write_bytes(authority.certificate)
    server = authority.issue("server").write(folder, "server")
    client = authority.issue("client").write(folder, "client")
    return Certificates(folder / "ca.pem", *server, *client)


# ---- Connecting ----------------------------------------------------------------------------------------------------


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


@asynccontextmanager
async def far_away(address: str, seconds: float) -> AsyncIterator[str]:
    """The address of a way to a server on which the first bytes of a connection take so long."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        host, _, port = address.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, back), copy(there, writer))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as way:
        yield f"127.0.0.1:{way.sockets[0].getsockname()[1]}"


async def test_a_server_that_is_far_away_or_busy_is_reached_at_the_first_try(server: FakeServer) -> None:
    async with far_away(server.address, 0.5) as address, AsyncClient(address, max_retries=0) as client:
        assert (await client.complete("hello")).text == "abc"


# ---- Keys ----------------------------------------------------------------------------------------------------------


async def test_the_key_goes_out_with_every_call(server: FakeServer) -> None:
    async with AsyncClient(server.address, api_key=KEY) as client:
        await client.complete("hello")
    with Client(server.address, api_key=KEY, metadata={"x-team": "blue"}) as blocking:
        await asyncio.to_thread(blocking.complete, "hello")
    assert [metadata["authorization"] for metadata in server.metadata] == [f"Bearer {KEY}"] * 2
    assert server.metadata[1]["x-team"] == "blue"


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("127.0.0.1:50051", True),
        ("127.8.8.8:1", True),
        ("localhost:50051", True),
        ("localhost", True),
        ("[::1]:50051", True),
        ("::1", True),
        ("unix:/run/paceline.sock", True),
        ("unix:///run/paceline.sock", True),
        ("dns:///localhost:1", True),
        ("dns:127.0.0.1:1", True),
        ("ipv4:127.0.0.1:1,127.0.0.2:1", True),
        ("ipv6:[::1]:1", True),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", False),
        ("10.0.0.1:50051", False),
        ("0.0.0.0:50051", False),
        ("localhost.example.com:1", False),
        ("127.0.0.1.example.com:1", False),
        ("dns://8.8.8.8/localhost:1", False),
        ("xds:///localhost", False),
        ("[2001:db8::1]:1", False),
        ("", False),
    ],
)
def test_what_is_on_this_machine(target: str, local: bool) -> None:
    assert is_local(target) is local


@pytest.mark.parametrize(
    "target",
    [None, 5, "", "127.0.0.1", "localhost:", ":1", "a:0", "a:65536", "a:b", "::1", "http://a:1", "grpc://a:1", "unix:"],
)
@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_what_is_no_target(kind: type[Client | AsyncClient], target: Any) -> None:
    """Of most of these gRPC would say nothing: it asks port 443, or a host of that name."""
    with pytest.raises(errors.InvalidArgument) as caught:
        kind(target)
    assert str(caught.value) == f"target = {target!r}: must be HOST:PORT, or unix:PATH"


@pytest.mark.parametrize(
    "target",
    [
        *("127.0.0.1:1", "localhost:65535", "a.example_2:50051", "[::1]:1", "unix:/run/a.sock", "unix:///run/a.sock"),
        *("unix-abstract:a", "dns:///a:1", "dns://8.8.8.8/a:1", "ipv4:127.0.0.1:1,127.0.0.2:1", "ipv6:[::1]:1"),
    ],
)
def test_what_is_a_target(target: str) -> None:
    assert Connection(target).target == target


@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_a_key_is_not_sent_in_plaintext(kind: type[Client | AsyncClient]) -> None:
    with pytest.raises(
        errors.InvalidArgument, match=r"api_key = '.not shown.': must be left out without TLS"
    ) as caught:
        kind("example.com:50051", api_key=KEY)
    assert KEY not in "".join(traceback.format_exception(caught.value))
    kind("example.com:50051", api_key=KEY, allow_plaintext_key=True)
    kind("example.com:50051", api_key=KEY, tls=True)
    kind("example.com:50051")


@pytest.mark.parametrize("key", ["", "two words", "line\n", "ключ"])
def test_a_key_that_headers_do_not_carry(key: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"api_key = '.not shown.': must be printable") as caught:
        Client("localhost:1", api_key=key)
    assert not key or key not in str(caught.value)


async def test_nothing_shows_the_key() -> None:
    client = AsyncClient("127.0.0.1:1", api_key=KEY, max_retries=0)
    with pytest.raises(errors.Unavailable) as caught:
        await client.complete("hello")
    shown = [*traceback.format_exception(caught.value), repr(caught.value), repr(client), repr(client._connection)]
    assert KEY not in "".join(shown)
    assert repr(client) == "AsyncClient('127.0.0.1:1')"
    assert repr(Client("127.0.0.1:1", api_key=KEY)) == "Client('127.0.0.1:1')"
    await client.aclose()


# ---- TLS -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def tls_server(certificates: Certificates, mutual: bool) -> AsyncIterator[str]:
    credentials = grpc.ssl_server_credentials(
        [(certificates.server_key.read_bytes(), certificates.server.read_bytes())],
        root_certificates=certificates.authority.read_bytes(),
        require_client_auth=mutual,
    )
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"localhost:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("mutual", "options", "served"),
    [
        (False, {"tls": "authority"}, True),
        (False, {}, False),
        (False, {"tls": True}, False),  # nobody but the test trusts its authority
        (True, {"tls": "authority"}, False),
        (True, {"tls": "authority", "client_certificate": "client", "client_key": "client_key"}, True),
    ],
)
async def test_tls(certificates: Certificates, mutual: bool, options: dict[str, Any], served: bool) -> None:
    paths = {name: getattr(certificates, value) if isinstance(value, str) else value for name, value in options.items()}
    async with tls_server(certificates, mutual) as address:
        client = await asyncio.to_thread(lambda: AsyncClient(address, **paths))  # reads files
        async with client:
            if served:
                assert await client.health(wait_for_ready=True) is HealthStatus.SERVING
            else:
                with pytest.raises(errors.Unavailable):
                    await client.health()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tls": "/no/such/file"}, "tls = '/no/such/file': must be a PEM file that can be read"),
        ({"tls": __file__}, "tls = '.*test_client_connection.py': must be a PEM file"),
        ({"tls": True, "client_certificate": "x"}, "client_certificate = 'x': must be given with client_key"),
        ({"tls": True, "client_key": "x"}, "must be given with client_key"),
        ({"client_certificate": "x", "client_key": "x"}, "client_certificate = 'x': must be given with tls$"),
        ({"tls": True, "credentials": grpc.ssl_channel_credentials()}, "must be given alone"),
        ({"tls": 5}, "tls = 5: must be the path of a PEM file"),
        ({"max_retries": -1}, "max_retries = -1: must be an integer >= 0"),
        ({"max_retries": "3"}, "max_retries = '3': must be an integer >= 0"),
        ({"max_retries": None}, "max_retries = None: must be an integer >= 0"),
        ({"max_retries": True}, "max_retries = True: must be an integer >= 0"),
        ({"max_retries": 1.5}, "max_retries = 1.5: must be an integer >= 0"),
        ({"api_key": 5}, r"api_key = '\(not shown\)': must be printable"),
        ({"credentials": KEY}, r"credentials = '\(not shown\)': must be grpc.ChannelCredentials"),
    ],
)
def test_options_that_are_not_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        Client("localhost:1", **options)


@pytest.mark.parametrize("key", ["X-Team", "", "two words", "x:y", "naïve", "grpc-timeout", "line\n", 5, b"x"])
def test_metadata_keys_that_grpc_does_not_take(key: Any) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        Client("localhost:1", metadata={key: "v"})
    assert str(caught.value).startswith(f"metadata = {key!r}: must be keys of")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"x-team": "blue\nred"}, "'x-team: (not shown)': must be printable ASCII text"),
        ({"x-team": "bläu"}, "'x-team: (not shown)': must be printable ASCII text"),
        ({"x-team": b"blue"}, "'x-team: (not shown)': must be printable ASCII text"),
        ({"x-team": 5}, "'x-team: (not shown)': must be printable ASCII text"),
        ({"x-team": None}, "'x-team: (not shown)': must be printable ASCII text"),
        ({"x-team-bin": "blue"}, "'x-team-bin: (not shown)': must be bytes where the key ends"),
        ([("x-team", "blue")], "'(not shown)': must be a mapping of keys to values"),
        ("x-team", "'(not shown)': must be a mapping of keys to values"),
    ],
)
def test_metadata_values_that_grpc_does_not_take(metadata: Any, message: str) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        Client("localhost:1", metadata=metadata)
    assert str(caught.value).startswith(f"metadata = {message}")
    assert not any(word in str(caught.value) for word in ("blue", "bläu"))


async def test_metadata_that_grpc_takes(server: FakeServer) -> None:
    metadata = {"x_a.b-0": "two words~", "empty": "", "trace-bin": b"\x00\xff"}
    async with AsyncClient(server.address, metadata=metadata) as client:
        await client.complete("hello")
    with Client(server.address, metadata=metadata) as blocking:
        await asyncio.to_thread(blocking.complete, "hello")
    assert [{key: sent[key] for key in metadata} for sent in server.metadata] == [metadata] * 2


def test_retries_counted_by_numpy() -> None:
    assert Connection("localhost:1", max_retries=np.int64(2)).retries.max_retries == 2  # type: ignore[arg-type]


def test_options_that_do_not_exist() -> None:
    with pytest.raises(TypeError, match=r"unknown option apikey \(did you mean api_key\?\)"):
        Client("localhost:1", apikey=KEY)  # type: ignore[call-arg]


def test_a_key_file_is_not_shown(certificates: Certificates) -> None:
    made = Connection("localhost:1", tls=certificates.authority)
    assert "PRIVATE" not in repr(vars(made))
    assert "BEGIN" not in repr(vars(made))
