"""What the history keeps, tells and logs, and what is only counted."""

from __future__ import annotations

from dra_driver.health.history import HealthHistory, change_between
from dra_driver.model.health import HealthChange, HealthState, HealthTarget, Reason, Severity

GPU, OTHER = HealthTarget("GPU-a"), HealthTarget("GPU-a", 3, 0)
S = Severity


def change(
    text: str, before: S = S.OK, after: S = S.OK, target: HealthTarget = GPU, at: int = 1
) -> HealthChange:
    return HealthChange(target, at, before, after, text)


def test_programs_that_fail_in_turns_leave_room_for_the_rest(logs) -> None:
    told: list[HealthChange] = []
    history = HealthHistory(told.append)
    history.add(change("it went bad", S.OK, S.DEGRADED))
    for at in range(1, 101):
        history.note(change("Xid 31", S.DEGRADED, S.DEGRADED, at=at))
        history.note(change("Xid 43", S.DEGRADED, S.DEGRADED, at=at))
        history.note(change("Xid 43", target=OTHER, at=at))
    kept = [(entry.target, entry.text, entry.times, entry.at) for entry in history.of("GPU-a")]
    assert kept == [
        (GPU, "it went bad", 1, 1), (GPU, "Xid 31", 100, 100), (GPU, "Xid 43", 100, 100), (OTHER, "Xid 43", 100, 100),
    ]  # fmt: skip
    assert len(told) == len([line for line in logs if line["event"] == "health_changed"]) == 4


def test_a_slowdown_that_comes_and_goes_is_told_once() -> None:
    told: list[HealthChange] = []
    history = HealthHistory(told.append)
    for _ in range(50):
        history.add(change("too hot", S.OK, S.INFORMATION))
        history.add(change("healthy again after: too hot", S.INFORMATION, S.OK))
    assert [entry.times for entry in history.of("GPU-a")] == [50, 50]
    assert len(told) == 2


def test_each_time_that_a_gpu_goes_bad_and_well_is_told() -> None:
    told: list[HealthChange] = []
    history = HealthHistory(told.append)
    for at in range(3):
        history.add(change("Xid 74", S.OK, S.UNHEALTHY, at=at))
        history.add(change("healthy again after: Xid 74", S.UNHEALTHY, S.OK, at=at))
        history.add(change("the NVIDIA driver requests a GPU reset", S.UNHEALTHY, S.UNHEALTHY, at=at))
    assert [entry.text for entry in told] == [
        "Xid 74",
        "healthy again after: Xid 74",
        "the NVIDIA driver requests a GPU reset",
    ] * 3
    assert [entry.times for entry in history.of("GPU-a")] == [3, 3, 3]


def test_a_gpu_that_is_well_again_names_what_it_had_without_remedies() -> None:
    lost = Reason("gpu-lost", "", S.LOST, 1, 1, "the GPU does not answer; reset it")
    xid = Reason("xid", "79", S.LOST, 1, 1, "Xid 79: the GPU fell off the bus")
    ill = HealthState(GPU, (lost, xid))
    assert change_between(ill, HealthState(GPU), 2).text == "healthy again after: GPU lost, Xid 79"
    assert change_between(ill, HealthState(GPU, (xid,)), 2).text == "no longer: GPU lost"
