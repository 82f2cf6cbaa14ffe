"""Where a client connects to, how, and what it says with every call: the same for both clients."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias, TypedDict, Unpack

import grpc

from paceline.client.retry import RetryPolicy
from paceline.errors import InvalidArgument
from paceline.headers import AUTHORIZATION_KEY, NAME, REQUEST_ID_KEY, TRACEPARENT, TRACEPARENT_KEY, check_name
from paceline.options import check_names, is_integer
from paceline.v1 import generation_pb2 as pb

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

_MIB: Final = 1024 * 1024
_CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # A response with the logprobs of a long prompt is large; a request is bounded by the server.
    ("grpc.max_receive_message_length", 64 * _MIB),
    ("grpc.max_send_message_length", 64 * _MIB),
    # While a stream is open, a peer that stopped answering is noticed within 30 seconds. The keepalive timeout alone
    # does not notice a stopped process; the ping timeout does.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Retries are ours: see retry.py. For them to find a server that has come back, connecting is tried as often.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # In spite of its name, what one attempt may take, TLS and the server's first frame included. Not the default of 20
    # seconds, for which an address that swallows packets would be waited for.
    ("grpc.min_reconnect_backoff_ms", 5_000),
)
# What headers carry unchanged.
_KEY: Final = re.compile(r"[!-~]+")
_METADATA_KEY: Final = re.compile(r"(?!grpc-)[0-9a-z_.-]+")
_METADATA_TEXT: Final = re.compile(r"[ -~]*")
# Where gRPC would say nothing of a target that it misreads: without a port it asks port 443.
_ADDRESS: Final = re.compile(r"(?:\[[^\[\]\s]+\]|[^\[\]\s:/]+):(\d{1,5})")
_OTHER_TARGET: Final = re.compile(r"(?:unix|unix-abstract|vsock|dns|ipv4|ipv6|xds):.+")
_SCHEMES: Final = ("dns:///", "dns:", "ipv4:", "ipv6:")  # those after which addresses stand


class ClientOptions(TypedDict, total=False):
    """The keyword arguments of `Client` and `AsyncClient`.

    `api_key` goes out with every call as `authorization: Bearer KEY`: over TLS, or in plaintext to this machine itself;
    `allow_plaintext_key` sends it in plaintext anywhere.
    `tls`: True trusts the authorities that come with gRPC, a path those in that PEM file; without it the connection is
    plaintext. `client_certificate` and `client_key`, paths of PEM files, say who the client is (mTLS). The files are
    read at once. `credentials`, made by hand, stand for all of these.
    `metadata` goes out with every call: keys in lower case, texts in ASCII; bytes where the key ends with "-bin".
    `max_retries` (3) of a call that the server could not take, before it has answered anything; 0 for none.
    """

    api_key: str | None
    allow_plaintext_key: bool
    tls: bool | str | Path
    client_certificate: str | Path | None
    client_key: str | Path | None
    credentials: grpc.ChannelCredentials | None
    metadata: Mapping[str, str | bytes] | None
    max_retries: int


class CallOptions(TypedDict, total=False):
    """The keyword arguments of every call but a generation's.

    `timeout`: seconds above 0 that the call may take, retries included, as its deadline. `request_id`: its name in the
    server's logs. `traceparent`: the span it belongs to (W3C trace context).
    """

    timeout: float | None
    request_id: str | None
    traceparent: str | None


class Connection:
    """How to reach a server. Holds secrets, and shows none.

    Raises:
        InvalidArgument: a target that is none, or an option that is not allowed, does not go with another, or names a
            file that cannot be read.
        TypeError: an option that does not exist.
    """

    def __init__(self, target: str, **options: Unpack[ClientOptions]) -> None:
        check_names(options, ClientOptions.__annotations__)
        _check_target(target)
        max_retries: Any = options.get("max_retries", 3)
        if not is_integer(max_retries) or max_retries < 0:
            raise InvalidArgument("max_retries", max_retries, "an integer >= 0")
        self.target = target
        self.credentials = _credentials(options)
        self.metadata = _metadata(options.get("metadata"))
        self.retries = RetryPolicy(int(max_retries))
        # Between here and here a proxy of the environment has no business.
        self.channel_options = (*_CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(not is_local(target))))
        api_key = options.get("api_key")
        if api_key is not None:
            if not isinstance(api_key, str) or not _KEY.fullmatch(api_key):
                raise InvalidArgument("api_key", "(not shown)", "printable ASCII characters without blanks")
            if self.credentials is None and not is_local(target) and not options.get("allow_plaintext_key"):
                allowed = "left out without TLS, unless allow_plaintext_key is set: everybody on the way could read it"
                raise InvalidArgument("api_key", "(not shown)", allowed)
            self.metadata += ((AUTHORIZATION_KEY, f"Bearer {api_key}"),)

    def __repr__(self) -> str:
        return f"Connection({self.target!r})"

    def call_metadata(self, request_id: str | None = None, traceparent: str | None = None) -> Metadata:
        """What a call says besides its request. Raises InvalidArgument."""
        metadata = self.metadata
        if request_id is not None:
            check_name("request_id", request_id)
            metadata += ((REQUEST_ID_KEY, request_id),)
        if traceparent is not None:
            if not isinstance(traceparent, str) or not TRACEPARENT.fullmatch(traceparent):
                raise InvalidArgument("traceparent", traceparent, "VERSION-TRACE-PARENT-FLAGS in lower-case hex")
            metadata += ((TRACEPARENT_KEY, traceparent),)
        return metadata

    def generation_metadata(self, request: pb.GenerateRequest, traceparent: str | None) -> Metadata:
        """The same for a generation, whose request has its id; of one that headers do not carry, the server speaks."""
        return self.call_metadata(request.request_id if NAME.fullmatch(request.request_id) else None, traceparent)


def _check_target(target: object) -> None:
    if isinstance(target, str):
        address = _ADDRESS.fullmatch(target)
        if (address and 0 < int(address[1]) <= 65535) or _OTHER_TARGET.fullmatch(target):
            return
    raise InvalidArgument("target", target, "HOST:PORT, or unix:PATH")


def is_local(target: str) -> bool:
    """What is sent there never leaves this machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    scheme = next((scheme for scheme in _SCHEMES if target.startswith(scheme)), "")
    return all(_is_loopback(address) for address in target.removeprefix(scheme).split(","))


def _is_loopback(address: str) -> bool:
    """Whether HOST, HOST:PORT or [HOST]:PORT is this machine itself."""
    if address.startswith("["):
        host = address[1:].partition("]")[0]
    else:
        host = address if address.count(":") > 1 else address.partition(":")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _metadata(given: Mapping[str, str | bytes] | None) -> Metadata:
    """As gRPC takes it. Raises InvalidArgument, which shows no value: it may be a secret."""
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise InvalidArgument("metadata", "(not shown)", "a mapping of keys to values")
    for key, value in given.items():
        if not isinstance(key, str) or not _METADATA_KEY.fullmatch(key):
            raise InvalidArgument(
                "metadata", key, 'keys of 0-9, a-z, "_", "-" and ".", which do not begin with "grpc-"'
            )
        if key.endswith("-bin"):
            carried, allowed = isinstance(value, bytes), 'bytes where the key ends with "-bin"'
        else:
            carried, allowed = isinstance(value, str) and bool(_METADATA_TEXT.fullmatch(value)), "printable ASCII text"
        if not carried:
            raise InvalidArgument("metadata", f"{key}: (not shown)", allowed)
    return tuple(given.items())


def _credentials(options: ClientOptions) -> grpc.ChannelCredentials | None:
    given = options.get("credentials")
    tls = options.get("tls", False)
    certificate, key = options.get("client_certificate"), options.get("client_key")
    if given is not None:
        if not isinstance(given, grpc.ChannelCredentials):
            raise InvalidArgument("credentials", "(not shown)", "grpc.ChannelCredentials")
        if tls or certificate is not None or key is not None:
            raise InvalidArgument("credentials", given, "given alone, without tls and client_certificate")
        return given
    if (certificate is None) != (key is None):
        raise InvalidArgument("client_certificate", certificate, "given with client_key, and the other way round")
    if not tls:
        if certificate is not None:
            raise InvalidArgument("client_certificate", certificate, "given with tls")
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=None if tls is True else _read("tls", tls),
        private_key=None if key is None else _read("client_key", key),
        certificate_chain=None if certificate is None else _read("client_certificate", certificate),
    )


def _read(field: str, path: object) -> bytes:
    if not isinstance(path, str | Path):
        raise InvalidArgument(field, path, "the path of a PEM file")
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(field, path, f"a PEM file that can be read ({error.strerror})") from error
    if b"-----BEGIN " not in data:  # gRPC would say that the server cannot be reached
        raise InvalidArgument(field, path, "a PEM file")
    return data
