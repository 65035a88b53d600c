"""What Prepare writes is what container runtimes take: every kind of claim on every simulated machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.api.config import GROUP_VERSION
from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.rules.metadata import cdi_spec, requests_of
from dra_driver.host.imex import ImexChannelNodes
from dra_driver.inventory.discovery import discover_once
from dra_driver.model.claim import AllocatedClaim, DeviceConfig
from dra_driver.model.host import HOST_DEVICES, NO_EXTRA_DEVICES, ExtraDevices, in_order
from dra_driver.model.inventory import DynamicMigDevice, OfferedDevice, StaticMigDevice, WholeGpu
from dra_driver.model.mig import MigProfile, OwnedInstance
from dra_driver.model.plan import Plan
from dra_driver.model.sharing import SharingRule, kind_of, share_all
from dra_driver.nvml.mig_changes import MigHardware
from dra_driver.simulator import SimulatedDeviceNodes, machine_names
from tests.cdi.cdi_samples import steps_over
from tests.cdi.cdi_schema import faults
from tests.fakes.machines import SimulatedNode
from tests.fakes.samples import DRIVER, claim, plan, result

UID = "0b5ab50d-d59a-42a6-af16-cfd4628c0f7a"
"""Names that begin with a digit need a newer version of CDI."""
POLICY = share_all(SharingRule("memory", enforce="mps"))
SHARE = "9f6a2c3e-0d5f-4a6b-8b7a-7f3c1ad296f4"
MPS = {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50}}
TIME_SLICES = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}


def parameters(device: OfferedDevice, **more: Any) -> DeviceConfig:
    kind = {"gpu": "GpuConfig", "mig": "MigDeviceConfig"}[kind_of(device)]
    return DeviceConfig("FromClass", (), DRIVER, {"apiVersion": GROUP_VERSION, "kind": kind, **more})


class Bench:
    """A machine with every kind of device; MIG devices on demand are created when requested."""

    def __init__(self, directory: Path, machine: str, *, on_demand: bool) -> None:
        self.node = SimulatedNode(machine, directory / "machine", lambda gpu: on_demand)
        self.inventory = discover_once(
            self.node.nvml, self.node.host, None, imex=ImexChannelNodes(self.node.paths.proc)
        )
        self._hardware = MigHardware(nullcontext)
        self._steps = steps_over(
            directory,
            CdiDirectory(directory / "cdi", DRIVER),
            self.node.paths,
            SimulatedDeviceNodes(self.node.machine.host_root),
            driver_version=lambda: self.inventory.versions.driver,
            ledger=self,
        )

    def plan(self, wanted: AllocatedClaim, given: ExtraDevices = NO_EXTRA_DEVICES) -> Plan:
        return plan(wanted, found=self.inventory, sharing=POLICY, metadata=("v1beta1",), extra_devices=given)

    def faults(self, plan: Plan) -> list[str]:
        """Of the claim's spec, and of the spec of each request's metadata."""
        requests = requests_of(plan.claim)
        described = [cdi_spec(DRIVER, plan.claim, request, "/host/metadata.json") for request in requests]
        return [fault for spec in (self._steps.spec(plan), *described) for fault in faults(spec)]

    def created_instance(self, device: str) -> OwnedInstance | None:
        offered = self.inventory.by_name[device]
        if not isinstance(offered, DynamicMigDevice):
            return None
        gpu = (offered.gpu.uuid, offered.gpu.pci_bus_id)
        profile, placement = offered.profile, offered.placement
        self._hardware.set_mode(*gpu, True)
        for old in self._hardware.instances(*gpu):
            for compute, _ in self._hardware.compute_instances(*gpu, old.gpu_instance_id):
                self._hardware.destroy_compute(*gpu, old.gpu_instance_id, compute)
            self._hardware.destroy(*gpu, old.gpu_instance_id)
        instance = self._hardware.create(*gpu, profile.profile_id, placement)
        compute, uuid = self._hardware.create_compute(*gpu, instance)
        made = OwnedInstance(device, *gpu, profile.profile_id, profile.name, placement, "boot-1", "created")
        minor = self._hardware.minor(*gpu)
        return replace(
            made, gpu_instance_id=instance, compute_instance_id=compute, uuid=uuid, gpu_minor=minor
        )


def each_alone(device: OfferedDevice) -> Iterator[AllocatedClaim]:
    """Every way to use one device."""
    yield claim(device.name)
    yield claim(device.name, configs=(parameters(device, sharing=MPS),))
    if isinstance(device, WholeGpu):
        yield claim(device.name, configs=(parameters(device, sharing=TIME_SLICES),))
    yield claim(result(device.name, admin_access=True), configs=(parameters(device, management=True),))
    yield claim(result(device.name, share_id=SHARE, consumed_capacity={"memory": "1Gi"}))


def together(devices: list[OfferedDevice]) -> Iterator[AllocatedClaim]:
    names = [device.name for device in devices]
    yield claim(*names)
    yield claim(*(result(name, f"request-{number}") for number, name in enumerate(names)))
    yield claim(*(result(name, admin_access=True) for name in names))
    if all(isinstance(device, WholeGpu) for device in devices):
        yield claim(*names, configs=(parameters(devices[0], sharing=MPS),))


def one_of_each(devices: Iterable[OfferedDevice]) -> list[OfferedDevice]:
    """A whole GPU, and a MIG device of each profile."""
    return list({getattr(_profile(device), "name", ""): device for device in devices}.values())


def _profile(device: OfferedDevice) -> MigProfile | None:
    match device:
        case StaticMigDevice(mig=mig):
            return mig.profile
        case DynamicMigDevice(profile=profile):
            return profile
    return None


@pytest.mark.parametrize("machine", machine_names())
def test_runtimes_take_the_specs_of_every_kind_of_claim(memory_path: Path, machine: str) -> None:
    bench = Bench(memory_path, machine, on_demand=False)
    try:
        devices = list(bench.inventory.by_name.values())
        alone = [one for device in one_of_each(devices) for one in each_alone(device)]
        given = [ExtraDevices(host_devices=in_order(HOST_DEVICES))]
        if any(gpu.fabric is not None for gpu in bench.inventory.gpus):
            given += [ExtraDevices(imex=0), ExtraDevices(imex="all")]
        wanted = [(one, NO_EXTRA_DEVICES) for one in (*together(devices), *alone)]
        for one, extra_devices in (*wanted, *((alone[0], extra) for extra in given)):
            plan = bench.plan(replace(one, ref=replace(one.ref, uid=UID)), extra_devices)
            assert bench.faults(plan) == []
    finally:
        bench.node.close()


@pytest.mark.parametrize("machine", ["dgx-h100", "rtx-pro-6000-8"])
def test_runtimes_take_the_specs_of_mig_devices_on_demand(memory_path: Path, machine: str) -> None:
    bench = Bench(memory_path, machine, on_demand=True)
    try:
        possible = [one for one in bench.inventory.by_name.values() if isinstance(one, DynamicMigDevice)]
        first = one_of_each(one for one in possible if one.gpu.uuid == possible[0].gpu.uuid)
        assert len(first) >= 3
        for one in (one for device in first for one in each_alone(device)):
            assert bench.faults(bench.plan(one)) == []
    finally:
        bench.node.close()
