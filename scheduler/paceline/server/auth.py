"""Who may call what: API keys and client certificates, as the tenants file has them."""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

from paceline.config_file import KEY_PREFIX, TenantsFile
from paceline.errors import PermissionDenied, Unauthenticated, brief
from paceline.headers import AUTHORIZATION_KEY
from paceline.server.admin_service import ADMIN_SERVICE
from paceline.server.calls import Caller, Context, Metadata

COMMON_NAME: Final = "x509_common_name"
ADMIN_PREFIX: Final = f"/{ADMIN_SERVICE}/"
# Load balancers and container runtimes have no credentials.
HEALTH_PREFIX: Final = "/grpc.health.v1.Health/"
NOBODY: Final = Caller()


def make_key() -> str:
    """A new key: 256 random bits behind a prefix by which scanners know it."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """As tenants files have it.

    A fast hash, for these keys are random: of 2^256 nobody finds one by trying. Slow hashes are for passwords.
    """
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


class KeyGate:
    """Admits whoever shows a key ("authorization: Bearer KEY") or, without one, a client certificate whose common name
    the file has. While it has neither, everybody may do everything.

    Keys are looked up by their hash: what the time of that tells is about hashes, of which nobody can choose a key.
    """

    def __init__(self, file: TenantsFile | None = None) -> None:
        self.use(file or TenantsFile())

    def use(self, file: TenantsFile) -> None:
        """Admit by another file from the next RPC on. On the thread that admits."""
        self._by_hash: dict[str, Caller] = {}
        self._by_common_name: dict[str, Caller] = {}
        for kind, name, holder in file.holders:
            tenant = name if kind == "tenants" else None
            caller = Caller(f"{kind}.{name}", tenant, is_admin=kind == "admins", models_of=file.models_of)
            self._by_hash.update(dict.fromkeys(holder.keys, caller))
            self._by_common_name.update(dict.fromkeys(holder.common_names, caller))
        self._everybody = None if file.has_credentials else Caller(is_admin=True, models_of=file.models_of)

    @property
    def is_open(self) -> bool:
        """Everybody is admitted."""
        return self._everybody is not None

    def admit(self, method: str, context: Context) -> Caller:
        if method.startswith(HEALTH_PREFIX):
            return NOBODY
        caller = self._everybody or self._identify(context)
        if method.startswith(ADMIN_PREFIX) and not caller.is_admin:
            raise PermissionDenied(f"{method} is for admins; this credential is {caller.name}'s")
        return caller

    def is_stranger(self, method: str, metadata: Metadata) -> bool:
        if method.startswith(HEALTH_PREFIX) or self.is_open:
            return False
        shown = _shown(metadata)
        if not shown:
            return not self._by_common_name
        try:
            self._by_keys(shown)
        except Unauthenticated:
            return True
        return False

    def _identify(self, context: Context) -> Caller:
        shown = _shown(context.invocation_metadata() or ())
        if shown:
            return self._by_keys(shown)
        names = list(context.auth_context().get(COMMON_NAME, ()))
        if names:
            return self._by_certificate(names)
        raise Unauthenticated("no credential: send the metadata 'authorization: Bearer KEY'")

    def _by_keys(self, shown: list[str | bytes]) -> Caller:
        """No text here repeats what was shown: it may be a good key, misspelt."""
        if len(shown) > 1:
            raise Unauthenticated("several credentials: send one 'authorization'")
        scheme, _, key = str(shown[0]).partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("the metadata 'authorization' has not the form 'Bearer KEY'")
        caller = self._by_hash.get(hash_key(key.strip()))
        if caller is None:
            raise Unauthenticated("the key is not known here")
        return caller

    def _by_certificate(self, names: list[bytes]) -> Caller:
        """The TLS handshake has verified it."""
        name = names[0].decode(errors="replace")
        if len(names) > 1 or name not in self._by_common_name:
            raise Unauthenticated(f"the client certificate's common name, {brief(name)}, is not known here")
        return self._by_common_name[name]


def _shown(metadata: Metadata) -> list[str | bytes]:
    return [value for key, value in metadata if key == AUTHORIZATION_KEY]
