"""The parts that watch the health of GPUs, put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

from dra_driver.core.health import HealthPolicy
from dra_driver.core.slices import Taints
from dra_driver.core.taints import TaintPolicy, device_taints, instances_by_device
from dra_driver.core.xids import XidPolicy
from dra_driver.model.health import HealthChange
from dra_driver.model.inventory import Inventory, OfferedDevice
from dra_driver.model.mig import OwnedInstance
from dra_driver.services.healthstream import HealthStream
from dra_driver.services.monitor import Monitor, Source
from dra_driver.settings import Settings
from dra_driver.state.healthstore import HealthStore


class HealthParts:
    """Monitor, stream and taints. `usable` reduces an inventory to what is published of it."""

    def __init__(
        self,
        settings: Settings,
        source: Source,
        inventory: Callable[[], Inventory | None],
        owned: Callable[[], Mapping[str, OwnedInstance]],
        boot_id: str,
        on_change: Callable[[], None],
        on_transition: Callable[[HealthChange], None],
    ) -> None:
        self._inventory = inventory
        self._owned = owned
        self.taint_policy = TaintPolicy(dict(settings.taint_effects))
        self._on_change = on_change
        self.monitor = Monitor(
            source,
            self._gpus,
            HealthStore(settings.plugin_directory / "health.json"),
            boot_id,
            on_change=self._changed,
            on_transition=on_transition,
            policy=HealthPolicy(xids=XidPolicy(settings.ignored_xids, settings.fatal_xids)),
        )
        self.stream = HealthStream(settings.node_name, self._devices, self.monitor, self.instances)

    def devices_changed(self) -> None:
        """The inventory is another one."""
        self.monitor.devices_changed()
        self.stream.changed()

    def instances(self) -> Mapping[str, tuple[int, int]]:
        """GPU and compute instance ID of each MIG device that was made on demand, by name."""
        return instances_by_device(self._owned().values())

    def taints(self) -> Taints:
        """How devices are tainted at the moment."""
        return partial(
            device_taints,
            states=self.monitor.states(),
            instances=self.instances(),
            policy=self.taint_policy,
        )

    def _changed(self) -> None:
        self.stream.changed()
        self._on_change()

    def _gpus(self) -> Collection[str] | None:
        inventory = self._inventory()
        return None if inventory is None else [gpu.uuid for gpu in inventory.every_gpu]

    def _devices(self) -> Collection[OfferedDevice]:
        inventory = self._inventory()
        return () if inventory is None else inventory.by_name.values()
