"""The health of the node's GPUs: which GPUs are watched, what the kubelet hears, and which taints devices get."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dra_driver.health.book import HealthBook
from dra_driver.health.kubelet_stream import HealthStream
from dra_driver.health.monitor import Monitor
from dra_driver.health.rules.taints import MadeInstance, TaintPolicy, device_taints, instances_by_device
from dra_driver.health.rules.xids import XidPolicy
from dra_driver.health.store import HealthStore, ServicedGpus
from dra_driver.host.sysfs import Sysfs
from dra_driver.inventory.discovery import Discovery
from dra_driver.journal.lanes import Lanes
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.rules.cleanups import PendingCleanup
from dra_driver.mig.mode import MigAction
from dra_driver.model.health import HealthChange, PolledHealth
from dra_driver.model.inventory import OfferedDevice
from dra_driver.model.mig import GpuLayout, OwnedInstance
from dra_driver.model.problems import NodeProblem
from dra_driver.nvml.health_source import HealthSource
from dra_driver.slices.leadership import InstanceLeadership
from dra_driver.slices.rules.build import NEWEST_TAINTS, TaintLimits, Taints


class GpuHealth:
    """`monitor` watches the GPUs, `book` keeps what is known of them, `stream` reports it to the kubelet.

    `under_vfio` returns the UUIDs of the GPUs that are bound to vfio, or are about to be: NVML need not show them.
    `ledger` has the MIG devices made on demand. Another instance of the plugin may lead, and writes the file then.
    `on_shown`, `on_transition` and `on_polled` are called by several threads: when others can see a change, for each
    change of a state, and for each poll.
    """

    def __init__(
        self,
        source: HealthSource,
        *,
        node_name: str,
        plugin_directory: Path,
        boot_id: str,
        xids: XidPolicy,
        taint_policy: TaintPolicy,
        discovery: Discovery,
        host: Sysfs,
        lanes: Lanes,
        under_vfio: Callable[[], Collection[str]],
        ledger: Ledger,
        leadership: InstanceLeadership,
        on_shown: Callable[[], object],
        on_transition: Callable[[HealthChange], None],
        on_polled: Callable[[str, PolledHealth], None],
    ) -> None:
        self._discovery, self._under_vfio, self._ledger = discovery, under_vfio, ledger
        self._on_shown = on_shown
        self.is_on_bus, self.hanging = host.is_bound, lanes.hanging
        self.health_moved, self.polled = on_transition, on_polled
        self.taint_policy = taint_policy
        self.book = HealthBook(
            self,
            HealthStore(plugin_directory / "health.json", leadership.speaks_for_node),
            boot_id,
            ServicedGpus(plugin_directory, boot_id),
            xids,
        )
        self.monitor = Monitor(self.book, source)
        self.stream = HealthStream(node_name, self)

    def problems(self) -> Sequence[NodeProblem]:
        """GPUs whose health is not known, and GPUs that do not respond."""
        inventory = self._discovery.latest()
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
        if any(target.is_instance for target in self.book.states()):
            self.health_changed()

    def instances(self) -> Mapping[str, MadeInstance]:
        """The made MIG devices on demand, by device name."""
        return instances_by_device(self._ledger.details(OwnedInstance))

    def taints(
        self,
        pending: Callable[[OfferedDevice], PendingCleanup | None],
        layouts: Mapping[str, GpuLayout],
        limits: TaintLimits = NEWEST_TAINTS,
    ) -> Taints:
        """How devices are tainted at the moment, within what the API server takes. `pending` returns the cleanup that
        withholds a device, `layouts` are those of GPUs by UUID."""
        states, instances = self.book.states(), self.instances()
        policy = replace(self.taint_policy, limits=limits)
        return lambda device: device_taints(
            device, states, instances, policy, pending(device), layouts.get(device.gpu.uuid)
        )

    def health_changed(self) -> None:
        """Others can see a change of health."""
        self.stream.changed()
        self._on_shown()

    def gpus(self) -> Mapping[str, str | None] | None:
        """The GPUs to watch. While NVML is away the inventory is empty, and says nothing about them."""
        inventory = self._discovery.latest()
        if inventory is None or (not inventory.every_gpu and self._discovery.unavailable() is not None):
            return None
        taken = self._under_vfio()
        return {gpu.uuid: gpu.pci_bus_id for gpu in inventory.every_gpu if gpu.uuid not in taken}

    def devices(self) -> Collection[OfferedDevice]:
        """The devices that can be published now."""
        inventory = self._discovery.latest()
        return () if inventory is None else inventory.by_name.values()
