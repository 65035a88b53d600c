"""What the plugin wrote down on a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dra_driver.journal.rules.cleanups import PendingCleanup
from dra_driver.model.health import HealthState
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.mig_layouts import GpuLayout
from dra_driver.model.record import ClaimRecord


@dataclass(frozen=True, slots=True)
class NodeState:
    """All that lies below a plugin directory. `faults` has a sentence for each part that could not be read, `notes` for
    what is wrong with the kept health; `; ` comes before what to do.

    `boot_id` is the boot that runs now, None where it is not known: an entry of the ledger from another one means
    nothing any more.
    """

    records: Sequence[ClaimRecord] = ()
    owned: Sequence[OwnedInstance] = ()
    cleanups: Sequence[PendingCleanup] = ()
    health: Sequence[HealthState] = ()
    boot_id: str | None = None
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    layouts: Sequence[GpuLayout] = ()
