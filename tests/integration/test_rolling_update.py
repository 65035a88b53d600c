"""Two instances with different content over one API server: one publishes, the other takes over from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from playground.apiserver.server import PlaygroundApiServer

from dra_driver.kube.client import ApiClient
from dra_driver.kube.cluster import node_uid
from dra_driver.kube.endpoint import load_endpoint
from dra_driver.kube.slice_cache import SliceCache
from dra_driver.kube.slices import SliceClient
from dra_driver.kube.versions import ResourceApi
from dra_driver.model.inventory import Inventory
from dra_driver.slices import publisher as publisher_module
from dra_driver.slices.api_support import ask_support
from dra_driver.slices.leadership import InstanceLeadership
from dra_driver.slices.rules.diff import Owner
from tests.fakes.samples import DRIVER, NODE, h100, inventory
from tests.fakes.slices import publisher_of, support_of
from tests.integration.conftest import eventually


class Instance:
    """The publishing half of one daemon; `register` is the kubelet's word."""

    def __init__(self, root: Path, client: ApiClient, name: str, content: Inventory) -> None:
        self.names = [device.name for device in content.devices()]
        self.turn = InstanceLeadership(root / "publishers", name)
        api = ResourceApi(client)
        self._cache = SliceCache(SliceClient(api, DRIVER, NODE), self._slices_changed)

        def owner() -> Owner:
            return Owner(DRIVER, NODE, node_uid(client, NODE))

        self.publisher = publisher_of(
            lambda: content,
            self._cache,
            owner,
            may_publish=self.turn.is_ours,
            support=support_of(lambda known, counts: ask_support(api, owner(), known, partitions=counts)),
        )
        self._cache.start()
        self.publisher.start()
        self.publisher.mark_dirty()

    def _slices_changed(self) -> None:
        self.publisher.mark_dirty()

    def register(self) -> Instance:
        self.turn.announce()
        self.publisher.mark_dirty()
        return self

    def stop(self) -> None:
        self.publisher.stop()
        self.turn.withdraw()
        self._cache.stop()


class World:
    def __init__(self, root: Path, server: PlaygroundApiServer, stack: ExitStack) -> None:
        self._root, self.server, self._stack = root, server, stack
        server.write_kubeconfig(root / "kubeconfig")

    def start(self, name: str, content: Inventory) -> Instance:
        client = ApiClient(load_endpoint(self._root / "kubeconfig"), timeout_s=5)
        self._stack.callback(client.close)
        made = Instance(self._root, client, name, content)
        self._stack.callback(made.stop)
        return made

    def devices(self) -> list[str]:
        return [
            device["name"]
            for entry in self.server.objects("resourceslices")
            for device in entry["spec"].get("devices", [])
        ]

    def writes(self) -> int:
        return len(self.server.writes("resourceslices"))

    def wipe(self) -> None:
        """As a kubelet does at its start."""
        resource = self.server.resource("resourceslices")
        for entry in self.server.objects("resourceslices"):
            self.server.operations.delete(resource, ("", entry["metadata"]["name"]), {})


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    monkeypatch.setattr(publisher_module, "_LEADERSHIP_AGAIN_S", 0.1)
    with ExitStack() as stack:

        def make(**options: object) -> World:
            server = stack.enter_context(PlaygroundApiServer(**options))
            server.add("nodes", {"metadata": {"name": NODE}})
            return World(tmp_path, server, stack)

        yield make


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


OLD, NEW = inventory(h100(0), h100(1)), inventory(h100(0), replace(h100(1), architecture="Other"))


def attributes(world: World) -> list[str]:
    return [
        device["attributes"]["architecture"]["string"]
        for entry in world.server.objects("resourceslices")
        for device in entry["spec"]["devices"]
    ]


def test_newer_instance_publishes_and_the_older_takes_over_again(world: World) -> None:
    old = world.start("old", OLD).register()
    eventually(lambda: world.devices() == old.names)
    [before] = set(attributes(world))
    new = world.start("new", NEW)
    eventually(lambda: new.publisher.standing_by)
    assert world.writes() == 1, "it waits for the kubelet"
    new.register()
    eventually(lambda: attributes(world) == [before, "Other"])
    eventually(lambda: old.publisher.standing_by)
    assert (old.publisher.problem, new.publisher.standing_by) == (None, False)
    writes = world.writes()
    time.sleep(0.5)
    assert world.writes() == writes == 2, "nobody answers the other"

    world.wipe()
    eventually(lambda: world.devices() == new.names)
    assert attributes(world) == [before, "Other"]
    assert world.writes() == 3, "the wipe is put right by one of them"

    new.stop()
    eventually(lambda: attributes(world) == [before, before])
    assert (old.publisher.standing_by, old.publisher.problem) == (False, None)
    assert world.writes() == 4


def test_same_content_is_handed_over_without_a_write(world: World) -> None:
    old = world.start("old", OLD).register()
    assert old.publisher.wait_published(20)
    [before] = world.server.objects("resourceslices")
    new = world.start("new", OLD).register()
    assert new.publisher.wait_published(20)
    old.stop()
    time.sleep(0.3)
    assert world.server.objects("resourceslices") == [before]
    assert world.writes() == 1


def test_instance_that_was_started_earlier_stays_behind_when_it_registers_later(world: World) -> None:
    """A restarted kubelet registers the sockets in any order."""
    old, new = world.start("old", OLD), world.start("new", NEW)
    new.register()
    # Two that start in the same moment may both publish once; the one whose turn it is removes the other's.
    eventually(lambda: attributes(world)[1:] == ["Other"])
    old.register()
    time.sleep(0.4)
    assert "Other" in attributes(world)
    assert old.publisher.standing_by


@pytest.mark.parametrize("chunk", [64, 1], ids=["one slice", "two slices"])
def test_restart_writes_nothing_on_a_server_with_gates_off(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Several slices would even move on to a new generation, which no server takes for the same content."""
    monkeypatch.setattr("dra_driver.slices.rules.build.MAX_DEVICES_PER_SLICE", chunk)
    monkeypatch.setattr("dra_driver.slices.rules.build.wire_device", tainted)
    world = make_world(gates={"DRADeviceTaints": False})
    first = world.start("first", OLD).register()
    assert first.publisher.wait_published(20)
    before = world.server.objects("resourceslices")
    writes = world.writes()
    assert all("taints" not in device for entry in before for device in entry["spec"]["devices"])
    first.stop()
    second = world.start("second", OLD).register()
    assert second.publisher.wait_published(20)
    time.sleep(0.3)
    assert world.server.objects("resourceslices") == before
    assert world.writes() == writes
    second.stop()

    world.server.operations.gates = {}
    third = world.start("third", OLD).register()
    assert third.publisher.wait_published(20)
    after = world.server.objects("resourceslices")
    assert all("taints" in device for entry in after for device in entry["spec"]["devices"])


def tainted(offered: object, content: Inventory) -> dict:
    from dra_driver.slices.rules.attributes import wire_device

    taint = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}
    return wire_device(offered, content) | {"taints": [taint]}
