"""Usage of the devices of claims, and unclaimed memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dra_driver.errors import DeviceLostError
from dra_driver.model.claim import HeldDevice, PodRef
from dra_driver.model.gpu import THROTTLES, GpuLoad, GpuMeters, GpuProcess, GpuUse, ProcessOrigin
from dra_driver.model.mig import GpuAddress, MigAddress, OwnedInstance, Placement
from dra_driver.model.record import ClaimRecord
from dra_driver.reporting import usage
from dra_driver.reporting.metrics import Metrics
from dra_driver.reporting.rules.claim_usage import unclaimed
from dra_driver.reporting.usage import Usage
from tests.fakes.samples import DRIVER, GPU_0, GPU_1, MIG_1G, MIG_3G, MIXED, NODE, hold, record, uuid
from tests.fakes.scrapes import by_label
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S, eventually

HOST = ProcessOrigin("host")
BUSY = GpuLoad(4 << 30, 80 << 30, 70, 40, 350.0, 700.0)
IDLE = GpuLoad(0, 80 << 30, 0, 30, 70.0, 700.0)
MIG_LOAD = GpuLoad(1 << 30, 10 << 30, 25)
PART = MIG_1G.replace("-0", "-1")  # on demand, next to the static ones
MADE = OwnedInstance(PART, uuid(2), None, 19, "1g.10gb", Placement(1, 1), "boot", "created", 9, 0, "MIG-9")


def is_asked(gpu_uuid: str) -> bool:
    return any(one.name == f"ask NVML (usage of GPU {gpu_uuid})" for one in threading.enumerate())


class Node:
    """Three GPUs, of which the third is cut; claims; and what NVML would return."""

    def __init__(self, *records: ClaimRecord) -> None:
        self.records = {one.ref.uid: one for one in records}
        self.requested: list[tuple[GpuAddress, list[MigAddress]]] = []
        self.processes_read: list[str] = []
        self.uses = {
            uuid(0): GpuUse(BUSY, {}, (GpuProcess(1, "python3", 4 << 30),)),
            uuid(1): GpuUse(IDLE),
            uuid(2): GpuUse(replace(IDLE, utilisation_percent=None)),
        }
        self.hang: dict[str, threading.Event] = {}
        self.hanging: set[str] = set()
        self.now = 0.0
        self.fail: set[str] = set()
        self.origins: dict[int, ProcessOrigin] = {}
        self.usage = Usage(
            self,
            lambda: MIXED,
            lambda: self.records,
            lambda device: MADE if device == PART else None,
            lambda pid: self.origins.get(pid, ProcessOrigin("container")),
            within_s=PATIENCE_S,
        )

    def read(self, gpu: GpuAddress, devices: Collection[MigAddress]) -> GpuUse:
        self.requested.append((gpu, sorted(devices)))
        if gpu.uuid in self.hang:
            self.hanging.add(gpu.uuid)
            assert self.hang[gpu.uuid].wait(PATIENCE_S)
            self.hanging.remove(gpu.uuid)
        if gpu.uuid in self.fail:
            raise DeviceLostError("it fell off the bus")
        return self.uses[gpu.uuid]

    def hangs_at(self, gpu_uuid: str, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        """Its reads do not return before the event. The time for a look ends when the other GPUs have answered."""
        monkeypatch.setattr(usage, "time", SimpleNamespace(monotonic=self._end))
        self.hang[gpu_uuid] = threading.Event()
        return self.hang[gpu_uuid]

    def _end(self) -> float:
        eventually(lambda: {one for one in self.uses if is_asked(one)} == self.hanging)
        self.now += PATIENCE_S
        return self.now

    def read_processes(self, gpu: GpuAddress) -> GpuUse:
        self.processes_read.append(gpu.uuid)
        return GpuUse(GpuLoad(), {}, self.read(gpu, ()).processes)

    def metrics(self) -> Metrics:
        metrics = Metrics(DRIVER, NODE, list)
        metrics.show.usage(self.usage.look)
        return metrics

    def values(self, name: str) -> dict[str, float]:
        return {key[0]: value for key, value in by_label(self.metrics(), name, "device").items()}


def test_gpus_that_answer_soon_are_read_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "_APART_S", PATIENCE_S)
    node = Node()
    at_once: list[int] = []
    reading: list[str] = []

    def read(gpu: GpuAddress, _devices: Collection[MigAddress]) -> GpuUse:
        reading.append(gpu.uuid)
        at_once.append(len(reading))
        time.sleep(0.01)
        reading.remove(gpu.uuid)
        return node.uses[gpu.uuid]

    node.read = read  # type: ignore[method-assign]
    assert node.usage.look().gpus.keys() == node.uses.keys()
    assert at_once == [1, 1, 1]


def test_each_device_of_a_prepared_claim_has_its_use_once() -> None:
    twice = replace(hold(GPU_0), share_id="s-1"), replace(hold(GPU_0), share_id="s-2")
    node = Node(
        record(*twice, uid="a"),
        record(hold(GPU_1), uid="b", phase="preparing"),
        record(replace(hold(GPU_1), admin_access=True), uid="monitor"),
    )
    assert by_label(
        node.metrics(),
        "nvidia_dra_device_utilization_ratio",
        "device",
        "device_type",
        "uuid",
        "parent_uuid",
        "shared",
    ) == {(GPU_0, "gpu", uuid(0), uuid(0), "false"): 0.7}
    assert node.values("nvidia_dra_device_memory_used_bytes") == {GPU_0: 4 << 30}
    assert node.values("nvidia_dra_device_memory_total_bytes") == {GPU_0: 80 << 30}
    assert node.values("nvidia_dra_device_processes") == {GPU_0: 1}
    assert node.values("nvidia_dra_device_gpu_fraction") == {GPU_0: 1}


def test_every_gpu_is_measured_and_names_the_claim_and_pod_that_have_it() -> None:
    pods = PodRef("pod-0", "uid-0"), PodRef("pod-1", "uid-1")
    alone, together = record(hold(GPU_0), uid="a"), record(hold(GPU_1), hold(MIG_1G), uid="b")
    node = Node(
        replace(alone, claim=replace(alone.claim, pods=pods[:1])),
        replace(together, claim=replace(together.claim, pods=pods)),
        record(replace(hold(GPU_0), admin_access=True), uid="monitor"),
        record(hold(GPU_1), uid="c", phase="preparing"),
    )
    meters = GpuMeters(12.5, nvlink_sent_bytes=7, throttles=frozenset({"hw_slowdown"}))
    node.uses[uuid(0)] = replace(node.uses[uuid(0)], meters=meters)
    metrics = node.metrics()
    labels = "gpu", "uuid", "namespace", "claim", "pod"
    names = alone.ref.namespace, alone.ref.name, together.ref.name
    gpus = {
        0: ("0", uuid(0), *names[:2], "pod-0"), 1: ("1", uuid(1), names[0], names[2], ""),
        2: ("2", uuid(2), "", "", ""),
    }  # fmt: skip
    values = {
        "temperature_celsius": (40, 30, 30),
        "power_watts": (350, 70, 70),
        "memory_used_bytes": (4 << 30, 0, 0),
    }
    for name, of_gpus in values.items():
        found = by_label(metrics, f"nvidia_dra_gpu_{name}", *labels)
        assert found == {gpus[index]: value for index, value in enumerate(of_gpus)}
    # A GPU in MIG mode has no utilisation, and only the first one was asked for its meters.
    assert by_label(metrics, "nvidia_dra_gpu_utilization_ratio", *labels) == {gpus[0]: 0.7, gpus[1]: 0}
    assert by_label(metrics, "nvidia_dra_gpu_energy_joules_total", *labels) == {gpus[0]: 12.5}
    assert by_label(metrics, "nvidia_dra_gpu_nvlink_bytes_total", "direction") == {("sent",): 7}
    throttled = by_label(metrics, "nvidia_dra_gpu_throttled", "uuid", "reason")
    assert throttled == {(uuid(0), one): int(one == "hw_slowdown") for one in THROTTLES}


def test_gpu_without_an_answer_loses_only_its_own_series(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    end = node.hangs_at(uuid(0), monkeypatch)
    node.fail.add(uuid(1))
    assert by_label(node.metrics(), "nvidia_dra_gpu_temperature_celsius", "uuid") == {(uuid(2),): 30}
    assert is_asked(uuid(0))
    end.set()


def test_gpu_that_two_claims_share_names_neither() -> None:
    shared = [record(hold(GPU_0), uid="a"), record(hold(GPU_0), uid="b")]
    shared[1] = replace(shared[1], claim=replace(shared[1].claim, ref=replace(shared[1].ref, name="other")))
    found = by_label(Node(*shared).metrics(), "nvidia_dra_gpu_power_watts", "uuid", "claim")
    assert found[uuid(0), ""] == 350


def test_device_of_several_claims_says_that_its_use_is_shared() -> None:
    node = Node(record(hold(GPU_0), uid="a"), record(hold(GPU_0), uid="b"), record(hold(GPU_1), uid="c"))
    assert by_label(node.metrics(), "nvidia_dra_device_utilization_ratio", "device", "shared") == {
        (GPU_0, "true"): 0.7, (GPU_1, "false"): 0,
    }  # fmt: skip


def test_mig_devices_have_their_own_use() -> None:
    node = Node(record(hold(MIG_1G), hold(MIG_3G), hold(MIG_3G, uuid="", device=PART)))
    first, other = hold(MIG_1G).uuid, hold(MIG_3G).uuid
    node.uses[uuid(2)] = GpuUse(
        replace(IDLE, utilisation_percent=None),
        {first: MIG_LOAD, "MIG-9": replace(MIG_LOAD, utilisation_percent=None)},
        (GpuProcess(1, "a", 1, 7), GpuProcess(2, "b", 1, 7), GpuProcess(3, "c", 1, 9)),
    )
    assert node.values("nvidia_dra_device_utilization_ratio") == {MIG_1G: 0.25}
    assert node.values("nvidia_dra_device_memory_used_bytes") == {MIG_1G: 1 << 30, PART: 1 << 30}
    assert node.values("nvidia_dra_device_processes") == {MIG_1G: 2, PART: 1}
    fractions = node.values("nvidia_dra_device_gpu_fraction")
    assert fractions == {MIG_1G: 9984 / 81559, MIG_3G: 40448 / 81559}
    (devices,) = {tuple(devices) for gpu, devices in node.requested if gpu.uuid == uuid(2)}
    assert devices == tuple(sorted([(first, 7, 0), (other, 2, 0), ("MIG-9", 9, 0)]))


def test_gpu_that_hangs_is_left_out_and_not_read_again_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(record(hold(GPU_0), hold(GPU_1)))
    end = node.hangs_at(uuid(0), monkeypatch)
    assert node.values("nvidia_dra_device_utilization_ratio") == {GPU_1: 0}
    del node.hang[uuid(0)]
    for _ in range(3):
        assert node.values("nvidia_dra_device_utilization_ratio") == {GPU_1: 0}
        assert node.values("nvidia_dra_device_gpu_fraction") == {GPU_0: 1, GPU_1: 1}
    assert sum(gpu.uuid == uuid(0) for gpu, _ in node.requested) == 1
    assert is_asked(uuid(0))
    end.set()
    eventually(lambda: not is_asked(uuid(0)))
    assert node.values("nvidia_dra_device_utilization_ratio") == {GPU_0: 0.7, GPU_1: 0}


def test_memory_that_no_one_claims_is_counted_on_every_gpu() -> None:
    node = Node(record(hold(GPU_0)))
    node.uses[uuid(1)] = GpuUse(
        IDLE, {}, (GpuProcess(5, "train", 3 << 30), GpuProcess(6, "x", 1 << 30), GpuProcess(7, "y"))
    )
    node.origins = {1: ProcessOrigin(), 5: HOST, 6: ProcessOrigin(), 7: ProcessOrigin()}
    assert by_label(node.metrics(), "nvidia_dra_unclaimed_memory_bytes", "uuid") == {
        (uuid(0),): 0, (uuid(1),): 4 << 30, (uuid(2),): 0,
    }  # fmt: skip


def test_a_claim_that_only_observes_a_gpu_hides_no_memory_there() -> None:
    """A monitor observes every GPU (adminAccess); the memory of a process that has exited is still unclaimed."""
    for monitor, expected in ((replace(hold(GPU_0), admin_access=True), [1]), (hold(GPU_0), [])):
        node = Node(record(monitor))
        node.origins = {1: ProcessOrigin()}
        assert [process.pid for process in node.usage.look().unclaimed[uuid(0)]] == expected


def test_search_for_memory_that_no_one_claims_reads_processes_only() -> None:
    node = Node(record(hold(GPU_0), hold(MIG_1G)))
    node.uses[uuid(1)] = GpuUse(BUSY, {}, (GpuProcess(5, "train", 3 << 30),))
    node.uses[uuid(2)] = GpuUse(BUSY, {}, None)
    node.origins = {5: HOST}
    node.fail.add(uuid(0))
    assert node.usage.unclaimed() == {uuid(1): [GpuProcess(5, "train", 3 << 30)]}
    assert sorted(node.processes_read) == [uuid(0), uuid(1), uuid(2)]
    assert len(node.requested) == 3


def test_gpu_that_hangs_in_a_scrape_is_not_read_by_the_search_either(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(record(hold(GPU_0), hold(GPU_1)))
    end = node.hangs_at(uuid(0), monkeypatch)
    assert uuid(0) not in node.usage.look().unclaimed
    assert is_asked(uuid(0))
    del node.hang[uuid(0)]
    assert node.usage.unclaimed().keys() == {uuid(1), uuid(2)}
    assert uuid(0) not in node.processes_read
    end.set()


def test_without_the_processes_of_the_host_none_are_reported() -> None:
    node = Node(record(hold(GPU_0)))
    node.uses = {gpu: replace(use, processes=None) for gpu, use in node.uses.items()}
    assert node.values("nvidia_dra_device_utilization_ratio") == {GPU_0: 0.7}
    assert node.values("nvidia_dra_device_processes") == {}
    assert by_label(node.metrics(), "nvidia_dra_unclaimed_memory_bytes", "uuid") == {}


PLACES = {(uuid(0), None), (uuid(2), 7)}


@tabled("gpu", "process", "where", "expected")
def test_a_process_is_unclaimed(gpu: int, process: list[Any], where: Any, expected: bool) -> None:
    origins = {process[0]: ProcessOrigin(where)}
    assert bool(unclaimed(uuid(gpu), [GpuProcess(*process)], PLACES, origins)) is expected


A, B = PodRef("train-0", "uid-a"), PodRef("serve-0", "uid-b")


def pod_values(node: Node, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    return by_label(node.metrics(), f"nvidia_dra_pod_{name}", *labels or ("pod",))


def of_pods(name: str, *pods: PodRef, devices: Sequence[HeldDevice] | None = None) -> ClaimRecord:
    made = record(*devices or [hold(GPU_0)], uid=name)
    return replace(made, claim=replace(made.claim, pods=pods))


def shared_node(*processes: GpuProcess) -> Node:
    """Two claims, each of one pod, share the first GPU. Processes 10 and 11 are of the first pod, 20 of the second."""
    node = Node(of_pods("a", A), of_pods("b", B))
    node.origins = {pid: ProcessOrigin("container", A.uid if pid < 20 else B.uid) for pid in (10, 11, 20)}
    node.origins[30] = HOST
    node.uses[uuid(0)] = GpuUse(BUSY, {}, processes)
    return node


def test_two_pods_that_share_a_gpu_are_distinguished() -> None:
    node = shared_node(
        GpuProcess(10, "a", 1 << 30, None, 40),
        GpuProcess(11, "a", 2 << 30, None, 80),
        GpuProcess(20, "b", 4 << 30, None, 5),
        GpuProcess(30, "x", 8 << 30, None, 5),
    )
    assert pod_values(node, "utilization_ratio", "namespace", "pod", "claim", "device") == {
        ("default", A.name, "claim-a", GPU_0): 1.0, ("default", B.name, "claim-b", GPU_0): 0.05,
    }  # fmt: skip
    assert pod_values(node, "memory_used_bytes") == {(A.name,): 3 << 30, (B.name,): 4 << 30}
    assert pod_values(node, "processes") == {(A.name,): 2, (B.name,): 1}


def test_pod_without_a_process_is_idle() -> None:
    node = shared_node(GpuProcess(20, "b", 4 << 30, None, 5))
    assert pod_values(node, "utilization_ratio") == {(A.name,): 0, (B.name,): 0.05}
    assert pod_values(node, "processes") == {(A.name,): 0, (B.name,): 1}


def test_utilisation_that_nvml_lacks_for_one_process_is_absent_for_all_pods_and_memory_for_its_own() -> None:
    node = shared_node(
        GpuProcess(10, "a", None, None, 40), GpuProcess(11, "a", 1), GpuProcess(20, "b", 7, None, 5)
    )
    assert pod_values(node, "utilization_ratio") == {}
    assert pod_values(node, "memory_used_bytes") == {(B.name,): 7}
    assert pod_values(node, "processes") == {(A.name,): 2, (B.name,): 1}


def test_busy_gpu_without_a_process_is_not_an_idle_pod() -> None:
    node = shared_node()
    assert pod_values(node, "utilization_ratio") == {}
    node.uses[uuid(0)] = GpuUse(IDLE)
    assert pod_values(node, "utilization_ratio") == {(A.name,): 0, (B.name,): 0}


@pytest.mark.parametrize(
    "origin", [ProcessOrigin(), ProcessOrigin("container"), ProcessOrigin("container", "new")]
)
def test_pod_is_not_idle_while_a_process_of_no_known_pod_keeps_its_gpu_busy(origin: ProcessOrigin) -> None:
    node = shared_node(GpuProcess(10, "a", 1, None, 40), GpuProcess(12, "x", 5, None, 50))
    node.origins[12] = origin
    assert pod_values(node, "utilization_ratio") == {}
    assert pod_values(node, "processes") == {(A.name,): 1}
    node.uses[uuid(0)] = GpuUse(BUSY, {}, (GpuProcess(10, "a", 1, None, 40), GpuProcess(12, "x", 5, None, 0)))
    assert pod_values(node, "utilization_ratio") == {(A.name,): 0.4}


def test_of_many_pods_those_with_processes_and_sixteen_others_are_counted() -> None:
    node = shared_node(GpuProcess(10, "a", 1, None, 40))
    node.records = {
        "a": of_pods("a", *(PodRef(f"idle-{number}", f"uid-{number}") for number in range(100)), A)
    }
    found = pod_values(node, "utilization_ratio")
    assert len(found) == 17
    assert found[A.name,] == 0.4


def test_pods_of_one_claim_are_distinguished_and_one_with_two_claims_has_no_claim_name() -> None:
    node = shared_node(GpuProcess(10, "a", 1, None, 40), GpuProcess(20, "b", 1, None, 50))
    node.records["a"] = of_pods("a", A, B)
    assert pod_values(node, "utilization_ratio", "pod", "claim") == {
        (A.name, "claim-a"): 0.4,
        (B.name, ""): 0.5,
    }


def test_pods_on_mig_devices_have_the_memory_of_their_own_instance() -> None:
    node = Node(of_pods("a", A, devices=(hold(MIG_1G), hold(MIG_3G))))
    node.origins = {pid: ProcessOrigin("container", A.uid) for pid in (10, 11)}
    node.uses[uuid(2)] = GpuUse(IDLE, {}, (GpuProcess(10, "a", 5, 7), GpuProcess(11, "b", 6, 8)))
    assert pod_values(node, "memory_used_bytes", "device") == {(MIG_1G,): 5, (MIG_3G,): 0}
    assert pod_values(node, "utilization_ratio") == {}
