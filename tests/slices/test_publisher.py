from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dra_driver.errors import ApiRejectedError, ApiUnavailableError, StateError
from dra_driver.model.inventory import Inventory
from dra_driver.model.sharing import SharingRule, share_all
from dra_driver.slices import publisher as module
from dra_driver.slices import refusals
from dra_driver.slices import remembered_drops as drop_memory
from dra_driver.slices.rules import pacing
from dra_driver.slices.rules.build import Pool, SliceContent
from dra_driver.slices.rules.diff import Owner
from dra_driver.slices.rules.pacing import WritePacing
from dra_driver.slices.rules.stand_ins import with_stand_ins
from tests.fakes.samples import DRIVER, GPU_0, MIXED, NODE, h100, inventory
from tests.fakes.slices import FakeSlices, Heard, publisher_of
from tests.slices.test_build import cut


class Waits(threading.Event):
    """A stop event that does not wait, but notes for how long it was asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            self.asked.append(timeout)
        return super().wait(0.001)


class GuardedSlices(FakeSlices):
    """Some slices cannot be deleted; `dry_run` answers without storing."""

    def __init__(self) -> None:
        super().__init__()
        self.guarded: set[str] = set()
        self.refusals = 0
        self.dry_runs: list[dict] = []
        self.dry_run_error: Exception | None = None

    def delete(self, name: str, uid: str, resource_version: str | None = None) -> None:
        if name in self.guarded:
            self.refusals += 1
            raise ApiRejectedError(f"delete resource slice {name}: a webhook said no (HTTP 403)", status=403)
        super().delete(name, uid, resource_version)

    def dry_run(self, obj: dict) -> dict:
        self.dry_runs.append(copy.deepcopy(obj))
        if self.dry_run_error is not None:
            raise self.dry_run_error
        return self.store(copy.deepcopy(obj))


class Bench:
    """A publisher with its surroundings."""

    def __init__(self, slices: GuardedSlices | None = None) -> None:
        self.slices = slices or GuardedSlices()
        self.our_turn = True
        self.inventory: Inventory | None = MIXED
        self.node_uid = "node-uid"
        self.owner_reads = 0
        self.heard = Heard()
        self.publisher = publisher_of(
            lambda: self.inventory,
            self.slices,
            self._owner,
            may_publish=lambda: self.our_turn,
            observer=self.heard,
        )
        self.slices.on_change = self.publisher.mark_dirty

    def _owner(self) -> Owner:
        self.owner_reads += 1
        return Owner(DRIVER, NODE, self.node_uid)

    def start(self) -> Bench:
        self.publisher.start()
        return self

    def published(self) -> list[str]:
        return [
            device["name"] for entry in self.slices.snapshot() for device in entry["spec"].get("devices", [])
        ]


def eventually(check: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.002)


def settled(bench: Bench) -> int:
    """The number of writes once nothing happens any more."""
    bench.publisher.mark_dirty()
    eventually(lambda: not bench.publisher._worker.is_woken)
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
    assert bench.publisher.wait_published(20)
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
    assert following.publisher.wait_published(20)
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
    assert bench.publisher.wait_published(20)


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
    eventually(lambda: [entry["spec"].get("devices") for entry in running.slices.snapshot()] == [before])


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
    assert bench.publisher.wait_published(20)
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
    assert bench.publisher.wait_published(20)
    for _ in range(3):
        bench.slices.wipe()
        eventually(lambda: bench.published() == NAMES)
    bench.slices.on_change()
    settled(bench)
    assert len(bench.publisher._memory._accepted) == 1


def test_device_that_breaks_a_limit_is_told_once(bench: Bench, logs: list) -> None:
    from tests.fakes.samples import ONE_G, mig, partitioned

    bad = partitioned(1, mig(1, replace(ONE_G, name=f"1g.{'9' * 50}gb"), 0, 1, 7))
    bench.inventory = inventory(h100(0), bad)
    bench.start()
    assert bench.publisher.wait_published(20)
    for _ in range(3):
        settled(bench)
    assert bench.published() == [GPU_0]
    told = [line["reason"] for line in logs if line["event"] == "device_not_publishable"]
    assert len(told) == 1
    assert "the name is not a DNS label" in told[0]


def test_bounded_shares_are_told_once(bench: Bench, logs: list[dict[str, Any]]) -> None:
    bench.inventory = inventory(h100(0))
    bench.publisher._sharing = share_all(SharingRule("shares", 60, enforce="mps"))
    bench.start()
    assert bench.publisher.wait_published(20)
    for _ in range(3):
        settled(bench)
    told = [line["reason"] for line in logs if line["event"] == "mps_shares_bounded"]
    assert [text.partition(",")[0] for text in told] == [f"device {GPU_0}: it has 48 shares instead of 60"]


@pytest.mark.parametrize(
    "error",
    [
        ApiUnavailableError("create slice: the API server does not answer"),
        ApiRejectedError("create slice: the token is not valid", status=401),
        ApiRejectedError("update slice: it was changed meanwhile", status=409),
        ValueError("a bug"),
    ],
)
def test_publishing_goes_on_after_an_error(bench: Bench, error: Exception) -> None:
    waits = bench.publisher._worker._stopping = Waits()
    bench.slices.failures = [error] * 3
    bench.start()
    assert bench.publisher.wait_published(20)
    assert (bench.published(), bench.publisher.problem) == (NAMES, None)
    for asked, expected in zip(waits.asked[:3], (0.1, 0.2, 0.4), strict=True):
        assert expected * 0.8 <= asked <= expected * 1.2


def test_problem_says_why_while_publishing_fails(bench: Bench) -> None:
    bench.slices.failures = [ApiRejectedError("create slice: spec.devices: too many", status=422)] * 1000
    bench.publisher._worker._stopping = Waits()
    bench.start()
    eventually(lambda: "create slice: spec.devices: too many" in (bench.publisher.problem or ""))
    assert not bench.publisher.wait_published(0)


def test_server_is_not_asked_before_it_wants_to_be(bench: Bench) -> None:
    waits = bench.publisher._worker._stopping = Waits()
    bench.slices.failures = [ApiUnavailableError("too many requests", retry_after_s=7.0)] * 20
    bench.start()
    assert bench.publisher.wait_published(20)
    assert all(asked >= 7.0 for asked in waits.asked[:20])


def test_backoff_has_an_end_and_starts_anew_after_success(bench: Bench) -> None:
    waits = bench.publisher._worker._stopping = Waits()
    bench.slices.failures = [ApiUnavailableError("down")] * 12
    bench.start()
    assert bench.publisher.wait_published(20)
    assert max(waits.asked) <= 30 * 1.2
    assert waits.asked[11] >= 30 * 0.8
    waits.asked.clear()
    bench.slices.failures = [ApiUnavailableError("down")]
    bench.slices.wipe()
    eventually(lambda: bench.published() == NAMES)
    assert any(asked <= 0.12 for asked in waits.asked)


def gaps(pace: WritePacing, times: int, rival_s: float, start: float = 0.0) -> tuple[list[float], float]:
    """How long each of our answers waits when somebody undoes each `rival_s` later, and the time after."""
    now, waits = start, []
    for _ in range(times):
        now += rival_s
        waits.append(pace.wait_s(MANY, now))
        now += waits[-1]
        assert pace.wait_s(MANY, now) == 0, "it is due when it said"
        pace.wrote(MANY, now)
    return waits, now


MANY, OTHER = Pool("node-a", (SliceContent(),)), Pool("node-a", (SliceContent(), SliceContent()))


@pytest.mark.parametrize("rival_s", [0.001, 3.0, 30.0, 59.0])
def test_answers_to_a_rival_become_rarer_and_stay_rare(rival_s: float) -> None:
    pace = WritePacing()
    pace.wrote(MANY, 0.0)
    waits, _ = gaps(pace, 30, rival_s)
    assert waits == pytest.approx([0] * 10 + [1, 2, 4, 8, 16] + [30] * 15)


def test_answers_are_prompt_again_after_a_calm_minute() -> None:
    pace = WritePacing()
    pace.wrote(MANY, 0.0)
    _, now = gaps(pace, 20, 0.1)
    assert pace.contested
    waits, _ = gaps(pace, 1, 61.0, now)
    assert waits == [0]


def test_own_change_does_not_wait_for_a_rival() -> None:
    pace = WritePacing()
    pace.wrote(MANY, 0.0)
    _, now = gaps(pace, 20, 0.1)
    assert pace.wait_s(OTHER, now + 0.1) == 0
    pace.wrote(OTHER, now + 0.1)
    assert pace.wait_s(OTHER, now + 0.2) == pytest.approx(30), "the rival is still there"


def test_wait_ends_when_the_rival_puts_things_right() -> None:
    pace = WritePacing()
    pace.wrote(MANY, 0.0)
    _, now = gaps(pace, 20, 0.1)
    assert pace.wait_s(MANY, now + 1) == pytest.approx(30)
    assert pace.wait_s(MANY, now + 11) == pytest.approx(20)
    pace.not_needed()
    assert pace.wait_s(MANY, now + 12) == pytest.approx(30)


def test_rival_is_answered_rarely_but_own_changes_go_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "_PROMPT_ANSWERS", 3)
    monkeypatch.setattr(module, "_QUIET_AFTER_WRITE_S", 0.001)

    def spoil(obj: dict) -> dict:
        if threading.current_thread() is bench.publisher._worker._thread:
            threading.Timer(0.01, bench.slices.spoil, kwargs={"devices": []}).start()
        return obj

    bench.slices.store = spoil
    bench.start()
    eventually(lambda: "second publisher" in (bench.publisher.problem or ""))
    assert len(bench.slices.writes) == 4, "one create and three prompt answers"
    bench.slices.store = lambda obj: obj
    bench.inventory = inventory(h100(0))
    bench.publisher.mark_dirty()
    eventually(lambda: bench.published() == [GPU_0])
    eventually(lambda: bench.publisher.problem is None)


def test_slices_that_change_while_it_waits_are_compared_again(bench: Bench) -> None:
    """Else each late write would meet a conflict, and a steady rival would always win."""
    bench.start()
    assert bench.publisher.wait_published(20)
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
    assert waits.asked == [0.05]
    assert [verb for verb, _ in bench.slices.writes] == ["create", "update"]


def test_stop_ends_the_thread_while_it_waits_to_try_again(bench: Bench) -> None:
    bench.slices.failures = [ApiUnavailableError("down", retry_after_s=60.0)] * 10
    bench.start()
    eventually(lambda: bench.publisher.problem == "down")
    started = time.monotonic()
    bench.publisher.stop()
    assert time.monotonic() - started < 20
    assert not bench.publisher._worker._thread.is_alive()


def test_stop_is_harmless_before_the_start(bench: Bench) -> None:
    bench.publisher.stop()


# --- our turn ------------------------------------------------------------------------------------


@pytest.fixture
def quick_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEADERSHIP_AGAIN_S", 0.02)


def test_nothing_is_written_while_another_instance_publishes(bench: Bench) -> None:
    bench.our_turn = False
    bench.start()
    eventually(lambda: bench.publisher.standing_by)
    assert bench.publisher.standing_by.startswith("standing by for another instance")
    assert bench.publisher.problem is None, "that is no fault"
    assert (settled(bench), bench.owner_reads) == (0, 0)
    assert not bench.publisher.wait_published(0)


def test_publishing_is_taken_up_when_the_other_instance_ends(
    bench: Bench, quick_turns: None, logs: list
) -> None:
    bench.our_turn = False
    bench.start()
    eventually(lambda: bench.publisher.standing_by)
    time.sleep(0.1)
    bench.our_turn = True
    assert bench.publisher.wait_published(20), "without anybody marking it dirty"
    assert (bench.publisher.standing_by, bench.publisher.problem) == (None, None)
    told = [line["event"] for line in logs if line["event"].startswith("publishing_")]
    assert told == ["publishing_stands_by", "publishing_resumed"]


def test_wipe_is_left_to_the_instance_whose_turn_it_is(running: Bench, quick_turns: None) -> None:
    running.our_turn = False
    running.slices.wipe()
    eventually(lambda: running.publisher.standing_by)
    assert settled(running) == 1
    running.our_turn = True
    eventually(lambda: running.published() == NAMES)


def test_turn_that_ends_while_the_publisher_waits_is_over(bench: Bench) -> None:
    bench.start()
    assert bench.publisher.wait_published(20)

    class Handover(Waits):
        def wait(self, timeout: float | None = None) -> bool:
            bench.our_turn = timeout is None
            return super().wait(timeout)

    bench.publisher._worker._stopping = Handover()
    bench.slices.spoil(devices=[])
    eventually(lambda: bench.publisher.standing_by)
    assert len(bench.slices.writes) == 1


def test_directory_that_cannot_be_read_is_a_problem_and_no_end(bench: Bench) -> None:
    bench.publisher._may_publish = failing = Failing(StateError("cannot read /x: permission was denied"))
    bench.start()
    eventually(lambda: bench.publisher.problem == "cannot read /x: permission was denied")
    failing.error = None
    assert bench.publisher.wait_published(20)


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error

    def __call__(self) -> bool:
        if self.error is not None:
            raise self.error
        return True


# --- slices that do not go away ------------------------------------------------------------------


@pytest.mark.parametrize("pool_name", ["another", NODE])
def test_slice_that_cannot_be_deleted_keeps_nothing_from_being_written(
    bench: Bench, logs: list, pool_name: str
) -> None:
    like = {"metadata": {}, "spec": {"pool": {"name": pool_name, "generation": 1, "resourceSliceCount": 1}}}
    bench.slices.plant("zz-foreign", like)
    bench.slices.guarded.add("zz-foreign")
    bench.start()
    assert bench.publisher.wait_published(20)
    assert bench.published() == NAMES
    eventually(lambda: bench.slices.refusals >= 3)
    assert bench.publisher.problem == (
        "a slice that is obsolete is still there: delete resource slice zz-foreign: a webhook said no (HTTP 403)"
    )
    assert [verb for verb, _ in bench.slices.writes] == ["create"], "and nothing is written twice"
    assert {str(error) for error in bench.heard.failures} == {
        "delete resource slice zz-foreign: a webhook said no (HTTP 403)"
    }
    bench.inventory = inventory(h100(0))
    bench.publisher.mark_dirty()
    eventually(lambda: bench.published() == [GPU_0])
    bench.slices.wipe()
    bench.slices.plant("zz-foreign", like)
    eventually(lambda: bench.published() == [GPU_0])
    bench.slices.guarded.clear()
    eventually(lambda: bench.publisher.problem is None)
    assert len(bench.slices.snapshot()) == 1
    assert len([line for line in logs if line["event"] == "slice_not_deleted"]) == 1


def test_slice_that_cannot_be_deleted_is_left_behind_in_an_older_generation(running: Bench) -> None:
    """Of the same generation it would be taken for a part of the pool, which would then be invalid."""
    double = running.slices.snapshot()[0]
    running.slices.guarded.add("00000-zz")
    running.slices.plant("00000-zz", double)
    eventually(lambda: running.slices.refusals >= 2)
    generations = {
        entry["metadata"]["name"]: entry["spec"]["pool"]["generation"] for entry in running.slices.snapshot()
    }
    assert generations == {"00000-zz": 1, double["metadata"]["name"]: 2}
    assert settled(running) == 2


def test_refused_deletions_are_tried_again_ever_more_rarely(
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
        self.faulty: Callable[[dict], bool] = lambda entry: False
        self.refused: list[str] = []
        self.store = self._checked

    def _checked(self, entry: dict) -> dict:
        if self.faulty(entry):
            self.refused.append(entry["metadata"]["name"])
            raise ApiRejectedError("slice: spec.devices[3]: Invalid value (HTTP 422)", status=422)
        return entry

    def by_index(self) -> list[tuple[int, int]]:
        """Generation and number of devices of each slice."""
        return [
            (entry["spec"]["pool"]["generation"], len(entry["spec"].get("devices", [])))
            for entry in self.snapshot()
        ]


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(refusals, "_FIRST_S", 0.05)
    monkeypatch.setattr(refusals, "_MOST_S", 0.2)
    made = Bench(Refusing())
    made.inventory = inventory(*FLEET)
    yield made
    made.publisher.stop()


def has_many(entry: dict) -> bool:
    return (
        entry["metadata"]["generateName"].startswith("00001-") and len(entry["spec"].get("devices", [])) > 0
    )


def test_a_refused_slice_costs_no_other_its_place_and_is_tried_again(refusing: Bench, logs: list) -> None:
    slices: Any = refusing.slices
    slices.faulty = has_many
    refusing.start()
    eventually(lambda: slices.by_index() == [(1, 64), (1, 0), (1, 2)])
    eventually(lambda: len(refusing.heard.failures) >= 5)
    assert slices.by_index() == [(1, 64), (1, 0), (1, 2)]
    stored = [name for verb, name in slices.writes if name.startswith(("00000", "00002"))]
    assert len(stored) == 2, "the others are written once"
    assert "a slice is not what it should be: slice: spec.devices[3]" in str(refusing.publisher.problem)
    assert not refusing.publisher.wait_published(0)
    assert [line["event"] for line in logs].count("slice_refused") == 1
    slices.faulty = lambda entry: False
    eventually(lambda: refusing.publisher.problem is None)
    assert slices.by_index() == [(1, 64), (1, 64), (1, 2)]
    assert refusing.publisher.wait_published(20)


def test_devices_are_not_published_without_the_counters_that_they_consume(refusing: Bench) -> None:
    slices: Any = refusing.slices
    seen: list[list[tuple[int, int]]] = []
    refusing.inventory = inventory(*(cut(number) for number in range(9)))
    slices.faulty = lambda entry: bool(entry["spec"].get("sharedCounters"))
    refusing.start()
    eventually(lambda: len(slices.by_index()) > 2)
    before, tries = slices.by_index(), len(slices.refused)
    while len(slices.refused) < tries + 8:
        refusing.publisher.mark_dirty()
        seen.append([*slices.by_index()])
        assert not [
            device
            for entry in slices.snapshot()
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
    refusing.start()
    assert refusing.publisher.wait_published(20)
    slices.faulty = lambda entry: (
        any(
            device["attributes"]["productName"]["string"] == "new"
            for device in entry["spec"].get("devices", [])[5:6]
        )
        and entry["metadata"]["generateName"].startswith("00001-")
    )
    changed = [replace(gpu, product_name="new") for gpu in FLEET]
    refusing.inventory = inventory(*changed[:70], *changed[71:])
    refusing.publisher.mark_dirty()
    eventually(lambda: [count for _, count in slices.by_index()] == [64, 63, 1])
    eventually(lambda: len(slices.refused) >= 3)
    generations = {generation for generation, _ in slices.by_index()}
    assert generations == {2}, "the pool is whole"
    middle = slices.snapshot()[1]["spec"]["devices"]
    assert {device["attributes"]["productName"]["string"] for device in middle} != {"new"}
    names = [name for entry in slices.snapshot() for name in (d["name"] for d in entry["spec"]["devices"])]
    assert len(names) == len(set(names))
    slices.faulty = lambda entry: False
    eventually(lambda: refusing.publisher.problem is None)
    assert slices.by_index() == [(2, 64), (2, 64), (2, 1)]


def test_a_server_that_refuses_everything_is_asked_ever_more_rarely(refusing: Bench) -> None:
    slices: Any = refusing.slices
    slices.faulty = lambda entry: True
    began = time.monotonic()
    refusing.start()
    while time.monotonic() < began + 1.5:
        refusing.publisher.mark_dirty()
        time.sleep(0.01)
    most = 3 * 2 * (4 + (time.monotonic() - began) / 0.2)
    assert len(slices.refused) <= most, (
        "three slices and what would stand in for them, at 0, 0.05, 0.15, 0.35, 0.55 s"
    )
    slices.faulty = lambda entry: False
    eventually(lambda: refusing.publisher.problem is None)
    assert [count for _, count in slices.by_index()] == [64, 64, 2]


def test_devices_go_with_the_counters_that_are_refused() -> None:
    use = {"name": "b", "consumesCounters": [{"counterSet": "gpu", "counters": {"memory": {"value": "1Gi"}}}]}
    pool = Pool(
        NODE,
        (
            SliceContent(shared_counters=({"name": "gpu", "counters": {"memory": {"value": "8Gi"}}},)),
            SliceContent(devices=({"name": "a"}, use)),
        ),
    )
    assert with_stand_ins(pool, {}) == pool
    assert with_stand_ins(pool, {0: SliceContent()}).slices == (
        SliceContent(),
        SliceContent(devices=({"name": "a"},)),
    )
    assert with_stand_ins(pool, {1: SliceContent(devices=({"name": "gone"}, use))}).slices == (
        pool.slices[0],
        SliceContent(devices=(use,)),
    )


# --- a server that drops fields, over a restart --------------------------------------------------


@pytest.fixture
def dropping(bench: Bench) -> Bench:
    """Published on a server that drops capacities, and stopped."""
    bench.slices.store = without_capacity
    bench.start()
    assert bench.publisher.wait_published(20)
    bench.publisher.stop()
    assert bench.slices.dry_runs == []
    return Bench(bench.slices)


def test_restart_writes_nothing_on_a_server_that_drops_fields(dropping: Bench, logs: list) -> None:
    before = dropping.slices.snapshot()
    dropping.start()
    assert dropping.publisher.wait_published(20)
    assert settled(dropping) == 1
    dropping.slices.on_change()
    assert settled(dropping) == 1
    assert len(dropping.slices.dry_runs) == 1, "asked once"
    assert dropping.slices.snapshot() == before
    assert [line["event"] for line in logs].count("slice_fields_dropped") == 2, "once an instance"
    dropping.publisher.stop()


def test_restart_writes_what_the_server_keeps_by_now(dropping: Bench) -> None:
    dropping.slices.store = lambda obj: obj
    dropping.start()
    assert dropping.publisher.wait_published(20)
    assert [verb for verb, _ in dropping.slices.writes] == ["create", "update"]
    eventually(
        lambda: all("capacity" in device for device in dropping.slices.snapshot()[0]["spec"]["devices"])
    )
    dropping.publisher.stop()


def test_real_difference_is_written_without_asking(dropping: Bench) -> None:
    dropping.slices.spoil(devices=[])
    dropping.start()
    assert dropping.publisher.wait_published(20)
    dropping.slices.spoil(devices=[{"name": "intruder", "attributes": {}}])
    eventually(lambda: dropping.published() == NAMES)
    assert settled(dropping) == 3
    dropping.publisher.stop()


@pytest.mark.parametrize("status", [400, 409])
def test_server_that_cannot_be_asked_is_written_to(dropping: Bench, status: int) -> None:
    dropping.slices.dry_run_error = ApiRejectedError("a webhook has side effects", status=status)
    dropping.start()
    if status == 409:  # the slice changed meanwhile: look again
        eventually(lambda: dropping.publisher.problem == "a webhook has side effects")
        dropping.slices.dry_run_error = None
    assert dropping.publisher.wait_published(20)
    assert settled(dropping) == (2 if status == 400 else 1)
    dropping.publisher.stop()


def test_gate_that_is_enabled_later_is_noticed(dropping: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drop_memory, "_ASK_AGAIN_S", 0.05)
    dropping.start()
    assert dropping.publisher.wait_published(20)
    eventually(lambda: len(dropping.slices.dry_runs) >= 4)
    assert len(dropping.slices.writes) == 1
    dropping.slices.dry_run_error = ApiUnavailableError("down")
    asked = len(dropping.slices.dry_runs)
    eventually(lambda: len(dropping.slices.dry_runs) >= asked + 2)
    assert dropping.publisher.problem is None
    dropping.slices.dry_run_error = None
    dropping.slices.store = lambda obj: obj
    eventually(lambda: len(dropping.slices.writes) == 2)
    eventually(
        lambda: all("capacity" in device for device in dropping.slices.snapshot()[0]["spec"]["devices"])
    )
    asked = len(dropping.slices.dry_runs)
    time.sleep(0.15)
    assert len(dropping.slices.dry_runs) == asked, "nothing is left to ask about"
    dropping.publisher.stop()


def test_publisher_sleeps_when_there_is_nothing_to_do(dropping: Bench) -> None:
    dropping.start()
    assert dropping.publisher.wait_published(20)
    settled(dropping)
    looks, real = [], dropping.publisher._publish_once
    dropping.publisher._publish_once = lambda: looks.append(real())
    time.sleep(0.2)
    assert looks == []
    dropping.publisher.stop()


def test_lag_is_counted_from_the_first_change_over_all_failures(bench: Bench) -> None:
    bench.publisher._worker._stopping = Waits()
    refused = ApiUnavailableError("create slice: no answer")
    bench.slices.failures = [refused, refused]
    bench.publisher._marked_at = time.monotonic() - 100
    bench.start()
    assert bench.publisher.wait_published(20)
    (lag,) = bench.heard.lags
    assert 100 <= lag < 200
    assert bench.heard.failures == [refused, refused]
    bench.inventory = inventory(h100(0))
    bench.publisher.mark_dirty()
    eventually(lambda: len(bench.heard.lags) == 2)
    assert bench.heard.lags[1] < 50


def test_no_lag_is_told_where_nothing_had_to_be_written_or_another_instance_publishes(bench: Bench) -> None:
    bench.our_turn = False
    bench.publisher._marked_at = time.monotonic() - 100
    bench.start()
    eventually(lambda: bench.publisher.standing_by)
    bench.our_turn = True
    bench.publisher.mark_dirty()
    assert bench.publisher.wait_published(20)
    assert settled(bench) == len(bench.heard.lags) == 1
    assert bench.heard.lags[0] < 50


def test_what_the_server_can_take_is_looked_at_again_when_it_is_due(bench: Bench) -> None:
    """Nothing else wakes the publisher: the fake tells it of no write."""
    bench.slices.on_change = lambda: None
    asked: list[Inventory] = []

    class Partitions:
        def usable(self, found: Inventory) -> Inventory:
            asked.append(found)
            return found if len(asked) == 3 else Inventory()

        @property
        def ask_at(self) -> float:
            return math.inf if len(asked) == 3 else time.monotonic() + 0.01

    bench.publisher._partitions = Partitions()
    bench.start()
    eventually(lambda: bench.published() == NAMES)
    assert len(asked) == 3
