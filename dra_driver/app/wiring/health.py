"""The parts that watch the health of GPUs, put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from dra_driver.health.kubelet_stream import HealthStream
from dra_driver.health.monitor import Monitor
from dra_driver.health.rules.taints import MadeInstance, TaintPolicy, device_taints, instances_by_device
from dra_driver.health.rules.xids import XidPolicy
from dra_driver.health.shared_store import SharedHealth
from dra_driver.health.store import HealthStore
from dra_driver.journal.rules.cleanups import PendingCleanup
from dra_driver.mig.context import MigAction
from dra_driver.model.gpu import FabricRegistration
from dra_driver.model.health import HealthChange
from dra_driver.model.inventory import Inventory, OfferedDevice
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.mig_layouts import GpuLayout
from dra_driver.nvml.events import HealthSource
from dra_driver.settings import Settings
from dra_driver.slices.rules.build import Taints
from dra_driver.slices.rules.kubernetes_releases import NEWEST_TAINTS, TaintLimits


class HealthParts:
    """Monitor, stream and taints.

    `inventory` answers what is published now, `unavailable` why NVML does not tell the devices, `is_on_bus` whether the
    NVIDIA driver is bound to a PCI bus ID, `owned` the ledger of MIG instances by device name. `on_change` is called
    after each change that others see, `on_transition` with each entry of the history, `on_fabric` as by the monitor.
    While `may_keep` answers no, another instance of the driver writes the file. `owing` returns which
    pending cleanup keeps a device from being given out, `hanging` which operation hangs on which GPU UUID, and since
    when (time.monotonic()). `layouts` returns what became of the MIG layout on each GPU.
    """

    def __init__(
        self,
        settings: Settings,
        source: HealthSource,
        inventory: Callable[[], Inventory | None],
        unavailable: Callable[[], str | None],
        is_on_bus: Callable[[str], bool],
        owned: Callable[[], Mapping[str, OwnedInstance]],
        boot_id: str,
        on_change: Callable[[], None],
        on_transition: Callable[[HealthChange], None],
        on_fabric: Callable[[str, FabricRegistration], None],
        may_keep: Callable[[], bool],
        owing: Callable[[], Callable[[OfferedDevice], PendingCleanup | None]],
        hanging: Callable[[], Mapping[str, tuple[str, float]]],
        layouts: Callable[[], Mapping[str, GpuLayout]],
    ) -> None:
        self._inventory = inventory
        self._unavailable = unavailable
        self._owned = owned
        self._owing = owing
        self._layouts = layouts
        self.taint_policy = TaintPolicy(dict(settings.taint_effects))
        self._on_change = on_change
        kept = SharedHealth(HealthStore(settings.plugin_directory / "health.json"), may_keep)
        self.monitor = Monitor(
            source,
            self._gpus,
            is_on_bus,
            kept,
            boot_id,
            on_change=self._changed,
            on_transition=on_transition,
            on_fabric=on_fabric,
            hanging=hanging,
            policy=XidPolicy(settings.ignored_xids, settings.fatal_xids),
        )
        self.stream = HealthStream(settings.node_name, self._devices, self.monitor, self.instances)

    def devices_changed(self) -> None:
        """The inventory has changed."""
        self.monitor.devices_changed()
        self.stream.changed()

    def mig_changed(self, action: MigAction, *_: object) -> None:
        """A MIG device was made or destroyed on demand, so the known health may be that of an instance that is gone; or
        a MIG mode was switched, which ends NVML's registrations of the GPU's events."""
        if action in ("mode-on", "mode-off"):
            self.monitor.devices_changed()
        if any(target.is_instance for target in self.monitor.states()):
            self._changed()

    def instances(self) -> Mapping[str, MadeInstance]:
        """The made MIG devices on demand, by device name."""
        return instances_by_device(self._owned().values())

    def taints(self, limits: TaintLimits = NEWEST_TAINTS) -> Taints:
        """How devices are tainted at the moment, within what the API server takes."""
        states, instances, owing = self.monitor.states(), self.instances(), self._owing()
        layouts = self._layouts()
        policy = replace(self.taint_policy, limits=limits)
        return lambda device: device_taints(
            device, states, instances, policy, owing(device), layouts.get(device.gpu.uuid)
        )

    def _changed(self) -> None:
        self.stream.changed()
        self._on_change()

    def _gpus(self) -> Mapping[str, str | None] | None:
        """While NVML is away the inventory is empty, and says nothing about the GPUs."""
        inventory = self._inventory()
        if inventory is None or (not inventory.every_gpu and self._unavailable() is not None):
            return None
        return {gpu.uuid: gpu.pci_bus_id for gpu in inventory.every_gpu}

    def _devices(self) -> Collection[OfferedDevice]:
        inventory = self._inventory()
        return () if inventory is None else inventory.by_name.values()
