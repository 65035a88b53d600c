"""Publishers of many nodes in one process: for each node a client, slice cache and publisher, as the daemon has."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

import structlog
from processes import resident_mib

from dra_driver.app.platforms import platform_of
from dra_driver.inventory.discovery import discover_once
from dra_driver.inventory.host_facts import HostView
from dra_driver.kube.client import ApiClient
from dra_driver.kube.cluster import node_uid
from dra_driver.kube.endpoint import load_endpoint
from dra_driver.kube.resource_api import ResourceApi
from dra_driver.kube.slice_cache import SliceCache
from dra_driver.kube.slices import SliceClient
from dra_driver.model.inventory import Inventory
from dra_driver.model.sharing import NO_SHARING
from dra_driver.nvml.reader import NvmlReader
from dra_driver.settings import Settings
from dra_driver.slices.api_support import ApiSupport, Support
from dra_driver.slices.publisher import Publisher
from dra_driver.slices.rules.build import untainted
from dra_driver.slices.rules.diff import Owner

_log = structlog.get_logger(__name__)

DRIVER = "gpu.nvidia.com"
_PUBLISHED_S = 300.0


@dataclass(frozen=True, slots=True)
class Done:
    """What a process reports after each order: requests since the last one by method, and its memory."""

    requests: dict[str, int]
    resident_mib: float


def inventory_of(machine: str, *, dynamic_mig: bool) -> Inventory:
    """What the driver knows of a simulated machine. Raises: NvmlUnavailableError."""
    with tempfile.TemporaryDirectory(prefix="scale-") as scratch:
        settings = Settings("any", simulate=machine, simulator_dir=scratch, dynamic_mig=dynamic_mig)
        platform = platform_of(settings)
        reader = NvmlReader(platform.load_nvml, settings.on_demand)
        try:
            return discover_once(reader, HostView(platform.paths), None)
        finally:
            reader.session.close()


class _Failures:
    """Says what goes wrong; everything else that a publisher tells is of no interest."""

    def published(self, lag_s: float) -> None: ...

    def publish_failed(self, error: Exception) -> None:
        _log.warning("publish_failed", reason=str(error))

    def contested(self, reason: str) -> None: ...

    def device_left_out(self, fault: str) -> None: ...

    def fields_dropped(self, gates: str) -> None: ...


class NodePublisher:
    """What one daemon does with the API server while nothing happens on its node."""

    def __init__(self, kubeconfig: str, name: str, content: Inventory, requests: Counter[str]) -> None:
        def count(method: str, _status: int | None) -> None:
            requests[method] += 1

        self._client = ApiClient(load_endpoint(kubeconfig), observe=count, timeout_s=60.0)
        api = ResourceApi(self._client)
        self._cache = SliceCache(SliceClient(api, DRIVER, name), self._changed)
        self.publisher = Publisher(
            lambda: content,
            self._cache,
            lambda: Owner(DRIVER, name, node_uid(self._client, name)),
            NO_SHARING,
            may_publish=lambda: True,
            support=ApiSupport(lambda *_: Support(), _log.warning, caution=lambda _: None, warn=_log.warning),
            taints=lambda _: untainted,
            observer=_Failures(),
        )

    def watch(self) -> None:
        """List and watch, without publishing."""
        self._cache.start()

    def wait_watching(self) -> None:
        """Raises: TimeoutError."""
        if not self._cache.synced.wait(_PUBLISHED_S):
            raise TimeoutError("the slices were not listed in time")

    def publish(self) -> None:
        """Begin to publish."""
        self.publisher.start()

    def wait_published(self) -> None:
        """Raises: TimeoutError."""
        if not self.publisher.wait_published(_PUBLISHED_S):
            raise TimeoutError(f"not published in time: {self.publisher.problem}")

    def stop(self) -> None:
        """As a daemon that ends: the slices stay."""
        self.publisher.stop()
        self._cache.stop()
        self._client.close()

    def _changed(self) -> None:
        self.publisher.mark_dirty()


def run(orders: Connection, kubeconfig: str, names: list[str], content: Inventory) -> None:
    """Carries out orders (`watch`, `publish`, `rest SECONDS`, `stop`, `end`) for these nodes and answers with Done."""
    structlog.configure(processors=[_silent])
    requests: Counter[str] = Counter()
    nodes: list[NodePublisher] = []
    while (order := orders.recv()) != "end":
        match order.split():
            case ["watch"]:
                nodes = [NodePublisher(kubeconfig, name, content, requests) for name in names]
                for node in nodes:
                    node.watch()
                for node in nodes:
                    node.wait_watching()
            case ["publish"]:
                for node in nodes:
                    node.publish()
                for node in nodes:
                    node.wait_published()
            case ["rest", seconds]:
                time.sleep(float(seconds))
            case ["stop"]:
                for node in nodes:
                    node.stop()
        orders.send(Done(dict(requests), resident_mib(os.getpid())))
        requests.clear()
    with contextlib.suppress(OSError):
        orders.close()


def _silent(_logger: object, _name: str, _event: MutableMapping[str, object]) -> str:
    raise structlog.DropEvent
