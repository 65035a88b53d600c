"""The ledger of GPU instances on disk."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.errors import StateError
from dra_driver.mig.ledger import MigLedger, OwnedMode
from dra_driver.mig.ledger_codec import ENTRY, encode
from dra_driver.model.mig import GpuInstance, OwnedInstance, Placement
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
UNSAFE = ["", "..", "../x", "/etc/passwd", "a\n", "a\0b", "ä", "x" * 300]

UNREADABLE = {
    "half": (b'{"version":1,"dev', "Unterminated string"),
    "field": (b'{"version":1}', "field 'device' is missing"),
    "other device": (encode(ENTRY, replace(ONE, device="gpu-1")), "it is the entry of device gpu-1"),
}


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> MigLedger:
    made = MigLedger(tmp_path, "boot-1", clock)
    made.open()
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


def test_files_have_the_golden_form(
    ledger: MigLedger, tmp_path: Path, is_golden: Callable[[Path, str], None]
) -> None:
    """Another form would need another format number."""
    ledger.save(MADE)
    ledger.own_mode(GPU, None)
    for name, stem in (("entry", MADE.device), ("mode", f"mode-{GPU}")):
        document = json.loads((tmp_path / f"{stem}.json").read_bytes())
        is_golden(
            Path(__file__).parent / "golden" / f"ledger-{name}.json", json.dumps(document, indent=1) + "\n"
        )


@pytest.mark.parametrize(("raw", "text"), UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_entry_is_set_aside_and_the_others_are_served(
    ledger: MigLedger, tmp_path: Path, logs: list, raw: bytes, text: str
) -> None:
    ledger.save(TWO)
    file_of(tmp_path, ONE).write_bytes(raw)
    (tmp_path / f"mode-{GPU}.json").write_bytes(b"{}")
    for _ in range(2):
        assert (ledger.all(), ledger.owned_modes()) == ({TWO.device: TWO}, {})
    assert [(line["event"], line["subject"]) for line in logs] == [
        ("mig_ledger_unreadable", ONE.device), ("mig_ledger_unreadable", f"mode-{GPU}"),
    ]  # fmt: skip
    assert text in logs[0]["reason"]
    assert Path(logs[0]["kept_as"]).read_bytes() == raw
    ledger.save(ONE)
    assert ledger.all() == {ONE.device: ONE, TWO.device: TWO}


@pytest.mark.parametrize("name", [*UNSAFE, "mode-x", "GPU-1"])
def test_name_is_refused_when_it_could_lead_elsewhere(ledger: MigLedger, tmp_path: Path, name: str) -> None:
    calls = [
        lambda: ledger.get(name), lambda: ledger.delete(name), lambda: ledger.save(replace(ONE, device=name)),
    ]  # fmt: skip
    if name in UNSAFE:
        calls += [
            lambda: ledger.mode_owned(name), lambda: ledger.own_mode(name, None),
            lambda: ledger.disown_mode(name),
        ]  # fmt: skip
    for call in calls:
        with pytest.raises(StateError, match="is not usable as a file name; the MIG ledger file is refused"):
            call()
    assert names(tmp_path) == []


def test_mode_is_ours_in_the_boot_in_which_we_switched_it_on(ledger: MigLedger, tmp_path: Path) -> None:
    next_boot = MigLedger(tmp_path, "boot-2")
    assert not ledger.mode_owned(GPU)
    ledger.own_mode(GPU, "0000:12:00.0")
    ledger.save(ONE)
    assert (ledger.mode_owned(GPU), next_boot.mode_owned(GPU)) == (True, False)
    assert ledger.owned_modes() == {GPU: OwnedMode(GPU, "0000:12:00.0", "boot-1")}
    assert ledger.all() == {ONE.device: ONE}
    next_boot.own_mode(GPU, None)
    assert ledger.owned_modes() == {GPU: OwnedMode(GPU, None, "boot-2")}
    for _ in range(2):
        next_boot.disown_mode(GPU)
        assert (next_boot.owned_modes(), next_boot.mode_owned(GPU)) == ({}, False)


def test_mode_is_ours_for_a_while_after_it_was_given_up(ledger: MigLedger, clock: Clock) -> None:
    ledger.own_mode(GPU, None)
    assert ledger.mode_is_ours(GPU)
    ledger.disown_mode(GPU)
    assert (ledger.mode_owned(GPU), ledger.mode_is_ours(GPU)) == (False, True)
    clock.now += 31
    assert not ledger.mode_is_ours(GPU)


def test_slots_are_ours_for_a_while_after_a_removal(ledger: MigLedger, tmp_path: Path, clock: Clock) -> None:
    here, there = (GpuInstance(7 + start, 19, Placement(start, 1)) for start in (0, 3))
    of_another_boot = replace(ONE, device="gpu-9", boot_id="boot-0", placement=Placement(5, 1))
    old = GpuInstance(12, 19, Placement(5, 1))

    def foreign() -> set[GpuInstance]:
        return set(ledger.foreign_instances(GPU, (here, there, old)))

    for entry in (ONE, replace(TWO, phase="created"), of_another_boot):
        ledger.save(entry)
    assert foreign() == {old}
    ledger.delete(ONE.device)
    ledger.delete(of_another_boot.device)
    clock.now += 29
    MigLedger(tmp_path, "boot-1").delete(TWO.device)
    assert foreign() == {old}, "also what the other instance removed"
    clock.now += 2
    assert foreign() == {old, here}
    clock.now += 30
    assert foreign() == {old, here, there}


def test_what_a_power_cut_tore_is_removed_at_the_next_boot(
    ledger: MigLedger, tmp_path: Path, logs: list[dict[str, object]]
) -> None:
    ledger.save(ONE)
    whole = file_of(tmp_path, ONE).read_bytes()
    for name, content in {"empty": b"", "zeros": b"\0" * 9, f"mode-{GPU}": whole[: len(whole) // 2]}.items():
        (tmp_path / f"{name}.json").write_bytes(content)
    again = MigLedger(tmp_path, "boot-2")
    again.open()
    assert (names(tmp_path), again.owned_modes()) == ([f"{ONE.device}.json"], {})
    assert [(line["event"], line["log_level"]) for line in logs] == [("mig_ledger_entry_torn", "info")] * 3


def test_mode_that_the_other_instance_gave_up_is_remembered(
    ledger: MigLedger, tmp_path: Path, clock: Clock
) -> None:
    other = MigLedger(tmp_path, "boot-1", clock)
    for look in (ledger.owned_modes, lambda: ledger.mode_owned(GPU)):
        other.own_mode(GPU, None)
        assert ledger.mode_is_ours(GPU)
        other.disown_mode(GPU)
        look()
        clock.now += 29
        assert (ledger.mode_owned(GPU), ledger.mode_is_ours(GPU)) == (False, True)
        clock.now += 2
        assert not ledger.mode_is_ours(GPU)


def test_mode_of_an_older_boot_is_none_of_this_one(ledger: MigLedger, tmp_path: Path, clock: Clock) -> None:
    older = MigLedger(tmp_path, "boot-0", clock)
    older.own_mode(GPU, None)
    assert not ledger.mode_is_ours(GPU)
    older.disown_mode(GPU)
    assert not ledger.mode_is_ours(GPU), "that mode ended with its boot"
    ledger.own_mode(GPU, None)
    assert ledger.mode_is_ours(GPU)
