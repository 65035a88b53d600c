"""MPS on a host without the capability nodes of MIG devices."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dra_driver.errors import RetryableError
from dra_driver.model.mps import MpsDaemonSpec
from dra_driver.simulator import Machine, SimulatedDeviceNodes, create_machine
from dra_driver.simulator.catalogue import MACHINES
from dra_driver.simulator.mig import cap_minor
from tests.fakes.tables import read_yaml
from tests.fakes.waiting import PATIENCE_S
from tests.mps_host.conftest import RETRIED_LATER, Host

root = pytest.mark.skipif(os.geteuid() != 0, reason="mknod(2) needs root")


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Host]:
    """A host whose MIG devices have no nodes."""
    body = read_yaml(MACHINES / "h100-mig-static.yaml")
    file = tmp_path / "bare.yaml"
    file.write_text(yaml.safe_dump({**body, "system": {"cap_nodes": False}}))
    top = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))
    one = Host(top, create_machine(str(file), tmp_path / "machine", device_nodes="described"))
    yield one
    one.close()
    shutil.rmtree(top)


def mig_spec(machine: Machine) -> MpsDaemonSpec:
    gpu = machine.gpu(1)
    return MpsDaemonSpec("gpu-1-mig", gpu.mig_devices[0][1].uuid, "mig", gpu.uuid)


def nodes(host: Host) -> list[str]:
    return sorted(path.name for path in (host.machine.host_root / "dev/nvidia-caps").iterdir())


def nodes_of_device(machine: Machine) -> set[str]:
    """The capability nodes without which CUDA does not find the MIG device of `mig_spec`."""
    instance, compute = machine.gpu(1).mig_devices[0]
    minors = (cap_minor(1, instance.id), cap_minor(1, instance.id, compute.id))
    return {f"nvidia-cap{minor}" for minor in minors}


def test_daemon_of_a_mig_device_has_the_nodes_of_the_device_when_no_one_made_its_nodes(bare: Host) -> None:
    assert nodes(bare) == ["nvidia-cap1", "nvidia-cap2"]
    supervisor = bare.supervisor()
    supervisor.ensure(mig_spec(bare.machine), PATIENCE_S)
    made = nodes(bare)
    assert nodes_of_device(bare.machine) <= set(made)
    supervisor.stop("gpu-1-mig", PATIENCE_S)
    assert nodes(bare) == made, "other programs may use them"


@pytest.mark.parametrize("are_real", [False, pytest.param(True, marks=root)])
def test_nodes_of_an_earlier_load_of_the_driver_are_recreated(
    bare: Host, are_real: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.simulator.hostroot.kernel.can_make_nodes", lambda directory: are_real)
    reader = SimulatedDeviceNodes(bare.machine.host_root)
    there_before = nodes(bare)
    bare.tools.make_capability_nodes()
    paths = [f"/dev/nvidia-caps/{name}" for name in nodes(bare) if name not in there_before]
    right = {path: reader.read(path) for path in paths}
    for path, node in right.items():
        assert node is not None
        reader.remove(path)
        reader.make(path, replace(node, major=node.major + 1))
    bare.tools.make_capability_nodes()
    assert {path: reader.read(path) for path in paths} == right


def test_no_daemon_starts_when_the_nodes_cannot_be_made(bare: Host) -> None:
    def refuse() -> None:
        raise RetryableError("cannot create the device node /dev/nvidia-caps/nvidia-cap21")

    supervisor = bare.supervisor(make_capability_nodes=refuse, **RETRIED_LATER)
    with pytest.raises(RetryableError, match="nvidia-cap21"):
        supervisor.ensure(mig_spec(bare.machine), PATIENCE_S)
    assert bare.left() == []


def test_a_whole_gpu_needs_no_node_of_a_mig_device(bare: Host) -> None:
    bare.supervisor().ensure(bare.spec(2), PATIENCE_S)
    assert nodes(bare) == ["nvidia-cap1", "nvidia-cap2"]


def test_the_nodes_are_made_again_when_the_host_has_rebooted(bare: Host) -> None:
    spec = mig_spec(bare.machine)
    supervisor = bare.supervisor()
    supervisor.ensure(spec, PATIENCE_S)
    made = nodes(bare)
    supervisor.stop(spec.device, PATIENCE_S)
    bare.machine.reboot()
    assert nodes(bare) == ["nvidia-cap1", "nvidia-cap2"]
    bare.machine.set_mig_mode(1, True)
    _, _, uuid = bare.machine.create_mig(1, "1g.10gb", 0)
    supervisor.ensure(replace(spec, uuid=uuid), PATIENCE_S)
    assert nodes_of_device(bare.machine) <= set(nodes(bare)) <= set(made)
