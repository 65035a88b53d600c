"""Finds CDI specs without a record. Such a spec is all that is left of a claim whose record was lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.rules.spec import SpecDevice, devices_of
from dra_driver.journal.records import RecordStore
from dra_driver.model.record import ClaimRecord


class SpecsWithoutRecord:
    """Compares the CDI directory with the records.

    An unreadable record is set aside. The pod of its claim may still run, but only the claim's CDI spec is
    known.
    """

    def __init__(self, records: RecordStore, specs: CdiDirectory) -> None:
        self._records = records
        self._specs = specs

    def lost(self, records: Mapping[str, ClaimRecord]) -> Mapping[str, Sequence[SpecDevice]]:
        """Return the devices of each claim whose record was lost, by claim UID. They are read from the claim's CDI
        spec.

        Empty while no record is set aside.
        """
        if not self._records.quarantined():
            return {}
        return {uid: devices_of(uid, self._specs.read(uid)) for uid in self._without_record(records)}

    def lost_devices(self) -> set[str]:
        """Return the names of the devices held by claims whose record was lost."""
        lost = self.lost(self._records.all()).values()
        return {device.device for devices in lost for device in devices if not device.admin_access}

    def uids(self) -> Collection[str]:
        """Return the UIDs of the claims that have a spec and no readable record."""
        return self._without_record(self._records.all())

    def unrecorded(self, records: Mapping[str, ClaimRecord]) -> Collection[str]:
        """Return the UIDs of claims that have a spec and no record, not even one that was set aside."""
        set_aside = {path.name.partition(".json")[0] for path in self._records.quarantined()}
        return self._without_record(records) - set_aside

    def _without_record(self, records: Mapping[str, ClaimRecord]) -> frozenset[str]:
        return self._specs.uids() - records.keys()
