"""Files that are there whole or not at all, whoever else reads or writes them."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import InvalidArgument, NotWritten


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes that name, and the place of one that has it, as the block ends. Where the block
    raises, nothing has happened. Everybody may read it. What is there and no file, such as a terminal, is written to.

    Raises:
        OSError: its folder cannot be written.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        partial.chmod(0o644)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_file(option: str, path: Path) -> None:
    """See before any work whether `whole_file` can write there when it is done.

    Args:
        option: that has the path.

    Raises:
        InvalidArgument: it is a folder, or its folder is not there or cannot be written.
    """
    real = path.resolve()
    try:
        if real.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if real.is_file() or not real.exists():
            with tempfile.TemporaryFile(dir=real.parent):
                pass
    except OSError as error:
        allowed = f"a file in a folder that is there and can be written ({error.strerror})"
        raise InvalidArgument(option, path, allowed) from error


@contextmanager
def result_file(path: Path) -> Iterator[BinaryIO]:
    """`whole_file` for what a command has found out. Raises NotWritten."""
    try:
        with whole_file(path) as file:
            yield file
    except OSError as error:
        raise NotWritten(path, error) from error


def write_json(path: Path, data: Any) -> None:
    """For people and programs alike. Raises NotWritten."""
    with result_file(path) as file:
        file.write(json.dumps(data, indent=2).encode() + b"\n")
