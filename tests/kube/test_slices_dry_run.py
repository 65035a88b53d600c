"""A server that only tries what it is asked: nothing is written, and the answer is as after a write."""

from __future__ import annotations

import pytest

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.client import ResourceApi
from dra_driver.kube.slices import SliceClient
from tests.kube.support import DRIVER, make_slice


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
    assert server.objects("resourceslices") == [stored]


def test_dry_run_of_a_part_only_is_refused(server, connect):
    client = connect(server)
    path = "/apis/resource.k8s.io/v1/resourceslices"
    with pytest.raises(ApiRejectedError, match="Unsupported value") as caught:
        client.request("POST", path, action="try", query={"dryRun": "Some"}, body=make_slice("n"))
    assert caught.value.status == 422
