"""The parts that make MIG devices on demand, put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from dra_driver.errors import DraDriverError, NvmlUnavailableError
from dra_driver.host.fingerprint import driver_fingerprint
from dra_driver.host.mig_caps import MigCaps
from dra_driver.model.host import HostPaths
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import GpuInstance, OwnedInstance
from dra_driver.model.steps import CreateMig, LeaveMigMode
from dra_driver.nvml.instances import MigHardware
from dra_driver.services.deadlines import seconds_for
from dra_driver.services.executor import StepRunner
from dra_driver.services.migdevices import MigDevices
from dra_driver.services.migkeeper import MigKeeper
from dra_driver.services.migports import Observe
from dra_driver.services.migsteps import MigSteps
from dra_driver.services.migusers import MigUsers
from dra_driver.settings import Settings
from dra_driver.state.formats import NewerFormatError
from dra_driver.state.locks import GpuLocks
from dra_driver.state.migledger import MigLedger
from dra_driver.state.records import RecordStore

_NVML_S = 30.0

Operation = Callable[[Callable[[], float]], AbstractContextManager[None]]
"""Keeps NVML initialised, after a wait of as many seconds as the argument says."""


class MigParts:
    """Ledger, engine, steps and keeper. They are there with MIG on demand switched off too, because claims of
    before may still have to be taken back."""

    def __init__(
        self,
        settings: Settings,
        paths: HostPaths,
        boot_id: str,
        records: RecordStore,
        locks: GpuLocks,
        lost_devices: Callable[[], Collection[str]],
        on_change: Callable[[], None],
        observe: Observe,
        operation: Operation,
    ) -> None:
        def kept_open() -> AbstractContextManager[None]:
            return operation(lambda: seconds_for("wait until NVML is initialised", _NVML_S))

        @contextmanager
        def whole_action() -> Iterator[None]:
            # What has to be forgotten only, as that of an older boot, needs no NVML; the rest tells that it does.
            with ExitStack() as held:
                with suppress(NvmlUnavailableError):
                    held.enter_context(kept_open())
                yield

        self._wanted = settings.dynamic_mig
        self._boot_id = boot_id
        self.ledger = MigLedger(settings.plugin_directory / "mig")
        self._hardware = MigHardware(kept_open)
        users = MigUsers(records, lost_devices)
        self.devices = MigDevices(
            self._hardware, self.ledger, users, boot_id, left_over=self._left_over, observe=observe
        )
        self.keeper = MigKeeper(
            self.devices,
            self._hardware,
            self.ledger,
            users,
            _LocksWithNvml(locks, whole_action),
            boot_id,
            adopt="destroy" if settings.adopt_mig == "destroy" else "leave",
            on_change=on_change,
        )
        caps = MigCaps(paths.proc)
        self._steps = MigSteps(
            self.devices,
            users,
            caps.exist,
            driver_is_gone=lambda: not driver_fingerprint(paths.proc),
            operation=whole_action,
        )

    def open(self) -> None:
        """Make the ledger's directory. Raises: StateError."""
        self.ledger.open(self._boot_id)

    def start(self) -> bool:
        """Start looking after the ledger, if anything is or may come into it; whether it was."""
        wanted = self._wanted or bool(self.ledger.all()) or bool(self.ledger.owned_modes())
        if wanted:
            self.keeper.start()
        return wanted

    def runners(self) -> dict[type, StepRunner]:
        """Who does which step."""
        return {CreateMig: self._steps, LeaveMigMode: self._steps}

    def reconcile(self, inventory: Inventory | None) -> None:
        """The driver was found for the first time or loaded again, which is when others' instances are adopted."""
        if inventory is not None:
            self.keeper.reconcile(inventory)

    def look_soon(self) -> None:
        """The GPUs may be others than before."""
        self.keeper.look_soon()

    def sort_out(self, gpu_uuid: str, existing: Sequence[GpuInstance]) -> tuple[GpuInstance, ...]:
        """Those of a GPU's instances that are not ours to give out."""
        return self.devices.sort_out(gpu_uuid, existing) if existing else ()

    def mode_is_ours(self, gpu_uuid: str) -> bool:
        """Whether we switched the GPU's MIG mode on."""
        return self.ledger.mode_owned_lately(gpu_uuid, self._boot_id)

    def realised(self, device: str) -> OwnedInstance | None:
        """The instance that stands for a device now; None also where only a newer release can tell."""
        with suppress(NewerFormatError):
            return self.devices.realised(device)
        return None

    def uuid_of(self, device: str) -> str | None:
        """The UUID that a device has now."""
        made = self.realised(device)
        return None if made is None else made.uuid

    def minor(self, gpu_uuid: str, pci_bus_id: str | None) -> int | None:
        """The GPU's device minor now, None if it cannot be told."""
        with suppress(DraDriverError):
            return self._hardware.minor(gpu_uuid, pci_bus_id)
        return None

    def claim_gone(self) -> None:
        """A claim was unprepared."""
        self.keeper.claim_gone()

    def _left_over(self) -> None:
        self.keeper.look_soon()


class _LocksWithNvml:
    """The locks of the keeper, which does each of its actions under one: NVML stays initialised meanwhile."""

    def __init__(self, locks: GpuLocks, operation: Callable[[], AbstractContextManager[None]]) -> None:
        self._locks = locks
        self._operation = operation

    @contextmanager
    def hold(self, gpu_uuids: Iterable[str], timeout_s: float) -> Iterator[None]:
        """As GpuLocks.hold."""
        with self._locks.hold(gpu_uuids, timeout_s), self._operation():
            yield
