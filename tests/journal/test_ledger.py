"""The ledger of each GPU on disk. What it means for cleanups is in `test_cleaner.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.base.json_store import UnreadableFile
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.records import RecordStore
from dra_driver.journal.rules.cleanups import LedgerEntry
from dra_driver.mig.offer import MigOwnership
from dra_driver.model.claim import ClaimRef
from dra_driver.model.gpu import FunctionBefore, OwnedCard, SettingBefore
from dra_driver.model.mig import GpuInstance, OwnedInstance, OwnedMode, Placement
from dra_driver.model.steps import CreateMig, SetTimeSlice
from tests.fakes.clock import Clock
from tests.fakes.directories import names

GPU = "GPU-00000002-06c0-7d70-1a51-e59b25b2c16c"
ONE = OwnedInstance(
    "gpu-00000002-mig-1g10gb-19-0", GPU, "0000:12:00.0", 19, "1g.10gb", Placement(0, 1), "boot-1", "created",
    7, 0, "MIG-1", 2,
)  # fmt: skip
TWO = replace(ONE, device="gpu-00000002-mig-1g10gb-19-3", placement=Placement(3, 1), phase="unknown")
MODE = OwnedMode(GPU, None, "boot-1")
NOTE = SettingBefore(GPU, "boot-1", "set_time_slice", 2)
CARD = OwnedCard(
    GPU,
    "0000:1b:00.0",
    "boot-1",
    (FunctionBefore("0000:1b:00.0", "nvidia"), FunctionBefore("0000:1b:00.1", None, "none")),
    True,
    "NVIDIA L40S",
)
ENTRY = LedgerEntry(
    ClaimRef("default", "claim-1", "uid-1"), "boot-1", SetTimeSlice(GPU, 3), 1000, "no nvidia-smi"
)


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def open_ledger(tmp_path: Path, clock: Clock) -> Callable[..., Ledger]:
    """The plugin after a restart, over the same directory."""
    records = RecordStore(tmp_path / "claims")
    records.open("boot-1")

    def one(boot_id: str = "boot-1", reader: Callable[[UnreadableFile], None] | None = None) -> Ledger:
        ledger = Ledger(tmp_path / "ledger", records, boot_id, reader=reader, clock=clock)
        if reader is None:
            ledger.open()
        return ledger

    return one


@pytest.fixture
def ledger(open_ledger: Callable[..., Ledger]) -> Ledger:
    return open_ledger()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ledger" / f"{GPU}.json"


def details(ledger: Ledger) -> list[object]:
    return [
        one for kind in (OwnedInstance, OwnedMode, OwnedCard, SettingBefore) for one in ledger.details(kind)
    ]


def test_detail_is_there_until_it_is_removed(
    ledger: Ledger, open_ledger: Callable[..., Ledger], file: Path
) -> None:
    everything = (ONE, TWO, MODE, CARD, NOTE)
    for one in everything:
        ledger.save(one)
    ledger.save(replace(ONE, uuid="MIG-2"))
    ledger.save(ONE)
    for known in (ledger, open_ledger()):
        assert set(details(known)) == set(everything)
        assert (known.created_instance(ONE.device), known.created_instance(TWO.device)) == (ONE, None)
        assert known.details(OwnedInstance, "GPU-9") == []
    for one in everything:
        ledger.remove(one)
        ledger.remove(one)
    assert (details(ledger), file.exists()) == ([], False)


def test_file_has_the_golden_form(ledger: Ledger, file: Path, is_golden: Callable[[Path, str], None]) -> None:
    """Another form would need another format number."""
    for one in (ONE, MODE, CARD, NOTE):
        ledger.save(one)
    ledger.add(ENTRY)
    document = json.loads(file.read_bytes()) | {"release": "0.1.0"}
    shown = json.dumps(document, indent=1, sort_keys=True) + "\n"
    is_golden(Path(__file__).parent / "golden" / "ledger.json", shown)


def test_reboot_makes_everything_void_and_the_next_write_removes_it(
    ledger: Ledger, open_ledger: Callable[..., Ledger], file: Path
) -> None:
    for one in (ONE, MODE, CARD, NOTE):
        ledger.save(one)
    ledger.add(ENTRY)
    following = open_ledger("boot-2")
    assert (details(following), following.entries(), following.void()) == ([], [], {GPU})
    following.change((), (), following.void())
    assert not file.exists()


def test_removed_detail_is_remembered_for_some_time(ledger: Ledger, clock: Clock) -> None:
    """A reading of the hardware may have begun before the removal."""
    here, there, old = (GpuInstance(7 + start, 19, Placement(start, 1)) for start in (0, 3, 5))
    ours = MigOwnership(ledger)

    def foreign() -> set[GpuInstance]:
        return set(ours.foreign_instances(GPU, (here, there, old)))

    older = replace(ONE, device="gpu-9", boot_id="boot-0", placement=Placement(5, 1))
    for one in (ONE, TWO, older, MODE):
        ledger.save(one)
    assert (foreign(), ours.mode_is_ours(GPU)) == ({old}, True)
    ledger.remove(ONE)
    clock.now += 29
    ledger.remove(TWO)
    ledger.remove(MODE)
    assert (foreign(), ours.mode_is_ours(GPU)) == ({old}, True)
    clock.now += 2
    assert foreign() == {old, here}
    clock.now += 30
    assert (foreign(), ours.mode_is_ours(GPU)) == ({old, here, there}, False)


def test_instance_is_withheld_while_its_undo_fails(ledger: Ledger) -> None:
    there = (GpuInstance(7, 19, ONE.placement),)
    step = CreateMig(ONE.device, GPU, None, 19, "1g.10gb", ONE.placement)
    ledger.save(ONE)
    failures: list[tuple[str | None, list[bool]]] = [(None, []), ("in use", [True])]
    for cause, withheld in failures:
        ledger.change([LedgerEntry(ClaimRef("ns", "ended", "uid-7"), "boot-1", step, 1, cause)], ())
        found = MigOwnership(ledger).foreign_instances(GPU, there)
        assert [one.leaving for one in found] == withheld
        assert MigOwnership(ledger, all_undone=True).foreign_instances(GPU, there) == ()


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"version": 1, "entries": [{"kind": "card"}]}', b"[1]", b'{"version": 0}']
)
def test_unreadable_ledger_is_set_aside_and_the_others_are_served(
    ledger: Ledger, file: Path, logs: list, content: bytes
) -> None:
    elsewhere = replace(ONE, gpu_uuid="GPU-9")
    ledger.save(elsewhere)
    file.write_bytes(content)
    for _ in range(2):
        ledger.open()
        assert (details(ledger), ledger.unreadable()) == ([elsewhere], {GPU})
    [line] = [line for line in logs if line["event"] == "ledger_unreadable"]
    assert (line["gpu_uuid"], Path(line["kept_as"]).read_bytes()) == (GPU, content)
    ledger.save(CARD)
    assert details(ledger) == [elsewhere, CARD]


def test_reader_changes_nothing(open_ledger: Callable[..., Ledger], tmp_path: Path) -> None:
    reported: list[UnreadableFile] = []
    reader = open_ledger(reader=reported.append)
    assert details(reader) == []
    assert not (tmp_path / "ledger").exists()
    open_ledger()
    (tmp_path / "ledger" / f"{GPU}.json").write_bytes(b"torn")
    assert details(reader) == []
    assert [found.name for found in reported] == [GPU]
    assert names(tmp_path / "ledger") == [".boot", f"{GPU}.json"]


def test_torn_ledger_is_removed_at_the_next_boot(
    ledger: Ledger, open_ledger: Callable[..., Ledger], tmp_path: Path, file: Path, logs: list
) -> None:
    ledger.save(ONE)
    whole = file.read_bytes()
    for name, content in {"empty": b"", "zeros": b"\0" * 9, "GPU-9": whole[: len(whole) // 2]}.items():
        (tmp_path / "ledger" / f"{name}.json").write_bytes(content)
    open_ledger("boot-2")
    assert names(tmp_path / "ledger") == [".boot", f"{GPU}.json"]
    assert [(line["event"], line["log_level"]) for line in logs] == [("ledger_torn", "info")] * 3
