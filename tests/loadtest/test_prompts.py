"""Prompts, from JSON lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import InvalidArgument
from paceline_loadtest import load_prompts, parse_prompts


def test_text_token_ids_and_lines_to_skip(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028\u00e9", "id": 1}\n\n{"prompt_token_ids": [1, 0]}\r\n', encoding="utf-8")
    assert load_prompts(path) == ("a\u2028\u00e9", (1, 0))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"prompt": ""}',
        '{"prompt": 1}',
        '{"prompt_token_ids": []}',
        '{"prompt_token_ids": [1, -1]}',
        '{"prompt_token_ids": [true]}',
        '{"prompt_token_ids": "12"}',
    ],
)
def test_a_bad_line_is_named(line: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^file\.jsonl:2 = "):
        parse_prompts(['{"prompt": "good"}', line], "file.jsonl")


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n{"prompt": "\xff"}\n')
    with pytest.raises(InvalidArgument, match=r"prompts\.jsonl:2 = .*UTF-8"):
        load_prompts(path)


def test_no_prompt_at_all() -> None:
    with pytest.raises(InvalidArgument, match=r"^empty\.jsonl = .*at least one prompt"):
        parse_prompts(["", " "], "empty.jsonl")
