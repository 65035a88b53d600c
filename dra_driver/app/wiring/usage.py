"""How devices are used: metrics that each scrape measures, and the search for memory that no claim has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dra_driver.app.part import Part
from dra_driver.app.wiring.mig import MigParts
from dra_driver.app.wiring.reporting import ReportingParts
from dra_driver.journal.records import RecordStore
from dra_driver.model.inventory import Inventory
from dra_driver.nvml.reader import NvmlReader
from dra_driver.observability.metrics import Metrics
from dra_driver.observability.rules.usage import Origin
from dra_driver.observability.usage import Usage
from dra_driver.reporting.unclaimed_memory import UnclaimedMemory
from dra_driver.settings import Settings


def usage_parts(
    settings: Settings,
    metrics: Metrics,
    nvml: NvmlReader,
    inventory: Callable[[], Inventory | None],
    records: RecordStore,
    mig: MigParts,
    reporting: ReportingParts,
    origin: Callable[[int], Origin],
) -> Sequence[Part]:
    """What runs; nothing, and no metrics, if that is switched off. `origin` returns where a process runs."""
    if not settings.usage_metrics:
        return ()
    source = nvml.usage_source()
    usage = Usage(source.read, source.read_processes, inventory, records.all, mig.created_instance, origin)
    metrics.show.usage(usage.look)
    watch = UnclaimedMemory(usage.unclaimed, reporting.node.memory_unclaimed)
    return (Part("unclaimed_memory", watch.start, watch.stop),)
