"""The file that a report is written to: seen to before the load, and whole or not there after it."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path

from paceline.errors import InvalidArgument


def check_file(path: Path) -> None:
    """Raise InvalidArgument if it is a folder, or its folder is not there or cannot be written."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.is_file() or not path.exists():
            with tempfile.TemporaryFile(dir=path.resolve().parent):
                pass
    except OSError as error:
        allowed = f"a file in a folder that is there and can be written ({error.strerror})"
        raise InvalidArgument("json", path, allowed) from error


def write_json(path: Path, data: object) -> None:
    """In the place of a file that has the name; what is there and no file, such as a terminal, is written to.

    Raises:
        OSError: it cannot be written. What was there before stays.
    """
    path = path.resolve()
    text = json.dumps(data) + "\n"
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
