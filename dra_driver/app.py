"""Wiring: every room is put together here, started in order and stopped in reverse."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from dra_driver.core.mpsclient import uses_mps
from dra_driver.core.planning import device_of_cdi_name
from dra_driver.core.slicediff import Owner, slice_changes
from dra_driver.core.slices import build_pool
from dra_driver.errors import FatalError, NvmlUnavailableError
from dra_driver.host.driver_root import DriverRoot
from dra_driver.host.gpu_nodes import GpuNodes
from dra_driver.host.nvidia_smi import NvidiaSmi
from dra_driver.host.sysfs import Sysfs
from dra_driver.kubelet.registration import RegistrationStatus
from dra_driver.kubelet.server import KubeletPlugin, PluginSettings
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import RunMps, SetTimeSlice, WriteCdiSpec
from dra_driver.mps.client import MpsClient
from dra_driver.mps.layout import MpsLayout, mps_layout
from dra_driver.platforms import NvmlReader, Platform, mps_host_command, platform_of, smi_and_library
from dra_driver.services.cdisteps import CdiSteps
from dra_driver.services.discovery import Discovery
from dra_driver.services.executor import Executor, StepRunner
from dra_driver.services.hostview import HostView
from dra_driver.services.mpschild import ChildMpsHost
from dra_driver.services.preparer import Identity, Preparer
from dra_driver.services.settingskeeper import SettingsKeeper
from dra_driver.services.sharingsteps import MpsHost, MpsSteps, TimeSliceSteps
from dra_driver.services.steps import StepDispatcher
from dra_driver.settings import Settings
from dra_driver.state.cdi_directory import CdiDirectory
from dra_driver.state.claimlocks import ClaimLocks
from dra_driver.state.locks import GpuLocks
from dra_driver.state.records import RecordStore
from dra_driver.state.turns import PublishingTurn

_log = structlog.get_logger(__name__)

JsonObject = dict[str, Any]


class Driver:
    """The daemon. `start` returns once the kubelet can reach it; everything else comes up behind."""

    def __init__(self, settings: Settings, platform: Platform | None = None) -> None:
        self.settings = settings
        self._platform = platform or platform_of(settings)
        self._stopped = threading.Event()
        self._fatal: FatalError | None = None
        self._stops: list[tuple[str, Callable[[], object]]] = []
        paths = self._platform.paths
        plugin_dir = settings.plugin_directory
        self.records = RecordStore(plugin_dir / "claims")
        self._gpu_locks = GpuLocks(plugin_dir / "locks")
        self._claim_locks = ClaimLocks(plugin_dir / "locks")
        # Made here, because the moment of its making is this instance's place in the order of starts.
        self._turn = PublishingTurn(plugin_dir / "publishers", settings.pod_uid)
        self._specs = CdiDirectory(Path(settings.cdi_root), settings.driver_name)
        self._smi = NvidiaSmi(lambda: smi_and_library(paths.driver_root))
        keeper = SettingsKeeper(self.records, self._gpu_locks, self._smi)
        self.discovery = Discovery(
            NvmlReader(self._platform.load_nvml),
            HostView(paths),
            self._devices_changed,
            keeper.driver_changed,
        )
        self._installation = DriverRoot(paths, nodes=self._platform.nodes, hook=settings.nvidia_cdi_hook_path)
        self._publisher: Any = None
        self._plugin: KubeletPlugin | None = None
        self._metrics: Any = None

    def start(self) -> None:
        """Bring everything up. Raises: InvalidConfigError, StateError, FatalError; then nothing is left running."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        from dra_driver.kube.client import ApiClient
        from dra_driver.kube.endpoint import load_endpoint
        from dra_driver.kube.ratelimit import TokenBucket
        from dra_driver.kube.versions import ResourceApi

        settings = self.settings
        endpoint = load_endpoint(settings.kubeconfig)
        limiter = (
            TokenBucket(settings.kube_api_qps, settings.kube_api_burst) if settings.kube_api_qps else None
        )
        client = ApiClient(endpoint, limiter=limiter)
        self._stops.append(("api_client", client.close))
        api = ResourceApi(client)
        self.records.open()
        self._gpu_locks.open()
        self._claim_locks.open()
        self._specs.create()
        self._start_discovery()
        self._start_plugin(api)
        self._start_publisher(client, api)
        self._start_http()
        _log.info("driver_started", driver=settings.driver_name, node=settings.node_name)

    def stop(self) -> None:
        """Stop the kubelet's side first, then the rest in reverse order; harmless twice.

        Calls in flight finish, sockets are removed, slices and records stay.
        """
        if self._plugin is not None:
            self._plugin.stop()
        while self._stops:
            name, stop = self._stops.pop()
            try:
                stop()
            except Exception:  # noqa: BLE001  the other parts must be stopped all the same
                _log.exception("stop_failed", part=name)
        self._stopped.set()

    def fail(self, error: FatalError) -> None:
        """End `wait` with this error."""
        self._fatal = error
        self._stopped.set()

    def end(self) -> None:
        """End `wait`; may be called from a signal handler."""
        self._stopped.set()

    def wait(self) -> None:
        """Block until `end` or a fatal error. Raises: FatalError."""
        self._stopped.wait()
        if self._fatal is not None:
            raise self._fatal

    def problems(self) -> list[str]:
        """Why the driver is not ready, one sentence each; empty when it is."""
        found: list[str] = []
        status = self._plugin.status if self._plugin else None
        if status is None:
            found.append("the kubelet has not registered the plugin yet")
        elif not status.registered:
            found.append(f"the kubelet refused the plugin: {status.error}")
        problem = self.discovery.problem()
        if problem:
            found.append(problem)
        if self._publisher is not None and self._publisher.problem:
            found.append(f"slices: {self._publisher.problem}")
        return found

    def _start_plugin(self, api: Any) -> None:
        from dra_driver.services.claimreader import ClaimReader
        from dra_driver.services.metrics import CountedCalls, Metrics

        settings = self.settings
        self._metrics = Metrics(settings.driver_name, settings.node_name, self._prepared_kinds)
        steps = StepDispatcher(self._step_runners())
        boot_id = Sysfs(self._platform.paths.sys, self._platform.paths.proc).boot_id() or "unknown"
        preparer = Preparer(
            Identity(settings.driver_name, settings.node_name, settings.sharing),
            ClaimReader(api),
            self.discovery,
            self.records,
            self._orphans,
            self._claim_locks,
            self._gpu_locks,
            Executor(self.records, steps, boot_id),
            self._metrics,
        )
        self._plugin = KubeletPlugin(
            PluginSettings(
                driver=settings.driver_name,
                registry_dir=Path(settings.kubelet_registrar_directory_path),
                plugins_dir=Path(settings.kubelet_plugins_directory_path),
                pod_uid=settings.pod_uid,
                health_address=f"[::]:{settings.healthcheck_port}"
                if settings.healthcheck_port >= 0
                else None,
            ),
            CountedCalls(preparer, self._metrics),
            ready=self._is_serving,
            on_status=self._registration_changed,
            on_fatal=self.fail,
        )
        self._plugin.start()

    def _step_runners(self) -> dict[type, StepRunner]:
        layout = mps_layout(self.settings.plugin_directory)
        mps = self._mps_host(layout)
        return {
            SetTimeSlice: TimeSliceSteps(self._smi, self.records),
            RunMps: MpsSteps(mps, self.records, self._lost_mps_users),
            WriteCdiSpec: CdiSteps(
                self.settings.driver_name,
                self._specs,
                self._installation,
                GpuNodes(self._platform.paths, nodes=self._platform.nodes),
                self._driver_version,
                layout.directories,
            ),
        }

    def _mps_host(self, layout: MpsLayout) -> MpsHost:
        if self.settings.mps_host == "external":
            return MpsClient(layout)
        child = ChildMpsHost(layout, mps_host_command(self.settings))
        self._stops.append(("mps_host", child.close))
        if any(layout.root.glob("*.json")):
            # Daemons of an earlier run are there, and somebody has to watch over them.
            threading.Thread(target=child.start_quietly, name="mps-child", daemon=True).start()
        return child

    def _is_serving(self) -> bool:
        """The readiness that a rolling update waits for: calls are served. A node whose GPUs are in trouble must
        not hold the update of all others up; its trouble is told by `problems`."""
        status = self._plugin.status if self._plugin else None
        return status is not None and status.registered

    def _start_discovery(self) -> None:
        self.discovery.start()
        self._stops.append(("discovery", self.discovery.stop))

    def _start_publisher(self, client: Any, api: Any) -> None:
        from dra_driver.kube.dropped import dropped_fields
        from dra_driver.kube.nodes import node_uid
        from dra_driver.kube.slicecache import SliceCache
        from dra_driver.kube.slices import SliceClient
        from dra_driver.services.publisher import Publisher

        settings = self.settings

        def owner() -> Owner:
            return Owner(settings.driver_name, settings.node_name, node_uid(client, settings.node_name))

        cache = SliceCache(SliceClient(api, settings.driver_name, settings.node_name), self._devices_changed)
        self._stops.append(("publishing_turn", self._turn.withdraw))
        self._publisher = Publisher(
            lambda: self.discovery.inventory,
            cache,
            owner,
            dropped_fields,
            settings.sharing,
            may_publish=self._turn.is_ours,
            dry_run=cache.dry_run,
        )
        cache.start()
        self._stops.append(("slice_cache", cache.stop))
        self._publisher.start()
        self._stops.append(("publisher", self._publisher.stop))
        self._publisher.mark_dirty()

    def _start_http(self) -> None:
        if not self.settings.http_endpoint:
            return
        from prometheus_client.exposition import choose_encoder

        from dra_driver.services.http import HttpEndpoint, Response, problems_page

        def metrics() -> Response:
            encode, content_type = choose_encoder("")
            return Response(200, content_type, encode(self._metrics.registry))

        pages = {
            self.settings.metrics_path: metrics,
            "/healthz": problems_page(list),
            "/readyz": problems_page(self.problems),
        }
        endpoint = HttpEndpoint(self.settings.http_endpoint, pages)
        endpoint.start()
        self._stops.append(("http", endpoint.stop))

    def _registration_changed(self, status: RegistrationStatus) -> None:
        """From now on older instances stand by. An announcement that fails is tried again by the publisher."""
        if status.registered:
            try:
                self._turn.announce()
            finally:
                self._devices_changed()

    def _devices_changed(self) -> None:
        if self._publisher is not None:
            self._publisher.mark_dirty()

    def _driver_version(self) -> str | None:
        inventory = self.discovery.inventory
        return inventory.versions.driver if inventory else None

    def _orphans(self, records: Mapping[str, ClaimRecord]) -> Sequence[tuple[str, Sequence[str]]]:
        """Claims whose record was lost but whose CDI spec is still there."""
        if not self.records.quarantined():
            return ()
        return [(uid, names) for uid, names in self._specs.list().items() if uid not in records]

    def _lost_mps_users(self) -> dict[str, list[str]]:
        """Devices with MPS of claims that have a CDI spec but no record."""
        records = self.records.all()
        users: dict[str, list[str]] = {}
        for uid, names in self._specs.list().items():
            if uid not in records and uses_mps(self._specs.read(uid)):
                users[uid] = [device_of_cdi_name(name) for name in names]
        return users

    def _prepared_kinds(self) -> Iterator[str]:
        with suppress(OSError):
            for record in self.records.all().values():
                yield from (held.kind for held in record.devices)


def slices_to_publish(settings: Settings) -> tuple[list[JsonObject], list[str]]:
    """The very slices that `run` would publish on this machine, and what discovery could not read.

    Raises: NvmlUnavailableError.
    """
    platform = platform_of(settings)
    discovery = Discovery(NvmlReader(platform.load_nvml), HostView(platform.paths), lambda: None)
    discovery.scan_now(0)
    inventory = discovery.inventory
    problem = discovery.state.problem
    discovery.stop()
    if inventory is None or problem is not None:
        raise NvmlUnavailableError(problem or "devices were not discovered")
    pool = build_pool(inventory, settings.node_name, settings.sharing)
    changes = slice_changes(pool, (), Owner(settings.driver_name, settings.node_name, ""))
    slices = [
        {**entry, "metadata": {"generateName": entry["metadata"]["generateName"]}}
        for entry in changes.creates
    ]
    notes = [f"{fault.subject}: {fault.text}" for fault in inventory.faults] + list(pool.faults)
    return slices, notes
