"""Node events of publishing."""

from __future__ import annotations

import pytest

from dra_driver.errors import ApiUnavailableError
from dra_driver.reporting.node_events import NodeEvents


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, bool]] = []
        self.texts: list[str] = []
        self.counted: list[object] = []

    def node_event(self, reason: str, message: str, *, warning: bool) -> None:
        self.events.append((reason, warning))
        self.texts.append(message)

    def published(self, lag_s: float) -> None:
        self.counted.append(lag_s)

    def publish_failed(self, error: Exception) -> None:
        self.counted.append(error)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def news(told: Told) -> NodeEvents:
    return NodeEvents(told, told, lambda: True)


def test_writes_of_slices_are_counted_and_need_no_event(news: NodeEvents, told: Told) -> None:
    error = ApiUnavailableError("no answer")
    news.publish_failed(error)
    news.published(0.5)
    assert (told.counted, told.events) == ([error, 0.5], [])


def test_what_is_wrong_with_slices_is_told(news: NodeEvents, told: Told) -> None:
    news.contested("a second publisher")
    news.device_left_out("device gpu-1: too many attributes")
    news.fields_dropped("DRADeviceTaints")
    assert [reason for reason, _ in told.events] == [
        "SlicesContested",
        "DeviceNotPublished",
        "SliceFieldsDropped",
    ]
    assert "DRADeviceTaints" in told.texts[-1]


def test_what_is_another_instances_turn_to_tell_is_not_told(told: Told) -> None:
    is_ours = False
    news = NodeEvents(told, told, lambda: is_ours)
    news.contested("fight")
    assert told.events == []
    is_ours = True
    news.contested("fight")
    assert told.events == [("SlicesContested", True)]
