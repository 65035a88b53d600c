"""The parts that make MIG devices on demand, put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from dra_driver.app.change_table import Change
from dra_driver.base.deadline import seconds_for
from dra_driver.errors import NvmlUnavailableError
from dra_driver.inventory.detachment import Detachments, closed_elsewhere
from dra_driver.journal.cleaner import StepRunner
from dra_driver.journal.locks import GpuLocks
from dra_driver.kube.cluster import node_labels
from dra_driver.mig.devices import MigDevices
from dra_driver.mig.holders import MigHolders
from dra_driver.mig.layout_file import LAYOUT_FILE, LayoutFile
from dra_driver.mig.layouts import NodeLayouts
from dra_driver.mig.mode import MigContext, MigMode
from dra_driver.mig.offer import LedgerOwnership
from dra_driver.model.host import HostPaths
from dra_driver.model.mig import GpuLayout, OwnedInstance
from dra_driver.model.steps import CreateMig, LeaveMigMode
from dra_driver.nvml.mig_changes import MigHardware

if TYPE_CHECKING:
    from dra_driver.app.daemon import Driver
    from dra_driver.nvml.session import NvmlSession

_NVML_S = 30.0
_RESCAN_S = 10.0
LABELS_S = 20.0
"""How old the labels of the node may be."""


def _kept(labels: Callable[[], Mapping[str, str]]) -> Callable[[], Mapping[str, str]]:
    """The labels as they were read last, for as long as no answer is too old: a layout may wait for days."""
    known: tuple[float, Mapping[str, str]] | None = None

    def read() -> Mapping[str, str]:
        nonlocal known
        if known is None or time.monotonic() >= known[0] + LABELS_S:
            known = (time.monotonic(), labels())
        return known[1]

    return read


class MigParts:
    """Devices, mode and layouts. They exist also if MIG on demand is switched off, because earlier claims
    may still have to be taken back."""

    def __init__(
        self,
        driver: Driver,
        paths: HostPaths,
        lost_devices: Callable[[], Collection[str]],
        session: NvmlSession,
        detachments: Detachments,
    ) -> None:
        """Discovery and cleaner are made later."""
        settings, changes, lanes = driver.settings, driver.changes, driver.lanes

        def kept_open() -> AbstractContextManager[None]:
            return session.operation(lambda: seconds_for("wait until NVML is initialised", _NVML_S))

        @contextmanager
        def whole_action() -> Iterator[None]:
            # Forgetting a detail of the ledger needs no NVML. Everything else fails by itself.
            with ExitStack() as held:
                with suppress(NvmlUnavailableError):
                    held.enter_context(kept_open())
                yield

        self._has_layouts = settings.mig_layouts.is_on
        self._ledger = driver.ledger
        self.ownership = LedgerOwnership(driver.ledger)
        context = MigContext(
            MigHardware(kept_open, closed_elsewhere(session, detachments, lanes.refuse_beside_hang)),
            driver.ledger,
            MigHolders(driver.records, lost_devices),
            partial(changes.tell, Change.MIG_DEVICE),
            operation=whole_action,
            clock=time.monotonic,
            pause=time.sleep,
        )
        self.mode = MigMode(context)
        self._devices = MigDevices(context, self.mode, paths.proc)
        self._layout_file = LayoutFile(settings.plugin_directory / LAYOUT_FILE)
        self._layouts = NodeLayouts(
            context,
            self._devices,
            self.mode,
            lanes,
            driver.planning,
            GpuLocks(settings.plugin_directory / "locks", ".layout.lock"),
            self._layout_file,
            settings.mig_layouts,
            labels=_kept(partial(node_labels, driver.client, settings.node_name)),
            inventory=lambda: driver.discovery.latest(),  # noqa: PLW0108  made later
            is_on_demand=settings.on_demand or (lambda _gpu: False),
            leads=driver.leadership.is_ours,
            rescan=lambda: driver.discovery.scan_now(_RESCAN_S),
            on_change=partial(changes.tell, Change.MIG_LAYOUT),
        )

    def start(self) -> None:
        """Begin to bring the node's layout about, if it may have one."""
        if self._has_layouts:
            self._layouts.start()
        else:
            self._layout_file.remove()

    def stop(self) -> None:
        """Look at no layout any more; harmless before `start`."""
        self._layouts.stop()

    def layouts(self) -> Mapping[str, GpuLayout]:
        """What became of the layout on each GPU that it is for, by UUID."""
        return self._layouts.states()

    def refuse_changing(self) -> Callable[[Collection[str]], None] | None:
        """What raises NvmlTransientError while the layout changes one of these GPUs; None on a node without layouts."""
        return self._layouts.refuse_changing if self._has_layouts else None

    def runners(self) -> dict[type, StepRunner]:
        """The runner of each type of step."""
        return {CreateMig: self._devices, LeaveMigMode: self._devices}

    def look_soon(self) -> None:
        """The GPUs, or the claims on them, may be others than before."""
        self._layouts.wake()

    def created_instance(self, device: str) -> OwnedInstance | None:
        """The created instance of a device now; None if there is none."""
        return self._ledger.created_instance(device)

    def uuid_of(self, device: str) -> str | None:
        """The UUID that a device has now."""
        made = self.created_instance(device)
        return None if made is None else made.uuid
