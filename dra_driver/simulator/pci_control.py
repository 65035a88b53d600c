"""Writes to a machine's sysfs, which behave as in a real kernel, and may block, fail or have no effect."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

from dra_driver.errors import RetryableError, StateError
from dra_driver.simulator import pci
from dra_driver.simulator.faults import HANG, LATE_USER, NO_EFFECT, code_text
from dra_driver.simulator.library.core import program
from dra_driver.simulator.machine import Machine
from dra_driver.simulator.machine_state import NVIDIA, Fault, Gpu, State

_POLL_S = 0.02
_PERSISTENCED = "nvidia-persistenced (process 801)"
_LATE_PID = 4243
_OURS = ("gpu-dra-driver", "main.py", program())
"""`main.py` is for `python -m dra_driver.cli.main`."""


class SimulatedPciControl:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def write(self, path: str, text: str) -> None:
        """Write to a file of the machine's sysfs. Unbinding blocks while a program uses the GPU. Raises: OSError."""
        try:
            place = Path(path).relative_to(self._machine.host_root / "sys/bus/pci").parts
            match place:
                case ("devices", bus_id, "driver_override"):
                    self._do("driver_override", bus_id, text.strip())
                case ("drivers", driver, "bind" | "unbind" as word):
                    self._do(word, text.strip(), driver)
                case ("drivers_probe",):
                    self._do("drivers_probe", text.strip(), "")
                case _:
                    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        except (ValueError, StateError) as error:  # the path is not of this machine, or the machine is gone
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT)) from error

    def load_module(self, module: str, timeout_s: float) -> None:
        """Raise RetryableError with modprobe's message; TimeoutError."""
        fault = self._fault("modprobe", None)
        if fault is not None and fault.code == HANG:
            time.sleep(timeout_s)
            raise TimeoutError(f"it did not finish within {timeout_s:.3g} s")
        if fault is not None and fault.code != NO_EFFECT:
            raise RetryableError(f"modprobe reports 'ERROR: could not insert {module}: {code_text(fault)}'")
        if fault is None and not self._machine.load_module(module):
            directory = f"/lib/modules/{self._machine.current().system['kernel']}"
            raise RetryableError(
                f"modprobe reports 'FATAL: Module {module} not found in directory {directory}'"
            )

    def maps_memory(self) -> bool:
        return pci.MAPS_MEMORY in self._machine.current().system.get("vfio_loaded", [])

    def users_of(self, nodes: Sequence[str], *, others_only: bool = False) -> list[str] | None:
        """Return each program that has one of these nodes open. Programs with NVML open have the nodes of all GPUs
        open.
        """
        state = self._machine.current()
        groups = pci.groups(state)
        found: list[str] = []
        for gpu in state.present:
            own = {f"/dev/nvidia{gpu.minor}"}
            if gpu.vfio is not None:
                own = {f"/dev/vfio/{groups.get(gpu.bus_id)}", f"/dev/vfio/devices/vfio{gpu.vfio}"}
            if not own.isdisjoint(nodes):
                found += self._users(state, gpu)
        if others_only:
            found = [one for one in found if one != _PERSISTENCED and one.partition(" (")[0] not in _OURS]
        return list(dict.fromkeys(found))

    def _users(self, state: State, gpu: Gpu) -> list[str]:
        found = [f"{holder.name} (process {holder.pid})" for holder in gpu.holders]
        if pci.driver_of(state, gpu.bus_id) == NVIDIA:
            found += [*([_PERSISTENCED] if gpu.persistence else []), *self._machine.clients(with_own=True)]
        return found

    def _do(self, word: str, bus_id: str, driver: str) -> None:
        fault = self._fault(word, bus_id)
        if fault is not None:
            time.sleep(fault.delay_s)
            if fault.code == LATE_USER:
                self._open_late(bus_id)
            while fault.code == HANG and fault in self._machine.current().faults:
                time.sleep(_POLL_S)
            if fault.code == NO_EFFECT:
                return
            if fault.code is not None and fault.code > 0:
                raise OSError(fault.code, os.strerror(fault.code))
        while self._is_leaving(bus_id) or (word == "unbind" and self._is_used(bus_id, driver)):
            time.sleep(_POLL_S)
        self._machine.change_driver(word, bus_id, driver)

    def _is_leaving(self, bus_id: str) -> bool:
        item = pci.functions(self._machine.current()).get(bus_id)
        return item is not None and pci.is_leaving(item)

    def _is_used(self, bus_id: str, driver: str) -> bool:
        state = self._machine.current()
        item = pci.functions(state).get(bus_id)
        has_it = isinstance(item, Gpu) and pci.driver_of(state, bus_id) == driver
        return isinstance(item, Gpu) and has_it and bool(self._users(state, item))

    def _fault(self, word: str, bus_id: str | None) -> Fault | None:
        state = self._machine.current()
        gpu = None if bus_id is None else pci.gpu_of(state, bus_id)
        for fault in state.faults:
            if fault.function == word and fault.gpu in (None, gpu and gpu.uuid):
                counts = fault.remaining is None or fault.code == HANG
                return fault if counts or self._machine.consume_fault(fault) else None
        return None

    def _open_late(self, bus_id: str) -> None:
        gpu = pci.gpu_of(self._machine.current(), bus_id)
        if gpu is not None:
            self._machine.hold_gpu(gpu.uuid, _LATE_PID, "late-user")
