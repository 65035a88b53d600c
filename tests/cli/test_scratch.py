from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dra_driver.cli.scratch import scratch_directory, this_machine
from dra_driver.errors import FatalError


def test_directory_is_there_and_then_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_directory("look") as path:
        assert [Path(path)] == list(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_directory_goes_although_a_thread_writes_and_a_signal_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in the worst moment: when the directory was just emptied."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    remove = os.rmdir
    left: list[str] = []

    def rmdir(path: str, **more: Any) -> None:
        if str(path).startswith(str(tmp_path)) and not left:
            left.append(path)
            (Path(path) / "late").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        remove(path, **more)

    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        monkeypatch.setattr(os, "rmdir", rmdir)
        with scratch_directory("look"):
            pass
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert (len(left), list(tmp_path.iterdir())) == (1, [])


def test_directory_of_a_killed_command_is_removed_by_the_next_one_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_directory("alive") as alive:
        left = tmp_path / "gpu-dra-tmp-killed-1"
        young = tmp_path / "gpu-dra-tmp-young-1"
        other = tmp_path / "gpu-dra-of-a-person"
        for path in (left, young, other):
            (path / "machine").mkdir(parents=True)
        for path in (left, Path(alive)):
            os.utime(path, (0, 0))
        with scratch_directory("look"):
            pass
        assert sorted(tmp_path.iterdir()) == sorted([Path(alive), young, other])


def test_read_only_root_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with (
        pytest.raises(
            FatalError, match=r"cannot create a temporary directory .*; set TMPDIR to one that is writable"
        ),
        scratch_directory("look"),
    ):
        pass


@pytest.mark.parametrize(
    ("host", "node"), [("my_laptop", "my-laptop"), ("Node-A.example", "node-a.example"), ("_", "this-node")]
)
def test_the_host_gives_a_name_that_a_node_may_have(
    host: str, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert this_machine() == node
