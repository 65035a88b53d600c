from __future__ import annotations

import time
from pathlib import Path

import pytest

from dra_driver.base.deadline import until
from dra_driver.errors import RetryableError
from dra_driver.host.driver_programs import NvidiaSmi
from dra_driver.journal.executor import StepDispatcher
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.records import RecordStore
from dra_driver.model.driver_files import DriverPrograms
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import SetTimeSlice
from dra_driver.sharing.steps import TimeSliceSteps
from tests.fakes.journal import Journaled
from tests.fakes.samples import claim


@pytest.fixture
def hanging(tmp_path: Path) -> TimeSliceSteps:
    """The steps with an nvidia-smi that records its start and never exits."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho >> {tmp_path}/started\nexec sleep 600\n")
    program.chmod(0o755)
    found = DriverPrograms("/driver-root", {"nvidia-smi": str(program)}, "/usr/bin:/bin", None)
    records = RecordStore(tmp_path / "claims")
    records.open("boot-1")
    return TimeSliceSteps(NvidiaSmi(lambda: found), Ledger(tmp_path / "ledger", records, "boot-1"))


def test_nvidia_smi_that_hangs_ends_with_the_kubelets_deadline(
    hanging: TimeSliceSteps, tmp_path: Path
) -> None:
    """A pod with claims on three GPUs gets a response before the kubelet's deadline, not after three full
    waits.
    """
    plan, began = Plan(claim(), (), ()), time.monotonic()
    with until(began + 1.5):
        for gpu, text in [
            ("GPU-1", "it did not finish within 1"),
            ("GPU-2", "ran out of time"),
            ("GPU-3", "ran out of time"),
        ]:
            with pytest.raises(RetryableError, match=text):
                hanging.do(SetTimeSlice(gpu, 3), plan)
    assert time.monotonic() - began < 15
    assert (tmp_path / "started").read_text() == "\n"


def test_time_slice_that_cannot_be_set_again_is_tried_until_it_is(
    tmp_path: Path, logs: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An nvidia-smi that fails, then a claim that ends during that, and one whose GPU no longer supports the
    setting.
    """
    monkeypatch.setattr("dra_driver.journal.cleaner._RETRY_FIRST_S", 0.05)
    monkeypatch.setattr("dra_driver.journal.cleaner._TOOLS_EVERY_S", 0.05)
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"""#!/bin/sh
case "$*" in *GPU-2*) echo not supported; exit 3;; esac
test -e {tmp_path}/works || {{ echo a fault; exit 1; }}
echo "$@" >> {tmp_path}/asked
"""
    )
    program.chmod(0o755)
    node = Journaled()
    node.open_journal(tmp_path, "boot-1")
    for number in (1, 2, 3):
        step = SetTimeSlice(f"GPU-{number}", 3)
        node.records.save(ClaimRecord(claim(uid=f"uid-{number}"), "prepared", "boot-1", (), (step,), ""))
    found = DriverPrograms("/driver-root", {"nvidia-smi": str(program)}, "/usr/bin:/bin", None)
    steps = TimeSliceSteps(NvidiaSmi(lambda: found), node.ledger)
    node.work_with(StepDispatcher({}), restorers=[steps])
    node.cleaner.start()
    try:
        steps.driver_reloaded()
        node.cleaner.retry_now()
        while [line["event"] for line in logs].count("setting_lost") < 3:
            time.sleep(0.01)
        node.records.delete("uid-3")
        while "GPU-3" in node.lanes.under_way():
            time.sleep(0.01)  # an attempt that began before the claim ended
        (tmp_path / "works").touch()
        while steps.gpus():
            time.sleep(0.01)
    finally:
        node.cleaner.stop()
    assert [line.split()[2] for line in (tmp_path / "asked").read_text().splitlines()] == ["GPU-1"]
    assert len([line for line in logs if line["event"] == "setting_lost"]) == 3, "each reason is logged once"


@pytest.mark.parametrize("moment", ["while the records are read", "while nvidia-smi runs"])
def test_time_slice_that_another_reload_loses_in_between_is_set_again(tmp_path: Path, moment: str) -> None:
    late = ClaimRecord(claim(uid="late"), "prepared", "boot-1", (), (SetTimeSlice("GPU-2", 3),), "")

    class Records(RecordStore):
        def all(self) -> dict[str, ClaimRecord]:
            found = super().all()
            if moment == "while the records are read" and "late" not in found:
                self.save(late)
                steps.driver_reloaded()
            return found

    class Smi(NvidiaSmi):
        def set_time_slice(self, gpu_uuid: str, interval: int, timeout: float = 1.0) -> None:
            requested.append(gpu_uuid)
            if moment == "while nvidia-smi runs" and len(requested) == 1:
                steps.driver_reloaded()
                steps.gpus()

    records, requested = Records(tmp_path / "claims"), list[str]()
    records.open("boot-1")
    records.save(ClaimRecord(claim(), "prepared", "boot-1", (), (SetTimeSlice("GPU-1", 3),), ""))
    ledger = Ledger(tmp_path / "ledger", records, "boot-1")
    steps = TimeSliceSteps(Smi(lambda: None), ledger)  # type: ignore[arg-type, return-value]
    steps.driver_reloaded()
    while gpus := steps.gpus():
        for gpu in sorted(gpus):
            steps.restore(gpu)
    wanted = ["GPU-1", "GPU-1", "GPU-2"] if moment == "while the records are read" else ["GPU-1", "GPU-1"]
    assert requested == wanted
