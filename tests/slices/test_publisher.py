from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from playground.apiserver import PlaygroundApiServer

from dra_driver.base.backoff import TokenBucket
from dra_driver.base.threads import BackgroundWorker
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.slices import SliceCache
from dra_driver.model.inventory import Inventory
from dra_driver.model.sharing import SharingRule, share_all
from dra_driver.model.units import named
from dra_driver.slices import api_support, refusals
from dra_driver.slices import publisher as module
from dra_driver.slices.api_support import Support
from dra_driver.slices.refusals import RefusedEntries
from dra_driver.slices.rules.build import Pool, SliceContent, Taints, untainted
from dra_driver.slices.rules.diff import SHARES_GATE, TAINTS_GATE, Owner, slice_changes
from tests.fakes.clock import Clock
from tests.fakes.samples import DRIVER, GPU_0, GPU_1, GPU_2, MIXED, NODE, h100, inventory
from tests.fakes.slices import FakeSlices, RecordedCalls, publisher_of, support_of
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.slices.test_build import cut


class Waits(threading.Event):
    """A stop event that does not wait, but records the requested waits."""

    def __init__(self) -> None:
        super().__init__()
        self.requested: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            self.requested.append(timeout)
        return super().wait(0.001)


class GuardedSlices(FakeSlices):
    """Some slices cannot be deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.guarded: set[str] = set()
        self.refusals = 0

    def delete(self, name: str, uid: str, resource_version: str | None = None) -> None:
        if name in self.guarded:
            self.refusals += 1
            raise ApiRejectedError(f"delete resource slice {name}: a webhook said no (HTTP 403)", status=403)
        super().delete(name, uid, resource_version)


class Bench:
    """A publisher with its surroundings."""

    def __init__(self, slices: GuardedSlices | None = None, lacks: Support = Support()) -> None:  # noqa: B008  frozen
        self.slices = slices or GuardedSlices()
        self.inventory: Inventory | None = MIXED
        self.lacks: Support | Exception = lacks
        self.questions = 0
        self.taints: Taints = untainted
        self.node_uid = "node-uid"
        self.owner_reads = 0
        self.received = RecordedCalls()
        self.publisher = publisher_of(
            lambda: self.inventory,
            self.slices,
            self._owner,
            observer=self.received,
            support=support_of(self._requested),
            taints=lambda _: self.taints,
        )
        self.slices.on_change = self.publisher.mark_dirty
        self.begun = self.rested = 0
        worker = self.publisher._worker
        worker._work = partial(self._round, worker, worker._work)

    def _round(self, worker: BackgroundWorker, work: Callable[[], float]) -> float:
        self.begun += 1
        pause_s = work()
        if pause_s > 0 and worker._wake.locked():
            self.rested = self.begun
        return pause_s

    def _owner(self) -> Owner:
        self.owner_reads += 1
        return Owner(DRIVER, NODE, self.node_uid)

    def _requested(self, known: Support, partitions: bool) -> Support:
        self.questions += 1
        if isinstance(self.lacks, Exception):
            raise self.lacks
        return self.lacks

    def start(self) -> None:
        self.publisher.start()

    def publish(self) -> None:
        self.start()
        assert self.publisher.wait_published(PATIENCE_S)

    def change(self, *gpus: Any) -> None:
        """Discovery finds these GPUs now."""
        self.inventory = inventory(*gpus)
        self.publisher.mark_dirty()

    def published(self) -> list[str]:
        return [
            device["name"] for entry in self.slices.current() for device in entry["spec"].get("devices", [])
        ]


def settled(bench: Bench) -> int:
    """Return the number of writes when nothing happens any more."""
    bench.publisher.mark_dirty()  # a round that begins now may not see the next mark
    begun = bench.begun
    bench.publisher.mark_dirty()
    eventually(lambda: bench.rested > begun)
    return len(bench.slices.writes)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.publisher.stop()


@pytest.fixture
def running(bench: Bench) -> Bench:
    bench.publish()
    return bench


NAMES = [device.name for device in MIXED.devices()]


def test_pool_is_published_once(running: Bench) -> None:
    assert running.published() == NAMES
    assert running.slices.writes == [("create", "00000-gpu.nvidia.com-node-a-")]
    assert running.publisher.problem is None
    assert settled(running) == 1


def test_restart_writes_nothing(running: Bench) -> None:
    running.publisher.stop()
    following = Bench(running.slices)
    following.publish()
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
    assert bench.publisher.wait_published(PATIENCE_S)


def test_withdrawn_devices_leave_an_empty_pool(running: Bench) -> None:
    running.inventory = Inventory()
    running.publisher.mark_dirty()
    eventually(lambda: running.published() == [])
    assert len(running.slices.current()) == 1


@pytest.mark.parametrize(
    "harm",
    [
        lambda slices: slices.wipe(),
        lambda slices: slices.spoil(devices=[]),
        lambda slices: slices.spoil(devices=[{"name": "intruder", "attributes": {}}]),
        lambda slices: slices.spoil(pool={"name": "another", "generation": 9, "resourceSliceCount": 1}),
        lambda slices: slices.plant("zz-stray", slices.current()[0]),
    ],
    ids=["deleted", "emptied", "replaced", "moved", "stray"],
)
def test_slices_are_put_right_within_a_second(running: Bench, harm: Callable[[FakeSlices], None]) -> None:
    before = running.slices.current()[0]["spec"]["devices"]
    harm(running.slices)
    eventually(lambda: [entry["spec"].get("devices") for entry in running.slices.current()] == [before])


def test_owner_is_read_again_when_the_slices_went_with_their_node(running: Bench) -> None:
    running.node_uid = "node-uid-2"
    running.slices.wipe()
    eventually(lambda: running.published() == NAMES)
    (entry,) = running.slices.current()
    assert [reference["uid"] for reference in entry["metadata"]["ownerReferences"]] == ["node-uid-2"]
    assert settled(running) == 2


def test_owner_is_read_once_while_all_is_well(running: Bench) -> None:
    running.change(h100(0))
    eventually(lambda: running.published() == [GPU_0])
    assert running.owner_reads == 1


def without_capacity(obj: dict) -> dict:
    for device in obj["spec"].get("devices", []):
        device.pop("capacity", None)
    return obj


def test_dropped_fields_are_reported_once_and_not_sent_again(bench: Bench, logs: list) -> None:
    bench.slices.store = without_capacity
    bench.publish()
    assert settled(bench) == 1
    assert [line["fields"] for line in logs if line["event"] == "slice_fields_dropped"] == [
        [f"spec.devices[{index}].capacity (unknown)" for index in range(4)]
    ]
    [(code, text)] = problems(bench)
    assert (code, "differently from what the plugin sends" in text) == ("slice-fields-dropped", True)
    bench.slices.store = lambda obj: obj
    bench.slices.spoil(devices=[])
    eventually(lambda: bench.published() == NAMES)
    assert settled(bench) == 2
    assert problems(bench) == []


def test_names_of_slices_that_are_gone_are_forgotten(bench: Bench) -> None:
    bench.slices.store = without_capacity
    bench.publish()
    for _ in range(3):
        bench.slices.wipe()
        eventually(lambda: bench.published() == NAMES)
    bench.slices.on_change()
    settled(bench)
    assert len(bench.publisher.support._stored_otherwise) == 1


def test_device_that_breaks_a_limit_is_a_problem_while_it_exists(bench: Bench) -> None:
    from tests.fakes.samples import ONE_G, mig, partitioned

    bad = partitioned(1, mig(1, replace(ONE_G, name=f"1g.{'9' * 50}gb"), 0, 1, 7))
    bench.inventory = inventory(h100(0), bad)
    has_pool, create = list[bool](), bench.slices.create

    def created(entry: Any) -> Any:
        has_pool.append(bench.publisher.has_pool)
        return create(entry)

    bench.slices.create = created
    bench.publish()
    assert has_pool == [False], "only the answer to the first write shows whether the server alters it"
    assert bench.published() == [GPU_0]
    [(code, text)] = problems(bench)
    assert (code, "the name is not a DNS label; report this" in text) == ("device-not-published", True)
    assert bench.publisher.has_pool
    bench.inventory = inventory(h100(0))
    settled(bench)
    assert problems(bench) == []


def test_unsupported_partitions_and_an_old_scheduler_are_problems_while_they_last(bench: Bench) -> None:
    support: Any = bench.publisher.support
    support.sharing = share_all(SharingRule("shares", 4))
    support.concern = "the scheduler is old; upgrade it"
    bench.inventory, bench.lacks = inventory(cut(0)), Support(no_partitions="gate off; enable it")
    bench.publish()
    text = "MIG devices on demand and GPUs for virtual machines are not published: gate off; enable it"
    assert problems(bench) == [("partitions-not-supported", text)]
    support._is_asked, bench.lacks = False, Support()
    bench.publisher.mark_dirty()
    outdated = [("scheduler-outdated", "the scheduler is old; upgrade it")]
    eventually(lambda: problems(bench) == outdated)
    bench.inventory = inventory(h100(0))
    settled(bench)
    assert problems(bench) == []


def test_bounded_shares_are_reported_once(bench: Bench, logs: list[dict[str, Any]]) -> None:
    bench.inventory = inventory(h100(0))
    bench.publisher.sharing = share_all(SharingRule("shares", 60, enforce="mps"))
    bench.publish()
    for _ in range(3):
        settled(bench)
    reported = [line["reason"] for line in logs if line["event"] == "device_limited"]
    assert [text.partition(",")[0] for text in reported] == [
        f"device {GPU_0}: it has 48 shares instead of 60"
    ]


@pytest.mark.parametrize(
    "error",
    [
        ApiUnavailableError("create slice: the API server does not answer"),
        ApiRejectedError("create slice: the token is not valid", status=401),
        ApiRejectedError("update slice: it was changed meanwhile", status=409),
        ValueError("a bug"),
    ],
)
def test_publishing_continues_after_an_error(bench: Bench, error: Exception) -> None:
    waits = bench.publisher._worker._stopping = Waits()
    bench.slices.failures = [error] * 3
    bench.publish()
    assert (bench.published(), bench.publisher.problem) == (NAMES, None)
    for requested, expected in zip(waits.requested[:3], (0.1, 0.2, 0.4), strict=True):
        assert expected * 0.8 <= requested <= expected * 1.2


def test_server_is_not_queried_before_it_wants_to_be(bench: Bench) -> None:
    waits = bench.publisher._worker._stopping = Waits()
    bench.slices.failures = [ApiUnavailableError("too many requests", retry_after_s=7.0)] * 20
    bench.publish()
    assert all(requested >= 7.0 for requested in waits.requested[:20])


def test_backoff_has_an_end_and_starts_over_after_success(bench: Bench) -> None:
    waits = bench.publisher._worker._stopping = Waits()
    bench.slices.failures = [ApiUnavailableError("down")] * 12
    bench.publish()
    assert max(waits.requested) <= 30 * 1.2
    assert waits.requested[11] >= 30 * 0.8
    waits.requested.clear()
    bench.slices.failures = [ApiUnavailableError("down")]
    bench.slices.wipe()
    eventually(lambda: bench.published() == NAMES)
    assert any(requested <= 0.12 for requested in waits.requested)


def test_rival_is_answered_rarely_but_own_changes_go_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.publisher._answers = TokenBucket(1 / 30, 3)
    monkeypatch.setattr(module, "_QUIET_AFTER_WRITE_S", 0.001)

    def spoil(obj: dict) -> dict:
        if threading.current_thread() is bench.publisher._worker._thread:
            threading.Timer(0.01, bench.slices.spoil, kwargs={"devices": []}).start()
        return obj

    bench.slices.store = spoil
    bench.start()
    eventually(lambda: "keeps changing the slices" in (bench.publisher.problem or ""))
    assert len(bench.slices.writes) == 4, "one create and three prompt answers"
    bench.slices.store = lambda obj: obj
    bench.change(h100(0))
    eventually(lambda: bench.published() == [GPU_0])
    eventually(lambda: bench.publisher.problem is None)
    assert [code for code, _ in problems(bench)] == ["slices-contested"], "the rival may change them again"
    monkeypatch.setattr(module, "_CONTESTED_S", 0.0)
    assert problems(bench) == []


def test_slices_that_change_while_it_waits_are_compared_again(bench: Bench) -> None:
    """Else each late write would meet a conflict, and a steady rival would always win."""
    bench.publish()
    spoilt = threading.Event()

    class Rival(Waits):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None and not spoilt.is_set():
                spoilt.set()
                bench.slices.spoil(devices=[{"name": "rival-2", "attributes": {}}])
            return super().wait(timeout)

    waits = bench.publisher._worker._stopping = Rival()
    bench.slices.spoil(devices=[{"name": "rival-1", "attributes": {}}])
    eventually(lambda: spoilt.is_set() and bench.published() == NAMES)
    assert waits.requested == [0.05]
    assert [verb for verb, _ in bench.slices.writes] == ["create", "update"]


# --- problems of the node ------------------------------------------------------------------------


class Time:
    """The publisher's clock, which only a test moves on."""

    def __init__(self) -> None:
        self.began, self.ahead = time.monotonic(), 0.0

    def monotonic(self) -> float:
        return self.began + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(module, "time", made)
    return made


def problems(bench: Bench) -> list[tuple[str, str]]:
    return [(problem.code, problem.text) for problem in bench.publisher.problems()]


NOT_UPDATED = (
    "slices-not-published",
    "The plugin has not been able to update this node's ResourceSlices for {} s: {}; `gpu-dra-driver "
    "doctor` in its pod checks the API server and the permissions",
)


def not_updated(seconds: int, why: str) -> list[tuple[str, str]]:
    return [(NOT_UPDATED[0], NOT_UPDATED[1].format(seconds, why))]


def test_failures_that_end_by_themselves_are_not_a_problem_even_if_nothing_is_written(
    running: Bench, clock: Time
) -> None:
    """A failed round is followed by one that finds nothing to write."""
    real, failures = running.slices.current, list[Exception]()

    def current() -> list[dict]:
        if failures:
            raise failures.pop()
        return real()

    running.slices.current = current  # type: ignore[method-assign]
    for times in (1, 2):
        failures.append(ApiUnavailableError("hiccup"))
        running.publisher.mark_dirty()
        eventually(lambda times=times: len(running.received.failures) == times)
        eventually(lambda: running.publisher.problem is None)
        clock.ahead += 38.0
        assert problems(running) == []
    assert (len(running.received.failures), len(running.slices.writes)) == (2, 1)


def test_lasting_failure_is_a_problem_until_the_slices_are_as_wanted(bench: Bench, clock: Time) -> None:
    bench.slices.failures = [ApiUnavailableError("down", retry_after_s=0.01)] * 1000
    bench.start()
    eventually(lambda: bench.publisher.problem == "down")
    clock.ahead = 29.0
    assert problems(bench) == []
    clock.ahead = 31.0
    assert problems(bench) == not_updated(31, "down")
    other = Bench()
    other.publish()
    for entry in other.slices.current():  # another instance wrote them, so this one has nothing left to write
        bench.slices._put(entry)
    other.publisher.stop()
    bench.slices.on_change()
    eventually(lambda: problems(bench) == [])
    assert bench.slices.writes == []


def test_slices_that_cannot_be_watched_are_a_problem(running: Bench, clock: Time) -> None:
    running.slices.failing = (clock.monotonic(), "watch resource slices: cannot connect")
    assert problems(running) == []
    clock.ahead = 40.0
    (found,) = problems(running)
    assert (
        "not been able to watch this node's ResourceSlices for 40 s: watch resource slices: cannot"
        in found[1]
    )
    running.slices.failing = None
    assert problems(running) == []


def test_node_without_gpus_has_no_problem_with_its_slices(bench: Bench, clock: Time) -> None:
    bench.inventory = None
    bench.start()
    clock.ahead = 40.0
    assert problems(bench) == []
    bench.slices.synced.clear()
    bench.inventory = MIXED
    assert problems(bench) == not_updated(40, "slices have not been published yet")


def other_writer(slice_name: str) -> list[tuple[str, str]]:
    return [
        (
            "foreign-driver",
            f"'gpu-kubelet-plugin' also writes ResourceSlices of {DRIVER} on this node, such as {slice_name}; "
            f"find its pod with `kubectl get pods -A -o wide --field-selector spec.nodeName={NODE}`, and "
            "remove it",
        )
    ]


def test_driver_that_changes_the_slices_twice_is_a_problem_for_as_long_as_it_does(
    running: Bench, clock: Time
) -> None:
    name = running.slices.current()[0]["metadata"]["name"]
    for seconds, found in ((0.0, []), (30.0, other_writer(name))):
        clock.ahead = seconds
        running.slices.spoil(devices=[])
        eventually(lambda: running.published() == NAMES)
        settled(running)
        assert problems(running) == found
    clock.ahead = 30.0 + 179.0
    assert problems(running) == other_writer(name)
    clock.ahead = 30.0 + 181.0
    assert problems(running) == []


def test_driver_that_recreates_its_slices_is_a_problem_the_second_time(running: Bench, clock: Time) -> None:
    like = running.slices.current()[0]
    for seconds, found in ((0.0, []), (30.0, other_writer("00000-other-1"))):
        clock.ahead = seconds
        for index in range(2):  # one after the other is one time
            running.slices.plant(f"0000{index}-other-{index}", like)
            eventually(lambda: running.published() == NAMES)
        settled(running)
        assert [text[:60] for _, text in problems(running)] == [text[:60] for _, text in found]


def test_slices_taken_over_from_another_driver_are_not_a_problem(bench: Bench, clock: Time) -> None:
    other = Bench()
    other.publish()
    other.publisher.stop()
    for index, entry in enumerate(other.slices.current()):
        bench.slices.plant(f"{index:05x}-gpu-x", entry)
    bench.publish()
    for seconds in (10.0, 20.0, 30.0):
        clock.ahead = seconds
        bench.inventory = inventory(h100(0)) if seconds != 20.0 else MIXED
        bench.publisher.mark_dirty()
        settled(bench)
        assert problems(bench) == []


def test_stop_ends_the_thread_while_it_waits_to_try_again(bench: Bench) -> None:
    bench.slices.failures = [ApiUnavailableError("down", retry_after_s=600.0)] * 10
    bench.start()
    eventually(lambda: bench.publisher.problem == "down")
    started = time.monotonic()
    bench.publisher.stop()
    assert time.monotonic() - started < PATIENCE_S
    assert not bench.publisher._worker._thread.is_alive()


# --- slices that do not go away ------------------------------------------------------------------


@pytest.mark.parametrize("pool_name", ["another", NODE])
def test_slice_that_cannot_be_deleted_keeps_nothing_from_being_written(
    bench: Bench, logs: list, pool_name: str
) -> None:
    like = {"metadata": {}, "spec": {"pool": {"name": pool_name, "generation": 1, "resourceSliceCount": 1}}}
    bench.slices.plant("zz-foreign", like)
    bench.slices.guarded.add("zz-foreign")
    bench.publish()
    assert bench.published() == NAMES
    eventually(lambda: bench.slices.refusals >= 3)
    assert bench.publisher.problem == (
        "an obsolete slice still exists: delete resource slice zz-foreign: a webhook said no (HTTP 403)"
    )
    assert [verb for verb, _ in bench.slices.writes] == ["create"], "and nothing appears twice"
    assert {str(error) for error in bench.received.failures} == {
        "delete resource slice zz-foreign: a webhook said no (HTTP 403)"
    }
    bench.change(h100(0))
    eventually(lambda: bench.published() == [GPU_0])
    bench.slices.wipe()
    bench.slices.plant("zz-foreign", like)
    eventually(lambda: bench.published() == [GPU_0])
    bench.slices.guarded.clear()
    eventually(lambda: bench.publisher.problem is None)
    assert len(bench.slices.current()) == 1
    assert len([line for line in logs if line["event"] == "slice_not_deleted"]) == 1


def test_slice_that_cannot_be_deleted_is_left_behind_in_an_older_generation(running: Bench) -> None:
    """Of the same generation it would be taken for a part of the pool, which would then be invalid."""
    double = running.slices.current()[0]
    running.slices.guarded.add("00000-zz")
    running.slices.plant("00000-zz", double)
    eventually(lambda: running.slices.refusals >= 2)
    generations = {
        entry["metadata"]["name"]: entry["spec"]["pool"]["generation"] for entry in running.slices.current()
    }
    assert generations == {"00000-zz": 1, double["metadata"]["name"]: 2}
    assert settled(running) == 2


def test_refused_deletions_are_retried_ever_more_rarely(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BACKOFF_MOST_S", 0.4)
    bench.slices.guarded.add("zz")
    bench.slices.plant(
        "zz",
        {"metadata": {}, "spec": {"pool": {"name": "another", "generation": 1, "resourceSliceCount": 1}}},
    )
    began = time.monotonic()
    bench.start()
    while time.monotonic() < began + 1 or bench.slices.refusals < 3:
        bench.publisher.mark_dirty()
        time.sleep(0.01)
    most = 3 + (time.monotonic() - began) / 0.4
    assert bench.slices.refusals <= most, "at 0, 0.1, 0.3, 0.7, 1.1, 1.5 s"


# --- slices that are refused ---------------------------------------------------------------------


FLEET = [h100(number) for number in range(130)]
"""Three slices: of 64, 64 and 2 devices."""


class Refusing(GuardedSlices):
    """Refuses every slice for which `faulty` says so, as an API server does that finds it invalid."""

    def __init__(self) -> None:
        super().__init__()
        self.reason = "slice: it is not allowed (HTTP 422)"
        self.faulty: Callable[[dict], bool] = lambda entry: False
        self.refused: list[str] = []
        self.store = self._checked

    def _checked(self, entry: dict) -> dict:
        if self.faulty(entry):
            self.refused.append(entry["metadata"]["name"])
            raise ApiRejectedError(self.reason, status=422)
        return entry

    def by_index(self) -> list[tuple[int, int]]:
        """Generation and number of devices of each slice."""
        return [
            (entry["spec"]["pool"]["generation"], len(entry["spec"].get("devices", [])))
            for entry in self.current()
        ]

    def is_complete(self) -> bool:
        """Whether the scheduler would allocate from the pool."""
        pools = [entry["spec"]["pool"] for entry in self.current()]
        return bool(pools) and all(pool == {**pools[0], "resourceSliceCount": len(pools)} for pool in pools)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(refusals, "_FIRST_S", 0.05)
    monkeypatch.setattr(refusals, "_MAX_S", 0.2)
    made = Bench(Refusing())
    made.inventory = inventory(*FLEET)
    yield made
    made.publisher.stop()


def has_many(entry: dict) -> bool:
    return (
        entry["metadata"]["generateName"].startswith("00001-") and len(entry["spec"].get("devices", [])) > 0
    )


def test_a_refused_slice_costs_no_other_its_place_and_is_retried(refusing: Bench, logs: list) -> None:
    slices: Any = refusing.slices
    slices.faulty = has_many
    refusing.start()
    eventually(lambda: [count for _, count in slices.by_index()] == [64, 0, 2])
    [generation] = {generation for generation, _ in slices.by_index()}
    written, tries = len(slices.writes), len(slices.refused)
    eventually(lambda: len(slices.refused) >= tries + 3)
    assert slices.by_index() == [(generation, 64), (generation, 0), (generation, 2)]
    assert {name[:5] for _, name in slices.writes[written:]} <= {"00001"}, "only the refused slice is retried"
    assert refusing.publisher.problem == (
        f"{named([device.name for device in refusing.inventory.devices()][64:128])}: missing or out of date in the "
        f"slices: {slices.reason}"
    )
    assert not refusing.publisher.wait_published(0)
    assert [line["event"] for line in logs].count("slice_refused") == 1
    slices.faulty = lambda entry: False
    eventually(lambda: refusing.publisher.problem is None)
    assert slices.by_index() == [(generation, 64), (generation, 64), (generation, 2)]
    assert refusing.publisher.wait_published(PATIENCE_S)


def test_only_the_device_that_the_server_names_is_missing_or_stays_as_it_was(refusing: Bench) -> None:
    slices: Any = refusing.slices
    slices.reason = "slice: spec.devices[1].attributes[productName].string: Invalid value (HTTP 422)"
    gpus = [h100(0), h100(1), h100(2)]

    def products() -> dict[str, str]:
        return {
            device["name"]: device["attributes"]["productName"]["string"]
            for entry in slices.current()
            for device in entry["spec"]["devices"]
        }

    def publish(*names: str) -> None:
        refusing.inventory = inventory(
            *(replace(gpu, product_name=name) for gpu, name in zip(gpus, names, strict=True))
        )
        refusing.publisher.mark_dirty()

    slices.faulty = lambda entry: any(
        device["attributes"]["productName"]["string"] == "bad" for device in entry["spec"]["devices"]
    )
    publish("a", "bad", "a")
    refusing.start()
    eventually(lambda: products() == {GPU_0: "a", GPU_2: "a"})
    assert str(refusing.publisher.problem).startswith(
        f"{GPU_1}: missing or out of date in the slices: slice: spec"
    )
    publish("a", "b", "a")
    eventually(lambda: products() == {GPU_0: "a", GPU_1: "b", GPU_2: "a"})
    eventually(lambda: refusing.publisher.problem is None)
    publish("c", "bad", "c")
    eventually(lambda: products() == {GPU_0: "c", GPU_1: "b", GPU_2: "c"})
    slices.faulty = lambda entry: False
    eventually(lambda: products() == {GPU_0: "c", GPU_1: "bad", GPU_2: "c"})
    eventually(lambda: refusing.publisher.problem is None)


def test_form_that_the_server_does_not_accept_any_more_is_missing(refusing: Bench) -> None:
    slices: Any = refusing.slices
    slices.reason = "slice: spec.devices[0]: Invalid value (HTTP 422)"
    refusing.inventory = inventory(h100(0), h100(1))
    refusing.publish()
    slices.faulty = lambda entry: entry["spec"]["devices"][0]["name"] == GPU_0
    refusing.change(*(replace(h100(number), product_name="new") for number in range(2)))
    eventually(lambda: refusing.published() == [GPU_1])
    slices.faulty = lambda entry: False
    eventually(lambda: refusing.published() == [GPU_0, GPU_1])


@pytest.mark.parametrize(("status", "longest_s"), [(403, 30), (422, 300)])
def test_refused_slice_waits_no_longer_than_its_status_allows(status: int, longest_s: float) -> None:
    """A missing permission is mended without a change of the slice."""
    clock = Clock()
    entries, pool = RefusedEntries(clock), Pool(NODE, (SliceContent(({"name": "a"},)),))
    waits = []
    for _ in range(12):
        assert entries.publishable(pool) == pool
        assert entries.refused(pool.slices[0], [], ApiRejectedError("no", status=status))
        waits.append(entries.due - clock())
        clock.pause(waits[-1])
        assert entries.publishable(pool).slices == (SliceContent(),), "the pool is not complete yet"
        entries.stored(SliceContent(), is_complete=True)
    assert (waits[:3], max(waits)) == ([1, 2, 4], longest_s)
    assert entries.publishable(pool) == pool
    assert entries.refused(pool.slices[0], [], ApiRejectedError("still not", status=status))
    assert entries.problem == "a: missing or out of date in the slices: still not"


def test_server_names_the_device_that_it_rejects(connect: Callable[..., ApiClient]) -> None:
    entries, good = RefusedEntries(), {"name": "good"}
    pool = Pool(NODE, (SliceContent((good, {"name": "Not_A_Label"})),))
    with PlaygroundApiServer() as server:
        [entry] = slice_changes(pool, (), Owner(DRIVER, NODE, "u" * 36)).creates
        with pytest.raises(ApiRejectedError) as caught:
            SliceCache(connect(server), DRIVER, NODE).create(entry)
    assert entries.refused(pool.slices[0], [], caught.value)
    assert entries.publishable(pool).slices == (SliceContent((good,)),)


def test_a_slice_without_rejected_entries_is_a_failure_of_the_write() -> None:
    entries, device = RefusedEntries(), {"name": "a"}
    existing = [{"spec": {"devices": [device]}}]
    for status, reason in ((403, "no"), (422, "spec.devices[7]: no"), (409, "changed")):
        error = ApiRejectedError(reason, status=status)
        assert not entries.refused(SliceContent((device,)), existing, error)
    assert (entries.problem, entries.due) == (None, math.inf)


def test_devices_are_not_published_without_the_counters_that_they_consume(
    refusing: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "_MAX_S", 5.0)  # longer than a round takes on a busy machine
    slices: Any = refusing.slices
    seen: list[list[tuple[int, int]]] = []
    refusing.inventory = inventory(*(cut(number) for number in range(9)))
    slices.faulty = lambda entry: bool(entry["spec"].get("sharedCounters"))
    refusing.start()
    eventually(lambda: slices.is_complete() and "out of date" in (refusing.publisher.problem or ""))
    before, tries = slices.by_index(), len(slices.refused)
    while len(slices.refused) < tries + 4:
        refusing.publisher.mark_dirty()
        seen.append([*slices.by_index()])
        assert not [
            device
            for entry in slices.current()
            for device in entry["spec"].get("devices", [])
            if device.get("consumesCounters")
        ]
        time.sleep(0.005)
    assert all(now == before for now in seen), "no new generation for what is tried again"
    slices.faulty = lambda entry: False
    eventually(lambda: refusing.publisher.problem is None)
    assert sum(count for _, count in slices.by_index()) > 9


def test_a_refused_change_leaves_what_is_still_wanted_of_the_slice(refusing: Bench) -> None:
    slices: Any = refusing.slices
    refusing.publish()
    slices.faulty = lambda entry: (
        any(
            device["attributes"]["productName"]["string"] == "new"
            for device in entry["spec"].get("devices", [])[5:6]
        )
        and entry["metadata"]["generateName"].startswith("00001-")
    )
    changed = [replace(gpu, product_name="new") for gpu in FLEET]
    refusing.change(*changed[:70], *changed[71:])
    eventually(lambda: [count for _, count in slices.by_index()] == [64, 64, 1])
    eventually(lambda: len(slices.refused) >= 3)
    eventually(lambda: len({generation for generation, _ in slices.by_index()}) == 1)
    [generation] = {generation for generation, _ in slices.by_index()}
    middle = slices.current()[1]["spec"]["devices"]
    assert {device["attributes"]["productName"]["string"] for device in middle} != {"new"}
    names = [name for entry in slices.current() for name in (d["name"] for d in entry["spec"]["devices"])]
    assert len(names) == len(set(names))
    slices.faulty = lambda entry: False
    eventually(lambda: refusing.publisher.problem is None)
    assert slices.by_index() == [(generation, 64), (generation, 64), (generation, 1)]


def test_devices_go_with_the_counters_that_are_refused_and_come_after_them() -> None:
    clock, counters = Clock(), {"name": "gpu", "counters": {"memory": {"value": "8Gi"}}}
    use = {
        "name": "gpu",
        "consumesCounters": [{"counterSet": "gpu", "counters": {"memory": {"value": "1Gi"}}}],
    }
    pool = Pool(NODE, (SliceContent(shared_counters=(counters,)), SliceContent(devices=({"name": "a"}, use))))
    entries, error = RefusedEntries(clock), ApiRejectedError("spec.sharedCounters[0]: no", status=422)
    assert entries.refused(pool.slices[0], [], error)
    without = SliceContent(devices=({"name": "a"},))
    assert entries.publishable(pool).slices == (SliceContent(), without)
    entries.stored(SliceContent(), without, is_complete=True)
    clock.pause(1.0)
    retried = entries.publishable(pool)
    assert retried.slices == (pool.slices[0], without), "a refused retry changes nothing else"
    assert entries.publishable(pool).slices == (SliceContent(), without)
    assert entries.stored(*retried.slices)
    assert entries.publishable(pool) == pool


# --- a server that lacks something ----------------------------------------------------------------


def without_taints(obj: dict) -> dict:
    for device in obj["spec"].get("devices", []):
        device.pop("taints", None)
    return obj


def broken(_device: object) -> list[dict]:
    return [{"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}]


@pytest.fixture
def dropping(bench: Bench) -> Bench:
    """Published on a server that drops taints, without knowing of it before, and stopped."""
    bench.slices.store = without_taints
    bench.taints = broken
    bench.publish()
    settled(bench)
    bench.publisher.stop()
    following = Bench(bench.slices, Support(frozenset({TAINTS_GATE})))
    following.taints = broken
    return following


def test_unsupported_field_is_not_sent_again_and_reported_once(dropping: Bench, logs: list) -> None:
    """Neither by the instance that learns it from a response, nor by one that tests."""
    before = dropping.slices.current()
    assert len(dropping.slices.writes) == 1
    dropping.publish()
    dropping.slices.on_change()
    assert settled(dropping) == 1
    assert dropping.slices.current() == before
    assert dropping.questions == 1
    text = f"the API server drops fields of this node's slices, because its feature gate {TAINTS_GATE} is off"
    assert problems(dropping) == [("slice-fields-dropped", f"{text}; enable the feature gate")]
    reported = [line["fields"] for line in logs if line["event"] == "slice_fields_dropped"]
    assert reported == [
        [f"spec.devices[{index}].taints ({TAINTS_GATE})" for index in range(4)],
        [f"spec.devices[].taints ({TAINTS_GATE})"],
    ], "once an instance"
    dropping.publisher.stop()


def test_dropped_field_in_an_answer_changes_the_pool_at_once(bench: Bench) -> None:
    """Nothing else wakes the publisher: the fake does not notify it of its own writes."""
    bench.slices.store = without_taints
    bench.taints = broken
    bench.publisher.node.left_out = lambda dropped: lambda device: dropped
    bench.start()
    eventually(lambda: bench.slices.writes and bench.published() == [])
    eventually(lambda: bench.publisher.withheld == tuple(NAMES))


def test_unsupported_field_that_is_not_needed_is_not_reported(bench: Bench) -> None:
    bench.lacks = Support(frozenset({TAINTS_GATE, SHARES_GATE}))
    bench.publish()
    assert problems(bench) == []


def test_shares_are_published_as_a_server_without_them_keeps_them(bench: Bench) -> None:
    """The scheduler then gives each device to one claim; that it may be shared is still said."""
    bench.lacks = Support(frozenset({SHARES_GATE}))
    bench.publisher.sharing = share_all(SharingRule("shares", 4))
    bench.publish()
    [entry] = bench.slices.current()
    for device in entry["spec"]["devices"]:
        assert "allowMultipleAllocations" not in device
        assert {tuple(amount) for amount in device["capacity"].values()} == {("value",)}
        assert device["attributes"]["shareable"] == {"bool": True}
    assert [(problem.code, problem.subject) for problem in bench.publisher.problems()] == [
        ("slice-fields-dropped", SHARES_GATE)
    ]


def test_restart_writes_what_the_server_keeps_by_now(dropping: Bench) -> None:
    dropping.slices.store = lambda obj: obj
    dropping.lacks = Support()
    dropping.publish()
    assert [verb for verb, _ in dropping.slices.writes] == ["create", "update"]
    assert all("taints" in device for device in dropping.slices.current()[0]["spec"]["devices"])
    dropping.publisher.stop()


def test_gate_that_is_enabled_later_is_noticed(dropping: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_support, "_RECHECK_AFTER_S", 0.05)
    dropping.publish()
    eventually(lambda: dropping.questions >= 4)
    assert len(dropping.slices.writes) == 1
    dropping.slices.store = lambda obj: obj
    dropping.lacks = Support()
    eventually(lambda: len(dropping.slices.writes) == 2)
    eventually(lambda: all("taints" in device for device in dropping.slices.current()[0]["spec"]["devices"]))
    settled(dropping)
    requested = dropping.questions
    time.sleep(0.15)
    assert dropping.questions == requested, "nothing is left to ask about"
    dropping.publisher.stop()


def test_nothing_is_published_before_the_server_said_what_it_takes(bench: Bench) -> None:
    bench.lacks = ApiUnavailableError("down")
    bench.publisher._worker._stopping = Waits()
    bench.start()
    eventually(lambda: bench.publisher.problem == "down")
    assert bench.slices.writes == []
    bench.lacks = Support()
    assert bench.publisher.wait_published(PATIENCE_S)


def test_server_is_queried_again_when_it_refuses_a_slice(refusing: Bench) -> None:
    slices: Any = refusing.slices
    slices.faulty = lambda entry: any(
        len(device.get("taints", ())) for device in entry["spec"].get("devices", ())
    )
    refusing.taints = broken
    refusing.start()
    eventually(lambda: slices.refused)
    refusing.lacks = Support(frozenset({TAINTS_GATE}))
    eventually(lambda: [count for _, count in slices.by_index()] == [64, 64, 2])
    eventually(lambda: refusing.publisher.problem is None)


def test_publisher_sleeps_when_there_is_nothing_to_do(running: Bench) -> None:
    settled(running)
    looks, real = [], running.publisher._publish_once
    running.publisher._publish_once = lambda: looks.append(real())
    time.sleep(0.2)
    assert looks == []


def test_lag_is_counted_from_the_first_change_over_all_failures(bench: Bench) -> None:
    bench.publisher._worker._stopping = Waits()
    refused = ApiUnavailableError("create slice: no answer")
    bench.slices.failures = [refused, refused]
    bench.publisher._marked_at = time.monotonic() - 100
    bench.publish()
    (lag,) = bench.received.lags
    assert 100 <= lag < 200
    assert bench.received.failures == [refused, refused]
    bench.change(h100(0))
    eventually(lambda: len(bench.received.lags) == 2)
    assert bench.received.lags[1] < 50


def test_no_lag_is_reported_where_nothing_had_to_be_written(running: Bench) -> None:
    assert settled(running) == len(running.received.lags) == 1


def test_publisher_that_starts_late_has_no_problem_at_its_start(bench: Bench, clock: Time) -> None:
    """Its process waited for another one to stop."""
    clock.ahead = 600.0
    bench.slices.synced.clear()
    bench.start()
    assert problems(bench) == []
    clock.ahead = 640.0
    assert problems(bench) == not_updated(40, "slices have not been published yet")


def test_publisher_that_is_stopped_makes_no_further_write(bench: Bench) -> None:
    bench.inventory = inventory(*FLEET)

    def stopping(entry: dict) -> dict:
        bench.publisher._worker.retire()
        return entry

    bench.slices.store = stopping
    bench.start()
    assert bench.publisher._worker.wait_ended(PATIENCE_S)
    assert len(bench.slices.writes) == 1
