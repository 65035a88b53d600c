"""Node events of publishing and of the driver."""

from __future__ import annotations

import pytest

from dra_driver.errors import ApiUnavailableError
from dra_driver.reporting.node_events import NodeEvents


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, bool]] = []
        self.texts: list[str] = []
        self.now = 0.0
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
    return NodeEvents(told, told, lambda: True, clock=lambda: told.now)


def test_passing_trouble_is_counted_but_not_told(news: NodeEvents, told: Told) -> None:
    error = ApiUnavailableError("no answer")
    for told.now in (0.0, 10.0, 29.0):
        news.publish_failed(error)
    news.published(0.5)
    told.now = 50.0
    news.publish_failed(error)
    assert told.events == []
    assert told.counted == [error, error, error, 0.5, error]


def test_lasting_trouble_is_told_once_and_its_end_too(news: NodeEvents, told: Told) -> None:
    for told.now in (0.0, 31.0, 60.0):
        news.publish_failed(ApiUnavailableError("no answer"))
    news.published(0.5)
    news.published(0.5)
    assert told.events == [("SlicesNotPublished", True), ("SlicesPublished", False)]
    assert "no answer" in told.texts[0]


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
    news = NodeEvents(told, told, lambda: is_ours, clock=lambda: told.now)
    news.contested("fight")
    for told.now in (0.0, 31.0):
        news.publish_failed(ApiUnavailableError("no answer"))
    assert told.events == []
    is_ours = True
    news.publish_failed(ApiUnavailableError("no answer"))
    assert told.events == [("SlicesNotPublished", True)]
