from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.claims.rules.plan import answer, our_part
from dra_driver.errors import ClaimRefusedError, DraDriverError, InvalidConfigError
from dra_driver.model.claim import (
    AllocatedClaim,
    DeviceConfig,
    DeviceResult,
    HeldDevice,
    Prepared,
    PreparedDevice,
)
from dra_driver.model.plan import Plan, PlannedDevice
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import WriteCdiSpec
from tests.fakes.samples import (
    DRIVER,
    GPU_0,
    GPU_1,
    GPU_2,
    MIG_1G,
    MIG_3G,
    MIXED,
    NODE,
    claim,
    hold,
    plan,
    record,
    ref,
    result,
    uuid,
)

SHARE = "9f6a2c3e-0d5f-4a6b-8b7a-7f3c1ad296f4"


def refusal(wanted: AllocatedClaim, *others: ClaimRecord) -> str:
    with pytest.raises(DraDriverError) as caught:
        plan(wanted, *others)
    assert isinstance(caught.value, ClaimRefusedError | InvalidConfigError)
    text = str(caught.value)
    assert "\n" not in text
    return text


LONG = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}


def config(
    kind: str = "GpuConfig", driver: str | None = DRIVER, requests: tuple[str, ...] = (), **fields: object
):
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, **fields}
    return DeviceConfig("FromClaim", requests, driver, parameters)


def test_plan_has_the_devices_in_the_order_of_the_results() -> None:
    wanted = claim(GPU_1, MIG_3G, GPU_0)
    assert plan(wanted) == Plan(
        wanted,
        tuple(PlannedDevice(result(name), MIXED.by_name[name]) for name in (GPU_1, MIG_3G, GPU_0)),
        (WriteCdiSpec(),),
    )
    assert plan(wanted).used_gpus == {uuid(0), uuid(1), uuid(2)}


def test_plan_is_empty_when_no_device_is_ours() -> None:
    assert plan(claim()) == Plan(claim(), (), ())


def test_held_devices_are_what_a_record_keeps() -> None:
    wanted = claim(result(GPU_0, admin_access=True), result(MIG_1G, share_id=SHARE))
    assert plan(wanted).held_devices() == (
        HeldDevice(GPU_0, "gpu", uuid(0), uuid(0), admin_access=True),
        HeldDevice(MIG_1G, "mig", "MIG-00000002-0000-5555-aaaa-000000000007", uuid(2), share_id=SHARE),
    )


def test_results_and_configs_of_other_drivers_are_left_out() -> None:
    ours, theirs = result(GPU_0), DeviceResult("nic", "dra.net", "pool-x", "eth0")
    configs = (config(driver="dra.net"), config(), DeviceConfig("FromClass", (), None))
    whole = AllocatedClaim(ref(), (theirs, ours), configs)
    assert our_part(whole, DRIVER) == AllocatedClaim(ref(), (ours,), (configs[1], configs[2]))


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (
            claim(result(GPU_0, pool="node-b")),
            f"request gpu: device {GPU_0} was allocated from pool node-b, but this node serves pool node-a; "
            "the pod is on a node that its claim was not allocated for",
        ),
        (
            claim("gpu-ffffffff"),
            "request gpu: device gpu-ffffffff of pool node-a does not exist on this node; delete the "
            "pod and its claim so that the scheduler allocates another device",
        ),
        (
            claim(result(GPU_2, "big/whole")),
            f"request big/whole: device {GPU_2} of pool node-a does not exist on this node; delete the "
            "pod and its claim so that the scheduler allocates another device",
        ),
        (
            claim(GPU_0, result(GPU_0, "second")),
            f"request second: device {GPU_0} is allocated twice in this claim; "
            "delete the pod and its claim so that the scheduler allocates it again",
        ),
    ],
)
def test_claim_is_refused_when_its_allocation_does_not_fit_this_node(
    wanted: AllocatedClaim, text: str
) -> None:
    assert refusal(wanted) == text


@pytest.mark.parametrize(
    "wanted",
    [
        claim(GPU_0, result(GPU_0, "watch", admin_access=True)),
        claim(result(GPU_0, "watch", admin_access=True), result(GPU_0, "look", admin_access=True)),
        claim(result(GPU_0, share_id=SHARE), result(GPU_0, "b", share_id=SHARE.replace("9", "8"))),
    ],
)
def test_device_may_occur_twice_for_admin_access_and_for_shares(wanted: AllocatedClaim) -> None:
    assert len(plan(wanted).devices) == 2


def test_same_share_twice_is_refused() -> None:
    wanted = claim(result(GPU_0, share_id=SHARE), result(GPU_0, "b", share_id=SHARE))
    assert "is allocated twice in this claim" in refusal(wanted)


@pytest.mark.parametrize(
    ("held", "wanted", "free"),
    [
        (GPU_0, GPU_0, False),
        (GPU_0, GPU_1, True),
        (MIG_1G, MIG_1G, False),
        (MIG_1G, MIG_3G, True),
        (GPU_0, MIG_1G, True),
        (MIG_1G, GPU_0, True),
    ],
)
def test_device_is_given_once(held: str, wanted: str, free: bool) -> None:
    holder = record(hold(held))
    if free:
        assert plan(claim(wanted), holder).devices
    else:
        assert refusal(claim(wanted), holder) == (
            f"request gpu: device {wanted} is held by claim default/claim-uid-other (UID uid-other) "
            f"({held}, prepared); the plugin releases the device when all pods of that claim are gone"
        )


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        (HeldDevice(GPU_2, "gpu", uuid(2), uuid(2)), MIG_1G),
        (HeldDevice(f"{GPU_0}-mig-1g10gb-19-0", "mig", "MIG-1", uuid(0)), GPU_0),
    ],
    ids=["whole before", "part before"],
)
def test_a_gpu_and_a_part_of_it_exclude_each_other(held: HeldDevice, wanted: str) -> None:
    reported = refusal(claim(wanted), record(held, phase="preparing"))
    assert f"device {wanted} is held by claim default/claim-uid-other" in reported
    assert f"({held.device}, preparing)" in reported


@pytest.mark.parametrize("admin", ["holder", "claim", "both"])
@pytest.mark.parametrize("name", [GPU_0, MIG_1G])
def test_admin_access_never_conflicts(admin: str, name: str) -> None:
    holder = record(hold(name, admin_access=admin in ("holder", "both")))
    assert plan(claim(result(name, admin_access=admin in ("claim", "both"))), holder).devices


def test_second_device_of_a_claim_is_checked_against_every_other_claim() -> None:
    others = [record(hold(GPU_1), uid="uid-2"), record(hold(MIG_3G), uid="uid-3")]
    assert "claim default/claim-uid-3 (UID uid-3)" in refusal(claim(GPU_0, MIG_3G), *others)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (
            claim(GPU_0, configs=(config("MigDeviceConfig", requests=("gpu",)),)),
            f"allocation config 0 from the claim, requests gpu: MigDeviceConfig does not apply to device {GPU_0} "
            "of request gpu, because the device is a whole GPU",
        ),
        (
            claim(result(GPU_0, admin_access=True), configs=(config(sharing=LONG),)),
            "request gpu: opaque parameters (allocation config 0 from the claim) would change a device that "
            "other claims may use, which adminAccess does not allow; remove the parameters or adminAccess",
        ),
    ],
)
def test_config_is_refused_with_the_reason(wanted: AllocatedClaim, text: str) -> None:
    assert refusal(wanted) == text


@pytest.mark.parametrize(
    "wanted",
    [
        claim(GPU_0, MIG_1G, configs=(config(), config("MigDeviceConfig"))),
        claim(GPU_0, configs=(config(driver="dra.net", typo=1),)),
        claim(result(GPU_0, "a"), configs=(config("MigDeviceConfig", requests=("b",)),)),
        claim(result(GPU_0, "req/sub"), configs=(config(requests=("req",)), config(requests=("req/sub",)))),
        claim(result(GPU_0, "req/sub"), configs=(config("VfioDeviceConfig", requests=("req/other",)),)),
        claim(result(GPU_0, admin_access=True), configs=(config("MigDeviceConfig"),)),
        claim(result(GPU_0, admin_access=True), configs=(config(),)),
        claim(result(GPU_0, admin_access=True), configs=(config(sharing={"strategy": "TimeSlicing"}),)),
    ],
)
def test_config_is_taken_when_it_fits_or_is_not_for_the_device(wanted: AllocatedClaim) -> None:
    assert plan(wanted).steps == (WriteCdiSpec(),)


def test_management_holds_locks_and_changes_nothing() -> None:
    wanted = claim(result(GPU_0, admin_access=True), configs=(config(management=True),))
    made = plan(wanted, record(hold(GPU_0)))
    assert made.steps == (WriteCdiSpec(),)
    assert made.used_gpus == frozenset()
    assert made.held_devices() == (HeldDevice(GPU_0, "gpu", uuid(0), uuid(0), admin_access=True),)
    assert [device.managed for device in made.devices] == [MIXED.gpus]
    plain = claim(result(GPU_0, admin_access=True))
    assert [device.managed for device in plan(plain).devices] == [()]


@pytest.mark.parametrize("source", ["FromClass", "FromClaim"])
@pytest.mark.parametrize("after", [(), (config(),)], ids=["last", "replaced"])
def test_management_without_admin_access_is_refused(source: Any, after: tuple) -> None:
    asks = replace(config(management=True), source=source)
    reported = refusal(claim(result(GPU_0, "req/sub"), configs=(asks, *after)))
    assert reported.endswith("management requires adminAccess: true on request 'req'")


def test_parameters_of_a_newer_release_do_not_keep_a_prepared_monitor_from_its_devices() -> None:
    wanted = claim(result(GPU_0, admin_access=True), configs=(config(management=True, newer=1),))
    known = ClaimRecord(wanted, "prepared", "boot-1", (hold(GPU_0, admin_access=True),), (WriteCdiSpec(),))
    kept = plan(wanted, known=known)
    assert [device.managed for device in kept.devices] == [()]


def test_answer_names_base_requests_and_shares() -> None:
    wanted = claim(result(GPU_0, "req/sub", share_id=SHARE), result(MIG_1G, "other"))
    assert answer(wanted, DRIVER, (), plan(wanted).held_devices()) == Prepared(
        (
            PreparedDevice(
                ("req",), NODE, GPU_0, (f"k8s.gpu.nvidia.com/claim=uid-1-{GPU_0}-{SHARE}",), SHARE
            ),
            PreparedDevice(("other",), NODE, MIG_1G, (f"k8s.gpu.nvidia.com/claim=uid-1-{MIG_1G}",), None),
        )
    )


names = st.sampled_from([GPU_0, GPU_1, MIG_1G, MIG_3G])


@given(st.lists(st.tuples(names, st.booleans()), max_size=8))
def test_no_two_claims_ever_hold_the_same_silicon(wanted: list[tuple[str, bool]]) -> None:
    records: list[ClaimRecord] = []
    for number, (name, admin) in enumerate(wanted):
        allocated = claim(result(name, admin_access=admin), uid=f"uid-{number}")
        try:
            made = plan(allocated, *records)
        except ClaimRefusedError:
            assert any(
                held.device == name and not held.admin_access for kept in records for held in kept.devices
            )
            continue
        records.append(replace(record(*made.held_devices()), claim=allocated))
    used = [held.device for kept in records for held in kept.devices if not held.admin_access]
    assert len(used) == len(set(used))


def test_order_of_the_holders_does_not_change_the_verdict() -> None:
    holders = [record(hold(GPU_0), uid="uid-2"), record(hold(GPU_1), uid="uid-3")]
    for wanted, order in product((GPU_0, GPU_1), (holders, holders[::-1])):
        assert "is held by claim" in refusal(claim(wanted), *order)


def test_the_default_time_slice_is_had_on_every_gpu_because_nothing_is_set() -> None:
    default = config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Default"}})
    assert plan(claim(GPU_0, configs=(default,))).steps == (WriteCdiSpec(),)
