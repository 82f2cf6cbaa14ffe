"""Configuration files in TOML: read, checked as a whole, and every mistake told at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_serializer, field_validator
from pydantic_core import PydanticCustomError

from paceline.core.config import SchedulerConfig
from paceline.core.method import Method
from paceline.core.params import SpeculationBounds
from paceline.core.tenant_policy import LEAST_RATE, LEAST_WEIGHT, MOST_WEIGHT, TenantPolicy
from paceline.errors import InvalidArgument, brief

KEY_PREFIX: Final = "paceline_"  # of the keys that we make: so that they are known where they should not be
KEY: Final = re.compile(KEY_PREFIX + r"[\w-]{20,}")

# Strict: "3" is no number, and true is none either.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Natural = Annotated[int, Field(ge=0, strict=True)]
# Of whoever shows a credential. No blanks: the name of a tenant travels in HTTP headers.
Name = Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]
Text = Annotated[str, Field(min_length=1)]
KeyHash = Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]


class Table(BaseModel):
    """A table of a file: unknown keys are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterable[str]:
        """Mistakes that no field has by itself, a line for each.

        Args:
            data: as it stands in the file: nothing of it has been checked.
        """
        return ()


class SpeculationTable(Table):
    """`SpeculationBounds`."""

    methods: frozenset[Method] = frozenset(Method)
    min_depth: Natural = 0
    max_depth: Natural | None = None

    @field_serializer("methods")
    def _in_order(self, methods: frozenset[Method]) -> list[Method]:
        return [method for method in Method if method in methods]

    @field_validator("max_depth")
    @classmethod
    def _check_max_depth(cls, value: int | None, info: ValidationInfo) -> int | None:
        lowest = info.data.get("min_depth", 0)
        if value is not None and value < lowest:
            raise PydanticCustomError("depths", "must be at least min_depth ({lowest})", {"lowest": lowest})
        return value


class TenantTable(Table):
    """`TenantPolicy`."""

    weight: Annotated[float, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT, strict=True)] = 1.0
    max_running: Count | None = None
    max_queued: Count | None = None
    max_blocks: Count | None = None
    tokens_per_second: Annotated[float, Field(ge=LEAST_RATE, allow_inf_nan=False, strict=True)] | None = None
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


class Holder(Table):
    """Who holds credentials: hashes of keys, or common names of client certificates."""

    keys: tuple[KeyHash, ...] = ()
    common_names: tuple[Text, ...] = ()


class ServedTable(TenantTable):
    """`models`: the only ones that may be used; all if not given."""

    models: Annotated[frozenset[Text], Field(min_length=1)] | None = None


class NamedTenant(ServedTable, Holder):
    """A tenant, and how its clients show who they are."""


class TenantsFile(Table):
    """What is granted to whom. Without any credential in it, everybody may do everything.

    Attributes:
        unknown: whether tenants that are not named are served.
        default: what they have.
        gateways: may name any tenant in their requests.
        admins: may do everything, and are the only ones that AdminService answers.
    """

    unknown: Literal["serve", "refuse"] = "serve"
    default: ServedTable = ServedTable()
    tenants: dict[Name, NamedTenant] = {}
    gateways: dict[Name, Holder] = {}
    admins: dict[Name, Holder] = {}

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterator[str]:
        """Credentials that stand there twice."""
        places: dict[tuple[str, str], str] = {}
        for place, field, value in _credentials(data):
            first = places.setdefault((field, value), place)
            if first != place:
                yield f"{place}: stands at {first} as well, and can say only once who it is"

    @property
    def holders(self) -> Iterator[tuple[str, str, Holder]]:
        """Kind ("tenants", "gateways", "admins"), name and credentials."""
        for kind in HOLDERS:
            for name, holder in getattr(self, kind).items():
                yield kind, name, holder

    @property
    def has_credentials(self) -> bool:
        return any(holder.keys or holder.common_names for _, _, holder in self.holders)

    @property
    def policies(self) -> dict[str, TenantPolicy]:
        """By tenant."""
        return {name: table.policy() for name, table in self.tenants.items()}

    @property
    def default_policy(self) -> TenantPolicy | None:
        """The policy of tenants without a table; None refuses them."""
        return None if self.unknown == "refuse" else self.default.policy()

    def models_of(self, tenant: str) -> frozenset[str] | None:
        """What it may use; None if all."""
        return self.tenants.get(tenant, self.default).models


HOLDERS: Final = ("tenants", "gateways", "admins")


def _credentials(data: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Place, field and value of all that there are; what has not the right form is passed over."""
    for kind in HOLDERS:
        holders = data.get(kind)
        for name, table in holders.items() if isinstance(holders, dict) else ():
            for field in Holder.model_fields:
                values = table.get(field) if isinstance(table, dict) else None
                for index, value in enumerate(values if isinstance(values, list) else ()):
                    if isinstance(value, str):
                        yield f"{kind}.{name}.{field}.{index}", field, value


AnyTable = TypeVar("AnyTable", bound=Table)


def read_file(path: Path, kind: type[AnyTable], field: str = "file") -> AnyTable:
    """A file as a table of that kind.

    Args:
        field: what errors call it.

    Raises:
        InvalidArgument: it cannot be read, is no TOML, or has mistakes: all of them, each with key, value and what is
            allowed.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(field, path, f"a readable file ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(field, path, f"TOML in UTF-8 ({error})") from error
    contradictions = list(kind.contradictions(data))
    try:
        table = kind.model_validate(data)
    except ValidationError as error:
        # Not `from error`: that one shows values, and some of them are secrets.
        raise BadFile(path, [*_mistakes(error, kind), *contradictions]) from None
    if contradictions:
        raise BadFile(path, contradictions)
    return table


def replaced(table: AnyTable, **changes: object) -> AnyTable:
    """The table with other values, checked; None leaves what there is. Raises InvalidArgument."""
    given = {name: value for name, value in changes.items() if value is not None}
    try:
        return type(table).model_validate({**table.model_dump(exclude_unset=True), **given})
    except ValidationError as error:
        raise BadValue(_mistakes(error, type(table))[0]) from None


def read_tenants(path: Path) -> TenantsFile:
    """Raises InvalidArgument as `read_file`."""
    return read_file(path, TenantsFile, "tenants")


def check_tenants(policies: Mapping[str, TenantPolicy], default: TenantPolicy | None, config: SchedulerConfig) -> None:
    """Refuse what no request could satisfy, as far as it depends on the server's other settings.

    Raises:
        InvalidArgument: a tenant's blocks cannot hold the shortest request. All of them are told.
    """
    least = config.blocks_for(2)  # a token of a prompt and one of a completion
    mistakes = [
        f"max_blocks of tenant {name!r} = {policy.max_blocks}: must be at least {least}, for the shortest request in "
        f"blocks of {config.block_size}"
        for name, policy in {"default": default, **policies}.items()
        if policy is not None and policy.max_blocks is not None and policy.max_blocks < least
    ]
    if mistakes:
        raise BadValue("\n  ".join(mistakes))


class BadValue(InvalidArgument):
    """A value that a table does not take, in the words of `_mistakes`."""

    def __init__(self, mistake: str) -> None:
        super().__init__("value", None, "another")
        self.args = (mistake,)


class BadFile(InvalidArgument):
    """A file with mistakes, a line for each."""

    def __init__(self, path: Path, mistakes: list[str]) -> None:
        super().__init__("file", str(path), "without mistakes")
        self.args = ("\n  ".join([f"{path} has {len(mistakes)} mistake{'s' * (len(mistakes) > 1)}:", *mistakes]),)


# What pydantic calls by the names of Python's types, by its kind of error.
_IN_TOML: Final = {
    **dict.fromkeys(("tuple_type", "list_type", "frozen_set_type"), "must be a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be a table"),
    "path_type": "must be a path",
}


def _mistakes(error: ValidationError, kind: type[Table]) -> list[str]:
    told = []
    for one in error.errors():
        location = one["loc"]
        if one["type"] == "missing":
            told.append(f"{'.'.join(map(str, location))}: must be given")
        elif one["type"] == "extra_forbidden":
            told.append(_told(location, one["input"], f"unknown key; known: {', '.join(_keys(kind, location[:-1]))}"))
        else:
            told.append(_told(location, one["input"], _IN_TOML.get(one["type"], one["msg"])))
    return told


def _keys(kind: type[Table], location: tuple[int | str, ...]) -> list[str]:
    """Those of the table that stands there in a table of this kind."""
    here: Any = kind
    for part in location:
        here = get_args(here)[1] if get_origin(here) is dict else here.model_fields[part].annotation
    return list(here.model_fields)


def _told(location: tuple[int | str, ...], value: object, message: str) -> str:
    """In our words, and without secrets: a key may stand where its hash should, or under a name that is misspelt."""
    place = ".".join(map(str, location))
    message = re.sub(r"^[A-Z]\w* should ", "must ", message)
    message = re.sub(r" after validation, not \d+$", "", message)
    secret = "keys" in location or location[:1] in (("gateways",), ("admins",)) or KEY.search(repr(value))
    return f"{place}: {message}" if secret else f"{place} = {brief(value)}: {message}"
