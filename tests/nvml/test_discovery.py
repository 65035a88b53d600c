"""Reading whole machines through the real binding, healthy and with one thing broken at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pynvml
import pytest

from dra_driver.errors import DeviceLostError, NvmlUnavailableError
from dra_driver.model.gpu import Fabric, Gpu, UnreadyFabric
from dra_driver.model.inventory import DriverVersions
from dra_driver.model.mig import Placement
from dra_driver.nvml.readings import read_gpu
from dra_driver.nvml.scan import read_nvml_fingerprint
from dra_driver.nvml.topology import PeerMemory, read_reachable_pairs
from dra_driver.simulator import catalogue, machine_names
from tests.fakes.machines import SimulatedNode, read_inventory

Make = Callable[[str], SimulatedNode]

ARCHITECTURES = {5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada Lovelace", 9: "Hopper", 10: "Blackwell"}
# The sizes of the groups
GROUPS = {
    "dgx-1v": [4, 4], "dgx-2": [16], "dgx-a100-40gb": [8], "dgx-a100-80gb": [8], "dgx-b200": [8], "dgx-h100": [8],
    "dgx-h200": [8], "hgx-h100-4": [4], "a100-pcie-pairs": [2, 2], "a30-4": [2, 2], "gb200-nvl72-tray": [4],
    "a100-mig-static": [2], "a30-mig-static": [2], "h100-mig-static": [6], "h100-mig-empty": [7],
    "a10-8": [], "t4-4": [], "l40s-8": [], "rtx-pro-6000-8": [], "gb10": [], "vm-passthrough": [],
}  # fmt: skip
PROFILE_1G, PROFILE_3G, COMPUTE_PROFILE_1C = 19, 9, 0
CLUSTER = "7f3c1ad2-96f4-4e0b-8b7a-0d5f6a2c9e11"
NEWER_FABRIC_CALL = "nvmlDeviceGetGpuFabricInfoV"


def as_written(name: str) -> list[dict[str, Any]]:
    """What the machine's YAML says of each GPU."""
    state = catalogue.build(name)
    rows = []
    for index, gpu in enumerate(state.present):
        model = state.model_of(gpu)
        profiles = {profile.id: profile for profile in model.mig}
        rows.append(
            {
                "uuid": gpu.uuid,
                "index": index,
                "minor": gpu.minor,
                "pci_bus_id": gpu.bus_id,
                "product_name": model.name,
                "architecture": ARCHITECTURES[model.architecture],
                "cuda_compute_capability": tuple(model.compute),
                "memory_bytes": model.memory_bytes,
                "mig_capable": bool(model.mig),
                "mig_enabled": bool(gpu.mig_mode),
                "mig_devices": sorted(
                    (profiles[part.profile_id].name, part.profile_id, part.start, part.size, compute.uuid)
                    for part, compute in gpu.mig_devices
                ),
            }
        )
    return rows


def as_read(gpu: Gpu) -> dict[str, Any]:
    plain = {
        name: getattr(gpu, name)
        for name in (
            "uuid", "index", "minor", "pci_bus_id", "product_name", "architecture", "cuda_compute_capability",
            "memory_bytes", "mig_capable", "mig_enabled",
        )
    }  # fmt: skip
    parts = [
        (part.profile.name, part.profile.profile_id, part.placement.start, part.placement.size, part.uuid)
        for part in gpu.mig_devices
    ]
    return {**plain, "mig_devices": sorted(parts)}


@pytest.mark.parametrize("name", machine_names())
def test_machine_is_read_as_its_file_says(machine: Make, name: str) -> None:
    found = machine(name).read()
    assert [as_read(gpu) for gpu in found.gpus] == as_written(name)
    assert found.faults == ()
    state = catalogue.build(name)
    cuda = (state.cuda_version // 1000, state.cuda_version % 1000 // 10)
    assert found.versions == DriverVersions(state.driver_version, cuda)
    domains = list(found.nvlink_domains.values())
    assert sorted(domains.count(value) for value in set(domains)) == GROUPS[name]


def test_quads_of_a_dgx_1v_are_its_halves(machine: Make) -> None:
    found = machine("dgx-1v").read()
    by_index = [found.nvlink_domains[gpu.uuid] for gpu in found.gpus]
    assert by_index == [by_index[0]] * 4 + [by_index[4]] * 4
    assert by_index[0] != by_index[4]


# --- one attribute fails ---------------------------------------------------------------------------

CALLS = {
    "nvmlDeviceGetIndex": {"index"},
    "nvmlDeviceGetMinorNumber": {"minor"},
    "nvmlDeviceGetPciInfo*": {"pci_bus_id"},
    "nvmlDeviceGetName": {"product_name"},
    "nvmlDeviceGetBrand": {"brand"},
    "nvmlDeviceGetArchitecture": {"architecture"},
    "nvmlDeviceGetCudaComputeCapability": {"cuda_compute_capability", "multiprocessors"},
    "nvmlDeviceGetNumGpuCores": {"multiprocessors"},
    "nvmlDeviceGetMemoryInfo": {"memory_bytes"},
    "nvmlDeviceGetAddressingMode": {"addressing_mode"},
    "nvmlDeviceGetNvLinkState": {"nvlink_links"},
    "nvmlDeviceGetMigMode": {"mig_capable"},
}


def differing(one: Gpu, other: Gpu) -> set[str]:
    return {entry.name for entry in fields(Gpu) if getattr(one, entry.name) != getattr(other, entry.name)}


@pytest.mark.parametrize(
    "code", ["not-supported", "function-not-found", "unknown", "timeout", "no-permission"]
)
@pytest.mark.parametrize(("function", "lost"), CALLS.items(), ids=CALLS)
def test_one_failing_attribute_costs_nothing_else(
    dgx: SimulatedNode, function: str, lost: set[str], code: str
) -> None:
    node = dgx
    healthy = node.read()
    uuid = healthy.gpus[0].uuid
    node.machine.set_fault(function, code=code, gpu=uuid)
    found = node.read()
    gpus = {gpu.uuid: gpu for gpu in found.gpus}
    assert sorted(gpus) == sorted(gpu.uuid for gpu in healthy.gpus)
    assert differing(healthy.gpus[0], gpus[uuid]) == lost
    assert {getattr(gpus[uuid], name) for name in lost} <= {None, False}
    assert [gpu for gpu in found.gpus if gpu.uuid != uuid] == list(healthy.gpus[1:])
    if code in ("not-supported", "function-not-found"):
        assert found.faults == ()
    else:
        assert {fault.subject for fault in found.faults} == {f"GPU {uuid}"}
        assert len(found.faults) == 1


def test_some_links_that_fail_do_not_look_like_a_gpu_with_fewer(dgx: SimulatedNode) -> None:
    node = dgx
    node.session.reopen()
    node.machine.set_fault("nvmlDeviceGetNvLinkState", code="timeout", count=1)
    _, gpu, faults = read_gpu(0)
    assert (gpu.nvlink_links, [fault.text.partition(":")[0] for fault in faults]) == (None, ["NVLink 0"])


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
    node = dgx
    node.machine.set_fault(function, code="unknown")
    found = node.read()
    assert len(found.gpus) == 8
    assert [fault.subject for fault in found.faults] == ["NVML"]
    assert None in (found.versions.driver, found.versions.cuda)


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex*", "nvmlDeviceGetUUID"])
@pytest.mark.parametrize("code", ["gpu-is-lost", "unknown", "timeout", "no-permission"])
def test_gpu_that_does_not_answer_is_a_fault_and_hides_no_other(
    dgx: SimulatedNode, call: str, code: str
) -> None:
    node = dgx
    healthy = node.read()
    node.machine.set_fault(call, code=code, gpu=healthy.gpus[2].uuid)
    found = node.read()
    assert [gpu.uuid for gpu in found.gpus] == [gpu.uuid for gpu in healthy.gpus if gpu != healthy.gpus[2]]
    (fault,) = found.faults
    assert fault.subject == "GPU with NVML index 2"


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetMigMode", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetName"]
)
def test_gpu_that_is_lost_while_it_is_read_hides_no_other(dgx: SimulatedNode, function: str) -> None:
    node = dgx
    healthy = node.read()
    node.machine.set_fault(function, code="gpu-is-lost", gpu=healthy.gpus[7].uuid)
    found = node.read()
    assert [gpu.uuid for gpu in found.gpus] == [gpu.uuid for gpu in healthy.gpus[:7]]
    assert len(found.nvlink_domains) == 7


def test_gpu_that_is_lost_before_its_links_are_read_hides_no_other(machine: Make) -> None:
    node = machine("dgx-h100")
    node.session.reopen()
    gpus = [read_gpu(index)[:2] for index in range(8)]
    node.machine.lose_gpu(0)
    pairs = read_reachable_pairs(gpus, PeerMemory())
    assert len(pairs) == 7 * 6 / 2
    assert not any(gpus[0][1].uuid in pair for pair in pairs)


def test_lost_gpu_raises_its_own_error(machine: Make) -> None:
    node = machine("dgx-h100")
    node.session.reopen()
    node.machine.lose_gpu(0)
    with pytest.raises(DeviceLostError, match="the GPU does not answer"):
        read_gpu(0)


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetCount*", "nvmlDeviceGetHandleByIndex*", "nvmlDeviceGetName", "nvmlDeviceGetMigMode",
     "nvmlDeviceGetNvLinkState", "nvmlSystemGetDriverVersion", "nvmlGpuInstanceGetInfo",
     "nvmlDeviceGetGpuInstanceProfileInfo*"],
)  # fmt: skip
def test_driver_that_goes_while_it_is_read_is_no_half_inventory(machine: Make, function: str) -> None:
    node = machine("h100-mig-static")
    node.machine.set_fault(function, code="driver-not-loaded")
    with pytest.raises(NvmlUnavailableError, match="the NVIDIA kernel driver is not loaded"):
        node.read()


# --- fabric ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "fabric", "unready"),
    [
        ({}, Fabric(CLUSTER, 32766), None),
        ({"state": 2}, None, UnreadyFabric("pending", "the registration is in progress")),
        ({"state": 1}, None, UnreadyFabric("pending", "the registration has not started")),
        ({"state": 0}, None, None),
        ({"state": 9}, None, UnreadyFabric("unknown", "NVML tells state 9")),
        ({"status": 999}, None, UnreadyFabric("broken", "registration ended with NVML error 999")),
        ({"cluster": ""}, None, None),
        ({"clique": 0}, Fabric(CLUSTER, 0), None),
    ],
)
def test_fabric_counts_only_when_its_registration_is_complete(
    machine: Make, facts: dict[str, Any], fabric: Fabric | None, unready: UnreadyFabric | None
) -> None:
    node = machine("gb200-nvl72-tray")
    node.machine.set_fabric(**facts)
    found = node.read()
    assert [(gpu.fabric, gpu.unready_fabric) for gpu in found.gpus] == [(fabric, unready)] * 4
    without = {f"nvlink-{min(gpu.uuid for gpu in found.gpus)[4:12]}"} if "state" not in facts else set()
    assert set(found.nvlink_domains.values()) == ({fabric.domain} if fabric else without)


def test_fabric_that_cannot_be_read_is_unknown_and_a_fault(machine: Make) -> None:
    node = machine("gb200-nvl72-tray")
    node.machine.set_fault(NEWER_FABRIC_CALL, code="unknown", gpu=0)
    found = node.read()
    [fault] = found.faults
    assert found.gpus[0].unready_fabric == UnreadyFabric("unknown", fault.text)
    assert [gpu.fabric is None for gpu in found.gpus] == [True, False, False, False]


def test_cliques_of_one_tray_are_apart(machine: Make) -> None:
    node = machine("gb200-nvl72-tray")
    node.machine.set_fabric(0, clique=7)
    found = node.read()
    assert [found.nvlink_domains[gpu.uuid] for gpu in found.gpus] == [f"{CLUSTER}.7"] + [
        f"{CLUSTER}.32766"
    ] * 3


def test_older_driver_tells_its_fabric_in_the_older_form(machine: Make) -> None:
    node = machine("gb200-nvl72-tray")
    node.machine.load_driver("570.86.15")
    assert {gpu.fabric for gpu in node.read().gpus} == {Fabric(CLUSTER, 32766)}


def test_library_that_knows_only_the_first_form_tells_the_fabric(machine: Make) -> None:
    node = machine("gb200-nvl72-tray")
    node.machine.set_missing_functions(NEWER_FABRIC_CALL)
    found = node.read()
    assert ({gpu.fabric for gpu in found.gpus}, found.faults) == ({Fabric(CLUSTER, 32766)}, ())


def test_library_that_takes_a_newer_form_for_a_wrong_argument_is_asked_in_the_first_one(
    machine: Make,
) -> None:
    node = machine("gb200-nvl72-tray")
    node.machine.set_fault(NEWER_FABRIC_CALL, code="invalid-argument")
    found = node.read()
    assert ({gpu.fabric for gpu in found.gpus}, found.faults) == ({Fabric(CLUSTER, 32766)}, ())


# --- MIG ---------------------------------------------------------------------------------------------


def test_gpu_instance_without_a_compute_instance_is_no_device(machine: Make) -> None:
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


def test_compute_instances_of_one_gpu_instance_are_named_apart(machine: Make) -> None:
    node = machine("h100-mig-empty")
    node.session.reopen()
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


@pytest.mark.parametrize("name", ["h100-mig-static", "a100-mig-static", "a30-mig-static"])
def test_profile_names_are_the_same_when_an_older_driver_does_not_tell_them(machine: Make, name: str) -> None:
    node = machine(name)
    healthy = node.read()
    node.machine.set_fault("nvmlDeviceGetGpuInstanceProfileInfoV", code="function-not-found")
    assert node.read() == healthy


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
    assert fault.text.startswith(f"read MIG device 0 of GPU {healthy.gpus[0].uuid}")


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
    asked: list[int] = []
    first = healthy.mig_devices[0]

    def go_first(handle: Any, *rest: Any) -> int:
        is_mig = function == "nvmlGpuInstanceGetInfo" or pynvml.nvmlDeviceIsMigDeviceHandle(handle)
        if is_mig and not asked:
            asked.append(1)
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
    assert asked
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


def test_mig_mode_takes_a_gpu_out_of_its_domain(machine: Make) -> None:
    node = machine("dgx-h100")
    node.machine.set_mig_mode(3, True)
    found = node.read()
    assert [gpu.mig_enabled for gpu in found.gpus] == [index == 3 for index in range(8)]
    assert found.gpus[3].uuid not in found.nvlink_domains
    assert len(set(found.nvlink_domains.values())) == 1


# --- GPUs come and go --------------------------------------------------------------------------------


def test_names_stay_when_another_gpu_is_pulled_out(machine: Make) -> None:
    node = machine("dgx-h100")
    before = [device.name for device in node.read().devices()]
    node.machine.remove_gpu(0)
    found = node.read()
    assert [device.name for device in found.devices()] == before[1:]
    assert [gpu.index for gpu in found.gpus] == list(range(7))
    assert [gpu.minor for gpu in found.gpus] == list(range(1, 8))


def test_gpu_that_is_plugged_in_is_seen(machine: Make) -> None:
    node = machine("t4-4")
    uuid = node.machine.add_gpu("t4")
    assert [gpu.uuid for gpu in node.read().gpus][-1] == uuid


def test_lost_gpu_comes_back(machine: Make) -> None:
    node = machine("dgx-h100")
    healthy = node.read()
    node.machine.lose_gpu(5)
    assert len(node.read().gpus) == 7
    node.machine.restore_gpu(5)
    assert node.read() == healthy


def test_discovery_follows_the_machine_through_a_driver_reload(machine: Make) -> None:
    node = machine("dgx-h100")
    discovery = node.discovery()
    discovery.scan_now(5)
    healthy = discovery.inventory
    assert healthy is not None
    node.machine.unload_driver()
    discovery.scan_now(5)
    assert (discovery.unavailable() is None, discovery.inventory and discovery.inventory.gpus) == (False, ())
    node.machine.load_driver("590.1.2")
    discovery.scan_now(5)
    assert discovery.inventory == replace(healthy, versions=DriverVersions("590.1.2", (13, 0)))
    assert node.changes == 3


def test_lost_gpu_is_reported_as_a_hidden_function(machine: Make) -> None:
    node = machine("dgx-h100")
    bus_id = node.machine.gpu(0).bus_id
    node.machine.lose_gpu(0)
    found = node.discover()
    assert len(found.gpus) == 7
    assert [fault.subject for fault in found.faults] == [f"PCI function {bus_id}"]


# --- the fingerprint ---------------------------------------------------------------------------------------


def test_fingerprint_stays_while_nothing_happens(machine: Make) -> None:
    node = machine("h100-mig-static")
    node.read()
    assert read_nvml_fingerprint() == read_nvml_fingerprint()


@pytest.mark.parametrize(
    "happens", [lambda machine: machine.lose_gpu(3), lambda machine: machine.set_mig_mode(3, True)]
)
def test_fingerprint_differs_when_a_gpu_is_lost_or_changes_its_mode(
    machine: Make, happens: Callable[[Any], object]
) -> None:
    node = machine("dgx-h100")
    node.read()
    before = read_nvml_fingerprint()
    happens(node.machine)
    assert read_nvml_fingerprint() != before


def test_fingerprint_fails_when_the_driver_is_gone(machine: Make) -> None:
    node = machine("dgx-h100")
    node.read()
    node.machine.unload_driver()
    with pytest.raises(NvmlUnavailableError):
        read_nvml_fingerprint()
