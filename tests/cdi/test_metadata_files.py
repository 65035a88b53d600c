from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.base.atomic import clear_abandoned
from dra_driver.cdi.directory import CdiDirectory, temporary_files
from dra_driver.cdi.metadata_files import MetadataFiles
from dra_driver.cdi.rules.metadata import encode
from dra_driver.cdi.rules.spec import claim_spec
from dra_driver.model.claim import AllocatedClaim, ClaimRef
from tests.cdi.cdi_samples import driver, gpu
from tests.cdi.cdi_schema import faults
from tests.fakes.samples import DRIVER, GPU_0, GPU_1, claim, result

UID, OTHER_UID = "4cf8db2d-06c0-4d70-aa51-e59b25b2c16c", "5cf8db2d-06c0-4d70-aa51-e59b25b2c16c"
WANTED = replace(claim(GPU_0, result(GPU_1, "more/sub"), uid=UID), ref=ClaimRef("ml", "training", UID))
ANEW = replace(WANTED, ref=ClaimRef("ml", "training", OTHER_UID))


@pytest.fixture
def files(tmp_path: Path) -> MetadataFiles:
    made = MetadataFiles(tmp_path / "plugin", tmp_path / "cdi", DRIVER)
    made.create()
    return made


def write(
    files: MetadataFiles, wanted: AllocatedClaim = WANTED, *requests: str, text: str = "v1beta1"
) -> None:
    for request in requests or ("gpu", "more"):
        files.write(wanted, request, lambda generation: encode(wanted, [], (text,), generation))


def tree(directory: Path) -> dict[str, int]:
    """Modes of files by path."""
    return {
        str(path.relative_to(directory)): path.stat().st_mode & 0o777
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def generation(files: MetadataFiles, wanted: AllocatedClaim = WANTED) -> int:
    content = json.loads(files.file(wanted, "gpu").read_bytes())
    assert isinstance(content["metadata"]["generation"], int)
    return content["metadata"]["generation"]


def test_files_are_where_everyone_can_read_them(tmp_path: Path, files: MetadataFiles) -> None:
    assert tree(tmp_path) == {}
    previous = os.umask(0o077)
    try:
        write(files)
    finally:
        os.umask(previous)
    assert tree(tmp_path) == {
        f"cdi/{DRIVER}_metadata_{UID}_gpu.json": 0o644,
        f"cdi/{DRIVER}_metadata_{UID}_more.json": 0o644,
        "plugin/dra-device-metadata/ml_training/gpu/metadata.json": 0o644,
        "plugin/dra-device-metadata/ml_training/more/metadata.json": 0o644,
    }
    for request in ("gpu", "more"):
        spec = json.loads((tmp_path / f"cdi/{DRIVER}_metadata_{UID}_{request}.json").read_bytes())
        assert faults(spec) == []
        [device] = spec["devices"]
        [mount] = device["containerEdits"]["mounts"]
        assert mount["hostPath"] == str(files.file(WANTED, request))
    assert files.in_place(WANTED)


def written(files: MetadataFiles) -> tuple[int, int]:
    """Which file it is and when it was written; reading changes neither."""
    found = files.file(WANTED, "gpu").stat()
    return found.st_ino, found.st_mtime_ns


def test_generation_counts_changes(files: MetadataFiles) -> None:
    write(files)
    before = written(files)
    write(files)
    assert written(files) == before
    write(files, text="v1alpha1")
    assert generation(files) == 2
    files.file(WANTED, "gpu").write_text("{")
    write(files)
    assert generation(files) == 1


def test_spec_that_is_gone_or_wrong_is_written_again(tmp_path: Path, files: MetadataFiles) -> None:
    write(files)
    before = tree(tmp_path)
    spec = tmp_path / f"cdi/{DRIVER}_metadata_{UID}_gpu.json"
    content = spec.read_bytes()
    spec.unlink()
    assert not files.in_place(WANTED)
    write(files)
    spec.write_text("{")
    write(files)
    assert (spec.read_bytes(), tree(tmp_path), generation(files)) == (content, before, 1)
    files.file(WANTED, "more").unlink()
    assert not files.in_place(WANTED)


def test_removal_takes_what_is_the_claims_and_nothing_else(tmp_path: Path, files: MetadataFiles) -> None:
    others = replace(claim(GPU_0, uid=OTHER_UID), ref=ClaimRef("ml", "training-2", OTHER_UID))
    write(files, others, "gpu")
    # Names with the same start, of another driver and of claims.
    for name in (f"{DRIVER}_metadata_{UID}0_gpu.json", f"x{DRIVER}_metadata_{UID}_gpu.json"):
        (tmp_path / "cdi" / name).write_text("{}")
    kept = tree(tmp_path)
    for _ in range(2):
        write(files)
        for _ in range(2):
            files.remove(WANTED.ref)
            assert tree(tmp_path) == kept
            assert not (tmp_path / "plugin/dra-device-metadata/ml_training").exists()


def test_claim_that_was_recreated_keeps_its_files(files: MetadataFiles) -> None:
    """A claim is prepared before an older claim with the same name is unprepared."""
    write(files)
    write(files, ANEW, "gpu")
    assert generation(files, ANEW) == 1
    files.remove(WANTED.ref)
    assert files.file(ANEW, "gpu").exists()
    assert not files.file(WANTED, "more").exists()
    files.remove(ANEW.ref)
    assert not files.file(ANEW, "gpu").parent.parent.exists()


def test_removal_continues_where_a_crash_left_it(tmp_path: Path, files: MetadataFiles) -> None:
    directory = tmp_path / "plugin/dra-device-metadata/ml_training"
    (directory / "gpu").mkdir(parents=True)
    (directory / "gpu/.metadata.json.1-2.tmp").write_text("{")
    files.remove(WANTED.ref)
    assert not directory.exists()
    directory.mkdir()
    files.remove(WANTED.ref)
    assert not directory.exists()


def test_metadata_specs_are_not_specs_of_claims(tmp_path: Path, files: MetadataFiles) -> None:
    write(files)
    specs = CdiDirectory(tmp_path / "cdi", DRIVER)
    assert specs.list() == {}
    specs.write(UID, claim_spec(UID, DRIVER, driver(), [gpu(0)]))
    assert list(specs.list()) == [UID]
    specs.remove(UID)
    assert files.in_place(WANTED)
    files.remove(WANTED.ref)
    assert tree(tmp_path) == {}


def test_temporary_files_of_a_killed_plugin_are_found_in_all_its_places(tmp_path: Path) -> None:
    plugin, cdi = tmp_path / "plugin", tmp_path / "cdi"
    ours = [
        cdi / f".k8s.{DRIVER}-claim_{UID}.yaml.1-2.tmp",
        cdi / f".{DRIVER}_metadata_{UID}_gpu.json.1-2.tmp",
        plugin / ".health.json.1-2.tmp",
        plugin / "claims/.uid-1.json.1-2.tmp",
        plugin / "mps/.gpu-2.json.1-2.tmp",
        plugin / "mps/host.wanted/.gpu-2.json.1-2.tmp",
        plugin / "dra-device-metadata/ml_train/gpu/.metadata.json.1-2.tmp",
    ]
    others = [cdi / ".other.tmp", cdi / f"k8s.{DRIVER}-claim_{UID}.yaml", plugin / "mps/gpu-2/shm/.users.tmp"]
    for path in (*ours, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for directory, pattern in temporary_files(plugin, cdi, DRIVER):
        clear_abandoned(directory, pattern)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(others)
