"""How the playground's kubelet finds, registers and calls plugins, good ones and others."""

import socket

from dra_driver.kubelet.registration import RegistrationStatus
from dra_driver.model.claim import Prepared
from tests.fakes.waiting import eventually
from tests.kubelet.support import DRIVER, FakeClaims, claim, device


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


def test_refused_registration_is_told_and_tried_again(node, kubelet):
    heard = []
    kubelet.refusals.append("driver is not wanted")
    node.plugin(registration_changed=heard.append)
    kubelet.wait_registered(DRIVER)
    eventually(lambda: len(heard) == 2)
    assert heard == [RegistrationStatus(False, "driver is not wanted"), RegistrationStatus(True)]


def test_dead_socket_of_a_killed_instance_does_not_hinder_others(node, kubelet):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(node.registry / f"{DRIVER}-old-pod-reg.sock"))
    node.plugin(settings={"pod_uid": "new-pod"})
    kubelet.wait_registered(DRIVER)
    assert kubelet.prepare(DRIVER, [claim()])["uid-1"] == Prepared((device(),))


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
