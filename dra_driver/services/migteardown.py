"""Taking down what the ledger of MIG devices says is ours.

Where NVML did not say whether it made a GPU instance, none at its slot means little for a while: the entry stays as an
`orphan` without an ID, so that what appears late at exactly that slot is ours and is destroyed by the next try of the
claim or by the keeper.

    creating ──NVML left it open──▶ orphan without ID, awaited ──instance appears──▶ destroyed, entry removed
                                        │        └──its device is made after all──▶ created
                                        └──nothing for 30 s──▶ entry removed

After a crash the 30 s begin anew with the first look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

import structlog

from dra_driver.errors import DeviceBusyError
from dra_driver.model.mig import GpuInstance, OwnedInstance
from dra_driver.model.steps import CreateMig
from dra_driver.services.migports import Hardware, Ledger, Observe, Where

_log = structlog.get_logger(__name__)

_PAUSE_FIRST_S = 0.02
_PAUSE_MOST_S = 0.1
_AWAITED_S = 30.0

TornDown = Literal["destroyed", "gone", "foreign", "awaited"]
"""What became of an instance that was to go; a foreign one is left alone, an awaited one may appear yet."""


class MigTeardown:
    """Destroys instances with their entries. The caller holds the GPU's lock, but for the questions."""

    def __init__(
        self,
        hardware: Hardware,
        ledger: Ledger,
        observe: Observe,
        clock: Callable[[], float],
        pause: Callable[[float], None],
    ) -> None:
        self._hardware = hardware
        self._ledger = ledger
        self._observe = observe
        self._clock = clock
        self._pause = pause
        self._awaited: dict[str, float] = {}  # by device: until when

    @property
    def awaits_some(self) -> bool:
        """Whether any device may appear."""
        until = max(self._awaited.copy().values(), default=None)
        return until is not None and self._clock() < until

    def awaits(self, device: str) -> bool:
        """Whether the device may appear."""
        until = self._awaited.get(device)
        return until is not None and self._clock() < until

    def await_late(self, entry: OwnedInstance) -> None:
        """NVML left open whether it made the instance of an entry. Raises: StateError."""
        self._awaited[entry.device] = self._clock() + _AWAITED_S
        self._ledger.save(replace(entry, phase="orphan"))

    def stop_awaiting(self, device: str) -> None:
        """The device is there now, or its entry is gone."""
        self._awaited.pop(device, None)

    def take_down(self, entry: OwnedInstance, patience_s: float = 0.0) -> TornDown:
        """Compute instance, GPU instance, entry; what is not ours is only forgotten.

        Raises: DeviceBusyError that names the holders, if they are still there after `patience_s` seconds;
        NvmlUnavailableError, DeviceLostError, RetryableError, StateError. The entry stays then.
        """
        began = self._clock()
        try:
            outcome = self._patiently(entry, began + patience_s)
        except Exception as error:
            self._observe("destroy", entry.device, self._clock() - began, error)
            raise
        if outcome == "destroyed":
            self._observe("destroy", entry.device, self._clock() - began, None)
        if outcome != "awaited":
            self.stop_awaiting(entry.device)
        return outcome

    def _patiently(self, entry: OwnedInstance, deadline: float) -> TornDown:
        pause = _PAUSE_FIRST_S
        while True:
            try:
                return self._torn_down(entry)
            except DeviceBusyError:
                if self._clock() + pause > deadline:
                    raise
            self._pause(pause)
            pause = min(2 * pause, _PAUSE_MOST_S)

    def _torn_down(self, entry: OwnedInstance) -> TornDown:
        where = where_of(entry)
        instance = at_slot(entry, self._hardware.instances(*where))
        if instance is None:
            if self._may_come(entry):
                return "awaited"
            self._ledger.delete(entry.device)
            return "gone"
        gpu_instance_id = instance.gpu_instance_id
        inside = self._hardware.compute_instances(*where, gpu_instance_id)
        if not is_ours(entry, instance, inside):
            _log.warning(
                "mig_device_remade",
                device=entry.device,
                gpu_uuid=entry.gpu_uuid,
                gpu_instance_id=gpu_instance_id,
                remedy="somebody else made the instance in the place of ours; it is left alone",
            )
            self._ledger.delete(entry.device)
            return "foreign"
        for compute_instance_id, _ in inside:
            self._hardware.destroy_compute(*where, gpu_instance_id, compute_instance_id)
        self._hardware.destroy(*where, gpu_instance_id)
        self._ledger.delete(entry.device)
        return "destroyed"

    def _may_come(self, entry: OwnedInstance) -> bool:
        """Whether the instance of an entry may appear though it is not there. Without an ID nobody saw it yet."""
        if entry.phase != "orphan" or entry.gpu_instance_id is not None:
            return False
        self._awaited.setdefault(entry.device, self._clock() + _AWAITED_S)
        return self.awaits(entry.device)


def where_of(subject: CreateMig | OwnedInstance) -> Where:
    """The GPU of a step or entry."""
    return (subject.gpu_uuid, subject.pci_bus_id)


def at_slot(entry: OwnedInstance, found: Iterable[GpuInstance]) -> GpuInstance | None:
    """The GPU instance in the place of an entry's."""
    return next((instance for instance in found if instance.slot == entry.slot), None)


def is_ours(entry: OwnedInstance, instance: GpuInstance, inside: Sequence[tuple[int, str]]) -> bool:
    """Whether the instance at an entry's slot, with these compute instances, can be the one of the entry."""
    if entry.gpu_instance_id not in (None, instance.gpu_instance_id):
        return False
    if entry.uuid is None:
        return len(inside) <= 1
    return all(uuid == entry.uuid for _, uuid in inside)
