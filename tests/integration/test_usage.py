"""How devices of claims are used, in the metrics of a whole node."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from dra_driver.base.fields import Codec
from dra_driver.model.claim import ClaimRef
from dra_driver.reporting.receipts import KeptReceipts, read_kept, receipt_store
from dra_driver.reporting.rules.receipts import Part, Receipt
from dra_driver.simulator import Machine
from tests.fakes.machines import Work, assert_done
from tests.fakes.scrapes import by_label
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.integration.conftest import DRIVER, Node, own_address, page
from tests.integration.test_process import call

UTILISATION = "nvidia_dra_device_utilization_ratio"


def ratios(node: Node) -> dict[str, float]:
    return {
        device: value for (device,), value in by_label(node.driver.metrics, UTILISATION, "device").items()
    }


def test_mig_device_on_demand_is_measured_between_scrapes(make_node: Callable[..., Node]) -> None:
    node = make_node("hgx-h100-4")
    node.start_driver(dynamic_mig=True)
    device = eventually(lambda: [one["name"] for one in node.devices() if "-mig-1g10gb-19-" in one["name"]])[
        0
    ]
    node.ready(node.allocated_by_hand("part", device))
    gpu = _gpu_of(node.machine)
    instance = node.machine.gpu(gpu).instances[0].id
    node.machine.hold_gpu(gpu, 4711, "python3", gpu_instance=instance, utilisation=60)
    assert ratios(node) == {}, "the first look has nothing to compare with"
    assert eventually(lambda: ratios(node)) == {device: 0.6}
    processes = by_label(node.driver.metrics, "nvidia_dra_device_processes", "device")
    assert processes == {(device,): 1}


def _gpu_of(machine: Machine) -> int:
    return next(index for index in range(4) if machine.gpu(index).instances)


def test_scrape_that_hangs_on_a_gpu_delays_no_prepare_on_it(node: Node) -> None:
    names = [device["name"] for device in node.devices()]
    node.ready(node.allocated_by_hand("one", names[1]))
    node.machine.set_fault("nvmlDeviceGetPowerUsage", delay_s=600, gpu=node.machine.gpu(0).uuid)
    assert ratios(node) == {names[1]: 0}
    node.ready(node.allocated_by_hand("two", names[0]))
    hanging = [thread for thread in threading.enumerate() if thread.name.startswith("ask NVML (usage of GPU")]
    assert len(hanging) == 1, "it has not waited for the end of the scrape's call"
    assert ratios(node) == {names[1]: 0}
    node.machine.clear_faults()


def test_every_gpu_is_measured_without_a_claim(node: Node) -> None:
    """AI conformance: utilisation and memory of each accelerator; temperature, power and interconnect."""
    uuids = [gpu.uuid for gpu in node.machine.current().shown]
    node.machine.hold_gpu(0, 4711, "python3", utilisation=50, memory_mib=1024)
    metrics = node.driver.metrics
    seen = {
        name: by_label(metrics, f"nvidia_dra_gpu_{name}", "uuid")
        for name in (
            "utilization_ratio", "memory_used_bytes", "memory_total_bytes", "temperature_celsius", "power_watts",
            "energy_joules_total",
        )
    }  # fmt: skip
    assert {tuple(key for (key,) in values) for values in seen.values()} == {tuple(uuids)}
    assert [*seen["utilization_ratio"].values()] == [0.5] + [0.0] * (len(uuids) - 1)
    assert seen["memory_used_bytes"][uuids[0],] == 1 << 30
    assert seen["power_watts"][uuids[0],] > seen["power_watts"][uuids[1],] > 0
    for traffic in ("nvlink_bytes_total", "pcie_bytes_total"):
        found = by_label(metrics, f"nvidia_dra_gpu_{traffic}", "uuid", "direction")
        assert len(found) == 2 * len(uuids)
        assert found[uuids[0], "sent"] > 0
    node.machine.set_fault("nvmlDeviceGetTemperature*", delay_s=600, gpu=uuids[0])
    left = by_label(metrics, "nvidia_dra_gpu_temperature_celsius", "uuid")
    assert left.keys() == {(uuid,) for uuid in uuids[1:]}
    node.machine.clear_faults()


def test_receipts_of_ended_claims_are_in_the_file_and_the_command(node: Node) -> None:
    first, second = (device["name"] for device in node.devices()[:2])
    refs = [node.allocated_by_hand("train", first), node.allocated_by_hand("idle", second)]
    for ref in refs:
        node.ready(ref)
    busy = next(index for index in range(8) if node.machine.gpu(index).uuid == _uuid_of(node, first))
    node.machine.hold_gpu(busy, 4711, "python3", utilisation=80)
    seconds = "nvidia_dra_claim_busy_gpu_seconds_total"
    eventually(lambda: any(by_label(node.driver.metrics, seconds, "namespace").values()))
    for ref in refs:
        node.must_unprepare(ref)
    node.restart_driver()
    done = call("claims", "--ended", "-o", "json", *node.machine_flags)
    assert done.returncode == 0, done.stderr
    found = {one["name"]: one for one in json.loads(done.stdout)["ended"]}
    assert found.keys() == {"train", "idle"}
    assert {one["end"] for one in found.values()} == {"ended"}
    [train], [idle] = found["train"]["parts"], found["idle"]["parts"]
    assert train["gpu_seconds"] >= train["busy_gpu_seconds"] > 0
    assert idle["busy_gpu_seconds"] == 0
    assert train["peak_memory_bytes"] == 512 << 20
    text = call("claims", "--ended", *node.machine_flags).stdout
    assert "/train  ended 20" in text
    assert "1 x NVIDIA H100 80GB HBM3" in text


OFTEN = """
import dra_driver.reporting.node_problems as problems
import dra_driver.reporting.receipts as receipts
problems._TURN_S, receipts._MEASURE_S, receipts._WRITE_S = 0.2, 1.0, 2.0
"""
"""The plugin measures and writes ten times as often, so that claims of seconds are like claims of minutes."""


def test_receipts_agree_with_what_the_gpus_did_although_the_plugin_was_killed(
    make_node: Callable[..., Node],
) -> None:
    """A busy claim and an idle one, and one whose pod is killed together with the plugin."""
    node = make_node("hgx-h100-4")
    process = node.spawn(before=OFTEN)
    node.kubelet.wait_registered(DRIVER)
    node.wait_devices(4)
    for index, percent in ((0, 80), (2, 60)):
        node.machine.hold_gpu(index, 4711 + index, "python3", utilisation=percent)
    names = ("busy", "idle", "killed")
    refs = {
        name: node.allocated_by_hand(name, f"gpu-{node.machine.gpu(index).uuid[4:12]}")
        for index, name in enumerate(names)
    }
    begun, ended = {}, {}
    for index, name in enumerate(names):
        before = Work.of(node.machine, index)
        node.ready(refs[name])
        begun[name] = before, Work.of(node.machine, index)

    def ran_for(*wanted: str) -> float:
        running = {one.claim.name: one for one in read_kept(node.plugin_dir).running}
        return min(running[name].parts[0].gpu_s if name in running else 0.0 for name in wanted)

    def end(*wanted: str) -> None:
        for name in wanted:
            before = Work.of(node.machine, names.index(name))
            node.must_unprepare(refs[name])
            ended[name] = before, Work.of(node.machine, names.index(name))

    eventually(lambda: ran_for(*names) > 8)
    process.kill()
    process.wait()
    node.machine.release_gpu(2)
    eventually(lambda: not any(one.connected for one in node.kubelet.instances(DRIVER)))
    process = node.spawn(before=OFTEN)
    eventually(lambda: any(one.connected for one in node.kubelet.instances(DRIVER)))
    end("killed")
    eventually(lambda: ran_for("busy", "idle") > 16)
    end("busy", "idle")
    process.terminate()
    process.wait(PATIENCE_S)

    done = call("claims", "--ended", "-o", "json", *node.machine_flags)
    found = {one["name"]: one for one in json.loads(done.stdout)["ended"]}
    for name in names:
        [part] = found[name]["parts"]
        assert_done(part, begun[name], ended[name])
        assert (found[name]["end"], part["peak_memory_bytes"]) == (
            "ended",
            0 if name == "idle" else 512 << 20,
        )


def test_advice_is_on_a_page_and_in_a_command(make_node: Callable[..., Node]) -> None:
    node, address = make_node("hgx-h100-4"), own_address()
    part = Part(
        "NVIDIA H100 80GB HBM3", "gpu", 1, None, 3600, 180, 3600, peak_bytes=6 << 30, memory_bytes=80 << 30
    )
    old = Receipt(ClaimRef("team", "serve", "uid-old"), 1e9, 1e9 + 3600, (part,), "ended")
    node.plugin_dir.mkdir(parents=True)
    store = receipt_store(node.plugin_dir)
    store.write("receipts", KeptReceipts(ended=(Codec(Receipt).encode(old),)), durable=False, whole=True)
    store.close()
    node.start_driver(dynamic_mig=True, http_endpoint=address)
    expected = {
        "namespace": "team", "name": "serve", "uid": "uid-old", "end": "ended", "seconds": 3600.0, "advice": "profile",
        "text": "1g.10gb is enough instead of NVIDIA H100 80GB HBM3: it has 9.8 GiB, for a peak of 6.0 GiB and 20 % "
        "more, and 12 % of the GPU's multiprocessors, for kernels that need 5 % at most",
        "change": [
            "deviceClassName: mig.nvidia.com",
            'expression: device.attributes["gpu.nvidia.com"].profile == "1g.10gb"',
        ],
    }  # fmt: skip
    assert json.loads(page(address, "/advice", "profile")) == {"advice": [expected]}
    node.driver.stop()
    done = call("claims", "--advise", "-o", "json", *node.machine_flags)
    assert json.loads(done.stdout) == {"advice": [expected]}, done.stderr
    assert call("claims", "--advise", *node.machine_flags).stdout.splitlines()[2:] == [
        f"        {line}" for line in expected["change"]
    ]


def _uuid_of(node: Node, device: str) -> str:
    [found] = [one for one in node.devices() if one["name"] == device]
    return str(found["attributes"]["uuid"]["string"])
