from __future__ import annotations

from dra_driver.base.backoff import Backoff


def test_waits_double_to_the_longest_and_begin_anew() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.step() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert 0.8 <= backoff.next() <= 1.2
    assert 1.6 <= backoff.next(0.0) <= 2.4


def test_waits_go_on_to_grow_when_what_was_tried_lasted_shorter_than_the_longest() -> None:
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
