"""What an operator chooses of the server around the engine."""

from __future__ import annotations

import ipaddress
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.errors import InvalidArgument

logger = logging.getLogger(__name__)

LOG_FORMATS: Final = ("text", "json")
LONGEST_SILENCE: Final = 1_000_000  # seconds: gRPC takes milliseconds, in 31 bits


@dataclass(frozen=True)
class ServerSettings:
    """Attributes:
        host: address to listen on.
        port: 0 takes a free one.
        grace: seconds that live requests get to end when the server is stopped.
        tls_cert, tls_key: PEM files; both or neither. Read again when they change.
        client_ca: PEM file; demands client certificates that it has signed.
        insecure: other machines may reach a server that does not protect itself.
        reflection, health: services that are served, or not.
        max_message_size: bytes of one request; up to four times that is received, to be refused.
        keepalive: seconds of silence after which a peer is asked for a sign of life; it has half as long to answer.
        metrics_port: where metrics are served, in plaintext and to everybody who can reach it; None: nowhere.
        metrics_host: address to serve them on.
        log_format: "text" or "json".
        tenants: the tenants file, read again on SIGHUP.

    Raises:
        InvalidArgument: a value that is not allowed.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    grace: float = 30.0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    insecure: bool = False
    reflection: bool = True
    health: bool = True
    max_message_size: int = 4 << 20
    keepalive: float = 2.0
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    log_format: str = "text"
    tenants: Path | None = None

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise InvalidArgument(name, port, "an integer in 0..65535")
        if not self.grace >= 0:
            raise InvalidArgument("grace", self.grace, "seconds >= 0")
        if (self.tls_cert is None) != (self.tls_key is None):
            one, other = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise InvalidArgument(one, getattr(self, one), f"set together with {other}")
        if self.client_ca is not None and self.tls_cert is None:
            raise InvalidArgument("client_ca", self.client_ca, "set together with tls_cert and tls_key")
        if not 1 <= self.max_message_size < 1 << 31:
            raise InvalidArgument("max_message_size", self.max_message_size, "in 1..2^31-1")
        if not 0.01 <= self.keepalive <= LONGEST_SILENCE:
            raise InvalidArgument("keepalive", self.keepalive, f"seconds in 0.01..{LONGEST_SILENCE}")
        if self.log_format not in LOG_FORMATS:
            raise InvalidArgument("log_format", self.log_format, " or ".join(LOG_FORMATS))

    def check_exposure(self, everybody: bool) -> None:
        """Other machines reach only what protects itself, unless `insecure` allows it; that is logged.

        Args:
            everybody: is admitted, without a credential.

        Raises:
            InvalidArgument: they would reach more.
        """
        if is_loopback(self.host):
            return
        if self.tls_cert is None:
            allowed = "a loopback address without tls_cert and tls_key (prompts and keys would travel in plaintext)"
        elif everybody and self.client_ca is None:
            allowed = "a loopback address without client_ca, or keys in the tenants file (everybody would be served)"
        else:
            return
        if not self.insecure:
            raise InvalidArgument("host", self.host, f"{allowed}, unless --insecure is given")
        logger.warning("insecure: host = %r should be %s", self.host, allowed)


def is_loopback(host: str) -> bool:
    """Only this machine reaches it. Of names, only localhost is known to be so."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
