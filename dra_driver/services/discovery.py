"""Keeping a snapshot of the node's devices, with or without a working driver.

The snapshot is level-triggered: a cheap fingerprint of the host is looked at every second, and when it
differs, or when somebody asks, everything is read anew, by one thread and once for all who asked. Where only MIG
devices came or went, a look at those GPUs tells whether they are of our own making, which changes nothing. gRPC
does not wait for this: until NVML answers there is no inventory, and Unprepare works from records alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from dra_driver.errors import DraDriverError, NvmlInUseError, NvmlUnavailableError, StateError
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DiscoveryFault, Inventory
from dra_driver.services.discoveryports import HostTopology, Nvml
from dra_driver.services.ownership import MigOwnership, NothingOwned, Offer
from dra_driver.services.signs import Signs, differs, host_signs

_log = structlog.get_logger(__name__)

_RETRY_FIRST_S = 0.25
_RETRY_MOST_S = 10.0
_LOOK_EVERY_S = 1.0
_HANG_AFTER_S = 10.0
_RESCAN_EVERY_S = 60.0
_RESCAN_UNREAD_S = 10.0


@dataclass(frozen=True, slots=True)
class NvmlState:
    """Whether devices are known; `problem` says why not, as one sentence with the remedy."""

    ready: bool = False
    problem: str | None = "devices have not been discovered yet"


class Discovery:
    """Owns the inventory.

    The callbacks come from the discovery thread: `on_change` after each change; `on_reload` when the driver was
    found for the first time or loaded again; `on_hardware` when NVML shows other GPUs under the same driver, or
    answers again.
    """

    def __init__(
        self,
        nvml: Nvml,
        host: HostTopology,
        on_change: Callable[[], None],
        on_reload: Callable[[], None] = lambda: None,
        ownership: MigOwnership | None = None,
        on_hardware: Callable[[], None] = lambda: None,
    ) -> None:
        self._nvml = nvml
        self._host = host
        self._offer = Offer(ownership or NothingOwned())
        self._on_change = on_change
        self._on_reload = on_reload
        self._on_hardware = on_hardware
        self._inventory: Inventory | None = None
        self._state = NvmlState()
        self._signs: Signs | None = None
        self._driver: str | None = None
        self._has_nvml = False
        self._reopening_is_due = False
        self._turn = threading.Condition()
        self._scans_begun = 0
        self._scans_ended = 0
        self._scan_began_at: float | None = None
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._told: frozenset[DiscoveryFault] = frozenset()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)

    @property
    def inventory(self) -> Inventory | None:
        """The last snapshot; None until NVML answered for the first time."""
        return self._inventory

    @property
    def state(self) -> NvmlState:
        """Whether NVML answers now."""
        return self._state

    def unavailable(self) -> str | None:
        """Why devices cannot be used now; None when they can."""
        return self._state.problem

    def problem(self) -> str | None:
        """As `unavailable`; also that NVML hangs, which does not keep known devices from being prepared."""
        began = self._scan_began_at
        waited = 0.0 if began is None else time.monotonic() - began
        if waited > _HANG_AFTER_S:
            return (
                f"NVML has not answered for {waited:.0f} s; look for Xid errors in the kernel log, "
                "a GPU may need a reset"
            )
        return self._state.problem

    def start(self) -> None:
        """Begin discovering in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Stop and shut NVML down."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)
        self._nvml.close()

    def request_rescan(self) -> None:
        """Have everything read anew soon."""
        self._wake.set()

    def scan_now(self, timeout_s: float) -> None:
        """Have everything read anew and wait for it, but no longer than `timeout_s` seconds.

        Callers that come while a scan runs share the next one. NVML's absence becomes the state, no error.
        """
        if self._thread.ident is None:
            self._scan()
            return
        with self._turn:
            wanted = self._scans_begun + 1
            self._wake.set()
            self._turn.wait_for(lambda: self._scans_ended >= wanted or self._stopping.is_set(), timeout_s)

    def _run(self) -> None:
        retry = _RETRY_FIRST_S
        last_scan = 0.0
        while not self._stopping.is_set():
            now = time.monotonic()
            asked = self._wake.is_set()
            self._wake.clear()
            overdue = asked or now - last_scan >= self._rescan_every_s() or not self._state.ready
            if self._scan_guarded(overdue):
                last_scan = time.monotonic()
            if self._state.ready:
                retry = _RETRY_FIRST_S
                self._wake.wait(_LOOK_EVERY_S)
            else:
                self._wake.wait(retry)
                retry = min(retry * 2, _RETRY_MOST_S)

    def _scan_guarded(self, overdue: bool) -> bool:
        """Scan if that is overdue or the host changed; returns whether it was tried.

        A surprise must not end the thread that all later scans come from.
        """
        try:
            if not overdue and not self._has_changed():
                return False
            self._scan()
        except Exception:  # noqa: BLE001
            _log.exception("discovery_failed")
            self._state = NvmlState(False, "discovery failed unexpectedly; see the log")
        return True

    def _rescan_every_s(self) -> float:
        return _RESCAN_UNREAD_S if self._inventory is not None and self._inventory.unread else _RESCAN_EVERY_S

    def _has_changed(self) -> bool:
        """Whether there are signs of anything but MIG devices that we made or destroyed."""
        before, now = self._signs, host_signs(self._host)
        if before is None or self._reopening_is_due:
            return True
        try:
            if self._has_nvml:
                now = replace(now, pulse=self._nvml.pulse())
            if now == before:
                return False
            changed = now.partitions_changed(before)
            if changed is None or not self._is_all_ours(changed):
                return True
        except DraDriverError:
            return True
        self._signs = now
        return False

    def _is_all_ours(self, gpu_uuids: frozenset[str]) -> bool:
        """Whether the offer of these GPUs is what it was. Raises: DraDriverError."""
        known = {gpu.uuid: gpu for gpu in (self._inventory or Inventory()).gpus}
        if self._inventory is None or self._inventory.unread & gpu_uuids:
            return False
        return all(
            uuid in known
            and known[uuid].partitioning is not None
            and self._offer.is_unchanged(known[uuid], *self._nvml.read_what_exists(known[uuid]))
            for uuid in gpu_uuids
        )

    def _scan(self) -> None:
        with self._turn:
            self._scans_begun += 1
            number = self._scans_begun
        self._scan_began_at = time.monotonic()
        try:
            self._read_everything()
        finally:
            self._scan_began_at = None
            with self._turn:
                self._scans_ended = number
                self._turn.notify_all()

    def _read_everything(self) -> None:
        signs, before = host_signs(self._host), self._signs
        try:
            if self._wants_new_session(signs) and not self._reopen():
                if before is None or not self._has_nvml:
                    return
                # The session of before shows the hardware of before.
                signs = replace(signs, hardware=before.hardware, driver=before.driver)
            elif not self._has_nvml:
                # Initialising NVML may have loaded it.
                signs = replace(signs, driver=self._host.driver())
            signs = replace(signs, pulse=self._nvml.pulse())
            inventory = self._complete(self._nvml.read_inventory())
        except StateError as error:
            self._without_ledger(error)
            return
        except DraDriverError as error:
            self._without_nvml(error, signs)
            return
        is_loaded = self._driver != signs.driver
        is_other = not self._state.ready or before is None or signs.hardware != before.hardware
        self._signs, self._driver, self._has_nvml = signs, signs.driver, True
        self._became_known(inventory)
        if is_loaded:
            self._on_reload()
        elif is_other:
            self._on_hardware()

    def _wants_new_session(self, now: Signs) -> bool:
        """NVML stays open otherwise: closing it as the last client makes the driver let go of the GPUs, which
        takes seconds to undo and loses compute mode and time slices."""
        before = self._signs
        return (
            not self._has_nvml
            or self._reopening_is_due
            or before is None
            or (now.hardware, now.driver) != (before.hardware, before.driver)
            or None in (before.pulse or ())
            # One that is back shows in a new session only.
            or bool(self._inventory is not None and self._inventory.lost)
        )

    def _reopen(self) -> bool:
        """Whether it could be done; where a change of a GPU is under way it is tried again at the next look."""
        self._reopening_is_due = True
        try:
            self._nvml.reopen()
        except NvmlInUseError as error:
            _log.info("nvml_in_use", reason=str(error))
            return False
        except DraDriverError:
            self._has_nvml = self._reopening_is_due = False
            raise
        self._reopening_is_due = False
        return True

    def _complete(self, inventory: Inventory) -> Inventory:
        """Add what only the host knows, and report PCI functions that NVML does not show.

        Raises: NvmlUnavailableError if the PCI bus has GPUs but NVML shows none: on a fresh node the
        driver's files come before its GPUs are bound, and an empty pool would be a lie.
        """
        gpus = tuple(self._offer.of(self._located(gpu), inventory, self._inventory) for gpu in inventory.gpus)
        shown = {gpu.pci_bus_id for gpu in gpus}
        hidden = sorted(self._host.gpu_functions() - {bus_id for bus_id in shown if bus_id})
        lost = self._lost(gpus)
        if inventory.faults and not gpus and not lost:
            causes = "; ".join(f"{fault.subject}: {fault.text}" for fault in inventory.faults)
            raise NvmlUnavailableError(f"no GPU answers NVML: {causes}")
        if hidden and not gpus and not lost:
            raise NvmlUnavailableError(
                f"NVML shows no GPU, but the PCI bus has {len(hidden)} ({', '.join(hidden)}); they are not bound to "
                "the NVIDIA driver (yet): see the kernel log, or wait for the driver's installer"
            )
        faults = inventory.faults + tuple(
            DiscoveryFault(
                f"PCI function {bus_id}",
                "is an NVIDIA GPU that NVML does not show; it is bound to another driver, "
                "fell off the bus or is drained",
            )
            for bus_id in hidden
        )
        known = self._inventory
        domains = {
            gpu.uuid: known.nvlink_domains[gpu.uuid]
            for gpu in lost
            if known is not None and gpu.uuid in known.nvlink_domains
        }
        return replace(
            inventory,
            gpus=gpus,
            lost=lost,
            faults=faults,
            nvlink_domains={**domains, **inventory.nvlink_domains},
        )

    def _lost(self, shown: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        """GPUs that were known and do not answer, although they are still the NVIDIA driver's. One that was
        drained, pulled or bound to another driver is gone instead."""
        if self._inventory is None:
            return ()
        answering = {gpu.uuid for gpu in shown} | {gpu.pci_bus_id for gpu in shown}
        return tuple(
            gpu
            for gpu in self._inventory.every_gpu
            if gpu.uuid not in answering
            and gpu.pci_bus_id is not None
            and gpu.pci_bus_id not in answering
            and self._host.is_bound(gpu.pci_bus_id)
        )

    def _located(self, gpu: Gpu) -> Gpu:
        if gpu.pci_bus_id is None:
            return gpu
        return replace(
            gpu,
            pcie_root=self._host.pcie_root(gpu.pci_bus_id),
            numa_node=self._host.numa_node(gpu.pci_bus_id),
        )

    def _became_known(self, inventory: Inventory) -> None:
        self._tell_faults(inventory)
        changed = differs(inventory, self._inventory)
        # The inventory comes first: who reads a ready state must not find the devices of before.
        self._inventory = inventory
        self._state = NvmlState(True, None)
        if not changed:
            return
        _log.info(
            "devices_discovered",
            gpus=len(inventory.gpus),
            lost=[gpu.uuid for gpu in inventory.lost],
            devices=sum(1 for _ in inventory.devices()),
            driver_version=inventory.versions.driver,
        )
        self._on_change()

    def _without_ledger(self, error: StateError) -> None:
        """Who made what cannot be told now; the devices that are known are as good as before."""
        _log.error("mig_ledger_unusable", reason=str(error))
        if not self._state.ready:
            self._state = NvmlState(False, str(error))

    def _without_nvml(self, error: DraDriverError, signs: Signs) -> None:
        """A node that has no GPU needs no driver either: it is known to have no devices."""
        self._has_nvml = False
        if not signs.driver:
            self._driver = None  # whatever comes is loaded anew
        if self._host.gpu_functions():
            self._became_unavailable(error)
            return
        self._signs = replace(signs, pulse=None)
        self._became_known(Inventory())

    def _became_unavailable(self, error: DraDriverError) -> None:
        """Devices that were known are withdrawn: they cannot be used without the driver."""
        problem = str(error)
        if self._state.problem != problem:
            _log.warning("nvml_unavailable", reason=problem)
        self._state = NvmlState(False, problem)
        if self._inventory is not None and self._inventory.every_gpu:
            self._inventory = Inventory(self._inventory.versions)
            self._on_change()

    def _tell_faults(self, inventory: Inventory) -> None:
        """Each fault is logged once while it lasts."""
        faults = frozenset(inventory.faults)
        for fault in inventory.faults:
            if fault not in self._told:
                _log.warning("discovery_fault", subject=fault.subject, reason=fault.text)
        self._told = faults
