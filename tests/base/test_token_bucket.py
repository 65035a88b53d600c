"""The token bucket: burst, average, fairness."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.token_bucket import TokenBucket
from tests.fakes.clock import Clock


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


@pytest.mark.parametrize(("qps", "burst"), [(0, 1), (-1, 1), (1, 0)])
def test_nonsense_is_refused(qps, burst):
    with pytest.raises(ValueError, match="qps must be positive"):
        TokenBucket(qps, burst)
