"""Limits for callers at the sockets: claims and calls are counted, and only root may connect."""

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2

from dra_driver.kubelet import liveness
from dra_driver.kubelet.dra import MAX_CLAIMS
from dra_driver.kubelet.liveness import dial
from dra_driver.kubelet.pb import dra_v1_pb2
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.kubelet.support import V1, FakeClaims, Gate, call_method, channel, claim, prepare, unprepare


def test_a_call_with_too_many_claims_is_refused_as_a_whole_and_the_next_call_works(node):
    claims = FakeClaims()
    dra = node.plugin(claims).sockets.dra
    refs = [claim(f"uid-{number}", f"claim-{number}") for number in range(MAX_CLAIMS + 1)]
    for call in (prepare, unprepare):
        with pytest.raises(grpc.RpcError) as caught:
            call(dra, *refs)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == (
            "the call names 1025 claims, but one call may have at most 1024; use several calls"
        )
    assert claims.requested == []
    assert len(prepare(dra, *refs[:MAX_CLAIMS]).claims) == MAX_CLAIMS


def test_unprepare_and_probes_are_answered_when_hundreds_of_prepares_wait(node):
    claims = FakeClaims()
    claims.on_prepare = gate = Gate()
    plugin = node.plugin(claims)
    request = dra_v1_pb2.NodePrepareResourcesRequest
    with channel(plugin.sockets.dra) as opened:
        method = opened.unary_unary(V1 + "NodePrepareResources", request.SerializeToString)
        waiting = [
            method.future(
                request(claims=[dra_v1_pb2.Claim(namespace="a", name="b", uid=f"u{n}")]), timeout=PATIENCE_S
            )
            for n in range(400)
        ]
        try:
            eventually(lambda: len(claims.requested) == 400)
            assert unprepare(plugin.sockets.dra, claim()).claims["uid-1"].error == ""
            assert dial(plugin.sockets.registrar, PATIENCE_S) is None
        finally:
            gate.opened.set()
        assert all(call.exception() is None for call in waiting)


def test_the_health_port_queues_no_more_than_its_limit(node, monkeypatch):
    monkeypatch.setattr(liveness, "MAX_PROBES", 2)
    entered, opened = [], threading.Event()

    def ready():
        entered.append(1)
        return opened.wait(PATIENCE_S)

    plugin = node.plugin(settings={"health_address": "127.0.0.1:0"}, is_ready=ready)
    request = health_pb2.HealthCheckRequest(service="readiness")

    def check():
        address = f"127.0.0.1:{plugin._health.port}"
        return call_method(address, "/grpc.health.v1.Health/Check", request, health_pb2.HealthCheckResponse)

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(check) for _ in range(2)]
        try:
            eventually(lambda: len(entered) == 2)
            with pytest.raises(grpc.RpcError) as caught:
                check()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        finally:
            opened.set()
        assert [call.result().status for call in waiting] == [health_pb2.HealthCheckResponse.SERVING] * 2


def test_the_health_port_takes_no_more_bytes_than_a_name_has(node, quiet_logs):
    """Any pod on the network could send them, and they would be kept in memory and in the log."""
    plugin = node.plugin(settings={"health_address": "127.0.0.1:0"})
    address, method = f"127.0.0.1:{plugin._health.port}", "/grpc.health.v1.Health/Check"

    def code(service):
        request = health_pb2.HealthCheckRequest(service=service)
        with pytest.raises(grpc.RpcError) as caught:
            call_method(address, method, request, health_pb2.HealthCheckResponse)
        return caught.value.code()

    assert code("x" * 100) is grpc.StatusCode.NOT_FOUND
    assert code(" " * 2000) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert all(sum(len(str(value)) for value in line.values()) < 2000 for line in quiet_logs)


def test_a_uid_of_any_length_makes_no_long_log_line(node, quiet_logs):
    dra = node.plugin().sockets.dra
    answer = prepare(dra, claim("u" * 1_000_000))
    assert len(answer.claims["u" * 1_000_000].error) < 300
    [line] = [line for line in quiet_logs if line["event"] == "claim_failed"]
    assert sum(len(str(value)) for value in line.values()) < 600


def test_only_root_may_dial_whatever_the_umask(node):
    before = os.umask(0)
    try:
        plugin = node.plugin()
    finally:
        os.umask(before)
    for path in (plugin.sockets.dra, plugin.sockets.registrar):
        found = path.stat()
        assert stat.S_ISSOCK(found.st_mode)
        assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o600, os.getuid())
