"""The parts that publish slices, put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dra_driver.app.part import Part
from dra_driver.health.rules.taints import withdrawals
from dra_driver.kube.cluster import node_uid
from dra_driver.kube.resource_api import ResourceApi
from dra_driver.kube.slice_cache import SliceCache
from dra_driver.kube.slices import SliceClient
from dra_driver.model.inventory import Inventory, OfferedDevice
from dra_driver.slices.api_support import ApiSupport, ask_support, shares_counters, sharing_caution
from dra_driver.slices.publisher import Publisher
from dra_driver.slices.rules.diff import Owner

if TYPE_CHECKING:
    from dra_driver.app.daemon import Driver


class PublishingParts:
    """Slice cache, publisher, and what the API server keeps of slices."""

    def __init__(self, driver: Driver, api: ResourceApi) -> None:
        settings, client, reporting = driver.settings, driver.client, driver.reporting

        def owner() -> Owner:
            return Owner(settings.driver_name, settings.node_name, node_uid(client, settings.node_name))

        def caution(found: Inventory) -> str | None:
            return sharing_caution(client) if shares_counters(found, settings.sharing) else None

        self.support = ApiSupport(
            lambda known, partitions: ask_support(api, owner(), known, partitions=partitions),
            reporting.reporter.partitions_missing,
            caution=caution,
            warn=reporting.reporter.scheduler_outdated,
        )
        self._driver, self._records = driver, driver.records
        self._withdraws = False
        self._cache = SliceCache(SliceClient(api, settings.driver_name, settings.node_name), self._dirty)
        self.publisher = Publisher(
            driver.discovery.latest,
            self._cache,
            owner,
            settings.sharing,
            may_publish=driver.leadership.is_ours,
            support=self.support,
            taints=driver.health.taints,
            left_out=self._withheld,
            observer=reporting.node,
        )

    def parts(self) -> Iterator[Part]:
        """What runs, in the order of starts."""
        yield Part("leadership", stop=self._driver.leadership.withdraw)
        yield Part("slice_cache", self._cache.start, self._cache.stop)
        yield Part("publisher", self.publisher.start, self.publisher.stop)

    def slice_count(self) -> int:
        """Slices of ours that the API server has."""
        return self._cache.count

    def withdrawn_count(self) -> int:
        """Devices that are left out of the slices now."""
        return len(self.publisher.withheld)

    def claim_released(self) -> None:
        """A claim was unprepared; its device may have been left in the slices for its sake."""
        if self._withdraws:
            self._dirty()

    def missing_setting(self, key: str) -> str | None:
        """What to set so that new pods stay away from devices with this reason; None if they do."""
        if self._driver.health.taint_policy.effects.get(key) == "None":
            return f"health.taints.{key} to NoSchedule"
        if self._driver.settings.unhealthy_devices == "taint" and self.support.drops_taints:
            return "health.unhealthyDevices to auto"
        return None

    def _withheld(self, dropped: bool) -> Callable[[OfferedDevice], bool]:
        """Which devices are left out of the slices, as of now; for the publisher. Pending cleanup is
        always in the way of a Prepare, so what the setting says of health does not matter to it."""
        mode = self._driver.settings.unhealthy_devices
        # Before the records are read: a claim that is released from now on makes another round.
        self._withdraws = mode == "withdraw" or (mode == "auto" and dropped)
        pending = self._driver.cleaner.withheld() if dropped or self._withdraws else lambda _device: None
        if not self._withdraws:
            return lambda device: pending(device) is not None
        records, sharing = self._records.all().values(), self._driver.settings.sharing
        withdrawn = withdrawals(self._driver.health.taints(), records, sharing)
        return lambda device: pending(device) is not None or withdrawn(device)

    def _dirty(self) -> None:
        self.publisher.mark_dirty()
