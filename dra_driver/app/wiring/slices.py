"""The parts that publish slices, put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dra_driver.app.part import Part
from dra_driver.kube.client import ApiClient
from dra_driver.kube.cluster import node_uid
from dra_driver.kube.slice_cache import SliceCache
from dra_driver.kube.slices import SliceClient
from dra_driver.kube.versions import ResourceApi
from dra_driver.model.inventory import Inventory, OfferedDevice
from dra_driver.reporting.node_events import NodeEvents
from dra_driver.settings import Settings
from dra_driver.slices.api_support import (
    InformationalTaints,
    PartitionSupport,
    partitions_problem,
    shares_counters,
    sharing_caution,
    takes_effect_none,
)
from dra_driver.slices.leadership import InstanceLeadership
from dra_driver.slices.publisher import Publisher
from dra_driver.slices.rules.build import Taints
from dra_driver.slices.rules.diff import Owner


class PublishingParts:
    """Slice cache, publisher, and whether the API server supports partitions."""

    def __init__(
        self,
        settings: Settings,
        client: ApiClient,
        api: ResourceApi,
        leadership: InstanceLeadership,
        inventory: Callable[[], Inventory | None],
        taints: Callable[[bool], Taints],
        withheld: Callable[[], Callable[[OfferedDevice], bool]],
        partitions_missing: Callable[[str], None],
        scheduler_outdated: Callable[[str], None],
        news: NodeEvents,
    ) -> None:
        def owner() -> Owner:
            return Owner(settings.driver_name, settings.node_name, node_uid(client, settings.node_name))

        def caution(found: Inventory) -> str | None:
            return sharing_caution(client) if shares_counters(found, settings.sharing) else None

        self.support = PartitionSupport(
            lambda: partitions_problem(api, owner()),
            partitions_missing,
            caution=caution,
            warn=scheduler_outdated,
        )
        self._leadership = leadership
        self._cache = SliceCache(SliceClient(api, settings.driver_name, settings.node_name), self._dirty)
        self.publisher = Publisher(
            inventory,
            self._cache,
            owner,
            settings.sharing,
            may_publish=leadership.is_ours,
            partitions=self.support,
            informational=InformationalTaints(lambda: takes_effect_none(client)),
            taints=taints,
            withheld=withheld,
            observer=news,
        )

    def parts(self) -> Iterator[Part]:
        """What runs, in the order of starts."""
        yield Part("leadership", stop=self._leadership.withdraw)
        yield Part("slice_cache", self._cache.start, self._cache.stop)
        yield Part("publisher", self.publisher.start, self.publisher.stop)

    def slice_count(self) -> int:
        """Slices of ours that the API server has."""
        return len(self._cache.snapshot())

    def _dirty(self) -> None:
        self.publisher.mark_dirty()
