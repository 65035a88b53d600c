"""One NVML session and everything that the plugin reads through it.

Imports the binding on first use, because most commands do not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from dra_driver.base.file_lock import UseMark
from dra_driver.model.dataclass import dataclass, replace
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
    """Reads NVML for discovery and the commands.

    `foreign_instances` returns the instances on an `on_demand` GPU that this plugin did not create, and only these are
    read in detail; None means all. If GPUs are named by minor number, `kept_names` returns the names that must not
    change.
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
        self.session.reopen()

    def read_inventory(self) -> Inventory:
        """Return all GPUs that NVML lists, without NVLink domains.

        Raises: NvmlUnavailableError; StateError from `foreign_instances`.
        """
        from dra_driver.nvml.scan import read_gpus

        found = read_gpus(self.on_demand, self._known(), self.foreign_instances)
        return found if self.kept_names is None else replace(found, kept_names=self.kept_names())

    def read_what_exists(self, gpu: Gpu) -> tuple[bool, tuple[GpuInstance, ...]]:
        from dra_driver.nvml.mig_reading import read_what_exists

        return read_what_exists(gpu)

    def processes(self, uuid: str) -> Mapping[int, str]:
        from dra_driver.nvml.gpu_users import read_processes

        with self.session.kept_open():
            return read_processes(uuid)

    def health_source(self) -> HealthSource:
        from dra_driver.nvml.health_source import HealthSource

        return HealthSource(self.session)

    def usage_source(self, *, sees_all: bool) -> UsageSource:
        from dra_driver.nvml.usage_source import UsageSource

        return UsageSource(self.session, sees_all=sees_all)

    def of_each(self, gpus: Sequence[Gpu], read: Callable[[Gpu], T]) -> Mapping[str, Future[T]]:
        """Return the results of `read` by GPU UUID, as completed futures. GPUs that do not answer are omitted."""
        memory = self._known()
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        indexes = {index: uuid for index, uuid in memory.uuids.items() if uuid in by_uuid}

        def of(index: int) -> T:
            return read(by_uuid[indexes[index]])

        return {indexes[index]: answer for index, answer in memory.walk.each(list(indexes), of).items()}

    def nvml_fingerprint(self) -> NvmlFingerprint:
        from dra_driver.nvml.scan import read_nvml_fingerprint

        return read_nvml_fingerprint(self._known())

    def _known(self) -> ScanMemory:
        from dra_driver.nvml.calls import GpuWalk
        from dra_driver.nvml.scan import ScanMemory

        if self._memory is None:
            self._memory = ScanMemory(walk=GpuWalk(self.session))
        if self._opening != self.session.openings:
            self._opening = self.session.openings
            self._memory.reopened()
        return self._memory
