"""A staged directory appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_plugins_sdk import LoraError
from lora_plugins_sdk.staging import staged_directory


def test_it_appears_at_the_end_and_all_at_once(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with staged_directory(output) as place:
        (place / "sub").mkdir()
        (place / "sub" / "file").write_text("content")
        assert not output.exists() and place.parent == tmp_path and place.name.startswith(".")
    assert (output / "sub" / "file").read_text() == "content"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with (
        pytest.raises(LoraError if error is OSError else error, match="boom"),
        staged_directory(tmp_path / "out") as place,
    ):
        (place / "file").write_text("content")
        raise error("boom")
    assert os.listdir(tmp_path) == []


def test_two_writers_exclude_each_other(tmp_path: Path) -> None:
    with staged_directory(tmp_path / "out") as place:
        (place / "file").write_text("mine")
        with pytest.raises(LoraError, match="another process is writing it"), staged_directory(tmp_path / "out"):
            pytest.fail("two writers at once")
        assert (place / "file").read_text() == "mine"
    assert (tmp_path / "out" / "file").read_text() == "mine"


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_remains_of_a_dead_writer_are_removed(tmp_path: Path, kind: str) -> None:
    partial, kept = tmp_path / ".out.partial", tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("mine")
    (tmp_path / ".out.lock").write_text("")
    if kind == "directory":
        partial.mkdir()
        (partial / "half").write_text("half")
    elif kind == "file":
        partial.write_text("half")
    else:
        partial.symlink_to(kept)
    with staged_directory(tmp_path / "out") as place:
        assert os.listdir(place) == []
    assert sorted(os.listdir(tmp_path)) == ["kept", "out"] and (kept / "file").read_text() == "mine"


def test_places_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "taken").mkdir()
    for output in (tmp_path / "file" / "out", tmp_path / "absent" / "out", tmp_path / "taken", tmp_path / "file"):
        with pytest.raises(LoraError, match=str(output)), staged_directory(output):
            pytest.fail("was let in")
    assert sorted(os.listdir(tmp_path)) == ["file", "taken"]


def test_an_output_that_came_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(LoraError, match="cannot be written"), staged_directory(tmp_path / "out"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("theirs")
    assert (tmp_path / "out" / "theirs").read_text() == "theirs" and os.listdir(tmp_path) == ["out"]
