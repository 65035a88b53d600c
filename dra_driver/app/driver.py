"""Wiring: every room is put together here, started in order and stopped in reverse."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from dra_driver.app.healthparts import HealthParts
from dra_driver.app.kubeletside import plugin_settings
from dra_driver.app.migparts import MigParts
from dra_driver.app.tellingturn import telling_turn
from dra_driver.core.mpsclient import uses_mps
from dra_driver.core.planning import device_of_cdi_name
from dra_driver.errors import FatalError
from dra_driver.host.driver_root import DriverRoot
from dra_driver.host.gpu_nodes import GpuNodes
from dra_driver.host.nvidia_smi import NvidiaSmi
from dra_driver.host.sysfs import Sysfs
from dra_driver.kubelet.registration import RegistrationStatus
from dra_driver.kubelet.server import KubeletPlugin
from dra_driver.model.health import HealthChange
from dra_driver.model.mig import GpuInstance
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import RunMps, SetTimeSlice, WriteCdiSpec, WriteDeviceMetadata
from dra_driver.mps.client import MpsClient
from dra_driver.mps.layout import MpsLayout, mps_layout
from dra_driver.platforms import NvmlReader, Platform, mps_host_command, platform_of, smi_and_library
from dra_driver.services.cdisteps import CdiSteps
from dra_driver.services.discovery import Discovery
from dra_driver.services.executor import Executor, StepRunner
from dra_driver.services.hostview import HostView
from dra_driver.services.metadatasteps import MetadataSteps
from dra_driver.services.mpschild import ChildMpsHost
from dra_driver.services.preparer import Identity, Preparer
from dra_driver.services.probes import Probes
from dra_driver.services.reporter import MigAction
from dra_driver.services.settingskeeper import SettingsKeeper
from dra_driver.services.sharingsteps import MpsHost, MpsSteps, TimeSliceSteps
from dra_driver.services.steps import ObservedSteps, StepDispatcher
from dra_driver.settings import Settings
from dra_driver.state.cdi_directory import CdiDirectory
from dra_driver.state.claimlocks import ClaimLocks
from dra_driver.state.locks import GpuLocks
from dra_driver.state.metadatafiles import MetadataFiles
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
        self._metadata_files = MetadataFiles(plugin_dir, settings.cdi_root, settings.driver_name)
        self._smi = NvidiaSmi(lambda: smi_and_library(paths.driver_root))
        self._boot_id = Sysfs(paths.sys, paths.proc).boot_id() or "unknown"
        self._settings_keeper = SettingsKeeper(self.records, self._gpu_locks, self._smi)
        self._may_tell = telling_turn(self._turn)
        nvml = self._nvml = NvmlReader(self._platform.load_nvml, settings.on_demand, self._not_ours)
        self.mig = MigParts(
            settings,
            paths,
            self._boot_id,
            self.records,
            self._gpu_locks,
            self._lost_devices,
            self._rescan,
            self._mig_observed,
            nvml.operation,
        )
        self.discovery = Discovery(
            nvml,
            HostView(paths),
            self._devices_changed,
            self._driver_changed,
            self.mig,
            self._hardware_changed,
        )
        self.health = HealthParts(
            settings,
            nvml.health_source(),
            lambda: self.discovery.inventory,
            self.mig.ledger.all,
            self._boot_id,
            self._health_changed,
            self._health_told,
            self._may_tell,
        )
        self._installation = DriverRoot(paths, nodes=self._platform.nodes, hook=settings.nvidia_cdi_hook_path)
        self._publisher: Any = None
        self._plugin: KubeletPlugin | None = None
        self._metrics: Any = None
        self._reporter: Any = None
        self._pods: Any = None
        self._news: Any = None
        self._claim_news: Any = None
        self._release: Any = None
        self.probes = Probes(
            lambda: self._plugin, self.discovery, lambda: self._publisher, [self.health.monitor.problem]
        )

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
        from dra_driver.services.metrics import Metrics

        settings = self.settings
        endpoint = load_endpoint(settings.kubeconfig)
        limiter = (
            TokenBucket(settings.kube_api_qps, settings.kube_api_burst) if settings.kube_api_qps else None
        )
        self._metrics = Metrics(settings.driver_name, settings.node_name, self._prepared_kinds)
        client = ApiClient(endpoint, limiter=limiter, observe=self._metrics.api_answered)
        self._stops.append(("api_client", client.close))
        api = ResourceApi(client)
        self.records.open(self._boot_id)
        self._gpu_locks.open()
        self._claim_locks.open()
        self._specs.create()
        self._metadata_files.create()
        self.mig.open()
        self._start_reporting(api)
        self._start_discovery()
        self._start_plugin(api)
        self._start_publisher(client, api)
        self._start_http()
        _log.info("driver_started", driver=settings.driver_name, node=settings.node_name, pid=os.getpid())

    def stop(self) -> None:
        """Stop the kubelet's side first, then the rest in reverse order; harmless twice.

        Calls in flight finish, sockets are removed, slices and records stay.
        """
        # Before the server, which waits for streams and calls to end.
        self.health.stream.stop()
        if self._release is not None:
            self._release.releases.stop()
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
        """End `wait`."""
        self._stopped.set()

    def wait(self) -> None:
        """Block until `end` or a fatal error. Raises: FatalError."""
        self._stopped.wait()
        if self._fatal is not None:
            raise self._fatal

    def problems(self) -> list[str]:
        """What is wrong, one sentence each: what fails readiness first, then notes."""
        return [*self.probes.readiness(), *self.probes.notes()]

    def _start_plugin(self, api: Any) -> None:
        from dra_driver.app.releaseparts import ReleaseParts
        from dra_driver.services.metrics import CountedCalls

        settings = self.settings
        steps = ObservedSteps(StepDispatcher(self._step_runners()), self._metrics)
        release = self._release = ReleaseParts(
            settings, api, self.records, self._claim_locks, self._specs, self._reporter, self._pods
        )
        preparer = Preparer(
            Identity(settings.driver_name, settings.node_name, settings.sharing, settings.metadata_versions),
            release.claims,
            self.discovery,
            self.records,
            self._orphans,
            self._claim_locks,
            self._gpu_locks,
            Executor(self.records, steps, self._boot_id),
            self._reporter,
            release.releases,
        )
        self._plugin = KubeletPlugin(
            plugin_settings(settings),
            CountedCalls(preparer, self._metrics),
            ready=self.probes.is_ready,
            on_status=self._registration_changed,
            on_fatal=self.fail,
            watch_device_health=self.health.stream.watch,
        )
        self._plugin.start()
        release.start(preparer, self._nvml, self.mig, self._boot_id, self._platform.paths.proc)
        self._stops.append(("reconciler", release.stop))

    def _start_reporting(self, api: Any) -> None:
        from dra_driver.app.reportingparts import ReportingParts
        from dra_driver.app.showing import show_node

        parts = ReportingParts(
            self.settings,
            api,
            self._metrics,
            lambda: self.discovery.inventory,
            self.records,
            self.health,
            self.mig,
            self._may_tell,
        )
        self._news, self._claim_news = parts.news, parts.claims
        self._reporter, self._pods = parts.reporter, parts.pods
        self._stops += parts.start()
        show_node(
            self._metrics,
            lambda: self.discovery.inventory,
            self.records,
            self.health,
            self.mig,
            parts,
            self.probes.readiness,
            self.probes.notes,
        )

    def _step_runners(self) -> dict[type, StepRunner]:
        from dra_driver.app.showing import show_mps

        layout = mps_layout(self.settings.plugin_directory)
        mps = self._mps_host(layout)
        show_mps(self._metrics, layout)
        return self.mig.runners() | {
            SetTimeSlice: TimeSliceSteps(self._smi, self.records),
            RunMps: MpsSteps(mps, self.records, self._lost_mps_users, self.mig.uuid_of),
            WriteDeviceMetadata: MetadataSteps(
                self._metadata_files, lambda: self.discovery.inventory, self.mig.realised
            ),
            WriteCdiSpec: CdiSteps(
                self.settings.driver_name,
                self._specs,
                self._installation,
                GpuNodes(self._platform.paths, nodes=self._platform.nodes),
                self._driver_version,
                layout.directories,
                self.mig,
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

    def _start_discovery(self) -> None:
        if self.mig.start():
            self._stops.append(("mig_keeper", self.mig.keeper.stop))
        self.discovery.start()
        self._stops.append(("discovery", self.discovery.stop))
        self.health.monitor.start()
        self._stops.append(("health", self.health.monitor.stop))

    def _start_publisher(self, client: Any, api: Any) -> None:
        from dra_driver.app.publishing import PublishingParts
        from dra_driver.app.showing import show_publishing

        parts = PublishingParts(
            self.settings,
            client,
            api,
            self._turn,
            lambda: self.discovery.inventory,
            self.health.taints,
            self._reporter.partitions_missing,
            self._reporter.scheduler_outdated,
            self._news,
        )
        self._publisher = parts.publisher
        show_publishing(self._metrics, parts)
        self._stops += parts.start()

    def _start_http(self) -> None:
        if self.settings.http_endpoint:
            from dra_driver.app.pages import http_endpoint

            endpoint = http_endpoint(self.settings, self._metrics.registry, self.probes)
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
        if self._news is not None:
            self._news.driver(self.discovery.unavailable())
            self._claim_news.devices_changed()
        self.health.devices_changed()
        self._health_changed()

    def _health_changed(self) -> None:
        if self._publisher is not None:
            self._publisher.mark_dirty()

    def _health_told(self, change: HealthChange) -> None:
        if self._claim_news is not None:
            self._claim_news.health_changed(change)

    def _rescan(self) -> None:
        self.discovery.request_rescan()

    def _driver_changed(self) -> None:
        self._settings_keeper.driver_changed()
        self.mig.reconcile(self.discovery.inventory)

    def _hardware_changed(self) -> None:
        self._settings_keeper.driver_changed()
        self.mig.look_soon()

    def _not_ours(self, gpu_uuid: str, existing: Sequence[GpuInstance]) -> Sequence[GpuInstance]:
        return self.mig.sort_out(gpu_uuid, existing)

    def _mig_observed(
        self, action: MigAction, device: str, duration_s: float, error: Exception | None
    ) -> None:
        self.health.instances_changed()
        if self._reporter is not None:
            self._reporter.mig_changed(action, device, duration_s, error)

    def _driver_version(self) -> str | None:
        inventory = self.discovery.inventory
        return inventory.versions.driver if inventory else None

    def _orphans(self, records: Mapping[str, ClaimRecord]) -> Sequence[tuple[str, Sequence[str]]]:
        """Claims whose record was lost but whose CDI spec is still there."""
        if not self.records.quarantined():
            return ()
        return [(uid, names) for uid, names in self._specs.list().items() if uid not in records]

    def _lost_devices(self) -> set[str]:
        """Devices of claims whose record was lost but whose CDI spec is still there."""
        lost = self._orphans(self.records.all())
        return {device_of_cdi_name(name) for _, names in lost for name in names}

    def _lost_mps_users(self) -> dict[str, list[str]]:
        """Devices with MPS of claims that have a CDI spec but no record."""
        records = self.records.all()
        users: dict[str, list[str]] = {}
        for uid, names in self._specs.list().items():
            if uid not in records and uses_mps(self._specs.read(uid)):
                users[uid] = [device_of_cdi_name(name) for name in names]
        return users

    def _prepared_kinds(self) -> Iterator[str]:
        for record in self.records.all().values():
            yield from (held.kind for held in record.devices)
