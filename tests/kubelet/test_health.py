import socket
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2 as pb

from dra_driver.errors import InvalidConfigError
from dra_driver.kubelet import grpc_server
from dra_driver.kubelet.liveness import HealthServer, Liveness, dial
from dra_driver.kubelet.pb import dra_health_v1_pb2, dra_health_v1alpha1_pb2
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.kubelet.support import FakeClaims, Gate, call_method, channel, claim, prepare

Status = pb.HealthCheckResponse.ServingStatus
HEALTH = "/grpc.health.v1.Health/"
ON = {"health_address": "127.0.0.1:0"}
SERVICES = ("", "liveness", "startup", "readiness")


def check(port, service=""):
    request = pb.HealthCheckRequest(service=service)
    return call_method(f"127.0.0.1:{port}", HEALTH + "Check", request, pb.HealthCheckResponse).status


@pytest.fixture
def served():
    """A health server without a plugin behind it."""
    state = {"fault": None, "ready": True}
    liveness = Liveness(lambda: state["fault"], max_age_s=0)
    server = HealthServer("127.0.0.1:0", liveness, lambda: state["ready"])
    server.start()
    yield server, state
    server.stop()


def test_all_services_serve_when_the_sockets_answer(node):
    port = node.plugin(settings=ON)._health.port
    assert [check(port, name) for name in SERVICES] == [Status.SERVING] * len(SERVICES)


@pytest.mark.parametrize("which", ["dra", "registrar"])
def test_dial_fails_when_a_socket_is_gone_and_names_it(node, which):
    plugin = node.plugin(settings={"guard_s": 60})
    path = getattr(plugin.sockets, which)
    path.unlink()
    fault = dial(plugin.sockets.registrar, PATIENCE_S)
    assert f"socket {path} does not answer (UNAVAILABLE" in fault


def test_server_that_takes_no_calls_is_not_alive_until_it_does(node, monkeypatch):
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 1)
    claims, gate = FakeClaims(), Gate()
    claims.on_prepare = gate
    plugin = node.plugin(claims, settings=ON | {"guard_s": 60.0})  # its own dials are calls too
    plugin.liveness = Liveness(lambda: dial(plugin.sockets.registrar, 10), max_age_s=0)
    # Its dials at the start may still count as calls.
    eventually(lambda: plugin.liveness.fault() is None)
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "dra"])
    caller = threading.Thread(target=prepare, args=(plugin.sockets.dra, claim()))
    caller.start()
    assert gate.entered.wait(PATIENCE_S)
    fault = plugin.liveness.fault()
    assert f"registration socket {plugin.sockets.registrar} does not answer (RESOURCE_EXHAUSTED" in fault
    assert "restarts the plugin" in fault
    assert plugin.liveness.start_fault() is None
    gate.opened.set()
    caller.join()
    assert eventually(lambda: plugin.liveness.fault() is None)


def test_dial_is_bounded_when_there_is_no_answer(short_dir):
    path = short_dir / "mute.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen()
        assert "DEADLINE_EXCEEDED" in dial(path, 0.2)


def test_liveness_fails_with_the_sockets_and_the_others_do_not(served):
    server, state = served
    assert check(server.port, "startup") == Status.SERVING
    state["fault"] = "gone"
    assert check(server.port, "liveness") == check(server.port) == Status.NOT_SERVING
    assert check(server.port, "readiness") == check(server.port, "startup") == Status.SERVING


def test_startup_waits_for_the_first_answer(served):
    server, state = served
    state["fault"] = "not there yet"
    assert check(server.port, "startup") == Status.NOT_SERVING
    state["fault"] = None
    assert check(server.port, "startup") == Status.SERVING


def test_readiness_follows_its_callable(node):
    ready = {"value": False}
    port = node.plugin(settings=ON, is_ready=lambda: ready["value"])._health.port
    assert check(port, "readiness") == Status.NOT_SERVING
    ready["value"] = True
    assert check(port, "readiness") == Status.SERVING
    ready.clear()
    with pytest.raises(grpc.RpcError):
        check(port, "readiness")
    assert check(port, "liveness") == Status.SERVING


def test_check_result_is_shared_for_a_while_and_renewed_after():
    calls = []
    shared = Liveness(lambda: calls.append(1), max_age_s=60)
    threads = [threading.Thread(target=shared.fault) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    fresh = Liveness(lambda: calls.append(1), max_age_s=0)
    fresh.fault()
    fresh.fault()
    assert len(calls) == 3


def test_check_that_raises_counts_as_a_fault():
    def fail():
        raise ValueError("oops")

    assert "oops" in Liveness(fail).fault()


def test_change_is_reported_once(quiet_logs):
    state = {"fault": None}
    liveness = Liveness(lambda: state["fault"], max_age_s=0)
    for fault in (None, "gone", "gone", "still gone", None, None):
        state["fault"] = fault
        liveness.fault()
    assert [line["event"] for line in quiet_logs] == ["liveness_failed", "liveness_restored"]


def test_address_in_use_is_named(served):
    with pytest.raises(InvalidConfigError, match=f"cannot listen on 127.0.0.1:{served[0].port}"):
        HealthServer(f"127.0.0.1:{served[0].port}", Liveness(lambda: None), lambda: True).start()


@pytest.mark.parametrize(
    ("version", "api"), [("v1", dra_health_v1_pb2), ("v1alpha1", dra_health_v1alpha1_pb2)]
)
def test_device_health_is_unimplemented_without_a_stream_and_takes_no_thread(node, version, api):
    plugin = node.plugin(settings={"guard_s": 60.0})  # its own dials take a thread too
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "dra"])
    with channel(plugin.sockets.dra) as opened:
        call = opened.unary_stream(f"/{version}.DRAResourceHealth/NodeWatchResources")
        for _ in range(5):
            with pytest.raises(grpc.RpcError) as caught:
                list(call(b"", timeout=PATIENCE_S))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not [thread for thread in threading.enumerate() if thread.name == "dra"]
    assert prepare(plugin.sockets.dra, claim()).claims
