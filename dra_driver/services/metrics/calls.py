"""The kubelet's calls, counted from their arrival to their answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from dra_driver.model.claim import ClaimRef, PrepareOutcome, UnprepareOutcome
from dra_driver.services.metrics.counts import Metrics


class ClaimService(Protocol):
    """What serves the kubelet's calls."""

    def prepare(self, claims: Sequence[ClaimRef], deadline_s: float | None) -> Mapping[str, PrepareOutcome]:
        """NodePrepareResources."""

    def unprepare(
        self, claims: Sequence[ClaimRef], deadline_s: float | None
    ) -> Mapping[str, UnprepareOutcome]:
        """NodeUnprepareResources."""


class CountedCalls:
    """A claim service whose calls in flight are counted."""

    def __init__(self, service: ClaimService, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics

    def prepare(self, claims: Sequence[ClaimRef], deadline_s: float | None) -> Mapping[str, PrepareOutcome]:
        """NodePrepareResources."""
        with self._metrics.in_flight("prepare"):
            return self._service.prepare(claims, deadline_s)

    def unprepare(
        self, claims: Sequence[ClaimRef], deadline_s: float | None
    ) -> Mapping[str, UnprepareOutcome]:
        """NodeUnprepareResources."""
        with self._metrics.in_flight("unprepare"):
            return self._service.unprepare(claims, deadline_s)
