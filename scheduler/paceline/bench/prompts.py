"""Prompts for benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

from paceline import demo
from paceline.errors import InvalidArgument


def load_prompts(path: Path | None) -> list[str | tuple[int, ...]]:
    """Read `{"prompt": str}` or `{"prompt_token_ids": [int]}` lines; without a path, the embedded pair's held-out
    prompts.

    Raises:
        InvalidArgument: no such file, no prompts, or a line that is neither; names the line.
    """
    source = demo.HELD_OUT_PROMPTS if path is None else path
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("prompts", str(source), f"a readable UTF-8 file ({error})") from error
    prompts = [_parse(f"{source}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidArgument("prompts", str(source), "a file with at least one prompt")
    return prompts


def _parse(where: str, line: str) -> str | tuple[int, ...]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if isinstance(record, dict):
        text, ids = record.get("prompt"), record.get("prompt_token_ids")
        if isinstance(text, str) and text:
            return text
        if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
            return tuple(ids)
    raise InvalidArgument(where, line, 'a JSON object with a "prompt" text or a "prompt_token_ids" list')
