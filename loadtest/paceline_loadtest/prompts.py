"""Prompts, from JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import TypeAlias

from paceline.errors import InvalidArgument

Prompt: TypeAlias = str | tuple[int, ...]


def load_prompts(path: Path | None = None) -> tuple[Prompt, ...]:
    """The prompts of a file; without one, the held-out prompts that come with the embedded models.

    Raises:
        OSError: the file cannot be read.
        InvalidArgument: a line is not a prompt, or there is none; names file and line.
    """
    source = path or resources.files("paceline").joinpath("demo", "checkpoints", "held_out.jsonl")
    # A byte that is not UTF-8 becomes a lone surrogate, which the line's own check then reports with its line number.
    text = source.read_bytes().decode("utf-8", errors="surrogateescape")
    return parse_prompts(text.split("\n"), str(source))


def parse_prompts(lines: Iterable[str], source: str) -> tuple[Prompt, ...]:
    """One prompt a line: `{"prompt": TEXT}` or `{"prompt_token_ids": [ID, ...]}`. Skips other keys and empty lines.

    Args:
        lines: the lines of a file.
        source: its name, for errors.

    Raises:
        InvalidArgument: as `load_prompts`.
    """
    prompts = tuple(_parse(line, f"{source}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise InvalidArgument(source, "", "at least one prompt")
    return prompts


def _parse(line: str, place: str) -> Prompt:
    try:
        line.encode()
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(place, line, f"a JSON object in UTF-8 ({error})") from error
    match entry:
        case {"prompt": str(text)} if text:
            return text
        case {"prompt_token_ids": [*ids]} if ids and all(type(i) is int and i >= 0 for i in ids):
            return tuple(ids)
    raise InvalidArgument(place, line, 'an object with a non-empty "prompt" (text) or "prompt_token_ids" (numbers)')
