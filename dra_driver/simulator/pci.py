"""Drivers of PCI functions: the kernel's rules for the NVIDIA driver, vfio and others.

Functions that change the state get a private copy of it, and raise an OSError as a write to sysfs does.
"""

from __future__ import annotations

import errno
import os

from dra_driver.simulator.machine_state import NVIDIA, Function, Gpu, State

VFIO_DRIVERS = {"vfio_pci": "vfio-pci", "nvgrace_gpu_vfio_pci": "nvgrace-gpu-vfio-pci"}
"""The driver of each module."""
MAPS_MEMORY = "vfio_iommu_type1"
"""Virtual machines need this module to map memory through the node of an IOMMU group. It is not loaded
automatically.
"""
_BY_CLASS = {0x0403: "snd_hda_intel", 0x0C03: "xhci_hcd"}
_FIRST_GROUP, _FIRST_OTHER_GROUP = 20, 60


def functions(state: State) -> dict[str, Gpu | Function]:
    found: list[Gpu | Function] = [*state.present, *state.functions]
    return {item.bus_id: item for item in found}


def groups(state: State) -> dict[str, int]:
    """Return the IOMMU group of every function by bus ID; empty without an IOMMU."""
    if not state.system.get("iommu", True):
        return {}
    found = {gpu.bus_id: _FIRST_GROUP + index for index, gpu in enumerate(state.present)}
    slots = {bus_id.partition(".")[0]: group for bus_id, group in found.items()}
    for index, item in enumerate(state.functions):
        own = None if item.physical else slots.get(item.bus_id.partition(".")[0])
        found[item.bus_id] = found.get(item.beside, own or _FIRST_OTHER_GROUP + index)
    return found


def gpu_of(state: State, bus_id: str) -> Gpu | None:
    known = groups(state)
    group = known.get(bus_id, bus_id)
    return next((gpu for gpu in state.present if group in (known.get(gpu.bus_id), gpu.bus_id)), None)


def drivers(state: State) -> set[str]:
    modules = state.system.get("vfio_loaded", [])
    loaded = {name for module, name in VFIO_DRIVERS.items() if module in modules}
    others = {item.boot_driver for item in state.functions if item.boot_driver}
    found = loaded | others | {NVIDIA, *_BY_CLASS.values()}
    return {name for name in found if state.driver_loaded or not name.startswith(NVIDIA)}


def driver_of(state: State, bus_id: str) -> str:
    driver = functions(state)[bus_id].driver
    return driver if driver in drivers(state) else ""


def is_leaving(item: Gpu | Function) -> bool:
    """Whether the kernel waits for the virtual machine that has the removed function open. Every write to it waits
    too.
    """
    return item.vfio is not None and not item.driver


def after_boot(state: State) -> None:
    everything = functions(state).values()
    wanted = {item.boot_driver for item in everything}
    state.system["vfio_loaded"] = [
        module
        for module in state.system.get("vfio_modules", [])
        if VFIO_DRIVERS.get(module) in wanted or module in state.system.get("vfio_loaded", [])
    ]
    for item in everything:
        come_up(state, item)


def come_up(state: State, item: Gpu | Function) -> None:
    item.driver, item.override, item.vfio = "", "", None
    if item.boot_driver:
        _take(state, item, item.boot_driver)


def after_load(state: State) -> None:
    for gpu in state.present:
        probe(state, gpu.bus_id)


def override(state: State, bus_id: str, driver: str) -> None:
    _known(state, bus_id).override = driver


def unbind(state: State, bus_id: str, driver: str) -> None:
    item = _known(state, bus_id)
    _registered(state, driver)
    if driver_of(state, bus_id) != driver:
        raise _error(errno.ENODEV)
    item.driver, item.vfio = "", None


def bind(state: State, bus_id: str, driver: str) -> None:
    item = _known(state, bus_id)
    _registered(state, driver)
    if (item.override or _natural(item)) != driver:
        raise _error(errno.ENODEV)
    if driver_of(state, bus_id):
        raise _error(errno.EBUSY)
    _take(state, item, driver)


def probe(state: State, bus_id: str) -> None:
    """Bind the function to a matching driver; like the kernel, do not report the result."""
    item = _known(state, bus_id)
    wanted = item.override or _natural(item)
    if not driver_of(state, bus_id) and wanted in drivers(state):
        _take(state, item, wanted)


def driver_by_class(item: Gpu | Function) -> str:
    return NVIDIA if isinstance(item, Gpu) else _BY_CLASS.get(item.pci_class >> 8, "")


def _natural(item: Gpu | Function) -> str:
    """Return the driver that matches without an override, which is never vfio."""
    is_vfio = item.boot_driver in VFIO_DRIVERS.values()
    return driver_by_class(item) if is_vfio or not item.boot_driver else item.boot_driver


def _take(state: State, item: Gpu | Function, driver: str) -> None:
    item.driver, item.vfio = driver, None
    if driver in VFIO_DRIVERS.values():
        taken = {other.vfio for other in functions(state).values()}
        item.vfio = next(number for number in range(1024) if number not in taken)


def _known(state: State, bus_id: str) -> Gpu | Function:
    found = functions(state).get(bus_id)
    if found is None:
        raise _error(errno.ENODEV)
    return found


def _registered(state: State, driver: str) -> None:
    if driver not in drivers(state):
        raise _error(errno.ENOENT)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
