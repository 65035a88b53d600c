"""Events for claims with MPS: what the MPS host has found out about their daemons."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from dra_driver.concurrency.worker import BackgroundWorker
from dra_driver.errors import DraDriverError
from dra_driver.model.mps import MpsDaemonStatus
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import RunMps
from dra_driver.reporting.event_recorder import EventRecorder
from dra_driver.sharing.rules.mps_notes import notes_of

_LOOK_S = 15.0
_JOIN_S = 1.0


class MpsEvents:
    """Asks the MPS host while claims use MPS, and never else. Each thing is reported once for each claim."""

    def __init__(
        self,
        recorder: EventRecorder,
        records: Callable[[], Mapping[str, ClaimRecord]],
        daemons: Callable[[], Sequence[MpsDaemonStatus]],
    ) -> None:
        """`daemons` asks the MPS host; it may raise a DraDriverError."""
        self._recorder = recorder
        self._records = records
        self._daemons = daemons
        self._told: set[tuple[str, str, str]] = set()
        self._worker = BackgroundWorker(
            "mps-events", self._look, crash_event="mps_events_failed", on_crash=lambda _: _LOOK_S
        )

    def start(self) -> None:
        """Begin to look."""
        self._worker.start()

    def stop(self) -> None:
        """Look no more; harmless before `start`."""
        self._worker.stop(_JOIN_S)

    def prepared(self, record: ClaimRecord) -> None:
        """A claim was prepared."""
        if _daemons_of(record):
            self._worker.wake()

    def _look(self) -> float:
        users = {uid: record for uid, record in self._records().items() if _daemons_of(record)}
        self._told = {told for told in self._told if told[0] in users}
        if not users:
            return math.inf
        try:
            daemons = self._daemons()
        except DraDriverError:
            return _LOOK_S
        for status in daemons:
            for reason, text in notes_of(status):
                for uid, record in users.items():
                    if status.device in _daemons_of(record) and (uid, reason, text) not in self._told:
                        self._told.add((uid, reason, text))
                        self._recorder.claim_event(record.ref, reason, text, warning=True)
        return _LOOK_S


def _daemons_of(record: ClaimRecord) -> Collection[str]:
    return [step.spec.device for step in record.steps if isinstance(step, RunMps)]
