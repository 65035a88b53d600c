"""Reads the usage of GPUs, and finds processes with GPU memory but without a claim or container."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from dra_driver.base.threads import BoundedCall
from dra_driver.model.claim import HeldDevice
from dra_driver.model.dataclass import KW_ONLY, dataclass
from dra_driver.model.gpu import Gpu, GpuMeasure, GpuProcess, GpuUse, ProcessOrigin
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import GpuAddress, MigAddress
from dra_driver.model.problems import NodeProblem
from dra_driver.model.record import ClaimRecord
from dra_driver.nvml.usage_source import UsageSource
from dra_driver.reporting.rules.claim_usage import (
    Made,
    NodeUse,
    Origins,
    device_uses,
    gpu_labels,
    held_devices,
    mig_addresses,
    pod_uses,
    unclaimed,
    unclaimed_text,
)

T = TypeVar("T")
Wanted = Mapping[str, tuple[Collection[MigAddress], float]]
"""By GPU UUID: the MIG devices to read, and the time of the previous reading, in seconds since 1970."""

_WITHIN_S = 0.8
"""Shorter than the time that a scrape waits."""
_APART_S = 0.02
"""How long a GPU may delay the next one: reading at the same time costs more CPU."""


@dataclass(eq=False)
class Usage:
    """Reads GPUs only when a method is called, each in its own thread; thread-safe.

    A GPU whose read hangs is not read again until that read ends. A call waits `within_s` for all GPUs, and omits those
    that do not answer. Raises: StateError.
    """

    source: UsageSource
    inventory: Callable[[], Inventory | None]
    records: Callable[[], Mapping[str, ClaimRecord]]
    made: Made
    origin: Callable[[int], ProcessOrigin]
    _: KW_ONLY
    within_s: float = _WITHIN_S

    def __post_init__(self) -> None:
        self._turn = threading.Lock()
        self._hanging: dict[GpuAddress, BoundedCall[Any]] = {}

    def look(self) -> NodeUse:
        inventory, records = self.inventory() or Inventory(), [*self.records().values()]
        held = held_devices(records)
        addresses = mig_addresses(held, inventory, self.made)
        wanted: dict[str, list[MigAddress]] = {}
        for name, mig in addresses.items():
            wanted.setdefault(held[name].gpu_uuid, []).append(mig)
        gpus = self._ask(
            inventory.gpus, lambda gpu: partial(self.source.read, gpu, tuple(wanted.get(gpu.uuid, ())))
        )
        origins = self._origins(gpus)
        return NodeUse(
            device_uses(records, inventory, addresses, gpus),
            pod_uses(records, addresses, gpus, origins),
            gpus,
            gpu_labels(records, inventory),
            _unclaimed(gpus, held, addresses, origins),
        )

    def unclaimed(self) -> Mapping[str, Sequence[GpuProcess]]:
        inventory, records = self.inventory() or Inventory(), [*self.records().values()]
        held = held_devices(records)
        gpus = self._ask(inventory.gpus, lambda gpu: partial(self.source.read_processes, gpu))
        return _unclaimed(gpus, held, mig_addresses(held, inventory, self.made), self._origins(gpus))

    def measure(self, wanted: Wanted) -> Mapping[str, GpuMeasure]:
        gpus = [gpu for gpu in (self.inventory() or Inventory()).gpus if gpu.uuid in wanted]
        return self._ask(gpus, lambda gpu: partial(self.source.measure, gpu, *wanted[gpu.uuid]))

    def _origins(self, gpus: Mapping[str, GpuUse]) -> Origins:
        pids = {process.pid for use in gpus.values() for process in use.processes or ()}
        return {pid: self.origin(pid) for pid in pids}

    def _ask(self, gpus: Iterable[Gpu], read_of: Callable[[GpuAddress], Callable[[], T]]) -> Mapping[str, T]:
        with self._turn:
            end = time.monotonic() + self.within_s
            hanging = {gpu: call for gpu, call in self._hanging.items() if call.is_running}
            asked: dict[GpuAddress, BoundedCall[T]] = {}
            for gpu in (GpuAddress(gpu.uuid, gpu.pci_bus_id) for gpu in gpus):
                if gpu not in hanging:
                    call = asked[gpu] = BoundedCall(f"NVML (usage of GPU {gpu.uuid})", read_of(gpu))
                    call.start()
                    call.result(_APART_S)
            answers = {
                gpu.uuid: call.result(max(0.0, end - time.monotonic()))[0] for gpu, call in asked.items()
            }
            self._hanging = hanging | asked
            return {uuid: use for uuid, use in answers.items() if use is not None}


def _unclaimed(
    gpus: Mapping[str, GpuUse],
    held: Mapping[str, HeldDevice],
    addresses: Mapping[str, MigAddress],
    origins: Origins,
) -> Mapping[str, Sequence[GpuProcess]]:
    claimed = {
        (one.gpu_uuid, addresses[name].gpu_instance_id if name in addresses else None)
        for name, one in held.items()
    }
    return {
        uuid: unclaimed(uuid, use.processes, claimed, origins)
        for uuid, use in gpus.items()
        if use.processes is not None
    }


_CHECK_S = 60.0
_REPORT_AFTER_S = 600.0


@dataclass(eq=False)
class UnclaimedMemory:
    """Finds processes that stay unclaimed for ten minutes. `look` may raise DraDriverError."""

    look: Callable[[], Mapping[str, Sequence[GpuProcess]]]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._seen: dict[tuple[str, int, str], tuple[float, GpuProcess]] = {}  # since when
        self._look_at = 0.0

    def problems(self) -> Sequence[NodeProblem]:
        now = self.clock()
        if now >= self._look_at:
            unclaimed = self.look()
            self._look_at = now + _CHECK_S
            # Keep what is known about GPUs that did not answer.
            seen = {key: entry for key, entry in self._seen.items() if key[0] not in unclaimed}
            for uuid, processes in unclaimed.items():
                for process in processes:
                    key = uuid, process.pid, process.name
                    seen[key] = self._seen.get(key, (now, process))[0], process
            self._seen = seen
        return [
            NodeProblem(
                "memory-unclaimed",
                unclaimed_text(f"GPU {uuid}", process),
                f"process {process.pid} ({process.name}) on GPU {uuid}",
            )
            for (uuid, *_), (since, process) in self._seen.items()
            if now - since >= _REPORT_AFTER_S
        ]
