"""A recorded machine is the machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from gpucheck.cli import DIFFERENT, OK, main
from gpucheck.recording import CannotRecordError, anonymise, record, write
from gpucheck.replay import check_recording

from dra_driver.model.inventory import Inventory
from dra_driver.simulator import machine_names, open_machine
from dra_driver.simulator.topology import active_links
from dra_driver.slices.rules.build import build_pool
from tests.hack.support import looking_at, machine_file

H100 = {"model": "h100-sxm", "addressing": "hmm"}


_GPU = {
    "uuid", "bus_id", "minor", "module_id", "pcie", "numa", "cpus", "memory_numa", "addressing", "virtualization",
    "drm", "instances", "mig_mode", "persistence",
}  # fmt: skip


def facts(value: object, names: set[str]) -> dict:
    """The attributes, with lists in an order of their own."""
    found = {name: getattr(value, name) for name in names}
    ordered = {name: sorted(item, key=repr) for name, item in found.items() if isinstance(item, list)}
    return {**found, **ordered}


def recorded(name: str, directory: Path, *, anonymous: bool = False) -> tuple[Inventory, Path]:
    with looking_at(name, directory) as view:
        document = record(view)
        inventory = view.inventory
    path = directory / "recording.yaml"
    write(anonymise(document) if anonymous else document, path)
    return inventory, path


def replayed(path: Path, directory: Path) -> Inventory:
    with looking_at(str(path), directory / "again") as view:
        return view.inventory


@pytest.mark.parametrize("machine", machine_names())
def test_the_recording_shows_the_same_devices(machine: str, tmp_path: Path) -> None:
    original, path = recorded(machine, tmp_path)
    again = replayed(path, tmp_path)
    assert again == original
    assert build_pool(again, "node") == build_pool(original, "node")


@pytest.mark.parametrize("machine", machine_names())
def test_the_recording_is_the_same_state(machine: str, tmp_path: Path) -> None:
    """Not only what discovery reads today: buses, wiring, settings and tables of the simulated machine."""
    _, path = recorded(machine, tmp_path)
    replayed(path, tmp_path)
    before = open_machine(tmp_path / "machine").current()
    after = open_machine(tmp_path / "again/machine").current()
    assert len(after.gpus) == len(before.gpus)
    unseen = {"addressing"} if before.driver_version < "575" else set()
    for old, new in zip(before.present, after.present, strict=True):
        assert facts(new, _GPU - unseen) == facts(old, _GPU - unseen)
        model, copy = before.model_of(old), after.model_of(new)
        assert copy.serial == model.serial
        assert new.serial == old.serial or not model.serial
        # Without a link that is up nobody tells the version.
        seen = set(type(model).__slots__) - (
            set() if active_links(old) else {"nvlink_version", "nvlink_mbps"}
        )
        assert facts(copy, seen) == facts(model, seen)
    assert after.functions == sorted(before.functions, key=lambda function: function.bus_id)
    assert {
        key: after.system[key] for key in ("arch", "kernel", "caps_major", "uvm_major", "imex_major")
    } == {key: before.system[key] for key in ("arch", "kernel", "caps_major", "uvm_major", "imex_major")}


def test_a_recording_of_a_recording_is_the_same_file(tmp_path: Path) -> None:
    _, first = recorded("h100-mig-static", tmp_path)
    (tmp_path / "second").mkdir()
    _, second = recorded(str(first), tmp_path / "second")
    assert second.read_text() == first.read_text()


@pytest.mark.parametrize("machine", ["h100-mig-static", "gb200-nvl72-tray", "dgx-1v", "vm-passthrough"])
def test_nothing_leads_back_when_the_recording_is_anonymous(machine: str, tmp_path: Path) -> None:
    original, path = recorded(machine, tmp_path, anonymous=True)
    text = path.read_text()
    state = open_machine(tmp_path / "machine").current()
    secrets = [gpu.uuid.removeprefix("GPU-") for gpu in state.gpus] + [gpu.serial for gpu in state.gpus]
    secrets += [ci.uuid.removeprefix("MIG-") for gpu in state.gpus for _, ci in gpu.mig_devices]
    secrets += [str(gpu.platform.get("chassis_serial", "-none-")) for gpu in state.gpus]
    secrets += [part for gpu in state.gpus for part in gpu.pcie.split("/") if len(part) == 36]
    if state.fabric.get("cluster"):
        secrets += [state.fabric["cluster"], state.fabric["cluster"].replace("-", "")]
    assert [secret for secret in secrets if secret in text] == []
    again = replayed(path, tmp_path)
    assert [gpu.pci_bus_id for gpu in again.gpus] == [gpu.pci_bus_id for gpu in original.gpus]
    assert len(list(again.devices())) == len(list(original.devices()))
    for old, new in zip(original.gpus, again.gpus, strict=True):
        assert [mig.profile for mig in new.mig_devices] == [mig.profile for mig in old.mig_devices]
        assert (new.fabric is None) == (old.fabric is None)
    by_domain = [list(item.nvlink_domains.values()) for item in (original, again)]
    assert len(set(by_domain[0])) == len(set(by_domain[1]))


def test_what_static_layouts_cannot_say_is_recorded(tmp_path: Path) -> None:
    """Shared GPU instances, instances without a device, links that are down, GPUs that are not registered."""
    compute = [
        {"index": 4, "id": 1, "slices": 1, "start": 2, "uuid": "MIG-00000000-0000-5000-8000-000000000001"},
        {"index": 2, "id": 0, "slices": 2, "start": 0, "uuid": "MIG-00000000-0000-5000-8000-000000000002"},
    ]
    mig = [
        {"profile": "3g.40gb", "start": 4, "instance": 1, "compute": compute},
        {"profile": "1g.10gb", "start": 0, "instance": 13, "compute": []},
    ]
    cluster = "7f3c1ad2-96f4-4e0b-8b7a-0d5f6a2c9e11"
    document = {
        "driver": {"version": "570.124.06", "cuda": "12.8"},
        "gpus": [
            {**H100, "bus": "0000:1b:00.0", "minor": 5, "mig": mig},
            {**H100, "bus": "0000:43:00.0", "minor": 3, "links_down": [0, 17], "numa": 1},
            {**H100, "bus": "0000:52:00.0", "fabric": {"state": "in-progress"}, "drm": None},
            {"model": "l40s", "bus": "0000:61:00.0"},
        ],
        "nvlink": {"topology": "switched", "remote": "placeholder"},
        "fabric": {"state": "completed", "cluster": cluster, "clique": 7},
        "functions": [
            {
                "bus": "0000:05:00.0",
                "device": 0x2330,
                "class": 0x030200,
                "pcie": "pci0000:00",
                "driver": "vfio-pci",
            }
        ],
        "missing_functions": ["nvmlDeviceGetAddressingMode", "nvmlDeviceGetGpuInstanceProfileInfoV"],
    }
    original, path = recorded(machine_file(tmp_path, document), tmp_path)
    assert [mig.profile.name for mig in original.gpus[0].mig_devices] == ["2c.3g.40gb", "1c.3g.40gb"]
    assert [gpu.nvlink_links for gpu in original.gpus] == [18, 16, 18, None]
    assert [gpu.minor for gpu in original.gpus] == [5, 3, 2, 3]
    assert [gpu.fabric is None for gpu in original.gpus] == [False, False, True, True]
    assert [fault.subject for fault in original.faults] == ["PCI function 0000:05:00.0"]
    assert replayed(path, tmp_path) == original
    assert yaml.safe_load(path.read_text())["gpus"][0]["mig"][0]["profile"] == "1g.10gb"


def test_a_fabric_that_only_the_first_form_tells_is_recorded(tmp_path: Path) -> None:
    document = {
        "driver": {"version": "535.161.08", "cuda": "12.2"},
        "gpus": [{**H100, "bus": "0000:1b:00.0"}],
        "fabric": {"state": "in-progress"},
        "missing_functions": ["nvmlDeviceGetAddressingMode", "nvmlDeviceGetGpuFabricInfoV"],
    }
    _, path = recorded(machine_file(tmp_path, document), tmp_path)
    recording = yaml.safe_load(path.read_text())
    assert recording["gpus"][0].get("fabric", recording["fabric"])["state"] == "in-progress"
    assert "nvmlDeviceGetGpuFabricInfoV" in recording["missing_functions"]


def test_the_recording_is_checked_before_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "recording.yaml"
    assert main(["--simulate", "dgx-1v", "--record", str(path), "-o", "json"]) == OK
    sections = {section["title"]: section for section in json.loads(capsys.readouterr().out)["sections"]}
    assert sections["recording"]["checked"] > 100
    monkeypatch.setattr("gpucheck.recording.nvlink", lambda readers: {})
    assert main(["--simulate", "dgx-1v", "--record", str(path), "-o", "json"]) == DIFFERENT
    sections = {section["title"]: section for section in json.loads(capsys.readouterr().out)["sections"]}
    texts = [finding["text"] for finding in sections["recording"]["findings"]]
    assert "nvlink_links: 6 here, 0 in the recording" in texts


def test_a_recording_that_cannot_be_loaded_is_a_difference(tmp_path: Path) -> None:
    inventory, path = recorded("gb10", tmp_path)
    path.write_text(path.read_text().replace("model: recorded-", "model: unknown-"))
    section = check_recording(path, inventory)
    assert [finding.text.partition(":")[0] for finding in section.findings] == ["cannot be loaded"]


def test_it_says_why_when_there_is_no_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CannotRecordError, match="cannot write the recording"):
        write({}, tmp_path / "none" / "recording.yaml")
    assert main(["--simulate", "gb10", "--record", str(tmp_path / "none" / "recording.yaml")]) == DIFFERENT
    assert "DIFFERS     cannot write the recording" in capsys.readouterr().out
    monkeypatch.setattr("gpucheck.recording._BUS_ID", re.compile("never"))
    assert main(["--simulate", "gb10", "--record", str(tmp_path / "recording.yaml")]) == DIFFERENT
    assert "has the PCI bus ID 000f:01:00.0" in capsys.readouterr().out
    assert not (tmp_path / "recording.yaml").exists()
