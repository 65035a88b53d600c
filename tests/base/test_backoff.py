from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.backoff import Backoff, TokenBucket
from tests.fakes.clock import Clock


def test_waits_double_to_the_longest_and_start_over() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.step() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert 0.8 <= backoff.next() <= 1.2
    assert 1.6 <= backoff.next(0.0) <= 2.4


def test_waits_continue_to_grow_when_what_was_tried_lasted_shorter_than_the_longest() -> None:
    backoff = Backoff(1.0, 5.0)
    waits = []
    for lasted_s in (0.0, 4.9, 5.0, 0.0):
        waits.append(backoff.step())
        backoff.reset(lasted_s)
    assert waits == [1.0, 2.0, 4.0, 1.0]


def test_no_wait_is_shorter_than_the_server_asks_and_none_is_like_another() -> None:
    waits = [Backoff(1.0, 5.0).next(30.0) for _ in range(50)]
    assert all(30.0 <= wait <= 36.0 for wait in waits)
    assert len(set(waits)) > 1
    assert all(0.5 <= Backoff(1.0, 5.0, spread=(0.5, 1.0)).next() <= 1.0 for _ in range(50))


def test_burst_passes_at_once_then_average_rules():
    clock = Clock()
    bucket = TokenBucket(5, 3, clock=clock, sleep=clock.pause)
    waits = [bucket.acquire() for _ in range(6)]
    assert waits == pytest.approx([0, 0, 0, 0.2, 0.2, 0.2])


def test_bucket_refills_to_burst_when_idle():
    clock = Clock()
    bucket = TokenBucket(5, 3, clock=clock, sleep=clock.pause)
    for _ in range(4):
        bucket.acquire()
    clock.now += 100
    assert [bucket.acquire() for _ in range(3)] == [0, 0, 0]
    assert bucket.acquire() > 0


@given(
    qps=st.floats(0.5, 100),
    burst=st.integers(1, 20),
    pauses=st.lists(st.floats(0, 2), min_size=1, max_size=60),
)
def test_rate_never_exceeds_burst_plus_average(qps, burst, pauses):
    clock = Clock()
    bucket = TokenBucket(qps, burst, clock=clock, sleep=clock.pause)
    for number, pause in enumerate(pauses, start=1):
        clock.now += pause
        bucket.acquire()
        assert number <= burst + clock.now * qps + 1e-6
