"""The plugin and the playground's kubelet: calls, two instances, absence, health."""

import threading
import time
from concurrent import futures

import grpc
import pytest
from playground.kubelet_client import KubeletError

from dra_driver.kubelet.pb import dra_health_v1_pb2
from dra_driver.model.claim import Prepared
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


def test_health_stream_is_opened_again_and_again_by_the_alpha_client(node, kubelets):
    kubelet = kubelets(health="v1alpha1")
    node.plugin()
    eventually(lambda: len(kubelet.calls("NodeWatchResources")) >= 3)
    assert {call.error for call in kubelet.calls("NodeWatchResources")} == {"Method not found!"}
    assert kubelet.prepare(DRIVER, [claim()]) == {"uid-1": Prepared((device(),))}


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
