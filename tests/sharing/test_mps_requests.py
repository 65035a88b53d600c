"""What containers of a claim can use together: a CUDA process that uses MPS sees the devices of one daemon only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dra_driver.errors import ClaimRefusedError
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceConfig, DeviceResult, PodRef
from dra_driver.model.record import ClaimRecord
from dra_driver.model.sharing import GpuSelector, SharingEntry, SharingPolicy, SharingRule
from dra_driver.sharing.rules.modes import advice_on_requests
from tests.fakes.samples import DRIVER, GPU_0, GPU_1, MIG_1G, MIG_3G, claim, plan, result, uuid


def mps(*requests: str, kind: str = "GpuConfig") -> DeviceConfig:
    parameters = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": kind,
        "sharing": {"strategy": "MPS", "mpsConfig": {}},
    }
    return DeviceConfig("FromClaim", requests, DRIVER, parameters)


def record(wanted: AllocatedClaim, **more: Any) -> ClaimRecord:
    made = plan(wanted, **more)
    return ClaimRecord(wanted, "prepared", "boot", made.held_devices(), made.steps)


@pytest.mark.parametrize("names", [(GPU_0, MIG_1G), (MIG_1G, GPU_0)])
def test_a_request_is_refused_when_mps_has_only_a_part_of_its_devices(names: tuple[str, str]) -> None:
    with pytest.raises(ClaimRefusedError) as refused:
        record(claim(*names, configs=(mps(),)))
    assert str(refused.value) == (
        f"request gpu: {GPU_0} is used through MPS and {MIG_1G} is not, but a CUDA process that uses MPS sees only "
        f"{GPU_0}; use one device per request, and let each container name its request"
    )


def test_a_request_is_refused_when_only_one_of_its_shares_is_enforced() -> None:
    enforced = SharingEntry(GpuSelector(uuids=frozenset({uuid(0)})), SharingRule("memory", enforce="mps"))
    policy = SharingPolicy((enforced, SharingEntry(GpuSelector(), SharingRule("memory"))))
    wanted = claim(result(GPU_0, share_id="s-0"), result(GPU_1, share_id="s-1"))
    with pytest.raises(ClaimRefusedError, match=f"sees only {GPU_0}"):
        record(wanted, sharing=policy)


def test_a_request_for_several_mig_devices_with_mps_is_refused() -> None:
    with pytest.raises(ClaimRefusedError) as refused:
        record(claim(MIG_1G, MIG_3G, configs=(mps(kind="MigDeviceConfig"),)))
    assert str(refused.value) == (
        f"request gpu: {MIG_1G} and {MIG_3G} each have an MPS daemon, and a container can reach only one of "
        "them; make a request with count 1 for each device and let each container name its own "
        "request, or use the devices without MPS"
    )


def test_requests_with_and_without_mps_advise_containers() -> None:
    wanted = claim(result(GPU_0, "shared"), result(GPU_1, "plain"), configs=(mps("shared"),))
    assert advice_on_requests(record(wanted)) == (
        f"The claim has requests with MPS: shared ({GPU_0}), and plain without MPS. Let each container name only one "
        "request (resources.claims[].request): a container with several requests reaches only one MPS daemon and no "
        "other GPU"
    )


def test_two_requests_with_mps_advise_containers() -> None:
    wanted = claim(
        result(GPU_0, "one"), result(MIG_3G, "two/first"), configs=(mps(), mps(kind="MigDeviceConfig"))
    )
    assert (advice_on_requests(record(wanted)) or "").startswith(
        f"The claim has requests with MPS: one ({GPU_0}), two ({MIG_3G}). Let each"
    )


def of_pod(wanted: AllocatedClaim, name: str, *pods: str) -> ClaimRecord:
    """The record of a claim of this name that these pods use."""
    found = record(wanted)
    ref, users = ClaimRef("default", name, name), tuple(PodRef(pod, pod) for pod in pods)
    return replace(found, claim=replace(wanted, ref=ref, pods=users))


def test_two_claims_of_a_pod_advise_containers_if_one_has_mps() -> None:
    shared = of_pod(claim(GPU_0, configs=(mps(),)), "shared", "pod-1", "pod-2")
    second = of_pod(claim(MIG_3G, configs=(mps(kind="MigDeviceConfig"),)), "second", "pod-2")
    plain = of_pod(claim(GPU_1), "plain", "pod-2")
    elsewhere = of_pod(claim(GPU_1), "elsewhere", "pod-3")
    assert advice_on_requests(shared, [shared, elsewhere]) is None
    assert advice_on_requests(shared, [shared, second, plain, elsewhere]) == (
        f"The claims of the pod have requests with MPS: gpu ({GPU_0}), second/gpu ({MIG_3G}), and plain/gpu without "
        "MPS. Let each container name only one request (resources.claims[].request): a container with several "
        "requests reaches only one MPS daemon and no other GPU"
    )
    look = of_pod(claim(result(GPU_1, admin_access=True)), "look", "pod-1")
    assert advice_on_requests(shared, [shared, look]) is None


@pytest.mark.parametrize(
    "wanted",
    [
        claim(GPU_0, configs=(mps(),)),
        claim(GPU_0, GPU_1, configs=(mps(),)),
        claim(result(GPU_0, "one"), result(GPU_1, "two")),
        claim(result(GPU_0), result(GPU_1, "look", admin_access=True), configs=(mps("gpu"),)),
    ],
    ids=["one request", "one request for several", "no MPS", "a look beside it"],
)
def test_nothing_is_said_when_containers_cannot_go_wrong(wanted: AllocatedClaim) -> None:
    assert advice_on_requests(record(wanted)) is None


def test_nothing_is_said_of_a_device_that_was_lost() -> None:
    wanted = claim(result(GPU_0), configs=(mps(),))
    known = record(wanted)
    more: tuple[DeviceResult, ...] = (*wanted.results, result("gpu-gone", "look", admin_access=True))
    assert advice_on_requests(replace(known, claim=replace(wanted, results=more))) is None
