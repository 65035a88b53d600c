"""`device-classes` and the drawing of `inspect`, as processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from dra_driver.cli.output import device_table
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.records import RecordStore
from dra_driver.journal.rules.cleanups import LedgerEntry
from dra_driver.model.claim import AllocatedClaim, ClaimRef, HeldDevice
from dra_driver.model.ids import gpu_device_names
from dra_driver.model.mig import OwnedInstance, Placement
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import CreateMig
from dra_driver.simulator import create_machine
from tests.integration.conftest import DRIVER
from tests.integration.test_process import call

SHIPPED = Path(__file__).parents[2] / "daemonset/chart/files/mig-classes.yaml"


def test_shipped_classes_are_what_the_command_in_their_head_prints() -> None:
    text = SHIPPED.read_text()
    machines = [word for line in text.splitlines() if line.startswith("#   --") for word in line.split()[1:3]]
    done = call("device-classes", *machines)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == text
    as_json = json.loads(call("device-classes", "--simulate", "a30-4", "-o", "json").stdout)
    names = [entry["metadata"]["name"] for entry in as_json["items"]]
    assert names == [
        name for name in (entry["metadata"]["name"] for entry in yaml.safe_load_all(text)) if name in names
    ]
    assert len(names) == 5


def test_classes_of_machines_without_mig_are_one_sentence() -> None:
    done = call("device-classes", "--simulate", "t4-4")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.strip().splitlines()
    assert "t4-4 has no GPU with MIG profiles" in line


def files(directory: Path) -> Mapping[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_drawing_says_who_holds_what_and_changes_nothing(tmp_path: Path) -> None:
    machine = create_machine("hgx-h100-4", tmp_path / "machine", device_nodes="described")
    machine.set_mig_mode(0, on=True)
    made = [machine.create_mig(0, "1g.10gb", start) for start in (0, 1, 2)]
    gpus = [gpu.uuid for gpu in machine.current().present]
    names = gpu_device_names(gpus)
    first = next(iter(gpus))
    plugins = tmp_path / "plugins"
    records = RecordStore(plugins / DRIVER / "claims")
    records.open("boot-1")
    claim = AllocatedClaim(ClaimRef("ml", "training", "uid-1"), (), ())
    device = f"{names[first]}-mig-1g10gb-19-0"
    place = Placement(0, 1)
    step = CreateMig(device, first, None, 19, "1g.10gb", place)
    held = HeldDevice(device, "mig", "", first, placement=place)
    boot_id = (machine.host_root / "proc/sys/kernel/random/boot_id").read_text().strip()
    records.save(ClaimRecord(claim, "prepared", boot_id, (held,), (step,)))
    ledger = Ledger(plugins / DRIVER / "ledger", records, boot_id)
    ledger.open()
    ledger.save(OwnedInstance("ended", first, None, 19, "1g.10gb", Placement(1, 1), boot_id, "created"))
    ended = CreateMig("ended", first, None, 19, "1g.10gb", Placement(1, 1))
    ledger.add(LedgerEntry(ClaimRef("ml", "ended", "uid-2"), boot_id, ended))
    before = files(plugins)

    def inspect(*options: str) -> str:
        where = ["--simulate", "hgx-h100-4", "--simulator-dir", str(tmp_path / "machine")]
        where += ["--kubelet-plugins-directory-path", str(plugins)]
        done = call("inspect", *where, *options)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    drawn = inspect("--mig", "--dynamic-mig")
    assert drawn.count("MIG devices on demand") == 2, (
        "GPUs that nobody uses and that are equal are drawn once"
    )
    assert all(drawn.count(name) >= 1 for name in names.values())
    assert len(made) == 3
    assert f"{names[first]}: NVIDIA H100 80GB HBM3, MIG mode on, MIG devices on demand" in drawn
    owners = [line.rpartition(": ")[2] for line in drawn.splitlines() if line.startswith("  slice ")]
    assert owners == [
        "claim ml/training",
        "created by gpu-dra-driver, not used by a claim, will be destroyed",
        "not created by gpu-dra-driver",
    ]
    assert "room for: 1g.10gb x4" in drawn
    # Without the option the table, and below it only the GPU that is in MIG mode.
    table = inspect()
    assert table.count("MIG mode on\n") == 1
    assert table.index("DEVICE") < table.index("MIG mode on\n")
    assert files(plugins) == before


def test_drawing_is_not_json() -> None:
    done = call("inspect", "--simulate", "a30-4", "--mig", "-o", "json")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


def test_table_has_one_row_for_the_placements_of_a_profile() -> None:
    def device(name: str, **attributes: str) -> dict[str, object]:
        return {"name": name, "attributes": {key: {"string": value} for key, value in attributes.items()}}

    listed = device_table(
        [
            device("gpu-1", type="gpu", uuid="GPU-1"),
            device("gpu-1-mig-1g10gb-19-1", type="mig", profile="1g.10gb"),
            device("gpu-1-mig-1g10gb-19-0", type="mig", profile="1g.10gb"),
            device("gpu-1-mig-7g80gb-0-0", type="mig", profile="7g.80gb"),
            device("gpu-2-mig-1g10gb-19-0", type="mig", profile="1g.10gb", uuid="MIG-1"),
            device("gpu-2-mig-1g10gb-19-1", type="mig", profile="1g.10gb", uuid="MIG-2"),
        ],
        None,
    )
    rows = [(line.split()[0], line.split()[-1]) for line in [*listed][1:]]
    assert rows == [
        ("gpu-1", "GPU-1"),
        ("gpu-1-mig-1g10gb-19-{0,1}", "demand"),
        ("gpu-1-mig-7g80gb-0-0", "demand"),
        ("gpu-2-mig-1g10gb-19-0", "MIG-1"),
        ("gpu-2-mig-1g10gb-19-1", "MIG-2"),
    ]


def test_table_lists_devices_with_taints_first() -> None:
    taint = {"key": "gpu.nvidia.com/gpu-lost", "effect": "NoSchedule"}
    devices = [{"name": "gpu-1"}, {"name": "gpu-2", "taints": [taint]}, {"name": "gpu-3"}]
    names = [line.split()[0] for line in [*device_table(devices, None)][1:]]
    assert names == ["gpu-2", "gpu-1", "gpu-3"]
