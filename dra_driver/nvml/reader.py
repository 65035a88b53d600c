"""One NVML session and all that the daemon reads through it. The binding is imported with the first use, because most
commands start without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from dra_driver.base.file_lock import UseMark
from dra_driver.model.gpu import Gpu
from dra_driver.model.host import NvmlFingerprint
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import GpuInstance

if TYPE_CHECKING:
    from dra_driver.nvml.health_source import HealthSource
    from dra_driver.nvml.scan import ScanMemory
    from dra_driver.nvml.usage_source import UsageSource

T = TypeVar("T")


@dataclass(eq=False)
class NvmlReader:
    """NVML as discovery and the commands use it.

    `on_demand` selects the GPUs on which MIG devices are made on demand, where that is possible; None selects none.
    Of the instances on such a GPU `foreign_instances` returns those that someone else made, and only those are read
    in detail; with None all are. Where GPUs are named by minor number, `kept_names` returns the names, by UUID, of
    those that keep theirs; with None they are named by UUID.
    `loader` returns the NVML library, and is asked again at each `reopen`. `mark` is held while NVML is open.
    """

    loader: Callable[[], object]
    on_demand: Callable[[Gpu], bool] | None = None
    foreign_instances: Callable[[str, Sequence[GpuInstance]], Sequence[GpuInstance]] | None = None
    mark: UseMark | None = None
    kept_names: Callable[[], Mapping[str, str]] | None = None

    def __post_init__(self) -> None:
        from dra_driver.nvml.session import NvmlSession

        self.session = NvmlSession(self.loader, mark=self.mark)
        self._memory: ScanMemory | None = None
        self._opening = 0

    def reopen(self) -> None:
        """Initialise again. Raises: NvmlUnavailableError; RetryableError where access is refused; NvmlInUseError, with
        all as it was, while a change of a GPU is under way."""
        self.session.reopen()

    def read_inventory(self) -> Inventory:
        """All GPUs that NVML shows, without NVLink domains. Raises: NvmlUnavailableError; StateError from
        `foreign_instances`."""
        from dra_driver.nvml.scan import read_gpus

        found = read_gpus(self.on_demand, self._known(), self.foreign_instances)
        return found if self.kept_names is None else replace(found, kept_names=self.kept_names())

    def read_what_exists(self, gpu: Gpu) -> tuple[bool, tuple[GpuInstance, ...]]:
        """Whether a partitioned GPU is in MIG mode, and every GPU instance on it.

        Raises: DeviceLostError, NvmlUnavailableError, RetryableError.
        """
        from dra_driver.nvml.mig_reading import read_what_exists

        return read_what_exists(gpu)

    def processes(self, uuid: str) -> Mapping[int, str]:
        """As `read_processes`. Raises: NvmlUnavailableError too while NVML is not initialised."""
        from dra_driver.nvml.gpu_users import read_processes

        with self.session.kept_open():
            return read_processes(uuid)

    def health_source(self) -> HealthSource:
        """Events and signals of health, through the same session."""
        from dra_driver.nvml.health_source import HealthSource

        return HealthSource(self.session)

    def usage_source(self, *, sees_all: bool) -> UsageSource:
        """How GPUs are used, through the same session; `sees_all` as in `UsageSource`."""
        from dra_driver.nvml.usage_source import UsageSource

        return UsageSource(self.session, sees_all=sees_all)

    def of_each(self, gpus: Sequence[Gpu], read: Callable[[Gpu], T]) -> Mapping[str, Future[T]]:
        """What `read` returned or raised for each GPU that the last `read_inventory` returned, by UUID. A GPU that does
        not answer is left out."""
        memory = self._known()
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        indexes = {index: uuid for index, uuid in memory.uuids.items() if uuid in by_uuid}

        def of(index: int) -> T:
            return read(by_uuid[indexes[index]])

        return {indexes[index]: answer for index, answer in memory.walk.each(list(indexes), of).items()}

    def nvml_fingerprint(self) -> NvmlFingerprint:
        """A cheap value that differs when a GPU was lost (None in its place) or changed its MIG mode.

        Raises: NvmlUnavailableError.
        """
        from dra_driver.nvml.scan import read_nvml_fingerprint

        return read_nvml_fingerprint(self._known())

    def _known(self) -> ScanMemory:
        """What earlier scans found."""
        from dra_driver.nvml.calls import GpuWalk
        from dra_driver.nvml.scan import ScanMemory

        if self._memory is None:
            self._memory = ScanMemory(walk=GpuWalk(self.session))
        if self._opening != self.session.openings:
            self._opening = self.session.openings
            self._memory.reopened()
        return self._memory
