"""Choosing an API version, and following a cluster that changes under the driver."""

from __future__ import annotations

import time

import pytest
from playground.apiserver import PlaygroundApiServer

from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.api_errors import PathNotFoundError
from dra_driver.kube.claims import ClaimClient
from dra_driver.kube.slices import SliceClient
from dra_driver.kube.versions import ResourceApi
from dra_driver.model.claim import ClaimRef
from tests.fakes.tables import tabled
from tests.kube.support import DRIVER, make_slice


@tabled("served", "chosen")
def test_best_served_version_is_chosen(connect, served, chosen):
    with PlaygroundApiServer(served=served) as server:
        api = ResourceApi(connect(server))
        assert SliceClient(api, DRIVER, "n").list()[0] == []
        assert (api.version, ResourceApi(connect(server)).discover()) == (chosen, chosen)


@pytest.mark.parametrize("served", [(), ("v1alpha3",), ("v2",)])
def test_error_names_kubernetes_versions_when_none_fits(connect, served):
    with PlaygroundApiServer(served=served) as server, pytest.raises(ApiRejectedError) as caught:
        ResourceApi(connect(server)).discover()
    assert "needed: one of v1, v1beta2, v1beta1" in str(caught.value)
    assert f"served: {', '.join(served) or 'none'}" in str(caught.value)
    assert "Kubernetes 1.34 or later" in str(caught.value)


def test_claims_are_not_taken_for_deleted_when_no_version_is_served(connect):
    """Else every claim of the node would be taken back."""
    ref = ClaimRef("default", "absent", "uid-1")
    with PlaygroundApiServer(served=()) as server, pytest.raises(PathNotFoundError):
        ClaimClient(ResourceApi(connect(server))).look(ref)
    with PlaygroundApiServer() as server:
        assert ClaimClient(ResourceApi(connect(server))).look(ref) is None


def test_missing_object_costs_one_request(server, connect):
    with pytest.raises(ApiRejectedError):
        ClaimClient(ResourceApi(connect(server))).get_claim("default", "absent")
    assert len(server.requests) == 1


def test_discovery_that_hangs_takes_no_longer_than_the_request_may(connect):
    with PlaygroundApiServer(served=("v1beta1",)) as server:
        api = ResourceApi(connect(server))
        server.faults.fail(1, 404, path="/apis/resource.k8s.io/v1/", body=b"404 page not found")
        server.faults.slow("/apis/resource.k8s.io", 20)
        began = time.monotonic()
        with pytest.raises(ApiUnavailableError):
            ClaimClient(api).get_claim("default", "c", timeout_s=0.3)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("operation", ["list", "create", "update", "delete", "get", "watch"])
def test_other_version_is_used_when_cluster_was_upgraded(connect, operation):
    with PlaygroundApiServer(served=("v1beta1",)) as server:
        claim = server.add(
            "resourceclaims", {"metadata": {"name": "c", "namespace": "default"}}, group="resource.k8s.io"
        )
        api = ResourceApi(connect(server))
        slices = SliceClient(api, DRIVER, "n")
        stored = slices.create(make_slice("n"))
        assert api.version == "v1beta1"
        server.served = ("v1", "v1beta2")
        if operation == "list":
            assert slices.list()[0] == [stored]
        elif operation == "create":
            assert slices.create(make_slice("n"))["spec"] == stored["spec"]
        elif operation == "update":
            assert slices.update(stored) == stored
        elif operation == "delete":
            slices.delete(stored["metadata"]["name"], stored["metadata"]["uid"])
            assert server.objects("resourceslices") == []
        elif operation == "get":
            read = ClaimClient(api).get_claim("default", "c")
            assert read["metadata"] == claim["metadata"]
        else:
            slices.open_watch("1").close()
        assert api.version == "v1"


def test_old_version_is_kept_while_it_is_served(connect):
    with PlaygroundApiServer(served=("v1beta1",)) as server:
        api = ResourceApi(connect(server))
        slices = SliceClient(api, DRIVER, "n")
        slices.list()
        server.served = ("v1", "v1beta1")
        slices.list()
        assert api.version == "v1beta1"


def test_versions_are_tried_in_turn_when_discovery_is_forbidden(connect):
    with PlaygroundApiServer(served=("v1beta1",)) as server:
        server.faults.fail(2, 403, reason="Forbidden", path="/apis/resource.k8s.io")
        api = ResourceApi(connect(server))
        assert api.discover() == "v1"
        assert server.faults.answer_of("GET", "/apis/resource.k8s.io") is not None
        server.faults.clear()
        server.faults.fail(1, 404, path="/apis/resource.k8s.io/v1/", body=b"404 page not found")
        assert SliceClient(api, DRIVER, "n").list()[0] == []
        assert api.version == "v1beta1"


def test_version_is_chosen_later_when_server_is_down_at_first(server, connect):
    api = ResourceApi(connect(server))
    server.stop()
    with pytest.raises(ApiUnavailableError):
        api.discover()
    server.start()
    assert api.discover() == "v1"


@pytest.mark.parametrize("name", ["..", ".", ""])
def test_impossible_name_never_reaches_the_server(server, connect, name):
    with pytest.raises(ApiRejectedError, match="cannot be the name of an API object"):
        ClaimClient(ResourceApi(connect(server))).get_claim("default", name)
    assert server.requests == []


def test_name_stays_one_path_segment(server, connect):
    name = "a/../../b?x=y#z"
    with pytest.raises(ApiRejectedError) as caught:
        ClaimClient(ResourceApi(connect(server))).get_claim("default", name)
    assert f'resourceclaims.resource.k8s.io "{name}" not found' in str(caught.value)
    assert server.requests[-1].query == {}
