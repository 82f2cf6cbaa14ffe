"""TLS and its files: what they must be, and that others take their place without a restart."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.errors import InvalidArgument
from paceline.server.tls import TlsFiles
from support.certificates import Authority, Pem
from support.serving import PATIENCE, Serving
from support.serving import serving as serving_context

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
SERVING = health_pb2.HealthCheckResponse.SERVING


class Files:
    """The files of one server, and whose certificates they may be."""

    def __init__(self, folder: Path, with_client_ca: bool = False) -> None:
        self.old, self.new, self.clients = Authority("Old CA"), Authority("New CA"), Authority("Clients' CA")
        self.certificate, self.key = self.old.issue("server").write(folder, "server")
        self.client_ca = folder / "clients.pem" if with_client_ca else None
        self._version = 0
        if self.client_ca is not None:
            self.client_ca.write_bytes(self.clients.certificate)
        self.tls = TlsFiles(self.certificate, self.key, self.client_ca)

    def put(self, path: Path, data: bytes) -> None:
        """Another file in the place of one, as tools do that rotate certificates."""
        self._version += 1
        path.with_suffix(".new").write_bytes(data)
        path.with_suffix(".new").rename(path)
        os.utime(path, ns=(self._version, self._version))  # a clock may tick too slowly to tell two versions apart

    def rotate(self, pem: Pem) -> None:
        self.put(self.certificate, pem.certificate)
        self.put(self.key, pem.key)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def mutual(tmp_path: Path) -> Files:
    return Files(tmp_path, with_client_ca=True)


@pytest.fixture
async def served(files: Files) -> AsyncIterator[Serving]:
    async with serving_context(credentials=files.tls.credentials()) as made:
        yield made


async def check(served: Serving, trusted: Authority, client: Pem | None = None) -> grpc.StatusCode:
    """What a new connection gets."""
    shown = grpc.ssl_channel_credentials(trusted.certificate, client and client.key, client and client.certificate)
    # Each a connection of its own: by default channels share them.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(served.address, shown, options) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        except grpc.aio.AioRpcError as error:
            return error.code()
        assert answer.status == SERVING
        return grpc.StatusCode.OK


async def in_thread(act: Callable[..., None], *arguments: object) -> None:
    await asyncio.to_thread(act, *arguments)


async def test_tls(served: Serving, files: Files) -> None:
    assert await check(served, files.old) is grpc.StatusCode.OK
    assert await check(served, files.new) is UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # in plaintext
        await health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest())
    assert caught.value.code() is UNAVAILABLE


async def test_a_new_certificate(served: Serving, files: Files, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shown = grpc.ssl_channel_credentials(files.old.certificate)
    async with grpc.aio.secure_channel(served.address, shown) as connected:
        watch = health_pb2_grpc.HealthStub(connected).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        for authority in (files.new, files.old, files.new):
            await in_thread(files.rotate, authority.issue("server"))
            assert await check(served, authority) is grpc.StatusCode.OK
            assert await check(served, files.old if authority is files.new else files.new) is UNAVAILABLE
        served.server._health.set_serving(False)  # whoever was connected still is
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
    assert caplog.text.count("the TLS certificate has been read again") == 3


@pytest.mark.parametrize("what", ["no key of it", "no PEM", "gone"])
async def test_a_bad_new_certificate(
    served: Serving, files: Files, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, other = files.new.issue("server"), files.new.issue("server")
    match what:
        case "no key of it":
            await in_thread(files.rotate, Pem(good.certificate, other.key))
        case "no PEM":
            await in_thread(files.rotate, Pem(b"what", good.key))
        case "gone":
            await in_thread(files.certificate.unlink)
    for _ in range(3):
        assert await check(served, files.old) is grpc.StatusCode.OK
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage().startswith(f"the old TLS certificate stays in use: tls_cert = '{files.certificate}'")
    await in_thread(files.tls.reload)  # who asks is told again
    assert caplog.text.count("the old TLS certificate stays in use") == 2
    assert "PRIVATE KEY" not in caplog.text
    await in_thread(files.rotate, good)
    assert await check(served, files.new) is grpc.StatusCode.OK


def test_a_file_that_goes_away_while_it_is_read(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*paths: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", gone)
    files.tls.reload()
    assert "the old TLS certificate stays in use" in caplog.text


async def test_half_of_a_rotation(served: Serving, files: Files) -> None:
    """Between its two files the old pair serves."""
    pem = files.new.issue("server")
    await in_thread(files.put, files.certificate, pem.certificate)
    assert await check(served, files.old) is grpc.StatusCode.OK
    await in_thread(files.put, files.key, pem.key)
    assert await check(served, files.new) is grpc.StatusCode.OK


async def test_other_clients(mutual: Files) -> None:
    client, stranger = mutual.clients.issue("client"), mutual.new.issue("client")
    async with serving_context(credentials=mutual.tls.credentials()) as served:
        assert await check(served, mutual.old, client) is grpc.StatusCode.OK
        assert await check(served, mutual.old, stranger) is UNAVAILABLE
        assert await check(served, mutual.old) is UNAVAILABLE
        assert mutual.client_ca is not None
        await in_thread(mutual.put, mutual.client_ca, mutual.new.certificate)
        assert await check(served, mutual.old, stranger) is grpc.StatusCode.OK
        assert await check(served, mutual.old, client) is UNAVAILABLE


async def test_two_ports_of_the_same_files(files: Files) -> None:
    async with (
        serving_context(credentials=files.tls.credentials()) as one,
        serving_context(credentials=files.tls.credentials()) as other,
    ):
        for authority in (files.old, files.new):
            await in_thread(files.rotate, authority.issue("server"))
            for served in (one, other):
                assert await check(served, authority) is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("server.pem", None, r"tls_cert = '.*server.pem': must be a readable file \(No such file or directory\)"),
        ("server.key", None, r"tls_key = '.*server.key': must be a readable file \(No such file or directory\)"),
        ("clients.pem", None, r"client_ca = '.*clients.pem': must be a readable file \(No such file or directory\)"),
        (
            "server.pem",
            b"",
            r"tls_cert = '.*': must be a PEM certificate chain to which the key '.*server.key' belongs",
        ),
        ("server.key", b"x", r"tls_cert = '.*': must be a PEM certificate chain to which the key '.*' belongs \(.+\)"),
        ("server.key", Authority().issue("x").key, r"tls_cert = .* belongs \(key values mismatch\)"),
        ("server.key", Authority().issue("x", b"secret").key, r"tls_key = '.*': must be a key without a password"),
        ("clients.pem", b"x", r"client_ca = '.*clients.pem': must be PEM certificates \(.+\)"),
    ],
    ids=["certificate", "key", "client CA", "empty", "no key", "another key", "password", "no CA"],
)
def test_files_that_are_none_at_the_start(mutual: Files, name: str, data: bytes | None, said: str) -> None:
    path = mutual.certificate.parent / name
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InvalidArgument, match=said) as caught:
        TlsFiles(mutual.certificate, mutual.key, mutual.client_ca)
    assert "\n" not in str(caught.value)
