"""The ledger of GPU instances on disk."""

import errno
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.errors import StateError
from dra_driver.files import json_store
from dra_driver.mig.ledger import MigLedger, OwnedMode
from dra_driver.model.mig import OwnedInstance, Placement
from tests.fakes import directories
from tests.fakes.clock import Clock

GPU = "GPU-00000002-06c0-7d70-1a51-e59b25b2c16c"
ONE = OwnedInstance(
    "gpu-00000002-mig-1g10gb-19-0", GPU, "0000:12:00.0", 19, "1g.10gb", Placement(0, 1), "boot-1",
)  # fmt: skip
MADE = replace(
    ONE, phase="created", gpu_instance_id=7, compute_instance_id=0, uuid="MIG-1", gpu_minor=2, pci_bus_id=None
)
TWO = replace(ONE, device="gpu-00000002-mig-1g10gb-19-3", placement=Placement(3, 1), phase="orphan")
UNSAFE = ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\n", "a\0b", "ä", "x" * 300, "a b"]

UNREADABLE = {
    "empty": (b"", "Expecting value"),
    "half": (b'{"version":1,"dev', "Unterminated string"),
    "list": (b"[]", "not a JSON object"),
    "version": (b'{"version":"1"}', "format version '1' is unknown"),
    "field": (b'{"version":1}', "field 'device' is missing"),
    "other device": (b'{"version":1,"device":"gpu-1"}', "it is the entry of device gpu-1"),
    "deep": (b"[" * 200_000, "recursion"),
    "bytes": (b"\x80\x81\x82\x83", "can't decode"),
}


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> MigLedger:
    made = MigLedger(tmp_path, clock)
    made.open("boot-1")
    return made


def names(directory: Path) -> list[str]:
    """What is in the directory of the ledger but the name of the boot."""
    return [name for name in directories.names(directory) if name != ".boot"]


def file_of(directory: Path, entry: OwnedInstance) -> Path:
    return directory / f"{entry.device}.json"


def test_entry_is_there_until_it_is_deleted(ledger: MigLedger, tmp_path: Path) -> None:
    for entry in (ONE, MADE, TWO):
        ledger.save(entry)
        assert ledger.get(entry.device) == entry
    assert ledger.all() == {MADE.device: MADE, TWO.device: TWO}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    for _ in range(2):
        ledger.delete(MADE.device)
        assert (ledger.get(MADE.device), ledger.all()) == (None, {TWO.device: TWO})
    ledger.delete(TWO.device)
    assert names(tmp_path) == []


def test_other_instance_sees_every_change(ledger: MigLedger, tmp_path: Path) -> None:
    second = MigLedger(tmp_path)
    assert second.all() == {}
    for changed in (ONE, MADE, ONE, replace(ONE, phase="orphan")):
        ledger.save(changed)
        assert (second.get(ONE.device), second.all()) == (changed, {ONE.device: changed})
    ledger.delete(ONE.device)
    assert (second.get(ONE.device), second.all()) == (None, {})


@pytest.mark.parametrize(("raw", "text"), UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_entry_is_set_aside_and_the_others_are_served(
    ledger: MigLedger, tmp_path: Path, logs: list, raw: bytes, text: str
) -> None:
    ledger.save(TWO)
    file_of(tmp_path, ONE).write_bytes(raw)
    for _ in range(2):
        assert ledger.all() == {TWO.device: TWO}
    (line,) = logs
    assert (line["event"], line["subject"]) == ("mig_ledger_unreadable", ONE.device)
    assert text in line["reason"]
    assert Path(line["kept_as"]).read_bytes() == raw
    ledger.save(ONE)
    assert ledger.all() == {ONE.device: ONE, TWO.device: TWO}


def test_entry_is_not_set_aside_when_the_error_may_pass(
    ledger: MigLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.save(ONE)
    second = MigLedger(tmp_path)
    codes = iter([errno.EMFILE, errno.EIO])

    def broken(_path: Path) -> bytes:
        raise OSError(next(codes), "broken")

    monkeypatch.setattr(json_store, "read_plain", broken)
    with pytest.raises(StateError, match=r"cannot read .*19-0\.json: broken"):
        second.all()
    assert second.all() == {}, "a bad sector stays bad"
    monkeypatch.undo()
    assert len(names(tmp_path)) == 1


@pytest.mark.parametrize("name", [*UNSAFE, "mode-x", "GPU-1"])
def test_device_is_refused_when_its_name_could_lead_elsewhere(
    ledger: MigLedger, tmp_path: Path, name: str
) -> None:
    for call in (ledger.get, ledger.delete):
        with pytest.raises(StateError, match="is not usable as a file name; the device is refused"):
            call(name)
    with pytest.raises(StateError, match="is not usable as a file name"):
        ledger.save(replace(ONE, device=name))
    assert names(tmp_path) == []


@pytest.mark.parametrize("uuid", UNSAFE)
def test_gpu_is_refused_when_its_uuid_could_lead_elsewhere(
    ledger: MigLedger, tmp_path: Path, uuid: str
) -> None:
    calls = (
        lambda: ledger.mode_owned(uuid, "boot-1"),
        lambda: ledger.own_mode(uuid, None, "boot-1"),
        lambda: ledger.disown_mode(uuid),
    )
    for call in calls:
        with pytest.raises(StateError, match="is not usable as a file name; the GPU is refused"):
            call()
    assert names(tmp_path) == []


def test_mode_is_ours_in_the_boot_in_which_we_switched_it_on(ledger: MigLedger, tmp_path: Path) -> None:
    assert not ledger.mode_owned(GPU, "boot-1")
    ledger.own_mode(GPU, "0000:12:00.0", "boot-1")
    ledger.save(ONE)
    assert (ledger.mode_owned(GPU, "boot-1"), ledger.mode_owned(GPU, "boot-2")) == (True, False)
    assert ledger.owned_modes() == {GPU: OwnedMode(GPU, "0000:12:00.0", "boot-1")}
    assert ledger.all() == {ONE.device: ONE}
    ledger.own_mode(GPU, None, "boot-2")
    assert MigLedger(tmp_path).owned_modes() == {GPU: OwnedMode(GPU, None, "boot-2")}
    for _ in range(2):
        ledger.disown_mode(GPU)
        assert (ledger.owned_modes(), ledger.mode_owned(GPU, "boot-2")) == ({}, False)


def test_mode_is_ours_for_a_while_after_it_was_given_up(ledger: MigLedger, clock: Clock) -> None:
    for boot in ("boot-1", "boot-2"):
        ledger.own_mode(GPU, None, boot)
        assert ledger.mode_owned_lately(GPU, boot)
    ledger.disown_mode(GPU)
    assert not ledger.mode_owned(GPU, "boot-2")
    assert ledger.mode_owned_lately(GPU, "boot-2")
    assert not ledger.mode_owned_lately(GPU, "boot-1"), "that mode ended with its boot"
    clock.now += 31
    assert not ledger.mode_owned_lately(GPU, "boot-2")


def test_unreadable_mode_is_set_aside(ledger: MigLedger, tmp_path: Path, logs: list) -> None:
    (tmp_path / f"mode-{GPU}.json").write_bytes(b"{}")
    assert (ledger.owned_modes(), ledger.mode_owned(GPU, "boot-1")) == ({}, False)
    assert [line["subject"] for line in logs] == [f"mode-{GPU}"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EPERM, errno.EIO])
def test_what_cannot_be_set_aside_is_told_once_and_the_others_are_served(
    ledger: MigLedger, tmp_path: Path, logs: list, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    ledger.save(TWO)
    files = [file_of(tmp_path, ONE), tmp_path / f"mode-{GPU}.json"]
    for file in files:
        file.write_bytes(b"{}")

    def refuse(*_paths: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "rename", refuse)
        for _ in range(2):
            assert (ledger.all(), ledger.owned_modes()) == ({TWO.device: TWO}, {})
    assert [line["kept_as"] for line in logs] == [str(file) for file in files]
    assert all("cannot set aside the unreadable MIG ledger file" in line["reason"] for line in logs)
    ledger.save(ONE)
    assert ledger.all() == {ONE.device: ONE, TWO.device: TWO}


def test_slots_are_ours_for_a_while_after_a_removal(ledger: MigLedger, tmp_path: Path, clock: Clock) -> None:
    here, there, other_boot = ((GPU, 19, 0), (GPU, 19, 3), replace(TWO, device="gpu-9", boot_id="boot-0"))
    for entry in (ONE, TWO, other_boot):
        ledger.save(entry)
    assert ledger.owned_lately("boot-1") == {here, there}
    ledger.delete(ONE.device)
    ledger.delete(other_boot.device)
    clock.now += 29
    MigLedger(tmp_path).delete(TWO.device)
    assert ledger.owned_lately("boot-1") == {here, there}, "also what the other instance removed"
    clock.now += 2
    assert ledger.owned_lately("boot-1") == {there}
    clock.now += 30
    assert ledger.owned_lately("boot-1") == frozenset()


def test_abandoned_temporary_files_are_cleared_away_at_the_start(ledger: MigLedger, tmp_path: Path) -> None:
    ledger.save(ONE)
    old = tmp_path / ".x.json.1-1.tmp"
    old.touch()
    os.utime(old, (time.time() - 3600,) * 2)
    ledger.open("boot-1")
    assert names(tmp_path) == [f"{ONE.device}.json"]


def test_what_a_power_cut_tore_is_removed_at_the_next_boot_and_only_then(
    ledger: MigLedger, tmp_path: Path, logs: list[dict[str, object]]
) -> None:
    ledger.save(ONE)
    whole = file_of(tmp_path, ONE).read_bytes()
    for name, content in {"empty": b"", "zeros": b"\0" * 9, f"mode-{GPU}": whole[: len(whole) // 2]}.items():
        (tmp_path / f"{name}.json").write_bytes(content)
    again = MigLedger(tmp_path)
    again.open("boot-2")
    assert (names(tmp_path), again.owned_modes()) == ([f"{ONE.device}.json"], {})
    assert [(line["event"], line["log_level"]) for line in logs] == [("mig_ledger_entry_torn", "info")] * 3
    file_of(tmp_path, TWO).touch()
    again.open("boot-2")
    assert again.all() == {ONE.device: ONE}
    assert [line["event"] for line in logs[3:]] == ["mig_ledger_unreadable"], (
        "in the same boot that was no power cut"
    )


def test_missing_directory_is_one_sentence(tmp_path: Path) -> None:
    ledger = MigLedger(tmp_path / "gone")
    for call in (ledger.all, ledger.owned_modes):
        with pytest.raises(
            StateError, match=r"cannot list the MIG ledger files in .*: the directory does not exist"
        ):
            call()
    assert ledger.get(ONE.device) is None


def test_mode_that_the_other_instance_gave_up_is_remembered(
    ledger: MigLedger, tmp_path: Path, clock: Clock
) -> None:
    other = MigLedger(tmp_path, clock)
    for look in (ledger.owned_modes, lambda: ledger.mode_owned(GPU, "boot-1")):
        other.own_mode(GPU, None, "boot-1")
        assert ledger.mode_owned_lately(GPU, "boot-1")
        other.disown_mode(GPU)
        look()
        clock.now += 29
        assert ledger.mode_owned_lately(GPU, "boot-1")
        assert not ledger.mode_owned_lately(GPU, "boot-2")
        assert not ledger.mode_owned(GPU, "boot-1")
        clock.now += 2
        assert not ledger.mode_owned_lately(GPU, "boot-1")


def test_mode_of_an_older_boot_is_none_of_this_one(ledger: MigLedger, tmp_path: Path, clock: Clock) -> None:
    ledger.own_mode(GPU, None, "boot-0")
    assert not ledger.mode_owned_lately(GPU, "boot-1")
    MigLedger(tmp_path, clock).own_mode(GPU, None, "boot-1")
    assert ledger.mode_owned_lately(GPU, "boot-1")
