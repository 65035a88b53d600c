"""What the daemon reports to users: events, and the state of devices in claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dra_driver.claims.fetch import ClaimPods
from dra_driver.health.monitor import Monitor
from dra_driver.journal.lanes import Lanes
from dra_driver.journal.records import RecordStore
from dra_driver.kube.claim_status_client import ClaimStatusClient
from dra_driver.kube.claims import ClaimClient
from dra_driver.kube.events import EventWriter
from dra_driver.kube.resource_api import ResourceApi
from dra_driver.model.claim import ClaimRef
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.problems import PREPARE_SLOW
from dra_driver.model.record import ClaimRecord
from dra_driver.mps_host.host_files import MpsHostFiles
from dra_driver.reporting.claim_health import ClaimHealthReporter
from dra_driver.reporting.claim_status import ClaimStatusReporter
from dra_driver.reporting.event_recorder import EventRecorder
from dra_driver.reporting.failing_claims import FailingClaims
from dra_driver.reporting.metrics import Metrics
from dra_driver.reporting.mps_events import MpsEvents
from dra_driver.reporting.node_events import NodeEvents
from dra_driver.reporting.reporter import Reporter, claim_using


class Reports:
    """`recorder` writes events; `node` and `mps` report what concerns the node, `claims` and `failing` what concerns
    claims. `reporter` observes Prepare and Unprepare; `claim_pods` knows the pods of claims."""

    def __init__(
        self,
        driver: str,
        node_name: str,
        *,
        api: ResourceApi,
        metrics: Metrics,
        records: RecordStore,
        known_records: Callable[[], Sequence[ClaimRecord]],
        lanes: Lanes,
        inventory: Callable[[], Inventory | None],
        created_instance: Callable[[str], OwnedInstance | None],
        monitor: Monitor,
        mps_files: MpsHostFiles,
        speaks_for_node: Callable[[], bool],
        on_release: Callable[[], None],
    ) -> None:
        """`on_release` is called when a claim was unprepared."""
        self._lanes, self._records = lanes, records
        self.claim_pods = ClaimPods()
        self.recorder = EventRecorder(
            node_name,
            EventWriter(api.client, driver, node_name),
            ClaimStatusClient(api, driver, node_name, note_pods=self.claim_pods.note),
        )
        states = ClaimStatusReporter(self.recorder, inventory, created_instance, monitor.states, records.get)
        self.node = NodeEvents(metrics, self.recorder, speaks_for_node)
        self.claims = ClaimHealthReporter(
            self.recorder, states, records.all, inventory, created_instance, speaks_for_node
        )
        claims = ClaimClient(api, self.claim_pods.note)
        self.failing = FailingClaims((driver, node_name), claims.look, self._prepare_is_slow, records.get)
        self.mps = MpsEvents(self.recorder, records.all, mps_files.statuses)
        self.reporter = Reporter(
            metrics,
            self.recorder,
            states,
            created_instance,
            lambda device: claim_using(device, known_records()),
            on_release,
            self.mps,
            self.failing,
        )

    def _prepare_is_slow(self, ref: ClaimRef, seconds: float) -> None:
        """Report what is being done on the GPUs of a claim whose Prepare takes long."""
        record, under_way = self._records.get(ref.uid), self._lanes.uses()
        gpus = frozenset() if record is None else record.gpu_uuids
        doing = sorted(f"{under_way[uuid].what} on GPU {uuid}" for uuid in gpus & under_way.keys())
        text = f"Prepare has taken {seconds:.0f} s so far: {', '.join(doing) or 'it waits'}"
        self.recorder.claim_event(ref, PREPARE_SLOW, text, warning=False)
