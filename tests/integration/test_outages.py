"""Parts fail and come back under the whole daemon: API server, token, kubelet, NVML, driver, disk, clock."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playground.apiserver.server import Identity, PlaygroundApiServer

from dra_driver.files import atomic as files
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint
from dra_driver.kube.slice_cache import SliceCache
from dra_driver.kube.slices import SliceClient
from dra_driver.kube.versions import ResourceApi
from dra_driver.model.claim import ClaimRef, Failed, Prepared
from dra_driver.slices.rules.diff import Owner
from tests.fakes.samples import h100, inventory
from tests.fakes.slices import publisher_of
from tests.integration.conftest import DRIVER, NODE, Node, eventually
from tests.kube.support import Patience

OUTAGE_S = 600.0


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at the hardware come sooner; nothing else differs."""
    monkeypatch.setattr("dra_driver.health.monitor._WAIT_S", 0.05)
    monkeypatch.setattr("dra_driver.inventory.discovery._LOOK_EVERY_S", 0.05)


def prepared(node: Node, count: int) -> dict[str, Any]:
    """Claims on the first GPUs, with their answers by UID."""
    refs = [node.allocated_by_hand(device["name"], device["name"]) for device in node.devices()[:count]]
    answers = node.prepare(*refs)
    assert all(isinstance(answer, Prepared) for answer in answers.values()), answers
    return answers


def ref(uid: str) -> ClaimRef:
    return ClaimRef("default", "any", uid)


def take_back(node: Node, uids: list[str]) -> None:
    assert node.unprepare(*map(ref, uids)) == dict.fromkeys(uids)


def stored_refs(node: Node) -> dict[str, ClaimRef]:
    """Every claim of the API server by UID."""
    return {
        claim["metadata"]["uid"]: ClaimRef("default", claim["metadata"]["name"], claim["metadata"]["uid"])
        for claim in node.server.objects("resourceclaims")
    }


# --- API server --------------------------------------------------------------------------------------


def test_daemon_that_starts_without_api_server_serves_what_it_knows(node: Node) -> None:
    """Prepared claims prepare again and Unprepare works; what changed meanwhile is published afterwards."""
    answers = prepared(node, 3)
    refs = stored_refs(node)
    node.driver.stop()
    port_taken = node.server
    port_taken.stop()
    node.start_driver()
    eventually(lambda: node.driver.discovery.inventory)
    for uid, answer in answers.items():
        assert node.prepare(refs[uid])[uid] == answer
    take_back(node, [next(iter(answers))])
    fresh = ClaimRef("default", "fresh", "0-fresh")
    assert isinstance(node.prepare_in_a_hurry(fresh)[fresh.uid], Failed)
    node.machine.remove_gpu(7)
    eventually(lambda: len(node.driver.discovery.inventory.gpus) == 7)
    port_taken.start()
    node.wait_devices(7)
    eventually(lambda: not node.driver.problems())
    take_back(node, list(answers))
    assert (node.specs(), node.records()) == ([], [])


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[tuple[PlaygroundApiServer, ResourceApi]]:
    """A server that answers every request with what its faults say."""
    with PlaygroundApiServer() as server:
        server.add("nodes", {"metadata": {"name": NODE}})
        server.write_kubeconfig(tmp_path / "kubeconfig")
        client = ApiClient(load_endpoint(tmp_path / "kubeconfig"))
        api = ResourceApi(client)
        api.discover()
        yield server, api
        client.close()


FAULTS = [(503, None, 40), (429, "20", 40), (500, None, 40)]


@pytest.mark.parametrize(("status", "retry_after", "most"), FAULTS, ids=["503", "429", "500"])
def test_watching_costs_little_while_the_server_is_away(
    failing: tuple[PlaygroundApiServer, ResourceApi], status: int, retry_after: str | None, most: int
) -> None:
    """Ten minutes of trouble cost few requests, ever rarer and never in step; the server's own wish is granted."""
    server, api = failing
    server.faults.fail(10_000, status, retry_after=retry_after)
    before = len(server.requests)
    caches = [SliceCache(SliceClient(api, DRIVER, NODE), lambda: None) for _ in range(2)]
    patience = [Patience(OUTAGE_S) for _ in caches]
    for cache, stop in zip(caches, patience, strict=True):
        cache._stop = stop
        cache._run()
    assert len(server.requests) - before <= 2 * most
    for stop in patience:
        assert max(stop.waits) <= 30.0
        if retry_after:
            assert min(stop.waits) >= float(retry_after)
        else:
            assert stop.waits[0] < 2.0
            assert min(stop.waits[8:]) >= 15.0
    if not retry_after:
        assert patience[0].waits != patience[1].waits


@pytest.mark.parametrize(("status", "retry_after", "most"), FAULTS, ids=["503", "429", "500"])
def test_publishing_costs_little_while_the_server_refuses(
    failing: tuple[PlaygroundApiServer, ResourceApi], status: int, retry_after: str | None, most: int
) -> None:
    """The same of the writer, which keeps trying for as long as its slices are not there."""
    server, api = failing
    cache = SliceCache(SliceClient(api, DRIVER, NODE), lambda: None)
    cache.start()
    assert cache.synced.wait(10)
    [node_object] = server.objects("nodes", group="")
    owner = Owner(DRIVER, NODE, node_object["metadata"]["uid"])
    publisher = publisher_of(lambda: inventory(h100(0)), cache, lambda: owner)
    server.faults.fail(10_000, status, retry_after=retry_after, method="POST")
    patience = publisher._worker._stopping = Patience(OUTAGE_S)
    publisher.mark_dirty()
    publisher._worker._run()
    cache.stop()
    writes = server.writes("resourceslices")
    assert 5 <= len(writes) <= most
    assert {request.status for request in writes} == {status}
    assert max(patience.waits) <= 36.0
    if retry_after:
        assert min(patience.waits) >= float(retry_after)
    server.faults.clear()


def test_token_is_renewed_under_a_running_daemon(make_node: Callable[..., Node]) -> None:
    """The old token is worthless at once: calls and the watch go on with the new one, and nothing is written."""
    node = make_node()
    token = node.root / "token"
    token.write_text("first")
    node.server.tokens = {"first": Identity("driver", node=NODE)}
    node.server.write_kubeconfig(node.root / "kubeconfig", token_file=token)
    node.start_driver()
    node.wait_devices(8)
    for name in ("second", "third"):
        fresh = node.root / "fresh"
        fresh.write_text(name)
        fresh.replace(token)
        node.server.tokens = {name: Identity("driver", node=NODE)}
        node.server.faults.cut_watches()
        claim = node.allocated_by_hand(name, node.devices()[0]["name"])
        assert isinstance(node.prepare(claim)[claim.uid], Prepared)
        assert node.unprepare(claim) == {claim.uid: None}
    node.server.operations.delete(
        node.server.resource("resourceslices"), ("", node.slices()[0]["metadata"]["name"]), {}
    )
    node.wait_devices(8)
    assert {request.status for request in node.server.writes("resourceslices")} == {201}


def test_history_that_is_gone_is_listed_once(node: Node) -> None:
    """410 Gone: one list, then a watch again, and no write."""
    lists = len([one for one in node.server.requests if _is_list(one)])
    writes = len(node.server.writes("resourceslices"))
    node.server.store.forget()
    eventually(lambda: len([one for one in node.server.requests if _is_list(one)]) > lists)
    time.sleep(0.2)
    assert len([one for one in node.server.requests if _is_list(one)]) == lists + 1
    assert node.server.writes("resourceslices")[writes:] == []
    node.machine.remove_gpu(7)
    node.wait_devices(7)
    assert {request.method for request in node.server.writes("resourceslices")[writes:]} == {"PUT"}


def _is_list(request: Any) -> bool:
    return request.method == "GET" and "resourceslices" in request.path and "watch" not in request.query


# --- kubelet and load --------------------------------------------------------------------------------


class Load:
    """Threads that prepare and unprepare a claim each, over and over; `failures` are what went wrong."""

    def __init__(self, node: Node, count: int = 4) -> None:
        self._node = node
        self._stop = threading.Event()
        self.failures: list[str] = []
        self.rounds = 0
        devices = [device["name"] for device in node.devices()[:count]]
        refs = [node.allocated_by_hand(f"load-{name}", name) for name in devices]
        self._threads = [threading.Thread(target=self._run, args=(one,)) for one in refs]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def more(self, rounds: int = 8) -> None:
        """Wait for so many rounds that went well."""
        wanted = self.rounds + rounds
        eventually(lambda: self.rounds >= wanted, 20)

    def _run(self, claim: ClaimRef) -> None:
        while not self._stop.is_set():
            if self._ask(self._node.prepare, claim) and self._ask(self._node.unprepare, claim):
                self.rounds += 1
        eventually(lambda: self._ask(self._node.unprepare, claim), 20)

    def _ask(self, call: Callable[[ClaimRef], dict[str, Any]], claim: ClaimRef) -> bool:
        try:
            outcome = call(claim)[claim.uid]
        except Exception as error:
            self.failures.append(str(error))
            self._stop.wait(0.01)
            return False
        if isinstance(outcome, Failed):
            self.failures.append(outcome.error)
        return not isinstance(outcome, Failed)


def fresh_state(node: Node) -> tuple[Any, ...]:
    return node.specs(), node.records(), [entry["spec"].get("devices", []) for entry in node.slices()]


def test_kubelet_restarts_under_load(node: Node) -> None:
    before = fresh_state(node)
    with Load(node) as load:
        for _ in range(5):
            load.more()
            node.kubelet.restart()
            node.kubelet.wait_registered(DRIVER)
        load.more()
    assert fresh_state(node) == before


def test_driver_is_reloaded_under_load(node: Node) -> None:
    """What fails meanwhile says why; afterwards all is as on a fresh node."""
    before = fresh_state(node)
    with Load(node) as load:
        for version in ("590.10.01", None, None):
            load.more()
            node.machine.unload_driver()
            eventually(lambda: node.devices() == [])
            node.machine.load_driver(version)
            node.wait_devices(8)
        load.more()
    assert all("driver" in text or "NVML" in text or "usable" in text for text in load.failures), (
        load.failures
    )
    node.machine.load_driver("580.95.05")
    eventually(lambda: fresh_state(node) == before)


# --- GPUs --------------------------------------------------------------------------------------------


def test_hanging_nvml_delays_nobody_who_needs_it_not(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one GPU hangs every call of NVML, known devices are served, and a call that needs a look is bounded."""
    monkeypatch.setattr("dra_driver.claims.planner._SCAN_WAIT_S", 0.2)
    known = prepared(node, 4)
    others = [
        node.allocated_by_hand(f"other-{device['name']}", device["name"]) for device in node.devices()[4:]
    ]
    unknown = node.allocated_by_hand("unknown", "gpu-00000000")
    node.machine.set_fault("nvmlDeviceGet*", delay_s=3.0, count=1, gpu=0)
    node.driver.discovery.request_rescan()
    eventually(lambda: not node.machine.current().faults)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(node.kubelet.prepare, DRIVER, [one], 2.9) for one in others]
        refused = pool.submit(node.kubelet.prepare, DRIVER, [unknown], 4.0)
        assert all(isinstance(outcome, Prepared) for call in calls for outcome in call.result().values())
        assert isinstance(refused.result()[unknown.uid], Failed)
    take_back(node, [*known, *(one.uid for one in others)])
    assert (node.specs(), node.records()) == ([], [])


@pytest.mark.parametrize("how", ["off the bus", "drained"])
def test_gpu_that_leaves_under_its_claim(node: Node, how: str) -> None:
    """Its claim can be taken back, the other claims do not notice, and the GPU serves again when it is back."""
    before = [device["name"] for device in node.devices()]
    answers = prepared(node, 3)
    refs = stored_refs(node)
    [lost] = [uid for uid, answer in answers.items() if answer.devices[0].device == node.devices()[0]["name"]]
    uuid = node.machine.gpu(0).uuid
    if how == "drained":
        node.machine.remove_gpu(uuid)
        node.wait_devices(7)
    else:
        node.machine.lose_gpu(uuid)
        eventually(lambda: [device for device in node.devices() if device.get("taints")])
    for uid, answer in answers.items():
        if uid != lost:
            assert node.prepare(refs[uid])[uid] == answer
    take_back(node, [lost])
    if how == "drained":
        node.machine.unload_driver()
        node.machine.add_gpu(node.machine.current().by_uuid[uuid].model)
        node.machine.load_driver()
    else:
        node.machine.restore_gpu(uuid)
    node.driver.discovery.request_rescan()
    eventually(lambda: isinstance(node.prepare(refs[lost])[lost], Prepared))
    take_back(node, list(answers))
    eventually(lambda: not any(device.get("taints") for device in node.devices()))
    eventually(lambda: [device["name"] for device in node.devices()] == before)
    assert (node.specs(), node.records()) == ([], [])


# --- disk --------------------------------------------------------------------------------------------


class FaultyDisk:
    """Stands in for `os` where the state room writes: no file can be made. Those that are there open, as locks do."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, *mode: int, **options: Any) -> int:
        if flags & os.O_CREAT and not os.path.exists(path):  # noqa: PTH110  as `os` has it
            raise OSError(self._number, os.strerror(self._number), str(path))
        return os.open(path, flags, *mode, **options)


@contextmanager
def faulty_disk(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(files, "os", FaultyDisk(number))
        yield


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "the file system is read-only")],
    ids=["full", "read-only"],
)
def test_disk_that_refuses_costs_new_claims_only(
    node: Node, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    """Claims that are prepared stay so and can go; new ones hear what is wrong and succeed once it is put right."""
    answers = prepared(node, 2)
    refs = stored_refs(node)
    new = node.claim("new")
    first, second = answers
    with faulty_disk(monkeypatch, number):
        outcome = node.prepare(new)[new.uid]
        assert isinstance(outcome, Failed)
        assert words in outcome.error
        assert node.prepare(refs[first])[first] == answers[first]
        take_back(node, [first])
    assert isinstance(node.prepare(new)[new.uid], Prepared)
    assert node.prepare(refs[second])[second] == answers[second]
    take_back(node, [second, new.uid])
    assert (node.specs(), node.records()) == ([], [])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with room for little."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root")
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k,nr_inodes=400", "tmpfs", str(place)], check=False
    )
    if made.returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.root
def test_real_disk_without_room(make_node: Callable[..., Node], small_disk: Path) -> None:
    """The same on a file system that is really full."""
    node = make_node()
    plugins = small_disk / "p"
    node.plugin_dir = plugins / DRIVER
    node.start_driver(kubelet_plugins_directory_path=str(plugins))
    node.wait_devices(8)
    answers = prepared(node, 2)
    refs = stored_refs(node)
    new = node.claim("new")
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        file.writelines(itertools.repeat(b"x" * 4096))
    outcome = node.prepare(new)[new.uid]
    assert isinstance(outcome, Failed)
    assert "the disk is full" in outcome.error
    first, second = answers
    assert node.prepare(refs[first])[first] == answers[first]
    take_back(node, [first])
    filler.unlink()
    assert isinstance(node.prepare(new)[new.uid], Prepared)
    take_back(node, [second, new.uid])
    assert (node.specs(), node.records()) == ([], [])


# --- clock -------------------------------------------------------------------------------------------


class JumpedTime:
    """Stands in for `time` in the driver's modules: gRPC would take a jump of its own for a missed deadline."""

    def __init__(self, jump_s: float) -> None:
        self._jump_s = jump_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        return time.time() + self._jump_s

    def time_ns(self) -> int:
        return time.time_ns() + int(self._jump_s * 1e9)


@pytest.mark.parametrize("jump_s", [10 * 365 * 86400.0, -10 * 365 * 86400.0], ids=["forward", "back"])
def test_clock_that_jumps_changes_nothing(node: Node, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    """Ten years in either direction, under the running daemon and over its restart."""
    answers = prepared(node, 2)
    refs = stored_refs(node)
    published = node.slices()
    ours = [module for name, module in sys.modules.items() if name.startswith("dra_driver.")]
    jumped = [module for module in ours if getattr(module, "time", None) is time]
    assert jumped
    for module in jumped:
        monkeypatch.setattr(module, "time", JumpedTime(jump_s))
    for restart in (False, True):
        if restart:
            node.driver.stop()
            driver = node.start_driver()
            eventually(lambda driver=driver: not driver.problems())
        for uid, answer in answers.items():
            assert node.prepare(refs[uid])[uid] == answer
        other = node.claim(f"other-{int(restart)}")
        assert isinstance(node.prepare(other)[other.uid], Prepared)
        take_back(node, [other.uid])
        assert isinstance(node.prepare(other)[other.uid], Prepared), "asked for after it was taken back"
        take_back(node, [other.uid])
    assert node.slices() == published
    take_back(node, list(answers))
    assert (node.specs(), node.records()) == ([], [])
