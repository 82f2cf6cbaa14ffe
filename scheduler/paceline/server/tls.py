"""TLS from files that may change while the server runs."""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from paceline.errors import InvalidArgument

logger = logging.getLogger(__name__)

Stamp: TypeAlias = tuple[object, ...]  # differs between versions of the files


class TlsFiles:
    """Certificate, key and client CA. When they change, new connections get the new ones; a version of them that is no
    good is logged, once, and the old one stays. Those that are connected notice nothing.

    Any thread may call any method.

    Args:
        client_ca: demands a certificate of every client, signed by one of these.

    Raises:
        InvalidArgument: a file cannot be read or is not PEM, or certificate and key do not belong together.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        paths = {"tls_cert": certificate, "tls_key": key, "client_ca": client_ca}
        self._paths = {name: path for name, path in paths.items() if path is not None}
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._latest = self._load()

    def credentials(self) -> grpc.ServerCredentials:
        """For one port."""
        given = self._latest

        def fetch() -> Any:
            """Before each handshake, in a thread of grpc's; None means no change."""
            nonlocal given
            self.reload(force=False)
            before, given = given, self._latest
            return None if given is before else given

        return grpc.dynamic_ssl_server_credentials(
            given, fetch, require_client_authentication="client_ca" in self._paths
        )

    def reload(self, force: bool = True) -> None:
        """Read the files; without `force`, only if they are not those that were read last."""
        with self._lock:
            stamp = self._stamp()
            if stamp == self._seen and not force:
                return
            mistake: InvalidArgument | None = None
            try:
                latest = self._load()
            except InvalidArgument as error:
                mistake = error
            if self._stamp() != stamp:
                return  # they change at this moment; the next connection looks again
            self._seen = stamp
            if mistake is not None:
                logger.error("the old TLS certificate stays in use: %s", mistake)
                return
            self._latest = latest
            logger.info("the TLS certificate has been read again from %s", self._paths["tls_cert"])

    def _stamp(self) -> Stamp:
        return tuple(_stamp(path) for path in self._paths.values())

    def _load(self) -> grpc.ServerCertificateConfiguration:
        """Checked here: grpc would find what is wrong at the first handshake, and tell nobody."""
        data = {name: _read(name, path) for name, path in self._paths.items()}
        certificate, key, client_ca = (self._paths.get(name) for name in ("tls_cert", "tls_key", "client_ca"))
        assert certificate is not None
        if b"ENCRYPTED" in data["tls_key"]:
            raise InvalidArgument("tls_key", key, "a key without a password")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ValueError) as error:  # of a file that goes away meanwhile, too
            allowed = f"a PEM certificate chain to which the key {str(key)!r} belongs ({_reason(error)})"
            raise InvalidArgument("tls_cert", certificate, allowed) from error
        if client_ca is not None:
            try:
                context.load_verify_locations(client_ca)
            except (OSError, ValueError) as error:
                raise InvalidArgument("client_ca", client_ca, f"PEM certificates ({_reason(error)})") from error
        return grpc.ssl_server_certificate_configuration([(data["tls_key"], data["tls_cert"])], data.get("client_ca"))


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError as error:
        return (error.errno,)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(name, path, f"a readable file ({error.strerror})") from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error).lower().replace("_", " ")
