"""Reports events of the node, claims and MIG devices. `reporting/node_problems.py` reports lasting problems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import structlog

from dra_driver.errors import DraDriverError
from dra_driver.health.book import HealthBook
from dra_driver.journal.lanes import Lanes
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.records import RecordStore
from dra_driver.kube.claim_status_client import ClaimStatusClient
from dra_driver.kube.claims import ClaimClient
from dra_driver.kube.client import ApiClient
from dra_driver.kube.events import EventWriter
from dra_driver.mig.mode import MigAction
from dra_driver.model.claim import ClaimRef, Pods, ReportedDevice
from dra_driver.model.dataclass import dataclass
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import GpuLayout, LayoutState, OwnedInstance
from dra_driver.model.mps import MpsDaemonStatus
from dra_driver.model.problems import EventReason, NodeProblem
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import CreateMig, RunMps
from dra_driver.mps_host.host_files import MpsHostFiles
from dra_driver.reporting.claim_status import ClaimHealthReporter, ClaimStatusReporter
from dra_driver.reporting.event_recorder import EventRecorder
from dra_driver.reporting.failing_claims import FailingClaims
from dra_driver.reporting.metrics import Metrics, Operation
from dra_driver.reporting.receipts import Receipts
from dra_driver.sharing.rules.client_limits import notes_of
from dra_driver.sharing.rules.modes import advice_on_requests

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class MpsClaims:
    """Finds the problems of claims that use MPS, and reports once how their containers must use it."""

    recorder: EventRecorder
    records: Callable[[], Mapping[str, ClaimRecord]]
    daemons: Callable[[], Sequence[MpsDaemonStatus]]

    def __post_init__(self) -> None:
        self._pods: Mapping[str, Pods] = {}  # by the claim's UID, at the last look for advice
        self._advised: set[tuple[str, str]] = set()  # the claim's UID and the advice

    def problems(self) -> Iterator[NodeProblem]:
        """Raises: DraDriverError if a status cannot be read."""
        records = self.records()
        users = [record for record in records.values() if _daemons_of(record)]
        pods = {uid: record.claim.pods for uid, record in records.items()}
        if pods != self._pods:
            self._pods = pods
            self._advise(users, records.values())
        for status in self.daemons() if users else ():
            refs = tuple(record.ref for record in users if status.device in _daemons_of(record))
            for code, text in notes_of(status):
                yield NodeProblem(code, text, status.device, refs)

    def _advise(self, users: Iterable[ClaimRecord], records: Collection[ClaimRecord]) -> None:
        advice = {record.ref: advice_on_requests(record, records) for record in users}
        found = {(ref.uid, text): ref for ref, text in advice.items() if text is not None}
        for (uid, text), ref in found.items():
            if (uid, text) not in self._advised:
                self.recorder.minor_claim_event(ref, "MpsNeedsRequestNames", text)
        self._advised = set(found)


def _daemons_of(record: ClaimRecord) -> Collection[str]:
    return [step.spec.device for step in record.steps if isinstance(step, RunMps)]


_CHANGED: Mapping[str, tuple[EventReason, str]] = {
    "create": ("MigDeviceCreated", "Created"),
    "destroy": ("MigDeviceDestroyed", "Destroyed"),
}


@dataclass(eq=False)
class Reporter:
    """`users` returns a claim whose record uses an on-demand MIG device. `freed` is called after a claim was
    unprepared.
    """

    metrics: Metrics
    recorder: EventRecorder
    statuses: ClaimStatusReporter
    created_instance: Callable[[str], OwnedInstance | None]
    users: Callable[[str], ClaimRef | None]
    freed: Callable[[], None]
    failing: FailingClaims
    receipts: Receipts | None = None

    @contextmanager
    def in_flight(self, action: Operation, claims: Sequence[ClaimRef]) -> Iterator[None]:
        with self.metrics.in_flight(action), self.failing.preparing(claims if action == "prepare" else ()):
            yield

    def prepared(self, ref: ClaimRef, duration_s: float, record: ClaimRecord | None) -> None:
        self.metrics.ended("prepare", duration_s)
        self.failing.succeeded(ref)
        if record is None:
            return
        if self.receipts is not None:
            self.receipts.prepared(record)
        self.statuses.prepared(record)
        if record.maintenance is not None:
            text = f"{', '.join(record.maintenance.gpu_uuids)}: in maintenance for this claim"
            self.recorder.claim_event(ref, "MaintenanceStarted", text, warning=False)

    def unprepared(self, ref: ClaimRef, duration_s: float, record: ClaimRecord | None) -> None:
        self.metrics.ended("unprepare", duration_s)
        self.failing.succeeded(ref)
        self.statuses.forget(ref)
        if self.receipts is not None:
            self.receipts.unprepared(ref)
        if record is not None and record.maintenance is not None and record.phase == "prepared":
            uuids = ", ".join(record.maintenance.gpu_uuids)
            text = f"{uuids}: maintenance ended; gpu-dra-driver publishes the devices again"
            self.recorder.claim_event(ref, "MaintenanceEnded", text, warning=False)
        self.freed()

    def waited(self, ref: ClaimRef, duration_s: float) -> None:
        self.metrics.waited(duration_s)

    def recovered(self, ref: ClaimRef, why: str) -> None:
        text = f"Released the devices of claim {ref}: the claim {why}, and the kubelet did not unprepare it"
        self.recorder.node_event("ClaimRecovered", text, warning=False)

    def seen(self, ref: ClaimRef, reported: frozenset[ReportedDevice]) -> None:
        self.statuses.renew(ref.uid, reported)

    def still_in_use(self, ref: ClaimRef, text: str) -> None:
        self.recorder.node_event("ClaimStillInUse", f"Claim {ref} {text}", warning=True)

    def failed(
        self, action: Operation, ref: ClaimRef, duration_s: float, error: Exception, text: str
    ) -> None:
        self.failing.failed(action, ref, text.partition(f"(UID {ref.uid}): ")[2] or text)
        self.metrics.ended(action, duration_s, error)
        reason: EventReason = "PrepareFailed" if action == "prepare" else "UnprepareFailed"
        self.recorder.claim_event(ref, reason, text, warning=True)

    def mig_changed(
        self, action: MigAction, subject: str, duration_s: float, error: Exception | None
    ) -> None:
        """`subject` is the name of a MIG device, or for MIG mode the GPU's UUID. For a device, the claim's record still
        exists.
        """
        self.metrics.mig_changed(action, duration_s, error)
        match action:
            case "create" | "destroy":
                self._device_changed(action, subject, duration_s, error)
            case "mode-on" | "mode-off":
                self._mode_changed(action.removeprefix("mode-"), subject, duration_s, error)

    def mig_layouts_changed(self, found: Sequence[GpuLayout]) -> None:
        for one in found:
            outcomes: Mapping[LayoutState, tuple[EventReason, str]] = {
                "applied": ("MigLayoutApplied", "is applied"),
                "waiting": ("MigLayoutWaits", f"waits: {one.text}"),
                "refused": ("MigLayoutRefused", f"is refused, and nothing was changed: {one.text}"),
            }
            if one.state not in outcomes:
                continue
            reason, text = outcomes[one.state]
            text = f"GPU {one.gpu_uuid}: the MIG layout {one.layout} {text}"
            self.recorder.node_event(reason, text, warning=one.state == "refused")

    def _mode_changed(self, wanted: str, gpu_uuid: str, duration_s: float, error: Exception | None) -> None:
        if error is None:
            text = f"Switched {wanted} MIG mode of GPU {gpu_uuid} in {duration_s:.2f} s"
            self.recorder.node_event("MigModeChanged", text, warning=False, minor=True)
        else:
            text = f"MIG mode of GPU {gpu_uuid} could not be switched {wanted}: {error}"
            self.recorder.node_event("MigModeFailed", text, warning=True)

    def _device_changed(
        self, action: Literal["create", "destroy"], device: str, duration_s: float, error: Exception | None
    ) -> None:
        ref = self._claim_of(device)
        if error is None:
            reason, verb = _CHANGED[action]
            _log.info(
                "mig_device_created" if action == "create" else "mig_device_destroyed",
                device=device,
                duration_s=round(duration_s, 4),
            )
            text = f"{verb} MIG device {device}{self._identity(device)} in {duration_s:.2f} s"
            if ref is not None:
                self.recorder.minor_claim_event(ref, reason, text)
        elif action == "destroy":
            text = f"MIG device {device} could not be destroyed; gpu-dra-driver retries: {error}"
            if ref is not None:
                self.recorder.claim_event(ref, "MigDestroyDelayed", text, warning=True)
            else:
                self.recorder.node_event("MigDestroyDelayed", text, warning=True)

    def _claim_of(self, device: str) -> ClaimRef | None:
        try:
            return self.users(device)
        except DraDriverError:
            return None

    def _identity(self, device: str) -> str:
        try:
            made = self.created_instance(device)
        except DraDriverError:
            return ""
        if made is None or made.uuid is None:
            return ""
        return f" ({made.uuid}, GPU instance {made.gpu_instance_id}, compute instance {made.compute_instance_id})"


def claim_using(device: str, records: Iterable[ClaimRecord]) -> ClaimRef | None:
    for record in records:
        if any(isinstance(step, CreateMig) and step.device == device for step in record.steps):
            return record.ref
    return None


class Reports:
    def __init__(
        self,
        driver: str,
        node_name: str,
        *,
        api: ApiClient,
        metrics: Metrics,
        records: RecordStore,
        ledger: Ledger,
        lanes: Lanes,
        inventory: Callable[[], Inventory | None],
        health: HealthBook,
        mps_files: MpsHostFiles,
        on_release: Callable[[], None],
    ) -> None:
        self._lanes, self._records = lanes, records
        created_instance = ledger.created_instance
        self.recorder = EventRecorder(
            node_name,
            EventWriter(api, driver, node_name),
            ClaimStatusClient(api, driver, node_name),
        )
        states = ClaimStatusReporter(self.recorder, inventory, created_instance, health.states, records.get)
        self.claims = ClaimHealthReporter(self.recorder, states, records.all, inventory, created_instance)
        claims = ClaimClient(api)
        self.failing = FailingClaims((driver, node_name), claims.current, self._prepare_is_slow, records.get)
        self.mps = MpsClaims(self.recorder, records.all, mps_files.statuses)
        self.reporter = Reporter(
            metrics,
            self.recorder,
            states,
            created_instance,
            lambda device: claim_using(device, ledger.known_records()),
            on_release,
            self.failing,
        )

    def _prepare_is_slow(self, ref: ClaimRef, seconds: float) -> None:
        record, under_way = self._records.get(ref.uid), self._lanes.under_way()
        gpus = frozenset() if record is None else record.gpu_uuids
        doing = sorted(f"{under_way[uuid].what} on GPU {uuid}" for uuid in gpus & under_way.keys())
        text = f"Prepare has taken {seconds:.0f} s so far: {', '.join(doing) or 'it is waiting'}"
        self.recorder.claim_event(ref, "PrepareSlow", text, warning=False)
