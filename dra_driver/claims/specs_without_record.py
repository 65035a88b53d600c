"""CDI specs without a record: all that is left of a claim whose record was lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dra_driver.base.fields import NewerFormatError
from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.rules.spec import SpecDevice, devices_of
from dra_driver.journal.records import STEP, RecordStore
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import maintenance_of


class SpecsWithoutRecord:
    """The pod of a claim whose record is unreadable may still run."""

    def __init__(self, records: RecordStore, specs: CdiDirectory) -> None:
        self._records = records
        self._specs = specs

    def lost(self, records: Mapping[str, ClaimRecord]) -> Mapping[str, Sequence[SpecDevice]]:
        """Return the devices of each claim whose record was set aside, by UID: from the CDI spec, or else
        from a newer release's record.
        """
        if not self._records.quarantined():
            return {}
        newer = {uid: _devices_in(found.newer) for uid, found in self._records.newer().items()}
        return newer | {uid: devices_of(uid, self._specs.read(uid)) for uid in self._with_spec(records)}

    def lost_devices(self) -> set[str]:
        lost = self.lost(self._records.all()).values()
        return {device.device for devices in lost for device in devices if not device.admin_access}

    def uids(self) -> Collection[str]:
        """Return the claims without a readable record that have not ended: with a spec, or an unreadable
        record in place.
        """
        records = self._records.all()
        return self._with_spec(records) | self._records.in_place().keys()

    def unrecorded(self, records: Mapping[str, ClaimRecord]) -> Collection[str]:
        """Return the claims with a spec and no record, not even one that was set aside."""
        set_aside = {path.name.partition(".json")[0] for path in self._records.quarantined()}
        return self._with_spec(records) - set_aside

    def _with_spec(self, records: Mapping[str, ClaimRecord]) -> frozenset[str]:
        return self._specs.uids() - records.keys()


def _devices_in(newer: NewerFormatError | None) -> Sequence[SpecDevice]:
    """Return the devices as far as this release understands the record."""
    devices = newer.document.get("devices") if newer is not None else None
    maintenance = maintenance_of(STEP.readable(newer, "steps"))
    return [
        SpecDevice(
            one["device"],
            one.get("shareID"),
            one.get("adminAccess") is True,
            in_maintenance=() if maintenance is None else maintenance.gpu_uuids,
        )
        for one in (devices if isinstance(devices, list) else ())
        if isinstance(one, dict) and isinstance(one.get("device"), str)
    ]
