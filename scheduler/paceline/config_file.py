"""Configuration files in TOML: read, checked as a whole, and every mistake told at once."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from paceline.core.params import Method, SpeculationBounds
from paceline.core.tenants import TenantPolicy
from paceline.errors import InvalidArgument, brief

# Strict: "3" is no number, and true is none either.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Natural = Annotated[int, Field(ge=0, strict=True)]


class Table(BaseModel):
    """A table of a file: unknown keys are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SpeculationTable(Table):
    """`SpeculationBounds`."""

    methods: frozenset[Method] = frozenset(Method)
    min_depth: Natural = 0
    max_depth: Natural | None = None

    @field_validator("max_depth")
    @classmethod
    def _check_max_depth(cls, value: int | None, info: ValidationInfo) -> int | None:
        lowest = info.data.get("min_depth", 0)
        if value is not None and value < lowest:
            raise PydanticCustomError("depths", "must be at least min_depth ({lowest})", {"lowest": lowest})
        return value


class TenantTable(Table):
    """`TenantPolicy`."""

    weight: Positive = 1.0
    max_running: Count | None = None
    max_queued: Count | None = None
    max_blocks: Count | None = None
    tokens_per_second: Positive | None = None
    burst_tokens: Positive | None = None
    max_priority: Natural = 0
    speculation: SpeculationTable = SpeculationTable()

    @field_validator("burst_tokens")
    @classmethod
    def _check_burst_tokens(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("tokens_per_second", ...) is None:  # absent where it is wrong itself
            raise PydanticCustomError("burst", "must be set together with tokens_per_second")
        return value

    def policy(self) -> TenantPolicy:
        """The table's values."""
        given = {name: getattr(self, name) for name in TenantTable.model_fields if name != "speculation"}
        bounds = self.speculation
        return TenantPolicy(**given, speculation=SpeculationBounds(bounds.methods, bounds.min_depth, bounds.max_depth))


class TenantsFile(Table):
    """`default` is what tenants have that are not named; `unknown = "refuse"` serves none of them."""

    unknown: Literal["serve", "refuse"] = "serve"
    default: TenantTable = TenantTable()
    tenants: dict[Annotated[str, Field(pattern=r"^[!-~]{1,128}$")], TenantTable] = {}


AnyTable = TypeVar("AnyTable", bound=Table)


def read_file(path: Path, kind: type[AnyTable]) -> AnyTable:
    """A file as a table of that kind.

    Raises:
        InvalidArgument: it cannot be read, is no TOML, or has mistakes: all of them, each with key, value and what is
            allowed.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument("file", str(path), f"a readable file ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument("file", str(path), f"TOML in UTF-8 ({error})") from error
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        mistakes = [_told(one["loc"], one["input"], one["msg"]) for one in error.errors()]
        raise BadFile(path, mistakes) from error


def replaced(table: AnyTable, **changes: object) -> AnyTable:
    """The table with other values, checked; None leaves what there is. Raises InvalidArgument."""
    given = {name: value for name, value in changes.items() if value is not None}
    try:
        return type(table).model_validate({**table.model_dump(exclude_unset=True), **given})
    except ValidationError as error:
        one = error.errors()[0]
        raise InvalidArgument(".".join(map(str, one["loc"])), one["input"], one["msg"]) from error


def read_tenants(path: Path) -> tuple[dict[str, TenantPolicy], TenantPolicy | None]:
    """Policies by tenant, and what all others are granted, None if nothing. Raises InvalidArgument as `read_file`."""
    file = read_file(path, TenantsFile)
    policies = {name: table.policy() for name, table in file.tenants.items()}
    return policies, None if file.unknown == "refuse" else file.default.policy()


class BadFile(InvalidArgument):
    """A file with mistakes, a line for each."""

    def __init__(self, path: Path, mistakes: list[str]) -> None:
        super().__init__("file", str(path), "without mistakes")
        self.args = ("\n  ".join([f"{path} has {len(mistakes)} mistake{'s' * (len(mistakes) > 1)}:", *mistakes]),)


def _told(location: tuple[int | str, ...], value: object, message: str) -> str:
    return f"{'.'.join(map(str, location))} = {brief(value)}: {message}"
