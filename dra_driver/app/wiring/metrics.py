"""The sources of the metrics in the other parts."""

from __future__ import annotations

from dra_driver.app.wiring.health import HealthParts
from dra_driver.app.wiring.mig import MigParts
from dra_driver.app.wiring.reporting import ReportingParts
from dra_driver.app.wiring.slices import PublishingParts
from dra_driver.inventory.discovery import Discovery
from dra_driver.journal.cleanups import PendingCleanups
from dra_driver.journal.records import RecordStore
from dra_driver.mps.host_files import MpsHostFiles
from dra_driver.observability.metrics import Metrics
from dra_driver.observability.probes import Probes


def show_node(
    metrics: Metrics,
    discovery: Discovery,
    records: RecordStore,
    cleanups: PendingCleanups,
    health: HealthParts,
    mig: MigParts,
    reporting: ReportingParts,
    publishing: PublishingParts,
    mps: MpsHostFiles,
    probes: Probes,
) -> None:
    """Tell the metrics where their values come from."""
    show, inventory = metrics.show, discovery.latest
    show.claims(lambda: records.all().values(), mig.uuid_of, reporting.claim_pods.of, inventory)
    show.devices(inventory, health.monitor, health.instances)
    show.inventory(inventory)
    show.health(inventory, health.monitor)
    show.stuck_mig(mig.collector.stuck)
    show.mig_layouts(mig.layouts)
    show.cleanups(cleanups.outstanding)
    show.reports(reporting.recorder.counts)
    show.readiness(probes.readiness)
    show.problem(lambda: [*probes.readiness(), *probes.notes()])
    show.mps(lambda: [status.state for status in mps.statuses()])
    show.publishing(lambda: publishing.publisher.problem, publishing.slice_count, publishing.withdrawn_count)
    show.partitions_unsupported(lambda: publishing.support.problem is not None)
