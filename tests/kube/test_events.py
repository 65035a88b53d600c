"""Events as users read them; runs against the playground and a real server."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest

from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.events import EventWriter
from dra_driver.model.claim import ClaimRef
from dra_driver.model.problems import EventObject, claim_object, node_object
from tests.kube.support import DRIVER

_START = datetime(2026, 8, 7, 12, tzinfo=UTC)


class Time:
    """The clocks of a writer, moved by hand."""

    def __init__(self) -> None:
        self.passed = 0.0

    def clock(self) -> float:
        return 1000 + self.passed

    def now(self) -> datetime:
        return _START + timedelta(seconds=self.passed)


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def writer(target, time):
    return EventWriter(target.api, DRIVER, target.node, clock=time.clock, now=time.now)


def unique(kind, *, name=None, namespace="default"):
    uid = uuid.uuid4().hex
    return EventObject(kind, name or f"x-{uid[:8]}", uid, namespace)


def events_of(target, about):
    """As `kubectl describe` finds them."""
    terms = {"name": about.name, "uid": about.uid, "kind": about.kind}
    selector = ",".join(f"involvedObject.{key}={value}" for key, value in terms.items())
    path = f"/api/v1/namespaces/{about.namespace or 'default'}/events"
    answer = target.api.request("GET", path, query={"fieldSelector": selector}, action="list")
    return answer["items"]


def test_an_event_says_who_what_and_why(target, writer):
    claim = claim_object(ClaimRef("default", f"claim-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex))
    writer.write(claim, "PrepareFailed", "GPU gpu-0\n is   lost; replace it", warning=True)
    (event,) = events_of(target, claim)
    assert event["involvedObject"] == {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "name": claim.name,
        "namespace": "default",
        "uid": claim.uid,
    }
    assert (event["type"], event["reason"]) == ("Warning", "PrepareFailed")
    assert event["message"] == "GPU gpu-0 is lost; replace it"
    assert event["source"] == {"component": DRIVER, "host": target.node}
    assert (event["reportingComponent"], event["reportingInstance"]) == (DRIVER, target.node)
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2026-08-07T12:00:00Z"
    assert event["count"] == 1


@pytest.mark.parametrize("kind", ["Pod", "ResourceSlice", "Node"])
def test_every_kind_of_object_has_events(target, writer, kind):
    about = unique(kind, namespace="default" if kind == "Pod" else "")
    if kind == "Node":
        about = node_object(target.node)
        assert about.uid == target.node
    writer.write(about, "GPURecovered", "well again", warning=False)
    (event,) = events_of(target, about)
    assert (event["type"], event["metadata"]["namespace"]) == ("Normal", "default")


def test_equal_events_are_counted_for_ten_minutes_after_the_last(target, writer, time):
    about = unique("Pod")
    for passed, times in ((0, 1), (300, 1), (899, 40)):
        time.passed = passed
        writer.write(about, "PrepareFailed", "why", warning=True, times=times)
    (event,) = events_of(target, about)
    assert (event["count"], event["lastTimestamp"]) == (42, "2026-08-07T12:14:59Z")
    assert event["firstTimestamp"] == "2026-08-07T12:00:00Z"
    time.passed = 899 + 600
    writer.write(about, "PrepareFailed", "why", warning=True)
    assert sorted(event["count"] for event in events_of(target, about)) == [1, 42]


def test_different_text_reason_type_or_object_is_a_new_event(target, writer):
    about = unique("Pod")
    writer.write(about, "A", "why", warning=True)
    writer.write(about, "B", "why", warning=True)
    writer.write(about, "A", "why not", warning=True)
    writer.write(about, "A", "why", warning=False)
    found = events_of(target, about)
    assert [event["count"] for event in found] == [1, 1, 1, 1]
    namesake = EventObject(about.kind, about.name, "another", about.namespace)
    writer.write(namesake, "A", "why", warning=True)
    assert len(events_of(target, namesake)) == 1


def test_an_event_that_the_server_forgot_is_recreated(target, writer):
    about = unique("Pod")
    writer.write(about, "A", "why", warning=True)
    (event,) = events_of(target, about)
    name = event["metadata"]["name"]
    target.api.request("DELETE", f"/api/v1/namespaces/default/events/{name}", action="delete")
    writer.write(about, "A", "why", warning=True, times=3)
    (event,) = events_of(target, about)
    assert (event["count"], event["metadata"]["name"] == name) == (3, False)


@pytest.mark.parametrize(("text", "expected"), [("a" * 1024, "a" * 1024), ("é" * 600, "é" * 510 + "…")])
def test_a_message_has_at_most_1024_bytes(target, writer, text, expected):
    about = unique("Pod")
    writer.write(about, "A", text, warning=True)
    (event,) = events_of(target, about)
    assert event["message"] == expected


def test_names_are_valid_whatever_the_object_is_called(target, writer):
    about = unique("Pod", name="a" * 199 + "." + "b" * 53)
    writer.write(about, "A", "why", warning=True)
    writer.write(about, "A", "other", warning=True)
    names = {event["metadata"]["name"] for event in events_of(target, about)}
    assert len(names) == 2
    assert all(name.startswith("a" * 199 + ".") and ".." not in name for name in names)


class LosesAnswers(ApiClient):
    """The connection breaks after the server has executed the request."""

    losing = 0

    def request(self, *args, **options):
        answer = super().request(*args, **options)
        if self.losing:
            self.losing -= 1
            raise ApiUnavailableError("the answer got lost")
        return answer


def test_an_answer_that_was_lost_counts_once(target):
    client = LosesAnswers(target.api.endpoint, timeout_s=60)
    writer = EventWriter(client, DRIVER, target.node)
    about = unique("Pod")
    for times in (1, 2):  # created, then counted up
        client.losing = 1
        with pytest.raises(ApiUnavailableError):
            writer.write(about, "A", "why", warning=True, times=times)
        writer.write(about, "A", "why", warning=True, times=times)
    (event,) = events_of(target, about)
    assert event["count"] == 3
    client.close()


def test_a_refusal_is_raised(target, writer):
    with pytest.raises(ApiRejectedError, match="create event A for Pod x-") as caught:
        writer.write(unique("Pod", namespace="absent"), "A", "why", warning=True)
    assert caught.value.status == 404
