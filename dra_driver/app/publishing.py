"""Publishes the slices of this node."""

from __future__ import annotations

from collections.abc import Callable, Collection

from dra_driver.app.settings import Settings
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.errors import DraDriverError
from dra_driver.health.gpu_health import GpuHealth
from dra_driver.health.rules.taints import withdrawals
from dra_driver.inventory.discovery import Discovery
from dra_driver.journal.cleaner import Cleaner
from dra_driver.journal.records import RecordStore
from dra_driver.kube.client import ApiClient
from dra_driver.kube.cluster import node_uid
from dra_driver.kube.slices import SliceCache
from dra_driver.mig.layouts import NodeLayouts
from dra_driver.model.inventory import OfferedDevice
from dra_driver.reporting.metrics import Metrics
from dra_driver.slices.api_support import ApiSupport
from dra_driver.slices.publisher import Publisher
from dra_driver.slices.rules.build import NEWEST_TAINTS, TaintLimits, Taints
from dra_driver.slices.rules.diff import Owner


class Publishing:
    """`cache` follows the slices on the API server, `publisher` writes them."""

    def __init__(
        self,
        settings: Settings,
        *,
        api: ApiClient,
        discovery: Discovery,
        records: RecordStore,
        without_record: SpecsWithoutRecord,
        health: GpuHealth,
        cleaner: Cleaner,
        layouts: NodeLayouts,
        metrics: Metrics,
    ) -> None:
        self._settings, self._api = settings, api
        self._records, self._without_record = records, without_record
        self._health, self._cleaner, self._layouts = health, cleaner, layouts
        self._withdraws = False
        self.inventory, self._discovery = discovery.latest, discovery
        self.support = ApiSupport(api, settings.sharing, settings.power.budget_w is not None)
        self.cache = SliceCache(api, settings.driver_name, settings.node_name, self._dirty)
        self.publisher = Publisher(self, self.cache, settings.sharing, self.support, metrics, settings.power)

    def owner(self) -> Owner:
        names = self._settings.driver_name, self._settings.node_name
        return Owner(*names, node_uid(self._api, self._settings.node_name))

    def claim_released(self) -> None:
        """Publish again, because a device may have been in the slices only due to its claim."""
        if self._withdraws:
            self._dirty()

    def missing_setting(self, key: str) -> str | None:
        if self._health.taint_policy.effects.get(key) == "None":
            return f"health.taints.{key} to NoSchedule"
        if self._settings.unhealthy_devices == "taint" and self.support.drops_taints:
            return "health.unhealthyDevices to auto"
        return None

    def taints(self, limits: TaintLimits = NEWEST_TAINTS) -> Taints:
        return self._health.taints(self._cleaner.withheld(), self._layouts.states(), limits)

    def left_out(self, dropped: bool) -> Callable[[OfferedDevice], bool]:
        """Return a function that returns whether a device is withheld from the slices now.

        Devices of GPUs in maintenance are withheld. Devices with pending cleanup, for which a Prepare would fail, are
        withheld unless taints mark them (`dropped`: the API server drops taints).
        """
        mode = self._settings.unhealthy_devices
        # Set before the records are read, so that a claim that is released after that triggers a publication.
        self._withdraws = mode == "withdraw" or (mode == "auto" and dropped)
        pending = self._cleaner.withheld() if dropped or self._withdraws else lambda _device: None
        # Read gpus_in_maintenance before the records: it is emptied only after NVML has been read again.
        in_maintenance, records = set(self._discovery.gpus_in_maintenance), self._records.all()
        steps = [step for one in records.values() if (step := one.maintenance) is not None]
        lost = [one for devices in self._without_record.lost(records).values() for one in devices]
        in_maintenance.update(*(step.gpu_uuids for step in steps), *(one.in_maintenance for one in lost))
        withdrawn = (
            withdrawals(self.taints(), records.values(), self._settings.sharing)
            if self._withdraws
            else lambda _device: False
        )
        return lambda device: (
            device.gpu.uuid in in_maintenance or pending(device) is not None or withdrawn(device)
        )

    def is_offered(self, gpu_uuids: Collection[str]) -> bool:
        """Whether slices may contain a device of these GPUs; True if the API server does not respond."""
        inventory = self.inventory()
        if inventory is None or not self.cache.synced.is_set():
            return True
        names = {device.name for device in inventory.devices() if device.gpu.uuid in gpu_uuids}
        try:
            slices = self.cache.current()
        except DraDriverError:
            return True
        return any(one["name"] in names for entry in slices for one in entry["spec"].get("devices") or ())

    def _dirty(self) -> None:
        self.publisher.mark_dirty()
