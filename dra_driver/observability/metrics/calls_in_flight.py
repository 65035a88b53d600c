"""The kubelet's calls, counted from their arrival to their answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dra_driver.model.claim import ClaimRef, PrepareOutcome, UnprepareOutcome
from dra_driver.observability.metrics.definitions import Metrics

if TYPE_CHECKING:
    from dra_driver.kubelet.dra import ClaimService


class CountedCalls:
    """A claim service whose calls in flight are counted."""

    def __init__(self, service: ClaimService, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics

    def prepare(
        self, claims: Sequence[ClaimRef], deadline_s: float, has_left: Callable[[], bool]
    ) -> Mapping[str, PrepareOutcome]:
        """NodePrepareResources."""
        with self._metrics.in_flight("prepare"):
            return self._service.prepare(claims, deadline_s, has_left)

    def unprepare(
        self, claims: Sequence[ClaimRef], deadline_s: float, has_left: Callable[[], bool]
    ) -> Mapping[str, UnprepareOutcome]:
        """NodeUnprepareResources."""
        with self._metrics.in_flight("unprepare"):
            return self._service.unprepare(claims, deadline_s, has_left)
