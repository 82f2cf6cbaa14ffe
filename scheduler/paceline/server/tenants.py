"""The tenants file while the server runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from paceline.config_file import TenantsFile, check_tenants, read_tenants
from paceline.engine import AsyncEngine
from paceline.errors import InvalidArgument
from paceline.server.auth import KeyGate

logger = logging.getLogger(__name__)


class ServedTenants:
    """Puts the file's keys into the gate and its policies into the scheduler, at first and whenever it is reloaded. To
    be used on the event loop's thread, which the engine belongs to.

    Args:
        path: None stands for an empty file, in which nothing changes.

    Attributes:
        file: as it is in force.

    Raises:
        InvalidArgument: the file has mistakes.
    """

    def __init__(self, path: Path | None, gate: KeyGate) -> None:
        self._path = path
        self._gate = gate
        self.file = TenantsFile() if path is None else read_tenants(path)
        self._engine: AsyncEngine | None = None
        gate.use(self.file)

    def open(self, engine: AsyncEngine) -> None:
        """From now on, the policies of this engine. Raises InvalidArgument: the file does not go with its settings."""
        if self._path is None:
            return
        check_tenants(self.file.policies, self.file.default_policy, engine.engine.scheduler.config)
        self._engine = engine
        self._put(self.file)

    async def reload(self) -> None:
        """Put the file as it is now in force, after `open`. One with mistakes is logged, and the old one stays."""
        if self._path is None or self._engine is None:
            return
        try:
            file = await asyncio.to_thread(read_tenants, self._path)
            check_tenants(file.policies, file.default_policy, self._engine.engine.scheduler.config)
            if self.file.has_credentials and not file.has_credentials:
                # An editor may have saved an empty file; nobody is let in by accident.
                allowed = "one with keys or common names, like the one in use; a restart would admit everybody"
                raise InvalidArgument("tenants", self._path, allowed)
        except InvalidArgument as error:
            logger.error("the old tenants file stays in force: %s", error)
            return
        self._put(file)
        logger.info("the tenants file has been read again: %d tenants", len(file.tenants))

    def _put(self, file: TenantsFile) -> None:
        assert self._engine is not None
        self.file = file
        self._gate.use(file)
        self._engine.set_policies(file.policies, file.default_policy)
        self._warn_of_models(file, self._engine.engine.model_name)

    def _warn_of_models(self, file: TenantsFile, served: str) -> None:
        """A name that is misspelt would keep a tenant out, and say nothing until it asks."""
        tables = {"default": file.default, **{f"tenants.{name}": table for name, table in file.tenants.items()}}
        for place, table in tables.items():
            if unknown := sorted((table.models or frozenset()) - {served}):
                logger.warning("%s.models: not served here: %s; there is %r", place, ", ".join(unknown), served)
