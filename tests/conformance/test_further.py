"""What else a driver of this kind can get wrong: calls that overlap, boots, locks, paths, generations."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playground.apiserver import Identity, PlaygroundApiServer

from dra_driver.app.daemon import Driver
from dra_driver.errors import InvalidConfigError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint
from dra_driver.model.claim import Failed, Prepared
from dra_driver.model.sharing import SharingRule, share_all
from tests.conformance.conftest import ConformanceNode, LockHolder, in_background, quietly
from tests.conformance.test_cluster_level import Publishing
from tests.fakes.samples import NODE, h100, inventory
from tests.integration.conftest import DRIVER, Json, eventually
from tests.kubelet.support import claim, prepare

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


def test_c23_reboot(node: ConformanceNode) -> None:
    """After a boot the records are there and the CDI directory is not; the same devices are prepared again."""
    ref = node.claim("one")
    answer = node.prepare(ref)
    [spec] = node.cdi.iterdir()
    content = spec.read_bytes()
    node.driver.stop()
    node.machine.reboot()
    spec.unlink()
    node.cdi.rmdir()
    node.start_driver()
    assert node.prepare(ref) == answer
    assert spec.read_bytes() == content


def test_c24_lock_of_another_process(node: ConformanceNode) -> None:
    """A GPU that another process works on is waited for; the other GPUs are served meanwhile."""
    first, second = (device["name"] for device in node.devices()[:2])
    waiting, free = node.allocated_by_hand("waiting", first), node.allocated_by_hand("free", second)
    holder = LockHolder(node.lock_file(0))
    try:
        thread, answers = in_background(lambda: node.prepare(waiting)[waiting.uid])
        assert isinstance(node.prepare(free)[free.uid], Prepared)
        assert answers == []
    finally:
        holder.release()
    thread.join(20)
    assert isinstance(answers[0], Prepared)


def test_c24_sockets(node: ConformanceNode) -> None:
    """Sockets of a dead instance are replaced, and a caller with an odd authority is served."""
    driver = node.driver
    assert driver is not None
    [instance] = node.kubelet.instances(DRIVER)
    driver.stop()
    for path in (instance.socket, instance.endpoint):
        dead = subprocess.run(
            [
                sys.executable,
                "-c",
                "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])",
                path,
            ],
            check=False,
        )
        assert dead.returncode == 0
        assert path.is_socket()
    node.start_driver()
    unknown = claim(uid="0-unknown")
    answer = prepare(
        instance.endpoint, unknown, options=[("grpc.default_authority", "%2Fvar%2Flib%2Fkubelet")]
    )
    assert answer.claims["0-unknown"].error


@pytest.mark.parametrize("length", [107, 108])
def test_c24_longest_socket_paths(make_node: MakeNode, length: int) -> None:
    """Sockets with paths of 107 bytes are served; where one byte more is needed, the driver says what is too long."""
    node = make_node()
    socket = f"{DRIVER}-reg.sock"
    node.registry = node.root / ("r" * (length - len(f"{node.root}//{socket}")))
    node.registry.mkdir()
    plugins = node.root / ("p" * (length - len(f"{node.root}//{DRIVER}/dra.sock")))
    node.plugin_dir = plugins / DRIVER
    registry = {"kubelet_registrar_directory_path": str(node.registry)}
    plugin = {"kubelet_plugins_directory_path": str(plugins)}
    if length > 107:
        for change, name in ((registry, node.registry.name), (plugin, plugins.name)):
            with pytest.raises(InvalidConfigError, match=f"{name}.* too long"):
                Driver(replace(node.settings, **change)).start()
        return
    node.use_kubelet_quietly()
    node.start_driver(**registry, **plugin)
    [instance] = node.kubelet.instances(DRIVER)
    assert {len(str(path)) for path in (instance.socket, instance.endpoint)} == {length}
    node.wait_devices(8)
    ref = node.claim("one")
    assert isinstance(node.prepare(ref)[ref.uid], Prepared)
    assert node.unprepare(ref) == {ref.uid: None}


A, B, C = h100(0), h100(1), h100(2)


def newer(gpu: Any) -> Any:
    return replace(gpu, architecture="Newer")


@pytest.mark.parametrize(
    ("before", "after", "generation", "writes"),
    [
        ((A, B), (A, B), 1, []),
        ((A, B), (A, newer(B)), 1, ["PUT"]),
        ((A, B), (newer(A), newer(B)), 2, ["PUT", "PUT"]),
        ((A, B), (A, B, C), 2, ["PUT", "PUT", "POST"]),
        ((A, B, C), (A, B), 2, ["DELETE", "PUT", "PUT"]),
        ((A,), (newer(A),), 1, ["PUT"]),
    ],
    ids=["same", "one changed", "two changed", "one more", "one less", "only one"],
)
def test_c25_generations(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[Any, ...],
    after: tuple[Any, ...],
    generation: int,
    writes: list[str],
) -> None:
    """The pool keeps its generation while one slice changes and none is made, and moves on with all slices else."""
    monkeypatch.setattr("dra_driver.slices.rules.build.MAX_DEVICES_PER_SLICE", 1)
    with PlaygroundApiServer() as server:
        server.add("nodes", {"metadata": {"name": NODE}})
        server.write_kubeconfig(tmp_path / "kubeconfig")
        client = ApiClient(load_endpoint(tmp_path / "kubeconfig"))
        Publishing(server, client, inventory(*before)).run()
        done = len(server.writes("resourceslices"))
        Publishing(server, client, inventory(*after)).run()
        client.close()
        pools: list[Json] = [entry["spec"]["pool"] for entry in server.objects("resourceslices")]
        assert [request.method for request in server.writes("resourceslices")[done:]] == writes
    assert {pool["generation"] for pool in pools} == {generation}
    assert {pool["resourceSliceCount"] for pool in pools} == {len(after)}


def test_c25_foreign_changes_and_dropped_fields(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices that others delete are put back each time; fields that the server drops are not sent again and again."""
    monkeypatch.setattr("dra_driver.slices.publisher._QUIET_AFTER_WRITE_S", 0.001)
    node = make_node()
    node.server.gates["DRAConsumableCapacity"] = False
    shared = {"sharing": share_all(SharingRule("shares", 4))}
    driver = node.start_driver(**shared)
    node.wait_devices(8)
    for _ in range(3):
        node.wipe()
        node.wait_devices(8)
    eventually(lambda: not driver.problems())
    eventually(lambda: node.slice_writes() == ["POST"] * 4)
    assert not any("allowMultipleAllocations" in device for device in node.devices())
    node.restart_driver(**shared)
    assert node.slice_writes() == ["POST"] * 4


def test_c25_expired_watch(node: ConformanceNode) -> None:
    """A watch whose history is gone is listed anew; a change during that is seen."""
    node.server.store.forget()
    node.wipe()
    node.wait_devices(8)


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
    assert isinstance(node.prepare(ref)[ref.uid], Prepared)

    accept("third")
    node.wipe()
    eventually(lambda: any(request.status == 401 for request in list(node.server.requests)))
    assert node.slices() == []
    write("third")
    node.wait_devices(8)
    other = node.claim("other")
    assert isinstance(node.prepare(other)[other.uid], Prepared)
