"""Which claims use a MIG device that is made on demand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from dra_driver.journal.records import RecordStore
from dra_driver.model.record import CreateMig


@dataclass(eq=False)
class MigHolders:
    """Reads the records anew for each question, because the second instance of a rolling update writes them too.

    `lost_devices` names the devices of claims that still have a CDI spec but no record.
    """

    records: RecordStore
    lost_devices: Callable[[], Collection[str]]

    def by_device(self) -> Mapping[str, str]:
        """For each device that a claim uses, one such claim in words.

        A device is in use from the moment at which the record with its step is written. Raises: StateError.
        """
        users = dict.fromkeys(self.lost_devices(), "a claim whose record was lost")
        for record in self.records.all().values():
            names = {step.device for step in record.steps if isinstance(step, CreateMig)}
            names |= {held.device for held in record.devices if not held.admin_access}
            users |= dict.fromkeys(names, f"claim {record.ref}")
        return users

    def on_gpu(self, gpu_uuid: str, gpu_name: str, boot_id: str) -> str | None:
        """A claim that holds the GPU, or a MIG device of it, in words; None if none does. A reboot ends MIG devices, so
        one that was not prepared anew in this boot holds none. Raises: StateError."""
        for record in self.records.all().values():
            is_held = any(
                held.gpu_uuid == gpu_uuid and (held.kind == "gpu" or record.boot_id == boot_id)
                for held in record.devices
                if not held.admin_access
            )
            if is_held:
                return f"claim {record.ref}"
        if any(f"{name}-".startswith(f"{gpu_name}-") for name in self.lost_devices()):
            return "a claim whose record was lost"
        return None
