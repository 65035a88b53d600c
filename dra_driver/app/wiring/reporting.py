"""The parts that tell users what happens, put together: events, and the state of devices in claims."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from dra_driver.app.change_table import Change
from dra_driver.app.part import Part
from dra_driver.claims.fetch import ClaimPods
from dra_driver.kube.claim_status_client import ClaimStatusClient
from dra_driver.kube.claims import ClaimClient
from dra_driver.kube.events import EventWriter
from dra_driver.kube.resource_api import ResourceApi
from dra_driver.model.claim import ClaimRef
from dra_driver.model.events import PREPARE_SLOW
from dra_driver.mps_host.host_files import MpsHostFiles
from dra_driver.reporting.claim_health import ClaimHealthReporter
from dra_driver.reporting.claim_status import ClaimStatusReporter
from dra_driver.reporting.event_recorder import EventRecorder
from dra_driver.reporting.failing_claims import FailingClaims
from dra_driver.reporting.mps_events import MpsEvents
from dra_driver.reporting.node_events import NodeEvents
from dra_driver.reporting.reporter import Reporter, claim_using

if TYPE_CHECKING:
    from dra_driver.app.daemon import Driver


class ReportingParts:
    """Event recorder, events and status of claims, events of the node, the pods of claims, and the observer of
    Prepare."""

    def __init__(self, driver: Driver, api: ResourceApi, mps: MpsHostFiles) -> None:
        """Cleanups are made later."""
        settings, metrics, records = driver.settings, driver.metrics, driver.records
        mig, monitor = driver.mig, driver.health.monitor
        inventory, may_tell = driver.discovery.latest, driver.leadership.speaks_for_node
        self.claim_pods = ClaimPods()
        self.recorder = EventRecorder(
            settings.node_name,
            EventWriter(api.client, settings.driver_name, settings.node_name),
            ClaimStatusClient(api, settings.driver_name, settings.node_name, note_pods=self.claim_pods.note),
        )
        states = ClaimStatusReporter(
            self.recorder, inventory, mig.created_instance, monitor.states, records.get
        )
        self.node: NodeEvents = NodeEvents(metrics, self.recorder, may_tell)
        self.claims = ClaimHealthReporter(
            self.recorder,
            states,
            records.all,
            inventory,
            mig.created_instance,
            may_tell,
        )
        self.failing = FailingClaims(
            (settings.driver_name, settings.node_name),
            ClaimClient(api, self.claim_pods.note).look,
            self._prepare_is_slow,
            records.get,
        )
        self._lanes, self._records = driver.lanes, records
        self._mps = MpsEvents(self.recorder, records.all, mps.statuses)
        self.reporter: Reporter = Reporter(
            metrics,
            self.recorder,
            states,
            mig.created_instance,
            lambda device: claim_using(device, driver.known_records()),
            partial(driver.changes.tell, Change.CLAIM_RELEASED),
            self._mps,
            self.failing,
        )

    def _prepare_is_slow(self, ref: ClaimRef, seconds: float) -> None:
        """Report what is being done on the GPUs of a claim whose Prepare takes long."""
        record, under_way = self._records.get(ref.uid), self._lanes.uses()
        gpus = frozenset() if record is None else record.gpu_uuids
        doing = sorted(f"{under_way[uuid].what} on GPU {uuid}" for uuid in gpus & under_way.keys())
        text = f"Prepare has taken {seconds:.0f} s so far: {', '.join(doing) or 'it waits'}"
        self.recorder.claim_event(ref, PREPARE_SLOW, text, warning=False)

    def parts(self) -> Iterator[Part]:
        """What runs, in the order of starts."""
        yield Part("event_recorder", self.recorder.start, self.recorder.stop)
        yield Part("claim_health", self.claims.start, self.claims.stop)
        yield Part("mps_events", self._mps.start, self._mps.stop)
        yield Part("failing_claims", self.failing.start, self.failing.stop)
