"""Options that several commands have, and how they are read."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from paceline.errors import InvalidArgument

if TYPE_CHECKING:
    from paceline.client import ClientOptions

# The client's arguments, by the names of the options that they come from.
CLIENT_OPTIONS: Final = {"tls": "tls_ca", "client_certificate": "tls_cert", "client_key": "tls_key"}
SIZE: Final = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes: 536870912, 512MiB, 512M (the same), 0.5GiB, 512MB (of 1000 * 1000). Raises typer.BadParameter."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    number, unit, binary = match.groups()
    decimal = text.strip().upper().endswith("B") and not binary
    base = 1000 if decimal else 1024
    return int(float(number) * base ** " KMGT".index(unit.upper() or " "))


def client_options(
    api_key: Annotated[
        str | None, typer.Option(envvar="PACELINE_API_KEY", metavar="KEY", help="For a server that asks for one.")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt; trust the usual authorities.")] = False,
    tls_ca: Annotated[Path | None, typer.Option(metavar="PEM", help="Encrypt; trust these authorities.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="PEM", help="Who the client is (mTLS).")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PEM", help="Its key.")] = None,
    allow_plaintext_key: Annotated[
        bool, typer.Option("--allow-plaintext-key", help="Send the key to another machine without TLS.")
    ] = False,
) -> ClientOptions:
    """How to reach a server, as the options say."""
    return {
        "api_key": api_key,
        "tls": tls_ca or tls,
        "client_certificate": tls_cert,
        "client_key": tls_key,
        "allow_plaintext_key": allow_plaintext_key,
    }


def as_typed(error: Exception, options: Mapping[str, str] = {}) -> str:
    """An error's text, in which what has been an option goes by its name.

    Args:
        options: names of options besides those of `client_options`, by what errors call them.
    """
    text, names = str(error), {**CLIENT_OPTIONS, **options}
    if not isinstance(error, InvalidArgument) or error.field not in names or not text.startswith(error.field):
        return text  # a server's begins with the status
    value = text.removeprefix(error.field).removesuffix(error.allowed)
    allowed = re.sub(r"client_\w+", lambda word: names.get(word[0], word[0]), error.allowed)
    return f"{names[error.field]}{value}{allowed}"


def with_options(parameter: str, options: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a parameter of a command by the options that a function declares: the command gets that function, to be
    called without arguments. A parameter of the name of one of the options gets its value, too.
    """
    names = {"EngineSettings": object, "ClientOptions": object}
    shared = inspect.signature(options, eval_str=True, locals=names).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True, locals=names).parameters

        @functools.wraps(command)
        def run(**values: Any) -> None:
            called = functools.partial(options, **{name: values[name] for name in shared})
            command(**{parameter: called}, **{name: values[name] for name in own if name != parameter})

        parameters = [p for name, p in own.items() if name not in {parameter, *shared}] + list(shared.values())
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        run.__signature__ = inspect.Signature([p.replace(kind=keyword_only) for p in parameters])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate
