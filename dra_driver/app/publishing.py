"""The parts that publish slices, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dra_driver.core.partitions import has_counters
from dra_driver.core.slicediff import Owner
from dra_driver.core.slices import Taints
from dra_driver.errors import ApiRejectedError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.dropped import PARTITIONS_GATE, dropped_fields
from dra_driver.kube.nodes import node_uid
from dra_driver.kube.partitions import supports_partitions
from dra_driver.kube.serverversion import sharing_caution, takes_effect_none
from dra_driver.kube.slicecache import SliceCache
from dra_driver.kube.slices import SliceClient
from dra_driver.kube.versions import ResourceApi
from dra_driver.model.inventory import Inventory
from dra_driver.services.nodenews import NodeNews
from dra_driver.services.partitionsupport import PartitionSupport
from dra_driver.services.publisher import Publisher, PublishObserver
from dra_driver.settings import Settings
from dra_driver.state.turns import PublishingTurn

JsonObject = dict[str, Any]

_INVALID = 422


class Informing:
    """Whether taints without an effect may be sent.

    Asked once, and again while nobody answers and after the API server refused a slice as invalid: there may be
    another release by then, or one of several servers may be older. Passes on what the publisher tells.
    """

    def __init__(self, ask: Callable[[], bool], observer: PublishObserver) -> None:
        self._ask = ask
        self._observer = observer
        self._answer: bool | None = None

    def __call__(self) -> bool:
        """Raises: ApiUnavailableError."""
        if self._answer is None:
            self._answer = self._ask()
        return self._answer

    def publish_failed(self, error: Exception) -> None:
        """Slices could not be brought up to date."""
        if isinstance(error, ApiRejectedError) and error.status == _INVALID:
            self._answer = None
        self._observer.publish_failed(error)

    def published(self, lag_s: float) -> None:
        """Slices were written."""
        self._observer.published(lag_s)

    def contested(self, reason: str) -> None:
        """Somebody else changes our slices."""
        self._observer.contested(reason)

    def refused(self, fault: str) -> None:
        """A device was left out."""
        self._observer.refused(fault)


class PublishingParts:
    """Slice cache, publisher, and what is known of the server's support for partitions."""

    def __init__(
        self,
        settings: Settings,
        client: ApiClient,
        api: ResourceApi,
        turn: PublishingTurn,
        inventory: Callable[[], Inventory | None],
        taints: Callable[[bool], Taints],
        partitions_missing: Callable[[str], None],
        scheduler_outdated: Callable[[str], None],
        news: NodeNews,
    ) -> None:
        def owner() -> Owner:
            return Owner(settings.driver_name, settings.node_name, node_uid(client, settings.node_name))

        def caution(found: Inventory) -> str | None:
            shared = (
                settings.sharing.rule_for(device) for device in found.devices() if has_counters(device.gpu)
            )
            return sharing_caution(client) if any(shared) else None

        self.support = PartitionSupport(
            lambda: supports_partitions(api, owner()),
            partitions_missing,
            caution=caution,
            warn=scheduler_outdated,
        )
        self._turn = turn
        self._news = news
        self._gates: frozenset[str] = frozenset()
        informs = Informing(lambda: takes_effect_none(client), news)
        self._cache = SliceCache(SliceClient(api, settings.driver_name, settings.node_name), self._dirty)
        self.publisher = Publisher(
            inventory,
            self._cache,
            owner,
            self._dropped,
            settings.sharing,
            may_publish=turn.is_ours,
            dry_run=self._cache.dry_run,
            usable=self.support.usable,
            usable_until=lambda: self.support.ask_at,
            taints=lambda: taints(informs()),
            observer=informs,
        )

    def start(self) -> Sequence[tuple[str, Callable[[], object]]]:
        """Begin to publish; what has to be stopped, in the order of starts."""
        self._cache.start()
        self.publisher.start()
        self.publisher.mark_dirty()
        return (
            ("publishing_turn", self._turn.withdraw),
            ("slice_cache", self._cache.stop),
            ("publisher", self.publisher.stop),
        )

    def slice_count(self) -> int:
        """Slices of ours that the API server has."""
        return len(self._cache.snapshot())

    def _dirty(self) -> None:
        self.publisher.mark_dirty()

    def _dropped(self, sent: JsonObject, stored: JsonObject) -> Sequence[tuple[str, str]]:
        lost = dropped_fields(sent, stored)
        new = {gate for _, gate in lost} - self._gates
        if new:
            self._gates |= new
            self._news.dropped(", ".join(sorted(new)))
        if any(gate == PARTITIONS_GATE for _, gate in lost):
            self.support.fields_dropped()
            self._dirty()
        return lost
