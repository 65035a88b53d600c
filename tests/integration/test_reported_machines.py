"""Machines that users have reported: what the plugin publishes there, and what `doctor` says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dra_driver.app.config_file import mig_layouts
from tests.fakes.waiting import eventually
from tests.integration.conftest import Node
from tests.integration.test_process import call

MACHINES = Path(__file__).parents[1] / "data/machines"


def warnings(node: Node, status: str = "WARN") -> dict[str, tuple[str, str]]:
    """What `doctor` warns of, and the remedy, by the check; the last line of each check."""
    checks = json.loads(call("doctor", "-o", "json", *node.machine_flags).stdout)["checks"]
    return {one["check"]: (one["seen"], one["remedy"]) for one in checks if one["status"] == status}


def types(node: Node) -> list[str]:
    return [device["attributes"]["type"]["string"] for device in node.devices()]


@pytest.mark.parametrize("on_demand", [False, True])
def test_guest_with_vgpus_publishes_each_and_prepares_it(
    make_node: Callable[..., Node], on_demand: bool
) -> None:
    """NVML of a guest reports no serial number, addressing mode or power, and a vGPU is not cut into MIG devices."""
    node = make_node(str(MACHINES / "vgpu-guest.yaml")).running(2, dynamic_mig=on_demand)
    assert types(node) == ["gpu", "gpu"]
    node.ready(node.claim("one"))
    eventually(lambda: "health" not in warnings(node))


def test_unlike_cards_of_a_home_server_are_all_published(make_node: Callable[..., Node]) -> None:
    """A Pascal Quadro, a GeForce Ampere, a Blackwell GeForce and a T4, none with MIG or NVLink."""
    node = make_node(str(MACHINES / "mixed-desktop.yaml")).running(4)
    assert types(node) == ["gpu"] * 4
    eventually(lambda: "health" not in warnings(node))


def test_memory_of_a_gh200_that_is_the_hosts_is_warned_of_with_the_module_option(
    make_node: Callable[..., Node],
) -> None:
    node = make_node(str(MACHINES / "gh200.yaml")).running(1)
    seen, remedy = warnings(node)["GPU memory"]
    assert seen.startswith("GPU memory is in NUMA nodes of the host (1)")
    assert "NVreg_CoherentGPUMemoryMode=driver" in remedy


def test_card_that_the_driver_could_not_start_is_not_called_lost(make_node: Callable[..., Node]) -> None:
    """The card's system processor does not boot: NVML lists only the other card, and there is no Xid."""
    node = make_node(str(MACHINES / "card-that-does-not-start.yaml")).running(1)
    failed = warnings(node, "FAIL")
    seen, remedy = failed["health"]
    assert seen == "0000:01:00.0 is unhealthy: the NVIDIA driver could not start the GPU"
    assert remedy.startswith("`dmesg | grep -i nvrm`")
    assert not re.search("xid|reset", remedy)
    assert "NVML" not in failed.keys() | warnings(node)


def test_nvlinks_that_are_all_down_are_mentioned(make_node: Callable[..., Node]) -> None:
    """No other GPU and no earlier reading shows that a link should be up, and a card may have no bridge."""
    node = make_node(str(MACHINES / "nvlinks-all-down.yaml")).running(2)
    seen, _ = warnings(node, "OK")["health"]
    assert seen.startswith("no NVLink is up on 0001:00:00.0, 0002:00:00.0")
    assert "nvidia-smi nvlink -s" in seen


def test_layout_of_one_gpu_is_made_there_and_the_mig_mode_of_the_others_is_warned_of(
    make_node: Callable[..., Node],
) -> None:
    configs = {
        "all-disabled": [{"devices": "all", "mig-enabled": False}],
        "node1": [{"devices": [1], "mig-enabled": True, "mig-devices": {"1g.6gb": 4}}],
    }
    layout = {"layout": "node1", "configuration": {"version": "v1", "mig-configs": configs}}
    node = make_node(str(MACHINES / "a30-mig-mode.yaml"))
    node.running(4, mig_layouts=mig_layouts(layout))
    assert types(node) == ["mig"] * 4
    second = node.machine.gpu(1).uuid
    assert {device["attributes"]["parentUUID"]["string"] for device in node.devices()} == {second}
    seen, remedy = warnings(node, "FAIL")["MIG mode"]
    assert seen == (
        "the plugin does not publish GPUs in MIG mode without MIG devices: 0000:21:00.0, 0000:81:00.0, 0000:a1:00.0"
    )
    # 19, the ID on other GPUs, does not exist on an A30.
    assert "`nvidia-smi mig -i 0000:21:00.0 -cgi 14 -C` creates one" in remedy


def test_layout_for_absent_gpus_is_refused_for_them_in_an_event_and_in_doctor(
    make_node: Callable[..., Node],
) -> None:
    layout = {
        "layout": "custom-config",
        "configuration": {"version": "v1", "mig-configs": {"custom-config": [
            {"devices": [0, 1, 2, 3], "mig-enabled": False},
            {"devices": [4], "mig-enabled": True, "mig-devices": {"1g.10gb": 7}},
        ]}},
    }  # fmt: skip
    node = make_node(str(MACHINES / "two-a100.yaml"))
    node.start_driver(mig_layouts=mig_layouts(layout))
    events = eventually(lambda: found if len(found := node.events("MigLayoutRefused")) == 3 else [])
    text = "the node has only 2 GPUs; correct `devices` in the layout's entries"
    assert sorted(one["message"] for one in events) == [
        f"GPU {index}: the MIG layout custom-config is refused, and nothing was changed: {text}"
        for index in (2, 3, 4)
    ]
    seen, _ = warnings(node)["MIG layout"]
    assert seen == f"layout custom-config is not applied to 3 GPUs (refused): 2, 3, 4: {text}"


def test_gpu_without_mig_beside_one_with_a_layout_is_no_warning(make_node: Callable[..., Node]) -> None:
    node = make_node(str(MACHINES / "maxq.yaml"))
    node.running(5, mig_layouts=mig_layouts({"layout": "all-1g.24gb"}))
    assert sorted(types(node)) == ["gpu", "mig", "mig", "mig", "mig"]
    applied = "layout all-1g.24gb is applied to 1 GPU; without MIG: 1 GPU"
    eventually(lambda: warnings(node, "OK").get("MIG layout", ("",))[0] == applied)
    assert node.events("MigLayoutRefused") == []
    unsupported = [one for one in node.driver.layouts.states().values() if one.state == "unsupported"]
    assert [one.text for one in unsupported] == ["the GPU has no MIG"]
