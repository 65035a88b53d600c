"""The file that keeps health over restarts, and the history of this run: what it keeps, reports and logs, and what
is only counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.errors import StateError
from dra_driver.health.book import HealthHistory, change_between
from dra_driver.health.store import HealthStore, KeptHealth, decode, encode
from dra_driver.model.health import HealthChange, HealthState, HealthTarget, Reason, Severity

XID = Reason("xid", "79", Severity.UNHEALTHY, 100, 120, "Xid 79: the GPU fell off the bus", reset_seen=True)
HOT = Reason("slowdown", "thermal", Severity.INFORMATION, 100, 100, "hot", "poll")
BAD = HealthState(HealthTarget("GPU-a"), (XID,), 3, None, (50, 100), 700)
PART = HealthState(HealthTarget("GPU-a", 3), (replace(XID, value="95"),), identity="MIG-1")
KEPT = KeptHealth("boot-1", "580.95.05", (BAD, PART))

_names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
_numbers = st.integers(0, 2**40)
_optional = st.none() | _numbers
_reasons = st.builds(
    Reason,
    key=st.sampled_from(["xid", "ecc", "gpu-lost"]),
    value=_names,
    severity=st.sampled_from([Severity.DEGRADED, Severity.UNHEALTHY, Severity.LOST]),
    since=_numbers,
    last_at=_numbers,
    text=_names,
    source=st.sampled_from(["event", "poll"]),
    reset_seen=st.booleans(),
)
_states = st.builds(
    HealthState,
    target=st.builds(HealthTarget, _names, _optional, _optional),
    reasons=st.lists(_reasons, min_size=1, max_size=3).map(tuple),
    ecc_uncorrected=_optional,
    identity=st.none() | _names,
    setbacks=st.lists(_numbers, max_size=3).map(tuple),
    held_until=_optional,
)
GPU, OTHER = HealthTarget("GPU-a"), HealthTarget("GPU-a", 3, 0)
S = Severity


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "health.json"


def test_file_of_a_newer_release_that_an_administrator_removed_is_written_again(path: Path) -> None:
    path.write_text(json.dumps({"version": 99}))
    store = HealthStore(path)
    assert store.load() is None
    with pytest.raises(StateError, match="install the newer release again"):
        store.save(KEPT)
    path.unlink()
    store.save(KEPT)
    assert (HealthStore(path).load(), store.problems()) == (KEPT, [])


@given(st.lists(_states, max_size=4, unique_by=lambda state: state.target), st.none() | _names)
def test_round_trip(states, version):
    kept = KeptHealth("boot", version, tuple(sorted(states, key=lambda state: state.target.order)))
    assert decode(encode(kept)) == kept


def test_nothing_is_kept_at_first(path):
    assert HealthStore(path).load() is None


def test_written_when_something_else_is_known(path):
    store = HealthStore(path)
    store.save(KEPT)
    assert HealthStore(path).load() == KEPT
    path.unlink()
    store.save(replace(KEPT, states=(PART, BAD, HealthState(HealthTarget("GPU-b")))))
    hot = replace(BAD, reasons=(HOT, XID))
    store.save(replace(KEPT, states=(hot, PART, HealthState(HealthTarget("GPU-b"), (HOT,)))))
    assert not path.exists(), "order, well GPUs and what comes and goes are no news"
    store.save(replace(KEPT, boot_id="boot-2"))
    assert json.loads(path.read_bytes())["bootID"] == "boot-2"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff{",
        b"[]",
        b'{"version": 0, "bootID": "b", "states": []}',
        b'{"version": 1, "states": []}',
        b'{"version": 1, "bootID": "b", "states": [{"gpuUUID": 5}]}',
        b'{"version": 1, "bootID": "b", "states": [{"gpuUUID": "a", "setbacks": ["x"]}]}',
    ],
)
def test_an_unreadable_file_is_set_aside_and_reported(path, content, logs):
    path.write_bytes(content)
    store = HealthStore(path)
    assert store.load() is None
    (aside,) = path.parent.glob("health.json.unreadable-*")
    assert aside.read_bytes() == content
    assert [line["event"] for line in logs] == ["health_unreadable"]
    store.save(KEPT)
    assert HealthStore(path).load() == KEPT


def test_a_disk_that_does_not_answer(path):
    path.write_text("no directory")
    path = path / "health.json"
    with pytest.raises(StateError, match=str(path.parent)):
        HealthStore(path).load()
    with pytest.raises(StateError, match=str(path)):
        HealthStore(path).save(KEPT)


def change(
    text: str, before: S = S.OK, after: S = S.OK, target: HealthTarget = GPU, at: int = 1
) -> HealthChange:
    return HealthChange(target, at, before, after, text)


def test_programs_that_fail_in_turns_leave_room_for_the_rest(logs) -> None:
    reported: list[HealthChange] = []
    history = HealthHistory(reported.append)
    history.add(change("it went bad", S.OK, S.DEGRADED))
    for at in range(1, 101):
        history.note(change("Xid 31", S.DEGRADED, S.DEGRADED, at=at))
        history.note(change("Xid 43", S.DEGRADED, S.DEGRADED, at=at))
        history.note(change("Xid 43", target=OTHER, at=at))
    kept = [(entry.target, entry.text, entry.times, entry.at) for entry in history.of("GPU-a")]
    assert kept == [
        (GPU, "it went bad", 1, 1), (GPU, "Xid 31", 100, 100), (GPU, "Xid 43", 100, 100), (OTHER, "Xid 43", 100, 100),
    ]  # fmt: skip
    assert len(reported) == len([line for line in logs if line["event"] == "health_changed"]) == 4


def test_a_slowdown_that_comes_and_goes_is_reported_once() -> None:
    reported: list[HealthChange] = []
    history = HealthHistory(reported.append)
    for _ in range(50):
        history.add(change("too hot", S.OK, S.INFORMATION))
        history.add(change("healthy again after: too hot", S.INFORMATION, S.OK))
    assert [entry.times for entry in history.of("GPU-a")] == [50, 50]
    assert len(reported) == 2


def test_each_time_that_a_gpu_goes_bad_and_recovers_is_reported() -> None:
    reported: list[HealthChange] = []
    history = HealthHistory(reported.append)
    for at in range(3):
        history.add(change("Xid 74", S.OK, S.UNHEALTHY, at=at))
        history.add(change("healthy again after: Xid 74", S.UNHEALTHY, S.OK, at=at))
        history.add(change("the NVIDIA driver requests a GPU reset", S.UNHEALTHY, S.UNHEALTHY, at=at))
    assert [entry.text for entry in reported] == [
        "Xid 74",
        "healthy again after: Xid 74",
        "the NVIDIA driver requests a GPU reset",
    ] * 3
    assert [entry.times for entry in history.of("GPU-a")] == [3, 3, 3]


def test_a_gpu_that_is_healthy_again_names_what_it_had_without_remedies() -> None:
    lost = Reason("gpu-lost", "", S.LOST, 1, 1, "the GPU does not answer; reset it")
    xid = Reason("xid", "79", S.LOST, 1, 1, "Xid 79: the GPU fell off the bus")
    ill = HealthState(GPU, (lost, xid))
    assert change_between(ill, HealthState(GPU), 2).text == "healthy again after: GPU lost, Xid 79"
    assert change_between(ill, HealthState(GPU, (xid,)), 2).text == "no longer: GPU lost"
