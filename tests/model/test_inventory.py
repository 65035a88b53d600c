from dataclasses import replace

from dra_driver.model.inventory import StaticMigDevice, WholeGpu
from dra_driver.model.record import ClaimRecord
from tests.fakes.samples import (
    GPU_0,
    GPU_1,
    MIG_1G,
    MIG_3G,
    MIXED,
    ONE_G,
    THREE_G,
    claim,
    h100,
    hold,
    inventory,
    mig,
    partitioned,
    result,
    uuid,
)


def test_devices_come_in_publishing_order_when_gpus_are_mixed() -> None:
    gpus = MIXED.gpus
    assert list(MIXED.devices()) == [
        WholeGpu(GPU_0, gpus[0]),
        WholeGpu(GPU_1, gpus[1]),
        StaticMigDevice(MIG_1G, gpus[2], gpus[2].mig_devices[0]),
        StaticMigDevice(MIG_3G, gpus[2], gpus[2].mig_devices[1]),
    ]


def test_gpu_is_not_offered_whole_when_mig_is_on_and_nothing_is_created() -> None:
    assert [device.name for device in inventory(partitioned(0), h100(1)).devices()] == [GPU_1]


def test_mig_devices_come_by_placement_when_nvml_has_another_order() -> None:
    parts = (mig(0, THREE_G, 4, 4, 1), mig(0, ONE_G, 2, 1, 8), mig(0, ONE_G, 0, 1, 9))
    names = [device.name for device in inventory(partitioned(0, *parts)).devices()]
    assert names == [f"{GPU_0}-mig-1g10gb-19-0", f"{GPU_0}-mig-1g10gb-19-2", f"{GPU_0}-mig-3g40gb-9-4"]


def test_compute_instances_are_devices_of_their_own_when_they_share_a_gpu_instance() -> None:
    shared = replace(THREE_G, name="1c.3g.40gb", multiprocessors=20)
    parts = [
        mig(0, shared, 0, 4, 1, compute_instance_id=number, shares_gpu_instance=True, uuid=f"MIG-{number}")
        for number in (2, 0, 1)
    ]
    names = [device.name for device in inventory(partitioned(0, *parts)).devices()]
    assert names == [f"{GPU_0}-mig-1c3g40gb-9-0-{number}" for number in (0, 1, 2)]


def test_device_is_found_by_its_name() -> None:
    found = MIXED.by_name[MIG_3G]
    assert isinstance(found, StaticMigDevice)
    assert (found.uuid, found.gpu.uuid) == (found.mig.uuid, uuid(2))
    assert list(MIXED.by_name) == [GPU_0, GPU_1, MIG_1G, MIG_3G]


def test_record_names_the_physical_gpus_once_when_several_parts_are_held() -> None:
    held = (hold(MIG_1G), hold(MIG_3G), hold(GPU_0))
    kept = ClaimRecord(claim(GPU_0), "prepared", "boot", held, ())
    assert kept.gpu_uuids == {uuid(0), uuid(2)}
    assert kept.ref == kept.claim.ref


def test_base_request_is_the_part_before_the_slash() -> None:
    assert result(GPU_0, "gpu/big").base_request == "gpu"
    assert result(GPU_0, "gpu").base_request == "gpu"
