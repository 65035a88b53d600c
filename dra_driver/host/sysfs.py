"""Reads sysfs and procfs. A value that cannot be read is None or empty."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping
from pathlib import Path

from dra_driver.errors import StateError
from dra_driver.host.rooted_tree import names_in, text_of
from dra_driver.model.host import HostFingerprint, PciFunction

_NVIDIA = "0x10de"
_PCIE_ROOT = re.compile(r"^pci[0-9a-f]{4,8}:[0-9a-f]{2}\Z")
_GPU_UUID = re.compile(r"^GPU UUID:\s+(GPU-[0-9a-f]{8}-\S+)$", re.MULTILINE)
_MODEL = re.compile(r"^Model:\s*(\S.*)$", re.MULTILINE)
_MINOR = re.compile(r"^Device Minor:\s*(\d{1,6})\s*$", re.MULTILINE)
_EXCLUDED = re.compile(r"^GPU Excluded:\s+Yes$", re.MULTILINE)
_DRM_NODE = re.compile(r"^(?:card|renderD)\d+\Z")
_GONE = b"\xff\xff"
_VIRTUAL = "virtual"
_GPU = "gpu"


class Sysfs:
    """Bus IDs are in sysfs form, such as `0000:1b:00.0`."""

    def __init__(self, sys: str = "/sys", proc: str = "/proc") -> None:
        self._sys = Path(sys)
        self._proc = Path(proc)
        self._devices = self._sys / "bus/pci/devices"
        self._vendors: dict[str, str] = {}  # by function, from the last `fingerprint`

    def fingerprint(self) -> HostFingerprint:
        """Return a value that changes with the hardware, the NVIDIA driver and its MIG devices."""
        gpus, functions = names_in(self._proc / "driver/nvidia/gpus"), self._names_of_nvidia()
        # While the kernel waits for a program to close a GPU that is being unbound, the NVIDIA driver still lists the
        # GPU.
        bound = tuple(filter(self.is_bound, functions))
        return HostFingerprint((gpus, functions, bound), self.loaded_driver(), _instances(self._proc))

    def loaded_driver(self) -> str:
        return text_of(self._proc / "driver/nvidia/version")

    def pcie_root(self, bus_id: str) -> str | None:
        """Return the standard attribute pcieRoot, such as `pci0000:00`."""
        try:
            target = self._devices.joinpath(bus_id).readlink()
        except OSError:
            return None
        place = Path(os.path.normpath(self._devices / target))
        try:
            parts = place.relative_to(os.path.normpath(self._sys / "devices")).parts
        except ValueError:
            return None
        if len(parts) < 2 or parts[-1] != bus_id or _PCIE_ROOT.match(parts[0]) is None:
            return None
        return parts[0]

    def numa_node(self, bus_id: str) -> int | None:
        number = _number(self._text(bus_id, "numa_node"), 10)
        return None if number is None or number < 0 else number

    def nvidia_functions(self) -> tuple[PciFunction, ...]:
        """Return all functions in bus order: GPUs, their audio functions, NVSwitches."""
        return tuple(filter(None, (self._nvidia_function(name) for name in names_in(self._devices))))

    def gpus(self) -> list[PciFunction]:
        """Return NVIDIA's display and 3D controllers, bound to a driver or not."""
        return [function for function in self.nvidia_functions() if function.is_gpu]

    def gpu_functions(self) -> frozenset[str]:
        return frozenset(gpu.bus_id for gpu in self.gpus())

    def gpus_of_the_nvidia_driver(self) -> Mapping[str, str | None]:
        """Return UUIDs of GPUs that are bound to the NVIDIA driver, without excluded ones but with lost ones, by bus
        ID.

        The UUID is None if the driver never learned it.
        """
        bound = [item.bus_id for item in self.gpus() if item.driver == "nvidia"]
        information = {bus_id: self._information(bus_id) for bus_id in bound}
        uuids = {
            bus_id: _GPU_UUID.search(text)
            for bus_id, text in information.items()
            if not _EXCLUDED.search(text)
        }
        return {bus_id: None if match is None else match[1] for bus_id, match in uuids.items()}

    def gpu_minor(self, bus_id: str) -> int | None:
        """Return the number of the GPU's device node, which may change with the MIG mode."""
        match = _MINOR.search(self._information(bus_id))
        return None if match is None else int(match[1])

    def product_name(self, bus_id: str) -> str | None:
        match = _MODEL.search(self._information(bus_id))
        return None if match is None else match[1].strip()

    def drm_nodes(self, bus_id: str) -> tuple[str, ...]:
        """Return names in /dev/dri, such as `card1` and `renderD128`."""
        return tuple(name for name in names_in(self._devices / bus_id / "drm") if _DRM_NODE.match(name))

    def answers(self, bus_id: str) -> bool | None:
        """Return False if the function fell off the bus, None if unknown."""
        try:
            with (self._devices / bus_id / "config").open("rb") as config:
                vendor = config.read(len(_GONE))
        except OSError:
            return None
        return None if len(vendor) < len(_GONE) else vendor != _GONE

    def boot_id(self) -> str | None:
        return text_of(self._proc / "sys/kernel/random/boot_id").strip() or None

    def this_boot(self) -> str:
        """Return `boot_id`. Raises: StateError if it cannot be read."""
        found = self.boot_id()
        if found is None:
            raise StateError(
                f"cannot read the ID of this boot from {self._proc}/sys/kernel/random/boot_id, so gpu-dra-driver "
                "cannot know which of its files are from before the last reboot; mount the node's /proc"
            )
        return found

    def _nvidia_function(self, bus_id: str) -> PciFunction | None:
        if self._text(bus_id, "vendor") != _NVIDIA:
            return None
        device = _number(self._text(bus_id, "device"), 16)
        class_code = _number(self._text(bus_id, "class"), 16)
        if device is None or class_code is None:
            return None
        driver, physical = self.bound_driver(bus_id), self._link(bus_id, "physfn")
        return PciFunction(bus_id, int(_NVIDIA, 16), device, class_code, driver, physical)

    def bound_driver(self, bus_id: str) -> str | None:
        """Return the kernel driver, such as `nvidia` or `vfio-pci`."""
        return self._link(bus_id, "driver")

    def is_bound(self, bus_id: str) -> bool:
        return self.bound_driver(bus_id) == "nvidia"

    def _names_of_nvidia(self) -> tuple[str, ...]:
        present = names_in(self._devices)
        # A bus ID that reappears may be a different card.
        self._vendors = {name: self._vendors[name] for name in present if name in self._vendors}
        return tuple(name for name in present if self._vendor(name) == _NVIDIA)

    def _vendor(self, function: str) -> str:
        known = self._vendors.get(function)
        if known is None:
            # Virtual functions (SR-IOV) come and go without affecting NVML.
            is_virtual = (self._devices / function / "physfn").is_symlink()
            known = _VIRTUAL if is_virtual else self._text(function, "vendor")
            if known:
                self._vendors[function] = known
        return known

    def _link(self, bus_id: str, name: str) -> str | None:
        try:
            target = os.readlink(f"{self._devices}/{bus_id}/{name}")  # noqa: PTH115  without Path objects, see `names_in`
        except OSError:
            return None
        return target.rpartition("/")[2]

    def _information(self, bus_id: str) -> str:
        return text_of(self._proc / "driver/nvidia/gpus" / bus_id / "information")

    def _text(self, bus_id: str, name: str) -> str:
        return text_of(self._devices / bus_id / name).strip()


def _number(text: str, base: int) -> int | None:
    try:
        return int(text, base)
    except ValueError:
        return None


def _instances(proc: Path) -> Mapping[int, Hashable]:
    capabilities = f"{proc}/driver/nvidia/capabilities"
    found: dict[int, Hashable] = {}
    for name in names_in(capabilities):
        minor = name.removeprefix(_GPU)
        if minor == name or not minor.isdecimal():
            continue
        instances = f"{capabilities}/{name}/mig"
        shown = tuple((instance, names_in(f"{instances}/{instance}")) for instance in names_in(instances))
        if shown:
            found[int(minor)] = shown
    return found
