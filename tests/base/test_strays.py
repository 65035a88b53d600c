"""Something that is not a regular file lies in the place of a file of ours: it is neither read, written, followed nor
waited for. Records are set aside, all else is refused in one sentence; other claims feel nothing."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dra_driver.base.atomic import UNREADABLE, read_or_none, read_plain, remove_file, write_atomically
from dra_driver.base.file_lock import hold_file
from dra_driver.errors import StateError
from dra_driver.model.claim import Failed, Prepared
from tests.fakes.preparing import Node
from tests.fakes.samples import GPU_0, GPU_1, MIXED, claim
from tests.fakes.tables import tabled

WANTED, OTHER = claim(GPU_0), claim(GPU_1, uid="uid-2")


def full_directory(path: Path) -> None:
    (path / "work").mkdir(parents=True)


def link(path: Path) -> None:
    """A link to another regular file."""
    target = path.with_name("somebody's")
    target.write_text("{}")
    path.symlink_to(target)


def listening_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


STRAYS = (full_directory, os.mkfifo, link, listening_socket)


@pytest.mark.parametrize("stray", STRAYS)
def test_only_regular_files_are_read_and_locked(tmp_path: Path, stray: Callable[[Path], None]) -> None:
    path = tmp_path / "x"
    stray(path)
    with pytest.raises(OSError, match=r"regular file|symbolic links|No such device") as caught:
        read_plain(path)
    assert caught.value.errno in UNREADABLE
    assert read_or_none(path) is None
    with pytest.raises(StateError) as refused, hold_file(path, time.monotonic() + 5, "x"):
        pass
    assert str(refused.value) == (
        f"cannot open the lock file {path}: the path exists, but is not a regular file; remove it"
    )


def test_write_takes_the_place_of_a_link_and_leaves_its_target(tmp_path: Path) -> None:
    link(tmp_path / "x")
    write_atomically(tmp_path / "x", b"new")
    assert (read_plain(tmp_path / "x"), (tmp_path / "somebody's").read_text()) == (b"new", "{}")


def test_directory_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    full_directory(path)
    for verb, call in (
        ("write", lambda: write_atomically(path, b"new")),
        ("remove", lambda: remove_file(path)),
    ):
        with pytest.raises(StateError) as refused:
            call()
        assert (
            str(refused.value)
            == f"cannot {verb} {path}: the path exists, but is not a regular file; remove it"
        )
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


@pytest.fixture
def node(memory_path: Path) -> Node:
    made = Node(memory_path, MIXED, metadata=("v1beta1",))
    assert isinstance(made.prepare(OTHER), Prepared)
    return made


@pytest.mark.parametrize("stray", STRAYS)
def test_stray_record_is_set_aside_and_the_claim_comes_and_goes(
    node: Node, logs: list[dict[str, Any]], stray: Callable[[Path], None]
) -> None:
    stray(node.records.directory / "uid-1.json")
    node.records.load()
    assert isinstance(node.prepare(WANTED), Prepared)
    assert node.unprepare(WANTED) is None
    [aside] = node.records.quarantined()
    reported = [line for line in logs if line["log_level"] in ("warning", "error")]
    assert [(line["event"], line["claim_uid"], line["kept_as"]) for line in reported] == [
        ("record_unreadable", "uid-1", str(aside))
    ]
    assert node.records.all().keys() == {"uid-2"}


@tabled("place")
def test_claim_is_refused_in_one_sentence_until_the_stray_is_removed(node: Node, place: str) -> None:
    path = node.directory / place
    path.unlink(missing_ok=True)
    full_directory(path)
    answer = node.prepare(WANTED)
    assert isinstance(answer, Failed)
    assert f"{path}: the path exists, but is not a regular file; remove it" in answer.error
    assert isinstance(node.prepare(OTHER), Prepared)
    shutil.rmtree(path, ignore_errors=True)
    assert isinstance(node.prepare(WANTED), Prepared)
    assert node.unprepare(WANTED) is None


def test_link_in_the_place_of_a_directory_takes_nothing_with_it(node: Node) -> None:
    node.prepare(WANTED)
    elsewhere = node.directory / "elsewhere"
    full_directory(elsewhere)
    place = node.directory / "plugin/dra-device-metadata/default_claim-uid-1/gpu"
    (place / "metadata.json").unlink()
    place.rmdir()
    place.symlink_to(elsewhere)
    assert "cannot remove" in node.unprepare(WANTED).error
    place.unlink()
    assert node.unprepare(WANTED) is None
    assert (elsewhere / "work").is_dir()
