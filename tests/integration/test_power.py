"""Limits of power and clocks by claim, and the node's own, on a whole node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dra_driver.model.claim import ClaimRef
from dra_driver.power.rules.limits import PowerPolicy
from tests.fakes.waiting import eventually
from tests.integration.conftest import Node, opaque, poll_all
from tests.integration.test_process import call

DEFAULT = {"power": PowerPolicy(default_w=400)}


def limited(node: Node, name: str, index: int = 0, **fields: Any) -> ClaimRef:
    return node.allocated_by_hand(name, node.devices()[index]["name"], config=opaque(**fields))


def watts(node: Node, index: int = 0) -> float | None:
    """What was set; None is the driver's default."""
    milliwatts = node.machine.gpu(index).power_limit_mw
    return None if milliwatts is None else milliwatts / 1000


def test_limits_last_as_long_as_the_claim(node: Node) -> None:
    node.machine.set_gpu(0, power_limit_mw=650_500)  # an administrator's
    first = limited(node, "first", power={"percent": 50}, clocks={"graphicsMHz": {"max": 1200}})
    node.ready(first)
    node.ready(first)
    assert (watts(node), node.machine.gpu(0).locked_mhz) == (350, {"graphics": [210, 1200]})
    assert "limits: 350 W, graphics clock 210 to 1200 MHz" in call("claims", *node.machine_flags).stdout
    node.must_unprepare(first)
    assert (watts(node), node.machine.gpu(0).locked_mhz) == (650.5, {})
    second = limited(node, "second", power={"limitWatts": 300})
    node.ready(second)
    node.restart_driver()
    assert watts(node) == 300
    node.must_unprepare(second)
    assert [watts(node, index) for index in range(2)] == [650.5, None]


def test_lost_limits_are_set_again_after_a_driver_reload(node: Node) -> None:
    ref = limited(node, "held", 2, power={"limitWatts": 500}, clocks={"memoryMHz": {"max": 1600}})
    node.ready(ref)
    node.reload_nvidia_driver()
    eventually(lambda: (watts(node, 2), node.machine.gpu(2).locked_mhz) == (500, {"memory": [1593, 1600]}))
    node.must_unprepare(ref)
    assert (watts(node, 2), node.machine.gpu(2).locked_mhz) == (700, {})


def test_node_without_the_right_refuses_the_claim_and_keeps_nothing(node: Node) -> None:
    node.machine.set_fault("nvmlDeviceSetPowerManagementLimit", code="no-permission")
    node.refused(
        limited(node, "guest", power={"limitWatts": 500}), "NVML denies permission, as it may in a virtual"
    )
    node.machine.set_fault("nvmlDeviceSetGpuLockedClocks", code="not-supported")
    node.refused(limited(node, "old", clocks={"graphicsMHz": {"max": 900}}), "remove clocks from the claim's")
    assert node.driver.cleaner.outstanding() == []
    assert not list((node.plugin_dir / "ledger").glob("*.json"))
    node.ready(limited(node, "plain"))


def test_every_gpu_without_a_claim_has_the_default_of_the_node(make_node: Callable[..., Node]) -> None:
    node = make_node().running(**DEFAULT)
    everywhere = [400.0] * 8
    eventually(lambda: [watts(node, index) for index in range(8)] == everywhere)
    ref = limited(node, "more", power={"limitWatts": 600})
    node.ready(ref)
    node.reload_nvidia_driver()
    eventually(lambda: [watts(node, index) for index in range(8)] == [600, *everywhere[1:]])
    node.must_unprepare(ref)
    assert watts(node) == 400
    node.restart_driver()
    eventually(lambda: [watts(node, index) for index in range(8)] == [700.0] * 8)
    eventually(lambda: not list((node.plugin_dir / "ledger").glob("*.json")))


def test_default_of_the_node_survives_the_reset_that_a_mig_mode_may_need(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("hgx-h100-4").running(4 * 26, dynamic_mig=True, **DEFAULT)
    eventually(lambda: watts(node) == 400)
    ref = node.allocated_by_hand("small", f"gpu-{node.machine.gpu(0).uuid[4:12]}-mig-1g10gb-19-6")
    node.ready(ref)
    node.machine.set_gpu(0, power_limit_mw=None)
    node.must_unprepare(ref)
    eventually(lambda: (node.machine.gpu(0).mig_mode, watts(node)) == (0, 400))


def test_change_by_another_program_is_shown_and_not_fought(node: Node) -> None:
    ref = limited(node, "held", power={"limitWatts": 500})
    node.ready(ref)
    node.machine.set_gpu(0, power_limit_mw=250_000)
    texts: list[str] = []

    def is_shown() -> bool:
        poll_all(node.driver)
        texts[:] = [one.text for one in node.driver.node_problems.current() if one.code == "setting-changed"]
        return bool(texts)

    eventually(is_shown)
    assert f"the power limit of GPU {node.machine.gpu(0).uuid} from 500 W to 250 W" in texts[0]
    assert watts(node) == 250
    eventually(lambda: node.events("SettingChanged"))
    node.machine.set_gpu(0, power_limit_mw=500_400)  # less than a watt apart
    eventually(lambda: not is_shown())
