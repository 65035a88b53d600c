"""What a scrape of the metrics asks of the other parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dra_driver.app.healthparts import HealthParts
from dra_driver.app.migparts import MigParts
from dra_driver.app.publishing import PublishingParts
from dra_driver.app.reportingparts import ReportingParts
from dra_driver.model.inventory import Inventory
from dra_driver.mps.client import MpsClient
from dra_driver.mps.layout import MpsLayout
from dra_driver.services.metrics import Metrics
from dra_driver.state.records import RecordStore


def show_node(
    metrics: Metrics,
    inventory: Callable[[], Inventory | None],
    records: RecordStore,
    health: HealthParts,
    mig: MigParts,
    reporting: ReportingParts,
    not_ready: Callable[[], Iterable[str]],
    notes: Callable[[], Iterable[str]],
) -> None:
    """Claims, devices, health, MIG devices that do not go away, notices, readiness and other trouble of the node."""
    show = metrics.show
    show.claims(lambda: records.all().values(), mig.uuid_of, reporting.pods.of)
    show.devices(inventory, health.monitor, health.instances)
    show.inventory(inventory)
    show.health(inventory, health.monitor)
    show.stuck_mig(mig.keeper.stuck)
    show.notices(reporting.announcer)
    show.readiness(not_ready)
    show.problem(lambda: [*not_ready(), *notes()])


def show_publishing(metrics: Metrics, parts: PublishingParts) -> None:
    """Slices, and what keeps them from being right."""
    metrics.show.publishing(lambda: parts.publisher.problem, parts.slice_count)
    metrics.partitions_unsupported(lambda: parts.support.problem is not None)


def show_mps(metrics: Metrics, layout: MpsLayout) -> None:
    """MPS daemons; a scrape starts no host."""
    asking = MpsClient(layout, connect_s=0.0)

    def states() -> list[Any]:
        return [status.state for status in asking.status(0.5)] if layout.socket.exists() else []

    metrics.show.mps(states)
