"""Reading the driver's directory from outside: everything readable is read, and nothing is touched."""

from __future__ import annotations

from pathlib import Path

from dra_driver.cli.state_on_disk import read_state
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.records import RecordStore
from dra_driver.model.mig import OwnedInstance, Placement
from tests.fakes.samples import hold, record

OWNED = OwnedInstance("gpu-1-mig-1g10gb-19-0", "GPU-1", None, 19, "1g.10gb", Placement(0, 1), "boot-1")


def test_unreadable_files_are_reported_and_stay_where_they_are(tmp_path: Path) -> None:
    records = RecordStore(tmp_path / "claims")
    records.open("boot-1")
    ledger = Ledger(tmp_path / "ledger", records, "boot-1")
    ledger.open()
    kept = record(hold("gpu-00000000"), uid="uid-1")
    records.save(kept)
    ledger.save(OWNED)
    (tmp_path / "claims/uid-2.json").write_text("{")
    (tmp_path / "ledger/GPU-2.json").write_text("[]")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    state = read_state(tmp_path)
    assert (state.records, state.owned) == ((kept,), (OWNED,))
    assert [
        part in fault for part, fault in zip(("uid-2.json", "GPU-2.json"), state.faults, strict=True)
    ] == [
        True,
        True,
    ]
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_driver_that_never_ran_holds_nothing(tmp_path: Path) -> None:
    state = read_state(tmp_path / "nowhere")
    assert (state.records, state.owned, state.faults) == ((), (), ())
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_one_is_reported(tmp_path: Path) -> None:
    (tmp_path / "claims").write_text("")
    (fault,) = read_state(tmp_path).faults
    assert "claims" in fault


def test_detach_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / "detach.json").mkdir()
    (fault,) = read_state(tmp_path).faults
    assert (
        fault == f"cannot read {tmp_path}/detach.json: the path exists, but is not a regular file; remove it"
    )


def test_a_ledger_that_cannot_be_listed_is_one_fault(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("")
    state = read_state(tmp_path, "boot-1")
    assert state.faults == (state.ledger_fault,)
    assert "ledger" in str(state.ledger_fault)
