"""How the playground's kubelet finds and registers plugins, good ones and others."""

import socket
import threading
from concurrent import futures

import grpc
import pytest
from playground.kubelet_client import KubeletError

from dra_driver.kubelet.dra import DraService
from dra_driver.kubelet.registration import Registrar, RegistrationStatus
from dra_driver.kubelet.rpc import RpcError
from dra_driver.kubelet.serving import SocketServer
from dra_driver.model.claim import Prepared
from tests.kubelet.support import (
    DRIVER,
    FakeClaims,
    claim,
    device,
    eventually,
    methods,
)


def test_plugin_started_before_the_kubelet_is_registered(node, kubelets):
    plugin = node.plugin()
    kubelet = kubelets()
    (instance,) = kubelet.wait_registered(DRIVER)
    assert instance.endpoint == plugin.sockets.dra
    assert instance.version == "v1.DRAPlugin"
    assert eventually(lambda: plugin.status) == RegistrationStatus(True)
    assert kubelet.drivers() == [DRIVER]


def test_plugin_started_after_the_kubelet_is_registered(node, kubelet):
    plugin = node.plugin()
    kubelet.wait_registered(DRIVER)
    assert eventually(lambda: plugin.status) == RegistrationStatus(True)
    calls = ["GetInfo", "NotifyRegistrationStatus"]  # noted when they are answered
    eventually(lambda: methods(kubelet, *calls) == calls)


def test_socket_in_a_subdirectory_is_found_and_hidden_ones_and_files_are_not(node, kubelet):
    for name in (".hidden", "deep/er"):
        (node.registry / name).mkdir(parents=True)
    (node.registry / "file.sock").write_text("")
    node.plugin(settings={"driver": "hidden.example.com", "registry_dir": node.registry / ".hidden"})
    node.plugin(settings={"driver": "deep.example.com", "registry_dir": node.registry / "deep/er"})
    kubelet.wait_registered("deep.example.com")
    assert kubelet.drivers() == ["deep.example.com"]


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


def test_restarted_plugin_is_registered_anew(node, kubelet):
    first = node.plugin()
    (before,) = kubelet.wait_registered(DRIVER)
    first.stop()
    kubelet.wait_registered(DRIVER, count=0)
    with pytest.raises(KubeletError, match=f"DRA driver {DRIVER} is not registered"):
        kubelet.prepare(DRIVER, [claim()])
    node.plugin()
    (after,) = kubelet.wait_registered(DRIVER)
    assert after is not before
    assert kubelet.prepare(DRIVER, [claim()]) == {"uid-1": Prepared((device(),))}


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


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ({"kind": "CSIPlugin"}, "plugin type 'CSIPlugin'"),
        ({"name": "No Name"}, "not a DNS subdomain"),
        ({"name": ""}, "not a DNS subdomain"),
        ({"endpoint": "dra.sock"}, "not an absolute path"),
        ({"versions": ()}, "none of the plugin's versions"),
        ({"versions": ("v9.DRAPlugin", "v1.DRAResourceHealth")}, "none of the plugin's versions"),
    ],
)
def test_plugin_with_a_wrong_info_is_refused_with_the_reason(kubelet, bare, info, text):
    registrar = bare(**info)
    status = eventually(lambda: registrar.status)
    assert not status.registered
    assert text in status.error
    assert kubelet.drivers() == []


@pytest.mark.parametrize(
    ("known", "versions", "chosen"),
    [
        (("v1.DRAPlugin", "v1beta1.DRAPlugin"), ("v1beta1.DRAPlugin", "v1.DRAPlugin"), "v1beta1.DRAPlugin"),
        (("v1.DRAPlugin", "v1beta1.DRAPlugin"), ("v2.DRAPlugin", "v1.DRAPlugin"), "v1.DRAPlugin"),
        (("v1beta1.DRAPlugin",), ("v1.DRAPlugin", "v1beta1.DRAPlugin"), "v1beta1.DRAPlugin"),
    ],
)
def test_first_known_version_of_the_plugins_list_is_used(kubelets, bare, known, versions, chosen):
    kubelet = kubelets(dra_apis=known)
    bare(versions=versions)
    (instance,) = eventually(lambda: kubelet.instances(DRIVER))
    assert instance.version == chosen


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


def test_same_endpoint_twice_is_refused(node, kubelet, bare):
    plugin = node.plugin()
    kubelet.wait_registered(DRIVER)
    registrar = bare(endpoint=str(plugin.sockets.dra), file="zz")
    assert "already registered" in eventually(lambda: registrar.status).error
    assert len(kubelet.instances(DRIVER)) == 1


def test_dra_socket_may_come_after_the_registration(node, kubelet, bare):
    endpoint = node.root / "late.sock"
    bare(endpoint=str(endpoint))
    eventually(lambda: kubelet.instances(DRIVER))
    server = SocketServer("late", endpoint, DraService(FakeClaims()).methods())
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(kubelet.prepare, DRIVER, [claim()])
        server.start()
        assert waiting.result(10) == {"uid-1": Prepared((device(),))}
    server.stop(0)
    eventually(lambda: not kubelet.instances(DRIVER)[0].connected)
    again = SocketServer("late", endpoint, DraService(FakeClaims()).methods())
    again.start()
    kubelet.wait_registered(DRIVER)
    assert kubelet.prepare(DRIVER, [claim()]) == {"uid-1": Prepared((device(),))}
    assert len(methods(kubelet, "GetInfo")) == 1
    again.stop(0)


def test_one_socket_may_serve_registration_and_dra(node, kubelet):
    path = node.registry / "common.sock"
    registrar = Registrar(DRIVER, path, ("v1.DRAPlugin",))
    served = registrar.methods() | DraService(FakeClaims()).methods()
    server = SocketServer("common", path, served)
    server.start()
    kubelet.wait_registered(DRIVER)
    assert kubelet.prepare(DRIVER, [claim()]) == {"uid-1": Prepared((device(),))}
    server.stop(0)
