"""The node's slices as the API server has them, in memory, in the form that the publisher uses."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from playground.apiserver.store import copy_json

from dra_driver.cli.validation.machine_fit import MachineFit
from dra_driver.errors import ApiRejectedError
from dra_driver.kube.client import FIELD_MANAGER
from dra_driver.model.inventory import Inventory
from dra_driver.model.sharing import NO_SHARING
from dra_driver.slices.api_support import ApiSupport, Support
from dra_driver.slices.publisher import Publisher
from dra_driver.slices.rules.build import build_pool, none_withheld, untainted
from dra_driver.slices.rules.diff import Owner, slice_changes
from tests.fakes.samples import DRIVER, NODE

JsonObject = dict[str, Any]


def machine_fit(found: Inventory, **more: Any) -> MachineFit:
    """A machine as `validate` tries claims on it, with what the plugin publishes for this inventory."""
    slices = slice_changes(build_pool(found, NODE), (), Owner(DRIVER, NODE, "")).creates
    return MachineFit("m", DRIVER, slices, found, **more)


class RecordedCalls:
    """Records the calls of a publisher's observer."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self.failures: list[Exception] = []

    def published(self, lag_s: float) -> None:
        self.lags.append(lag_s)

    def publish_failed(self, error: Exception) -> None:
        self.failures.append(error)


def publisher_of(
    inventory: Callable[[], Any], slices: Any, owner: Callable[[], Any], **more: Any
) -> Publisher:
    """A publisher on a server that takes everything; `more` replaces parts of that."""
    parts: dict[str, Any] = {"taints": lambda limits: untainted, "left_out": lambda dropped: none_withheld}
    support = more.pop("support", None) or support_of(lambda *_: Support())
    observer = more.pop("observer", None) or RecordedCalls()
    node = SimpleNamespace(inventory=inventory, owner=owner, **parts | more)
    return Publisher(node, slices, NO_SHARING, support, observer)


def support_of(ask: Callable[[Support, bool], Support]) -> ApiSupport:
    """What the server that answers `ask` takes and keeps."""
    return QueriedSupport(ask)


class QueriedSupport(ApiSupport):
    """On a server that answers `ask`; `concern` is what is wrong with counters there."""

    concern: str | Exception | None = None

    def __init__(self, ask: Callable[[Support, bool], Support], **more: Any) -> None:
        self.ask = ask
        super().__init__(None, more.pop("sharing", NO_SHARING), **more)

    def _ask(self, known: Support, _owner: Owner) -> Support:
        return self.ask(known, self._matters)

    def _ask_caution(self) -> str | None:
        if isinstance(self.concern, Exception):
            raise self.concern
        return self.concern


RIVAL = "gpu-kubelet-plugin"
"""The field manager of another driver."""


class FakeSlices:
    """Names, UIDs, resource versions, field managers and conflicts as the server has them.

    `on_change` is called after changes of others only. `store` may change what is kept, as a server does that
    drops fields. `fail` is raised by the next writes.
    """

    def __init__(self) -> None:
        self.synced = threading.Event()
        self.synced.set()
        self.on_change: Callable[[], None] = lambda: None
        self.store: Callable[[JsonObject], JsonObject] = lambda obj: obj
        self.failures: list[Exception] = []
        self.failing: tuple[float, str] | None = None
        self.writes: list[tuple[str, str]] = []
        self._objects: dict[str, JsonObject] = {}
        self._serial = itertools.count(1)
        self._lock = threading.Lock()

    # --- as the publisher sees it ----------------------------------------------------------------

    def current(self) -> list[JsonObject]:
        with self._lock:
            return copy_json([self._objects[name] for name in sorted(self._objects)])

    def create(self, obj: JsonObject) -> JsonObject:
        self._begin("create", obj["metadata"]["generateName"])
        name = f"{obj['metadata']['generateName']}{next(self._serial):05d}"
        return self._put({**obj, "metadata": {**obj["metadata"], "name": name, "uid": f"uid-{name}"}})

    def update(self, obj: JsonObject) -> JsonObject:
        name = obj["metadata"]["name"]
        self._begin("update", name)
        known = self._objects.get(name)
        if known is None:
            raise ApiRejectedError(f"update slice {name}: it is gone", status=404)
        if known["metadata"]["resourceVersion"] != obj["metadata"]["resourceVersion"]:
            raise ApiRejectedError(f"update slice {name}: it was changed meanwhile", status=409)
        return self._put(obj)

    def delete(self, name: str, uid: str, resource_version: str | None = None) -> None:
        self._begin("delete", name)
        with self._lock:
            self._objects.pop(name, None)

    # --- as others see it ------------------------------------------------------------------------

    def wipe(self) -> None:
        with self._lock:
            self._objects.clear()
        self.on_change()

    def spoil(self, **spec: Any) -> None:
        """Another driver writes the first slice."""
        entry = self.current()[0]
        entry["spec"].update(spec)
        self._put(entry, RIVAL)
        self.on_change()

    def plant(self, name: str, like: JsonObject) -> None:
        """Another driver creates a slice."""
        entry = copy_json(like)
        entry["metadata"] |= {"name": name, "uid": f"uid-{name}"}
        entry["metadata"].pop("managedFields", None)
        self._put(entry, RIVAL)
        self.on_change()

    def _begin(self, verb: str, name: str) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.writes.append((verb, name))

    def _put(self, obj: JsonObject, manager: str = FIELD_MANAGER) -> JsonObject:
        stored = self.store(copy_json(obj))
        metadata, serial = stored["metadata"], next(self._serial)
        metadata["resourceVersion"] = str(serial)
        kept = [entry for entry in metadata.get("managedFields") or () if entry["manager"] != manager]
        written = {"manager": manager, "operation": "Update", "time": f"2026-01-01T{serial:06d}Z"}
        metadata["managedFields"] = [*kept, written]
        with self._lock:
            self._objects[stored["metadata"]["name"]] = stored
        return copy_json(stored)
