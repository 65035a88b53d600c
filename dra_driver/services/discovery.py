"""Keeping a snapshot of the node's devices, with or without a working driver.

The snapshot is level-triggered: a cheap fingerprint of the host is looked at every second, and when it
differs, or when somebody asks, everything is read anew, by one thread and once for all who asked. gRPC does
not wait for this: until NVML answers there is no inventory, and Unprepare works from records alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from dra_driver.errors import DraDriverError, NvmlUnavailableError
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DiscoveryFault, Inventory

_log = structlog.get_logger(__name__)

_RETRY_FIRST_S = 0.25
_RETRY_MOST_S = 10.0
_LOOK_EVERY_S = 1.0
_HANG_AFTER_S = 10.0
_RESCAN_EVERY_S = 60.0


class Nvml(Protocol):
    """The NVML session and what is read through it."""

    def reopen(self) -> None:
        """Initialise anew."""

    def close(self) -> None:
        """Shut down."""

    def read_inventory(self) -> Inventory:
        """All GPUs that NVML shows."""

    def pulse(self) -> tuple[Hashable, ...]:
        """A cheap value that differs when a GPU was lost (None in its place) or changed its MIG mode."""


class HostTopology(Protocol):
    """What the host's sysfs and procfs tell about PCI functions."""

    def pcie_root(self, bus_id: str) -> str | None:
        """`pci0000:16`, or None."""

    def numa_node(self, bus_id: str) -> int | None:
        """The NUMA node, or None."""

    def gpu_functions(self) -> frozenset[str]:
        """Bus IDs of the NVIDIA functions that are display or 3D controllers."""

    def hardware(self) -> Hashable:
        """A value that differs when a PCI function, a GPU or the driver came, went or changed."""

    def instances(self) -> Hashable:
        """A value that differs when a MIG device came or went."""


@dataclass(frozen=True, slots=True)
class NvmlState:
    """Whether devices are known; `problem` says why not, as one sentence with the remedy."""

    ready: bool = False
    problem: str | None = "devices have not been discovered yet"


class Discovery:
    """Owns the inventory.

    Both callbacks come from the discovery thread: `on_change` after each change, `on_reload` when the driver
    was found or loaded again, or the GPUs are others than before.
    """

    def __init__(
        self,
        nvml: Nvml,
        host: HostTopology,
        on_change: Callable[[], None],
        on_reload: Callable[[], None] = lambda: None,
    ) -> None:
        self._nvml = nvml
        self._host = host
        self._on_change = on_change
        self._on_reload = on_reload
        self._inventory: Inventory | None = None
        self._state = NvmlState()
        self._hardware: Hashable = None
        self._instances: Hashable = None
        self._pulse: tuple[Hashable, ...] = ()
        self._has_nvml = False
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
            overdue = asked or now - last_scan >= _RESCAN_EVERY_S or not self._state.ready
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
            if not overdue and not self._host_changed():
                return False
            self._scan()
        except Exception:  # noqa: BLE001
            _log.exception("discovery_failed")
            self._state = NvmlState(False, "discovery failed unexpectedly; see the log")
        return True

    def _host_changed(self) -> bool:
        if (self._host.hardware(), self._host.instances()) != (self._hardware, self._instances):
            return True
        try:
            return self._has_nvml and self._nvml.pulse() != self._pulse
        except DraDriverError:
            return True

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
        hardware, instances = self._host.hardware(), self._host.instances()
        try:
            # NVML stays open otherwise: closing it as the last client makes the driver let go of the GPUs,
            # which takes seconds to undo and loses compute mode and time slices.
            if not self._has_nvml or hardware != self._hardware or None in self._pulse:
                self._has_nvml = False
                self._nvml.reopen()
            pulse = self._nvml.pulse()
            inventory = self._complete(self._nvml.read_inventory())
        except DraDriverError as error:
            self._without_nvml(error, hardware, instances)
            return
        is_reload = not self._state.ready or hardware != self._hardware
        self._hardware, self._instances, self._pulse = hardware, instances, pulse
        self._has_nvml = True
        self._became_known(inventory)
        if is_reload:
            self._on_reload()

    def _complete(self, inventory: Inventory) -> Inventory:
        """Add what only the host knows, and report PCI functions that NVML does not show.

        Raises: NvmlUnavailableError if the PCI bus has GPUs but NVML shows none: on a fresh node the
        driver's files come before its GPUs are bound, and an empty pool would be a lie.
        """
        gpus = tuple(self._located(gpu) for gpu in inventory.gpus)
        shown = {gpu.pci_bus_id for gpu in gpus}
        hidden = sorted(self._host.gpu_functions() - {bus_id for bus_id in shown if bus_id})
        if inventory.faults and not gpus:
            causes = "; ".join(f"{fault.subject}: {fault.text}" for fault in inventory.faults)
            raise NvmlUnavailableError(f"no GPU answers NVML: {causes}")
        if hidden and not gpus:
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
        return replace(inventory, gpus=gpus, faults=faults)

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
        changed = inventory != self._inventory
        # The inventory comes first: who reads a ready state must not find the devices of before.
        self._inventory = inventory
        self._state = NvmlState(True, None)
        if not changed:
            return
        _log.info(
            "devices_discovered",
            gpus=len(inventory.gpus),
            devices=sum(1 for _ in inventory.devices()),
            driver_version=inventory.versions.driver,
        )
        self._on_change()

    def _without_nvml(self, error: DraDriverError, hardware: Hashable, instances: Hashable) -> None:
        """A node that has no GPU needs no driver either: it is known to have no devices."""
        self._has_nvml = False
        if self._host.gpu_functions():
            self._became_unavailable(error)
            return
        self._hardware, self._instances = hardware, instances
        self._became_known(Inventory())

    def _became_unavailable(self, error: DraDriverError) -> None:
        """Devices that were known are withdrawn: they cannot be used without the driver."""
        problem = str(error)
        if self._state.problem != problem:
            _log.warning("nvml_unavailable", reason=problem)
        self._state = NvmlState(False, problem)
        if self._inventory is not None and self._inventory.gpus:
            self._inventory = Inventory(self._inventory.versions)
            self._on_change()

    def _tell_faults(self, inventory: Inventory) -> None:
        """Each fault is logged once while it lasts."""
        faults = frozenset(inventory.faults)
        for fault in inventory.faults:
            if fault not in self._told:
                _log.warning("discovery_fault", subject=fault.subject, reason=fault.text)
        self._told = faults
