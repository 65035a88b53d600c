"""Which claims use a MIG device that was made on demand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import CreateMig


class Records(Protocol):
    """The claim records."""

    def all(self) -> Mapping[str, ClaimRecord]:
        """Every record by claim UID."""


def _no_devices() -> Collection[str]:
    return ()


class MigUsers:
    """Reads the records anew at each question: the second instance of a rolling update writes them too."""

    def __init__(self, records: Records, lost_devices: Callable[[], Collection[str]] = _no_devices) -> None:
        """`lost_devices` names devices of claims that have a CDI spec but no record any more."""
        self._records = records
        self._lost_devices = lost_devices

    def by_device(self, besides: str | None = None) -> Mapping[str, str]:
        """One claim in words for each device that a claim uses; `besides` is the UID of one not to count.

        A step counts from the moment its record is written; a held device also where the step is of a kind that
        only another release knows. Raises: StateError.
        """
        users = dict.fromkeys(self._lost_devices(), "a claim whose record was lost")
        for uid, record in self._records.all().items():
            if uid == besides:
                continue
            names = {step.device for step in record.steps if isinstance(step, CreateMig)}
            names |= {held.device for held in record.devices if not held.admin_access}
            users |= dict.fromkeys(names, f"claim {record.ref}")
        return users

    def of(self, device: str, besides: str | None = None) -> str | None:
        """A claim that uses the device, in words; None if none does. Raises: StateError."""
        return self.by_device(besides).get(device)

    def gpu_uuids(self) -> frozenset[str]:
        """The GPUs on which claims use devices that are made on demand. Raises: StateError."""
        return frozenset(
            step.gpu_uuid
            for record in self._records.all().values()
            for step in record.steps
            if isinstance(step, CreateMig)
        )

    def use_others(self, gpu_uuid: str, device: str, besides: str | None = None) -> bool:
        """Whether claims, but for the one with the UID `besides`, use other devices of a GPU that are made on demand
        than this one. Raises: StateError."""
        return any(
            isinstance(step, CreateMig) and step.gpu_uuid == gpu_uuid and step.device != device
            for uid, record in self._records.all().items()
            if uid != besides
            for step in record.steps
        )

    def held_uuids(self) -> frozenset[str]:
        """UUIDs of the devices that claims hold. Raises: StateError."""
        return frozenset(
            held.uuid for record in self._records.all().values() for held in record.devices if held.uuid
        )

    def lost(self) -> frozenset[str]:
        """Names of the devices of claims whose record was lost."""
        return frozenset(self._lost_devices())
