"""Asking a server what it would store: nothing is written, and what it would drop shows in the answer."""

from __future__ import annotations

import pytest
from playground.apiserver import PlaygroundApiServer
from playground.apiserver.operations import now

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.slice_cache import SliceCache
from dra_driver.kube.slices import SliceClient
from dra_driver.kube.versions import ResourceApi
from dra_driver.slices.rules.dropped_fields import could_be_dropped
from tests.kube.support import DRIVER, bump, make_slice

_TAINT = {"key": "gpu.nvidia.com/x", "value": "y", "effect": "NoSchedule"}


def test_dry_run_answers_like_an_update_and_stores_nothing(target):
    slices = target.slices()
    stored = slices.create(make_slice(target.node))
    answer = slices.update(bump(stored), dry_run=True)
    assert answer["spec"] == bump(stored)["spec"]
    assert answer["metadata"]["uid"] == stored["metadata"]["uid"]
    items, _ = slices.list()
    assert items == [stored]
    assert slices.update(bump(stored))["spec"] == answer["spec"]


def test_dry_run_is_refused_like_an_update(target):
    slices = target.slices()
    stored = slices.create(make_slice(target.node))
    slices.update(bump(stored))
    with pytest.raises(ApiRejectedError, match="try an update of resource slice") as caught:
        slices.update(bump(bump(stored)), dry_run=True)
    assert caught.value.status == 409
    [newer], _ = slices.list()
    with pytest.raises(ApiRejectedError) as caught:
        slices.update(newer | {"spec": newer["spec"] | {"devices": [{"name": "Not_A_Label"}]}}, dry_run=True)
    assert caught.value.status == 422


@pytest.mark.parametrize("served", [("v1",), ("v1beta1",)])
def test_dry_run_shows_what_a_gate_drops(connect, served):
    with PlaygroundApiServer(gates={"DRADeviceTaints": False}, served=served) as server:
        slices = SliceClient(ResourceApi(connect(server)), DRIVER, "n")
        stored = slices.create(make_slice("n"))
        wanted = stored | {"spec": make_slice("n", devices=[{"name": "gpu-0", "taints": [_TAINT]}])["spec"]}
        assert slices.update(wanted, dry_run=True)["spec"]["devices"] == [{"name": "gpu-0"}]
        assert slices.list()[0] == [stored]


def test_dry_run_through_the_cache_changes_nothing_in_it(server, connect):
    client = SliceClient(ResourceApi(connect(server)), DRIVER, "n")
    stored = client.create(make_slice("n"))
    told = []
    cache = SliceCache(client, lambda: told.append(1))
    cache.start()
    assert cache.synced.wait(20)
    cache.dry_run(bump(stored))
    assert cache.snapshot() == [stored]
    assert server.writes("resourceslices") == [
        request for request in server.writes() if request.method == "POST"
    ]
    cache.stop()
    assert told == [1]


def test_every_verb_can_be_tried(server, connect):
    client = connect(server)
    path = "/apis/resource.k8s.io/v1/resourceslices"
    query = {"dryRun": "All"}
    created = client.request("POST", path, action="try", query=query, body=make_slice("n"))
    assert created["metadata"]["uid"]
    stored = SliceClient(ResourceApi(client), DRIVER, "n").create(make_slice("n"))
    one = f"{path}/{stored['metadata']['name']}"
    patch = {"metadata": {"labels": {"a": "b"}}}
    merge = "application/merge-patch+json"
    answer = client.request("PATCH", one, action="try", query=query, body=patch, content_type=merge)
    assert answer["metadata"]["labels"] == {"a": "b"}
    client.request("DELETE", one, action="try", query=query)
    client.request("DELETE", one, action="try", body={"kind": "DeleteOptions", "dryRun": ["All"]})
    client.request("DELETE", path, action="try", query=query)
    assert server.objects("resourceslices") == [stored]


def test_dry_run_of_a_part_only_is_refused(server, connect):
    client = connect(server)
    path = "/apis/resource.k8s.io/v1/resourceslices"
    for method, body in (("POST", make_slice("n")), ("DELETE", None)):
        with pytest.raises(ApiRejectedError, match="Unsupported value") as caught:
            client.request(method, path, action="try", query={"dryRun": "Some"}, body=body)
        assert caught.value.status == 422


def with_device(**fields):
    return {"spec": {"devices": [{"name": "gpu-0", **fields}]}}


@pytest.mark.parametrize(
    ("wanted", "stored", "expected"),
    [
        (with_device(taints=[_TAINT]), with_device(), True),
        (with_device(taints=[_TAINT]), with_device(taints=[]), True),
        (with_device(capacity={"m": {"value": "1Gi", "requestPolicy": {"default": "1Gi"}}}),
         with_device(capacity={"m": {"value": "1024Mi"}}), True),
        (with_device(taints=[_TAINT], bindsToNode=True), with_device(), True),
        (with_device(), with_device(), False),
        (with_device(taints=[_TAINT]), with_device(taints=[_TAINT | {"timeAdded": now()}]), False),
        (with_device(), with_device(taints=[_TAINT]), False),
        (with_device(taints=[_TAINT]), with_device(taints=[_TAINT | {"value": "z"}]), False),
        (with_device(taints=[_TAINT], attributes={"a": {"int": 1}}), with_device(attributes={"a": {"int": 2}}), False),
        (with_device(taints=[_TAINT]), {"spec": {"devices": [{"name": "gpu-1"}]}}, False),
    ],
)  # fmt: skip
def test_only_what_is_missing_can_have_been_dropped(wanted, stored, expected):
    assert could_be_dropped(wanted, stored) is expected
