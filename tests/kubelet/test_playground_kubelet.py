"""How the playground's kubelet finds and registers plugins, good ones and others."""

import socket
import threading

import grpc

from dra_driver.kubelet.registration import Registrar, RegistrationStatus
from dra_driver.kubelet.rpc import RpcError
from dra_driver.model.claim import Prepared
from tests.kubelet.support import (
    DRIVER,
    FakeClaims,
    claim,
    device,
    eventually,
    methods,
)


def test_plugin_started_after_the_kubelet_is_registered(node, kubelet):
    plugin = node.plugin()
    kubelet.wait_registered(DRIVER)
    assert eventually(lambda: plugin.status) == RegistrationStatus(True)
    calls = ["GetInfo", "NotifyRegistrationStatus"]  # noted when they are answered
    eventually(lambda: methods(kubelet, *calls) == calls)


def test_restarted_kubelet_registers_again_without_the_plugin_doing_anything(node, kubelet, wiped):
    heard = []
    plugin = node.plugin(on_status=heard.append)
    for restart in range(3):
        kubelet.wait_registered(DRIVER)
        assert kubelet.prepare(DRIVER, [claim()]) == {"uid-1": Prepared((device(),))}
        assert len(methods(kubelet, "GetInfo")) == restart + 1
        kubelet.restart()
    kubelet.wait_registered(DRIVER)
    assert plugin.status == RegistrationStatus(True)
    assert heard == [RegistrationStatus(True)]
    assert wiped == [None] * 4


def test_socket_created_again_between_two_looks_is_registered_anew(node, kubelets):
    kubelet = kubelets(poll_s=0.1)
    first = node.plugin()
    (before,) = kubelet.wait_registered(DRIVER)
    first.stop(0)
    second = node.plugin()
    (after,) = eventually(lambda: [new for new in kubelet.instances(DRIVER) if new is not before])
    assert before.closed
    assert eventually(lambda: second.status) == RegistrationStatus(True)
    eventually(lambda: after.connected)


def test_registration_recovers_after_get_info_failed_for_a_while(node, kubelet, monkeypatch):
    answer, fails = Registrar._get_info, threading.Event()

    def answer_later(*args):
        if fails.is_set():
            raise RpcError(grpc.StatusCode.UNKNOWN, "not yet")
        return answer(*args)

    monkeypatch.setattr(Registrar, "_get_info", answer_later)
    fails.set()
    plugin = node.plugin()
    eventually(lambda: len(methods(kubelet, "GetInfo")) >= 3)
    assert kubelet.instances(DRIVER) == []
    assert plugin.status is None
    fails.clear()
    kubelet.wait_registered(DRIVER)
    assert kubelet.calls("GetInfo")[0].error == "not yet"


def test_refused_registration_is_told_and_tried_again(node, kubelet):
    heard = []
    kubelet.inject("Validate", "driver is not wanted")
    node.plugin(on_status=heard.append)
    kubelet.wait_registered(DRIVER)
    eventually(lambda: len(heard) == 2)
    assert heard == [RegistrationStatus(False, "driver is not wanted"), RegistrationStatus(True)]
    assert "failed registration process: driver is not wanted" in [call.error for call in kubelet.calls()]


def test_dead_socket_of_a_killed_instance_does_not_hinder_others(node, kubelet):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(node.registry / f"{DRIVER}-old-pod-reg.sock"))
    node.plugin(settings={"pod_uid": "new-pod"})
    kubelet.wait_registered(DRIVER)
    assert kubelet.prepare(DRIVER, [claim()])["uid-1"] == Prepared((device(),))


def test_old_kubelet_gets_the_same_devices_over_v1beta1(node, kubelets):
    claims = FakeClaims()
    claims.on_prepare = lambda _: {"uid-1": Prepared((device(share_id="share-a"),))}
    node.plugin(claims)
    old, new = kubelets(dra_apis=("v1beta1.DRAPlugin",)), kubelets()
    old.wait_registered(DRIVER)
    new.wait_registered(DRIVER)
    assert old.prepare(DRIVER, [claim()]) == {"uid-1": Prepared((device(),))}
    assert new.prepare(DRIVER, [claim()]) == {"uid-1": Prepared((device(share_id="share-a"),))}
    assert old.unprepare(DRIVER, [claim()]) == new.unprepare(DRIVER, [claim()]) == {"uid-1": None}
