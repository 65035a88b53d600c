"""MIG tables of the simulated products, in the house's words, and their silicon, which says what fits."""

from __future__ import annotations

from dra_driver.model.mig import GpuInstance, MigProfile, Partitioning, PlacedProfile, Placement
from dra_driver.simulator import machine_state as simulated
from dra_driver.simulator import mig
from dra_driver.simulator.catalogue import load_models

Slot = tuple[int, int]
"""Profile ID and start."""

MODELS = {key: model for key, model in load_models().items() if model.mig}
"""Every product that has MIG, by its key in the catalogue."""


def table(model: simulated.Model) -> Partitioning:
    """NVML's profiles and placements of a product, without instances."""
    return Partitioning(tuple(PlacedProfile(_profile(row), _placements(row)) for row in model.mig))


def _profile(row: simulated.MigProfile) -> MigProfile:
    return MigProfile(
        row.id, row.name, row.slices, row.max_instances, row.multiprocessors, row.copy_engines, row.decoders,
        row.encoders, row.jpeg, row.ofa, row.memory_mib,
    )  # fmt: skip


def _placements(row: simulated.MigProfile) -> tuple[Placement, ...]:
    return tuple(Placement(start, row.size) for start in row.starts)


class Silicon:
    """One GPU in MIG mode, which takes or refuses instances by the simulator's own rule."""

    def __init__(self, model: simulated.Model) -> None:
        self.model = model
        self.gpu = simulated.Gpu(uuid="GPU-0", model="", bus_id="", minor=0, serial="", pcie="")
        self.gpu.mig_mode = 1

    def free(self) -> set[Slot]:
        """Every slot at which one more instance would be taken now."""
        return {
            (row.id, start)
            for row in self.model.mig
            for start in mig.free_placements(self.gpu, self.model, row)
        }

    def create(self, slot: Slot) -> None:
        row = mig.profile_by_id(self.model, slot[0])
        mig.create_gpu_instance(self.gpu, self.model, row.id, (slot[1], row.size))

    def destroy(self, slot: Slot) -> None:
        held = next(item for item in self.gpu.instances if (item.profile_id, item.start) == slot)
        mig.destroy_gpu_instance(self.gpu, held.id)

    @property
    def instances(self) -> list[GpuInstance]:
        return [
            GpuInstance(item.id, item.profile_id, Placement(item.start, item.size))
            for item in self.gpu.instances
        ]
