"""The parts that tell users what happens, put together: events, and the state of devices in claims."""

from __future__ import annotations

from collections.abc import Callable

from dra_driver.app.healthparts import HealthParts
from dra_driver.app.migparts import MigParts
from dra_driver.kube.claimstatus import ClaimStatusClient
from dra_driver.kube.events import EventWriter
from dra_driver.kube.versions import ResourceApi
from dra_driver.model.inventory import Inventory
from dra_driver.services.announcer import Announcer
from dra_driver.services.claimnews import ClaimNews
from dra_driver.services.claimpods import ClaimPods
from dra_driver.services.claimstates import ClaimStates
from dra_driver.services.metrics import Metrics
from dra_driver.services.nodenews import NodeNews
from dra_driver.services.reporter import Reporter, claim_using
from dra_driver.settings import Settings
from dra_driver.state.records import RecordStore


class ReportingParts:
    """Announcer, what claims and the node are told, the pods of claims, and the observer of the preparer."""

    def __init__(
        self,
        settings: Settings,
        api: ResourceApi,
        metrics: Metrics,
        inventory: Callable[[], Inventory | None],
        records: RecordStore,
        health: HealthParts,
        mig: MigParts,
        may_tell: Callable[[], bool],
    ) -> None:
        self.pods = ClaimPods()
        self.announcer = Announcer(
            settings.node_name,
            EventWriter(api.client, settings.driver_name, settings.node_name),
            ClaimStatusClient(api, settings.driver_name, settings.node_name, note_pods=self.pods.note),
        )
        states = ClaimStates(self.announcer, inventory, mig.realised, health.monitor.states, records.get)
        self.news = NodeNews(metrics, self.announcer, may_tell=may_tell)
        self.claims = ClaimNews(self.announcer, states, records.all, inventory, mig.realised, may_tell)
        self.reporter = Reporter(
            metrics,
            self.announcer,
            states,
            mig.realised,
            lambda device: claim_using(device, records.all().values()),
            mig.claim_gone,
        )

    def start(self) -> list[tuple[str, Callable[[], object]]]:
        """Begin to tell; what has to be stopped, in the order of starts."""
        self.announcer.start()
        self.claims.start()
        return [("announcer", self.announcer.stop), ("claim_news", self.claims.stop)]
