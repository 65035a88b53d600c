"""Tests whether an API server supports partitionable devices; runs against the playground and a real server."""

from __future__ import annotations

import pytest
from playground.apiserver import PlaygroundApiServer

from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.slices.api_support import partitions_problem
from dra_driver.slices.rules.diff import Owner
from tests.kube.support import DRIVER

_OWNER = Owner(DRIVER, "node-a", "uid-a")
_REMEDY = "use Kubernetes 1.36 or newer, where the feature gate DRAPartitionableDevices is on"


def test_a_server_that_keeps_counters_is_known_without_a_write(target):
    assert partitions_problem(target.api, Owner(DRIVER, target.node, "uid-a")) is None
    assert target.slices().list()[0] == []


def test_a_gate_that_is_off_is_named(connect):
    with PlaygroundApiServer(gates={"DRAPartitionableDevices": False}) as server:
        problem = partitions_problem(connect(server), _OWNER)
    assert problem is not None
    assert problem.startswith("the API server drops spec.sharedCounters of a slice: its feature gate ")
    assert _REMEDY in problem


@pytest.mark.parametrize("accepted", [0, 1])
def test_the_layout_of_older_releases_is_reported(server, connect, accepted):
    api = connect(server)
    text = (
        b'{"kind":"Status","message":"spec: must be in one slice","reason":"Invalid","details":{"name":"x"}}'
    )
    if accepted:  # the counter sets alone are taken, the device that refers to them is not
        server.faults.fail(1, 201, path="resourceslices", body=_echo(DRIVER))
    server.faults.fail(1, 422, path="resourceslices", method="POST", body=text)
    problem = partitions_problem(api, _OWNER)
    assert problem is not None
    assert problem.startswith(
        "the API server refuses counters in a separate slice (cannot check whether the API server"
    )
    assert "must be in one slice" in problem
    assert _REMEDY in problem
    assert server.objects("resourceslices") == []


def _echo(driver):
    return (
        b'{"apiVersion":"resource.k8s.io/v1","kind":"ResourceSlice","spec":{"driver":"%s","sharedCounters":'
        b'[{"name":"probe","counters":{"memory":{"value":"1Gi"}}}]}}'
    ) % driver.encode()


def test_error_without_an_answer_is_raised(server, connect):
    api = connect(server)
    server.faults.fail(1, 403, path="resourceslices")
    with pytest.raises(
        ApiRejectedError, match="cannot check whether the API server supports partitionable devices"
    ) as caught:
        partitions_problem(api, _OWNER)
    assert caught.value.status == 403
    server.faults.down = True
    with pytest.raises(ApiUnavailableError):
        partitions_problem(api, _OWNER)
