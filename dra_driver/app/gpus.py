"""The node's GPUs: NVML, MIG on demand, passthrough, discovery and MIG layouts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path

from dra_driver.app.platforms import Platform
from dra_driver.app.settings import Settings
from dra_driver.base.atomic import stamp_or_none
from dra_driver.base.file_lock import UseMark
from dra_driver.errors import StateError
from dra_driver.host.driver_programs import InstalledPrograms
from dra_driver.host.driver_root import DriverRoot
from dra_driver.host.imex import ImexChannelNodes
from dra_driver.host.sysfs import Sysfs
from dra_driver.host.vfio import VfioCards
from dra_driver.inventory.detachment import LOCK_FILE, Detachments, closed_elsewhere, nvml_pause
from dra_driver.inventory.discovery import Discovery
from dra_driver.inventory.rules.gpu_names import held_gpu_names
from dra_driver.journal.lanes import Lanes
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.locks import PlanningLock
from dra_driver.journal.records import RecordStore
from dra_driver.mig.devices import MigDevices
from dra_driver.mig.layout_file import LAYOUT_FILE, LayoutFile
from dra_driver.mig.layouts import NodeLayouts
from dra_driver.mig.mode import MigHolders, MigMode, MigObserver, mig_context
from dra_driver.mig.offer import LedgerOwnership
from dra_driver.model.driver_files import SMI_PROGRAM
from dra_driver.model.mig import GpuLayout
from dra_driver.nvml.gpu_users import PersistenceModes
from dra_driver.nvml.reader import NvmlReader
from dra_driver.passthrough.cards import KnownCards, Passthrough
from dra_driver.passthrough.steps import VfioSteps, nvml_wait_s

_RESCAN_S = 10.0


class NodeGpus:
    """Creates the parts for GPUs: `discovery` finds them with `nvml`; claims change them with `mig_devices` and
    `vfio_steps`; `layouts` partitions them as configured.

    MIG and passthrough exist even if they are switched off, because steps of earlier claims may have to be
    undone.
    """

    def __init__(
        self,
        settings: Settings,
        platform: Platform,
        boot_id: str,
        *,
        records: RecordStore,
        ledger: Ledger,
        lanes: Lanes,
        planning: PlanningLock,
        lost_devices: Callable[[], Collection[str]],
        labels: Callable[[], Mapping[str, str] | None],
        is_worker: Callable[[], bool],
        on_inventory: Callable[[], None],
        on_hardware: Callable[[], None],
        on_mig: MigObserver,
        on_layouts: Callable[[Sequence[GpuLayout]], None],
    ) -> None:
        """`lost_devices` returns the devices of claims with a CDI spec and no record; `labels` returns the node's
        labels. `is_worker` returns whether this process is the one that changes GPUs.

        `on_inventory` is called when devices change, `on_hardware` when the NVIDIA driver or the GPUs change.
        """
        paths, directory = platform.paths, settings.plugin_directory
        host = Sysfs(paths.sys, paths.proc)
        self.detachments = detachments = Detachments(directory, boot_id, is_worker=is_worker)
        ownership = LedgerOwnership(ledger)
        by_minor = settings.device_names == "minor"
        self.nvml = NvmlReader(
            detachments.guarded(platform.load_nvml),
            settings.on_demand,
            ownership.foreign_instances,
            UseMark(directory / LOCK_FILE),
            (lambda: held_gpu_names(ledger.known_records())) if by_minor else None,
        )
        session = self.nvml.session

        self.vfio_cards = VfioCards(paths, platform.nodes, platform.pci)
        known = KnownCards(self.vfio_cards, ledger, settings.for_virtual_machines)
        self.passthrough = Passthrough(known)
        self.vfio_steps = VfioSteps(
            self.vfio_cards,
            ledger,
            self.nvml,
            nvml_pause(session, detachments),
            PersistenceModes(lambda: session.operation(nvml_wait_s)),
            self._rescan,
            detachments.detached,
            lanes,
        )
        mig = mig_context(
            session,
            closed_elsewhere(session, detachments, lanes.refuse_other_hangs),
            ledger,
            MigHolders(records, lost_devices),
            on_mig,
        )
        self.mig_mode = MigMode(mig)
        self.mig_devices = MigDevices(mig, self.mig_mode, paths.proc)
        self.driver_root = DriverRoot(paths, nodes=platform.nodes, hook=settings.nvidia_cdi_hook_path)
        self.discovery = Discovery(
            self.nvml,
            host,
            on_inventory,
            on_hardware,
            ownership,
            on_hardware,
            detachments,
            self.passthrough.cards,
            self.driver_root,
            None if settings.imex_channel is None else ImexChannelNodes(paths.proc),
        )
        self.layouts = NodeLayouts(
            mig,
            self.mig_devices,
            self.mig_mode,
            lanes,
            planning,
            LayoutFile(directory / LAYOUT_FILE),
            settings.mig_layouts,
            labels=labels,
            inventory=self.discovery.latest,
            is_on_demand=settings.on_demand or (lambda _gpu: False),
            rescan=partial(self.discovery.scan_now, _RESCAN_S),
            on_change=on_layouts,
        )

    def _rescan(self, wait_s: float | None) -> None:
        """Start a scan, and wait up to `wait_s` seconds for its end; None does not wait."""
        if wait_s is None:
            self.discovery.request_rescan()
        else:
            self.discovery.scan_now(wait_s)


def tools_seen(
    programs: InstalledPrograms, mps_lock: Path, request: Path, host: Sysfs, detachments: Detachments
) -> Hashable:
    """Return a value that changes when nvidia-smi, the MPS host or the NVIDIA driver appears, disappears or is
    replaced, when NVML may be opened again, and when a command has written the file `request`.
    """
    try:
        smi = programs().paths.get(SMI_PROGRAM)
    except StateError:
        smi = None
    stamp = None if smi is None else stamp_or_none(smi)
    return (
        stamp,
        stamp_or_none(mps_lock),
        stamp_or_none(request),
        host.loaded_driver(),
        detachments.detached() is None,
    )
