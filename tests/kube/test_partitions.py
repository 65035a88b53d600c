"""Asking the API server whether it counts partitions; runs against the embedded and a real server."""

from __future__ import annotations

import pytest

from dra_driver.core.slicediff import Owner
from dra_driver.embedded.apiserver import EmbeddedApiServer, Identity
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.partitions import supports_partitions
from dra_driver.kube.versions import ResourceApi
from tests.kube.support import DRIVER

_OWNER = Owner(DRIVER, "node-a", "uid-a")
_REMEDY = "use Kubernetes 1.36 or newer, where the feature gate DRAPartitionableDevices is on"


def test_a_server_that_keeps_counters_is_known_without_a_write(target):
    answer = supports_partitions(target.api, Owner(DRIVER, target.node, "uid-a"))
    assert (answer.supported, answer.reason) == (True, "")
    assert target.slices().list()[0] == []


@pytest.mark.parametrize("served", [("v1",), ("v1beta1",)])
def test_a_gate_that_is_off_is_named(connect, served):
    with EmbeddedApiServer(gates={"DRAPartitionableDevices": False}, served=served) as server:
        answer = supports_partitions(ResourceApi(connect(server)), _OWNER)
    assert not answer.supported
    assert answer.reason.startswith("the API server drops spec.sharedCounters of a slice: its feature gate ")
    assert _REMEDY in answer.reason


@pytest.mark.parametrize("accepted", [0, 1])
def test_the_layout_of_older_releases_is_told(server, connect, accepted):
    api = ResourceApi(connect(server))
    api.discover()
    text = (
        b'{"kind":"Status","message":"spec: must be in one slice","reason":"Invalid","details":{"name":"x"}}'
    )
    if accepted:  # the counter sets alone are taken, the device that refers to them is not
        server.faults.fail(1, 201, path="resourceslices", body=_echo(DRIVER))
    server.faults.fail(1, 422, path="resourceslices", method="POST", body=text)
    answer = supports_partitions(api, _OWNER)
    assert not answer.supported
    assert answer.reason.startswith(
        "the API server refuses counters in a slice of their own (ask the API server"
    )
    assert "must be in one slice" in answer.reason
    assert _REMEDY in answer.reason
    assert server.objects("resourceslices") == []


def _echo(driver):
    return (
        b'{"apiVersion":"resource.k8s.io/v1","kind":"ResourceSlice","spec":{"driver":"%s","sharedCounters":'
        b'[{"name":"probe","counters":{"memory":{"value":"1Gi"}}}]}}'
    ) % driver.encode()


def test_what_is_no_answer_is_raised(server, connect):
    api = ResourceApi(connect(server))
    api.discover()
    server.faults.fail(1, 403, path="resourceslices")
    with pytest.raises(ApiRejectedError, match="ask the API server for partitionable devices") as caught:
        supports_partitions(api, _OWNER)
    assert caught.value.status == 403
    server.faults.down = True
    with pytest.raises(ApiUnavailableError):
        supports_partitions(api, _OWNER)


def test_the_policy_for_own_slices_lets_the_question_through(connect):
    with EmbeddedApiServer(tokens={"t": Identity("driver", "node-a")}) as server:
        api = ResourceApi(connect(server, token="t"))
        assert supports_partitions(api, _OWNER).supported
        with pytest.raises(ApiRejectedError, match="may not modify resource slices of other nodes"):
            supports_partitions(api, Owner(DRIVER, "node-b", "uid-b"))
