"""The sources of the metrics in the other parts."""

from __future__ import annotations

from collections.abc import Callable

from dra_driver.app.wiring.health import HealthParts
from dra_driver.app.wiring.mig import MigParts
from dra_driver.app.wiring.reporting import ReportingParts
from dra_driver.app.wiring.slices import PublishingParts
from dra_driver.journal.cleanups import PendingCleanups
from dra_driver.journal.records import RecordStore
from dra_driver.model.inventory import Inventory
from dra_driver.mps.host_files import MpsHostFiles, MpsLayout
from dra_driver.observability.metrics import Metrics
from dra_driver.observability.probes import Probes


def show_node(
    metrics: Metrics,
    inventory: Callable[[], Inventory | None],
    records: RecordStore,
    cleanups: PendingCleanups,
    health: HealthParts,
    mig: MigParts,
    reporting: ReportingParts,
    probes: Probes,
) -> None:
    """Claims, devices, health, MIG devices that do not go away, reports, readiness and other trouble of the node."""
    show = metrics.show
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


def show_publishing(metrics: Metrics, parts: PublishingParts) -> None:
    """Slices, and what keeps them from being right."""
    metrics.show.publishing(lambda: parts.publisher.problem, parts.slice_count, parts.withdrawn_count)
    metrics.show.partitions_unsupported(lambda: parts.support.problem is not None)


def show_mps(metrics: Metrics, layout: MpsLayout) -> None:
    """MPS daemons."""
    files = MpsHostFiles(layout)
    metrics.show.mps(lambda: [status.state for status in files.statuses()])
