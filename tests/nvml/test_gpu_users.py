"""What keeps a GPU in use: processes and persistence mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import pynvml
import pytest

from dra_driver.errors import (
    DeviceLostError,
    NotSupportedError,
    NvmlTransientError,
    NvmlUnavailableError,
    RetryableError,
)
from dra_driver.model.mig import Placement
from dra_driver.nvml.gpu_users import PersistenceModes, read_processes
from dra_driver.nvml.mig_changes import MigHardware
from dra_driver.nvml.reader import NvmlReader
from dra_driver.simulator import SimulatedLibrary
from tests.fakes.machines import SimulatedNode

Make = Callable[[str], SimulatedNode]
TWO = {4711: "process 4711 (python3)", 4712: "process 4712 (/usr/bin/train)"}


@pytest.fixture
def node(opened: Make) -> SimulatedNode:
    """Two processes on GPU 0, none on GPU 1."""
    made = opened("hgx-h100-4")
    made.machine.hold_gpu(0, 4712, "/usr/bin/train", mps=True)
    made.machine.hold_gpu(0, 4711, "python3")
    return made


def on(node: SimulatedNode, index: int) -> Mapping[int, str]:
    return read_processes(node.machine.gpu(index).uuid)


def test_processes_are_reported_their_gpu_until_they_end(node: SimulatedNode) -> None:
    assert (on(node, 0), on(node, 1)) == (TWO, {})
    node.machine.release_gpu(0, 4711)
    assert on(node, 0) == {4712: TWO[4712]}


@pytest.mark.parametrize("name", ["nvidia-cuda-mps-server", "/usr/bin/nvidia-cuda-mps-server -force-tegra"])
@pytest.mark.parametrize("mps", [False, True])
def test_server_of_mps_is_not_a_user(node: SimulatedNode, name: str, mps: bool) -> None:
    node.machine.hold_gpu(1, 99, name, mps=mps)
    node.machine.hold_gpu(1, 98, "python3 nvidia-cuda-mps-server")
    assert on(node, 1) == {98: 'process 98 ("python3 nvidia-cuda-mps-server")'}


def test_a_name_that_a_process_chose_is_quoted(node: SimulatedNode) -> None:
    node.machine.hold_gpu(1, 97, "x); process 1 (y\x1b[2J")
    assert on(node, 1) == {97: 'process 97 ("x); process 1 (y\\u001b[2J")'}


def test_mig_device_has_its_own_processes(node: SimulatedNode) -> None:
    hardware, gpu = MigHardware(nullcontext), node.machine.gpu(2)
    where = (gpu.uuid, gpu.bus_id)
    hardware.set_mode(*where, on=True)
    made = [hardware.create(*where, 19, Placement(start, 1)) for start in (0, 1)]
    (compute, used), (_, idle) = [hardware.create_compute(*where, instance) for instance in made]
    node.machine.hold_gpu(2, 4713, "python3", gpu_instance=made[0], compute_instance=compute)
    assert (read_processes(used), read_processes(idle)) == ({4713: "process 4713 (python3)"}, {})
    node.machine.release_gpu(2)
    hardware.destroy_compute(*where, made[0], compute)
    with pytest.raises(DeviceLostError, match=used):
        read_processes(used)


@pytest.mark.parametrize(
    ("function", "code", "shown"),
    [
        ("nvmlDeviceGetComputeRunningProcesses_v3", "FUNCTION_NOT_FOUND", {4711, 4712}),
        ("nvmlDeviceGetComputeRunningProcesses*", "FUNCTION_NOT_FOUND", {4712}),
        ("nvmlDeviceGetComputeRunningProcesses*", "NOT_SUPPORTED", {4712}),
        ("nvmlDeviceGetMPSComputeRunningProcesses*", "NO_PERMISSION", {4711}),
        ("nvmlDeviceGetGraphicsRunningProcesses*", "INVALID_ARGUMENT", {4711, 4712}),
        ("nvmlSystemGetProcessName", "NOT_FOUND", {4711, 4712}),
    ],
)
def test_list_that_is_not_reported_has_none(
    node: SimulatedNode, function: str, code: str, shown: set[int]
) -> None:
    node.machine.set_fault(function, code=code)
    assert set(on(node, 0)) == shown


def test_process_without_a_name_is_reported_by_its_number(node: SimulatedNode) -> None:
    node.machine.set_fault("nvmlSystemGetProcessName", code="NO_PERMISSION")
    assert on(node, 0) == {4711: "process 4711", 4712: "process 4712"}


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("UNKNOWN", NvmlTransientError),
        ("TIMEOUT", NvmlTransientError),
        ("GPU_IS_LOST", DeviceLostError),
        ("UNINITIALIZED", NvmlUnavailableError),
        ("DRIVER_NOT_LOADED", NvmlUnavailableError),
    ],
)
@pytest.mark.parametrize("kind", ["Compute", "MPSCompute", "Graphics"])
def test_failure_is_not_an_empty_list(
    node: SimulatedNode, kind: str, code: str, error: type[RetryableError]
) -> None:
    node.machine.set_fault(f"nvmlDeviceGet{kind}RunningProcesses*", code=code)
    with pytest.raises(RetryableError) as caught:
        on(node, 0)
    assert type(caught.value) in (error, *error.__subclasses__())


def test_lost_gpu_is_lost_and_a_closed_session_says_so(node: SimulatedNode) -> None:
    uuid = node.machine.gpu(0).uuid
    reader = NvmlReader(lambda: SimulatedLibrary(node.machine))
    with pytest.raises(NvmlUnavailableError):
        reader.processes(uuid)
    reader.reopen()
    assert reader.processes(uuid) == TWO
    node.machine.lose_gpu(0)
    with pytest.raises(DeviceLostError):
        reader.processes(uuid)
    reader.session.close()
    with pytest.raises(NvmlUnavailableError):
        reader.processes(uuid)


@pytest.fixture
def l40s(opened: Make) -> SimulatedNode:
    return opened("l40s-8")


@pytest.fixture
def modes(l40s: SimulatedNode) -> PersistenceModes:
    return PersistenceModes(lambda: l40s.session.operation(lambda: 0.0))


def test_mode_is_read_set_and_gone_with_the_driver_of_the_gpu(
    l40s: SimulatedNode, modes: PersistenceModes
) -> None:
    first, second = (l40s.machine.gpu(number) for number in (1, 2))
    assert modes.get(first.uuid, first.bus_id) is True
    modes.set(first.uuid, first.bus_id, on=False)
    modes.set(first.uuid, first.bus_id, on=False)
    assert (modes.get(first.uuid, None), modes.get(second.uuid, second.bus_id)) == (False, True)
    l40s.machine.give_to(1, "vfio-pci")
    l40s.session.reopen()
    with pytest.raises(DeviceLostError, match="NVML shows no such GPU"):
        modes.get(first.uuid, first.bus_id)
    l40s.machine.give_to(1, "nvidia")
    l40s.session.reopen()
    assert modes.get(first.uuid, first.bus_id) is False, "nobody switched it on again"
    l40s.session.close()
    with pytest.raises(NvmlUnavailableError):
        modes.get(first.uuid, first.bus_id)


def test_mode_that_does_not_change_although_nvml_reports_success_is_an_error(
    l40s: SimulatedNode, modes: PersistenceModes, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = l40s.machine.gpu(0)
    monkeypatch.setattr(pynvml, "nvmlDeviceSetPersistenceMode", lambda _handle, _mode: None)
    with pytest.raises(RetryableError, match="off: NVML reported success, but the mode did not change"):
        modes.set(gpu.uuid, gpu.bus_id, on=False)
    modes.set(gpu.uuid, gpu.bus_id, on=True)


def test_gpu_without_the_mode_has_none(l40s: SimulatedNode, modes: PersistenceModes) -> None:
    gpu = l40s.machine.gpu(0)
    for name in ("nvmlDeviceGetPersistenceMode", "nvmlDeviceSetPersistenceMode"):
        l40s.machine.set_fault(name, code="not-supported")
    assert modes.get(gpu.uuid, gpu.bus_id) is None
    with pytest.raises(NotSupportedError, match=r"switch persistence mode of GPU .* off"):
        modes.set(gpu.uuid, gpu.bus_id, on=False)
