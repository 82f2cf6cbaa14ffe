"""Files that are there whole or not at all, whoever else reads or writes them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


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


def write_json(path: Path, data: Any) -> None:
    """For people and programs alike. Raises OSError."""
    with whole_file(path) as file:
        file.write(json.dumps(data, indent=2).encode() + b"\n")
