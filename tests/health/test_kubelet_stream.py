"""The stream of device health, directly and at the kubelet's socket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import grpc
import pytest

from dra_driver.health import gpu_health as module
from dra_driver.health.gpu_health import HealthStream
from dra_driver.health.rules.state import observe
from dra_driver.health.rules.taints import MadeInstance
from dra_driver.kubelet.pb import dra_health_v1_pb2 as v1
from dra_driver.kubelet.pb import dra_health_v1alpha1_pb2 as v1alpha1
from dra_driver.kubelet.plugin import KubeletPlugin
from dra_driver.model.health import (
    HealthState,
    HealthStates,
    HealthTarget,
    Observation,
    Severity,
    Unreachable,
    Xid,
)
from dra_driver.model.inventory import Inventory, OfferedDevice
from tests.fakes.samples import (
    GPU_0,
    GPU_1,
    MIG_1G,
    MIG_3G,
    MIXED,
    VFIO_0,
    VFIO_1,
    bound,
    card,
    h100,
    inventory,
    uuid,
)
from tests.fakes.waiting import PATIENCE_S
from tests.kubelet.support import channel, made_node

NOW = 1_800_000_000


class Book:
    """Health that a test sets."""

    def __init__(self) -> None:
        self.known: dict[HealthTarget, HealthState] = {}
        self.looks: dict[str, int] = {uuid(number): NOW for number in range(4)}
        self.stale: set[str] = set()

    def states(self) -> HealthStates:
        return dict(self.known)

    def answered_at(self, gpu_uuid: str) -> int | None:
        return self.looks.get(gpu_uuid)

    def is_fresh(self, gpu_uuid: str) -> bool:
        return gpu_uuid in self.looks and gpu_uuid not in self.stale

    def see(self, observation: Observation, *target: object) -> None:
        key = HealthTarget(*target)
        state = observe(self.known.get(key, HealthState(key)), observation, NOW)
        self.known = self.known | {key: state}  # a stream may copy the old one now


class Context:
    """A call of the kubelet's, until it hangs up."""

    def __init__(self) -> None:
        self.active = True
        self.callbacks: list[Callable[[], None]] = []

    def is_active(self) -> bool:
        return self.active

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.callbacks.append(callback)
        return self.active

    def cancel(self) -> None:
        self.active = False
        for callback in self.callbacks:
            callback()


def stream_of(
    devices: Callable[[], Iterable[OfferedDevice]], book: Book, instances: dict[str, MadeInstance]
) -> HealthStream:
    return HealthStream("node-a", book, devices, lambda: instances)


class Bench:
    def __init__(self) -> None:
        self.book = Book()
        self.inventory: Inventory = MIXED
        self.instances: dict[str, MadeInstance] = {}
        self.stream = stream_of(self.devices, self.book, self.instances)

    def devices(self) -> Iterable[OfferedDevice]:
        return self.inventory.devices()

    def now(self) -> dict[str, tuple[int, str]]:
        """Health and message by device name."""
        return _by_name(self.stream.snapshot())


def _by_name(response) -> dict[str, tuple[int, str]]:
    return {item.device.device_name: (item.health, item.message) for item in response.devices}


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_every_published_device_is_reported(bench):
    response = bench.stream.snapshot()
    assert _by_name(response) == dict.fromkeys((GPU_0, GPU_1, MIG_1G, MIG_3G), (v1.HEALTHY, ""))
    assert {item.device.pool_name for item in response.devices} == {"node-a"}
    assert {(item.last_updated_time, item.health_check_timeout_seconds) for item in response.devices} == {
        (NOW, 30)
    }
    bench.inventory = inventory()
    assert bench.now() == {}


def test_each_device_has_the_health_of_its_gpu_and_of_its_instance(bench):
    bench.book.see(Xid(79), uuid(0))
    bench.book.see(Unreachable(), uuid(0))
    bench.book.see(Xid(95), uuid(2), 7, 0)
    bench.book.see(Xid(94), uuid(2))
    reported = bench.now()
    assert reported[GPU_0][0] == v1.UNHEALTHY
    assert reported[GPU_0][1].startswith("the GPU fell off the bus and does not answer")
    assert reported[GPU_0][1].endswith("; Xid 79: the GPU fell off the bus; reboot the node")
    assert reported[GPU_1] == (v1.HEALTHY, "")
    assert reported[MIG_1G][0] == v1.UNHEALTHY
    assert reported[MIG_3G] == (
        v1.HEALTHY,
        "Xid 94: uncorrectable memory error, contained to one program; restart the program",
    )


def test_a_wedged_monitor_makes_devices_unknown_never_healthy(bench):
    bench.book.see(Xid(79), uuid(0))
    bench.book.stale = {uuid(0), uuid(1)}
    del bench.book.looks[uuid(2)]
    response = bench.stream.snapshot()
    assert {item.health for item in response.devices} == {v1.UNKNOWN}
    assert [item.last_updated_time for item in response.devices] == [NOW, NOW, 0, 0]
    assert response.devices[0].message.endswith(
        "; last known: Xid 79: the GPU fell off the bus; reboot the node"
    )


def test_card_under_vfio_is_unknown_and_neither_lost_nor_unhealthy(bench):
    bench.inventory = inventory(h100(1), cards=(bound(0), card(1)))
    bench.book.looks = {uuid(1): NOW}
    reported = bench.now()
    assert reported[VFIO_0] == (
        v1.UNKNOWN,
        "the GPU is bound to vfio for a virtual machine, so its health cannot be read",
    )
    assert reported[VFIO_1] == (v1.HEALTHY, "")


def test_messages_fit_the_kubelets_limit(bench, monkeypatch):
    lost_now = ("gpu-lost", "", Severity.LOST, "é\n" * 2000)
    monkeypatch.setattr("dra_driver.health.rules.state.LOST_NOW", lost_now)
    bench.book.see(Unreachable(), uuid(0))
    message = bench.now()[GPU_0][1]
    assert len(message.encode()) <= 1024
    assert message.startswith("é é")
    assert message.endswith("…")


def test_a_subscriber_gets_the_state_at_once_then_changes(bench, monkeypatch):
    monkeypatch.setattr(module, "_RESEND_S", 1000.0)
    stream = bench.stream.watch(None, Context())
    assert _by_name(next(stream))[GPU_0][0] == v1.HEALTHY
    bench.book.see(Xid(48), uuid(0))
    bench.stream.changed()
    assert _by_name(next(stream))[GPU_0][0] == v1.UNHEALTHY
    monkeypatch.setattr(module, "_RESEND_S", 0.001)
    bench.book.looks[uuid(0)] = NOW + 7
    assert next(stream).devices[0].last_updated_time == NOW + 7, "sent again as it is now"


def test_a_slow_subscriber_gets_the_last_state(bench):
    stream = bench.stream.watch(None, Context())
    next(stream)
    for number in (31, 94, 48):
        bench.book.see(Xid(number), uuid(0))
        bench.stream.changed()
    assert _by_name(next(stream))[GPU_0][0] == v1.UNHEALTHY


@pytest.mark.parametrize("ended_by", ["cancel", "stop"])
def test_a_waiting_stream_ends(bench, ended_by, monkeypatch):
    monkeypatch.setattr("dra_driver.health.gpu_health._RESEND_S", 600)
    context, waiting, rest = Context(), threading.Event(), []
    stream = bench.stream.watch(None, context)
    next(stream)

    def drain() -> None:
        waiting.set()
        rest.extend(stream)

    thread = threading.Thread(target=drain)
    thread.start()
    assert waiting.wait(PATIENCE_S)
    if ended_by == "cancel":
        context.cancel()
    else:
        bench.stream.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert rest == []
    assert list(bench.stream.watch(None, context)) == []


@pytest.fixture
def plugin(bench) -> Iterator[KubeletPlugin]:
    with made_node() as node:
        yield node.plugin(watch_device_health=bench.stream.watch, settings={"grace_s": 0.5})
        bench.stream.stop()


def test_several_subscribers_of_both_versions_at_the_socket(bench, plugin):
    with channel(plugin.sockets.dra) as opened:
        calls = [
            opened.unary_stream(
                f"/{version}.DRAResourceHealth/NodeWatchResources",
                api.NodeWatchResourcesRequest.SerializeToString,
                api.NodeWatchResourcesResponse.FromString,
            )(api.NodeWatchResourcesRequest(), timeout=PATIENCE_S)
            for version, api in (("v1", v1), ("v1alpha1", v1alpha1), ("v1", v1))
        ]
        assert [_by_name(next(call))[GPU_0][0] for call in calls] == [v1.HEALTHY] * 3
        calls[0].cancel()
        with pytest.raises(grpc.RpcError):
            next(calls[0])
        bench.book.see(Xid(79), uuid(0))
        bench.stream.changed()
        assert [_by_name(next(call))[GPU_0][0] for call in calls[1:]] == [v1.UNHEALTHY] * 2
        bench.stream.stop()
        assert [list(call) for call in calls[1:]] == [[], []]
