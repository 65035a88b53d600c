"""The state of a simulated machine: plain values, stored in one JSON file, and functions for its NVLinks."""

from __future__ import annotations

import functools
import json
import operator
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

from dra_driver.model.dataclass import dataclass, field

KEPT_EVENTS = 512
ANY_INSTANCE = 0xFFFFFFFF
NVIDIA = "nvidia"
RUBIN = 13
"""The first architecture with a bank remapper."""
REMOTE_GPU = 0x00
REMOTE_SWITCH = 0x02


@dataclass(slots=True)
class MigProfile:
    """One row of a GPU's MIG table; memory in MiB, placements as (start, size) in memory slices."""

    enum: int
    id: int
    name: str
    slices: int
    max_instances: int
    memory_mib: int
    multiprocessors: int
    copy_engines: int
    decoders: int
    encoders: int
    jpeg: int
    ofa: int
    size: int
    starts: list[int]

    @property
    def placements(self) -> list[tuple[int, int]]:
        return [(start, self.size) for start in self.starts]


@dataclass(slots=True)
class Model:
    """Facts of one product. With `power_min_w` 0 its power limit and clocks cannot be set."""

    name: str
    architecture: int
    compute: list[int]
    multiprocessors: int
    cores: int
    pci_id: int
    memory_bytes: int | None = None
    reserved_bytes: int = 0
    subsystem_id: int = 0
    brand: int = 14
    nvlinks: int = 0
    fabric: bool = False
    ecc: bool = True
    row_remapper: bool = True
    retired_pages: bool = False
    resetless_mig: bool = False
    serial: bool = True
    power_limit_w: int = 400
    power_min_w: int = 100
    graphics_mhz: list[int] = field(default_factory=lambda: [1980, 1755, 1200, 345, 210])
    memory_mhz: list[int] = field(default_factory=lambda: [2619, 1593])
    vbios: str = ""
    events: int = 0
    pci_class: int = 0x030200
    mig: list[MigProfile] = field(default_factory=list)


@dataclass(slots=True)
class ComputeInstance:
    """`index` does not change when other MIG devices come and go, so indexes have gaps."""

    id: int
    index: int
    profile_id: int
    start: int
    size: int
    uuid: str


@dataclass(slots=True)
class GpuInstance:
    id: int
    profile_id: int
    start: int
    size: int
    compute: list[ComputeInstance] = field(default_factory=list)


@dataclass(slots=True)
class Holder:
    pid: int
    name: str
    gpu_instance: int | None = None
    compute_instance: int | None = None
    memory_mib: int = 512
    mps: bool = False
    utilisation: int = 40


def _idle_now() -> list[list[float]]:
    return [[time.time(), 0]]


@dataclass(slots=True)
class Gpu:
    """`driver` is the kernel driver (if that is loaded), `override` the only driver that may bind the GPU, `vfio` the
    number of its vfio device. `loads` has the changes of the utilisation since the NVIDIA driver was loaded: seconds
    since 1970, and percentage. `power_limit_mw` was set; something else may enforce the lower `power_enforced_mw`.
    """

    uuid: str
    model: str
    bus_id: str
    minor: int
    serial: str
    pcie: str
    numa: int = -1
    cpus: str = ""
    memory_numa: int | None = None
    addressing: int | None = None
    module: int | None = None
    chassis: dict[str, Any] = field(default_factory=dict)
    virtualization: int = 0
    drm: int | None = None
    links: list[list[Any]] = field(default_factory=list)
    links_down: list[int] = field(default_factory=list)
    links_unsupported: list[int] = field(default_factory=list)
    nvlink_errors: dict[str, int] = field(default_factory=dict)
    fabric: dict[str, Any] = field(default_factory=dict)
    present: bool = True
    lost: bool = False
    mig_mode: int = 0
    mig_pending: int = 0
    mig_serial: int = 0
    instances: list[GpuInstance] = field(default_factory=list)
    persistence: int = 1
    recovery_action: int = 0
    resets: int = 0
    ecc_uncorrected: int = 0
    ecc_corrected: int = 0
    remapped_rows: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    retired_pending: int = 0
    slowdown: int = 0
    sram_exceeded: bool = False
    memory_unrepairable: bool = False
    bank_remap_pending: bool = False
    repairs_pending: list[int] = field(default_factory=lambda: [0, 0])
    pcie_link: list[int] = field(default_factory=lambda: [16, 16, 5, 5])
    holders: list[Holder] = field(default_factory=list)
    driver: str = NVIDIA
    boot_driver: str = NVIDIA
    override: str = ""
    vfio: int | None = None
    loads: list[list[float]] = field(default_factory=_idle_now)
    power_limit_mw: int | None = None
    power_enforced_mw: int | None = None
    locked_mhz: dict[str, list[int]] = field(default_factory=dict)

    @property
    def busy(self) -> int:
        return min(100, sum(holder.utilisation for holder in self.holders))

    def set_holders(self, holders: list[Holder]) -> None:
        self.holders = holders
        if self.loads[-1][1] != self.busy:
            self.loads.append([time.time(), self.busy])

    def load_at(self, at: float) -> int:
        return int(next((percent for since, percent in reversed(self.loads) if since <= at), 0))

    def busy_s(self, now: float) -> float:
        ends = [since for since, _ in self.loads[1:]] + [now]
        return sum(
            (end - since) * percent / 100 for (since, percent), end in zip(self.loads, ends, strict=True)
        )

    def reset(self) -> None:
        """Apply pending changes, and clear volatile counters."""
        self.recovery_action = self.retired_pending = self.ecc_uncorrected = self.ecc_corrected = 0
        self.remapped_rows[2] = 0
        self.bank_remap_pending, self.repairs_pending, self.nvlink_errors = False, [0, 0], {}
        self.resets += 1
        self.forget_limits()
        self.loads = [[time.time(), self.busy]]

    def forget_limits(self) -> None:
        self.power_limit_mw, self.locked_mhz = None, {}

    def instance(self, gi: int) -> GpuInstance | None:
        return next((item for item in self.instances if item.id == gi), None)

    @property
    def mig_devices(self) -> list[tuple[GpuInstance, ComputeInstance]]:
        found = [(gi, ci) for gi in self.instances for ci in gi.compute]
        return sorted(found, key=lambda pair: pair[1].index)


@dataclass(slots=True)
class Fault:
    """A fault of the next matching NVML calls or writes to sysfs.

    With `blocks_all` no other NVML call of the process returns during the delay, as if a call held the kernel driver's
    lock.
    """

    function: str
    code: int | None = None
    delay_s: float = 0.0
    remaining: int | None = None
    gpu: str | None = None
    blocks_all: bool = False


@dataclass(slots=True)
class Event:
    seq: int
    gpu: str
    type: int
    data: int
    gpu_instance: int = ANY_INSTANCE
    compute_instance: int = ANY_INSTANCE


@dataclass(slots=True)
class Function:
    """A PCI function that is not a GPU, such as an NVSwitch, or a virtual function of the GPU with bus ID `physical`.

    Functions in the slot of a GPU, except virtual ones, are in that GPU's IOMMU group; others may be in that of
    `beside`.
    """

    bus_id: str
    pcie: str
    device: int
    pci_class: int
    numa: int = -1
    driver: str = ""
    physical: str = ""
    vendor: int = 0x10DE
    beside: str = ""
    boot_driver: str = ""
    override: str = ""
    vfio: int | None = None


@dataclass
class State:
    """Values are changed in place only in `Store.change`."""

    machine: str
    version: int
    driver_version: str
    cuda_version: int
    boot_id: str
    models: dict[str, Model]
    gpus: list[Gpu]
    functions: list[Function]
    system: dict[str, Any]
    driver_loaded: bool = True
    driver_loads: int = 1
    device_nodes: str = "real"
    nvlink: dict[str, Any] = field(default_factory=dict)
    fabric: dict[str, Any] = field(default_factory=dict)
    missing_functions: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    event_seq: int = 0
    source: str = ""

    @property
    def branch(self) -> int:
        return int(self.driver_version.partition(".")[0])

    @cached_property
    def by_uuid(self) -> dict[str, Gpu]:
        return {gpu.uuid: gpu for gpu in self.gpus}

    @cached_property
    def present(self) -> list[Gpu]:
        """GPUs on the bus, in NVML's order."""
        return sorted((gpu for gpu in self.gpus if gpu.present), key=lambda gpu: gpu.bus_id)

    @cached_property
    def shown(self) -> list[Gpu]:
        """GPUs that NVML lists, because the NVIDIA driver has bound them."""
        return [gpu for gpu in self.present if gpu.driver == NVIDIA]

    def model_of(self, gpu: Gpu) -> Model:
        return self.models[gpu.model]

    def add_event(self, gpu: Gpu, kind: int, data: int, gi: int | None = None, ci: int | None = None) -> None:
        self.event_seq += 1
        event = Event(
            seq=self.event_seq,
            gpu=gpu.uuid,
            type=kind,
            data=data,
            gpu_instance=ANY_INSTANCE if gi is None else gi,
            compute_instance=ANY_INSTANCE if ci is None else ci,
        )
        self.events = [*self.events[-(KEPT_EVENTS - 1) :], event]


_STATE_FIELDS = tuple(State.__dataclass_fields__)


@functools.cache
def _read_fields(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    return operator.attrgetter(*kind.__slots__)


def _fields_of(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    return dict(zip(kind.__slots__, _read_fields(kind)(value), strict=True))


def encode(state: State) -> str:
    document = {name: getattr(state, name) for name in _STATE_FIELDS}
    return json.dumps(document, default=_fields_of, separators=(",", ":"), check_circular=False)


def _instance(item: dict[str, Any]) -> GpuInstance:
    return GpuInstance(**{**item, "compute": [ComputeInstance(**ci) for ci in item["compute"]]})


def _gpu(item: dict[str, Any]) -> Gpu:
    nested = {
        "instances": [_instance(gi) for gi in item["instances"]],
        "holders": [Holder(**holder) for holder in item["holders"]],
    }
    return Gpu(**{**item, **nested})


def _model(item: dict[str, Any]) -> Model:
    return Model(**{**item, "mig": [MigProfile(**profile) for profile in item["mig"]]})


def decode(text: str | bytes) -> State:
    document = json.loads(text)
    nested = {
        "models": {name: _model(item) for name, item in document["models"].items()},
        "gpus": [_gpu(item) for item in document["gpus"]],
        "functions": [Function(**item) for item in document["functions"]],
        "faults": [Fault(**item) for item in document["faults"]],
        "events": [Event(**item) for item in document["events"]],
    }
    return State(**{**document, **nested})


def switch_links(gpu: Gpu, model: Model, switches: list[str]) -> None:
    gpu.links = [[REMOTE_SWITCH, switches[link % len(switches)]] for link in range(model.nvlinks)]


def wire_pairs(state: State, pairs: dict[str, int]) -> None:
    """Connect GPUs directly: `{"0-1": 2}` means two links between the first two GPUs."""
    for pair, count in pairs.items():
        first, second = (state.gpus[int(position)] for position in pair.split("-"))
        for _ in range(count):
            first.links.append([REMOTE_GPU, second.bus_id])
            second.links.append([REMOTE_GPU, first.bus_id])
    for gpu in state.gpus:
        gpu.links += [[None, None]] * (state.model_of(gpu).nvlinks - len(gpu.links))


def active_links(gpu: Gpu) -> list[tuple[int, int, str | None]]:
    """Return (link, remote type, remote address)."""
    if gpu.lost or not gpu.present:
        return []
    return [
        (number, kind, remote)
        for number, (kind, remote) in enumerate(gpu.links)
        if kind is not None and number not in (*gpu.links_down, *gpu.links_unsupported)
    ]


def nvlink_count(state: State, first: Gpu, second: Gpu) -> int:
    """Return the number of NVLinks between two GPUs; through switches, that of the GPU with fewer links."""
    ours, theirs = active_links(first), active_links(second)
    direct = sum(kind == REMOTE_GPU and remote == second.bus_id for _, kind, remote in ours)
    if direct:
        return direct
    switched = [sum(kind == REMOTE_SWITCH for _, kind, _ in links) for links in (ours, theirs)]
    if not all(switched) or state.fabric.get("state", 3) != 3:
        return 0
    return min(switched)


def nvlink_peers(state: State, first: Gpu, second: Gpu) -> bool:
    if first.mig_mode or second.mig_mode:
        return False
    return nvlink_count(state, first, second) > 0


def sysfs_bus_id(text_form: str) -> str:
    """Convert `00000000:1B:00.0` and similar forms to `0000:1b:00.0`."""
    domain, _, rest = text_form.strip().lower().rpartition(":")[0].rpartition(":")
    tail = text_form.strip().lower().rpartition(":")[2]
    return f"{domain[-4:].rjust(4, '0') if domain else '0000'}:{rest}:{tail}"


def nvml_bus_id(bus_id: str) -> str:
    return f"0000{bus_id}".upper()


def pci_numbers(bus_id: str) -> tuple[int, int, int]:
    domain, bus, rest = bus_id.split(":")
    return int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16)
