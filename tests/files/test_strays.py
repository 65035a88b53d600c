"""Something lies in the place of a file or directory that the driver makes: claims come and go all the same, and other
claims keep what they have."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from dra_driver.files.atomic import QUARANTINE
from dra_driver.model.claim import Prepared
from tests.fakes.preparing import Node
from tests.fakes.samples import DRIVER, GPU_0, GPU_1, MIXED, claim, uuid

pytestmark = pytest.mark.timeout(60)  # to read a pipe lasts for ever

WANTED, OTHER = claim(GPU_0), claim(GPU_1, uid="uid-2")
UID = WANTED.ref.uid
METADATA = "plugin/dra-device-metadata"
OF_CLAIM = f"{METADATA}/{WANTED.ref.namespace}_{WANTED.ref.name}"
BOOT = "claims/.boot"
FILES = (
    f"claims/{UID}.json",
    BOOT,
    f"cdi/k8s.{DRIVER}-claim_{UID}.json",
    f"{OF_CLAIM}/gpu/metadata.json",
    f"cdi/{DRIVER}_metadata_{UID}_gpu.json",
    f"locks/{uuid(0)}.lock",
    f"locks/claims-{zlib.crc32(UID.encode()) % 64:02}.lock",
)
IN_NOBODYS_WAY = {BOOT: ("start",), METADATA: ("start", "prepare", "second prepare")}
"""But at these moments."""
DIRECTORIES = (METADATA, OF_CLAIM, f"{OF_CLAIM}/gpu")
TEMPORARY = (
    f"claims/.{UID}.json.1-2.tmp",
    f"cdi/.k8s.{DRIVER}-claim_{UID}.json.1-2.tmp",
    f"cdi/.{DRIVER}_metadata_{UID}_gpu.json.1-2.tmp",
    f"{OF_CLAIM}/gpu/.metadata.json.1-2.tmp",
)


def directory(path: Path) -> None:
    path.mkdir()


def full_directory(path: Path) -> None:
    path.mkdir()
    (path / "work").write_text("somebody's")


def old_directory(path: Path) -> None:
    path.mkdir()
    os.utime(path, (1, 1))


def plain_file(path: Path) -> None:
    path.write_text("somebody's")


def elsewhere(path: Path) -> Path:
    return next(parent for parent in path.parents if (parent / "claims").is_dir()) / "elsewhere"


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere/at/all")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def link_to_a_directory(path: Path) -> None:
    path.symlink_to(elsewhere(path))


def link_to_a_pipe(path: Path) -> None:
    path.symlink_to(elsewhere(path) / "pipe")


def old_link(path: Path) -> None:
    link_to_itself(path)
    os.utime(path, (1, 1), follow_symlinks=False)


LINKS = (link_to_nothing, link_to_itself, link_to_a_directory, link_to_a_pipe)
CASES = [
    *((place, stray) for place in FILES for stray in (directory, full_directory, os.mkfifo, *LINKS)),
    *((place, stray) for place in DIRECTORIES for stray in (plain_file, os.mkfifo, *LINKS[:3])),
    *((place, stray) for place in TEMPORARY for stray in (old_directory, old_link)),
]
TOLD = {
    **dict.fromkeys((directory, full_directory, plain_file), (*FILES, *DIRECTORIES)),
    # A link is replaced where a file is written, and removed where one is; it is told where it counts as a file.
    **dict.fromkeys(
        LINKS[1:3], (f"claims/{UID}.json", *(place for place in FILES if place.startswith("locks")))
    ),
}
"""What is met with one line in the log, and where; else with one at most."""


def put(path: Path, stray: Callable[[Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    stray(path)


def may_stay(place: str, stray: Callable[[Path], None], moment: str) -> bool:
    """A pipe serves as a lock file, a link to nothing is no record, and a start clears up."""
    if stray is old_link:
        return moment != "start"
    if stray is link_to_nothing and place == f"claims/{UID}.json":
        return moment == "unprepare"
    return (
        place in IN_NOBODYS_WAY
        or needs_no_lock(place, moment)
        or (stray is link_to_a_pipe and place.startswith("locks/"))
    )


def needs_no_lock(place: str, moment: str) -> bool:
    """A claim that wrote only files needs no GPU's lock to end."""
    return moment == "unprepare" and place.startswith("locks/GPU")


def links(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink()]


def others_files(node: Node) -> dict[str, bytes]:
    return {name: content for name, content in node.files().items() if OTHER.ref.uid in name}


@pytest.mark.parametrize("moment", ["start", "prepare", "second prepare", "unprepare"])
@pytest.mark.parametrize(
    ("place", "stray"), CASES, ids=[f"{stray.__name__}-{place}" for place, stray in CASES]
)
def test_claims_come_and_go_past_a_stray(
    memory_path: Path, place: str, stray: Callable[[Path], None], moment: str
) -> None:
    node = Node(memory_path, MIXED, metadata=("v1beta1",))
    node.prepare(OTHER)
    answer = node.prepare(WANTED)
    assert isinstance(answer, Prepared)
    if moment in ("start", "prepare"):
        node.unprepare(WANTED)
    path = memory_path / place
    theirs = elsewhere(path)
    theirs.mkdir()
    os.mkfifo(theirs / "pipe")
    for name in ("work", ".work.json.1-2.tmp"):
        (theirs / name).write_text("somebody's")
        os.utime(theirs / name, (1, 1))
    put(path, stray)
    others = others_files(node)
    with structlog.testing.capture_logs() as logs:
        if moment == "start":
            node = node.restarted()
        if moment != "unprepare":
            assert node.prepare(WANTED) == answer
            assert node.executor.in_place(node.records.all()[UID])
        assert node.unprepare(WANTED) is None
    assert node.records.all().keys() == {OTHER.ref.uid}
    assert sorted(entry.name for entry in theirs.iterdir()) == [".work.json.1-2.tmp", "pipe", "work"]
    left = {name for name in (*node.files(), *links(memory_path)) if OTHER.ref.uid not in name}
    left = {name for name in left if QUARANTINE not in name and not name.startswith("elsewhere/")}
    assert left <= {place, f"{place}/work"}
    assert not left or may_stay(place, stray, moment)
    assert others_files(node) == others
    told = [line for line in logs if line["log_level"] in ("warning", "error")]
    assert [line for line in told if str(path) not in str(line)] == []
    is_met = place in TOLD.get(stray, ()) and moment in IN_NOBODYS_WAY.get(place, moment)
    assert len(told) == 1 if is_met and not needs_no_lock(place, moment) else len(told) <= 1


def test_a_link_in_the_place_of_a_directory_takes_nothing_with_it(memory_path: Path) -> None:
    node = Node(memory_path, MIXED, metadata=("v1beta1",))
    node.prepare(WANTED)
    elsewhere = memory_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "work").write_text("somebody's")
    put(memory_path / OF_CLAIM / "gpu", lambda path: path.symlink_to(elsewhere))
    assert node.unprepare(WANTED) is None
    assert node.files() == {"elsewhere/work": b"somebody's"}


def test_what_cannot_be_moved_is_told_in_one_sentence(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where something is mounted in the place of a file."""
    node = Node(memory_path, MIXED, metadata=("v1beta1",))
    node.prepare(OTHER)
    put(memory_path / f"locks/{uuid(0)}.lock", directory)

    def busy(*_paths: object) -> None:
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as mounted:
        mounted.setattr(os, "rename", busy)
        failed = node.prepare(WANTED)
    assert f"cannot open the lock file {memory_path}/locks/{uuid(0)}.lock: " in failed.error
    assert "is not a plain file; remove it" in failed.error
    assert isinstance(node.prepare(OTHER), Prepared)
    assert isinstance(node.prepare(WANTED), Prepared)
