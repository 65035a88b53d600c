from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dra_driver.core.slicediff import Owner
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.dropped import dropped_fields
from dra_driver.model.inventory import Inventory
from dra_driver.services import publisher as module
from dra_driver.services.publisher import Publisher
from tests.core.samples import DRIVER, GPU_0, MIXED, NODE, h100, inventory
from tests.fakes.slices import FakeSlices


class Waits(threading.Event):
    """A stop event that does not wait, but notes for how long it was asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            self.asked.append(timeout)
        return super().wait(0.001)


class Bench:
    """A publisher with its surroundings."""

    def __init__(self, slices: FakeSlices | None = None) -> None:
        self.slices = slices or FakeSlices()
        self.inventory: Inventory | None = MIXED
        self.node_uid = "node-uid"
        self.owner_reads = 0
        self.publisher = Publisher(lambda: self.inventory, self.slices, self._owner, dropped_fields)
        self.slices.on_change = self.publisher.mark_dirty

    def _owner(self) -> Owner:
        self.owner_reads += 1
        return Owner(DRIVER, NODE, self.node_uid)

    def start(self) -> Bench:
        self.publisher.start()
        self.publisher.mark_dirty()
        return self

    def published(self) -> list[str]:
        return [
            device["name"] for entry in self.slices.snapshot() for device in entry["spec"].get("devices", [])
        ]


def eventually(check: Callable[[], Any], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.002)


def settled(bench: Bench) -> int:
    """The number of writes once nothing happens any more."""
    bench.publisher.mark_dirty()
    eventually(lambda: not bench.publisher._dirty.is_set())
    time.sleep(0.08)
    return len(bench.slices.writes)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.publisher.stop()


@pytest.fixture
def running(bench: Bench) -> Bench:
    bench.start()
    assert bench.publisher.wait_published(5)
    return bench


NAMES = [device.name for device in MIXED.devices()]


def test_pool_is_published_once(running: Bench) -> None:
    assert running.published() == NAMES
    assert running.slices.writes == [("create", "00000-gpu.nvidia.com-node-a-")]
    assert running.publisher.problem is None
    assert settled(running) == 1


def test_restart_writes_nothing(running: Bench) -> None:
    running.publisher.stop()
    following = Bench(running.slices).start()
    assert following.publisher.wait_published(5)
    assert settled(following) == 1
    following.publisher.stop()


def test_nothing_is_written_when_nothing_is_known(bench: Bench) -> None:
    bench.inventory = None
    bench.start()
    assert settled(bench) == 0
    assert not bench.publisher.wait_published(0)
    assert bench.publisher.problem == "slices have not been published yet"
    assert bench.owner_reads == 0


def test_nothing_is_written_before_the_first_list_has_arrived(bench: Bench) -> None:
    bench.slices.synced.clear()
    bench.start()
    assert settled(bench) == 0
    bench.slices.synced.set()
    bench.publisher.mark_dirty()
    assert bench.publisher.wait_published(5)


def test_slices_stay_when_the_publisher_stops(running: Bench) -> None:
    running.publisher.stop()
    assert running.published() == NAMES


def test_withdrawn_devices_leave_an_empty_pool(running: Bench) -> None:
    running.inventory = Inventory()
    running.publisher.mark_dirty()
    eventually(lambda: running.published() == [])
    assert len(running.slices.snapshot()) == 1


@pytest.mark.parametrize(
    "harm",
    [
        lambda slices: slices.wipe(),
        lambda slices: slices.spoil(devices=[]),
        lambda slices: slices.spoil(devices=[{"name": "intruder", "attributes": {}}]),
        lambda slices: slices.spoil(pool={"name": "another", "generation": 9, "resourceSliceCount": 1}),
        lambda slices: slices.plant("zz-stray", slices.snapshot()[0]),
    ],
    ids=["deleted", "emptied", "replaced", "moved", "stray"],
)
def test_slices_are_put_right_within_a_second(running: Bench, harm: Callable[[FakeSlices], None]) -> None:
    before = running.slices.snapshot()[0]["spec"]["devices"]
    harm(running.slices)
    eventually(lambda: [entry["spec"].get("devices") for entry in running.slices.snapshot()] == [before], 1.0)


def test_owner_is_read_again_when_the_slices_went_with_their_node(running: Bench) -> None:
    running.node_uid = "node-uid-2"
    running.slices.wipe()
    eventually(lambda: running.published() == NAMES)
    (entry,) = running.slices.snapshot()
    assert [reference["uid"] for reference in entry["metadata"]["ownerReferences"]] == ["node-uid-2"]
    assert settled(running) == 2


def test_owner_is_read_once_while_all_is_well(running: Bench) -> None:
    running.inventory = inventory(h100(0))
    running.publisher.mark_dirty()
    eventually(lambda: running.published() == [GPU_0])
    assert running.owner_reads == 1


def without_capacity(obj: dict) -> dict:
    for device in obj["spec"].get("devices", []):
        device.pop("capacity", None)
    return obj


def test_dropped_fields_are_told_once_and_not_sent_again(bench: Bench, logs: list) -> None:
    bench.slices.store = without_capacity
    bench.start()
    assert bench.publisher.wait_published(5)
    assert settled(bench) == 1
    assert [line["fields"] for line in logs if line["event"] == "slice_fields_dropped"] == [
        [f"spec.devices[{index}].capacity (unknown)" for index in range(4)]
    ]
    bench.slices.spoil(devices=[])
    eventually(lambda: bench.published() == NAMES)
    assert settled(bench) == 2


def test_names_of_slices_that_are_gone_are_forgotten(bench: Bench) -> None:
    bench.slices.store = without_capacity
    bench.start()
    assert bench.publisher.wait_published(5)
    for _ in range(3):
        bench.slices.wipe()
        eventually(lambda: bench.published() == NAMES)
    bench.slices.on_change()
    settled(bench)
    assert len(bench.publisher._accepted) == 1


def test_device_that_breaks_a_limit_is_told_once(bench: Bench, logs: list) -> None:
    from dataclasses import replace

    from tests.core.samples import ONE_G, mig, partitioned

    bad = partitioned(1, mig(1, replace(ONE_G, name=f"1g.{'9' * 50}gb"), 0, 1, 7))
    bench.inventory = inventory(h100(0), bad)
    bench.start()
    assert bench.publisher.wait_published(5)
    for _ in range(3):
        settled(bench)
    assert bench.published() == [GPU_0]
    told = [line["reason"] for line in logs if line["event"] == "device_not_publishable"]
    assert len(told) == 1
    assert "the name is no DNS label" in told[0]


@pytest.mark.parametrize(
    "error",
    [
        ApiUnavailableError("create slice: the API server does not answer"),
        ApiRejectedError("create slice: refused", status=422),
        ApiRejectedError("update slice: it was changed meanwhile", status=409),
        ValueError("a bug"),
    ],
)
def test_publishing_goes_on_after_an_error(bench: Bench, error: Exception) -> None:
    waits = bench.publisher._stopping = Waits()
    bench.slices.failures = [error] * 3
    bench.start()
    assert bench.publisher.wait_published(5)
    assert (bench.published(), bench.publisher.problem) == (NAMES, None)
    for asked, expected in zip(waits.asked[:3], (0.1, 0.2, 0.4), strict=True):
        assert expected * 0.8 <= asked <= expected * 1.2


def test_problem_says_why_while_publishing_fails(bench: Bench) -> None:
    bench.slices.failures = [ApiRejectedError("create slice: spec.devices: too many", status=422)] * 1000
    bench.publisher._stopping = Waits()
    bench.start()
    eventually(lambda: bench.publisher.problem == "create slice: spec.devices: too many")


def test_server_is_not_asked_before_it_wants_to_be(bench: Bench) -> None:
    waits = bench.publisher._stopping = Waits()
    bench.slices.failures = [ApiUnavailableError("too many requests", retry_after_s=7.0)] * 20
    bench.start()
    assert bench.publisher.wait_published(5)
    assert all(asked >= 7.0 for asked in waits.asked[:20])


def test_backoff_has_an_end_and_starts_anew_after_success(bench: Bench) -> None:
    waits = bench.publisher._stopping = Waits()
    bench.slices.failures = [ApiUnavailableError("down")] * 12
    bench.start()
    assert bench.publisher.wait_published(5)
    assert max(waits.asked) <= 30 * 1.2
    assert waits.asked[11] >= 30 * 0.8
    waits.asked.clear()
    bench.slices.failures = [ApiUnavailableError("down")]
    bench.slices.wipe()
    eventually(lambda: bench.published() == NAMES)
    assert any(asked <= 0.12 for asked in waits.asked)


def test_fight_over_the_slices_is_slowed_down(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = bench.publisher._stopping = Waits()
    monkeypatch.setattr(module, "_BURST_WINDOW_S", 1000.0)
    bench.start()
    assert bench.publisher.wait_published(5)
    for _ in range(17):
        bench.slices.spoil(devices=[])
        eventually(lambda: bench.published() == NAMES)
    assert [asked for asked in waits.asked if asked >= 1] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert [asked for asked in waits.asked if asked < 1] == [0.05] * 9


def test_slices_that_change_while_it_waits_are_compared_again(bench: Bench) -> None:
    """Else each late write would meet a conflict, and a steady rival would always win."""
    bench.start()
    assert bench.publisher.wait_published(5)
    spoilt = threading.Event()

    class Rival(Waits):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None and not spoilt.is_set():
                spoilt.set()
                bench.slices.spoil(devices=[{"name": "rival-2", "attributes": {}}])
            return super().wait(timeout)

    waits = bench.publisher._stopping = Rival()
    bench.slices.spoil(devices=[{"name": "rival-1", "attributes": {}}])
    eventually(lambda: spoilt.is_set() and bench.published() == NAMES)
    assert waits.asked == [0.05]
    assert [verb for verb, _ in bench.slices.writes] == ["create", "update"]


def test_stop_ends_the_thread_while_it_waits_to_try_again(bench: Bench) -> None:
    bench.slices.failures = [ApiUnavailableError("down", retry_after_s=60.0)] * 10
    bench.start()
    eventually(lambda: bench.publisher.problem == "down")
    started = time.monotonic()
    bench.publisher.stop()
    assert time.monotonic() - started < 1
    assert not bench.publisher._thread.is_alive()


def test_stop_is_harmless_before_the_start(bench: Bench) -> None:
    bench.publisher.stop()
