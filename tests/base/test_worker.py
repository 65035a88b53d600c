from __future__ import annotations

import math
import threading
from collections.abc import Callable

import structlog

from dra_driver.base.worker import BackgroundWorker


def worker(
    work: Callable[[], float], on_crash: Callable[[Exception], float] = lambda _: 0.0
) -> BackgroundWorker:
    return BackgroundWorker("test", work, crash_event="test_failed", on_crash=on_crash)


def test_work_is_called_again_when_it_is_woken_and_not_before() -> None:
    calls: list[int] = []
    done = threading.Semaphore(0)

    def work() -> float:
        calls.append(1)
        done.release()
        return math.inf

    one = worker(work)
    one.start()
    assert done.acquire(timeout=20)
    one.wake()
    assert done.acquire(timeout=20)
    one.stop()
    assert len(calls) == 2


def test_wake_during_the_work_is_not_lost() -> None:
    seen: list[bool] = []
    again = threading.Event()

    def work() -> float:
        if seen:
            again.set()
        else:
            one.wake()
        seen.append(one._wake.is_set())
        return math.inf

    one = worker(work)
    one.start()
    assert again.wait(20)
    one.stop()
    assert seen == [True, False]


def test_what_work_raises_is_told_and_work_goes_on() -> None:
    crashes: list[str] = []
    healed = threading.Event()

    def work() -> float:
        if not crashes:
            raise ValueError("a surprise")
        healed.set()
        return math.inf

    def crashed(error: Exception) -> float:
        crashes.append(str(error))
        return 0.0

    with structlog.testing.capture_logs() as lines:
        one = worker(work, crashed)
        one.start()
        assert healed.wait(20)
        one.stop()
    assert crashes == ["a surprise"]
    assert [(line["event"], line["log_level"]) for line in lines] == [("test_failed", "error")]


def test_stop_ends_a_pause_within_the_work_and_may_come_before_the_start() -> None:
    told: list[bool] = []
    began = threading.Event()

    def work() -> float:
        began.set()
        told.append(one.pause(60))
        return 0.0

    one = worker(work)
    one.start()
    assert began.wait(20)
    one.stop()
    assert (told, one.is_stopping) == ([True], True)
    worker(work).stop()
