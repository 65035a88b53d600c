"""Claims for virtual machines: devices, steps, and who else holds the card."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from dra_driver.claims.rules.holders import DeviceHeldError
from dra_driver.claims.rules.plan import answer
from dra_driver.errors import ClaimRefusedError, DeviceLostError, InvalidConfigError, RetryableError
from dra_driver.inventory.rules.gpu_names import held_gpu_names
from dra_driver.model.claim import AllocatedClaim, DeviceConfig, DeviceResult, HeldDevice
from dra_driver.model.gpu import uuid_of_bus_id
from dra_driver.model.host import ExtraDevices
from dra_driver.model.inventory import Inventory
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import BindVfio, LeaveMigMode, WriteCdiSpec, WriteDeviceMetadata
from tests.fakes import samples
from tests.fakes.samples import (
    DRIVER,
    GPU_0,
    GPU_1,
    NODE,
    VFIO_0,
    VFIO_1,
    bound,
    bound_by_hand,
    card,
    claim,
    h100,
    inventory,
    record,
    result,
    uuid,
)
from tests.slices.test_passthrough import on_demand

FREE = inventory(h100(0), h100(1), cards=(card(0), card(1)))
BIND = BindVfio(VFIO_0, uuid(0), card(0).bus_id, "vfio-pci")
METADATA = WriteDeviceMetadata(("v1beta1", "v1alpha1"))
HELD = HeldDevice(VFIO_0, "vfio", uuid_of_bus_id(card(0).bus_id), uuid(0))
WHOLE = HeldDevice(GPU_0, "gpu", uuid(0), uuid(0))


plan = partial(samples.plan, found=FREE)


def config(
    *requests: str, source: str = "FromClaim", kind: str = "VfioDeviceConfig", **iommu: Any
) -> DeviceConfig:
    fields = {"iommu": iommu} if iommu else {}
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, **fields}
    return DeviceConfig(source, requests, DRIVER, parameters)


def test_card_of_the_nvidia_driver_is_bound_and_described_in_every_version() -> None:
    made = plan(claim(VFIO_0))
    assert made.steps == (BIND, METADATA, WriteCdiSpec())
    assert made.held_devices() == (HELD,)
    assert made.used_gpus == {uuid(0)}


def test_containers_of_other_claims_have_metadata_as_the_node_says() -> None:
    assert plan(claim(GPU_0)).steps == (WriteCdiSpec(),)


@pytest.mark.parametrize(
    ("found", "steps"), [(bound(0), (BIND,)), (bound_by_hand(0), ())], ids=["ours", "by hand"]
)
def test_card_that_an_administrator_bound_stays_as_it_is(found: Any, steps: tuple[Any, ...]) -> None:
    made = plan(claim(VFIO_0), found=inventory(cards=(found,)))
    assert made.steps == (*steps, METADATA, WriteCdiSpec())
    assert made.used_gpus == {found.gpu_uuid}


def test_binding_of_a_claims_record_is_kept_though_no_one_knows_who_bound_the_card() -> None:
    wanted = claim(VFIO_0)
    known = ClaimRecord(wanted, "preparing", "boot-1", (HELD,), (BIND, METADATA, WriteCdiSpec()))
    assert plan(wanted, found=inventory(cards=(bound(0, by_us=False),)), known=known).steps == known.steps


def test_gpu_that_mig_devices_are_made_of_leaves_mig_mode_first() -> None:
    made = plan(claim(VFIO_0), found=inventory(on_demand(0), cards=(card(0),)))
    assert made.steps == (LeaveMigMode(uuid(0), card(0).bus_id), BIND, METADATA, WriteCdiSpec())


@pytest.mark.parametrize(
    ("held", "wanted", "free"),
    [
        (HELD, GPU_0, False),
        (WHOLE, VFIO_0, False),
        (HELD, VFIO_0, False),
        (HeldDevice("gpu-00000000-mig-1g10gb-19-0", "mig", "", uuid(0)), VFIO_0, False),
        (HELD, GPU_1, True),
        (HELD, VFIO_1, True),
    ],
)
def test_views_of_a_card_are_the_same_silicon(held: HeldDevice, wanted: str, free: bool) -> None:
    if free:
        assert plan(claim(wanted), record(held)).devices
        return
    with pytest.raises(DeviceHeldError, match=f"device {wanted} is held by claim default/claim-uid-other"):
        plan(claim(wanted), record(held))


def test_whole_gpu_that_a_virtual_machine_has_is_held_and_not_unknown() -> None:
    with pytest.raises(DeviceHeldError, match=f"device {GPU_0} is held by claim .* \\({VFIO_0}, prepared\\)"):
        plan(claim(GPU_0), record(HELD), found=inventory(cards=(bound(0),)))
    # The claim has ended: its remains are undone before this claim's first step.
    assert plan(claim(GPU_0), found=inventory(cards=(bound(0),))).used_gpus == {uuid(0)}


@pytest.mark.parametrize("name", [GPU_0, f"{GPU_0}-mig-1g10gb-19-0"])
def test_device_whose_gpu_comes_back_from_a_virtual_machine_is_retried(name: str) -> None:
    returned_and_not_in_nvml_yet = bound(0, driver="nvidia")
    cards = (returned_and_not_in_nvml_yet,) if name == GPU_0 else (bound(0),)
    with pytest.raises(RetryableError, match=f"the GPU of device {name} was passed to a virtual machine"):
        plan(claim(name), found=inventory(h100(1), cards=cards))
    for found in (inventory(h100(1), cards=(bound_by_hand(0),)), inventory(h100(0), cards=(bound(1),))):
        with pytest.raises(ClaimRefusedError, match="does not exist on this node"):
            plan(claim("gpu-00000000-mig-2g20gb-14-0"), found=found)


def test_monitor_goes_without_a_gpu_that_a_virtual_machine_has() -> None:
    gone, other = result(GPU_0, "look", admin_access=True), result(GPU_1, "look", admin_access=True)
    found = inventory(h100(1), cards=(bound(0),))
    made = plan(claim(gone, other), record(HELD), found=found)
    assert [device.result for device in made.devices] == [other]
    with pytest.raises(DeviceLostError, match=f"the GPU of device {GPU_0} was passed to a virtual machine"):
        plan(claim(gone), record(HELD), found=found)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (
            claim(VFIO_0, result(GPU_1, "cuda")),
            f"requests gpu and cuda: device {VFIO_0} is for a virtual machine, and device {GPU_1} is for containers, "
            "so one claim cannot have both; use two claims",
        ),
        (
            claim(result(GPU_1, "look", admin_access=True), VFIO_0),
            f"requests gpu and look: device {VFIO_0} is for a virtual machine, and device {GPU_1} is for containers, "
            "so one claim cannot have both; use two claims",
        ),
        (
            claim(VFIO_0, result(GPU_0, "cuda")),
            f"requests gpu and cuda: devices {VFIO_0} and {GPU_0} overlap on the same GPU; delete the claim so that "
            "the scheduler allocates it again",
        ),
        (
            claim(result(VFIO_0, "look", admin_access=True)),
            f"request look: device {VFIO_0} is for a virtual machine, which adminAccess cannot monitor; request a "
            "device of type gpu or mig",
        ),
    ],
)
def test_claim_for_a_virtual_machine_has_nothing_else(wanted: AllocatedClaim, text: str) -> None:
    with pytest.raises(ClaimRefusedError) as caught:
        plan(wanted)
    assert str(caught.value) == text


def test_several_cards_for_one_virtual_machine() -> None:
    made = plan(claim(VFIO_1, result(VFIO_0, "second")))
    assert [step.device for step in made.steps if isinstance(step, BindVfio)] == [VFIO_0, VFIO_1]


def test_each_request_has_its_metadata_and_one_cdi_id_a_device() -> None:
    made = plan(claim(VFIO_0, result(VFIO_1, "second")))
    prepared = answer(made.claim, DRIVER, made.steps, made.held_devices())
    assert [device.cdi_ids for device in prepared.devices] == [
        (f"k8s.{DRIVER}/claim=uid-1-{VFIO_0}", f"{DRIVER}/metadata=uid-1_gpu"),
        (f"k8s.{DRIVER}/claim=uid-1-{VFIO_1}", f"{DRIVER}/metadata=uid-1_second"),
    ]


def test_virtual_machine_gets_nothing_next_to_its_gpu() -> None:
    extra = ExtraDevices("all", ("gds", "mofed"))
    (device,) = plan(claim(VFIO_0), extra_devices=extra).devices
    assert (device.host_devices, device.imex) == ((), None)


@pytest.mark.parametrize(
    ("configs", "means"),
    [
        ((), (False, False)),
        ((config(),), (False, False)),
        ((config(backendPolicy="PreferIommuFD", enableAPIDevice=True),), (True, True)),
        ((config("gpu", backendPolicy="PreferIommuFD"), config(enableAPIDevice=True)), (False, True)),
        (
            (config(backendPolicy="PreferIommuFD"), config(source="FromClass", enableAPIDevice=True)),
            (True, False),
        ),
    ],
)
def test_last_parameters_that_apply_count(
    configs: tuple[DeviceConfig, ...], means: tuple[bool, bool]
) -> None:
    (device,) = plan(claim(VFIO_0, configs=configs)).devices
    assert (device.prefers_iommufd, device.has_api_device) == means


def test_each_device_has_the_parameters_of_its_request() -> None:
    configs = (config("gpu", enableAPIDevice=True), config("second", backendPolicy="PreferIommuFD"))
    devices = plan(claim(VFIO_0, result(VFIO_1, "second"), configs=configs)).devices
    assert [(one.prefers_iommufd, one.has_api_device) for one in devices] == [(False, True), (True, False)]


def test_parameters_of_another_type_are_refused() -> None:
    with pytest.raises(
        InvalidConfigError, match=r"GpuConfig does not apply to device .* because the device is a VFIO device"
    ):
        plan(claim(VFIO_0, configs=(config("gpu", kind="GpuConfig"),)))


def test_card_whose_gpu_is_lost_goes_to_no_virtual_machine() -> None:
    lost = Inventory(lost=(h100(0),), cards=(card(0),))
    with pytest.raises(DeviceLostError, match="which no longer answers"):
        plan(claim(VFIO_0), found=lost)


def test_names_that_gpus_keep_are_not_those_of_their_cards() -> None:
    assert held_gpu_names([record(HELD), record(WHOLE)]) == {uuid(0): GPU_0}
    assert held_gpu_names([record(HELD)]) == {}


def test_card_of_another_node_is_refused() -> None:
    with pytest.raises(ClaimRefusedError, match="does not exist on this node"):
        plan(claim(DeviceResult("gpu", DRIVER, NODE, "vfio-0000-99-00-0")))
