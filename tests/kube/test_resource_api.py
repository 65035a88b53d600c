"""Requests to the group resource.k8s.io, also of a server that does not have it."""

from __future__ import annotations

import pytest
from playground.apiserver import PlaygroundApiServer

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.api_errors import PathNotFoundError
from dra_driver.kube.claims import ClaimClient
from dra_driver.kube.client import ResourceApi
from dra_driver.kube.slices import SliceClient
from dra_driver.model.claim import ClaimRef
from tests.kube.support import DRIVER, make_slice


@pytest.mark.parametrize("served", [(), ("v1alpha3",), ("v1beta1", "v1beta2"), ("v2",)])
@pytest.mark.parametrize("operation", ["check", "list", "create", "get", "watch"])
def test_error_names_kubernetes_versions_when_v1_is_not_served(connect, served, operation):
    with PlaygroundApiServer(served=served) as server:
        api = ResourceApi(connect(server))
        slices = SliceClient(api, DRIVER, "n")
        asks = {
            "check": api.check,
            "list": slices.list,
            "create": lambda: slices.create(make_slice("n")),
            "get": lambda: ClaimClient(api).get_claim("default", "c"),
            "watch": lambda: slices.open_watch("1"),
        }
        with pytest.raises(PathNotFoundError, match=r"resource\.k8s\.io/v1.*Kubernetes 1\.34 or later"):
            asks[operation]()
        assert len(server.requests) == 1


def test_v1_is_used_when_older_versions_are_served_too(connect):
    with PlaygroundApiServer(served=("v1beta1", "v1beta2", "v1")) as server:
        api = ResourceApi(connect(server))
        api.check()
        assert SliceClient(api, DRIVER, "n").list()[0] == []


def test_group_is_found_when_the_cluster_was_upgraded(connect):
    with PlaygroundApiServer(served=("v1beta1",)) as server:
        slices = SliceClient(ResourceApi(connect(server)), DRIVER, "n")
        with pytest.raises(PathNotFoundError):
            slices.list()
        server.served = ("v1", "v1beta2")
        assert slices.list()[0] == []


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
