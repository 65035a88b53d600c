"""GPUs as PCI functions for virtual machines: their state in sysfs, and the writes that change their driver.

A write may block for as long as a program uses the function, and no signal ends it. A blocked thread would keep all
sockets and locks of a killed daemon open, so a small process does each write. A thread waits for it until the time
limit; `NotAnsweredError.answer` completes if the write ends later.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from dra_driver.base.atomic import Stamp, stamp_or_none
from dra_driver.base.bounded_program import run_program, start_program
from dra_driver.base.threads import bounded
from dra_driver.errors import DeviceBusyError, RetryableError
from dra_driver.host.device_nodes import DeviceNodeReader, DevRoot
from dra_driver.host.processes import users_of
from dra_driver.host.rooted_tree import RootedTree, names_in, text_of
from dra_driver.host.sysfs import Sysfs
from dra_driver.model.dataclass import replace
from dra_driver.model.driver_files import HostNode, exit_text
from dra_driver.model.gpu import VFIO_PCI, Card, is_vfio, uuid_of_bus_id
from dra_driver.model.host import HostPaths, PciFunction
from dra_driver.model.units import counted

NVIDIA = "nvidia"
IOMMU_NODE = "/dev/iommu"
CONTAINER_NODE = "/dev/vfio/vfio"
_BRIDGES = frozenset({0x0600, 0x0604})
"""Bridges keep their kernel driver, and vfio ignores them. NVSwitches have a different class."""
_COMPANIONS = frozenset({0x0403, 0x0C03, 0x0C80})
"""The other functions of a graphics card: audio, USB, and its USB-C controller."""
_KINDS = {
    0x01: "a disk controller",
    0x02: "a network controller",
    0x03: "another GPU",
    0x12: "an accelerator",
}
_BARS = 6
_MEMORY_TYPE, _64_BIT = 0x6, 0x4
_POLL_S = 0.02
_CONTAINER_MODULE = "vfio_iommu_type1"
_CHECK_EXTENSION = 0x3B65
"""VFIO_CHECK_EXTENSION of linux/vfio.h."""
_TYPE1_IOMMU, _TYPE1V2_IOMMU = 1, 3
_WRITE = """
import os, sys
try:
    file = os.open(sys.argv[1], os.O_WRONLY)
    os.write(file, sys.argv[2].encode())
except OSError as error:
    print(error.errno, end="")
else:
    print(0, end="")
"""
"""Prints the error number, 0 for success. The kernel requires a single write."""
_NO_IOMMU = (
    "the kernel has no IOMMU group for it; enable the IOMMU in the firmware, and on Intel processors also add "
    "intel_iommu=on to the kernel's command line"
)
_NOIOMMU_GROUP = "vfio-noiommu"
_VFIO_MODULE = "vfio_pci"
_ALIAS = re.compile(r"^alias vfio_pci:(\S+) (\S+)$", re.MULTILINE)
_FILE = re.compile(r"([^/\s:]+)\.ko(?:\.\w+)?(?=:|$)", re.MULTILINE)


class PciControl(Protocol):
    """The simulator has its own implementation."""

    def write(self, path: str, text: str) -> None:
        """Write to a file of sysfs; may block forever. Raises: OSError."""

    def load_module(self, module: str, timeout_s: float) -> None:
        """Load a module. Raises: OSError, TimeoutError; RetryableError with modprobe's output."""

    def maps_memory(self) -> bool:
        """Whether the kernel can map a virtual machine's memory for an IOMMU group. Raises: OSError."""

    def users_of(self, nodes: Sequence[str], *, others_only: bool = False) -> list[str] | None:
        """Return the programs that have one of these nodes open; None if unknown.

        With `others_only`, leaves out programs that release a GPU on request.
        """


class HostPciControl:
    """`host_root` is where this process sees the host's `/`."""

    def __init__(self, host_root: str) -> None:
        self._root = host_root

    def write(self, path: str, text: str) -> None:
        """Write in a separate process, which outlives this one if the write blocks."""
        writer = start_program(
            [sys.executable, "-I", "-S", "-c", _WRITE, path, text],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said, _ = writer.communicate()
        if writer.returncode == 0 and said.isdecimal():
            number = int(said)
            if number:
                raise OSError(number, os.strerror(number))
            return
        last = said.strip().rpartition("\n")[2] or "it printed nothing"
        raise OSError(
            errno.EIO, f"the process that writes to sysfs failed with {exit_text(writer.returncode)}: {last}"
        )

    def load_module(self, module: str, timeout_s: float) -> None:
        """Run the host's own modprobe, which knows the host's settings."""
        command = ["chroot", self._root, "modprobe", module]
        path = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        code, said = run_program(command, path, timeout_s=timeout_s, slot=f"modprobe {module}")
        if code:
            raise RetryableError(f"modprobe reports {' '.join(said.split())!r} ({exit_text(code)})")

    def maps_memory(self) -> bool:
        """Without the module, the kernel returns 0."""
        file = os.open(CONTAINER_NODE, os.O_RDWR | os.O_CLOEXEC)
        try:
            return any(
                fcntl.ioctl(file, _CHECK_EXTENSION, kind) > 0 for kind in (_TYPE1V2_IOMMU, _TYPE1_IOMMU)
            )
        finally:
            os.close(file)

    def users_of(self, nodes: Sequence[str], *, others_only: bool = False) -> list[str] | None:
        return users_of("/proc", nodes, others_only=others_only)


class VfioCards(Sysfs):
    """Bus IDs are in sysfs form; `wait_s` is a time limit in seconds."""

    def __init__(self, paths: HostPaths, nodes: DeviceNodeReader, control: PciControl) -> None:
        super().__init__(paths.sys, paths.proc)
        self._control = control
        root = paths.host_root or paths.driver_root
        self._modules = VfioModules(root, paths.sys, paths.proc)
        host = DevRoot(replace(paths, dev_root=paths.dev_root or paths.host_root or "/"), nodes)
        self._dev = (host, DevRoot(paths, nodes))

    # --- state -----------------------------------------------------------------------------------

    def cards(self) -> tuple[Card, ...]:
        """Return every NVIDIA GPU on the bus, whatever its driver; `by_us` is not set.

        `gpu_uuid` is the UUID that the NVIDIA driver reported to the kernel, else derived from the bus ID.
        """
        uuids = self.gpus_of_the_nvidia_driver()
        has_iommufd = self.node(IOMMU_NODE) is not None
        return tuple(self._card(function, uuids, has_iommufd) for function in self.gpus())

    def card(self, bus_id: str) -> Card | None:
        return next((card for card in self.cards() if card.bus_id == bus_id), None)

    def node(self, path: str) -> HostNode | None:
        return next((node for dev in self._dev if (node := dev.node(path)) is not None), None)

    def vfio_device(self, bus_id: str) -> str | None:
        """Return for example `vfio3`."""
        return next((name for name in names_in(self._devices / bus_id / "vfio-dev")), None)

    def virtual_functions(self, bus_id: str) -> int:
        """Return how many virtual functions (SR-IOV) the function has.

        Does not read `sriov_numvfs`: older kernels block its readers while the function changes drivers.
        """
        return sum(name.startswith("virtfn") for name in names_in(self._devices / bus_id))

    def gpu_users(self, bus_id: str, *, others_only: bool = False) -> list[str] | None:
        """Return the programs that have the GPU's NVIDIA nodes open, such as `dcgm-exporter (process 812)`; None if
        unknown.
        """
        minor = self.gpu_minor(bus_id)
        if minor is None and self.bound_driver(bus_id) == NVIDIA:
            return None
        nodes = [f"/dev/dri/{name}" for name in self.drm_nodes(bus_id)]
        own = [] if minor is None else [f"/dev/nvidia{minor}"]
        return self._control.users_of([*own, *nodes], others_only=others_only)

    def vm_users(self, card: Card) -> list[str] | None:
        """Return the programs that have a vfio node of the card's group open; None if unknown."""
        own = (self.vfio_device(bus_id) for bus_id in card.functions)
        nodes = [f"/dev/vfio/{card.iommu_group}", *(f"/dev/vfio/devices/{name}" for name in own if name)]
        return self._control.users_of(nodes)

    def closed_by(self, card: Card) -> str | None:
        """Return why a virtual machine cannot open the card's IOMMU group."""
        for bus_id in card.functions:
            driver = self.bound_driver(bus_id)
            if driver is not None and not is_vfio(driver):
                return (
                    f"it is bound to {card.driver}, but PCI function {bus_id} of its IOMMU group is bound to {driver}, "
                    f"so a virtual machine cannot open the group; bind PCI function {bus_id} to vfio-pci too, or "
                    "return the GPU to the NVIDIA driver"
                )
        return None

    def has_driver(self, driver: str) -> bool:
        return self._modules.has_driver(driver)

    # --- changes -------------------------------------------------------------------------------

    def ready_driver(self, bus_id: str, wait_s: float) -> str:
        """Return the function's vfio driver; loads its module if necessary. Raises: RetryableError."""
        module = self._module(bus_id)
        if not self._modules.has_driver(self._modules.driver_of(module)):
            self._load(module, f"PCI function {bus_id}", wait_s)
        driver = self._modules.driver_of(module)
        if not self._modules.has_driver(driver):
            raise RetryableError(
                f"the kernel module {module} is loaded but does not provide the driver {driver}; see the kernel log"
            )
        return driver

    def ready_container(self, wait_s: float | None) -> None:
        """Make sure that the kernel can map a virtual machine's memory through the node of an IOMMU group.

        This requires a separate module; with None as `wait_s`, it must be loaded. Raises: RetryableError.
        """
        if self._maps_memory():
            return
        if wait_s is not None:
            self._load(_CONTAINER_MODULE, "mapping the memory of virtual machines", wait_s)
            if self._maps_memory():
                return
        raise RetryableError(
            "the kernel cannot map the memory of virtual machines: the kernel module "
            f"{_CONTAINER_MODULE} is missing; run `modprobe {_CONTAINER_MODULE}` on the node"
        )

    def _maps_memory(self) -> bool:
        try:
            return self._control.maps_memory()
        except OSError as error:
            raise RetryableError(
                f"cannot open {CONTAINER_NODE}: {error.strerror}; see the kernel log for vfio errors"
            ) from error

    def _load(self, module: str, purpose: str, wait_s: float) -> None:
        try:
            self._control.load_module(module, wait_s)
        except (OSError, TimeoutError, RetryableError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RetryableError(
                f"load the kernel module {module} for {purpose}: {reason}; run `modprobe {module}` on the node"
            ) from error

    def override(self, bus_id: str, driver: str | None, wait_s: float) -> None:
        """Let only this driver bind the function; None allows any. Raises: like `unbind`."""
        action = f"set the driver_override of PCI function {bus_id} to {driver or 'nothing'}"
        self._write(action, f"{self._devices}/{bus_id}/driver_override", f"{driver or ''}\n", wait_s)

    def overridden_by(self, bus_id: str) -> str | None:
        return self._text(bus_id, "driver_override").replace("(null)", "") or None

    def unbind(self, bus_id: str, wait_s: float) -> None:
        """Unbind the function. Raises: NotAnsweredError if the write blocks, DeviceBusyError, RetryableError."""
        driver = self.bound_driver(bus_id)
        if driver is None:
            return
        path = f"{self._sys}/bus/pci/drivers/{driver}/unbind"
        self._write(f"unbind PCI function {bus_id} from {driver}", path, bus_id, wait_s)
        if self.bound_driver(bus_id) == driver:
            raise RetryableError(
                f"unbind PCI function {bus_id} from {driver}: the kernel accepted the request but did not unbind it"
            )

    def bind(self, bus_id: str, driver: str, wait_s: float) -> None:
        """Bind the function. Raises: like `unbind`."""
        if self.bound_driver(bus_id) == driver:
            return
        path = f"{self._sys}/bus/pci/drivers/{driver}/bind"
        self._write(f"bind PCI function {bus_id} to {driver}", path, bus_id, wait_s)

    def probe(self, bus_id: str, wait_s: float) -> None:
        """Let the kernel find a driver; it does not say whether it found one. Raises: like `unbind`."""
        path = f"{self._sys}/bus/pci/drivers_probe"
        self._write(f"find a driver for PCI function {bus_id}", path, bus_id, wait_s)

    def verify(self, card: Card, driver: str, wait_s: float) -> None:
        """Wait until `driver` is bound to the GPU, vfio drivers to the card's other functions, and the group's node
        exists.

        Raises: RetryableError.
        """
        until = time.monotonic() + wait_s
        while (problem := self._not_yet(card, driver)) is not None:
            if time.monotonic() >= until:
                raise RetryableError(f"cannot bind GPU {card.bus_id} to {driver}: {problem}")
            time.sleep(_POLL_S)

    def _not_yet(self, card: Card, driver: str) -> str | None:
        for bus_id in card.functions:
            found = self.bound_driver(bus_id)
            if found not in ({driver} if bus_id == card.bus_id else {driver, VFIO_PCI}):
                return f"PCI function {bus_id} is bound to {found or 'no driver'}; see the kernel log"
        node = f"/dev/vfio/{card.iommu_group}"
        return (
            None if self.node(node) is not None else f"the device node {node} is missing; see the kernel log"
        )

    def _write(self, action: str, path: str, text: str, wait_s: float) -> None:
        try:
            bounded(f"the kernel ({action})", lambda: self._control.write(path, text), wait_s)
        except OSError as error:
            kind = DeviceBusyError if error.errno == errno.EBUSY else RetryableError
            raise kind(f"cannot {action}: {error.strerror}; see the kernel log") from error

    # --- one card ------------------------------------------------------------------------------

    def _card(self, function: PciFunction, uuids: Mapping[str, str | None], has_iommufd: bool) -> Card:
        bus_id = function.bus_id
        group = self._iommu_group(bus_id)
        members = self._members(group) if group.isdecimal() else (bus_id,)
        module = self._module(bus_id)
        card = Card(
            bus_id=bus_id,
            gpu_uuid=uuids.get(bus_id) or uuid_of_bus_id(bus_id),
            device_id=function.device_id,
            iommu_group=int(group) if group.isdecimal() else -1,
            functions=members,
            vfio_driver=self._modules.driver_of(module),
            driver=function.driver,
            has_iommufd=has_iommufd,
            product_name=self.product_name(bus_id),
            addressable_memory=_addressable(self._text(bus_id, "resource")),
            pcie_root=self.pcie_root(bus_id),
            numa_node=self.numa_node(bus_id),
        )
        return replace(card, problem=next(self._problems(card, module), None))

    def _iommu_group(self, bus_id: str) -> str:
        """Return for example `14`; empty if no IOMMU isolates the function."""
        group = self._link(bus_id, "iommu_group") or ""
        name = self._sys / "kernel/iommu_groups" / group / "name"
        return "" if text_of(name).strip() == _NOIOMMU_GROUP else group

    def _members(self, group: str) -> tuple[str, ...]:
        found = names_in(self._sys / "kernel/iommu_groups" / group / "devices")
        return tuple(bus_id for bus_id in found if self._class(bus_id) not in _BRIDGES)

    def _problems(self, card: Card, module: str) -> Iterator[str]:
        if card.iommu_group < 0:
            yield _NO_IOMMU
        for bus_id in card.functions:
            kind = self._class(bus_id)
            is_of_the_card = bus_id.partition(".")[0] == card.bus_id.partition(".")[0]
            if bus_id != card.bus_id and not (is_of_the_card and kind in _COMPANIONS):
                what = _KINDS.get(kind >> 8, f"a function of class 0x{kind:04x}")
                yield (
                    f"its IOMMU group {card.iommu_group} also has PCI function {bus_id} ({what}), which the virtual "
                    "machine would get too; enable ACS in the firmware, or move the card to another slot"
                )
        count = self.virtual_functions(card.bus_id)
        if count:
            has, which = counted(count, "virtual function"), "it" if count == 1 else "them"
            yield f"it has {has} (SR-IOV); remove {which} (`sriov-manage -d {card.bus_id}`)"
        if card.driver not in (None, NVIDIA) and not card.is_bound:
            yield f"it is bound to the kernel driver {card.driver}; unbind it first"
        if not self._modules.has_driver(card.vfio_driver) and not self._modules.is_installed(module):
            yield _missing(module)
        if not card.has_iommufd and not self._modules.is_there(_CONTAINER_MODULE):
            yield _missing(_CONTAINER_MODULE)

    def _module(self, bus_id: str) -> str:
        return self._modules.best_for(self._text(bus_id, "modalias"))

    def _class(self, bus_id: str) -> int:
        """Return base class and subclass, such as 0x0302; 0 if unknown."""
        with suppress(ValueError):
            return int(self._text(bus_id, "class"), 16) >> 8
        return 0


def _missing(module: str) -> str:
    return (
        f"the kernel module {module} is not installed on the node; install the package with the kernel's modules, then "
        f"run `modprobe {module}` there"
    )


def _addressable(resource: str) -> int | None:
    """Return the total size of 64-bit memory regions, rounded up to a power of two."""
    total = 0
    for line in resource.splitlines()[:_BARS]:
        with suppress(ValueError):
            start, end, flags = (int(word, 16) for word in line.split())
            if end > start and flags & _MEMORY_TYPE == _64_BIT:
                total += end - start + 1
    return 1 << (total - 1).bit_length() if total else None


class VfioModules:
    """`root` is the host's `/` as this process sees it."""

    def __init__(self, root: str, sys: str, proc: str) -> None:
        self._root = root
        self._sys = Path(sys)
        self._release = Path(proc, "sys/kernel/osrelease")

    def best_for(self, modalias: str) -> str:
        """Return the most specific module that the kernel lists for this `modalias`."""
        function = modalias.removeprefix("pci:")
        fitting = [
            (-sum(map(pattern.count, "*?[")), module)
            for pattern, module in self._aliases()
            if fnmatchcase(function, pattern)
        ]
        return max(fitting, default=(0, _VFIO_MODULE))[1]

    def driver_of(self, module: str) -> str:
        """Return the module's driver; a guess before the module is loaded."""
        for name in names_in(self._sys / "module" / module / "drivers"):
            if name.startswith("pci:"):
                return name.removeprefix("pci:")
        return VFIO_PCI if module == _VFIO_MODULE else module

    def has_driver(self, driver: str) -> bool:
        return (self._sys / "bus/pci/drivers" / driver).is_dir()

    def is_installed(self, module: str) -> bool:
        """Whether the module can be loaded or is built in."""
        return module in self._named("modules.dep") or module in self._named("modules.builtin")

    def is_there(self, module: str) -> bool:
        return (self._sys / "module" / module).is_dir() or self.is_installed(module)

    def _aliases(self) -> tuple[tuple[str, str], ...]:
        path = self._list("modules.alias")
        return () if path is None else _vfio_aliases(path, stamp_or_none(path))

    def _named(self, name: str) -> frozenset[str]:
        path = self._list(name)
        return frozenset() if path is None else _modules_in(path, stamp_or_none(path))

    def _list(self, name: str) -> str | None:
        tree = RootedTree(self._root)
        found = tree.file(f"/lib/modules/{text_of(self._release).strip()}/{name}")
        return None if found is None else tree.local(found)


# Cached, because each list has about a megabyte, and changes only when a module is installed.
@lru_cache(maxsize=8)
def _vfio_aliases(path: str, _changed: Stamp | None) -> tuple[tuple[str, str], ...]:
    return tuple((found[1], found[2]) for found in _ALIAS.finditer(text_of(path)))


@lru_cache(maxsize=8)
def _modules_in(path: str, _changed: Stamp | None) -> frozenset[str]:
    return frozenset(name.replace("-", "_") for name in _FILE.findall(text_of(path)))
