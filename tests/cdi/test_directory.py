import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dra_driver.base import atomic
from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.rules.spec import claim_spec, common_edits, encode
from dra_driver.errors import ClaimRefusedError, StateError
from tests.cdi.cdi_samples import DRIVER, UID, driver, gpu

FILE = f"k8s.{DRIVER}-claim_{UID}.yaml"


def spec(minor: int = 0) -> dict[str, Any]:
    return claim_spec(UID, DRIVER, driver(), [gpu(minor)])


@pytest.fixture
def directory(tmp_path: Path) -> CdiDirectory:
    return CdiDirectory(tmp_path / "cdi", DRIVER)


def test_a_spec_is_written_for_all_to_read_and_nothing_else_is_left(
    tmp_path: Path, directory: CdiDirectory
) -> None:
    previous = os.umask(0o077)
    try:
        directory.write(UID, spec())
    finally:
        os.umask(previous)
    assert [file.name for file in (tmp_path / "cdi").iterdir()] == [FILE]
    file = tmp_path / "cdi" / FILE
    assert file.read_bytes() == encode(spec())
    assert file.stat().st_mode & 0o777 == 0o644
    assert directory.read(UID) == spec()


def written(tmp_path: Path) -> tuple[int, int]:
    """Which file it is and when it was written; reading changes neither."""
    found = (tmp_path / "cdi" / FILE).stat()
    return found.st_ino, found.st_mtime_ns


def test_the_file_is_left_alone_when_it_is_right(tmp_path: Path, directory: CdiDirectory) -> None:
    directory.write(UID, spec())
    before = written(tmp_path)
    directory.write(UID, spec())
    assert written(tmp_path) == before


def test_the_file_is_replaced_when_it_is_wrong(tmp_path: Path, directory: CdiDirectory) -> None:
    directory.write(UID, spec())
    (tmp_path / "cdi" / FILE).write_text("broken")
    assert directory.read(UID) is None
    directory.write(UID, spec(1))
    assert directory.read(UID) == spec(1)


def test_the_directory_is_recreated_when_a_reboot_took_it(tmp_path: Path, directory: CdiDirectory) -> None:
    directory.create()
    assert (tmp_path / "cdi").stat().st_mode & 0o777 == 0o755
    (tmp_path / "cdi").rmdir()
    assert directory.list() == {}
    directory.write(UID, spec())
    assert directory.read(UID) == spec()


def test_claims_are_listed_with_their_devices(tmp_path: Path, directory: CdiDirectory) -> None:
    directory.write(UID, claim_spec(UID, DRIVER, driver(), [gpu(0), gpu(1)]))
    CdiDirectory(tmp_path / "cdi", "other.example.com").write(
        "other", claim_spec("other", "other.example.com", driver(), [gpu(0)])
    )
    stem = f"k8s.{DRIVER}-claim_"
    (tmp_path / "cdi" / f"{stem}broken.yaml").write_text("{")
    (tmp_path / "cdi" / f"{stem}odd.yaml").write_text('{"devices": 1}')
    (tmp_path / "cdi" / f"{stem}old.yaml").write_text("devices:\n- name: old-gpu-0\n")
    (tmp_path / "cdi" / f"{stem}.yaml").write_text("{}")
    (tmp_path / "cdi" / f".{stem}temp.yaml.x.tmp").write_text("")
    assert directory.list() == {
        UID: ("gpu-00000000", "gpu-00000001"),
        "broken": (),
        "odd": (),
        "old": ("gpu-0",),
    }


def test_unreadable_spec_hides_no_other_claim(
    tmp_path: Path, directory: CdiDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.write(UID, spec())
    directory.file("uid-2").mkdir()
    assert directory.list() == {UID: (gpu(0).name,), "uid-2": ()}
    assert directory.read("uid-2") is None

    def refuse(_path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(atomic, "read_plain", refuse)
    for call in (directory.list, lambda: directory.read(UID)):
        with pytest.raises(StateError, match="cannot read"):
            call()


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (directory / "cdi").iterdir()}


def test_spec_of_the_incumbent_is_listed_and_replaced(tmp_path: Path, directory: CdiDirectory) -> None:
    directory.create()
    (tmp_path / "cdi" / FILE).write_text(f"cdiVersion: 0.5.0\ndevices:\n- name: {UID}-gpu-0\n")
    assert directory.list() == {UID: ("gpu-0",)}
    assert directory.read(UID) is None, "a Prepare must write the claim's spec anew"
    directory.write(UID, spec())
    assert files(tmp_path) == {FILE: encode(spec())}


def test_each_file_holds_its_spec_whatever_was_written_before(
    tmp_path: Path, directory: CdiDirectory
) -> None:
    """The driver's part is encoded once while it stays the same."""
    hooked = common_edits(driver())
    parts = [hooked, hooked, common_edits(driver(None, libraries=3)), common_edits(driver())]
    for number, common in enumerate(parts):
        uid = f"uid-{number}"
        made = claim_spec(uid, DRIVER, driver(), [gpu(number)], common)
        directory.write(uid, made)
        assert directory.file(uid).read_bytes() == json.dumps(made, separators=(",", ":")).encode() + b"\n"


@pytest.mark.parametrize("uid", ["../../etc/passwd", "a/b", ""])
def test_a_uid_cannot_lead_out_of_the_directory(directory: CdiDirectory, uid: str) -> None:
    for call in (directory.read, directory.remove, lambda bad: directory.write(bad, spec())):
        with pytest.raises(ClaimRefusedError):
            call(uid)


def test_the_error_names_the_directory_when_a_file_is_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "cdi").write_text("")
    directory = CdiDirectory(tmp_path / "cdi", DRIVER)
    for call in (directory.create, directory.list, lambda: directory.write(UID, spec())):
        with pytest.raises(StateError, match=f"{tmp_path}/cdi"):
            call()
    directory.remove(UID)  # what cannot be there need not be removed: a rollback must get through
