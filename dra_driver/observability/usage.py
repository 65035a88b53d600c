"""Looks at all GPUs at the same time, in limited time, and puts together how the devices of claims are used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

from dra_driver.concurrency.bounded_call import BoundedCall
from dra_driver.model.gpu import GpuUse
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import GpuAddress, MigAddress
from dra_driver.model.record import ClaimRecord
from dra_driver.observability.rules.usage import (
    Made,
    NodeUse,
    Origin,
    device_uses,
    mig_address,
    unclaimed,
)

_WITHIN_S = 0.8
"""Less than a scrape waits."""


class Usage:
    """Reads nothing unless `look` is called; for many threads. A GPU whose read hangs is not read again until it ends,
    and no later look waits for it."""

    def __init__(
        self,
        read: Callable[[GpuAddress, Collection[MigAddress]], GpuUse],
        inventory: Callable[[], Inventory | None],
        records: Callable[[], Mapping[str, ClaimRecord]],
        made: Made,
        origin: Callable[[int], Origin],
        *,
        within_s: float = _WITHIN_S,
    ) -> None:
        """`read` is called in a thread for each GPU. `within_s` is how long a look waits for all GPUs together."""
        self._read = read
        self._inventory = inventory
        self._records = records
        self._made = made
        self._origin = origin
        self._within_s = within_s
        self._turn = threading.Lock()
        self._calls: dict[GpuAddress, BoundedCall[GpuUse]] = {}
        self._devices: dict[GpuAddress, Collection[MigAddress]] = {}

    def look(self) -> NodeUse:
        """What all GPUs do now. Raises: StateError if the records cannot be read."""
        inventory, records = self._inventory() or Inventory(), [*self._records().values()]
        # A monitor that looks at a GPU (adminAccess) has no memory there that would be a claim's.
        held = {one.device: one for record in records for one in record.devices if not one.admin_access}
        found = {name: mig_address(one, inventory, self._made) for name, one in held.items()}
        addresses = {name: mig for name, mig in found.items() if mig is not None}
        wanted: dict[str, list[MigAddress]] = {}
        for name, mig in addresses.items():
            wanted.setdefault(held[name].gpu_uuid, []).append(mig)
        gpus = self._ask(
            {GpuAddress(gpu.uuid, gpu.pci_bus_id): wanted.get(gpu.uuid, ()) for gpu in inventory.gpus}
        )
        claimed = {
            (one.gpu_uuid, addresses[name].gpu_instance_id if name in addresses else None)
            for name, one in held.items()
        }
        return NodeUse(
            device_uses(records, inventory, addresses, gpus),
            gpus,
            {
                uuid: unclaimed(uuid, use.processes, claimed, self._origin)
                for uuid, use in gpus.items()
                if use.processes is not None
            },
        )

    def _ask(self, wanted: Mapping[GpuAddress, Collection[MigAddress]]) -> Mapping[str, GpuUse]:
        """What the GPUs that answer in time do, by UUID."""
        with self._turn:
            calls = {gpu: call for gpu, call in self._calls.items() if gpu in wanted or call.is_asking}
            asked: dict[str, BoundedCall[GpuUse]] = {}
            for gpu, devices in wanted.items():
                call = calls.setdefault(
                    gpu, BoundedCall(f"NVML about GPU {gpu.uuid}", partial(self._read_one, gpu))
                )
                if not call.is_asking:
                    self._devices[gpu] = devices
                    call.ask()
                    asked[gpu.uuid] = call
            self._calls = calls
            end = time.monotonic() + self._within_s
            answers = {uuid: call.answer(max(0.0, end - time.monotonic()))[0] for uuid, call in asked.items()}
            return {
                uuid: use for uuid, use in answers.items() if use is not None and not asked[uuid].is_asking
            }

    def _read_one(self, gpu: GpuAddress) -> GpuUse:
        return self._read(gpu, self._devices[gpu])
