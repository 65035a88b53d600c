"""Reading whole machines through the real binding, healthy and with one thing broken at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pynvml
import pytest

from dra_driver.errors import NvmlUnavailableError
from dra_driver.inventory.rules.assembly import with_nvlink_domains
from dra_driver.model.gpu import READINGS, Fabric, Gpu, UnreadyFabric
from dra_driver.model.mig import Placement
from dra_driver.nvml.calls import GpuWalk
from dra_driver.nvml.health_polls import read_health
from dra_driver.nvml.readings import read_gpu
from dra_driver.nvml.scan import PeerMemory, ScanMemory, read_nvml_fingerprint, read_reachable_pairs
from dra_driver.simulator import SimulatedLibrary
from tests.fakes.machines import SimulatedNode, read_inventory

Make = Callable[[str], SimulatedNode]

PROFILE_1G, PROFILE_3G, COMPUTE_PROFILE_1C = 19, 9, 0
CLUSTER = "7f3c1ad2-96f4-4e0b-8b7a-0d5f6a2c9e11"
NEWER_FABRIC_CALL = "nvmlDeviceGetGpuFabricInfoV"


# --- one attribute fails ---------------------------------------------------------------------------

ABSENT = ("not-supported", "function-not-found")
CALLS = {reading.call: {field} for field, reading in READINGS.items() if reading.call} | {
    "nvmlDeviceGetPciInfo*": {"pci_bus_id"},
    "nvmlDeviceGetCudaComputeCapability": {"cuda_compute_capability", "multiprocessors"},
    "nvmlDeviceGetNumGpuCores": {"multiprocessors"},
    "nvmlDeviceGetNvLinkState": {"nvlink_links"},
    "nvmlDeviceGetMigMode": {"mig_capable"},
    "nvmlDeviceGetModuleId": {"module_id"},
    "nvmlDeviceGetPlatformInfo": {"chassis"},
}
CALLS.pop("nvmlDeviceGetPciInfo")  # the binding calls a newer version
OF_HOST = {"uuid", "pcie_root", "numa_node", "partitioning"}


def test_every_field_of_a_gpu_says_how_nvml_reports_it_unless_the_host_does() -> None:
    assert {entry.name for entry in fields(Gpu)} == READINGS.keys() | OF_HOST
    code = inspect.getsource(read_gpu)
    assert {name for name, one in READINGS.items() if not one.call and f" {name}=" not in code} == {
        "mig_devices"
    }


def differing(one: Gpu, other: Gpu) -> set[str]:
    return {entry.name for entry in fields(Gpu) if getattr(one, entry.name) != getattr(other, entry.name)}


@pytest.mark.parametrize(
    ("function", "lost", "code"),
    [
        (function, lost, code)
        for function, lost in CALLS.items()
        for code in (*ABSENT, "unknown", "timeout", "no-permission")
        # Where it fails, the device may not be a GPU.
        if function != "nvmlDeviceGetArchitecture" or code in ABSENT
    ],
)
def test_failing_attribute_costs_nothing_else(
    dgx: SimulatedNode, function: str, lost: set[str], code: str
) -> None:
    dgx.machine.set_gpu(0, module=4, chassis={"serial": "1821025190042", "slot": 26, "tray": 14})
    healthy = dgx.read()
    uuid = healthy.gpus[0].uuid
    dgx.machine.set_fault(function, code=code, gpu=uuid)
    found = dgx.read()
    gpus = {gpu.uuid: gpu for gpu in found.gpus}
    assert sorted(gpus) == sorted(gpu.uuid for gpu in healthy.gpus)
    assert differing(healthy.gpus[0], gpus[uuid]) == lost
    assert {getattr(gpus[uuid], name) for name in lost} <= {None, False}
    assert [gpu for gpu in found.gpus if gpu.uuid != uuid] == list(healthy.gpus[1:])
    if code in ABSENT:
        # Without minor number no container can get the GPU.
        texts = ["it is not published: NVML reports no minor number"] if "minor" in lost else []
        assert [fault.text.partition(",")[0] for fault in found.faults] == texts
    else:
        assert {fault.subject for fault in found.faults} == {f"GPU {uuid}"}
        assert len(found.faults) == 1


def test_some_links_that_fail_do_not_look_like_a_gpu_with_fewer(dgx: SimulatedNode) -> None:
    dgx.session.reopen()
    dgx.machine.set_fault("nvmlDeviceGetNvLinkState", code="timeout", count=1)
    _, gpu, log = read_gpu(0)
    assert (gpu.nvlink_links, [fault.text.rpartition(":")[0] for fault in log.faults]) == (
        None,
        ["NVLink: cannot read NVLink 0"],
    )


def test_links_that_are_down_are_not_counted(machine: Make) -> None:
    node = machine("dgx-h100")
    node.machine.set_gpu(0, links_down=[3, 4])
    assert [gpu.nvlink_links for gpu in node.read().gpus] == [16] + [18] * 7


@pytest.mark.parametrize("lacking", [[0], [3, 4], [17]])
def test_a_link_that_the_board_lacks_hides_no_link_behind_it(machine: Make, lacking: list[int]) -> None:
    node = machine("dgx-h100")
    node.machine.set_gpu(0, links_unsupported=lacking)
    found = node.read()
    assert [gpu.nvlink_links for gpu in found.gpus] == [18 - len(lacking)] + [18] * 7
    assert found.faults == ()


@pytest.mark.parametrize("function", ["nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion"])
def test_version_that_cannot_be_read_hides_no_gpu(dgx: SimulatedNode, function: str) -> None:
    dgx.machine.set_fault(function, code="unknown")
    found = dgx.read()
    assert len(found.gpus) == 8
    assert [fault.subject for fault in found.faults] == ["NVML"]
    assert None in (found.versions.driver, found.versions.cuda)


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex*", "nvmlDeviceGetUUID"])
@pytest.mark.parametrize("code", ["gpu-is-lost", "unknown", "timeout", "no-permission"])
def test_gpu_that_does_not_answer_is_a_fault_and_hides_no_other(
    dgx: SimulatedNode, call: str, code: str
) -> None:
    healthy = dgx.read()
    dgx.machine.set_fault(call, code=code, gpu=healthy.gpus[2].uuid)
    found = dgx.read()
    assert [gpu.uuid for gpu in found.gpus] == [gpu.uuid for gpu in healthy.gpus if gpu != healthy.gpus[2]]
    (fault,) = found.faults
    assert fault.subject == "GPU with NVML index 2"


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetMigMode", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetName"]
)
def test_gpu_that_is_lost_while_it_is_read_hides_no_other(dgx: SimulatedNode, function: str) -> None:
    healthy = dgx.read()
    dgx.machine.set_fault(function, code="gpu-is-lost", gpu=healthy.gpus[7].uuid)
    found = dgx.read()
    assert [gpu.uuid for gpu in found.gpus] == [gpu.uuid for gpu in healthy.gpus[:7]]
    assert len(found.nvlink_domains) == 7


def test_gpu_that_is_lost_before_its_links_are_read_hides_no_other(opened: Make) -> None:
    node = opened("dgx-h100")
    gpus = {index: read_gpu(index)[:2] for index in range(8)}
    node.machine.lose_gpu(0)
    pairs, _ = read_reachable_pairs(gpus, PeerMemory(), (), GpuWalk())
    assert len(pairs) == 7 * 6 / 2
    assert not any(gpus[0][1].uuid in pair for pair in pairs)


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetCount*", "nvmlDeviceGetHandleByIndex*", "nvmlDeviceGetName", "nvmlDeviceGetMigMode",
     "nvmlDeviceGetNvLinkState", "nvmlSystemGetDriverVersion", "nvmlGpuInstanceGetInfo",
     "nvmlDeviceGetGpuInstanceProfileInfo*"],
)  # fmt: skip
def test_driver_that_goes_while_it_is_read_is_not_a_half_inventory(machine: Make, function: str) -> None:
    node = machine("h100-mig-static")
    node.machine.set_fault(function, code="driver-not-loaded")
    with pytest.raises(NvmlUnavailableError, match="the NVIDIA kernel driver is not loaded"):
        node.read()


# --- fabric ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "fabric", "unready"),
    [
        ({}, Fabric(CLUSTER, (32766,)), None),
        ({"state": 2}, None, UnreadyFabric("pending", "the registration is in progress")),
        ({"state": 1}, None, UnreadyFabric("pending", "the registration has not started")),
        ({"state": 0}, None, None),
        ({"state": 9}, None, UnreadyFabric("unknown", "NVML reports state 9")),
        ({"status": 999}, None, UnreadyFabric("broken", "the registration failed with NVML error 999")),
        ({"cluster": ""}, None, None),
        ({"health_mask": 1, "clique": 7}, Fabric(CLUSTER, (7,)), None),
        ({"clique": 0}, Fabric(CLUSTER, (0,)), None),
    ],
)
def test_fabric_counts_only_when_its_registration_is_complete(
    machine: Make, facts: dict[str, Any], fabric: Fabric | None, unready: UnreadyFabric | None
) -> None:
    node = machine("gb200-nvl72-tray")
    node.machine.set_fabric(**facts)
    found = node.read()
    assert [(gpu.fabric, gpu.unready_fabric) for gpu in found.gpus] == [(fabric, unready)] * 4
    assert read_health(found.gpus[0].uuid).fabric_registration == (fabric or unready), "a poll reads the same"
    without = {f"nvlink-{min(gpu.uuid for gpu in found.gpus)[4:12]}"} if "state" not in facts else set()
    assert set(found.nvlink_domains.values()) == (set(fabric.domains) if fabric else without)


UNICAST_POINTER, MULTICAST_POINTER, UNICAST_ENDPOINT, MULTICAST_ENDPOINT = range(4)


def test_fabric_with_several_cliques_keeps_those_for_unicast(machine: Make) -> None:
    """GPUs 0 and 1 have clique 5 in common; 2 and 3 have nothing but a clique for multicast."""
    node = machine("gb200-nvl72-tray")
    everywhere = [[MULTICAST_POINTER, 1], [MULTICAST_ENDPOINT, 1], [UNICAST_ENDPOINT, 9]]
    for index, pointers in enumerate(([5, 3], [7, 5], [8], [2])):
        cliques = [*everywhere, *([UNICAST_POINTER, clique] for clique in pointers)]
        node.machine.set_fabric(index, cliques=cliques)
    node.machine.load_driver("615.36.01")
    node.session.close()
    found = node.read()
    cliques = [(3, 5), (5, 7), (8,), (2,)]
    assert [gpu.fabric for gpu in found.gpus] == [Fabric(CLUSTER, pointers, (9,)) for pointers in cliques]
    assert [gpu.fabric and gpu.fabric.clique_id for gpu in found.gpus] == [3, 5, 8, 2], (
        "as older forms name it"
    )
    domains = with_nvlink_domains(found).nvlink_domains
    assert [domains[gpu.uuid] for gpu in found.gpus] == [f"{CLUSTER}.{clique}" for clique in (5, 5, 8, 2)]
    polled = read_health(found.gpus[0].uuid)
    assert (polled.fabric, polled.fabric_registration) == ("ready", found.gpus[0].fabric)


def test_branch_without_the_newest_form_names_the_first_clique_alone(machine: Make) -> None:
    node = machine("gb200-nvl72-tray")
    node.machine.set_fabric(cliques=[[MULTICAST_POINTER, 1], [UNICAST_POINTER, 4], [UNICAST_POINTER, 6]])
    assert not hasattr(SimulatedLibrary(node.machine), "nvmlDeviceGetGpuFabricInfo_v4")
    assert {gpu.fabric for gpu in node.read().gpus} == {Fabric(CLUSTER, (4,))}


def test_fabric_that_cannot_be_read_is_unknown_and_a_fault(machine: Make) -> None:
    node = machine("gb200-nvl72-tray")
    node.machine.set_fault(NEWER_FABRIC_CALL, code="unknown", gpu=0)
    found = node.read()
    [fault] = found.faults
    assert found.gpus[0].unready_fabric == UnreadyFabric("unknown", fault.text)
    assert [gpu.fabric is None for gpu in found.gpus] == [True, False, False, False]


# --- MIG ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "older",
    [
        lambda machine: machine.load_driver("570.86.15"),
        lambda machine: machine.set_missing_functions(NEWER_FABRIC_CALL),
        lambda machine: machine.set_fault(NEWER_FABRIC_CALL, code="invalid-argument"),
    ],
    ids=["older driver", "no such function", "newer form refused"],
)
def test_fabric_is_read_in_an_older_form(machine: Make, older: Callable[[Any], object]) -> None:
    node = machine("gb200-nvl72-tray")
    older(node.machine)
    found = node.read()
    assert ({gpu.fabric for gpu in found.gpus}, found.faults) == ({Fabric(CLUSTER, (32766,))}, ())


def test_gpu_instance_without_a_compute_instance_is_not_a_device(machine: Make) -> None:
    node = machine("h100-mig-empty")
    gpu = node.read().gpus[0]
    node.machine.create_mig(0, "3g.40gb", 0)
    with_one = node.read().gpus[0]
    assert [part.profile.name for part in with_one.mig_devices] == ["3g.40gb"]
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlDeviceCreateGpuInstance(handle, PROFILE_1G)
    found = node.read()
    assert found.gpus[0] == with_one
    assert found.faults == ()
    assert gpu.mig_enabled


def test_holes_in_the_numbering_hide_no_device(machine: Make) -> None:
    node = machine("h100-mig-static")
    parts = node.read().gpus[1].mig_devices
    for part in parts[::2]:
        node.machine.destroy_mig(1, part.gpu_instance_id)
    found = node.read()
    assert found.gpus[1].mig_devices == parts[1::2]
    assert found.faults == ()


def test_device_has_the_identity_that_the_administrator_created(machine: Make) -> None:
    node = machine("h100-mig-empty")
    instance, compute, uuid = node.machine.create_mig(0, "2g.20gb", 4)
    (part,) = node.read().gpus[0].mig_devices
    assert (part.uuid, part.gpu_instance_id, part.compute_instance_id) == (uuid, instance, compute)
    assert (part.placement, part.profile.name, part.shares_gpu_instance) == (
        Placement(4, 2),
        "2g.20gb",
        False,
    )
    assert part.parent_uuid == node.machine.gpu(0).uuid


def test_compute_instances_of_one_gpu_instance_are_named_apart(opened: Make) -> None:
    node = opened("h100-mig-empty")
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    instance = pynvml.nvmlDeviceCreateGpuInstance(handle, PROFILE_3G)
    for _ in range(3):
        pynvml.nvmlGpuInstanceCreateComputeInstance(instance, COMPUTE_PROFILE_1C)
    found = node.read()
    parts = found.gpus[0].mig_devices
    assert [part.profile.name for part in parts] == ["1c.3g.40gb"] * 3
    assert sorted(part.compute_instance_id for part in parts) == [0, 1, 2]
    assert all(part.shares_gpu_instance for part in parts)
    assert len({device.name for device in found.devices() if device.uuid.startswith("MIG-")}) == 3


def test_profile_that_cannot_be_read_costs_its_own_devices_only(machine: Make) -> None:
    node = machine("h100-mig-static")
    healthy = node.read()
    node.machine.set_fault("nvmlDeviceGetGpuInstanceProfileInfoV", code="timeout", count=1, gpu=1)
    found = node.read()
    assert found.gpus[0] == healthy.gpus[0]
    left = [part for part in healthy.gpus[1].mig_devices if part.profile.name != "1g.10gb"]
    assert found.gpus[1] == replace(healthy.gpus[1], mig_devices=tuple(left))
    assert len(left) == 3
    assert {fault.subject for fault in found.faults} == {f"GPU {healthy.gpus[1].uuid}"}
    assert len(found.faults) == 3


def test_mig_device_that_cannot_be_read_hides_no_other(machine: Make) -> None:
    node = machine("h100-mig-static")
    healthy = node.read()
    node.machine.set_fault("nvmlGpuInstanceGetInfo", code="unknown", count=1)
    found = node.read()
    assert found.gpus[0].mig_devices == healthy.gpus[0].mig_devices[1:]
    assert found.gpus[1:] == healthy.gpus[1:]
    (fault,) = found.faults
    assert fault.text.startswith(f"cannot read MIG device 0 of GPU {healthy.gpus[0].uuid}")


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetGpuInstanceId",
        "nvmlGpuInstanceGetInfo",
        "nvmlDeviceGetAttributes_v2",
        "nvmlDeviceGetUUID",
    ],
)
@pytest.mark.parametrize("change", ["destroyed", "made anew", "mode off"])
def test_mig_device_that_goes_while_it_is_read_is_a_hole(
    machine: Make, monkeypatch: pytest.MonkeyPatch, function: str, change: str
) -> None:
    node = machine("h100-mig-static")
    healthy = node.read().gpus[0]
    ask = getattr(pynvml.nvmlLib, function)
    requested: list[int] = []
    first = healthy.mig_devices[0]

    def go_first(handle: Any, *rest: Any) -> int:
        is_mig = function == "nvmlGpuInstanceGetInfo" or pynvml.nvmlDeviceIsMigDeviceHandle(handle)
        if is_mig and not requested:
            requested.append(1)
            for instance in list(node.machine.gpu(0).instances):
                if change == "mode off" or instance.id == first.gpu_instance_id:
                    node.machine.destroy_mig(0, instance.id)
            if change == "mode off":
                node.machine.set_mig_mode(0, False)
            if change == "made anew":
                node.machine.create_mig(0, first.profile.name, first.placement.start)
        return int(ask(handle, *rest))

    monkeypatch.setattr(pynvml.nvmlLib, function, go_first)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    found = read_inventory()
    assert requested
    assert found.faults == ()
    read = found.gpus[0].mig_devices
    match change:
        case "destroyed":
            assert read == healthy.mig_devices[1:]
        case "mode off":
            assert read == ()
        case _:
            assert read[1:] == healthy.mig_devices[1:]
            assert (read[0].placement, read[0].uuid != first.uuid) == (first.placement, True)


# --- GPUs come and go --------------------------------------------------------------------------------


def test_names_stay_when_another_gpu_is_pulled_out(machine: Make) -> None:
    node = machine("dgx-h100")
    before = [device.name for device in node.read().devices()]
    node.machine.remove_gpu(0)
    found = node.read()
    assert [device.name for device in found.devices()] == before[1:]
    assert [gpu.index for gpu in found.gpus] == list(range(7))
    assert [gpu.minor for gpu in found.gpus] == list(range(1, 8))


# --- the fingerprint ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "happens", [lambda machine: machine.lose_gpu(3), lambda machine: machine.set_mig_mode(3, True)]
)
def test_fingerprint_differs_when_a_gpu_is_lost_or_changes_its_mode(
    machine: Make, happens: Callable[[Any], object]
) -> None:
    node = machine("dgx-h100")
    node.read()
    memory = ScanMemory()
    before = read_nvml_fingerprint(memory)
    assert read_nvml_fingerprint(memory) == before
    happens(node.machine)
    assert read_nvml_fingerprint(memory) != before


def test_fingerprint_fails_when_the_driver_is_gone(machine: Make) -> None:
    node = machine("dgx-h100")
    node.read()
    node.machine.unload_driver()
    with pytest.raises(NvmlUnavailableError):
        read_nvml_fingerprint(ScanMemory())
