"""Planning of MIG devices on demand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.cdi.rules.spec import SpecDevice
from dra_driver.claims.rules.plan import lost_claim
from dra_driver.errors import ClaimRefusedError, DeviceLostError
from dra_driver.mig.rules.counters import partitioned
from dra_driver.model.claim import DeviceConfig, HeldDevice
from dra_driver.model.inventory import DynamicMigDevice, Inventory, StaticMigDevice
from dra_driver.model.mig import GpuInstance, Partitioning, PlacedProfile, Placement
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import CreateMig, LeaveMigMode, RunMps, WriteCdiSpec
from tests.fakes import samples
from tests.fakes.samples import DRIVER, ONE_G, THREE_G, TWO_G, VERSIONS, claim, h100, mig, result, uuid

TABLE = (
    PlacedProfile(THREE_G, (Placement(0, 4), Placement(4, 4))),
    PlacedProfile(TWO_G, tuple(Placement(start, 2) for start in (0, 2, 4))),
    PlacedProfile(ONE_G, tuple(Placement(start, 1) for start in range(7))),
)
POSSIBLE = tuple((row.profile, placement) for row in TABLE for placement in row.placements)


def node(*, withheld_mig: bool = False, offers_whole: bool = True) -> Inventory:
    """GPU 0 cut on demand, GPU 1 plain."""
    devices = (mig(0, ONE_G, 6, 1, 13),) if withheld_mig else ()
    possible = tuple(
        (profile, placement)
        for profile, placement in POSSIBLE
        if not withheld_mig or not placement.overlaps(Placement(6, 1))
    )
    cut = replace(
        h100(0),
        partitioning=Partitioning(TABLE, possible, offers_whole=offers_whole and not withheld_mig),
        mig_devices=devices,
    )
    return Inventory(VERSIONS, (cut, h100(1)))


NODE_ = node()
WHOLE, PLAIN = "gpu-00000000", "gpu-00000001"
SLOTS = {
    (item.profile.name, item.placement.start): name
    for name, item in NODE_.by_name.items()
    if isinstance(item, DynamicMigDevice)
}
ONE_0, TWO_0, TWO_4, THREE_4 = (
    SLOTS["1g.10gb", 0],
    SLOTS["2g.20gb", 0],
    SLOTS["2g.20gb", 4],
    SLOTS["3g.40gb", 4],
)


plan = partial(samples.plan, found=NODE_)


def recorded(made: Plan) -> ClaimRecord:
    return ClaimRecord(made.claim, "prepared", "boot-1", made.held_devices(), made.steps)


def creation(name: str) -> CreateMig:
    slot = NODE_.by_name[name]
    assert isinstance(slot, DynamicMigDevice)
    profile = slot.profile
    return CreateMig(name, uuid(0), "0000:10:00.0", profile.profile_id, profile.name, slot.placement)


def test_devices_are_made_before_the_spec_is_written() -> None:
    assert plan(claim(THREE_4, ONE_0, PLAIN)).steps == (creation(ONE_0), creation(THREE_4), WriteCdiSpec())


def test_a_partitioned_gpu_leaves_mig_mode_before_it_is_used_whole() -> None:
    assert plan(claim(WHOLE)).steps == (LeaveMigMode(uuid(0), "0000:10:00.0"), WriteCdiSpec())


def test_a_plain_gpu_is_left_as_it_is() -> None:
    assert plan(claim(PLAIN)).steps == (WriteCdiSpec(),)


def test_onlookers_make_and_change_nothing() -> None:
    looking = claim(result(ONE_0, admin_access=True), result(WHOLE, "other", admin_access=True))
    assert plan(looking).steps == (WriteCdiSpec(),)


def test_a_made_device_is_held_by_name_and_placement() -> None:
    (held,) = plan(claim(TWO_4)).held_devices()
    assert held == HeldDevice(TWO_4, "mig", "", uuid(0), placement=Placement(4, 2))


def test_mps_daemon_of_a_made_device_comes_after_it_and_has_no_uuid_yet() -> None:
    parameters = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "MigDeviceConfig",
        "sharing": {"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "1Gi"}},
    }
    made = plan(claim(ONE_0, configs=(DeviceConfig("FromClaim", (), DRIVER, parameters),)))
    kinds = [type(step) for step in made.steps]
    assert kinds == [CreateMig, RunMps, WriteCdiSpec]
    (daemon,) = (step.spec for step in made.steps if isinstance(step, RunMps))
    assert (daemon.device, daemon.uuid, daemon.kind, daemon.gpu_uuid) == (ONE_0, "", "mig", uuid(0))


@given(st.sampled_from(sorted(NODE_.by_name)), st.sampled_from(sorted(NODE_.by_name)))
def test_two_claims_never_share_silicon(first: str, second: str) -> None:
    """Whatever the scheduler says: overlapping devices are refused, others are not."""
    holder = recorded(plan(claim(first, uid="uid-other")))
    one, other = NODE_.by_name[first], NODE_.by_name[second]
    if isinstance(one, DynamicMigDevice) and isinstance(other, DynamicMigDevice):
        clash = bool(set(one.placement.memory_slices) & set(other.placement.memory_slices))
    else:
        clash = one.gpu.uuid == other.gpu.uuid
    if clash:
        with pytest.raises(ClaimRefusedError, match="is held by claim"):
            plan(claim(second), holder)
        with pytest.raises(ClaimRefusedError, match=r"allocated twice|overlap on the same GPU"):
            plan(claim(first, result(second, "other")))
    else:
        assert plan(claim(second), holder).steps
        assert plan(claim(first, result(second, "other"))).steps


def test_claim_with_a_lost_record_keeps_its_silicon() -> None:
    lost = lost_claim("uid-lost", [SpecDevice(TWO_0)], NODE_)
    assert lost is not None
    with pytest.raises(ClaimRefusedError, match="UID uid-lost"):
        plan(claim(ONE_0), lost)


def test_instance_of_someone_else_is_named() -> None:
    inventory = node(withheld_mig=True)
    name = SLOTS["1g.10gb", 6]
    assert name not in inventory.by_name
    with pytest.raises(ClaimRefusedError, match="which gpu-dra-driver did not create"):
        plan(claim(name), found=inventory)


def test_running_claim_keeps_its_static_device_when_the_gpu_becomes_partitioned() -> None:
    static = Inventory(VERSIONS, (h100(0, mig_enabled=True, mig_devices=(mig(0, ONE_G, 6, 1, 13),)), h100(1)))
    name = SLOTS["1g.10gb", 6]
    known = recorded(plan(claim(name), found=static))
    again = plan(claim(name), found=node(withheld_mig=True), known=known)
    assert isinstance(again.devices[0].offered, StaticMigDevice)
    assert (again.held_devices(), again.steps) == (known.devices, known.steps)


def test_running_claim_keeps_its_made_device_when_the_gpu_is_not_partitioned_any_more() -> None:
    known = recorded(plan(claim(TWO_0)))
    static = Inventory(VERSIONS, (h100(0, mig_enabled=True, mig_devices=(mig(0, TWO_G, 0, 2, 3),)), h100(1)))
    again = plan(claim(TWO_0), found=static, known=known)
    assert (again.held_devices(), again.steps) == (known.devices, known.steps)


def test_without_partitions_only_whole_gpus_are_left() -> None:
    assert list(NODE_.without_partitions().by_name) == [WHOLE, PLAIN]
    assert list(node(offers_whole=False).without_partitions().by_name) == [PLAIN]


ORPHAN = GpuInstance(13, ONE_G.profile_id, Placement(0, 1), leaving=True)
FOREIGN = GpuInstance(14, ONE_G.profile_id, Placement(6, 1))


def with_leftovers(*instances: GpuInstance, lost: bool = False) -> Inventory:
    """GPU 0 with instances in the way, each with a MIG device in it."""
    devices = tuple(
        mig(0, ONE_G, item.placement.start, item.placement.size, item.gpu_instance_id) for item in instances
    )
    cut = replace(
        h100(0),
        mig_devices=devices,
        partitioning=partitioned(Partitioning(TABLE), instances, offers_whole=True),
    )
    return Inventory(VERSIONS, (h100(1),), lost=(cut,)) if lost else Inventory(VERSIONS, (cut, h100(1)))


@pytest.mark.parametrize("name", [ONE_0, TWO_0, SLOTS["3g.40gb", 0], WHOLE])
def test_leaving_instance_of_ours_refuses_no_claim(name: str) -> None:
    """The leaving instance is destroyed first, although it is still excluded from what is published."""
    found = with_leftovers(ORPHAN)
    assert name not in found.by_name
    assert plan(claim(name), found=found).steps == plan(claim(name)).steps
    with pytest.raises(DeviceLostError):
        plan(claim(name), found=with_leftovers(ORPHAN, lost=True))


def test_leaving_instance_next_to_a_foreign_instance() -> None:
    found = with_leftovers(ORPHAN, FOREIGN)
    assert plan(claim(ONE_0), found=found).steps == (creation(ONE_0), WriteCdiSpec())
    with pytest.raises(ClaimRefusedError, match="gpu-dra-driver did not create"):
        plan(claim(SLOTS["1g.10gb", 6]), found=found)
    for name in (THREE_4, WHOLE):
        with pytest.raises(ClaimRefusedError, match="does not exist on this node"):
            plan(claim(name), found=found)


def test_server_that_cannot_count_gets_nothing_back_either() -> None:
    reduced = with_leftovers(ORPHAN).without_partitions()
    assert list(reduced.by_name) == [PLAIN]
    assert reduced.usable(ONE_0) is None
