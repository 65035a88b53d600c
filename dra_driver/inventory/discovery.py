"""Keeps a snapshot of the node's devices, with or without a working driver.

Every two seconds, one thread checks a cheap fingerprint of the host and of NVML. If it changed, or on request, the
thread reads everything again. If the plugin itself changed the MIG devices, the snapshot stays valid.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

import structlog

from dra_driver.base.backoff import Backoff
from dra_driver.base.threads import BackgroundWorker
from dra_driver.errors import (
    DraDriverError,
    NvmlDetachedError,
    NvmlInUseError,
    NvmlLibraryError,
    NvmlPausedError,
    NvmlUnavailableError,
    StateError,
)
from dra_driver.host.driver_root import DriverRoot
from dra_driver.host.imex import ImexChannelNodes
from dra_driver.host.sysfs import Sysfs
from dra_driver.inventory.detachment import Detachments
from dra_driver.inventory.rules.assembly import (
    HardwareFingerprint,
    assembled,
    differs,
    is_other_hardware,
    is_other_nvlink,
    repartitioned_gpus,
    unanswering,
    with_nvlink_domains,
    with_unready_since,
)
from dra_driver.mig.offer import MigOffer, MigOwnership
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.gpu import Card, Gpu
from dra_driver.model.health import PolledHealth
from dra_driver.model.host import HostFingerprint
from dra_driver.model.inventory import DiscoveryFault, Inventory
from dra_driver.model.maintenance import Detachment
from dra_driver.model.problems import NodeProblem
from dra_driver.nvml.reader import NvmlReader

_log = structlog.get_logger(__name__)

_RETRY_FIRST_S = 0.25
_RETRY_MAX_S = 5.0
_CHECK_EVERY_S = 2.0
_HANG_AFTER_S = 30.0
_CLOSING_S = 3.0
_PAUSE_POLL_S = 0.1
_RESCAN_EVERY_S = 120.0
"""For what neither the fingerprint nor a health poll shows, such as the files of the NVIDIA driver."""
_RESCAN_INCOMPLETE_S = 10.0
_DRIVER_FILES = "NVIDIA driver"
NOT_DISCOVERED = "devices have not been discovered yet"


@dataclass(eq=False)
class Discovery:
    """Owns the inventory.

    The callbacks run in the discovery thread: `on_reload` when the NVIDIA driver is found or was reloaded,
    `on_hardware` when NVML lists different GPUs under the same driver, or answers again.

    During a pause or a maintenance claim, NVML is closed and the inventory keeps its devices. `cards` returns the GPUs
    for virtual machines, given the GPUs that NVML lists.
    """

    nvml: NvmlReader
    host: Sysfs
    on_change: Callable[[], None]
    on_reload: Callable[[], None]
    ownership: MigOwnership | None
    on_hardware: Callable[[], None]
    detachments: Detachments | None = None
    cards: Callable[[Sequence[Gpu]], tuple[Card, ...]] = lambda _gpus: ()
    files: DriverRoot | None = None
    imex: ImexChannelNodes | None = None

    def __post_init__(self) -> None:
        self._pauses = 0  # number of NVML pauses at the last check
        self._openings = 0
        self._answering = frozenset[str]()
        self._unsettled: frozenset[str] = frozenset()  # GPUs whose MIG devices changed at the last check
        self._offer = MigOffer(self.ownership)
        # The last snapshot; None until NVML has answered.
        self.inventory: Inventory | None = None
        self._problem: str | None = NOT_DISCOVERED
        self._was_available = False
        self._fingerprint: HardwareFingerprint | None = None
        self._driver: str | None = None
        self._has_nvml = False
        self._reopening_is_due = False
        self._turn = threading.Condition()
        self._scans_wanted = 0
        self._scans_begun = 0
        self._scans_ended = 0
        self._scan_began_at: float | None = None
        self._in_use: str | None = None
        self._last_scan = 0.0
        self._backoff = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
        self._logged_faults: frozenset[DiscoveryFault] = frozenset()
        self._is_started = False
        self.gpus_in_maintenance: Collection[str] = ()
        """The GPUs of the maintenance claim for which NVML was closed, until NVML has been read after that."""
        self._worker = BackgroundWorker("discovery", self._look, self._crashed)

    def latest(self) -> Inventory | None:
        return self.inventory

    def driver_version(self) -> str | None:
        return self.inventory.versions.driver if self.inventory else None

    @property
    def has_scanned(self) -> bool:
        return self._scans_ended > 0

    def unavailable(self) -> str | None:
        return self._problem

    def problem(self) -> str | None:
        """Return why devices cannot be used, or that NVML hangs, which does not keep known devices from being
        prepared.
        """
        began = self._scan_began_at
        waited = max(0.0 if began is None else time.monotonic() - began, self.nvml.session.change_lasts_s())
        if waited <= _HANG_AFTER_S:
            return self._problem
        return (
            f"NVML has not answered for {waited:.0f} s; a GPU may need a reset: check the "
            "kernel log for Xid errors"
        )

    def problems(self) -> Sequence[NodeProblem]:
        found = [NodeProblem("driver-files-missing", fault.text) for fault in self._driver_file_faults()]
        unavailable, problem = self._problem, self.problem()
        if problem is not None and problem != NOT_DISCOVERED:
            waits = problem == unavailable and not self._was_available and self._detached() is None
            found.append(NodeProblem("waiting-for-driver" if waits else "gpus-unavailable", problem))
        return found

    def start(self) -> None:
        self._is_started = True
        self._want_scan()
        self._worker.start()

    def stop(self) -> None:
        self._worker.stop()
        self.nvml.session.close()

    def request_rescan(self) -> None:
        with self._turn:
            self._want_scan()

    def health_polled(self, gpu_uuid: str, polled: PolledHealth) -> None:
        """Request a scan for different NVLinks or a different fabric. Every poll is compared, so the order of scans and
        polls does not matter.
        """
        if is_other_nvlink(self.inventory, gpu_uuid, polled):
            self.request_rescan()

    def scan_now(self, timeout_s: float) -> None:
        """Scan now, and wait up to `timeout_s` seconds. Callers that arrive during a scan share the next one."""
        if not self._is_started:
            self._scan()
            return
        with self._turn:
            wanted = self._want_scan()
            self._turn.wait_for(lambda: self._scans_ended >= wanted or self._worker.is_stopping, timeout_s)

    def _want_scan(self) -> int:
        """Return the number of the next scan. The caller holds `_turn` once the thread runs."""
        self._scans_wanted = self._scans_begun + 1
        self._worker.wake()
        return self._scans_wanted

    def _detached(self) -> Detachment | None:
        return None if self.detachments is None else self.detachments.last_known()

    def _is_paused(self) -> bool:
        return self.detachments is not None and self.detachments.paused()

    def _look(self) -> float:
        if self._is_scan_due() or self._has_changed():
            self._scan()
        return self._pause_s()

    def _crashed(self, _error: Exception) -> float:
        self._problem = "discovery failed unexpectedly; see the log"
        return self._pause_s()

    def _pause_s(self) -> float:
        if self._problem is None or self._detached() is not None:
            self._backoff.reset()
            return _CHECK_EVERY_S
        return self._backoff.step()

    def _driver_file_faults(self) -> list[DiscoveryFault]:
        faults = () if self.inventory is None else self.inventory.faults
        return [fault for fault in faults if fault.subject == _DRIVER_FILES]

    def _is_scan_due(self) -> bool:
        return (
            self._problem is not None
            or self._scans_begun < self._scans_wanted
            or time.monotonic() - self._last_scan >= self._rescan_every_s()
        )

    def _rescan_every_s(self) -> float:
        is_incomplete = self.inventory is not None and (self.inventory.unread or self._driver_file_faults())
        return _RESCAN_INCOMPLETE_S if is_incomplete else _RESCAN_EVERY_S

    def _has_changed(self) -> bool:
        before, now = self._fingerprint, HardwareFingerprint(self.host.fingerprint())
        if before is None or self._reopening_is_due or self._detached() is not None:
            return True
        if self._is_paused() or self.nvml.session.pauses != self._pauses:
            return True
        try:
            if self._has_nvml:
                with self.nvml.session.kept_open():
                    now = replace(now, nvml=self.nvml.nvml_fingerprint())
            changed = frozenset() if now == before else repartitioned_gpus(now, before)
            if changed is None:
                return True
            # The host may list an instance a moment before NVML does, so check changed GPUs once more.
            changed, self._unsettled = changed | self._unsettled, changed
            if changed and not self._is_all_ours(changed):
                return True
        except DraDriverError:
            return True
        self._fingerprint = now
        return False

    def _is_all_ours(self, gpu_uuids: frozenset[str]) -> bool:
        known = {gpu.uuid: gpu for gpu in (self.inventory or Inventory()).gpus}
        if self.inventory is None or self.inventory.unread & gpu_uuids:
            return False
        with self.nvml.session.kept_open():
            return all(
                uuid in known
                and known[uuid].partitioning is not None
                and self._offer.is_unchanged(known[uuid], *self.nvml.read_what_exists(known[uuid]))
                for uuid in gpu_uuids
            )

    def _scan(self) -> None:
        with self._turn:
            self._scans_begun += 1
            number = self._scans_begun
        self._scan_began_at = time.monotonic()
        try:
            while self._wait_for_pause() and not self._read_everything():
                if self._worker.pause(_PAUSE_POLL_S):
                    break
        finally:
            self._scan_began_at, self._last_scan = None, time.monotonic()
            with self._turn:
                self._scans_ended = number
                self._turn.notify_all()

    def _wait_for_pause(self) -> bool:
        """Keep NVML closed until the worker needs no pause. Returns False if it cannot be closed now, or when
        stopping.
        """
        if not self._is_paused():
            return True
        try:
            with self.nvml.session.closed(lambda: _CLOSING_S):
                while self._is_paused() and not self._worker.pause(_PAUSE_POLL_S):
                    pass
        except NvmlInUseError as error:
            self._log_in_use(error)
            return False
        return not self._worker.is_stopping

    def _read_everything(self) -> bool:
        """Return False if NVML was closed in between, so that the result is unknown."""
        detached = self._detached()
        if detached is not None:
            self._detach(detached)
            return True
        pauses = self.nvml.session.pauses
        host, before = self.host.fingerprint(), self._fingerprint
        try:
            if self._wants_new_session(host) and not self._reopen():
                if before is None or not self._has_nvml:
                    return self.nvml.session.pauses == pauses
                # An old session reports the old hardware.
                host = replace(host, hardware=before.host.hardware, driver=before.host.driver)
            elif not self._has_nvml:
                # Initialising NVML may have loaded the NVIDIA driver.
                host = replace(host, driver=self.host.loaded_driver())
            with self.nvml.session.kept_open():
                seen = HardwareFingerprint(host, self.nvml.nvml_fingerprint())
                read = self.nvml.read_inventory()
            inventory = self._complete(with_nvlink_domains(read))
        except StateError as error:
            self._without_ledger(error)
            return True
        except NvmlPausedError:
            return False
        except DraDriverError as error:
            self._without_nvml(error, host)
            return True
        if self.nvml.session.pauses != pauses:
            return False
        is_loaded = self._driver != host.driver
        is_other = self._problem is not None or before is None or host.hardware != before.host.hardware
        # Settings may have been lost when NVML was closed, or while a GPU did not answer.
        openings = self.nvml.session.openings
        answering = frozenset(gpu.uuid for gpu in inventory.gpus)
        is_kept = openings == self._openings or all(gpu.persistence for gpu in inventory.gpus)
        is_other |= pauses != self._pauses or not is_kept or not answering <= self._answering
        self._pauses, self._openings, self._answering = pauses, openings, answering
        self._fingerprint, self._driver, self._has_nvml = seen, host.driver, True
        self._became_known(inventory)
        if is_loaded:
            self.on_reload()
        elif is_other:
            self.on_hardware()
        return True

    def _detach(self, detached: Detachment) -> None:
        """Close NVML and withdraw the devices.

        A taint is not enough, because a reset or a change of the MIG mode may turn them into other devices. For a
        maintenance claim, its record withdraws only the devices of its GPUs.
        """
        try:
            self.nvml.session.release(detached.problem)
        except NvmlInUseError as error:
            self._log_in_use(error)
            return
        self._has_nvml = False
        self.gpus_in_maintenance = detached.gpu_uuids
        self._became_unavailable(
            NvmlDetachedError(detached.problem), keeps_devices=detached.claim is not None
        )

    def _wants_new_session(self, now: HostFingerprint) -> bool:
        """Whether NVML must be closed and opened again.

        When its last client closes NVML, the NVIDIA driver releases the GPUs, which takes seconds to undo and loses
        compute mode and time slices.
        """
        before = self._fingerprint
        return (
            not self._has_nvml
            or not self.nvml.session.is_open
            or self._reopening_is_due
            or before is None
            or is_other_hardware(now, before.host)
            or before.lost_some
            # A GPU that came back appears only in a new session.
            or bool(self.inventory is not None and self.inventory.lost)
        )

    def _reopen(self) -> bool:
        self._reopening_is_due = True
        try:
            self.nvml.reopen()
        except NvmlInUseError as error:
            self._log_in_use(error)
            return False
        except DraDriverError:
            self._has_nvml = self._reopening_is_due = False
            raise
        self._reopening_is_due, self._in_use = False, None
        return True

    def _log_in_use(self, error: NvmlInUseError) -> None:
        if str(error) != self._in_use:
            _log.info("nvml_in_use", reason=str(error))
        self._in_use = str(error)

    def _complete(self, read: Inventory) -> Inventory:
        before, now = self.inventory, int(time.time())
        located = (self._located(with_unready_since(gpu, before, now)) for gpu in read.gpus)
        gpus = tuple(self._offer.of(gpu, read, before) for gpu in located)
        # A GPU that was drained, pulled or bound to another driver is removed, not lost.
        lost = tuple(
            gpu
            for gpu in unanswering(gpus, before)
            if gpu.pci_bus_id is not None and self.host.is_bound(gpu.pci_bus_id)
        )
        cards = self.cards(gpus)
        found = assembled(read, gpus, lost, _without_bound(self.host.gpu_functions(), cards), before)
        # No container can get a GPU without a minor number. The NVML scan reports the fault.
        usable = tuple(gpu for gpu in found.gpus if gpu.minor is not None)
        found = replace(found, cards=cards, gpus=usable)
        problem = self.files.problem(read.versions.driver) if self.files is not None and found.gpus else None
        if problem is not None:
            fault = DiscoveryFault(_DRIVER_FILES, f"no claim can be prepared: {problem}")
            found = replace(found, faults=(*found.faults, fault))
        channels = None if self.imex is None else self.imex.count()
        return found if channels is None else replace(found, imex_channels=channels)

    def _located(self, gpu: Gpu) -> Gpu:
        if gpu.pci_bus_id is None:
            return gpu
        return replace(
            gpu,
            pcie_root=self.host.pcie_root(gpu.pci_bus_id),
            numa_node=self.host.numa_node(gpu.pci_bus_id),
        )

    def _became_known(self, inventory: Inventory) -> None:
        self._log_faults(inventory)
        changed = differs(inventory, self.inventory)
        # Set the inventory first: a thread that sees no problem must not find the old devices.
        self.inventory = inventory
        self._problem, self.gpus_in_maintenance = None, ()
        self._was_available = True
        if not changed:
            return
        _log.info(
            "devices_discovered",
            gpus=len(inventory.gpus),
            lost=[gpu.uuid for gpu in inventory.lost],
            devices=sum(1 for _ in inventory.devices()),
            driver_version=inventory.versions.driver,
        )
        self.on_change()

    def _without_ledger(self, error: StateError) -> None:
        """Keep the known devices: without the ledger, the owners of MIG devices and cards are unknown."""
        _log.error("ledger_unusable", reason=str(error))
        if self._problem is not None:
            self._problem = str(error)

    def _without_nvml(self, error: DraDriverError, host: HostFingerprint) -> None:
        """Handle unavailable NVML.

        A node without GPUs, or with all GPUs bound to vfio, needs no driver. A driver that is installed but unusable is
        a problem on any node: its GPUs may not be on the bus yet, or hidden from this container.
        """
        self._has_nvml = False
        if not host.driver:
            self._driver = None  # a driver that appears later was loaded after this
        functions, cards = self.host.gpu_functions(), tuple[Card, ...]()
        if functions and not isinstance(error, NvmlLibraryError):
            try:
                cards = self.cards(())
            except StateError as unreadable:
                self._without_ledger(unreadable)
        if _without_bound(functions, cards) or isinstance(error, NvmlLibraryError):
            self._became_unavailable(error)
            return
        self._fingerprint = HardwareFingerprint(host)
        self._became_known(Inventory(cards=cards))

    def _became_unavailable(self, error: DraDriverError, *, keeps_devices: bool = False) -> None:
        problem = str(error)
        if self._problem != problem:
            _log.warning("nvml_unavailable", reason=problem)
        self._problem = problem
        if (
            not keeps_devices
            and self.inventory is not None
            and (self.inventory.every_gpu or self.inventory.cards)
        ):
            self.inventory = Inventory(self.inventory.versions)
            self.on_change()

    def _log_faults(self, inventory: Inventory) -> None:
        faults = frozenset(inventory.faults)
        for fault in inventory.faults:
            if fault not in self._logged_faults:
                _log.warning("discovery_fault", subject=fault.subject, reason=fault.text)
        self._logged_faults = faults


def discover_once(
    nvml: NvmlReader,
    host: Sysfs,
    ownership: MigOwnership | None,
    cards: Callable[[Sequence[Gpu]], tuple[Card, ...]] = lambda _gpus: (),
    *,
    files: DriverRoot | None = None,
    imex: ImexChannelNodes | None = None,
) -> Inventory:
    """Return the inventory as the daemon would see it. NVML stays open. Raises: NvmlUnavailableError."""
    discovery = Discovery(
        nvml, host, _ignored, _ignored, ownership, _ignored, cards=cards, files=files, imex=imex
    )
    discovery.scan_now(0)
    if discovery.inventory is None or discovery.unavailable() is not None:
        raise NvmlUnavailableError(discovery.unavailable() or "devices were not discovered")
    return discovery.inventory


def _without_bound(functions: Collection[str], cards: Sequence[Card]) -> frozenset[str]:
    return frozenset(functions).difference(card.bus_id for card in cards if card.is_bound)


def _ignored() -> None:
    """Ignore the callback."""
