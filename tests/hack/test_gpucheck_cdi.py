"""The CDI spec beside the host's files and beside the toolkit's spec."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpucheck.cdispec import CLAIM_UID, _library_fault, check_spec
from gpucheck.findings import Section
from gpucheck.toolkit import check_toolkit, compare_specs
from gpucheck.view import Options, View

from dra_driver.simulator import create_machine
from tests.cdi.cdi_schema import faults
from tests.hack.support import looking_at, script

OPTIONS = Options()


def texts(section: Section, level: str = "difference") -> list[str]:
    return [f"{item.subject}: {item.text}" for item in section.findings if item.level == level]


@pytest.fixture
def view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[View]:
    """A machine on which somebody has run nvidia-smi, which makes the capability nodes."""
    monkeypatch.delenv("SIMULATE_HOSTILE")
    create_machine("h100-mig-static", tmp_path / "machine", device_nodes="described", cdi_hook=True)
    with looking_at("h100-mig-static", tmp_path) as found:
        yield found


def root(view: View) -> Path:
    return Path(view.machine.paths.driver_root)


def test_the_spec_has_all_devices_and_is_good(view: View) -> None:
    section, spec = check_spec(view, OPTIONS)
    assert spec is not None
    assert faults(spec) == []
    assert len(spec["devices"]) == 13
    assert section.findings == []


def test_every_path_that_is_not_there_is_told(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    lib = root(view) / "usr/lib/x86_64-linux-gnu"
    real = type(view.machine.nodes).read
    _, spec = check_spec(view, OPTIONS)
    monkeypatch.setattr("gpucheck.cdispec.SpecMaker.spec", lambda self, devices: spec)
    (lib / "libnvidia-ngx.so.580.95.05").unlink()
    (lib / "libnvoptix.so.580.95.05").unlink()
    (lib / "libnvoptix.so.580.95.05").mkdir()
    (root(view) / "usr/bin/nvidia-cdi-hook").unlink()
    monkeypatch.setattr(
        type(view.machine.nodes), "read", lambda self, path: None if "/nvidia5" in path else real(self, path)
    )
    section, _ = check_spec(view, OPTIONS)
    found = "\n".join(texts(section))
    assert "libnvidia-ngx.so.580.95.05: is not on the host" in found
    assert "libnvoptix.so.580.95.05: is not a regular file" in found
    assert "device node /dev/nvidia5 is not on the host" in found
    assert "nvidia-cdi-hook is not a program on the host" in found


def test_capability_nodes_may_be_missing_but_not_be_others(
    view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = type(view.machine.nodes).read
    monkeypatch.setattr(
        type(view.machine.nodes),
        "read",
        lambda self, path: None if "nvidia-caps" in path else real(self, path),
    )
    section, spec = check_spec(view, OPTIONS)
    assert texts(section) == []
    assert texts(section, "note") == [
        "MIG: 14 capability nodes are not on the host; runtimes make them themselves"
    ]
    monkeypatch.undo()
    assert spec is not None
    node = next(n for n in spec["devices"][0]["containerEdits"]["deviceNodes"] if "nvidia-cap" in n["path"])
    node["minor"] += 1
    monkeypatch.setattr("gpucheck.cdispec.SpecMaker.spec", lambda self, devices: spec)
    section, _ = check_spec(view, OPTIONS)
    assert len(texts(section)) == 1
    assert "in the spec" in texts(section)[0]


def test_a_device_that_cannot_be_prepared_is_named(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(view.machine.nodes).read
    monkeypatch.setattr(
        type(view.machine.nodes),
        "read",
        lambda self, path: None if path.endswith("nvidia5") else real(self, path),
    )
    section, spec = check_spec(view, OPTIONS)
    assert spec is None
    name = next(device.name for device in view.inventory.devices() if device.gpu.minor == 5)
    assert [text.partition(":")[0] for text in texts(section)] == ["all devices", name]


def test_a_library_that_no_container_gets_is_told(view: View) -> None:
    elsewhere = root(view) / "usr/local/nvidia/lib64"
    elsewhere.mkdir(parents=True)
    (elsewhere / "libnvidia-new.so.580.95.05").write_text("new")
    section, _ = check_spec(view, OPTIONS)
    assert len(texts(section)) == 1
    assert texts(section)[0].endswith("libnvidia-new.so.580.95.05 is on the host but in no container")


def test_libraries_must_be_for_this_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    library = tmp_path / "libcuda.so.1"
    for header, fault in (
        (b"\x7fELF\x02".ljust(18, b"\0") + b"\x3e\0", None),
        (b"\x7fELF\x02".ljust(18, b"\0") + b"\xb7\0", "is a library for another processor (ELF machine 183)"),
        (b"\x7fELF\x01".ljust(18, b"\0") + b"\x03\0", "is no 64-bit library"),
        (b"", "is no 64-bit library"),
    ):
        library.write_bytes(header)
        assert _library_fault(library) == fault


def toolkit_spec(view: View, ours: dict) -> dict:
    """What the toolkit would print for this machine: other device names, no types, its own extras."""
    uuids = {f"{CLAIM_UID}-{device.name}": device.uuid for device in view.inventory.devices()}
    theirs = copy.deepcopy(ours)
    for device in theirs["devices"]:
        device["name"] = uuids[device["name"]]
    theirs["devices"].append({"name": "all", "containerEdits": {}})
    mps = str(root(view) / "tmp/nvidia-mps")
    theirs["containerEdits"]["mounts"].append({"hostPath": mps, "containerPath": "/tmp/nvidia-mps"})
    return theirs


def compared(view: View, ours: dict, theirs: dict) -> Section:
    section = Section("nvidia-ctk")
    compare_specs(section, view, ours, theirs)
    return section


def test_specs_with_the_same_meaning_do_not_differ(view: View) -> None:
    _, ours = check_spec(view, OPTIONS)
    assert ours is not None
    section = compared(view, ours, toolkit_spec(view, ours))
    assert texts(section) == []
    assert texts(section, "note") == [
        "all containers: mount /tmp/nvidia-mps: only theirs; does not matter: MPS is set up for each claim"
    ]
    assert section.checked > 100


def test_what_only_the_toolkit_has_matters(view: View) -> None:
    _, ours = check_spec(view, OPTIONS)
    assert ours is not None
    theirs = toolkit_spec(view, ours)
    common = theirs["containerEdits"]
    common["mounts"].append(
        {"hostPath": "/x/libnvidia-new.so.5", "containerPath": "/usr/lib/libnvidia-new.so.5"}
    )
    common["env"].append("NVIDIA_NEW=1")
    common["deviceNodes"].append({"path": "/dev/nvidia-new"})
    common["hooks"].append({"hookName": "createContainer", "path": "/h", "args": ["h", "new-hook"]})
    common["hooks"].append(
        {"hookName": "createContainer", "path": "/h", "args": ["h", "chmod", "--mode", "755"]}
    )
    symlinks = next(hook for hook in common["hooks"] if "create-symlinks" in hook["args"])
    symlinks["args"] += ["--link", "libnew.so.1::/usr/lib/libnew.so"]
    theirs["devices"][-2]["containerEdits"]["deviceNodes"][0]["minor"] = 99
    removed = theirs["devices"].pop(0)
    theirs["devices"].append({"name": "GPU-other", "containerEdits": {}})
    found = texts(compared(view, ours, theirs))
    for text in (
        "mount /usr/lib/libnvidia-new.so.5 is only theirs; matters",
        "env NVIDIA_NEW=1 is only theirs; matters",
        "node /dev/nvidia-new is only theirs; matters",
        "hook new-hook is only theirs; matters",
        "link libnew.so.1::/usr/lib/libnew.so is only theirs; matters",
    ):
        assert f"all containers: {text}" in found
    assert any("(195, 99) theirs" in text for text in found)
    assert any(text.endswith(f"{removed['name']} is only ours") for text in found)
    assert "GPU-other: this device is only theirs" in found
    assert len(found) == 8


def test_a_node_that_only_we_give_matters_but_a_mount_does_not(view: View) -> None:
    _, ours = check_spec(view, OPTIONS)
    assert ours is not None
    theirs = toolkit_spec(view, ours)
    theirs["containerEdits"]["deviceNodes"] = [
        node for node in theirs["containerEdits"]["deviceNodes"] if node["path"] != "/dev/nvidia-modeset"
    ]
    theirs["containerEdits"]["mounts"] = [
        mount for mount in theirs["containerEdits"]["mounts"] if "libnvidia-ngx" not in mount["containerPath"]
    ]
    theirs["devices"][0]["containerEdits"]["deviceNodes"] = theirs["devices"][0]["containerEdits"][
        "deviceNodes"
    ][:1]
    section = compared(view, ours, theirs)
    assert texts(section) == ["all containers: node /dev/nvidia-modeset is only ours; matters"]
    assert any("libnvidia-ngx" in text for text in texts(section, "note"))
    assert any("capability nodes" in text for text in texts(section, "note"))


def test_a_file_may_lie_elsewhere_in_the_container(view: View) -> None:
    _, ours = check_spec(view, OPTIONS)
    assert ours is not None
    theirs = toolkit_spec(view, ours)
    for mount in theirs["containerEdits"]["mounts"]:
        mount["containerPath"] = mount["containerPath"].replace("/usr/lib/x86_64-linux-gnu/", "/lib64/")
    section = compared(view, ours, theirs)
    assert texts(section) == []
    assert any("libcuda.so.580.95.05 is at /usr/lib/x86_64" in text for text in texts(section, "note"))


def test_the_toolkit_is_run_when_it_is_there(view: View, tmp_path: Path) -> None:
    _, ours = check_spec(view, OPTIONS)
    assert ours is not None
    answer = json.dumps(toolkit_spec(view, ours))
    program = script(
        tmp_path / "nvidia-ctk", {"'cdi generate --format json --device-name-strategy uuid'": answer}
    )
    section = check_toolkit(view, Options(nvidia_ctk=program), ours)
    assert section.skipped == []
    assert texts(section) == []


@pytest.mark.parametrize("answer", ["", "[]", "no JSON"])
def test_a_toolkit_that_does_not_answer_is_no_difference(view: View, tmp_path: Path, answer: str) -> None:
    _, ours = check_spec(view, OPTIONS)
    program = script(tmp_path / "nvidia-ctk", {"'cdi generate'*": answer})
    section = check_toolkit(view, Options(nvidia_ctk=program), ours)
    assert section.findings == []
    assert section.skipped[0].startswith("nvidia-ctk cdi generate: ")
    assert check_toolkit(view, OPTIONS, ours).skipped == ["nvidia-ctk is not on this machine"]
