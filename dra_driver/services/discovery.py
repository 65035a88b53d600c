"""Keeping a snapshot of the node's devices, with or without a working driver.

The snapshot is level-triggered: a cheap fingerprint of the host is looked at every second, and when it
differs, or when somebody asks, everything is read anew. gRPC does not wait for this: until NVML answers
there is no inventory, and Unprepare works from records alone.
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
_FINGERPRINT_EVERY_S = 1.0
_RESCAN_EVERY_S = 60.0


class Nvml(Protocol):
    """The NVML session and what is read through it."""

    def reopen(self) -> None:
        """Initialise anew."""

    def close(self) -> None:
        """Shut down."""

    def read_inventory(self) -> Inventory:
        """All GPUs that NVML shows."""

    def pulse(self) -> Hashable:
        """A cheap value that differs when a GPU was lost or changed its MIG mode."""


class HostTopology(Protocol):
    """What the host's sysfs and procfs tell about PCI functions."""

    def pcie_root(self, bus_id: str) -> str | None:
        """`pci0000:16`, or None."""

    def numa_node(self, bus_id: str) -> int | None:
        """The NUMA node, or None."""

    def gpu_functions(self) -> frozenset[str]:
        """Bus IDs of the NVIDIA functions that are display or 3D controllers."""

    def fingerprint(self) -> Hashable:
        """A value that differs when GPUs, MIG devices or the driver came, went or changed."""


@dataclass(frozen=True, slots=True)
class NvmlState:
    """Whether devices are known; `problem` says why not, as one sentence with the remedy."""

    ready: bool = False
    problem: str | None = "devices have not been discovered yet"


class Discovery:
    """Owns the inventory. `on_change` is called after each change, from the discovery thread."""

    def __init__(self, nvml: Nvml, host: HostTopology, on_change: Callable[[], None]) -> None:
        self._nvml = nvml
        self._host = host
        self._on_change = on_change
        self._inventory: Inventory | None = None
        self._state = NvmlState()
        self._fingerprint: Hashable = None
        self._pulse: Hashable = None
        self._has_nvml = False
        self._scan_lock = threading.Lock()
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

    def scan_now(self) -> None:
        """Read everything anew and return when done; NVML's absence becomes the state, not an error."""
        with self._scan_lock:
            fingerprint = self._host.fingerprint()
            try:
                self._nvml.reopen()
                self._pulse = self._nvml.pulse()
                inventory = self._complete(self._nvml.read_inventory())
            except DraDriverError as error:
                self._without_nvml(error, fingerprint)
                return
            self._fingerprint = fingerprint
            self._has_nvml = True
            self._became_known(inventory)

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
                self._wake.wait(_FINGERPRINT_EVERY_S)
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
            self.scan_now()
        except Exception:  # noqa: BLE001
            _log.exception("discovery_failed")
            self._state = NvmlState(False, "discovery failed unexpectedly; see the log")
        return True

    def _host_changed(self) -> bool:
        if self._host.fingerprint() != self._fingerprint:
            return True
        try:
            return self._has_nvml and self._nvml.pulse() != self._pulse
        except DraDriverError:
            return True

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

    def _without_nvml(self, error: DraDriverError, fingerprint: Hashable) -> None:
        """A node that has no GPU needs no driver either: it is known to have no devices."""
        if self._host.gpu_functions():
            self._became_unavailable(error)
            return
        self._fingerprint = fingerprint
        self._has_nvml = False
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
