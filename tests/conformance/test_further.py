"""What else a driver of this kind can get wrong: calls that overlap, boots, locks, paths, generations."""

from __future__ import annotations

from collections.abc import Callable

from playground.apiserver import Identity

from dra_driver.model.claim import Failed, Prepared
from tests.conformance.conftest import ConformanceNode, LockHolder, in_background, quietly
from tests.fakes.samples import NODE
from tests.fakes.waiting import eventually
from tests.integration.conftest import DRIVER

MakeNode = Callable[..., ConformanceNode]


def test_c23_retry_beside_a_call_that_still_runs(node: ConformanceNode) -> None:
    """The deadline passes while a Prepare waits; the retry may come beside it, and both end with one answer."""
    ref = node.allocated_by_hand("slow", node.devices()[0]["name"])
    holder = LockHolder(node.lock_file(0))
    try:
        late = node.kubelet.prepare(DRIVER, [ref], timeout_s=2.2)[ref.uid]
        assert isinstance(late, Failed)
        assert "retried" in late.error
        calls = [in_background(lambda: node.prepare(ref)[ref.uid]) for _ in range(2)]
    finally:
        holder.release()
    for thread, _ in calls:
        thread.join(20)
    answers = [answer for _, (answer,) in calls]
    assert isinstance(answers[0], Prepared)
    assert answers[0] == answers[1] == node.prepare(ref)[ref.uid]
    assert len(node.records()) == 1


def test_c23_killed_daemon(make_node: MakeNode) -> None:
    """A daemon that is killed while calls are under way leaves nothing that its successor does not put right."""
    node = make_node()
    process = node.spawn()
    node.kubelet.wait_registered(DRIVER)
    refs = [node.allocated_by_hand(device["name"], device["name"]) for device in node.wait_devices(8)]
    calls = [in_background(lambda ref=ref: quietly(node, ref)) for ref in refs]
    eventually(node.records)
    process.kill()
    process.wait()
    for thread, _ in calls:
        thread.join(30)
    node.spawn()
    for ref in refs:
        assert isinstance(eventually(lambda ref=ref: quietly(node, ref)), Prepared)
    assert len(node.records()) == len(node.specs()) == 8
    assert node.unprepare(*refs) == dict.fromkeys(ref.uid for ref in refs)
    assert node.is_clean()


def test_c25_token_rotation(make_node: MakeNode) -> None:
    """A token that is replaced in its volume is used from then on, also when the old one was refused before."""
    node = make_node()
    volume = node.root / "token-volume"

    def write(token: str) -> None:
        """As the kubelet does it: a directory of its own, and a link that moves to it at once."""
        (volume / token).mkdir(parents=True)
        (volume / token / "token").write_text(token)
        link = volume / "..data_tmp"
        link.symlink_to(token)
        link.rename(volume / "..data")

    def accept(*tokens: str) -> None:
        node.server.tokens = {token: Identity("driver", node=NODE) for token in tokens}
        node.server.faults.cut_watches()

    write("first")
    accept("first")
    node.server.write_kubeconfig(node.root / "kubeconfig", token_file=volume / "..data" / "token")
    node.start_driver()
    node.wait_devices(8)
    accept("first", "second")
    write("second")
    accept("second")
    node.wipe()
    node.wait_devices(8)
    ref = node.claim("one")
    node.ready(ref)

    accept("third")
    node.wipe()
    eventually(lambda: any(request.status == 401 for request in list(node.server.requests)))
    assert node.slices() == []
    write("third")
    node.wait_devices(8)
    other = node.claim("other")
    node.ready(other)
