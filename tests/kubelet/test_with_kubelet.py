"""The plugin and the playground's kubelet: calls, two instances, absence, health."""

import threading
import time
from concurrent import futures

import grpc
import pytest
from playground.kubelet_client import KubeletError

from dra_driver.kubelet.device_health import health_methods
from dra_driver.kubelet.dra import DraService
from dra_driver.kubelet.pb import dra_health_v1_pb2
from dra_driver.kubelet.registration import Registrar
from dra_driver.kubelet.serving import SocketServer
from dra_driver.model.claim import Failed, Prepared
from tests.kubelet.support import DRIVER, FakeClaims, Gate, claim, device, eventually

# ---- calls --------------------------------------------------------------------------------------------


def test_prepare_that_outlasts_the_timeout_fails_and_the_retry_succeeds(node, kubelet):
    claims = FakeClaims()
    gate = claims.on_prepare = Gate()
    node.plugin(claims)
    kubelet.wait_registered(DRIVER)
    with pytest.raises(KubeletError) as caught:
        kubelet.prepare(DRIVER, [claim()], timeout_s=0.15)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    gate.opened.set()
    assert kubelet.prepare(DRIVER, [claim()]) == {"uid-1": Prepared((device(),))}


def test_kubelet_gives_45_seconds(node, kubelet):
    claims = FakeClaims()
    node.plugin(claims)
    kubelet.wait_registered(DRIVER)
    kubelet.prepare(DRIVER, [claim()])
    kubelet.unprepare(DRIVER, [claim()])
    assert all(43 < deadline < 46 for _, _, deadline in claims.asked)


def test_claim_that_fails_first_and_then_succeeds(node, kubelet):
    claims = FakeClaims()
    fine = claims.on_prepare
    claims.on_prepare = lambda _: {"u1": Failed("GPU is lost"), "u2": Prepared(())}
    node.plugin(claims)
    kubelet.wait_registered(DRIVER)
    refs = [claim("u1"), claim("u2", "two")]
    assert kubelet.prepare(DRIVER, refs) == {"u1": Failed("GPU is lost"), "u2": Prepared(())}
    claims.on_prepare = fine
    assert kubelet.prepare(DRIVER, refs[:1]) == {"u1": Prepared((device("u1"),))}
    claims.on_unprepare = lambda _: {"u1": Failed("in use")}
    assert kubelet.unprepare(DRIVER, refs[:1]) == {"u1": Failed("in use")}


def test_injected_faults_come_before_the_call_or_after_it(node, kubelet):
    claims = FakeClaims()
    node.plugin(claims)
    kubelet.wait_registered(DRIVER)
    kubelet.inject("NodePrepareResources", "lost request")
    kubelet.inject("NodePrepareResources", "lost reply", after=True)
    for text, asked in (("lost request", 0), ("lost reply", 1)):
        with pytest.raises(KubeletError, match=text):
            kubelet.prepare(DRIVER, [claim()])
        assert len(claims.asked) == asked
    assert kubelet.prepare(DRIVER, [claim()]) == {"uid-1": Prepared((device(),))}
    recorded = kubelet.calls("NodePrepareResources", DRIVER)
    assert [call.error for call in recorded] == ["lost request", "lost reply", None]
    assert recorded[0].response is None
    assert recorded[1].response.claims["uid-1"].devices
    assert recorded[2].request.claims[0].uid == "uid-1"
    assert all(call.duration_s >= 0 for call in recorded)


def test_answer_with_missing_or_foreign_entries_is_an_error(node, kubelet, bare):
    class Odd(DraService):
        def prepare(self, request, context):
            response = super().prepare(request, context)
            del response.claims["u2"]
            return response

        def unprepare(self, request, context):
            response = super().unprepare(request, context)
            response.claims["other"].error = ""
            return response

    endpoint = node.root / "odd.sock"
    server = SocketServer("odd", endpoint, Odd(FakeClaims()).methods())
    server.start()
    bare(endpoint=str(endpoint))
    kubelet.wait_registered(DRIVER)
    with pytest.raises(KubeletError, match="NodePrepareResources skipped 1 ResourceClaims"):
        kubelet.prepare(DRIVER, [claim("u1"), claim("u2", "two")])
    with pytest.raises(KubeletError, match="unknown claim UID other"):
        kubelet.unprepare(DRIVER, [claim("u1")])
    server.stop(0)


def test_stop_of_the_plugin_lets_the_kubelets_call_finish(node, kubelet):
    claims = FakeClaims()
    gate = claims.on_prepare = Gate()
    plugin = node.plugin(claims)
    kubelet.wait_registered(DRIVER)
    with futures.ThreadPoolExecutor(2) as pool:
        call = pool.submit(kubelet.prepare, DRIVER, [claim()])
        assert gate.entered.wait(20)
        stop = pool.submit(plugin.stop)
        eventually(lambda: plugin.stopping)
        gate.opened.set()
        assert call.result(5) == {"uid-1": Prepared((device(),))}
        stop.result(5)
    kubelet.wait_registered(DRIVER, count=0)


def test_two_drivers_do_not_disturb_each_other(node, kubelet):
    broken = FakeClaims()
    broken.on_prepare = lambda _: {"uid-1": Failed("no")}
    node.plugin(broken, settings={"driver": "one.example.com"})
    two = node.plugin(settings={"driver": "two.example.com"})
    for driver in ("one.example.com", "two.example.com"):
        kubelet.wait_registered(driver)
    assert kubelet.prepare("one.example.com", [claim()]) == {"uid-1": Failed("no")}
    assert kubelet.prepare("two.example.com", [claim()]) == {"uid-1": Prepared((device(),))}
    two.stop()
    kubelet.wait_registered("two.example.com", count=0)
    assert kubelet.drivers() == ["one.example.com"]


# ---- two instances ------------------------------------------------------------------------------------


def test_newest_connected_instance_gets_the_calls_and_the_older_takes_over(node, kubelet):
    services = {name: FakeClaims() for name in ("old", "new")}
    node.plugin(services["old"], settings={"pod_uid": "pod-old"})
    kubelet.wait_registered(DRIVER)
    kubelet.prepare(DRIVER, [claim()])
    newer = node.plugin(services["new"], settings={"pod_uid": "pod-new"})
    instances = kubelet.wait_registered(DRIVER, count=2)
    eventually(lambda: instances[1].connected)
    kubelet.unprepare(DRIVER, [claim()])
    assert [name for name, _, _ in services["old"].asked] == ["prepare"]
    assert [name for name, _, _ in services["new"].asked] == ["unprepare"]
    newer.stop()
    kubelet.wait_registered(DRIVER, count=1)
    kubelet.prepare(DRIVER, [claim()])
    assert [name for name, _, _ in services["old"].asked] == ["prepare", "prepare"]


def test_older_instance_takes_over_when_the_newest_is_registered_but_cannot_be_reached(node, kubelet, bare):
    claims = FakeClaims()
    node.plugin(claims)
    kubelet.wait_registered(DRIVER)
    bare(endpoint=str(node.root / "nobody.sock"), file="zz")
    eventually(lambda: len(kubelet.instances(DRIVER)) == 2)
    assert kubelet.prepare(DRIVER, [claim()]) == {"uid-1": Prepared((device(),))}
    assert len(claims.asked) == 1


def test_rolling_update_never_leaves_the_driver_unregistered(node, kubelet, wiped):
    old = node.plugin(settings={"pod_uid": "pod-0"})
    kubelet.wait_registered(DRIVER)
    missing = threading.Event()
    done = threading.Event()

    def watch():
        while not done.is_set():
            if not kubelet.instances(DRIVER):
                missing.set()
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(1, 4):
        new = node.plugin(settings={"pod_uid": f"pod-{number}"})
        kubelet.wait_registered(DRIVER, count=2)
        eventually(lambda new=new: new.status)
        old.stop()
        kubelet.wait_registered(DRIVER, count=1)
        assert kubelet.prepare(DRIVER, [claim()]) == {"uid-1": Prepared((device(),))}
        old = new
    done.set()
    watcher.join()
    assert not missing.is_set()
    assert wiped == [None]


# ---- absence and health -------------------------------------------------------------------------------


def test_slices_are_wiped_once_when_the_driver_stays_away(node, kubelet, wiped):
    plugin = node.plugin()
    kubelet.wait_registered(DRIVER)
    eventually(lambda: kubelet._lost_since)
    plugin.stop()
    eventually(lambda: wiped == [None, DRIVER])
    time.sleep(0.25)
    assert wiped == [None, DRIVER]


def test_slices_are_kept_when_the_driver_comes_back_in_time(node, kubelets, wiped):
    kubelet = kubelets(wipe_after_s=0.3)
    for _ in range(4):
        plugin = node.plugin()
        kubelet.wait_registered(DRIVER)
        time.sleep(0.1)
        plugin.stop()
    node.plugin()
    kubelet.wait_registered(DRIVER)
    assert wiped == [None]


def test_health_stream_is_opened_again_and_again_by_the_alpha_client(node, kubelets):
    kubelet = kubelets(health="v1alpha1")
    node.plugin()
    eventually(lambda: len(kubelet.calls("NodeWatchResources")) >= 3)
    assert {call.error for call in kubelet.calls("NodeWatchResources")} == {"Method not found!"}
    assert kubelet.prepare(DRIVER, [claim()]) == {"uid-1": Prepared((device(),))}


def test_v1_client_does_not_open_a_stream_that_is_not_advertised(node, kubelets):
    kubelet = kubelets(health="v1")
    node.plugin()
    kubelet.wait_registered(DRIVER)
    time.sleep(0.2)
    assert kubelet.calls("NodeWatchResources") == []


def report(status, message=""):
    api = dra_health_v1_pb2
    identifier = api.DeviceIdentifier(pool_name="node-1", device_name="gpu-1")
    return api.NodeWatchResourcesResponse(
        devices=[api.DeviceHealth(device=identifier, health=status, message=message)]
    )


@pytest.mark.parametrize("mode", ["v1alpha1", "v1"])
def test_reported_health_arrives_while_calls_go_on(node, kubelets, mode):
    opened = threading.Event()
    change = threading.Event()
    ended = threading.Event()

    def watch(_request, context):
        context.add_callback(ended.set)
        opened.set()
        yield report(dra_health_v1_pb2.HEALTHY)
        change.wait(10)
        yield report(dra_health_v1_pb2.UNHEALTHY, "XID 79")
        ended.wait(10)

    kubelet = kubelets(health=mode)
    plugin = node.plugin(watch_device_health=watch)
    kubelet.wait_registered(DRIVER)
    key = ("node-1", "gpu-1")
    eventually(lambda: kubelet.health(DRIVER).get(key) == ("HEALTHY", ""))
    assert kubelet.prepare(DRIVER, [claim()]) == {"uid-1": Prepared((device(),))}
    change.set()
    eventually(lambda: kubelet.health(DRIVER).get(key) == ("UNHEALTHY", "XID 79"))
    kubelet.stop()
    assert ended.wait(20)
    plugin.stop(0)


def test_calls_and_health_share_one_connection(node, kubelets):
    peers = set()

    class Peers(DraService):
        def prepare(self, request, context):
            peers.add(context.peer())
            return super().prepare(request, context)

        def unprepare(self, request, context):
            peers.add(context.peer())
            return super().unprepare(request, context)

    ended = threading.Event()

    def watch(_request, context):
        peers.add(context.peer())
        context.add_callback(ended.set)
        yield report(dra_health_v1_pb2.HEALTHY)
        ended.wait(10)

    path = node.registry / "common.sock"
    registrar = Registrar(DRIVER, path, ("v1.DRAPlugin",))
    served = Peers(FakeClaims()).methods() | health_methods(watch) | registrar.methods()
    server = SocketServer("common", path, served)
    server.start()
    kubelet = kubelets(health="v1alpha1")
    kubelet.wait_registered(DRIVER)
    eventually(lambda: kubelet.health(DRIVER))
    for _ in range(3):
        kubelet.prepare(DRIVER, [claim()])
        kubelet.unprepare(DRIVER, [claim()])
    assert len(peers) == 1
    kubelet.stop()
    server.stop(0)


def test_waiting_for_a_driver_that_does_not_come_ends(kubelet):
    with pytest.raises(TimeoutError, match="0 instances"):
        kubelet.wait_registered(DRIVER, timeout_s=0.05)
