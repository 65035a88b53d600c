"""What the driver relies on from an API server about slices; runs against the playground and a real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import pytest

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.api_errors import WatchExpiredError
from dra_driver.kube.client import group_path
from dra_driver.kube.slices import SliceCache
from dra_driver.slices.rules.diff import dropped_fields
from tests.fakes.tables import tabled
from tests.kube.support import DRIVER, bump, make_slice


@pytest.fixture
def slices(target: Any) -> SliceCache:
    return target.slices()


def reported(slices: SliceCache, version: str) -> Iterator[dict[str, Any]]:
    """The events after that version."""
    with closing(slices.open_watch(version)) as stream:
        yield from (event for event in stream if event["type"] != "BOOKMARK")


def test_create_returns_what_was_sent_when_valid(target, slices):
    sent = make_slice(target.node, count=3)
    stored = slices.create(sent)
    assert stored["spec"] == sent["spec"]
    assert stored["apiVersion"] == "resource.k8s.io/v1"
    assert stored["kind"] == "ResourceSlice"
    assert dropped_fields(sent, stored) == ()


def test_generated_name_keeps_index_when_prefix_is_long(target, slices):
    sent = make_slice(target.node)
    sent["metadata"]["generateName"] = f"0000a-{DRIVER}-{'x' * 80}-"
    name = slices.create(sent)["metadata"]["name"]
    assert len(name) == 63
    assert name.startswith(f"0000a-{DRIVER}-")


def test_list_shows_only_own_slices_when_others_exist(target, slices):
    other = SliceCache(target.api, DRIVER, f"{target.node}-other")
    foreign = other.create(make_slice(f"{target.node}-other"))
    mine = [slices.create(make_slice(target.node, index=i)) for i in (1, 0)]
    items, version = slices.list()
    assert [item["metadata"]["name"] for item in items] == sorted(m["metadata"]["name"] for m in mine)
    assert int(version) >= max(int(m["metadata"]["resourceVersion"]) for m in mine)
    assert all(item["apiVersion"] == "resource.k8s.io/v1" for item in items)
    assert {"gpu-0"} == {device["name"] for item in items for device in item["spec"]["devices"]}
    other.delete(foreign["metadata"]["name"], foreign["metadata"]["uid"])


def test_update_keeps_version_when_nothing_changes(slices, target):
    stored = slices.create(make_slice(target.node))
    assert slices.update(stored)["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]


def test_second_writer_is_refused_when_first_was_faster(target, slices):
    stored = slices.create(make_slice(target.node))
    slices.update(bump(stored))
    with pytest.raises(ApiRejectedError, match="update resource slice") as caught:
        slices.update(bump(bump(stored)))
    assert (caught.value.status, caught.value.reason) == (409, "Conflict")
    assert stored["metadata"]["name"] in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"), [("nodeName", "elsewhere"), ("driver", "other.example.com"), ("pool", None)]
)
def test_update_is_refused_when_immutable_field_changes(target, slices, field, value):
    stored = slices.create(make_slice(target.node))
    value = value or stored["spec"]["pool"] | {"name": "other"}
    changed = stored | {"spec": stored["spec"] | {field: value}}
    with pytest.raises(ApiRejectedError, match="immutable") as caught:
        slices.update(changed)
    assert (caught.value.status, caught.value.reason) == (422, "Invalid")


@tabled(
    "change", "field", more=[({"devices": [{"name": f"d{i}"} for i in range(129)]}, "spec.devices: Too many")]
)
def test_create_is_refused_when_invalid(target, slices, change, field):
    with pytest.raises(ApiRejectedError) as caught:
        slices.create(make_slice(target.node, **change))
    assert caught.value.status == 422
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


def test_delete_succeeds_when_object_is_gone(target, slices):
    stored = slices.create(make_slice(target.node))["metadata"]
    slices.delete(stored["name"], stored["uid"], stored["resourceVersion"])
    slices.delete(stored["name"], stored["uid"], stored["resourceVersion"])
    assert slices.list()[0] == []


@pytest.mark.parametrize("stale", ["uid", "version"])
def test_delete_is_refused_when_precondition_fails(target, slices, stale):
    stored = slices.create(make_slice(target.node))
    slices.update(bump(stored))
    metadata = stored["metadata"]
    uid = "00000000-0000-0000-0000-000000000000" if stale == "uid" else metadata["uid"]
    with pytest.raises(ApiRejectedError) as caught:
        slices.delete(metadata["name"], uid, metadata["resourceVersion"] if stale == "version" else None)
    assert caught.value.status == 409


def test_watch_reports_changes_in_order_when_resumed_from_list(target, slices):
    _, version = slices.list()
    stored = slices.create(make_slice(target.node))
    updated = slices.update(bump(stored))
    slices.delete(stored["metadata"]["name"], stored["metadata"]["uid"])
    events = list(islice(reported(slices, version), 3))
    assert [event["type"] for event in events] == ["ADDED", "MODIFIED", "DELETED"]
    versions = [event["object"]["metadata"]["resourceVersion"] for event in events]
    assert versions[:2] == [entry["metadata"]["resourceVersion"] for entry in (stored, updated)]
    assert int(versions[2]) > int(versions[1])


def test_watch_resumes_without_loss_when_continued_from_an_event(target, slices):
    _, version = slices.list()
    first, second = (slices.create(make_slice(target.node, index=i)) for i in (0, 1))
    for stored in (first, second):
        event = next(reported(slices, version))["object"]
        assert event["metadata"] == stored["metadata"]
        version = event["metadata"]["resourceVersion"]


def test_watch_hides_slices_of_other_nodes(target, slices):
    _, version = slices.list()
    other = SliceCache(target.api, DRIVER, f"{target.node}-other")
    foreign = other.create(make_slice(f"{target.node}-other"))["metadata"]
    mine = slices.create(make_slice(target.node))
    other.delete(foreign["name"], foreign["uid"])
    assert next(reported(slices, version))["object"]["metadata"] == mine["metadata"]


def test_watch_expires_when_version_is_ancient(target, slices):
    if target.server is None:
        pytest.skip("a real history cannot be cut short")
    version = slices.list()[1]
    target.server.store.forget()
    with pytest.raises(WatchExpiredError) as caught:
        next(reported(slices, version))
    assert caught.value.status == 410


def test_taint_gets_time_when_sent_without(target, slices):
    taint = {"key": "gpu.nvidia.com/unhealthy", "value": "xid-79", "effect": "NoSchedule"}
    sent = make_slice(target.node)
    sent["spec"]["devices"][0]["taints"] = [taint]
    stored = slices.create(sent)
    missing = dropped_fields(sent, stored)
    if missing:
        pytest.skip(f"this server dropped {missing}")
    assert stored["spec"]["devices"][0]["taints"][0]["timeAdded"]


def test_watch_that_begins_with_a_list_has_a_bookmark_at_its_end(target, slices):
    """As kubectl's does since 1.36: without the bookmark, `kubectl wait` waits for ever."""
    stored = slices.create(make_slice(target.node))
    query = {
        "watch": "true",
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "20",
        "fieldSelector": f"spec.nodeName={target.node}",
    }
    path = group_path("resourceslices")
    with closing(target.api.watch(path, action="watch slices", query=query, idle_timeout_s=20)) as stream:
        first, end = islice(stream, 2)
    assert (first["type"], first["object"]["metadata"]["name"]) == ("ADDED", stored["metadata"]["name"])
    assert end["type"] == "BOOKMARK"
    assert end["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
