"""The parts that watch the health of GPUs, put together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dra_driver.app.change_table import Change
from dra_driver.health.kubelet_stream import HealthStream
from dra_driver.health.monitor import Monitor
from dra_driver.health.rules.taints import MadeInstance, TaintPolicy, device_taints, instances_by_device
from dra_driver.health.rules.xids import XidPolicy
from dra_driver.health.serviced import ServicedGpus
from dra_driver.health.store import HealthStore
from dra_driver.host.sysfs import Sysfs
from dra_driver.mig.context import MigAction
from dra_driver.model.inventory import OfferedDevice
from dra_driver.model.problems import NodeProblem
from dra_driver.nvml.events import HealthSource
from dra_driver.slices.rules.build import Taints
from dra_driver.slices.rules.kubernetes_releases import NEWEST_TAINTS, TaintLimits

if TYPE_CHECKING:
    from dra_driver.app.daemon import Driver


class HealthParts:
    """Monitor, stream and taints.

    Another instance of the plugin writes the file while it speaks for the node. `cleanups` are made later.
    """

    def __init__(self, driver: Driver, source: HealthSource, host: Sysfs) -> None:
        settings, changes = driver.settings, driver.changes
        self._driver = driver
        self.taint_policy = TaintPolicy(dict(settings.taint_effects))
        kept = HealthStore(settings.plugin_directory / "health.json", driver.leadership.speaks_for_node)
        self.monitor = Monitor(
            source,
            self._gpus,
            host.is_bound,
            kept,
            driver.boot_id,
            on_change=self._changed,
            on_transition=partial(changes.tell, Change.HEALTH),
            on_polled=partial(changes.tell, Change.POLLED),
            hanging=driver.lanes.hanging,
            serviced=ServicedGpus(settings.plugin_directory, driver.boot_id).times,
            policy=XidPolicy(settings.ignored_xids, settings.fatal_xids),
        )
        self.stream = HealthStream(settings.node_name, self._devices, self.monitor, self.instances)

    def problems(self) -> Sequence[NodeProblem]:
        """GPUs whose health is not known, and GPUs that do not respond."""
        inventory = self._driver.discovery.latest()
        return self.monitor.problems({} if inventory is None else inventory.gpu_names)

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
        return instances_by_device(self._driver.mig.ledger.all().values())

    def taints(self, limits: TaintLimits = NEWEST_TAINTS) -> Taints:
        """How devices are tainted at the moment, within what the API server takes."""
        states, instances = self.monitor.states(), self.instances()
        withheld, layouts = self._driver.cleaner.withheld(), self._driver.mig.layouts()
        policy = replace(self.taint_policy, limits=limits)
        return lambda device: device_taints(
            device, states, instances, policy, withheld(device), layouts.get(device.gpu.uuid)
        )

    def _changed(self) -> None:
        self.stream.changed()
        self._driver.changes.tell(Change.HEALTH_SHOWN)

    def _gpus(self) -> Mapping[str, str | None] | None:
        """While NVML is away the inventory is empty, and says nothing about the GPUs."""
        inventory = self._driver.discovery.latest()
        if inventory is None or (
            not inventory.every_gpu and self._driver.discovery.unavailable() is not None
        ):
            return None
        taken = self._driver.passthrough.taken()
        return {gpu.uuid: gpu.pci_bus_id for gpu in inventory.every_gpu if gpu.uuid not in taken}

    def _devices(self) -> Collection[OfferedDevice]:
        inventory = self._driver.discovery.latest()
        return () if inventory is None else inventory.by_name.values()
