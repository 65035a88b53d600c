"""Destroying the GPU instances that the ledger says are ours.

NVML sometimes leaves open whether it made a GPU instance. Then an empty slot means little for a while: the entry stays
as an `orphan` without an ID. An instance that appears late at exactly that slot is ours, and the next try of the claim
or the collector destroys it.

    creating ──NVML left it open──▶ orphan without ID, expected ──instance appears──▶ destroyed, entry removed
                                        │        └──its device is made after all──▶ created
                                        └──nothing for 30 s──▶ entry removed

After a crash the 30 s begin anew with the first look.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import structlog

from dra_driver.base.backoff import Backoff
from dra_driver.errors import DeviceBusyError
from dra_driver.mig.context import MigContext
from dra_driver.mig.rules.ownership import at_slot, is_ours
from dra_driver.model.mig import OwnedInstance

_log = structlog.get_logger(__name__)

_PAUSE_FIRST_S = 0.02
_PAUSE_MOST_S = 0.1
_EXPECTED_S = 30.0

DestroyOutcome = Literal["destroyed", "gone", "foreign", "expected"]
"""What became of an instance that was to go: `gone` was not there any more, `foreign` is somebody else's and is left
alone, `expected` is not there but may still appear."""


class InstanceDestroyer:
    """Destroys instances with their entries. The caller holds the GPU's lock, but not for the questions."""

    def __init__(self, context: MigContext) -> None:
        self._context = context
        self._hardware = context.hardware
        self._ledger = context.ledger
        self._clock = context.clock
        self._expected_until: dict[str, float] = {}  # by device

    @property
    def expects_any(self) -> bool:
        """Whether the instance of any device may still appear."""
        until = max(self._expected_until.copy().values(), default=None)
        return until is not None and self._clock() < until

    def expects(self, device: str) -> bool:
        """Whether the device's instance may still appear."""
        until = self._expected_until.get(device)
        return until is not None and self._clock() < until

    def expect(self, entry: OwnedInstance) -> None:
        """NVML left open whether it made the entry's instance. Raises: StateError."""
        self._expected_until[entry.device] = self._clock() + _EXPECTED_S
        self._ledger.save(replace(entry, phase="orphan"))

    def stop_expecting(self, device: str) -> None:
        """The device is there now, or its entry is gone."""
        self._expected_until.pop(device, None)

    def destroy(self, entry: OwnedInstance, patience_s: float = 0.0) -> DestroyOutcome:
        """Destroy the compute instance and the GPU instance, then remove the entry. Of a foreign instance only the
        entry is removed.

        Raises: DeviceBusyError that names the holders, if they are still there after `patience_s` seconds;
        NvmlUnavailableError, DeviceLostError, RetryableError, StateError. The entry stays then.
        """
        with self._context.observed("destroy", entry.device) as destroyed:
            outcome = self._destroy_patiently(entry, self._clock() + patience_s)
        if outcome == "destroyed":
            destroyed()
        if outcome != "expected":
            self.stop_expecting(entry.device)
        return outcome

    def _destroy_patiently(self, entry: OwnedInstance, deadline: float) -> DestroyOutcome:
        backoff = Backoff(_PAUSE_FIRST_S, _PAUSE_MOST_S)
        while True:
            pause = backoff.step()
            try:
                return self._destroy(entry)
            except DeviceBusyError:
                if self._clock() + pause > deadline:
                    raise
            self._context.pause(pause)

    def _destroy(self, entry: OwnedInstance) -> DestroyOutcome:
        instance = at_slot(entry, self._hardware.instances(*entry.gpu))
        if instance is None:
            if self._may_appear(entry):
                return "expected"
            self._ledger.delete(entry.device)
            return "gone"
        gpu_instance_id = instance.gpu_instance_id
        inside = self._hardware.compute_instances(*entry.gpu, gpu_instance_id)
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
            self._hardware.destroy_compute(*entry.gpu, gpu_instance_id, compute_instance_id)
        self._hardware.destroy(*entry.gpu, gpu_instance_id)
        self._ledger.delete(entry.device)
        return "destroyed"

    def _may_appear(self, entry: OwnedInstance) -> bool:
        """Whether the entry's instance may still appear. An entry without an ID is of one that nobody has seen yet."""
        if entry.phase != "orphan" or entry.gpu_instance_id is not None:
            return False
        self._expected_until.setdefault(entry.device, self._clock() + _EXPECTED_S)
        return self.expects(entry.device)
