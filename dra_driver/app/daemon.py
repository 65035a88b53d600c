"""The daemon: what exists, in which order it starts and stops, and who hears of which change. It decides nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from dra_driver.app.change_table import Change, Changes
from dra_driver.app.platforms import Platform, platform_of
from dra_driver.app.publishing import Publishing
from dra_driver.app.settings import Settings
from dra_driver.app.wiring.mig import MigParts
from dra_driver.app.wiring.passthrough import PassthroughParts
from dra_driver.base.atomic import stamp_or_none, write_atomically
from dra_driver.base.backoff import TokenBucket
from dra_driver.base.file_lock import UseMark
from dra_driver.cdi.directory import CdiDirectory, temporary_files
from dra_driver.cdi.extra_devices import ExtraDeviceFinder
from dra_driver.cdi.metadata_files import MetadataFiles, MetadataSteps
from dra_driver.cdi.spec_step import CdiSteps
from dra_driver.claims.gpu_processes import GpuProcesses
from dra_driver.claims.lifecycle import ClaimLifecycle
from dra_driver.claims.planner import Identity
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.errors import FatalError, StateError
from dra_driver.health.gpu_health import GpuHealth
from dra_driver.health.rules.taints import TaintPolicy
from dra_driver.health.rules.xids import XidPolicy
from dra_driver.host.device_nodes import DevCharLinks
from dra_driver.host.driver_programs import InstalledPrograms, NvidiaSmi
from dra_driver.host.driver_root import DriverRoot
from dra_driver.host.gpu_nodes import GpuNodes
from dra_driver.host.imex import ImexChannelNodes
from dra_driver.host.processes import any_runs, is_of_the_host, origin, sees_all_processes
from dra_driver.host.sysfs import Sysfs
from dra_driver.inventory.detachment import LOCK_FILE, Detachments
from dra_driver.inventory.discovery import Discovery
from dra_driver.inventory.rules.gpu_names import held_gpu_names, refuse_other_names
from dra_driver.journal.cleaner import Cleaner
from dra_driver.journal.executor import Executor, StepDispatcher
from dra_driver.journal.lanes import Lanes
from dra_driver.journal.ledger import DIRECTORY as LEDGER
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.locks import ClaimLocks, GpuLocks
from dra_driver.journal.records import RecordStore
from dra_driver.kube.claims import ClaimClient
from dra_driver.kube.client import ApiClient, ResourceApi
from dra_driver.kube.cluster import node_uid
from dra_driver.kube.endpoint import Endpoint
from dra_driver.kubelet.plugin import KubeletPlugin, PluginSettings
from dra_driver.kubelet.registration import RegistrationStatus
from dra_driver.model.driver_files import IMEX_PROGRAM, SMI_PROGRAM
from dra_driver.model.health import LOST
from dra_driver.model.mig import GpuInstance, OwnedInstance
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import RunMps, SetTimeSlice, WriteCdiSpec, WriteDeviceMetadata
from dra_driver.mps_host.host_files import MpsHostFiles, mps_layout
from dra_driver.nvml.reader import NvmlReader
from dra_driver.reporting.http import HttpEndpoint, Probes, json_page, metrics_page, problems_page
from dra_driver.reporting.metrics import Metrics
from dra_driver.reporting.node_problems import DiskWatch, NodeProblems
from dra_driver.reporting.reporter import Reports
from dra_driver.reporting.usage import UnclaimedMemory, Usage
from dra_driver.sharing.steps import MpsSteps, TimeSliceSteps
from dra_driver.slices.leadership import DIRECTORY as DIRECTORY_OF_INSTANCES
from dra_driver.slices.leadership import InstanceLeadership, living_instances

_log = structlog.get_logger(__name__)

_REGISTRATION_S = 0.3
"""The kubelet has registered the plugin by then, if it runs."""


class Part(NamedTuple):
    """A part of the daemon that runs. The daemon starts its parts in the order of its list, and stops them in the
    reverse order. A function is None if there is nothing to do."""

    name: str
    start: Callable[[], object] | None = None
    stop: Callable[[], object] | None = None


class Driver:
    """The daemon. `start` returns when the kubelet can reach it; everything else starts in the background."""

    def __init__(self, settings: Settings, platform: Platform | None = None) -> None:
        """Make every part; none runs yet. Raises: InvalidConfigError; StateError if the boot has no ID."""
        self.settings = settings
        platform = platform or platform_of(settings)
        paths, plugin_dir = platform.paths, settings.plugin_directory
        self.boot_id = Sysfs(paths.sys, paths.proc).this_boot()
        self._stopped = threading.Event()
        self._registered = threading.Event()
        self._fatal: FatalError | None = None
        self._running: list[Part] = []
        changes = self.changes = Changes()

        # What is on disk, for the next instance as well.
        self.records = RecordStore(plugin_dir / "claims")
        self.planning = GpuLocks(plugin_dir / "locks", ".plan.lock")
        self.lanes = Lanes(GpuLocks(plugin_dir / "locks"))
        self.claim_locks = ClaimLocks(plugin_dir / "locks")
        self._specs = CdiDirectory(Path(settings.cdi_root), settings.driver_name)
        self._metadata_files = MetadataFiles(plugin_dir, settings.cdi_root, settings.driver_name)
        without_record = SpecsWithoutRecord(self.records, self._specs)
        self.ledger = Ledger(plugin_dir / LEDGER, self.records, self.boot_id, without_record.uids)
        mps_files = MpsHostFiles(
            layout := mps_layout(plugin_dir),
            is_expected=settings.needs_mps,
            sees_daemons=lambda: sees_all_processes("/proc"),
        )
        # The time at which it is made decides which instance is the newest.
        leadership = self.leadership = InstanceLeadership(
            plugin_dir / DIRECTORY_OF_INSTANCES, settings.pod_uid
        )

        # The API server.
        self.metrics = Metrics(settings.driver_name, settings.node_name, self._prepared_kinds)
        limiter = (
            TokenBucket(settings.kube_api_qps, settings.kube_api_burst) if settings.kube_api_qps else None
        )
        self.client = ApiClient(
            Endpoint(settings.kubeconfig), limiter=limiter, observe=self.metrics.api_answered
        )
        api = ResourceApi(self.client)

        # The node's GPUs.
        dev_char = DevCharLinks(paths, platform.nodes) if settings.dev_char_links else None
        files = DriverRoot(paths, nodes=platform.nodes, hook=settings.nvidia_cdi_hook_path)
        host = Sysfs(paths.sys, paths.proc)
        programs = InstalledPrograms(paths.driver_root, plugin_dir / "host.lib")
        detachments = Detachments(plugin_dir, self.boot_id)
        smi = NvidiaSmi(programs, detachments.using_nvml)
        extra_devices = ExtraDeviceFinder(
            paths,
            InstalledPrograms(paths.driver_root, plugin_dir / "imex.lib", names=(IMEX_PROGRAM,)),
            nodes=platform.nodes,
        )
        load = detachments.guarded(platform.load_nvml)
        kept_names = self._held_gpu_names if settings.device_names == "minor" else None
        nvml = NvmlReader(
            load, settings.on_demand, self._foreign_instances, UseMark(plugin_dir / LOCK_FILE), kept_names
        )
        self.mig = MigParts(self, paths, without_record.lost_devices, nvml.session, detachments)
        self.passthrough = PassthroughParts(self, platform, nvml, detachments)
        self.discovery = Discovery(
            nvml,
            host,
            partial(changes.tell, Change.INVENTORY),
            partial(changes.tell, Change.DRIVER_RELOADED),
            self.mig.ownership,
            partial(changes.tell, Change.HARDWARE),
            detachments,
            self.passthrough.cards,
            files,
            None if settings.imex_channel is None else ImexChannelNodes(paths.proc),
        )
        self.health = GpuHealth(
            nvml.health_source(),
            node_name=settings.node_name,
            plugin_directory=plugin_dir,
            boot_id=self.boot_id,
            xids=XidPolicy(settings.ignored_xids, settings.fatal_xids),
            taint_policy=TaintPolicy(dict(settings.taint_effects)),
            discovery=self.discovery,
            host=host,
            lanes=self.lanes,
            under_vfio=self.passthrough.taken,
            made=lambda: self.ledger.details(OwnedInstance),
            speaks_for_node=leadership.speaks_for_node,
            on_shown=partial(changes.tell, Change.HEALTH_SHOWN),
            on_transition=partial(changes.tell, Change.HEALTH),
            on_polled=partial(changes.tell, Change.POLLED),
        )

        # What users are told.
        self.reporting = Reports(
            settings.driver_name,
            settings.node_name,
            api=api,
            metrics=self.metrics,
            records=self.records,
            known_records=self.known_records,
            lanes=self.lanes,
            inventory=self.discovery.latest,
            created_instance=self.mig.created_instance,
            monitor=self.health.monitor,
            mps_files=mps_files,
            speaks_for_node=leadership.speaks_for_node,
            on_release=partial(changes.tell, Change.CLAIM_RELEASED),
        )

        # Claims, and what they leave to be undone.
        time_slices = TimeSliceSteps(smi, self.records)
        steps = StepDispatcher(
            self.mig.runners()
            | self.passthrough.runners()
            | {
                SetTimeSlice: time_slices,
                RunMps: MpsSteps(mps_files, self.mig.uuid_of),
                WriteDeviceMetadata: MetadataSteps(self._metadata_files, self.discovery, self.ledger),
                WriteCdiSpec: CdiSteps(
                    settings.driver_name,
                    self._specs,
                    files,
                    GpuNodes(paths, nodes=platform.nodes),
                    self.discovery.driver_version,
                    layout,
                    self.ledger,
                    extra_devices,
                    self.passthrough.host,
                    dev_char,
                ),
            },
            self.metrics,
        )

        self.cleaner = Cleaner(
            self.ledger,
            self.lanes,
            steps,
            self.reporting.node,
            partial(changes.tell, Change.CLEANUPS),
            leadership.is_ours,
            partial(_tools_seen, programs, layout.lock, paths.proc, detachments),
            (time_slices, self.mig.mode),
            temporary_files(plugin_dir, Path(settings.cdi_root), settings.driver_name),
        )
        self.claims = ClaimLifecycle(
            Identity(
                settings.driver_name,
                settings.node_name,
                settings.sharing,
                settings.metadata_versions,
                settings.extra_devices,
            ),
            discovery=self.discovery,
            records=self.records,
            locks=self.claim_locks,
            planning=self.planning,
            without_record=without_record,
            executor=Executor(self.records, self.cleaner, steps, self.lanes, self.boot_id),
            cleaner=self.cleaner,
            lookup=ClaimClient(api, self.reporting.claim_pods.note),
            users=GpuProcesses(
                nvml.processes,
                self.mig.uuid_of,
                self.records.all,
                self.boot_id,
                is_of_the_host=partial(is_of_the_host, paths.proc),
                driver_is_gone=lambda: not host.loaded_driver(),
            ),
            extra_devices=extra_devices,
            observer=self.reporting.reporter,
            pods_run=lambda record: any_runs("/proc", self.reporting.claim_pods.known_pods(record)),
            find_node=partial(node_uid, self.client, settings.node_name),
            setting_for_lost=lambda: self.publishing.missing_setting(LOST),
            refuse_changing=self.mig.refuse_changing(),
        )

        # The cluster and the kubelet.
        self.publishing = Publishing(
            settings,
            api=api,
            discovery=self.discovery,
            records=self.records,
            health=self.health,
            cleaner=self.cleaner,
            layouts=self.mig.layouts,
            reports=self.reporting,
            leadership=leadership,
        )
        self.node_problems = NodeProblems(
            (
                lambda: self._plugin.problems(),  # noqa: PLW0108  made later
                self.publishing.publisher.problems,
                self.discovery.problems,
                self.health.problems,
                self.passthrough.problems,
                DiskWatch([plugin_dir, Path(settings.cdi_root)], write_atomically).problems,
                mps_files.problems,
            ),
            self.reporting.failing,
            self.reporting.recorder,
            leadership.speaks_for_node,
            plugin_dir,
        )
        self.probes = Probes(
            lambda: self._plugin,
            self.discovery,
            lambda: self.publishing.publisher,
            self.node_problems.notes,
        )
        self._plugin: KubeletPlugin = KubeletPlugin(
            PluginSettings(
                settings.driver_name,
                Path(settings.kubelet_registrar_directory_path),
                Path(settings.kubelet_plugins_directory_path),
                settings.pod_uid,
                f"[::]:{settings.healthcheck_port}" if settings.healthcheck_port >= 0 else None,
            ),
            self.claims.service,
            ready=self.probes.is_ready,
            on_status=self._registration_changed,
            on_fatal=self.fail,
            watch_device_health=self.health.stream.watch,
            living=lambda: living_instances(plugin_dir / DIRECTORY_OF_INSTANCES),
        )
        self._show_node(mps_files)
        self._unclaimed_memory = self._usage_watch(nvml, paths.proc) if settings.usage_metrics else None

        changes.connect(
            {
                Change.REGISTERED: (leadership.announce, partial(changes.tell, Change.INVENTORY)),
                Change.INVENTORY: (
                    *(() if dev_char is None else (dev_char.make,)),
                    self.reporting.claims.wake,
                    self.health.devices_changed,
                    self.publishing.publisher.mark_dirty,
                ),
                Change.DRIVER_RELOADED: (
                    time_slices.driver_reloaded,
                    self.cleaner.look_soon,
                    self.mig.look_soon,
                ),
                Change.HARDWARE: (
                    time_slices.driver_reloaded,
                    self.cleaner.look_soon,
                    self.mig.look_soon,
                ),
                Change.HEALTH_SHOWN: (self.publishing.publisher.mark_dirty,),
                Change.HEALTH: (self.reporting.claims.health_changed,),
                Change.POLLED: (self.discovery.health_polled,),
                Change.MIG_DEVICE: (self.health.mig_changed, self.reporting.reporter.mig_changed),
                Change.MIG_LAYOUT: (
                    lambda _found: self.publishing.publisher.mark_dirty(),
                    self.reporting.node.mig_layouts_changed,
                ),
                Change.CLAIM_RELEASED: (self.mig.look_soon, self.publishing.claim_released),
                Change.CLEANUPS: (
                    self.discovery.request_rescan,
                    self.publishing.publisher.mark_dirty,
                    self.cleaner.look_soon,
                    self.mig.look_soon,
                ),
            }
        )

    def _show_node(self, mps: MpsHostFiles) -> None:
        """Tell the metrics where their values come from."""
        show, inventory, monitor = self.metrics.show, self.discovery.latest, self.health.monitor
        publishing = self.publishing
        show.claims(
            lambda: self.records.all().values(), self.mig.uuid_of, self.reporting.claim_pods.of, inventory
        )
        show.devices(inventory, monitor, self.health.instances)
        show.inventory(inventory)
        show.health(inventory, monitor)
        show.mig_layouts(self.mig.layouts)
        show.cleanups(self.cleaner.outstanding)
        show.reports(self.reporting.recorder.counts)
        show.value("readiness", "ready", lambda: not self.probes.readiness())
        show.value("problem", "node_problem", lambda: bool(self.problems()))
        show.problems(self.node_problems.codes)
        show.value("failing", "claims_failing", lambda: len(self.reporting.failing.all()))
        show.mps(lambda: [status.state for status in mps.statuses()])
        show.publishing(
            lambda: publishing.publisher.problem, publishing.slice_count, publishing.withdrawn_count
        )
        show.value("partitions", "partitions_unsupported", lambda: publishing.support.problem is not None)

    def _usage_watch(self, nvml: NvmlReader, proc: str) -> UnclaimedMemory:
        """What looks for memory that no claim has; scrapes measure the same."""
        usage = Usage(
            # The processes of a simulated machine are in no namespace.
            nvml.usage_source(lambda: self.settings.simulate is not None or sees_all_processes("/proc")),
            self.discovery.latest,
            self.records.all,
            self.mig.created_instance,
            partial(origin, proc),
        )
        self.metrics.show.usage(usage.look)
        return UnclaimedMemory(usage.unclaimed, self.reporting.node.memory_unclaimed)

    def _parts(self) -> Iterator[Part]:
        """Everything that runs, in the order of starts."""
        yield Part("api_client", stop=self.client.close)
        yield Part("state", self._open_state)
        yield Part("event_recorder", self.reporting.recorder.start, self.reporting.recorder.stop)
        yield Part("claim_health", self.reporting.claims.start, self.reporting.claims.stop)
        yield Part("mps_events", self.reporting.mps.start, self.reporting.mps.stop)
        yield Part("failing_claims", self.reporting.failing.start, self.reporting.failing.stop)
        yield Part("discovery", self.discovery.start, self.discovery.stop)
        yield Part("mig_layouts", self.mig.start, self.mig.stop)
        yield Part("health", self.health.monitor.start, self.health.monitor.stop)
        yield Part("kubelet_plugin", self._plugin.start)
        yield Part("api_configuration", self._open_client)
        yield Part("cleanup", self.cleaner.start, self.cleaner.stop)
        yield Part("reconciler", self.claims.reconciler.start, self.claims.reconciler.stop)
        yield Part("leadership", stop=self.leadership.withdraw)
        yield Part("slice_cache", self.publishing.cache.start, self.publishing.cache.stop)
        yield Part("publisher", self.publishing.publisher.start, self.publishing.publisher.stop)
        yield Part("node_problems", self.node_problems.start, self.node_problems.stop)
        if self._unclaimed_memory is not None:
            yield Part("unclaimed_memory", self._unclaimed_memory.start, self._unclaimed_memory.stop)
        if self.settings.http_endpoint:
            http = HttpEndpoint(
                self.settings.http_endpoint,
                {
                    self.settings.metrics_path: metrics_page(self.metrics.registry),
                    "/healthz": problems_page(self.probes.liveness),
                    "/startupz": problems_page(self.probes.startup),
                    "/readyz": problems_page(self.probes.readiness, self.probes.notes),
                    "/problems": json_page(self.node_problems.as_json),
                },
            )
            yield Part("http", http.start, http.stop)

    def _open_client(self) -> None:
        """The import of the client would slow down the calls of the kubelet, so they come first."""
        self._registered.wait(_REGISTRATION_S)
        self.client.open()

    def _open_state(self) -> None:
        self.records.open(self.boot_id)
        self.ledger.open()
        refuse_other_names(self.settings.device_names, self.known_records())
        self.planning.open()
        self.claim_locks.open()
        self._specs.create()
        self._metadata_files.create()
        self.passthrough.open()

    def start(self) -> None:
        """Start every part. Raises: InvalidConfigError, StateError, FatalError; every part is stopped then."""
        try:
            for part in self._parts():
                self._running.append(part)
                if part.start is not None:
                    part.start()
        except BaseException:
            self.stop()
            raise
        _log.info(
            "driver_started", driver=self.settings.driver_name, node=self.settings.node_name, pid=os.getpid()
        )

    def stop(self) -> None:
        """Stop the kubelet's side first, then the rest in reverse order; harmless twice.

        Calls in flight finish, sockets are removed, slices and records stay.
        """
        # Before the server, which waits for streams and calls to end.
        self.health.stream.stop()
        self.claims.waiter.stop()
        self._plugin.stop()
        while self._running:
            part = self._running.pop()
            try:
                if part.stop is not None:
                    part.stop()
            except Exception:  # noqa: BLE001  the other parts must be stopped too
                _log.exception("stop_failed", part=part.name)
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
        """What is wrong, one sentence each: first the faults that fail readiness, then the notes."""
        return [*self.probes.readiness(), *self.probes.notes()]

    def known_records(self) -> list[ClaimRecord]:
        """Of claims, and of ended claims whose cleanup is pending."""
        return [*self.records.all().values(), *self.ledger.ended()]

    def _held_gpu_names(self) -> Mapping[str, str]:
        return held_gpu_names(self.known_records())

    def _foreign_instances(self, gpu_uuid: str, existing: Sequence[GpuInstance]) -> Sequence[GpuInstance]:
        return self.mig.ownership.foreign_instances(gpu_uuid, existing)

    def _registration_changed(self, status: RegistrationStatus) -> None:
        """If this announcement fails, the publisher tries again."""
        if status.registered:
            self._registered.set()
            self.changes.tell(Change.REGISTERED)

    def _prepared_kinds(self) -> Iterator[str]:
        for record in self.records.all().values():
            if record.phase == "prepared":
                yield from (held.kind for held in record.devices)


def _tools_seen(programs: InstalledPrograms, mps_lock: Path, proc: str, detachments: Detachments) -> Hashable:
    """Differs when nvidia-smi, the MPS host or the NVIDIA driver comes, goes or is replaced, and when NVML may be
    opened again."""
    try:
        smi = programs().paths.get(SMI_PROGRAM)
    except StateError:
        smi = None
    stamp = None if smi is None else stamp_or_none(smi)
    return stamp, stamp_or_none(mps_lock), Sysfs(proc=proc).loaded_driver(), detachments.now() is None
