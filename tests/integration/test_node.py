"""The main job end to end, over real sockets and HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dra_driver.model.claim import Failed, Prepared
from tests.integration.conftest import NODE, Node, eventually


def versions(node: Node) -> dict[str, str]:
    return {entry["metadata"]["name"]: entry["metadata"]["resourceVersion"] for entry in node.slices()}


def test_claim_is_prepared_and_taken_back(node: Node) -> None:
    ref = node.claim("one")
    outcome = node.prepare(ref)[ref.uid]
    assert isinstance(outcome, Prepared)
    [device] = outcome.devices
    assert device.pool == NODE
    assert device.requests == ("gpu",)
    assert device.cdi_ids == (f"k8s.gpu.nvidia.com/claim={ref.uid}-{device.device}",)
    [name] = node.specs()
    spec = json.loads((node.cdi / name).read_text())
    assert [entry["name"] for entry in spec["devices"]] == [f"{ref.uid}-{device.device}"]
    assert node.records() == [f"{ref.uid}.json"]
    assert node.unprepare(ref) == {ref.uid: None}
    assert (node.specs(), node.records()) == ([], [])


def test_prepare_twice_gives_the_same_answer_and_repairs_the_spec(node: Node) -> None:
    ref = node.claim("one")
    first = node.prepare(ref)
    [name] = node.specs()
    content = (node.cdi / name).read_bytes()
    (node.cdi / name).unlink()
    assert node.prepare(ref) == first
    assert (node.cdi / name).read_bytes() == content


def test_eight_claims_at_once_get_eight_gpus(node: Node) -> None:
    refs = [node.claim(f"claim-{number}") for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda ref: node.prepare(ref)[ref.uid], refs))
    assert all(isinstance(outcome, Prepared) for outcome in outcomes)
    assert len({outcome.devices[0].device for outcome in outcomes}) == 8


def test_claim_with_devices_of_two_drivers_yields_ours(node: Node) -> None:
    ours = node.devices()[0]["name"]
    results = [
        {"request": "nic", "driver": "nic.example.com", "pool": NODE, "device": "eth1"},
        {"request": "gpu", "driver": "gpu.nvidia.com", "pool": NODE, "device": ours},
    ]
    ref = node.claim("mixed", status={"allocation": {"devices": {"results": results}}})
    outcome = node.prepare(ref)[ref.uid]
    assert [device.device for device in outcome.devices] == [ours]


def test_subrequest_is_answered_by_its_request(node: Node) -> None:
    ref = node.allocated_by_hand("sub", node.devices()[0]["name"], request="gpu/large")
    assert node.prepare(ref)[ref.uid].devices[0].requests == ("gpu",)


def test_admin_access_shares_a_held_device_and_leaves_no_mark_on_it(node: Node) -> None:
    holder = node.claim("holder")
    device = node.prepare(holder)[holder.uid].devices[0].device
    watcher = node.allocated_by_hand("watcher", device, adminAccess=True)
    assert isinstance(node.prepare(watcher)[watcher.uid], Prepared)
    assert node.unprepare(watcher) == {watcher.uid: None}
    assert node.records() == [f"{holder.uid}.json"]


def test_restart_writes_no_slice_and_keeps_claims(node: Node) -> None:
    ref = node.claim("one")
    before = node.prepare(ref)
    published = versions(node)
    writes = len(node.server.writes("resourceslices"))
    assert node.driver is not None
    node.driver.stop()
    assert not list(node.registry.iterdir())
    driver = node.start_driver()
    eventually(lambda: not driver.problems())
    assert versions(node) == published
    assert len(node.server.writes("resourceslices")) == writes
    assert node.prepare(ref) == before
    assert node.unprepare(ref) == {ref.uid: None}
    assert (node.specs(), node.records()) == ([], [])


def test_reboot_makes_the_spec_anew(node: Node) -> None:
    ref = node.claim("one")
    before = node.prepare(ref)
    assert node.driver is not None
    node.driver.stop()
    node.machine.reboot()
    for file in node.cdi.iterdir():
        file.unlink()  # /var/run is gone after a reboot
    node.start_driver()
    assert node.prepare(ref) == before
    assert len(node.specs()) == 1


def test_slices_come_back_when_the_kubelet_wipes_them(node: Node) -> None:
    before = [entry["spec"]["devices"] for entry in node.slices()]
    resource = node.server.resource("resourceslices")
    for entry in node.slices():
        node.server.operations.delete(resource, ("", entry["metadata"]["name"]), {})
    eventually(lambda: [entry["spec"]["devices"] for entry in node.slices()] == before)


def test_mig_device_made_by_hand_is_published_and_prepared(node: Node) -> None:
    node.machine.set_mig_mode(7, on=True)
    eventually(lambda: len(node.devices()) == 7)
    node.machine.create_mig(7, "1g.10gb", 2)
    mig = next(device for device in node.wait_devices(8) if device["attributes"]["type"]["string"] == "mig")
    request = {"requests": [{"name": "mig", "exactly": {"deviceClassName": "mig.nvidia.com"}}]}
    ref = node.claim("mig", request)
    outcome = node.prepare(ref)[ref.uid]
    assert [device.device for device in outcome.devices] == [mig["name"]]
    [name] = node.specs()
    [entry] = json.loads((node.cdi / name).read_text())["devices"]
    paths = [one["path"] for one in entry["containerEdits"]["deviceNodes"]]
    assert paths[0] == "/dev/nvidia7"
    assert len([path for path in paths if path.startswith("/dev/nvidia-caps/nvidia-cap")]) == 2


def test_gpu_in_mig_mode_with_nothing_created_is_not_offered(make_node: Callable[..., Node]) -> None:
    made = make_node("h100-mig-empty")
    made.start_driver()
    eventually(made.slices)
    in_mig_mode = next(row["uuid"] for row in made.machine.describe() if row["mig"].startswith("on"))
    assert in_mig_mode not in {device["attributes"]["uuid"]["string"] for device in made.devices()}


def test_driver_unloaded_and_loaded_again(node: Node) -> None:
    ref = node.claim("one")
    prepared = node.prepare(ref)
    node.machine.unload_driver()
    eventually(lambda: node.devices() == [])
    assert node.prepare(ref) == prepared, "a claim whose spec is in place is answered without NVML"
    other = node.allocated_by_hand("other", "gpu-00000000")
    outcome = node.prepare(other)[other.uid]
    assert isinstance(outcome, Failed)
    assert "devices of this node are not usable now" in outcome.error
    assert node.unprepare(ref) == {ref.uid: None}
    node.machine.load_driver()
    node.wait_devices(8)


def test_daemon_starts_without_nvml_and_devices_come_with_it(make_node: Callable[..., Node]) -> None:
    made = make_node()
    made.machine.unload_driver()
    driver = made.start_driver()
    assert any("driver" in problem for problem in eventually(driver.problems))
    assert made.slices() == []
    made.machine.load_driver()
    made.wait_devices(8)
    eventually(lambda: not driver.problems())


def test_a_driver_without_libcuda_is_told_before_a_claim_fails_of_it(make_node: Callable[..., Node]) -> None:
    made = make_node()
    files = list(made.machine.host_root.rglob("libcuda.so*"))
    for file in files:
        file.rename(file.with_name(f"hidden-{file.name}"))
    driver = made.start_driver()
    made.wait_devices(8)
    what = "no claim can be prepared: libcuda.so.<version> is not below the driver root"
    # Problems of a start, such as a check of the API server that is not over, end by themselves.
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


def test_lost_gpu_hides_no_other(node: Node) -> None:
    def tainted() -> list[tuple[int, str, str]]:
        return [
            (device["attributes"]["index"]["int"], taint["key"], taint["effect"])
            for device in node.devices()
            for taint in device.get("taints", [])
        ]

    node.machine.lose_gpu(3)
    node.driver.discovery.request_rescan()
    eventually(lambda: (3, "gpu.nvidia.com/gpu-lost", "NoSchedule") in tainted())
    eventually(lambda: node.driver.discovery.latest().lost)  # health may have seen it first
    assert len(node.devices()) == 8
    [name] = [one["name"] for one in node.devices() if one["attributes"]["index"]["int"] == 3]
    ref = node.allocated_by_hand("on-lost", name)
    assert "does not answer any more" in node.prepare(ref)[ref.uid].error
    node.machine.restore_gpu(3)
    # At once, as when the scheduler sees that the taint is gone before discovery looked again.
    assert isinstance(node.prepare(ref)[ref.uid], Prepared)
    eventually(lambda: not tainted())


def test_drained_gpu_is_withdrawn(node: Node) -> None:
    node.machine.remove_gpu(3)
    node.wait_devices(7)


def test_two_instances_of_a_rolling_update_share_the_node(make_node: Callable[..., Node]) -> None:
    """Slices stay as they are, but for taints: two instances in one process disturb each other's GPU events. Two
    processes write nothing at all, which tests/e2e/test_slices.py shows.
    """

    def pools() -> dict[str, int]:
        return {entry["metadata"]["name"]: entry["spec"]["pool"]["generation"] for entry in made.slices()}

    made = make_node()
    old = made.start_driver(pod_uid="11111111-1111-1111-1111-111111111111")
    made.wait_devices(8)
    published = pools()
    ref = made.claim("one")
    before = made.prepare(ref)
    made.start_driver(pod_uid="22222222-2222-2222-2222-222222222222")
    made.kubelet.wait_registered("gpu.nvidia.com", count=2)
    assert made.prepare(ref) == before
    old.stop()
    assert made.unprepare(ref) == {ref.uid: None}
    assert pools() == published
    assert made.records() == []


def test_prepare_right_after_a_driver_reload_is_answered_at_once(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session of before is no use, but the kubelet shall not come back in a minute for that."""
    monkeypatch.setattr("dra_driver.inventory.discovery._LOOK_EVERY_S", 30.0)
    made = make_node()
    made.start_driver(dynamic_mig=True)
    eventually(lambda: len(made.devices()) > 8)
    name = next(one["name"] for one in made.devices() if "-mig-1g10gb-19-" in one["name"])
    made.machine.unload_driver()
    made.machine.load_driver()
    ref = made.allocated_by_hand("soon", name)
    assert isinstance(made.prepare(ref)[ref.uid], Prepared)
    assert made.unprepare(ref) == {ref.uid: None}
