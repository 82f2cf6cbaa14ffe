"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from paceline.errors import InvalidArgument, NotWritten
from paceline.whole_file import check_file, whole_file, write_json


def test_a_file_appears_as_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "one"
    with whole_file(path) as file:
        file.write(b"whole")
        file.flush()
        assert not path.exists()
    assert [(found.name, found.read_bytes()) for found in tmp_path.iterdir()] == [("one", b"whole")]
    assert path.stat().st_mode & 0o777 == 0o644


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), whole_file(path) as file:  # noqa: PT012
        file.write(b"half")
        raise ZeroDivisionError
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("one", "before")]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "one.json"
    with pytest.raises(NotWritten) as caught:
        write_json(path, {})
    assert str(caught.value) == f"{path} cannot be written: No such file or directory"


def test_a_full_disk_is_told() -> None:
    with pytest.raises(NotWritten, match="/dev/full cannot be written: No space left"):
        write_json(Path("/dev/full"), {})


def test_json_is_for_people_too(tmp_path: Path) -> None:
    write_json(tmp_path / "one.json", {"a": [1]})
    text = (tmp_path / "one.json").read_text()
    assert json.loads(text) == {"a": [1]}
    assert text.endswith("}\n")
    assert text.count("\n") > 3


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json(pipe, 5)
    assert os.read(reader, 9) == b"5\n"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "one")
    write_json(tmp_path / "link", 5)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "one").read_text() == "5\n"


def test_where_a_file_can_be_written_nothing_is_left_by_looking(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("before")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    os.mkfifo(tmp_path / "pipe")
    there = sorted(tmp_path.iterdir())
    for name in ("old", "new", "link", "pipe"):
        check_file("json", tmp_path / name)
    assert sorted(tmp_path.iterdir()) == there
    assert (tmp_path / "old").read_text() == "before"


def test_where_none_can_be_written_is_told_by_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for path, why in (
        (tmp_path, "Is a directory"),
        (tmp_path / "nowhere" / "out", "No such file"),
        (tmp_path / "file" / "out", "Not a directory"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            check_file("json", path)
        assert str(caught.value).startswith(f"json = '{path}': must be a file in a folder")
        assert why in str(caught.value)

    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # permissions do not stop root
    with pytest.raises(InvalidArgument, match="Permission denied"):
        check_file("json", tmp_path / "out")
