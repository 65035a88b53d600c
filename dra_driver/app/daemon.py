"""The daemon: its parts, the order in which they start and stop, and who is notified of which change."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from dra_driver.app.handover import WorkerLock
from dra_driver.app.platforms import Platform, platform_of
from dra_driver.app.publishing import Publishing
from dra_driver.app.settings import ADVICE_PATH, PROBE_PATHS, Settings
from dra_driver.app.steps import gpu_steps
from dra_driver.base.atomic import stamp_or_none
from dra_driver.base.backoff import TokenBucket
from dra_driver.base.file_lock import UseMark
from dra_driver.base.threads import BackgroundWorker
from dra_driver.cdi.directory import CdiDirectory, temporary_files
from dra_driver.cdi.metadata_files import MetadataFiles, MetadataSteps
from dra_driver.cdi.spec_step import CdiSteps, ExtraDeviceFinder
from dra_driver.claims.gpu_processes import GpuProcesses
from dra_driver.claims.lifecycle import ClaimLifecycle
from dra_driver.claims.rules.plan import Identity
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.errors import FatalError, StateError
from dra_driver.health.gpu_health import GpuHealth
from dra_driver.health.rules.taints import TaintPolicy
from dra_driver.health.rules.xids import XidPolicy
from dra_driver.host.device_nodes import DevCharLinks
from dra_driver.host.driver_programs import InstalledPrograms
from dra_driver.host.driver_root import DriverRoot
from dra_driver.host.gpu_nodes import GpuNodes
from dra_driver.host.imex import ImexChannelNodes
from dra_driver.host.processes import any_runs, is_of_the_host, origin, sees_all_processes
from dra_driver.host.sysfs import Sysfs
from dra_driver.host.vfio import VfioCards
from dra_driver.inventory.detachment import LOCK_FILE, Detachments
from dra_driver.inventory.discovery import Discovery
from dra_driver.inventory.maintenance_step import MaintenanceSteps
from dra_driver.inventory.rules.gpu_names import held_gpu_names, refuse_other_names
from dra_driver.journal.cleaner import RETRY_FILE, Cleaner
from dra_driver.journal.executor import Executor, StepDispatcher
from dra_driver.journal.lanes import Lanes
from dra_driver.journal.ledger import DIRECTORY as LEDGER
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.locks import GpuLocks
from dra_driver.journal.records import RecordStore
from dra_driver.kube.claims import ClaimClient
from dra_driver.kube.client import ApiClient
from dra_driver.kube.cluster import node_uid
from dra_driver.kube.endpoint import Endpoint
from dra_driver.kube.watch import NodeLabels
from dra_driver.kubelet.pb.dra_health_v1_pb2 import NodeWatchResourcesResponse
from dra_driver.kubelet.plugin import KubeletPlugin, PluginSettings
from dra_driver.kubelet.registration import RegistrationStatus
from dra_driver.mig.layout_file import LAYOUT_FILE, LayoutFile
from dra_driver.mig.layouts import NodeLayouts
from dra_driver.mig.mode import MigAction
from dra_driver.mig.offer import MigOwnership
from dra_driver.model.dataclass import replace
from dra_driver.model.driver_files import IMEX_PROGRAM, SMI_PROGRAM
from dra_driver.model.health import LOST, HealthChange, PolledHealth
from dra_driver.model.maintenance import Maintenance, overdue_problems
from dra_driver.model.mig import GpuLayout
from dra_driver.model.steps import StartMaintenance, WriteCdiSpec, WriteDeviceMetadata
from dra_driver.mps_host.host_files import MpsHostFiles, mps_layout
from dra_driver.nvml.reader import NvmlReader
from dra_driver.passthrough.cards import KnownCards, Passthrough
from dra_driver.reporting.http import (
    HttpEndpoint,
    Idle,
    Probes,
    json_page,
    metrics_page,
    problems_page,
    while_working,
)
from dra_driver.reporting.metrics import Metrics
from dra_driver.reporting.node_problems import DiskWatch, NodeProblems, ProblemSource
from dra_driver.reporting.receipts import Receipts, receipt_store
from dra_driver.reporting.reporter import Reports
from dra_driver.reporting.usage import UnclaimedMemory, Usage

_log = structlog.get_logger(__name__)

_REGISTRATION_S = 0.3
"""A running kubelet registers the plugin faster."""
_WORKER_LOOKS_S, _TURN_S = 0.4, 0.1
"""How often the worker, and the other processes, check whose turn it is. Each check wakes the process."""
_LOCK_FAILED_S = 10.0
_CALLS_S = 8.0
"""Limit for calls in progress when another process asks for the work. Waiting ones end after five seconds."""
_STEPS_S = 3.0
"""Limit for steps on GPUs after the calls have ended. One that hangs goes on alone."""
_HAND_OVER_S = 30.0
"""Limit for a whole hand-over."""
_TAKES_BACK_S = 60.0
"""How long another process works before one that never was ready takes the node back."""
_LATE_S = 45.0
_SCAN_S = 2.0
_RESCAN_S = 10.0
_PLUGIN, _HTTP = "kubelet_plugin", "http"


class Part(NamedTuple):
    """`stands_by`: the part changes nothing on the node, and may run while another process works there."""

    name: str
    start: Callable[[], object] = lambda: None
    stop: Callable[[], object] = lambda: None
    stands_by: bool = False


class Driver:
    """When `start` returns, the kubelet can reach the daemon, unless it stands by; the first scan may still be
    running.
    """

    def __init__(
        self, settings: Settings, platform: Platform | None = None, *, was_ready: bool = False
    ) -> None:
        """Create all parts without starting them. `was_ready`: this process has been ready before.

        Raises: InvalidConfigError; StateError without a boot ID.
        """
        self.settings = settings
        self._platform = platform or platform_of(settings)
        self._paths, self._plugin_dir = self._platform.paths, settings.plugin_directory
        self._host = Sysfs(self._paths.sys, self._paths.proc)
        self.boot_id = self._host.this_boot()
        self._stopped = threading.Event()
        self._registered = threading.Event()
        self._fatal: Exception | None = None
        self._running: list[Part] = []
        self._works = self._stood_by = self.starts_again = False
        self._handed_over_at: float | None = None
        self._asked_at: float | None = None
        self._turns = BackgroundWorker("handover", self._turn, lambda _: _TURN_S)
        self._make_state()
        self._make_api_client()
        self._make_gpus()
        self._make_health()
        self._make_reports()
        self._make_steps()
        self._make_claims()
        self._make_publishing()
        self._watch_usage()
        self._make_kubelet_plugin(was_ready=was_ready)
        self._register_metrics()
        self._parts = tuple(self._all_parts())

    def _make_state(self) -> None:
        settings, directory = self.settings, self._plugin_dir
        self.records = RecordStore(directory / "claims", self.boot_id)
        self.lanes = Lanes(GpuLocks(directory / "locks"))
        self._specs = CdiDirectory(Path(settings.cdi_root), settings.driver_name)
        self._metadata_files = MetadataFiles(directory, settings.cdi_root, settings.driver_name)
        self._without_record = SpecsWithoutRecord(self.records, self._specs)
        self.ledger = Ledger(directory / LEDGER, self.records, self.boot_id, self._without_record.uids)
        self._mps_layout = mps_layout(directory)
        self._mps_files = MpsHostFiles(
            self._mps_layout,
            is_expected=settings.needs_mps,
            sees_daemons=lambda: sees_all_processes("/proc"),
        )
        self._worker = WorkerLock(directory)

    def _make_api_client(self) -> None:
        settings = self.settings
        self.metrics = Metrics(settings.driver_name, settings.node_name, self.records.prepared_kinds)
        limiter = (
            TokenBucket(settings.kube_api_qps, settings.kube_api_burst) if settings.kube_api_qps else None
        )
        self.client = ApiClient(
            Endpoint(settings.kubeconfig), limiter=limiter, observe=self.metrics.api_answered
        )

    def _make_gpus(self) -> None:
        """Create MIG and passthrough even if they are off, because steps of earlier claims may have to be undone."""
        settings, paths, nodes, ledger = self.settings, self._paths, self._platform.nodes, self.ledger
        directory, lanes = self._plugin_dir, self.lanes
        self._labels = NodeLabels(self.client, settings.node_name, self._labels_changed)
        self.detachments = detachments = Detachments(directory, self.boot_id, is_worker=self._is_working)
        ownership = MigOwnership(ledger)
        by_minor = settings.device_names == "minor"
        self.nvml = NvmlReader(
            detachments.guarded(self._platform.load_nvml),
            settings.on_demand,
            ownership.foreign_instances,
            UseMark(directory / LOCK_FILE),
            (lambda: held_gpu_names(ledger.known_records())) if by_minor else None,
        )
        self._vfio_cards = VfioCards(paths, nodes, self._platform.pci)
        self.passthrough = Passthrough(KnownCards(self._vfio_cards, ledger, settings.for_virtual_machines))
        self._driver_root = DriverRoot(paths, nodes=nodes, hook=settings.nvidia_cdi_hook_path)
        self.discovery = Discovery(
            self.nvml,
            self._host,
            self._inventory_changed,
            self._hardware_changed,
            ownership,
            self._hardware_changed,
            detachments,
            self.passthrough.cards,
            self._driver_root,
            None if settings.imex_channel is None else ImexChannelNodes(paths.proc),
        )
        self._programs = InstalledPrograms(paths.driver_root, directory / "host.lib")
        self._gpu_steps = steps = gpu_steps(
            ledger,
            lanes,
            self.nvml,
            detachments,
            self._vfio_cards,
            paths.proc,
            self._programs,
            self._mps_files,
            self._without_record.lost_devices,
            self._rescan,
            self._mig_changed,
            settings.power.default_w,
            self._gpu_uuids,
        )
        self.layouts = NodeLayouts(
            steps.mig,
            steps.mig_devices,
            steps.mig_mode,
            lanes,
            LayoutFile(directory / LAYOUT_FILE),
            settings.mig_layouts,
            labels=self._labels.now,
            inventory=self.discovery.latest,
            is_on_demand=settings.on_demand or (lambda _gpu: False),
            rescan=partial(self.discovery.scan_now, _RESCAN_S),
            on_change=self._layouts_changed,
        )

    def _gpu_uuids(self) -> list[str]:
        inventory = self.discovery.inventory
        return [] if inventory is None else [gpu.uuid for gpu in inventory.every_gpu]

    def _rescan(self, wait_s: float | None) -> None:
        """Start a scan, and wait up to `wait_s` seconds for its end; None does not wait."""
        if wait_s is None:
            self.discovery.request_rescan()
        else:
            self.discovery.scan_now(wait_s)

    def _make_health(self) -> None:
        settings = self.settings
        self.health = GpuHealth(
            self.nvml.health_source(),
            node_name=settings.node_name,
            plugin_directory=self._plugin_dir,
            boot_id=self.boot_id,
            xids=XidPolicy(settings.ignored_xids, settings.fatal_xids),
            taint_policy=TaintPolicy(dict(settings.taint_effects)),
            discovery=self.discovery,
            host=self._host,
            lanes=self.lanes,
            under_vfio=self.passthrough.taken,
            ledger=self.ledger,
            on_shown=self._publish,
            on_transition=self._health_moved,
            on_polled=self._health_polled,
        )

    def _make_reports(self) -> None:
        self.reporting = Reports(
            self.settings.driver_name,
            self.settings.node_name,
            api=self.client,
            metrics=self.metrics,
            records=self.records,
            ledger=self.ledger,
            lanes=self.lanes,
            inventory=self.discovery.latest,
            health=self.health.book,
            mps_files=self._mps_files,
            on_release=self._claim_released,
        )

    def _make_steps(self) -> None:
        settings, paths, nodes, directory = self.settings, self._paths, self._platform.nodes, self._plugin_dir
        self._dev_char = DevCharLinks(paths, nodes) if settings.dev_char_links else None
        self._extra_devices = ExtraDeviceFinder(
            paths,
            InstalledPrograms(paths.driver_root, directory / "imex.lib", names=(IMEX_PROGRAM,)),
            nodes=nodes,
        )
        self._maintenance = MaintenanceSteps(
            self.detachments,
            self.records,
            self.ledger,
            lambda gpu_uuids: self.publishing.is_offered(gpu_uuids),  # noqa: PLW0108  it is created later
            self._publish,
            self.discovery.request_rescan,
        )
        self._steps = StepDispatcher(
            {
                **self._gpu_steps.runners,
                StartMaintenance: self._maintenance,
                WriteDeviceMetadata: MetadataSteps(self._metadata_files, self.discovery, self.ledger),
                WriteCdiSpec: CdiSteps(
                    settings.driver_name,
                    self._specs,
                    self._driver_root,
                    GpuNodes(paths, nodes=nodes),
                    self.discovery.driver_version,
                    self._mps_layout,
                    self.ledger,
                    self._extra_devices,
                    self._vfio_cards,
                    self._dev_char,
                ),
            },
            self.metrics.step_ended,
        )
        self.cleaner = Cleaner(
            self.ledger,
            self.lanes,
            self._steps,
            self._cleanups_changed,
            self._tools,
            self._gpu_steps.restorers,
            temporary_files(directory, Path(settings.cdi_root), settings.driver_name),
        )

    def _tools(self) -> Hashable:
        """Return a value that changes when an undo that failed may succeed, or a command has requested the cleanup."""
        smi = None
        with suppress(StateError):
            smi = self._programs().paths.get(SMI_PROGRAM)
        files = smi, self._mps_layout.lock, self._plugin_dir / RETRY_FILE
        stamps = tuple(None if file is None else stamp_or_none(file) for file in files)
        return stamps, self._host.loaded_driver(), self.detachments.detached() is None

    def _make_claims(self) -> None:
        settings = self.settings
        self.claims = ClaimLifecycle(
            Identity(
                settings.driver_name,
                settings.node_name,
                settings.sharing,
                settings.metadata_versions,
                settings.extra_devices,
                settings.power,
            ),
            discovery=self.discovery,
            records=self.records,
            without_record=self._without_record,
            executor=Executor(self.records, self.cleaner, self._steps, self.lanes, self.boot_id),
            cleaner=self.cleaner,
            lookup=ClaimClient(self.client),
            users=GpuProcesses(
                self.nvml,
                self.ledger,
                is_of_the_host=partial(is_of_the_host, self._paths.proc),
                driver_is_gone=lambda: not self._host.loaded_driver(),
            ),
            extra_devices=self._extra_devices,
            observer=self.reporting.reporter,
            pods_run=lambda record: any_runs("/proc", {pod.uid for pod in record.claim.pods or ()}),
            find_node=partial(node_uid, self.client, settings.node_name),
            setting_for_lost=lambda: self.publishing.missing_setting(LOST),
            layouts=self.layouts if settings.mig_layouts.is_on else None,
        )

    def _make_publishing(self) -> None:
        self.publishing = Publishing(
            self.settings,
            api=self.client,
            discovery=self.discovery,
            records=self.records,
            without_record=self._without_record,
            health=self.health,
            cleaner=self.cleaner,
            layouts=self.layouts,
            metrics=self.metrics,
        )

    def _make_kubelet_plugin(self, *, was_ready: bool) -> None:
        settings, directory, publisher = self.settings, self._plugin_dir, self.publishing.publisher
        self._plugin = KubeletPlugin(
            PluginSettings(
                settings.driver_name,
                Path(settings.kubelet_registrar_directory_path),
                Path(settings.kubelet_plugins_directory_path),
                settings.pod_uid,
                f"[::]:{settings.healthcheck_port}" if settings.healthcheck_port >= 0 else None,
            ),
            self.claims.service,
            self,
            self._watch_health,
        )
        disks = [DiskWatch(path) for path in (directory, Path(settings.cdi_root))]
        self.node_problems = NodeProblems(
            {
                "the kubelet's sockets": self._plugin.problems,
                "the slices": publisher.problems,
                "the devices": self.discovery.problems,
                "the health of the GPUs": self.health.problems,
                "passthrough": self.passthrough.problems,
                "the MPS host": self._mps_files.problems,
                "stale claims": self.claims.reconciler.problems,
                "the claim records": self.records.problems,
                "the ledgers": self.ledger.problems,
                "the settings of the GPUs": self._gpu_steps.problems,
                "maintenance": lambda: overdue_problems(self._maintenances()),
                "pending cleanup": self.cleaner.problems,
                "failing claims": self.reporting.failing.problems,
                "claims with MPS": self.reporting.mps.problems,
                "the status of claims": self.reporting.claims.renew_statuses,
                "memory without a claim": self._unclaimed_memory,
                "the receipts": lambda: () if self._receipts is None else self._receipts.problems(),
                **{f"writes in {one.directory}": one.problems for one in disks},
                **{f"the disk of {one.directory}": one.look for one in disks},
            },
            self.reporting.failing,
            self.reporting.recorder,
            directory,
            lambda: publisher.has_pool,
        )
        self.probes = Probes(
            self._plugin, self.discovery, publisher, self.node_problems.notes, self.idle, was_ready
        )

    def _register_metrics(self) -> None:
        show, inventory, health = self.metrics.show, self.discovery.latest, self.health.book
        publisher, cache, support = self.publishing.publisher, self.publishing.cache, self.publishing.support
        show.claims(
            lambda: self.records.all().values(),
            self.ledger.created_uuid,
            inventory,
        )
        show.devices(inventory, health, self.health.instances)
        show.inventory(inventory)
        # Show no GPU while NVML is closed for maintenance: an unwatched GPU would cause an alert.
        show.health(lambda: None if self.health.gpus() is None else inventory(), health)
        show.mig_layouts(self.layouts.states)
        show.cleanups(self.cleaner.outstanding)
        show.maintenances(self._maintenances)
        show.reports(self.reporting.recorder.counts)
        show.value("readiness", "ready", lambda: not self.probes.readiness())
        show.value("problem", "node_problem", lambda: bool(self.problems()))
        show.problems(self.node_problems.codes)
        show.value("failing", "claims_failing", lambda: len(self.reporting.failing.all()))
        show.mps(lambda: [status.state for status in self._mps_files.statuses()])
        show.publishing(lambda: publisher.problem, lambda: cache.count, lambda: len(publisher.withheld))
        show.value("partitions", "partitions_unsupported", lambda: support.problem is not None)

    def _maintenances(self) -> list[Maintenance]:
        return self.detachments.maintenances(self.records.all().values())

    def _watch_usage(self) -> None:
        self._unclaimed_memory: ProblemSource = lambda: ()
        self._receipts: Receipts | None = None
        if not self.settings.usage_metrics:
            return
        usage = Usage(
            # All processes of a simulated machine are visible.
            self.nvml.usage_source(
                sees_all=self.settings.simulate is not None or sees_all_processes("/proc")
            ),
            self.discovery.latest,
            self.records.all,
            self.ledger.created_instance,
            partial(origin, self._paths.proc),
        )
        self.metrics.show.usage(usage.look)
        self._unclaimed_memory = UnclaimedMemory(usage.unclaimed).problems
        # A source of its own: the utilisation of MIG devices is that since the source's last reading.
        measured = replace(usage, source=self.nvml.usage_source(sees_all=False))
        self._receipts = self.reporting.reporter.receipts = Receipts(
            receipt_store(self._plugin_dir),
            measured.measure,
            self.discovery.latest,
            self.records.all,
            self.ledger.created_instance,
            lambda: self.nvml.session.driver_loads,
        )
        self.metrics.show.receipts(self._receipts.sums)

    def _all_parts(self) -> Iterator[Part]:
        """Yield all parts, in the order in which they start. They stop in the reverse order."""
        yield Part("api_client", stop=self.client.close)
        yield Part("state", self._open_state, self._close_state)
        if self._receipts is not None:
            yield Part("receipts", self._receipts.start, self._receipts.stop)
        yield Part("event_recorder", self.reporting.recorder.start, self.reporting.recorder.stop)
        yield Part("discovery", self.discovery.start, self.discovery.stop, stands_by=True)
        yield Part("mig_layouts", self.layouts.start, self.layouts.stop)
        yield Part("health_threads", stop=self.health.monitor.close, stands_by=True)
        yield Part("health", self.health.monitor.start, self.health.monitor.leave)
        yield Part("admission", self._admit)
        yield Part(_PLUGIN, self._plugin.start, stands_by=True)
        yield Part("api_configuration", self._open_client)
        if self.settings.mig_layouts.is_on:
            yield Part("node_labels", self._labels.start, self._labels.stop)
        yield Part("cleanup", self.cleaner.start, self.cleaner.stop)
        yield Part("reconciler", self.claims.reconciler.start, self.claims.reconciler.stop)
        yield Part("slice_cache", self.publishing.cache.start, self.publishing.cache.stop)
        yield Part("publisher", self.publishing.publisher.start, self.publishing.publisher.stop)
        yield Part("node_problems", self.node_problems.start, self.node_problems.stop)
        if self.settings.http_endpoint:
            pages = (
                problems_page(self.probes.liveness),
                problems_page(self.probes.startup),
                problems_page(self.probes.readiness, self.probes.notes),
                while_working(self._is_working, json_page(self.node_problems.as_json)),
            )
            served = dict(zip(PROBE_PATHS, pages, strict=True))
            if self._receipts is not None:
                advice = partial(self._receipts.advice_as_json, self.settings.driver_name)
                served[ADVICE_PATH] = while_working(self._is_working, json_page(advice))
            if self.settings.metrics_path != "off":
                served[self.settings.metrics_path] = while_working(
                    self._is_working, metrics_page(self.metrics.registry)
                )
            http = HttpEndpoint(self.settings.http_endpoint, served)
            yield Part(_HTTP, http.start, http.stop, stands_by=True)
        yield Part("started", self._log_start)

    def _log_start(self) -> None:
        names = self.settings.driver_name, self.settings.node_name
        _log.info("driver_started", driver=names[0], node=names[1], pid=os.getpid())

    def _open_client(self) -> None:
        """Wait for the registration, because importing the API client would delay the kubelet's first calls."""
        self._registered.wait(_REGISTRATION_S)
        self.client.open()

    def _open_state(self) -> None:
        self.records.open(self.boot_id)
        self.ledger.open()
        self._use_state()
        self.lanes.open()
        self._specs.create()
        self._metadata_files.create()
        self._maintenance.open()

    def _use_state(self) -> None:
        """Read what decides the names of devices. Stores that are not open change no file."""
        self.passthrough.open()
        refuse_other_names(self.settings.device_names, self.ledger.known_records())

    def _close_state(self) -> None:
        """End the steps on GPUs, and make every later use of the stores fail."""
        if not self.lanes.close(_STEPS_S):
            _log.warning("steps_unfinished", gpu_uuids=sorted(self.lanes.under_way()))
        self.records.close()
        self.ledger.close()

    def _admit(self) -> None:
        if self._stood_by:
            # Another process may have changed GPUs since this one last read them.
            self.discovery.scan_now(_SCAN_S)
        self.claims.admission.open()

    def start(self) -> None:
        """Start all parts, or those that stand by while another process works on the node.

        Raises: InvalidConfigError, StateError, FatalError, after stopping every part.
        """
        try:
            self._works = self._worker.take()
            if self._works:
                self._start(self._parts)
            else:
                self._stood_by = True
                _log.info("standby", pid=os.getpid())
                self._use_state()
                self._start(part for part in self._parts if part.stands_by and part.name != _PLUGIN)
            self._turns.start()
        except BaseException:
            self.stop()
            raise

    def _start(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if part not in self._running:
                self._running.append(part)
                part.start()

    def _turn(self) -> float:
        """Take the work over or hand it over; returns the seconds until the next check."""
        try:
            if self._works:
                if not self._worker.is_asked():
                    return _WORKER_LOOKS_S
                self._hand_over()
            elif self._handed_over_at is not None:
                if self._worker.take():  # no newer process is left
                    self.starts_again = True
                    self._stopped.set()
                elif not self.probes.was_ready and time.monotonic() - self._handed_over_at > _TAKES_BACK_S:
                    # A rolling update waits for this process, which can only become ready when it works.
                    text = "this process handed the node over before it was ready; it starts again to take it back"
                    self._die(FatalError(text))
            else:
                self._stand_by()
        except StateError as error:
            _log.warning("worker_unknown", reason=str(error))
            return _LOCK_FAILED_S
        except FatalError as error:
            self._die(error)
        return _TURN_S

    def _stand_by(self) -> None:
        if self._registered.is_set():
            self._worker.ask()
            self._asked_at = self._asked_at or time.monotonic()
        elif self.discovery.has_scanned:
            # From its registration on, the kubelet sends this process all calls.
            self._start_or_die(part for part in self._parts if part.name == _PLUGIN)
        if self._worker.take():
            self._works = True
            self._start_or_die(self._parts)
            if self._fatal is None:
                # What changed while this process stood by had no effect.
                self._hardware_changed()
                self._inventory_changed()

    def _start_or_die(self, parts: Iterable[Part]) -> None:
        try:
            self._start(parts)
        except Exception as error:  # noqa: BLE001  raised by `wait`
            self._die(error)

    def _hand_over(self) -> None:
        """Stop everything that changes something, except a step that hangs.

        If that fails or takes too long, this process ends, which releases its right to work.
        """
        began = time.monotonic()
        self.is_ready()  # noted in `probes`
        late = FatalError(f"this process could not hand the node over within {_HAND_OVER_S:.0f} s")
        limit = threading.Timer(_HAND_OVER_S, self._die, [late])
        limit.daemon = True
        limit.start()
        try:
            self._release()
        except Exception as error:  # noqa: BLE001  raised by `wait`
            self._die(error)
            return
        finally:
            limit.cancel()
        _log.info("handed_over", seconds=round(time.monotonic() - began, 3))
        self._stop_readers()

    def _release(self) -> None:
        self.claims.waiter.stop()
        if not self.claims.admission.close(_CALLS_S):
            _log.warning("calls_unfinished", reason=f"they have not ended within {_CALLS_S:.0f} s")
        self._works, self._handed_over_at = False, time.monotonic()
        self.health.stream.stop()
        ending = [part for part in self._running if not part.stands_by]
        self._running = [part for part in self._running if part.stands_by]
        self._stop(ending)
        self._worker.close()
        self.claims.admission.end()
        # A kubelet that is restarted must not register this process again.
        self._plugin.withdraw()

    def _stop_readers(self) -> None:
        """Close NVML, so that maintenance need not wait for this process."""
        readers = [part for part in self._running if part.name not in (_PLUGIN, _HTTP)]
        self._running = [part for part in self._running if part not in readers]
        self._stop(readers)

    def stop(self) -> None:
        """Stop the kubelet's side first, then the other parts. Safe to call twice.

        Calls in progress finish; slices and records stay.
        """
        has_ended = self._turns.stop()
        # These come before the server, because it waits for streams and calls to end.
        self.health.stream.stop()
        self.claims.waiter.stop()
        self.claims.admission.end()
        self._plugin.stop(_CALLS_S if self._is_asked() else None)
        self._stop(self._running)
        if has_ended:  # otherwise the end of the process releases the right to work
            self._worker.close()
        self._stopped.set()

    def _is_asked(self) -> bool:
        try:
            return self._worker.is_asked()
        except (StateError, FatalError):
            return False

    def _stop(self, parts: list[Part]) -> None:
        while parts:
            part = parts.pop()
            try:
                part.stop()
            except Exception:  # noqa: BLE001  the other parts must be stopped too
                _log.exception("stop_failed", part=part.name)

    def _is_working(self) -> bool:
        return self._works

    def _watch_health(self, request: Any, context: Any) -> Iterator[NodeWatchResourcesResponse]:
        """Delay `HealthStream.watch` until this process works; before that, nothing is known."""
        while context.is_active() and not self.claims.admission.is_open:
            if self._stopped.wait(_TURN_S):
                return
        yield from self.health.stream.watch(request, context)

    def idle(self) -> Idle | None:
        """Return why this process does not work on the node."""
        if self._works:
            is_starting = self._stood_by and not self.claims.admission.is_open
            return Idle("this process starts to work on the node", is_fault=True) if is_starting else None
        if self._handed_over_at is not None:
            # Kubernetes must not delete its pod until the newer one is ready.
            text = "this process has handed the node over to a newer process of gpu-dra-driver"
            return Idle(text, is_fault=not self.probes.was_ready)
        waited_s = 0.0 if self._asked_at is None else time.monotonic() - self._asked_at
        if waited_s < _LATE_S:
            text = "this process waits until another process of gpu-dra-driver hands the node over"
        else:
            text = (
                f"another process of gpu-dra-driver has not handed this node over for {waited_s:.0f} s; see the log of "
                "its pod, and delete that pod"
            )
        return Idle(text, is_fault=True)

    def plugin_died(self, error: FatalError) -> None:
        self._die(error)

    def _die(self, error: Exception) -> None:
        self._fatal = error
        self._stopped.set()

    def is_ready(self) -> bool:
        return self.probes.is_ready()

    def end(self) -> None:
        self._stopped.set()

    def wait(self) -> None:
        """Block until `end`, a fatal error (raised), or the node needs a new `Driver` (`starts_again`)."""
        self._stopped.wait()
        if self._fatal is not None:
            raise self._fatal

    def problems(self) -> list[str]:
        return [*self.probes.readiness(), *self.probes.notes()]

    # --- changes, each handled in the thread that found it ---------------------------------------------

    def registration_changed(self, status: RegistrationStatus) -> None:
        if status.registered:
            self._registered.set()
            self._turns.wake()
            self._inventory_changed()

    def _inventory_changed(self) -> None:
        if not self._works:
            return
        _call_all(
            *(() if self._dev_char is None else (self._dev_char.make,)),
            self.health.devices_changed,
            self._publish,
        )

    def _hardware_changed(self) -> None:
        """Handle a new or reloaded NVIDIA driver, a change of the GPUs in NVML, or the reopening of NVML."""
        if not self._works:
            return
        _call_all(self._gpu_steps.driver_reloaded, self.cleaner.retry_now, self.layouts.wake, self._publish)

    def _health_polled(self, gpu_uuid: str, polled: PolledHealth) -> None:
        self._gpu_steps.power_limits.polled(gpu_uuid, polled.power_limit_mw)
        self.discovery.health_polled(gpu_uuid, polled)

    def _health_moved(self, change: HealthChange) -> None:
        self.reporting.claims.health_changed(change)

    def _mig_changed(self, action: MigAction, device: str, seconds: float, error: Exception | None) -> None:
        """Handle a change of MIG devices on demand or MIG mode, or a failed attempt (`error`)."""
        is_switched = error is None and action in ("mode-on", "mode-off")
        _call_all(
            *([partial(self._gpu_steps.mig_mode_changed, device)] if is_switched else []),
            partial(self.health.mig_changed, action),
            partial(self.reporting.reporter.mig_changed, action, device, seconds, error),
        )

    def _labels_changed(self) -> None:
        self.layouts.wake()

    def _layouts_changed(self, found: Sequence[GpuLayout]) -> None:
        _call_all(self._publish, partial(self.reporting.reporter.mig_layouts_changed, found))

    def _claim_released(self) -> None:
        _call_all(self.layouts.wake, self.publishing.claim_released)

    def _cleanups_changed(self) -> None:
        _call_all(self.discovery.request_rescan, self._publish, self.cleaner.retry_now, self.layouts.wake)

    def _publish(self) -> None:
        self.publishing.publisher.mark_dirty()


def _call_all(*calls: Callable[[], object]) -> None:
    """Make all calls. Raises: the error of one call, after the others."""
    with ExitStack() as others:
        for call in reversed(calls):
            others.callback(call)
