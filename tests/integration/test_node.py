"""The main use case end to end, over real sockets and HTTP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from playground.node import DRIVER

from dra_driver.kubelet.plugin import PluginSettings
from dra_driver.model.claim import Failed
from tests.fakes.waiting import eventually
from tests.integration.conftest import Node
from tests.kubelet.support import OtherDriver


def test_driver_unloaded_and_loaded_again(node: Node) -> None:
    ref = node.claim("one")
    prepared = node.ready(ref)
    node.machine.unload_driver()
    node.wait_devices(0)
    assert node.ready(ref) == prepared, "a claim whose spec is in place is answered without NVML"
    node.refused(node.allocated_by_hand("other", "gpu-00000000"), "devices of this node are not usable now")
    node.must_unprepare(ref)
    node.machine.load_driver()
    node.wait_devices(8)


def test_daemon_starts_without_nvml_and_devices_come_with_it(make_node: Callable[..., Node]) -> None:
    made = make_node()
    made.machine.unload_driver()
    driver = made.start_driver()
    # Problems of a start, such as a running check of the API server, may be reported earlier.
    eventually(lambda: any("driver" in problem for problem in driver.problems()))
    assert made.slices() == []
    made.machine.load_driver()
    made.wait_devices(8)
    eventually(lambda: not driver.problems())


def test_a_driver_without_libcuda_is_reported_before_a_claim_fails_of_it(
    make_node: Callable[..., Node],
) -> None:
    made = make_node()
    files = list(made.machine.host_root.rglob("libcuda.so*"))
    for file in files:
        file.rename(file.with_name(f"hidden-{file.name}"))
    driver = made.running().driver
    what = "no claim can be prepared: libcuda.so.<version> is not below the driver root"
    # Problems of a start, such as a running check of the API server, end by themselves.
    eventually(lambda: [problem.startswith(what) for problem in driver.problems()] == [True])
    [problem] = driver.problems()
    assert driver.probes.readiness() == [], "a rolling update goes on: the new release is not the cause"
    ref = made.claim("one")
    assert problem.partition(": ")[2] in str(made.prepare(ref)[ref.uid])
    for file in files:
        file.with_name(f"hidden-{file.name}").rename(file)
    driver.discovery.request_rescan()
    eventually(lambda: not driver.problems())
    assert not isinstance(made.prepare(ref)[ref.uid], Failed)


def test_gpu_that_is_back_serves_before_discovery_has_looked_again(node: Node) -> None:
    """As if the scheduler sees earlier that the taint is gone."""
    [name] = [one["name"] for one in node.devices() if one["attributes"]["index"]["int"] == 3]
    node.machine.lose_gpu(3)
    node.driver.discovery.request_rescan()
    eventually(lambda: node.driver.discovery.latest().lost)
    ref = node.allocated_by_hand("on-lost", name)
    node.refused(ref, "which no longer answers")
    node.machine.restore_gpu(3)
    node.ready(ref)


def test_prepare_right_after_a_driver_reload_is_answered_at_once(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier session is invalid, but the kubelet should not have to wait a minute for a retry."""
    monkeypatch.setattr("dra_driver.inventory.discovery._CHECK_EVERY_S", 30.0)
    made = make_node().running(8 * 26, dynamic_mig=True)
    name = next(one["name"] for one in made.devices() if "-mig-1g10gb-19-" in one["name"])
    made.machine.unload_driver()
    made.machine.load_driver()
    ref = made.allocated_by_hand("soon", name)
    made.ready(ref)
    made.must_unprepare(ref)


def test_links_in_dev_char_are_there_from_the_start_and_before_a_prepare_answers(
    make_node: Callable[..., Node],
) -> None:
    node = make_node().running(pod_uid="uid-1")
    links = node.machine.host_root / "dev/char"
    made = {path.name: str(path.readlink()) for path in links.iterdir()}
    assert made.items() >= {"195:0": "../nvidia0", "195:7": "../nvidia7", "195:255": "../nvidiactl"}.items()
    for name in made:
        (links / name).unlink()
    node.ready(node.allocated_by_hand("held", next(device["name"] for device in node.devices())))
    uvm = node.machine.current().system["uvm_major"]
    expected = {
        "195:0": "../nvidia0",
        "195:254": "../nvidia-modeset",
        "195:255": "../nvidiactl",
        f"{uvm}:0": "../nvidia-uvm",
        f"{uvm}:1": "../nvidia-uvm-tools",
    }
    # Discovery may already have created the links of the other GPUs again.
    assert {path.name: str(path.readlink()) for path in links.iterdir()}.items() >= expected.items()


def test_links_in_dev_char_are_not_made_where_that_is_switched_off(make_node: Callable[..., Node]) -> None:
    node = make_node().running(dev_char_links=False)
    node.ready(node.claim("one"))
    assert list((node.machine.host_root / "dev/char").iterdir()) == []


@pytest.mark.parametrize("event", ["prepare", "look"])
def test_status_that_was_removed_from_a_claim_is_back_after_its_next_read(node: Node, event: str) -> None:
    """By a Prepare, or by the reconciler, which reads the claims of the node every ten minutes."""
    ref = node.claim("c")
    claims = node.server.resource("resourceclaims")

    def reported() -> list[Any]:
        status = node.server.objects("resourceclaims")[0]["status"]
        return [entry["device"] for entry in status.get("devices") or ()]

    [device] = node.ready(ref).devices
    eventually(lambda: reported() == [device.device])
    stored = node.server.objects("resourceclaims")[0]
    del stored["status"]["devices"]
    node.server.operations.update(claims, ("default", "c"), stored, status=True)
    assert reported() == []
    if event == "prepare":
        node.ready(ref)
    else:
        assert node.driver.claims.reconciler.check() is None
    eventually(lambda: reported() == [device.device])


def test_foreign_driver_is_shown_by_event_note_metric_and_page_until_it_is_gone(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.app.daemon.PluginSettings", partial(PluginSettings, guard_s=0.05))
    monkeypatch.setattr("dra_driver.reporting.node_problems._TURN_S", 0.05)
    node = make_node().running(pod_uid="uid-1")
    registrar = node.registry / f"{DRIVER}-reg.sock"

    def shown() -> tuple[bool, bool, bool]:
        return (
            "foreign-driver" in node.driver.node_problems.codes(),
            any(str(registrar) in note for note in node.driver.probes.notes()),
            b'"foreign-driver"' in node.driver.node_problems.as_json(),
        )

    assert shown() == (False, False, False)
    other = OtherDriver(registrar, node.plugin_dir / "dra.sock", name=DRIVER)
    try:
        eventually(lambda: node.events("ForeignDriver"))
        eventually(lambda: shown() == (True, True, True))  # its second socket may be seen later
        assert node.driver.probes.is_ready(), "a rolling update of this plugin goes on"
    finally:
        other.stop()
    eventually(lambda: node.events("ForeignDriverGone"))
    assert shown() == (False, False, False)
