"""The signs by which discovery sees, every second, whether it has to look again, and at what."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import Inventory
from dra_driver.model.pulse import Pulse


class SignSource(Protocol):
    """The host."""

    def hardware(self) -> Hashable:
        """A value that differs when a GPU or a PCI function of NVIDIA's came or went."""

    def driver(self) -> str:
        """A value that differs when another driver was loaded; empty while none is."""

    def instances(self) -> Mapping[int, Hashable]:
        """By the minor number of a GPU, a value that differs when a MIG device of it came or went."""


@dataclass(frozen=True, slots=True)
class Signs:
    """What is seen at one moment. `pulse` is None without NVML."""

    hardware: Hashable
    driver: str
    instances: Mapping[int, Hashable]
    pulse: Pulse | None = None

    def partitions_changed(self, before: Signs) -> frozenset[str] | None:
        """The UUIDs of the GPUs on which MIG mode or instances differ; None where anything else differs too, or
        it cannot be told on which GPU."""
        if self.pulse is None or before.pulse is None:
            return None
        if (self.hardware, self.driver) != (before.hardware, before.driver):
            return None
        now = {beat.uuid: beat for beat in self.pulse if beat is not None}
        then = {beat.uuid: beat for beat in before.pulse if beat is not None}
        if [beat and beat.uuid for beat in self.pulse] != [beat and beat.uuid for beat in before.pulse]:
            return None
        changed = {uuid for uuid, beat in now.items() if beat != then[uuid]}
        for minor in self.instances.keys() | before.instances.keys():
            if self.instances.get(minor) == before.instances.get(minor):
                continue
            owners = {beat.uuid for beat in (*now.values(), *then.values()) if beat.minor == minor}
            if not owners:
                return None
            changed |= owners
        return frozenset(changed)


def host_signs(host: SignSource) -> Signs:
    """What the host shows now, without NVML."""
    return Signs(host.hardware(), host.driver(), host.instances())


def differs(now: Inventory, before: Inventory | None) -> bool:
    """Whether there is something else to tell: all but the minor number of GPUs that are cut on demand, which
    their mode changes and which is read anew where it is needed."""
    return before is None or _told(now) != _told(before)


def _told(inventory: Inventory) -> Inventory:
    return replace(
        inventory,
        gpus=tuple(map(_without_minor, inventory.gpus)),
        lost=tuple(map(_without_minor, inventory.lost)),
    )


def _without_minor(gpu: Gpu) -> Gpu:
    return gpu if gpu.partitioning is None else replace(gpu, minor=None)
