import socket
import threading

import grpc
import pytest

from dra_driver.errors import InvalidConfigError
from dra_driver.kubelet.health import Cached, HealthServer, dial
from dra_driver.kubelet.pb import dra_health_v1_pb2, dra_health_v1alpha1_pb2
from dra_driver.kubelet.pb import grpc_health_pb2 as pb
from tests.kubelet.support import ask, channel, claim, eventually, get_info, prepare

Status = pb.HealthCheckResponse.ServingStatus
HEALTH = "/grpc.health.v1.Health/"
ON = {"health_address": "127.0.0.1:0"}


def check(port, service=""):
    request = pb.HealthCheckRequest(service=service)
    return ask(f"127.0.0.1:{port}", HEALTH + "Check", request, pb.HealthCheckResponse).status


@pytest.fixture
def served():
    """A health server without a plugin behind it."""
    state = {"fault": None, "ready": True}
    server = HealthServer("127.0.0.1:0", lambda: state["fault"], lambda: state["ready"])
    server.start()
    yield server, state
    server.stop()


def test_all_services_serve_when_the_sockets_answer(node):
    port = node.plugin(settings=ON).health_port
    assert [check(port, name) for name in ("", "liveness", "readiness")] == [Status.SERVING] * 3
    listed = ask(f"127.0.0.1:{port}", HEALTH + "List", pb.HealthListRequest(), pb.HealthListResponse).statuses
    assert {name: entry.status for name, entry in listed.items()} == dict.fromkeys(
        ("", "liveness", "readiness"), Status.SERVING
    )


def test_standard_client_library_understands_us(node):
    health_pb2 = pytest.importorskip("grpc_health.v1.health_pb2")
    health_pb2_grpc = pytest.importorskip("grpc_health.v1.health_pb2_grpc")
    port = node.plugin(settings=ON).health_port
    with channel(f"127.0.0.1:{port}") as opened:
        stub = health_pb2_grpc.HealthStub(opened)
        assert stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=5).status == 1
        assert set(stub.List(health_pb2.HealthListRequest(), timeout=5).statuses) == {
            "",
            "liveness",
            "readiness",
        }


def test_unknown_service_is_not_found(served):
    with pytest.raises(grpc.RpcError) as caught:
        check(served[0].port, "dance")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_dial_uses_whichever_generation_is_served(node):
    plugin = node.plugin(settings={"serve_v1": False})
    assert dial(plugin.sockets.registrar) is None


@pytest.mark.parametrize("which", ["dra", "registrar"])
def test_dial_fails_when_a_socket_is_gone(node, which):
    plugin = node.plugin(settings={"guard_s": 60})
    getattr(plugin.sockets, which).unlink()
    assert "UNAVAILABLE" in dial(plugin.sockets.registrar, 1.0)


def test_dial_is_bounded_when_nobody_answers(short_dir):
    path = short_dir / "mute.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen()
        assert "DEADLINE_EXCEEDED" in dial(path, 0.2)


def test_liveness_fails_with_the_sockets_and_readiness_does_not(served):
    server, state = served
    state["fault"] = "gone"
    assert check(server.port, "liveness") == check(server.port) == Status.NOT_SERVING
    assert check(server.port, "readiness") == Status.SERVING


def test_readiness_follows_its_callable(node):
    ready = {"value": False}
    port = node.plugin(settings=ON, ready=lambda: ready["value"]).health_port
    assert check(port, "readiness") == Status.NOT_SERVING
    ready["value"] = True
    assert check(port, "readiness") == Status.SERVING
    ready.clear()
    assert check(port, "readiness") == Status.NOT_SERVING
    assert check(port, "liveness") == Status.SERVING


def test_check_result_is_shared_for_a_while_and_renewed_after():
    calls = []
    cached = Cached(lambda: calls.append(1), max_age_s=60)
    threads = [threading.Thread(target=cached) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    fresh = Cached(lambda: calls.append(1), max_age_s=0)
    fresh()
    fresh()
    assert len(calls) == 3


def test_check_that_raises_counts_as_a_fault():
    def fail():
        raise ValueError("oops")

    assert "oops" in Cached(fail)()


def watch(opened, service):
    stream = opened.unary_stream(
        HEALTH + "Watch", pb.HealthCheckRequest.SerializeToString, pb.HealthCheckResponse.FromString
    )
    return stream(pb.HealthCheckRequest(service=service), timeout=20)


def test_watch_sends_the_state_and_then_changes_only(served):
    server, state = served
    with channel(f"127.0.0.1:{server.port}") as opened:
        stream = watch(opened, "readiness")
        assert next(stream).status == Status.SERVING
        state["ready"] = False
        assert next(stream).status == Status.NOT_SERVING
        stream.cancel()
        unknown = watch(opened, "dance")
        assert next(unknown).status == Status.SERVICE_UNKNOWN
        unknown.cancel()


def test_watchers_do_not_use_up_the_workers(served):
    server, _ = served
    with channel(f"127.0.0.1:{server.port}") as opened:
        streams = [watch(opened, "") for _ in range(4)]
        assert [next(stream).status for stream in streams] == [Status.SERVING] * 4
        with pytest.raises(grpc.RpcError) as caught:
            next(watch(opened, ""))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert check(server.port) == Status.SERVING
        for stream in streams:
            stream.cancel()

        def again():
            stream = watch(opened, "")
            try:
                return next(stream)
            except grpc.RpcError:
                return None
            finally:
                stream.cancel()

        assert eventually(again).status == Status.SERVING


def test_address_in_use_is_named(served):
    with pytest.raises(InvalidConfigError, match=f"cannot listen on 127.0.0.1:{served[0].port}"):
        HealthServer(f"127.0.0.1:{served[0].port}", lambda: None, lambda: True).start()


@pytest.mark.parametrize(
    ("version", "api"), [("v1", dra_health_v1_pb2), ("v1alpha1", dra_health_v1alpha1_pb2)]
)
def test_device_health_is_unimplemented_without_a_stream_and_takes_no_worker(node, version, api):
    plugin = node.plugin()
    with channel(plugin.sockets.dra) as opened:
        call = opened.unary_stream(f"/{version}.DRAResourceHealth/NodeWatchResources")
        for _ in range(5):
            with pytest.raises(grpc.RpcError) as caught:
                list(call(b"", timeout=5))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not [thread for thread in threading.enumerate() if thread.name == "dra"]
    assert prepare(plugin.sockets.dra, claim()).claims


@pytest.mark.parametrize(
    ("version", "api"), [("v1", dra_health_v1_pb2), ("v1alpha1", dra_health_v1alpha1_pb2)]
)
def test_device_health_stream_plugs_in_for_both_generations(node, version, api):
    sent = dra_health_v1_pb2.NodeWatchResourcesResponse(
        devices=[
            dra_health_v1_pb2.DeviceHealth(
                device=dra_health_v1_pb2.DeviceIdentifier(pool_name="node-1", device_name="gpu-1"),
                health=dra_health_v1_pb2.UNHEALTHY,
                message="XID 79",
            )
        ]
    )
    plugin = node.plugin(watch_device_health=lambda _request, _context: iter([sent]))
    assert list(get_info(plugin.sockets.registrar).supported_versions)[2:] == [
        "v1.DRAResourceHealth",
        "v1alpha1.DRAResourceHealth",
    ]
    with channel(plugin.sockets.dra) as opened:
        call = opened.unary_stream(
            f"/{version}.DRAResourceHealth/NodeWatchResources",
            api.NodeWatchResourcesRequest.SerializeToString,
            api.NodeWatchResourcesResponse.FromString,
        )
        (received,) = call(api.NodeWatchResourcesRequest(), timeout=5)
    assert received.SerializeToString() == sent.SerializeToString()
    assert received.devices[0].health == api.UNHEALTHY
