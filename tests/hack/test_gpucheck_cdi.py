"""The CDI spec beside the host's files and beside the toolkit's spec."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpucheck.machine import Report, View
from gpucheck.spec import CLAIM_UID, check_spec, check_toolkit, compare_specs, spec_of_all

from dra_driver.simulator import create_machine
from tests.cdi.cdi_schema import faults
from tests.hack.support import looking_at, script


@pytest.fixture
def view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[View]:
    """A machine on which somebody has run nvidia-smi, which makes the capability nodes."""
    monkeypatch.delenv("SIMULATE_HOSTILE")
    create_machine("h100-mig-static", tmp_path / "machine", device_nodes="described", cdi_hook=True)
    with looking_at("h100-mig-static", tmp_path) as found:
        yield found


def checked(view: View, spec: dict) -> Report:
    report = Report()
    check_spec(report, view, spec)
    return report


def test_the_spec_of_all_devices_is_one_that_runtimes_take(view: View) -> None:
    spec = spec_of_all(view)
    assert faults(spec) == []
    assert len(spec["devices"]) == 13


def without_nodes(view: View, sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(view.platform.nodes).read
    monkeypatch.setattr(
        type(view.platform.nodes), "read", lambda self, path: None if sign in path else real(self, path)
    )


def test_every_path_that_is_not_there_is_told(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(view.platform.paths.driver_root)
    spec = spec_of_all(view)
    assert checked(view, spec).differences == []
    assert len(spec["devices"]) == 13
    (root / "usr/lib/x86_64-linux-gnu/libnvidia-ngx.so.580.95.05").unlink()
    (root / "usr/bin/nvidia-cdi-hook").unlink()
    without_nodes(view, "/nvidia5", monkeypatch)
    found = "\n".join(checked(view, spec).differences)
    assert "libnvidia-ngx.so.580.95.05: is not a file or socket on the host" in found
    assert "device node /dev/nvidia5 is not on the host" in found
    assert "nvidia-cdi-hook is not a program on the host" in found


def test_capability_nodes_may_be_missing_but_not_be_others(
    view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of_all(view)
    node = next(n for n in spec["devices"][0]["containerEdits"]["deviceNodes"] if "nvidia-cap" in n["path"])
    node["minor"] += 1
    assert [text.partition(": (")[2] for text in checked(view, spec).differences] != []
    without_nodes(view, "nvidia-caps", monkeypatch)
    assert checked(view, spec).differences == []


def toolkit_spec(view: View, ours: dict) -> dict:
    """What the toolkit would print for this machine: other device names, no types, its own extras."""
    uuids = {f"{CLAIM_UID}-{device.name}": device.uuid for device in view.inventory.devices()}
    theirs = copy.deepcopy(ours)
    for device in theirs["devices"]:
        device["name"] = uuids[device["name"]]
    theirs["devices"].append({"name": "all", "containerEdits": {}})
    mount = {"hostPath": "/tmp/nvidia-mps", "containerPath": "/tmp/nvidia-mps"}
    theirs["containerEdits"]["mounts"].append(mount)
    return theirs


def compared(view: View, ours: dict, theirs: dict) -> Report:
    report = Report()
    compare_specs(report, view, ours, theirs)
    return report


def notes(report: Report) -> list[str]:
    return [text for level, _, text in report.findings if level == "note"]


def test_specs_with_the_same_meaning_do_not_differ(view: View) -> None:
    ours = spec_of_all(view)
    theirs = toolkit_spec(view, ours)
    for mount in theirs["containerEdits"]["mounts"]:
        mount["containerPath"] = mount["containerPath"].replace("/usr/lib/x86_64-linux-gnu/", "/lib64/")
    report = compared(view, ours, theirs)
    assert report.differences == []
    assert notes(report) == [
        "all containers: mount nvidia-mps is only theirs; does not matter: MPS is set up for each claim"
    ]
    assert report.checked["nvidia-ctk"] > 100


def test_what_only_the_toolkit_has_matters(view: View) -> None:
    ours = spec_of_all(view)
    theirs = toolkit_spec(view, ours)
    common = theirs["containerEdits"]
    common["mounts"].append({"hostPath": "/x/libnew.so.5", "containerPath": "/usr/lib/libnew.so.5"})
    common["env"].append("NVIDIA_NEW=1")
    common["deviceNodes"].append({"path": "/dev/nvidia-new"})
    common["hooks"].append({"path": "/h", "args": ["h", "hook", "new-hook"]})
    common["hooks"].append({"path": "/h", "args": ["h", "chmod", "--mode", "755"]})
    symlinks = next(hook for hook in common["hooks"] if "create-symlinks" in hook["args"])
    symlinks["args"] += ["--link", "libnew.so.1::/usr/lib/libnew.so"]
    theirs["devices"][-2]["containerEdits"]["deviceNodes"][0]["minor"] = 99
    theirs["devices"].pop(0)
    theirs["devices"].append({"name": "GPU-other", "containerEdits": {}})
    found = compared(view, ours, theirs).differences
    for text in (
        "mount libnew.so.5 is only theirs; matters",
        "env NVIDIA_NEW=1 is only theirs; matters",
        "node /dev/nvidia-new is only theirs; matters",
        "hook new-hook is only theirs; matters",
        "link libnew.so.1::/usr/lib/libnew.so is only theirs; matters",
    ):
        assert f"nvidia-ctk: all containers: {text}" in found
    assert any("(195, 99) there" in text for text in found)
    assert any(text.endswith("this device is only ours") for text in found)
    assert "nvidia-ctk: GPU-other: this device is only theirs" in found
    assert len(found) == 8


def test_a_node_that_only_we_give_matters_but_a_mount_does_not(view: View) -> None:
    ours = spec_of_all(view)
    theirs = toolkit_spec(view, ours)
    common, device = theirs["containerEdits"], theirs["devices"][0]["containerEdits"]
    common["deviceNodes"] = [n for n in common["deviceNodes"] if n["path"] != "/dev/nvidia-modeset"]
    common["mounts"] = [m for m in common["mounts"] if "libnvidia-ngx" not in m["containerPath"]]
    device["deviceNodes"] = device["deviceNodes"][:1]
    report = compared(view, ours, theirs)
    assert report.differences == [
        "nvidia-ctk: all containers: node /dev/nvidia-modeset is only ours; matters"
    ]
    assert any("libnvidia-ngx" in text for text in notes(report))
    assert any("/dev/nvidia-caps/" in text for text in notes(report))


def test_the_toolkit_is_run_when_it_is_there(view: View, tmp_path: Path) -> None:
    ours, report = spec_of_all(view), Report()
    theirs = toolkit_spec(view, ours)
    command = "'cdi generate --format json --device-name-strategy uuid'"
    program = script(tmp_path / "nvidia-ctk", {command: json.dumps(theirs)})
    assert check_toolkit(report, view, ours, program) == theirs
    assert [level for level, _, _ in report.findings] == ["note"]


@pytest.mark.parametrize("answer", ["", "[]", "no JSON"])
def test_a_toolkit_that_does_not_answer_is_no_difference(view: View, tmp_path: Path, answer: str) -> None:
    report = Report()
    program = script(tmp_path / "nvidia-ctk", {"'cdi generate'*": answer})
    assert check_toolkit(report, view, spec_of_all(view), program) is None
    assert [(level, text[:24]) for level, _, text in report.findings] == [
        ("not checked", "nvidia-ctk cdi generate:")
    ]
