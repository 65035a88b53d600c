"""Events for what happens on the node as a whole: MIG layouts, unclaimed memory, cleanup, what the API server does not
keep of slices, and what the MPS host reports of its daemons. Trouble that lasts is in `reporting/node_problems.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dra_driver.base.threads import BackgroundWorker
from dra_driver.errors import DraDriverError
from dra_driver.journal.rules.cleanups import PendingCleanup, what
from dra_driver.model.gpu import GpuProcess
from dra_driver.model.mig import GpuLayout, LayoutState
from dra_driver.model.mps import MpsDaemonStatus
from dra_driver.model.problems import EventReason
from dra_driver.model.record import ClaimRecord, RunMps
from dra_driver.reporting.event_recorder import EventRecorder
from dra_driver.reporting.metrics import Metrics
from dra_driver.reporting.rules.claim_usage import unclaimed_text
from dra_driver.sharing.rules.client_limits import notes_of


@dataclass(eq=False)
class NodeEvents:
    """Observes the publisher, MIG layouts and cleanups. Each method is called from one thread.

    While `speaks_for_node` says no, another instance of the plugin reports for this node.
    """

    metrics: Metrics
    recorder: EventRecorder
    speaks_for_node: Callable[[], bool]

    def published(self, lag_s: float) -> None:
        """Slices were written."""
        self.metrics.published(lag_s)

    def publish_failed(self, error: Exception) -> None:
        """A try to bring the slices up to date failed. That it lasts is a problem of the publisher."""
        self.metrics.publish_failed(error)

    def contested(self, reason: str) -> None:
        """Somebody else changes our slices again and again."""
        self._report("SlicesContested", reason, warning=True)

    def device_left_out(self, fault: str) -> None:
        """A device is left out of the slices, because the API server would refuse it."""
        self._report("DeviceNotPublished", fault, warning=True)

    def fields_dropped(self, gates: str) -> None:
        """The API server dropped fields of a slice; `gates` names the feature gates that are off."""
        text = f"the API server drops fields of the node's slices; enable its feature gates: {gates}"
        self._report("SliceFieldsDropped", text, warning=True)

    def mig_layouts_changed(self, found: Sequence[GpuLayout]) -> None:
        """What became of the MIG layout on GPUs."""
        for one in found:
            outcomes: Mapping[LayoutState, tuple[EventReason, str]] = {
                "applied": ("MigLayoutApplied", "is on the GPU"),
                "waiting": ("MigLayoutWaits", f"waits: {one.text}"),
                "refused": ("MigLayoutRefused", f"is refused, and nothing was changed: {one.text}"),
            }
            reason, text = outcomes[one.state]
            text = f"GPU {one.gpu_uuid}: the MIG layout {one.layout} {text}"
            self._report(reason, text, warning=one.state == "refused")

    def memory_unclaimed(self, gpu_uuid: str, process: GpuProcess) -> bool:
        """A process has had memory on a GPU for ten minutes, and belongs to no claim and no container. Whether this
        instance speaks for the node."""
        return self._report("MemoryUnclaimed", unclaimed_text(f"GPU {gpu_uuid}", process), warning=True)

    def cleanup_pending(self, cleanup: PendingCleanup) -> None:
        """Something of a claim could not be undone. The instance that tried reports it, also if another one speaks for
        the node."""
        self.recorder.node_event("CleanupPending", cleanup.text, warning=True)

    def cleanup_done(self, cleanup: PendingCleanup) -> None:
        """Nothing of it is pending any more."""
        done = ", ".join(map(what, cleanup.steps)) or "nothing was left to do"
        text = f"Cleanup for claim {cleanup.record.ref} is done: {done}"
        self.recorder.node_event("CleanupDone", text, warning=False)

    def _report(self, reason: EventReason, text: str, *, warning: bool) -> bool:
        """Whether this instance speaks for the node."""
        is_ours = self.speaks_for_node()
        if is_ours:
            self.recorder.node_event(reason, text, warning=warning)
        return is_ours


_LOOK_S = 15.0


@dataclass(eq=False)
class MpsEvents(BackgroundWorker):
    """Asks the MPS host while claims use MPS, and never else. Each thing is reported once for each claim.

    `daemons` asks the MPS host; it may raise a DraDriverError.
    """

    join_s = 1.0
    recorder: EventRecorder
    records: Callable[[], Mapping[str, ClaimRecord]]
    daemons: Callable[[], Sequence[MpsDaemonStatus]]

    def __post_init__(self) -> None:
        self._reported: set[tuple[str, str, str]] = set()  # claim, reason, daemon
        super().__init__("mps-events", self._look)

    def prepared(self, record: ClaimRecord) -> None:
        """A claim was prepared."""
        if _daemons_of(record):
            self.wake()

    def _look(self) -> float:
        users = {uid: record for uid, record in self.records().items() if _daemons_of(record)}
        self._reported = {entry for entry in self._reported if entry[0] in users}
        if not users:
            return math.inf
        try:
            daemons = self.daemons()
        except DraDriverError:
            return _LOOK_S
        for status in daemons:
            for reason, text in notes_of(status):
                for uid, record in users.items():
                    entry = (uid, reason, status.device)
                    if status.device in _daemons_of(record) and entry not in self._reported:
                        self._reported.add(entry)
                        self.recorder.claim_event(record.ref, reason, text, warning=True)
        return _LOOK_S


def _daemons_of(record: ClaimRecord) -> Collection[str]:
    return [step.spec.device for step in record.steps if isinstance(step, RunMps)]
