"""The claims of the kubelet's calls: each is fetched and prepared, or unprepared, by itself; the outcome is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import structlog
from structlog.contextvars import bound_contextvars

from dra_driver.base.deadline import until
from dra_driver.base.threads import side_by_side
from dra_driver.claims.fetch import ClaimFetch
from dra_driver.claims.kubelet_call import CLAIMS_AT_ONCE, KubeletCall, Observer, failed
from dra_driver.claims.prepare import Preparer
from dra_driver.claims.unprepare import Unpreparer
from dra_driver.claims.waiting import PrepareAttempt, Waiter
from dra_driver.model.claim import ClaimRef, PrepareOutcome, UnprepareOutcome

_log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(eq=False)
class ClaimService:
    """Serves the kubelet. The claims of one call are worked on side by side: one that fails or waits does not touch the
    others."""

    fetch: ClaimFetch
    preparer: Preparer
    unpreparer: Unpreparer
    waiter: Waiter
    observer: Observer

    def prepare(
        self,
        claims: Sequence[ClaimRef],
        deadline_s: float | None,
        has_left: Callable[[], bool] | None = None,
    ) -> Mapping[str, PrepareOutcome]:
        """An outcome for each claim, by its UID."""
        call = KubeletCall.begin(deadline_s, has_left)
        with self.observer.in_flight("prepare", claims), ExitStack() as under_way:
            for ref in claims:
                under_way.enter_context(self.waiter.calling("prepare", ref.uid))
            return _each(self._prepare_one, claims, call)

    def unprepare(
        self,
        claims: Sequence[ClaimRef],
        deadline_s: float | None,
        has_left: Callable[[], bool] | None = None,
    ) -> Mapping[str, UnprepareOutcome]:
        """As `Unpreparer.unprepare`, by the claim's UID."""
        with self.observer.in_flight("unprepare", claims):
            return _each(self.unpreparer.unprepare, claims, KubeletCall.begin(deadline_s, has_left))

    def _prepare_one(self, ref: ClaimRef, call: KubeletCall) -> PrepareOutcome:
        started = time.monotonic()
        try:
            attempt = PrepareAttempt(ref, call, self.fetch.allocated(ref, call))
            try:
                prepared, record = self.preparer.prepare(attempt)
            finally:
                waited = self.waiter.waited_s(attempt)
                if waited is not None:
                    self.observer.waited(ref, waited)
        except Exception as error:  # noqa: BLE001  a bug in one claim must not fail the others
            return failed(self.observer, "prepare", ref, time.monotonic() - started, error)
        duration = time.monotonic() - started
        # The record may be older than what was read now.
        self.observer.prepared(ref, duration, record and replace(record, claim=attempt.claim))
        _log.info(
            "claim_prepared",
            claim=f"{ref.namespace}/{ref.name}",
            claim_uid=ref.uid,
            devices=[device.device for device in prepared.devices],
            duration_s=round(duration, 4),
        )
        return prepared


def _each(
    work: Callable[[ClaimRef, KubeletCall], T], claims: Sequence[ClaimRef], call: KubeletCall
) -> dict[str, T]:
    """What the work answers for each claim, by its UID; side by side."""

    def one(ref: ClaimRef) -> T:
        with bound_contextvars(claim_uid=ref.uid):
            return work(ref, call)

    with until(call.deadline):
        outcomes = side_by_side([partial(one, ref) for ref in claims], CLAIMS_AT_ONCE)
    return {ref.uid: outcome.result() for ref, outcome in zip(claims, outcomes, strict=True)}
