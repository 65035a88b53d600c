"""MIG devices and modes of ours that are not needed any more, such as after a crash or after a process has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import structlog

from dra_driver.errors import DraDriverError
from dra_driver.mig.context import MigContext
from dra_driver.mig.create import MigDevices
from dra_driver.mig.rules.ownership import is_left_over
from dra_driver.model.mig import GpuAddress, OwnedInstance

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class MigCollector:
    """Destroys the devices that no claim and no layout uses, and leaves the MIG modes that no device needs; a `Keeper`
    of the cleaner. It decides from the disk each time, because claims are prepared at the same time, also by a second
    instance of the plugin. `on_change` is called after something changed, or other devices are stuck than before."""

    context: MigContext
    devices: MigDevices
    on_change: Callable[[], None]
    what: str = "the destruction of unused MIG devices"

    def __post_init__(self) -> None:
        self._stuck: dict[str, str] = {}  # why, by device, or by GPU for a mode

    def stuck(self) -> Mapping[str, str]:
        """Devices that should be gone and cannot be destroyed, with the reason. Raises: StateError."""
        left = {entry.device for entry in self._left_over()} if self._stuck else set()
        return {device: reason for device, reason in self._stuck.copy().items() if device in left}

    def gpus(self) -> set[str]:
        """The GPUs on which something is left. Raises: StateError."""
        left = {entry.gpu_uuid for entry in self._left_over()}
        return left | {address.uuid for address in self._unneeded_modes()}

    def put_right(self, gpu_uuid: str) -> None:
        """Clear away what is left on a GPU; its lane runs it. Raises: DraDriverError, after all was tried."""
        before, errors, changed = self.stuck(), list[DraDriverError](), False
        with self.context.operation():
            for entry in self._left_over():
                if entry.gpu_uuid == gpu_uuid:
                    changed |= self._tried(entry.device, partial(self._destroy, entry), errors)
            for address in self._unneeded_modes():
                if address.uuid == gpu_uuid:
                    changed |= self._tried(gpu_uuid, partial(self._leave_mode, address), errors)
        # What becomes stuck takes its place from what is on offer, and nothing else shows that it has.
        if changed or self.stuck().keys() != before.keys():
            self.on_change()
        if errors:
            raise errors[0]

    def _tried(self, subject: str, action: Callable[[], bool], errors: list[DraDriverError]) -> bool:
        """Whether it changed something; a failure goes to `errors` and is logged once for each reason."""
        try:
            changed = action()
        except DraDriverError as error:
            if self._stuck.get(subject) != str(error):
                _log.warning("mig_not_cleared", subject=subject, reason=str(error))
            self._stuck[subject] = str(error)
            errors.append(error)
            return False
        self._stuck.pop(subject, None)
        return changed

    def _left_over(self) -> list[OwnedInstance]:
        entries, boot_id = self.context.ledger.all(), self.context.ledger.boot_id
        users = self.context.users.by_device() if entries else {}
        return [entry for entry in entries.values() if is_left_over(entry, boot_id, users)]

    def _unneeded_modes(self) -> list[GpuAddress]:
        ledger = self.context.ledger
        modes = ledger.owned_modes()
        in_use = {entry.gpu_uuid for entry in ledger.all().values()} if modes else set()
        return [
            GpuAddress(gpu_uuid, mode.pci_bus_id)
            for gpu_uuid, mode in modes.items()
            if gpu_uuid not in in_use
            and (mode.boot_id != ledger.boot_id or not self.context.users.use_others(gpu_uuid))
        ]

    def _destroy(self, entry: OwnedInstance) -> bool:
        # An orphan that a claim wants is in the way of a new one, which needs the MIG mode.
        keeps_mode = entry.device in self.context.users.by_device()
        if not self.devices.destroy(entry.device, entry.gpu, keeps_mode=keeps_mode):
            return False
        _log.info("mig_device_cleared", device=entry.device, gpu_uuid=entry.gpu_uuid)
        return True

    def _leave_mode(self, gpu: GpuAddress) -> bool:
        """A mode of an older boot ended with that boot and is only forgotten."""
        if not self.context.ledger.mode_owned(gpu.uuid):
            self.context.ledger.disown_mode(gpu.uuid)
            return False
        return self.devices.mode.leave_if_idle(gpu)
