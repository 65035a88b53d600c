"""The parts that tell users what happens, put together: events, and the state of devices in claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from dra_driver.app.change_table import Change, Changes
from dra_driver.app.part import Part
from dra_driver.app.wiring.health import HealthParts
from dra_driver.app.wiring.mig import MigParts
from dra_driver.claims.fetch import ClaimPods
from dra_driver.inventory.discovery import Discovery
from dra_driver.journal.cleanups import PendingCleanups
from dra_driver.journal.records import RecordStore
from dra_driver.kube.claim_status_client import ClaimStatusClient
from dra_driver.kube.events import EventWriter
from dra_driver.kube.resource_api import ResourceApi
from dra_driver.mps.host_files import MpsHostFiles
from dra_driver.observability.metrics import Metrics
from dra_driver.reporting.claim_health import ClaimHealthReporter
from dra_driver.reporting.claim_status import ClaimStatusReporter
from dra_driver.reporting.event_recorder import EventRecorder
from dra_driver.reporting.mps_events import MpsEvents
from dra_driver.reporting.node_events import NodeEvents
from dra_driver.reporting.reporter import Reporter, claim_using
from dra_driver.settings import Settings
from dra_driver.slices.leadership import InstanceLeadership


class ReportingParts:
    """Event recorder, events and status of claims, events of the node, the pods of claims, and the observer of
    Prepare."""

    def __init__(
        self,
        settings: Settings,
        api: ResourceApi,
        metrics: Metrics,
        discovery: Discovery,
        records: RecordStore,
        health: HealthParts,
        mig: MigParts,
        changes: Changes,
        leadership: InstanceLeadership,
        cleanups: Callable[[], PendingCleanups],
        mps: MpsHostFiles,
    ) -> None:
        """`cleanups` are made later."""
        inventory, may_tell = discovery.latest, leadership.speaks_for_node
        self.claim_pods = ClaimPods()
        self.recorder = EventRecorder(
            settings.node_name,
            EventWriter(api.client, settings.driver_name, settings.node_name),
            ClaimStatusClient(api, settings.driver_name, settings.node_name, note_pods=self.claim_pods.note),
        )
        states = ClaimStatusReporter(
            self.recorder, inventory, mig.created_instance, health.monitor.states, records.get
        )
        self.node = NodeEvents(metrics, self.recorder, may_tell)
        self.claims = ClaimHealthReporter(
            self.recorder,
            states,
            records.all,
            inventory,
            mig.created_instance,
            may_tell,
            health.monitor.look_for_hangs,
        )
        self._mps = MpsEvents(self.recorder, records.all, mps.statuses)
        self.reporter = Reporter(
            metrics,
            self.recorder,
            states,
            mig.created_instance,
            lambda device: claim_using(device, [*records.all().values(), *cleanups().ended()]),
            partial(changes.tell, Change.CLAIM_RELEASED),
            self._mps,
        )

    def parts(self) -> Iterator[Part]:
        """What runs, in the order of starts."""
        yield Part("event_recorder", self.recorder.start, self.recorder.stop)
        yield Part("claim_health", self.claims.start, self.claims.stop)
        yield Part("mps_events", self._mps.start, self._mps.stop)
