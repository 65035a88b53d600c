"""How many clients MPS serves: by GPU and driver, in what is published and in what is prepared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.errors import ClaimRefusedError
from dra_driver.model.claim import DeviceConfig
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DriverVersions, Inventory, WholeGpu
from dra_driver.model.mps import LostMps, MpsShared
from dra_driver.model.record import ClaimRecord
from dra_driver.model.sharing import NO_SHARING, SharingPolicy, SharingRule, share_all
from dra_driver.model.steps import RunMps
from dra_driver.sharing.rules.client_limits import max_clients
from dra_driver.sharing.rules.shared_device import ShareLimits, limits_of
from dra_driver.slices.rules.build import build_pool
from tests.fakes.samples import DRIVER, GPU_0, NODE, claim, h100, inventory, plan, result
from tests.fakes.tables import read_yaml

R550, R555 = DriverVersions("550.163.01", (12, 4)), DriverVersions("555.58.02", (12, 5))
R580, R590 = DriverVersions("580.95.05", (13, 0)), DriverVersions("590.44.01", (13, 1))
SIXTY = share_all(SharingRule("shares", 60, enforce="mps"))
MEMORY = share_all(SharingRule("memory", enforce="mps"))


def node(versions: DriverVersions, *gpus: Gpu) -> Inventory:
    return replace(inventory(*(gpus or (h100(0),))), versions=versions)


def pascal(number: int) -> Gpu:
    return h100(number, cuda_compute_capability=(6, 0), product_name="Tesla P100-SXM2-16GB")


def capacity(known: Inventory, policy: Any) -> dict[str, Any]:
    [content] = build_pool(known, NODE, policy).slices
    return {device["name"]: device.get("capacity", {}) for device in content.devices}[GPU_0]


def prepared(number: int, usage: Any) -> ClaimRecord:
    """A claim that has a share of GPU 0 in this mode."""
    share = result(GPU_0, share_id=f"{number:08x}-0000-0000-0000-000000000000")
    one = replace(claim(uid=f"uid-{number}"), results=(share,))
    known = replace(plan(one, found=node(R590), sharing=SIXTY).held_devices()[0], usage=usage)
    return ClaimRecord(one, "prepared", "boot", (known,), ())


CLIENTS = read_yaml(Path(__file__).with_name("tables.yaml"))["clients"]


@pytest.mark.parametrize(("compute", "driver", "most"), CLIENTS)
def test_most_clients_follow_gpu_and_driver(compute: Any, driver: str | None, most: int) -> None:
    assert (
        max_clients(h100(0, cuda_compute_capability=compute and tuple(compute)), DriverVersions(driver))
        == most
    )


@pytest.mark.parametrize(
    ("known", "shares"),
    [(node(R590), "60"), (node(R580), "48"), (node(R580, pascal(0)), "16"), (node(R590, pascal(0)), "16")],
)
def test_no_more_shares_are_published_than_mps_serves_clients(known: Inventory, shares: str) -> None:
    stated = capacity(known, SIXTY)
    assert (stated["shares"]["value"], "mpsClients" in stated) == (shares, False)
    assert stated["shares"]["requestPolicy"]["validRange"]["max"] == shares


def test_shares_keep_their_number_when_mps_does_not_enforce_them() -> None:
    many = share_all(SharingRule("shares", 100))
    assert capacity(node(R580), many)["shares"]["value"] == "100"
    assert build_pool(node(R580), NODE, many).notes == ()


def test_each_device_with_fewer_shares_is_reported_when_the_rule_requests_more() -> None:
    notes = build_pool(node(R580, h100(0), pascal(1)), NODE, SIXTY).notes
    assert notes == (
        "device gpu-00000000: it has 48 shares instead of 60, because MPS serves at most 48 clients on a GPU with "
        "driver 580.95.05, before R590; set shares to 48 or fewer, or set enforce to none",
        "device gpu-00000001: it has 16 shares instead of 60, because MPS serves at most 16 clients on a GPU before "
        "Volta; set shares to 16 or fewer, or set enforce to none",
    )
    assert build_pool(node(R590), NODE, SIXTY).notes == ()


def test_a_share_is_its_part_of_the_published_number() -> None:
    share = result(GPU_0, share_id="s", consumed_capacity={"shares": "1"})
    one = replace(claim(), results=(share,))
    [planned] = plan(one, found=node(R580), sharing=SIXTY).devices
    assert isinstance(planned.usage, MpsShared)
    given = ShareLimits(planned.usage.memory_limit_mib, planned.usage.active_thread_percentage)
    assert given == limits_of(share, WholeGpu(GPU_0, h100(0)), SharingRule("shares", 48, enforce="mps"))


@pytest.mark.parametrize("mode", ["memory", "unlimited"])
def test_the_scheduler_counts_clients_when_shares_do_not(mode: Any) -> None:
    rule = SharingRule(mode, enforce="mps")
    counted = {"default": "1", "validRange": {"min": "1", "max": "48", "step": "1"}}
    assert capacity(node(R580), share_all(rule))["mpsClients"] == {"value": "48", "requestPolicy": counted}
    assert "mpsClients" not in capacity(node(R580), share_all(replace(rule, enforce="none")))


@pytest.mark.parametrize(("versions", "most"), [(R580, 48), (R590, 60)])
def test_a_claim_is_refused_when_the_daemon_has_all_its_clients(versions: DriverVersions, most: int) -> None:
    share = result(GPU_0, share_id="ffffffff-0000-0000-0000-000000000000")
    wanted = replace(claim(uid="uid-new"), results=(share,))
    [mine] = plan(wanted, found=node(versions), sharing=MEMORY).held_devices()
    others = [prepared(number, mine.usage) for number in range(most - 1)]
    assert plan(wanted, *others, found=node(versions), sharing=MEMORY).devices
    others.append(prepared(most, LostMps()))
    with pytest.raises(ClaimRefusedError) as refused:
        plan(wanted, *others, found=node(versions), sharing=MEMORY)
    assert str(refused.value) == (
        f"request gpu: {most} claims use the MPS daemon of device {GPU_0}, and MPS serves at most {most} clients with "
        "this GPU and driver; wait until all pods of one of these claims are gone"
    )


def multi_user(
    versions: DriverVersions, policy: SharingPolicy = NO_SHARING, *gpus: Gpu, requested: bool | None = None
) -> bool:
    """Whether the MPS daemon of a claim serves several users; a share where there is a policy."""
    share = result(GPU_0, share_id="11111111-1111-1111-1111-111111111111" if policy.entries else None)
    parameters = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "GpuConfig",
        "sharing": {"strategy": "MPS", "mpsConfig": {} if requested is None else {"multiUser": requested}},
    }
    config = DeviceConfig("FromClaim", (), DRIVER, parameters)
    is_plain_share = bool(policy.entries) and requested is None
    one = replace(claim(uid="uid-1"), results=(share,), configs=() if is_plain_share else (config,))
    [step] = [
        step
        for step in plan(one, found=node(versions, *gpus), sharing=policy).steps
        if isinstance(step, RunMps)
    ]
    return step.spec.multi_user


@pytest.mark.parametrize("versions", [R550, R555, DriverVersions()])
def test_claims_with_mps_serve_one_user_when_they_do_not_request_more(versions: DriverVersions) -> None:
    assert (multi_user(versions), multi_user(versions, requested=False)) == (False, False)


@pytest.mark.parametrize("versions", [R555, R590, DriverVersions()])
def test_claims_with_mps_serve_several_users_when_they_request_it_and_the_driver_can(
    versions: DriverVersions,
) -> None:
    assert multi_user(versions, requested=True) is True


@pytest.mark.parametrize("policy", [NO_SHARING, MEMORY])
def test_several_users_are_refused_when_the_driver_is_older_than_r555(policy: SharingPolicy) -> None:
    with pytest.raises(ClaimRefusedError) as refused:
        multi_user(R550, policy, requested=True)
    assert str(refused.value) == (
        f"request gpu: multiUser is not possible on device {GPU_0}, because the node has NVIDIA driver 550.163.01; "
        "update it to R555 or newer, or leave multiUser out and run all pods of the device as one user"
    )


def test_several_users_are_refused_when_the_gpu_is_older_than_volta() -> None:
    assert multi_user(R555, NO_SHARING, pascal(0)) is False
    with pytest.raises(ClaimRefusedError, match="older than Volta"):
        multi_user(R555, NO_SHARING, pascal(0), requested=True)


def test_shares_serve_several_users_where_the_driver_can() -> None:
    one_user = share_all(SharingRule("memory", enforce="mps", multi_user=False))
    assert [multi_user(versions, MEMORY) for versions in (R550, R555)] == [False, True]
    assert [multi_user(versions, one_user) for versions in (R550, R555)] == [False, False]
    assert (multi_user(R555, MEMORY, requested=False), multi_user(R555, one_user, requested=True)) == (
        False,
        True,
    )
