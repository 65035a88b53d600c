"""One MPS daemon for the GPUs of one request: planning, records, locks, undo, and the containers'
environment.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dra_driver.cdi.rules.spec import with_mps
from dra_driver.errors import ClaimRefusedError
from dra_driver.journal.rules.cleanups import PendingCleanup, by_gpus, withholding
from dra_driver.model.claim import AllocatedClaim
from dra_driver.model.driver_files import CdiDevice
from dra_driver.model.mps import (
    LostMps,
    MpsDaemonSpec,
    MpsDirectories,
    MpsMember,
    MpsShared,
    SharingMode,
    TimeSliced,
)
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.sharing import SharingRule, share_all
from dra_driver.model.steps import LeaveMigMode, RunMps, SetTimeSlice, WriteCdiSpec
from dra_driver.sharing.rules.modes import incompatibility
from tests.fakes import samples
from tests.fakes.samples import GPU_0, GPU_1, GPU_2, claim, h100, inventory, result, uuid
from tests.fakes.tables import tabled
from tests.sharing.test_mps_requests import mps

NODE_OF_FOUR = inventory(*(h100(number) for number in range(4)))
SHARES = share_all(SharingRule("memory", enforce="mps", multiprocessors=True))
SPEC = MpsDaemonSpec(
    GPU_0, uuid(0), "gpu", uuid(0), others=(MpsMember(GPU_1, uuid(1)), MpsMember(GPU_2, uuid(2), 1024))
)


plan = partial(samples.plan, found=NODE_OF_FOUR)


def settings(**fields: Any) -> Any:
    config = mps()
    config.parameters["sharing"]["mpsConfig"] = fields
    return config


def share(device: str, number: int, request: str = "gpu", **consumed: str) -> Any:
    share_id = f"{number:08x}-0000-0000-0000-000000000000"
    return result(device, request, share_id=share_id, consumed_capacity=consumed)


def recorded(one: Plan) -> ClaimRecord:
    return ClaimRecord(one.claim, "prepared", "boot-1", one.held_devices(), one.steps)


@pytest.mark.parametrize("names", [(GPU_2, GPU_0, GPU_1), (GPU_0, GPU_1, GPU_2)])
def test_the_gpus_of_a_request_have_one_daemon_in_the_order_of_their_uuids(names: tuple[str, ...]) -> None:
    limits = {"defaultPinnedDeviceMemoryLimit": "4Gi", "defaultPerDevicePinnedMemoryLimit": {"1": "2Gi"}}
    one = plan(claim(*names, configs=(settings(defaultActiveThreadPercentage=25, **limits),)))
    spec = MpsDaemonSpec(
        GPU_0,
        uuid(0),
        "gpu",
        uuid(0),
        default_active_thread_percentage=25,
        default_memory_limit_mib=4096,
        others=(MpsMember(GPU_1, uuid(1), 2048), MpsMember(GPU_2, uuid(2), 4096)),
    )
    own = {GPU_0: 4096, GPU_1: 2048, GPU_2: 4096}
    assert one.steps == (RunMps(spec), WriteCdiSpec())
    assert [device.usage for device in one.devices] == [
        MpsShared(spec, own[name], 25, (4096, 2048, 4096)) for name in names
    ]


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"defaultPinnedDeviceMemoryLimit": "100Gi"}, "is above the 81559Mi of"),
        ({"defaultPerDevicePinnedMemoryLimit": {"GPU-00000000-0000": "1Gi"}}, "names GPU-00000000-0000, but"),
    ],
)
def test_limits_that_fit_no_device_of_the_claim_are_refused(limits: dict[str, Any], text: str) -> None:
    with pytest.raises(ClaimRefusedError, match=text):
        plan(claim(GPU_0, configs=(settings(**limits),)))


def test_requests_of_a_claim_keep_their_own_daemons() -> None:
    one = plan(claim(result(GPU_0, "a"), result(GPU_1, "b"), result(GPU_2, "b"), configs=(mps(),)))
    assert [step.spec.devices for step in one.steps if isinstance(step, RunMps)] == [(GPU_0,), (GPU_1, GPU_2)]


def test_shares_of_several_gpus_have_the_limits_of_each_and_the_least_percentage() -> None:
    wanted = replace(
        claim(),
        results=(
            share(GPU_1, 1, memory="20Gi", multiprocessors="66"),
            share(GPU_0, 2, memory="10Gi", multiprocessors="0"),
        ),
    )
    node = inventory(*(h100(number, multiprocessors=132) for number in range(2)))
    one = plan(wanted, sharing=SHARES, found=node)
    spec = MpsDaemonSpec(GPU_0, uuid(0), "gpu", uuid(0), True, others=(MpsMember(GPU_1, uuid(1)),))
    assert [device.usage for device in one.devices] == [
        MpsShared(spec, 20480, 50, (10240, 20480)), MpsShared(spec, 10240, 50, (10240, 20480)),
    ]  # fmt: skip


def test_claims_share_the_gpus_when_they_have_the_same_daemon() -> None:
    def both(number: int) -> AllocatedClaim:
        results = (share(GPU_0, number, memory="1Gi"), share(GPU_1, number + 1, memory="1Gi"))
        return replace(claim(uid=f"uid-{number}"), results=results)

    first = recorded(plan(both(10), sharing=SHARES))
    assert plan(both(20), first, sharing=SHARES).steps == first.steps
    for number, device in enumerate((GPU_0, GPU_1)):
        alone = replace(claim(uid="uid-alone"), results=(share(device, 30 + number, memory="1Gi"),))
        with pytest.raises(ClaimRefusedError, match="one MPS daemon serves both, "):
            plan(alone, first, sharing=SHARES)
        with pytest.raises(ClaimRefusedError, match="one MPS daemon serves both, "):
            plan(both(20), recorded(plan(alone, sharing=SHARES)), sharing=SHARES)


def test_requests_of_a_claim_cannot_share_a_gpu_in_other_groups() -> None:
    results = (
        share(GPU_0, 1, "a", memory="1Gi"), share(GPU_1, 2, "a", memory="1Gi"), share(GPU_0, 3, "b", memory="1Gi"),
    )  # fmt: skip
    with pytest.raises(
        ClaimRefusedError, match=f"requests a and b share device {GPU_0}: one MPS daemon serves both"
    ):
        plan(replace(claim(), results=results), sharing=SHARES)


def test_every_gpu_of_the_daemon_is_withheld_while_it_is_still_to_be_stopped() -> None:
    step = RunMps(SPEC)
    ended = ClaimRecord(claim(GPU_0), "prepared", "boot-1", (), (step,))
    cleanup = PendingCleanup("uid-1", ended, (step,), 0)
    withheld = [
        name
        for name, device in NODE_OF_FOUR.by_name.items()
        if withholding([cleanup], device, "boot-1") is not None
    ]
    assert withheld == [GPU_0, GPU_1, GPU_2]
    assert step.gpus == {uuid(0), uuid(1), uuid(2)}
    assert step.undoing == f"stop the MPS daemon of devices {GPU_0}, {GPU_1}, {GPU_2}"


def test_steps_of_gpus_that_one_daemon_joins_run_one_after_the_other() -> None:
    leave, slice_3 = LeaveMigMode(uuid(2), None), SetTimeSlice(uuid(3), 1)
    leave_1 = LeaveMigMode(uuid(1), None)
    lanes = by_gpus((leave_1, leave, slice_3, RunMps(SPEC), WriteCdiSpec()))
    assert sorted(lanes, key=lambda lane: len(lane[0])) == [
        (frozenset({uuid(3)}), [slice_3]),
        (frozenset({uuid(0), uuid(1), uuid(2)}), [leave_1, leave, RunMps(SPEC)]),
    ]


@tabled("limits", "env")
def test_containers_get_the_limits_by_number(limits: tuple[int | None, ...], env: list[str]) -> None:
    device = CdiDevice(GPU_1, nodes=(), drm=(), links=())
    made = with_mps(device, MpsShared(SPEC, limits[1], None, limits), MpsDirectories("/p", "/l", "/s"))
    assert list(made.env) == ["CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps", *env]


@pytest.mark.parametrize(
    ("held", "wanted", "said"),
    [
        (TimeSliced(1), TimeSliced(3), "same time slice; one requests Short, the other Long"),
        (TimeSliced(1), MpsShared(SPEC), "MPS excludes other modes"),
        (LostMps(), TimeSliced(), "MPS excludes other modes"),
        (TimeSliced(1), TimeSliced(1), None),
        (TimeSliced(1), TimeSliced(), None),
        (LostMps(), MpsShared(SPEC), None),
    ],
)
def test_claims_of_one_gpu_agree_on_how_they_share_it(
    held: SharingMode, wanted: SharingMode, said: str | None
) -> None:
    assert (incompatibility(held, wanted) or "None").endswith(str(said))
