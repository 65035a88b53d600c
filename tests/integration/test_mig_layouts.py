"""MIG layouts through the whole plugin: slices, taints, claims, events, metrics and commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dra_driver.cli.inspect import slices_to_publish
from dra_driver.cli.machine import CommandMachine
from dra_driver.cli.state_on_disk import read_state
from dra_driver.mig import layouts
from dra_driver.model.mig import LAYOUT_LABEL, LAYOUT_STATE_LABEL, LayoutEntry, MigLayouts
from tests.fakes.scrapes import by_label
from tests.fakes.waiting import eventually
from tests.integration.conftest import NODE, Node

MIXED = MigLayouts(
    {
        "mixed-inference": (
            LayoutEntry(False),
            LayoutEntry(True, {"3g.40gb": 1, "1g.10gb": 3}, devices=(0, 1)),
        )
    },
    from_label=True,
)
CUT = 2 * 4 + 6


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "TAINTED_FIRST_S", 0.3)
    monkeypatch.setattr(layouts, "_CHECK_WAITING_S", 0.1)


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return make_node().running(8, mig_layouts=MIXED)


def label(node: Node, **labels: str) -> None:
    resource = node.server.resource("nodes", group="")
    [found] = [one for one in node.server.objects("nodes", group="") if one["metadata"]["name"] == NODE]
    found["metadata"]["labels"] = labels
    node.server.operations.update(resource, ("", NODE), found)


def whole(node: Node, index: int) -> dict[str, Any]:
    [device] = [one for one in node.devices() if one["attributes"].get("index") == {"int": index}]
    return device


def layout_taints(node: Node) -> list[str]:
    return [
        one["name"]
        for one in node.devices()
        for taint in one.get("taints", ())
        if (taint["key"], taint["effect"]) == ("gpu.nvidia.com/mig-layout", "NoSchedule")
    ]


def test_gpus_change_as_they_run_empty_and_no_claim_is_disturbed(node: Node) -> None:
    held = node.allocated_by_hand("held", whole(node, 0)["name"])
    node.ready(held)
    record = node.driver.records.get(held.uid)
    label(node, **{LAYOUT_LABEL: "mixed-inference"})
    # The second GPU is cut; the first one waits for its claim and takes no new one.
    node.wait_devices(4 + 7)
    eventually(lambda: layout_taints(node) == [whole(node, 0)["name"]])
    assert node.machine.gpu(0).mig_mode == 0
    assert node.driver.records.get(held.uid) == record
    node.ready(held)
    states = eventually(lambda: by_label(node.driver.metrics, "nvidia_dra_mig_layout", "layout", "state"))
    assert states.keys() >= {("mixed-inference", "waiting"), ("mixed-inference", "applied")}
    assert eventually(lambda: node.events("MigLayoutWaits"))
    # What other processes show.
    directory = node.driver.settings.plugin_directory
    [text] = eventually(
        lambda: [one.text for one in read_state(directory).layouts if "uses the GPU" in one.text]
    )
    assert text.startswith("claim default/held")
    printed, _, _ = slices_to_publish(CommandMachine(replace(node.settings, kubeconfig=None)))
    assert "gpu.nvidia.com/mig-layout" in str(printed)

    node.must_unprepare(held)
    node.wait_devices(CUT)
    eventually(lambda: not layout_taints(node))
    small = [one for one in node.devices() if one["attributes"].get("profile") == {"string": "1g.10gb"}]
    assert len(small) == 6
    waiting = node.allocated_by_hand("waiting", small[0]["name"])
    node.ready(waiting)
    before = {one["name"] for one in node.devices()}
    node.must_unprepare(waiting)
    node.driver.cleaner.clean_all()
    assert {one["name"] for one in node.devices()} == before

    node.restart_driver(mig_layouts=MIXED)
    node.wait_devices(CUT)
    assert not layout_taints(node)


def test_a_node_with_mig_manager_and_a_layout_that_does_not_fit_are_left_alone(node: Node) -> None:
    label(node, **{LAYOUT_LABEL: "all-balanced", LAYOUT_STATE_LABEL: "success"})
    [event, *_] = eventually(lambda: node.events("MigLayoutRefused"))
    assert "mig-manager runs on this node" in event["message"]
    label(node, **{LAYOUT_LABEL: "all-2g.5gb"})
    eventually(lambda: any("all-2g.5gb" in one["message"] for one in node.events("MigLayoutRefused")))
    assert not layout_taints(node)
    assert len(node.devices()) == 8
    assert not any(node.machine.gpu(number).mig_mode for number in range(8))
