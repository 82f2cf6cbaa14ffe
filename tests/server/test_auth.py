"""Who may call what: keys, client certificates, gateways, admins, models; and that no log has a secret."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.cli import main
from paceline.config_file import TenantsFile, read_tenants
from paceline.core.tenant_policy import TenantPolicy
from paceline.errors import InvalidArgument
from paceline.server import ServerSettings
from paceline.server.auth import KeyGate, hash_key
from paceline.server.settings import is_loopback
from paceline.server.tls import TlsFiles
from paceline.settings import EngineSettings
from paceline.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc, model_pb2, model_pb2_grpc
from paceline.v1 import generation_pb2 as pb
from support.certificates import Authority
from support.http2 import END_HEADERS, HEADERS, PREFACE, SETTINGS, call_headers, frame, hpack, raw_connection
from support.serving import MODEL, PATIENCE, Serving, details_of, failure, request
from support.serving import serving as serving_context

# Not random, because names of tests have them in.
CHAT, CHAT_TOO, OTHER, FRONT, OPS, POOR, WRONG = (f"paceline_{letter * 43}" for letter in "CDOFAPW")
FILE = f"""
[tenants.chat]
keys = ["{hash_key(CHAT)}", "{hash_key(CHAT_TOO)}"]
common_names = ["chat.example"]

[tenants.other]
keys = ["{hash_key(OTHER)}"]
models = ["{MODEL}"]

[tenants.poor]
keys = ["{hash_key(POOR)}"]
models = ["another model"]

[gateways.front]
keys = ["{hash_key(FRONT)}"]
common_names = ["front.example"]

[admins.ops]
keys = ["{hash_key(OPS)}"]
"""
OK = grpc.StatusCode.OK
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def tenants(text: str) -> TenantsFile:
    return TenantsFile.model_validate(tomllib.loads(text))


@pytest.fixture
async def served() -> AsyncIterator[Serving]:
    async with serving_context(gate=KeyGate(tenants(FILE))) as made:
        yield made


async def tenant_of(served: Serving, key: str, named: str = "") -> str:
    """Whose request it becomes."""
    before = len(served.scheduler.requests)
    call = served.stub.Generate(request(scheduling=pb.SchedulingParams(tenant=named)), metadata=bearer(key))
    await served.until(lambda: len(served.scheduler.requests) > before)
    *_, made = served.scheduler.requests.values()
    call.cancel()
    await served.until(lambda: len(served.scheduler.requests) == before)
    return made.tenant


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    error = await failure(call)
    assert details_of(error)["ErrorInfo"].reason == error.code().name  # type: ignore[attr-defined]
    return error.code(), error.details() or ""


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "named", "tenant"),
    [
        (CHAT, "", "chat"),
        (CHAT_TOO, "", "chat"),
        (CHAT, "chat", "chat"),
        (OTHER, "", "other"),
        (FRONT, "", ""),
        (FRONT, "chat", "chat"),
        (FRONT, "somebody-new", "somebody-new"),
        (OPS, "other", "other"),
    ],
)
async def test_a_key_makes_a_tenant(served: Serving, key: str, named: str, tenant: str) -> None:
    assert await tenant_of(served, key, named) == tenant


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ((), "no credential: send the metadata 'authorization: Bearer KEY'"),
        (bearer(WRONG), "the key is not known here"),
        (bearer(""), "the key is not known here"),
        (bearer(CHAT[:-1]), "the key is not known here"),
        (bearer(CHAT + "x"), "the key is not known here"),
        (bearer(hash_key(CHAT)), "the key is not known here"),
        ((("authorization", CHAT),), "the metadata 'authorization' has not the form 'Bearer KEY'"),
        ((("authorization", f"Basic {CHAT}"),), "the metadata 'authorization' has not the form 'Bearer KEY'"),
        ((*bearer(CHAT), *bearer(OTHER)), "several credentials: send one 'authorization'"),
        ((*bearer(WRONG), *bearer(CHAT)), "several credentials: send one 'authorization'"),
    ],
)
async def test_without_a_key_nothing(
    served: Serving, metadata: tuple[tuple[str, str], ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert await refused(served.stub.Generate(request(), metadata=metadata, timeout=PATIENCE)) == (
        UNAUTHENTICATED,
        said,
    )
    assert served.idle
    assert not re.search("|".join((CHAT[9:20], OTHER[9:20], WRONG[9:20])), caplog.text)


async def test_nothing_is_received_of_those_whom_nobody_knows(served: Serving) -> None:
    """A connection may open thousands of streams, and what lies half received in each of them takes memory."""
    async with raw_connection(served.address) as connection, asyncio.timeout(PATIENCE):
        begin = PREFACE + frame(SETTINGS, 0, 0)
        known_to_nobody = call_headers(authorization=f"Bearer {WRONG}")
        await connection.send(begin + frame(HEADERS, END_HEADERS, 1, hpack(known_to_nobody)))
        received = b""
        while b"grpc-status" not in received:  # though nothing follows the headers
            received += await connection.reader.read(1 << 16)
        assert b"the key is not known here" in received


def test_whoever_may_be_known_later_is_no_stranger() -> None:
    """By a certificate, or because nobody has to be known."""
    generate, known, wrong = "/paceline.v1.GenerationService/Generate", f"Bearer {CHAT}", f"Bearer {WRONG}"
    keys = KeyGate(tenants(f'[tenants.a]\nkeys = ["{hash_key(CHAT)}"]'))
    assert [keys.is_stranger(generate, shown) for shown in ([], [("authorization", wrong)])] == [True, True]
    assert not keys.is_stranger(generate, [("authorization", known)])
    assert not keys.is_stranger("/grpc.health.v1.Health/Check", [])
    assert not KeyGate().is_stranger(generate, [])
    certificates = KeyGate(tenants('[tenants.a]\ncommon_names = ["a"]'))
    assert not certificates.is_stranger(generate, [])
    assert certificates.is_stranger(generate, [("authorization", wrong)])


@pytest.mark.parametrize("form", ["bearer {}", "BEARER {}", "Bearer  {} "])
async def test_forms_of_a_key(served: Serving, form: str) -> None:
    metadata = (("authorization", form.format(CHAT).strip()),)
    served.runner.open()
    assert [response async for response in served.stub.Generate(request(), metadata=metadata)]


async def test_ids_are_a_tenants_own(served: Serving) -> None:
    """Whoever uses one learns nothing of others who do, by whatever key."""
    asked = [
        (request(request_id="mine"), bearer(CHAT)),
        (request(request_id="mine"), bearer(OTHER)),
        (request(), (*bearer(FRONT), ("x-request-id", "mine"))),  # of no tenant
    ]
    calls = []
    for message, metadata in asked:
        calls.append(served.stub.Generate(message, metadata=metadata))
        await served.until(lambda: served.engine.num_live == len(calls))
    error = await failure(served.stub.Generate(request(request_id="mine"), metadata=bearer(CHAT_TOO)))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS, "the tenant's own"
    served.runner.open()
    for call in calls:
        first, *_ = [response async for response in call]
        assert first.started.request_id == "mine"


async def test_another_tenants_name(served: Serving) -> None:
    message = request(scheduling=pb.SchedulingParams(tenant="other"))
    code, said = await refused(served.stub.Generate(message, metadata=bearer(CHAT)))
    assert (code, said) == (DENIED, "scheduling.tenant = 'other': this credential is of tenant 'chat'")


async def test_models(served: Serving) -> None:
    said = f"model '{MODEL}' is not for tenant 'poor'"
    for model in ("", MODEL):
        assert await refused(served.stub.Generate(request(model=model), metadata=bearer(POOR))) == (DENIED, said)
    message = request(scheduling=pb.SchedulingParams(tenant="poor"))
    assert await refused(served.stub.Generate(message, metadata=bearer(FRONT))) == (DENIED, said)
    stub = model_pb2_grpc.ModelServiceStub(served.channel)
    for key, names in ((POOR, []), (OTHER, [MODEL])):
        listed = await stub.ListModels(model_pb2.ListModelsRequest(), metadata=bearer(key))
        assert [model.name for model in listed.models] == names


# -- services ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "code"), [(OPS, OK), (FRONT, DENIED), (CHAT, DENIED), (WRONG, UNAUTHENTICATED), (None, UNAUTHENTICATED)]
)
async def test_admins_alone_administer(served: Serving, key: str | None, code: grpc.StatusCode) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(served.channel)
    metadata = bearer(key) if key else ()
    methods = {
        stub.GetLoad: admin_pb2.GetLoadRequest(),
        stub.ListRequests: admin_pb2.ListRequestsRequest(),
        stub.GetStats: admin_pb2.GetStatsRequest(),
        stub.CancelGeneration: admin_pb2.CancelGenerationRequest(request_id="none"),
        stub.Drain: admin_pb2.DrainRequest(),
    }
    assert len(methods) == len(admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods)
    for method, message in methods.items():
        expected = grpc.StatusCode.NOT_FOUND if code is OK and method is stub.CancelGeneration else code
        if expected is OK:
            await method(message, metadata=metadata)
            continue
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(message, metadata=metadata)
        assert caught.value.code() is expected
        if code is DENIED:
            assert re.search("AdminService/.* is for admins; this credential is ", caught.value.details() or "")


async def test_health_is_for_everybody(served: Serving) -> None:
    stub = health_pb2_grpc.HealthStub(served.channel)
    for metadata in ((), bearer(WRONG)):
        answer = await stub.Check(health_pb2.HealthCheckRequest(), metadata=metadata)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def services(call: Any) -> list[reflection_pb2.ServerReflectionResponse]:
    """All that reflection answers to one question: what is served."""
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    await call.done_writing()
    return [response async for response in call]


@pytest.mark.parametrize(("key", "code"), [(CHAT, OK), (WRONG, UNAUTHENTICATED), (None, UNAUTHENTICATED)])
async def test_reflection_is_for_those_who_may_call(served: Serving, key: str | None, code: grpc.StatusCode) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    call = stub.ServerReflectionInfo(metadata=bearer(key) if key else ())
    if code is OK:
        assert await services(call)
    else:  # nothing is written: a write that meets the refusal on its way hides the refusal
        assert (await refused(call))[0] is code


@pytest.mark.parametrize("health", [True, False])
@pytest.mark.parametrize("reflection", [True, False])
async def test_services_that_are_turned_off(health: bool, reflection: bool) -> None:
    async with serving_context(settings=ServerSettings(health=health, reflection=reflection)) as served:
        check = health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest())
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        info = stub.ServerReflectionInfo()
        if health:
            await check
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        if reflection:
            [answer] = await services(info)
            names = {service.name for service in answer.list_services_response.service}
            assert ("grpc.health.v1.Health" in names) == health
        else:
            assert (await failure(info)).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_without_credentials_in_the_file_everybody_is_admitted() -> None:
    gate = KeyGate(tenants('[tenants.poor]\nmodels = ["another model"]'))
    assert gate.is_open
    async with serving_context(gate=gate) as served:
        assert await tenant_of(served, WRONG) == ""
        await admin_pb2_grpc.AdminServiceStub(served.channel).GetLoad(admin_pb2.GetLoadRequest())
        message = request(scheduling=pb.SchedulingParams(tenant="poor"))
        assert (await refused(served.stub.Generate(message)))[0] is DENIED


async def test_other_keys_from_one_rpc_to_the_next(served: Serving) -> None:
    gate = served.server.calls.gate
    assert isinstance(gate, KeyGate)
    live = aiter(served.stub.Generate(request(max_tokens=20), metadata=bearer(CHAT)))
    served.runner.allow(1)
    await anext(live)
    gate.use(tenants(FILE.replace(hash_key(CHAT), hash_key(WRONG))))
    assert (await refused(served.stub.Generate(request(), metadata=bearer(CHAT))))[0] is UNAUTHENTICATED
    assert await tenant_of(served, WRONG) == "chat"
    assert await tenant_of(served, CHAT_TOO) == "chat"
    served.runner.open()
    *_, last = [response async for response in live]
    assert last.HasField("finished"), "what was admitted goes on"


# -- client certificates ----------------------------------------------------------------------------------------------


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def credentials(authority: Authority, tmp_path: Path) -> grpc.ServerCredentials:
    certificate, key = authority.issue("server").write(tmp_path, "server")
    client_ca = tmp_path / "ca.pem"
    client_ca.write_bytes(authority.certificate)
    return TlsFiles(certificate, key, client_ca).credentials()


async def test_common_names(authority: Authority, credentials: grpc.ServerCredentials) -> None:
    stranger = Authority("Another CA")
    chat, front, nobody = (authority.issue(name) for name in ("chat.example", "front.example", "nobody.example"))
    async with serving_context(gate=KeyGate(tenants(FILE)), credentials=credentials) as served:
        served.runner.open()

        async def call(pem: Any, named: str = "", metadata: Any = ()) -> grpc.StatusCode:
            shown = grpc.ssl_channel_credentials(authority.certificate, pem and pem.key, pem and pem.certificate)
            async with grpc.aio.secure_channel(served.address, shown) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                message = request(scheduling=pb.SchedulingParams(tenant=named))
                try:
                    assert [response async for response in stub.Generate(message, metadata=metadata)]
                except grpc.aio.AioRpcError as error:
                    return error.code()
                return OK

        assert await call(chat) is OK
        assert await call(chat, "other") is DENIED
        assert await call(front, "other") is OK
        assert await call(nobody) is UNAUTHENTICATED
        # A key says more than the connection it comes over.
        assert await call(nobody, metadata=bearer(CHAT)) is OK
        assert await call(front, "chat", bearer(OTHER)) is DENIED
        assert await call(chat, metadata=bearer(WRONG)) is UNAUTHENTICATED
        # These do not get as far as an RPC.
        assert await call(stranger.issue("chat.example")) is grpc.StatusCode.UNAVAILABLE
        assert await call(None) is grpc.StatusCode.UNAVAILABLE


# -- making keys ------------------------------------------------------------------------------------------------------


def test_new_keys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["paceline", "keys", "new"])
        with pytest.raises(SystemExit) as caught:
            main()
        assert not caught.value.code
        key, line = capsys.readouterr().out.splitlines()
        path = tmp_path / "tenants.toml"
        path.write_text(f"[tenants.a]\n{line}\n")
        assert read_tenants(path).tenants["a"].keys == (hash_key(key),)
        assert key not in line
        keys.append(key)
    assert keys[0] != keys[1]
    assert all(re.fullmatch(r"paceline_[\w-]{43}", key) for key in keys)


# -- what may be reached ----------------------------------------------------------------------------------------------

CERT = {"tls_cert": Path("c"), "tls_key": Path("k")}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
@pytest.mark.parametrize("everybody", [True, False])
def test_loopback_is_always_fine(host: str, everybody: bool) -> None:
    ServerSettings(host=host).check_exposure(everybody)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example", "example", "", "127.1"])
def test_elsewhere_it_must_protect_itself(host: str, caplog: pytest.LogCaptureFixture) -> None:
    assert not is_loopback(host)
    for everybody in (True, False):
        with pytest.raises(
            InvalidArgument, match=r"loopback address without tls_cert and tls_key.*--insecure"
        ) as caught:
            ServerSettings(host=host).check_exposure(everybody)
        assert "\n" not in str(caught.value)
        caplog.clear()
        ServerSettings(host=host, insecure=True).check_exposure(everybody)
        assert f"insecure: host = {host!r} should be a loopback address" in caplog.text
    with pytest.raises(InvalidArgument, match=r"without client_ca, or keys in the tenants file.*--insecure"):
        ServerSettings(host=host, **CERT).check_exposure(True)  # type: ignore[arg-type]
    ServerSettings(host=host, **CERT).check_exposure(False)  # type: ignore[arg-type]
    ServerSettings(host=host, **CERT, client_ca=Path("a")).check_exposure(True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "host = '0.0.0.0': must be a loopback address without tls_cert and tls_key"),
        (["--tls-cert", "x.pem"], "tls_cert = 'x.pem': must be set together with tls_key"),
        (["--tls-key", "x.pem"], "tls_key = 'x.pem': must be set together with tls_cert"),
        (["--client-ca", "x.pem"], "client_ca = 'x.pem': must be set together with tls_cert and tls_key"),
        (["--tls-cert", "x.pem", "--tls-key", "y"], "tls_cert = 'x.pem': must be a readable file (No such file"),
        (["--max-message-size", "0"], "max_message_size = 0: must be in 1..2^31-1"),
        (["--keepalive", "0"], "keepalive = 0.0: must be seconds in 0.01..1000000"),
        (["--keepalive", "2147484"], "keepalive = 2147484.0: must be seconds in 0.01..1000000"),
        (["--log-format", "xml"], "log_format = 'xml': must be text or json"),
    ],
)
def test_settings_that_are_refused_before_a_model_is_loaded(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline import wiring

    def load(settings: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(wiring, "build_engine", load)
    monkeypatch.setattr("paceline.server.logs.configure", lambda log_format: None)
    monkeypatch.setattr(sys, "argv", ["paceline", "serve", "--port", "0", *options])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("paceline: ")]
    assert line.startswith(f"paceline: {said}")


def test_options_become_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"  # which the server reads, and nobody before it
    made: list[tuple[Callable[[TenantsFile], EngineSettings], ServerSettings]] = []
    monkeypatch.setattr("paceline.server.run_server", lambda build, settings: made.append((build, settings)))
    monkeypatch.setattr("paceline.wiring.build_engine", lambda settings: settings)
    monkeypatch.setattr("paceline.server.logs.configure", lambda log_format: None)
    given = (
        f"--tenants {path} --host ::1 --port 1 --grace 2 --tls-cert c --tls-key k --client-ca a --insecure --no-health"
        " --no-reflection --max-message-size 1MiB --keepalive 3 --metrics-port 4 --log-format json"
    )
    for options, expected in {
        given: ServerSettings(
            host="::1",
            port=1,
            grace=2.0,
            tls_cert=Path("c"),
            tls_key=Path("k"),
            client_ca=Path("a"),
            insecure=True,
            reflection=False,
            health=False,
            max_message_size=1 << 20,
            keepalive=3.0,
            metrics_port=4,
            log_format="json",
            tenants=path,
        ),
        "": ServerSettings(),
    }.items():
        monkeypatch.setattr(sys, "argv", ["paceline", "serve", *options.split()])
        with pytest.raises(SystemExit) as caught:
            main()
        assert not caught.value.code
        [(build, settings)] = made
        made.clear()
        assert settings == expected
        granted = TenantsFile.model_validate({"unknown": "refuse", "tenants": {"a": {"weight": 2.0}}})
        assert build(granted) == EngineSettings(
            tenants={"a": TenantPolicy(weight=2.0)}, default_tenant=None, take_memory=True
        )
