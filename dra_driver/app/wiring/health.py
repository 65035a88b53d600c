"""The parts that watch the health of GPUs, put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from dra_driver.app.change_table import Change, Changes
from dra_driver.app.wiring.mig import MigParts
from dra_driver.health.kubelet_stream import HealthStream
from dra_driver.health.monitor import Monitor
from dra_driver.health.rules.taints import MadeInstance, TaintPolicy, device_taints, instances_by_device
from dra_driver.health.rules.xids import XidPolicy
from dra_driver.health.store import HealthStore
from dra_driver.inventory.discovery import Discovery
from dra_driver.inventory.host_facts import HostView
from dra_driver.journal.cleanups import PendingCleanups
from dra_driver.journal.lanes import Lanes
from dra_driver.mig.context import MigAction
from dra_driver.model.inventory import OfferedDevice
from dra_driver.nvml.events import HealthSource
from dra_driver.settings import Settings
from dra_driver.slices.leadership import InstanceLeadership
from dra_driver.slices.rules.build import Taints
from dra_driver.slices.rules.kubernetes_releases import NEWEST_TAINTS, TaintLimits


class HealthParts:
    """Monitor, stream and taints.

    Another instance of the plugin writes the file while it speaks for the node. `cleanups` are made later.
    """

    def __init__(
        self,
        settings: Settings,
        source: HealthSource,
        discovery: Discovery,
        host: HostView,
        mig: MigParts,
        boot_id: str,
        changes: Changes,
        leadership: InstanceLeadership,
        cleanups: Callable[[], PendingCleanups],
        lanes: Lanes,
        taken: Callable[[], Collection[str]],
    ) -> None:
        """`taken` returns the UUIDs of GPUs that NVML need not have, because they go to virtual machines."""
        self._discovery = discovery
        self._mig = mig
        self._cleanups = cleanups
        self._changes = changes
        self._taken = taken
        self.taint_policy = TaintPolicy(dict(settings.taint_effects))
        kept = HealthStore(settings.plugin_directory / "health.json", leadership.speaks_for_node)
        self.monitor = Monitor(
            source,
            self._gpus,
            host.is_bound,
            kept,
            boot_id,
            on_change=self._changed,
            on_transition=partial(changes.tell, Change.HEALTH),
            on_fabric=partial(changes.tell, Change.FABRIC_POLLED),
            hanging=lanes.hanging,
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
        return instances_by_device(self._mig.ledger.all().values())

    def taints(self, limits: TaintLimits = NEWEST_TAINTS) -> Taints:
        """How devices are tainted at the moment, within what the API server takes."""
        states, instances = self.monitor.states(), self.instances()
        withheld, layouts = self._cleanups().withheld(), self._mig.layouts()
        policy = replace(self.taint_policy, limits=limits)
        return lambda device: device_taints(
            device, states, instances, policy, withheld(device), layouts.get(device.gpu.uuid)
        )

    def _changed(self) -> None:
        self.stream.changed()
        self._changes.tell(Change.HEALTH_SHOWN)

    def _gpus(self) -> Mapping[str, str | None] | None:
        """While NVML is away the inventory is empty, and says nothing about the GPUs."""
        inventory = self._discovery.latest()
        if inventory is None or (not inventory.every_gpu and self._discovery.unavailable() is not None):
            return None
        taken = self._taken()
        return {gpu.uuid: gpu.pci_bus_id for gpu in inventory.every_gpu if gpu.uuid not in taken}

    def _devices(self) -> Collection[OfferedDevice]:
        inventory = self._discovery.latest()
        return () if inventory is None else inventory.by_name.values()
