"""The publisher dies after every write to the API server; the next one completes the pool. In between, no
complete pool is visible except the earlier and the wanted one.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from playground.apiserver import PlaygroundApiServer

from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint
from dra_driver.kube.slices import SliceCache
from dra_driver.model.inventory import Inventory
from dra_driver.slices.rules import build
from dra_driver.slices.rules.build import build_pool
from dra_driver.slices.rules.diff import Owner
from tests.fakes.machines import SimulatedNode
from tests.fakes.preparing import Crash
from tests.fakes.samples import DRIVER, NODE
from tests.fakes.slices import publisher_of
from tests.fakes.waiting import PATIENCE_S

Json = dict[str, Any]
View = str | None
"""The content of the pool as the scheduler takes it, None where the pool is not complete."""


@pytest.fixture(autouse=True)
def _deaths_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher dies here by an error in its thread."""
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)


class DyingCache:
    """A cache whose `at`-th write is the last thing that its publisher does."""

    def __init__(self, cache: SliceCache, at: int | None, after_write: Callable[[str], None]) -> None:
        self._cache = cache
        self._at = at
        self._after_write = after_write
        self._writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def create(self, obj: Json) -> Json:
        return self._written("create", self._cache.create(obj))

    def update(self, obj: Json) -> Json:
        return self._written("update", self._cache.update(obj))

    def delete(self, name: str, uid: str, resource_version: str | None = None) -> None:
        self._written("delete", self._cache.delete(name, uid, resource_version))

    def _written(self, verb: str, answer: Any) -> Any:
        self._after_write(verb)
        self._writes += 1
        if self._writes == self._at:
            raise Crash
        return answer


class Cluster:
    """An API server with slices of before, and publishers one after the other."""

    def __init__(self, directory: Path, slices: list[Json]) -> None:
        self.server = PlaygroundApiServer()
        self.server.start()
        node = self.server.add("nodes", {"metadata": {"name": NODE}})
        self._owner = Owner(DRIVER, NODE, node["metadata"]["uid"])
        for entry in slices:
            body = copy.deepcopy(entry)
            body["metadata"] = {"name": entry["metadata"]["name"]} | {
                "ownerReferences": [
                    reference | {"uid": self._owner.node_uid}
                    for reference in entry["metadata"]["ownerReferences"]
                ]
            }
            self.server.add("resourceslices", body, group="resource.k8s.io")
        self.server.write_kubeconfig(directory / "kubeconfig")
        self._client = ApiClient(load_endpoint(directory / "kubeconfig"), timeout_s=5)
        self.views: list[View] = [self.view()]
        self.written: list[str] = []

    def slices(self) -> list[Json]:
        return self.server.objects("resourceslices")

    def view(self) -> View:
        slices = self.slices()
        newest = max((entry["spec"]["pool"]["generation"] for entry in slices), default=0)
        seen = [entry["spec"] for entry in slices if entry["spec"]["pool"]["generation"] == newest]
        if not seen or any(spec["pool"]["resourceSliceCount"] != len(seen) for spec in seen):
            return None
        return content(seen)

    def publish(self, inventory: Inventory, die_at: int | None = None) -> list[str]:
        """Return the writes of a publisher until it was done, or died."""
        self.written = []
        cache = SliceCache(self._client, DRIVER, NODE, self._changed)
        publisher = self._publisher = publisher_of(
            lambda: inventory, DyingCache(cache, die_at, self._note), lambda: self._owner
        )
        cache.start()
        try:
            publisher.start()
            if die_at is None:
                assert publisher.wait_published(PATIENCE_S)
            else:
                publisher._worker._thread.join(PATIENCE_S)
                assert not publisher._worker._thread.is_alive(), "it made fewer writes than were to be"
        finally:
            publisher.stop()
            cache.stop()
        return self.written

    def close(self) -> None:
        self._client.close()
        self.server.stop()

    def _changed(self) -> None:
        self._publisher.mark_dirty()

    def _note(self, verb: str) -> None:
        self.written.append(verb)
        self.views.append(self.view())


def content(specs: list[Mapping[str, Any]]) -> str:
    """Devices and counters, whatever slices they lie in."""
    devices = [device for spec in specs for device in spec.get("devices", [])]
    counters = [entry for spec in specs for entry in spec.get("sharedCounters", [])]
    return json.dumps([sorted(map(_text, devices)), sorted(map(_text, counters))])


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@pytest.fixture(scope="module")
def gpus(make_memory_path: Callable[[], Path]) -> Iterator[Inventory]:
    """Three GPUs with all MIG devices that fit on demand: a slice for each GPU, and one for counters."""
    node = SimulatedNode("dgx-h100", make_memory_path(), lambda gpu: True)
    found = first(node.discover(), 3)
    with pytest.MonkeyPatch.context() as patched:
        # So that few devices are enough for several slices.
        patched.setattr(build, "MAX_DEVICES_PER_SLICE", len(found.by_name) // 3)
        yield found
    node.close()


def first(known: Inventory, count: int) -> Inventory:
    return replace(known, gpus=known.gpus[:count])


def with_driver(known: Inventory, version: str) -> Inventory:
    return replace(known, versions=replace(known.versions, driver=version))


def slower(known: Inventory) -> Inventory:
    """One GPU is another, which changes the one slice that it lies in."""
    *others, last = known.gpus
    return replace(known, gpus=(*others, replace(last, product_name="NVIDIA H100 PCIe")))


@dataclass(frozen=True)
class Change:
    """From one inventory to another, with the writes that it takes."""

    before: Callable[[Inventory], Inventory | None]
    after: Callable[[Inventory], Inventory]
    verbs: tuple[str, ...]


CHANGES = {
    "all is new": Change(lambda _: None, lambda known: known, ("create",) * 4),
    "every device changes": Change(
        lambda known: known, lambda known: with_driver(known, "999.1.2"), ("update",) * 4
    ),
    "one device changes": Change(lambda known: known, slower, ("update",)),
    "GPUs go": Change(
        lambda known: known, lambda known: first(known, 1), ("delete",) * 2 + ("update",) * 2
    ),
    "GPUs come": Change(
        lambda known: first(known, 1), lambda known: known, ("update",) * 2 + ("create",) * 2
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def published(
    gpus: Inventory, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Inventory | None], list[Json]]:
    """The slices of an inventory as a server has them."""
    known: dict[int, list[Json]] = {}

    def slices(wanted: Inventory | None) -> list[Json]:
        if wanted is None:
            return []
        count = len(wanted.gpus)
        if count not in known:
            with cluster(tmp_path_factory.mktemp("before"), []) as one:
                one.publish(wanted)
                known[count] = one.slices()
        return known[count]

    return slices


@contextmanager
def cluster(directory: Path, slices: list[Json]) -> Iterator[Cluster]:
    directory.mkdir(exist_ok=True)
    one = Cluster(directory, slices)
    try:
        yield one
    finally:
        one.close()


@pytest.mark.parametrize("name", CHANGES)
def test_the_next_publisher_completes_what_a_dead_one_began(
    gpus: Inventory, published: Callable[[Inventory | None], list[Json]], tmp_path: Path, name: str
) -> None:
    change = CHANGES[name]
    wanted, before = change.after(gpus), published(change.before(gpus))
    with cluster(tmp_path / "whole", before) as whole:
        assert tuple(whole.publish(wanted)) == change.verbs
        expected, old = whole.view(), whole.views[0]
        assert expected not in (None, old)
        assert expected == content(
            [
                {"devices": list(part.devices), "sharedCounters": list(part.shared_counters)}
                for part in build_pool(wanted, NODE).slices
            ]
        )
        count = len(whole.slices())
    for number in range(1, len(change.verbs) + 1):
        with cluster(tmp_path / str(number), before) as one:
            assert tuple(one.publish(wanted, die_at=number)) == change.verbs[:number]
            left = one.slices()
            rest = one.publish(wanted)
            assert one.view() == expected, number
            assert set(one.views) <= {None, old, expected}, number
            assert is_monotonous(one.views, expected), number
            # Remains of an older generation are deleted first; nothing is written twice.
            assert len(rest) <= len(left) + count, number
            assert len(rest) - rest.count("delete") <= count, number
            if number == len(change.verbs):
                assert rest == []
            assert one.publish(wanted) == [], number
            assert len({entry["spec"]["pool"]["generation"] for entry in one.slices()}) == 1, number


def is_monotonous(views: list[View], expected: View) -> bool:
    """Whether who has seen the new pool never sees the one before again."""
    seen_new = False
    for view in views:
        if seen_new and view not in (None, expected):
            return False
        seen_new = seen_new or view == expected
    return True


@pytest.mark.parametrize("first_death", [1, 2, 3])
def test_several_deaths_in_a_row_end_in_the_same_pool(
    gpus: Inventory, published: Callable[[Inventory | None], list[Json]], tmp_path: Path, first_death: int
) -> None:
    wanted = with_driver(gpus, "999.1.2")
    with cluster(tmp_path / "one", published(gpus)) as one:
        old = one.views[0]
        for death in (first_death, 2, 1):
            one.publish(wanted, die_at=death)
        one.publish(wanted)
        expected = one.view()
        assert expected not in (None, old)
        assert set(one.views) == {None, old, expected}
        assert one.publish(wanted) == []
