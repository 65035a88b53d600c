"""Events for claims with MPS: what the MPS host has found out about their daemons."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dra_driver.base.threads import BackgroundWorker
from dra_driver.errors import DraDriverError
from dra_driver.model.mps import MpsDaemonStatus
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import RunMps
from dra_driver.reporting.event_recorder import EventRecorder
from dra_driver.sharing.rules.mps_notes import notes_of

_LOOK_S = 15.0


@dataclass(eq=False)
class MpsEvents(BackgroundWorker):
    """Asks the MPS host while claims use MPS, and never else. Each thing is reported once for each claim.

    `daemons` asks the MPS host; it may raise a DraDriverError.
    """

    join_s = 1.0
    recorder: EventRecorder
    records: Callable[[], Mapping[str, ClaimRecord]]
    daemons: Callable[[], Sequence[MpsDaemonStatus]]

    def __post_init__(self) -> None:
        self._reported: set[tuple[str, str, str]] = set()  # claim, reason, daemon
        super().__init__(
            "mps-events", self._look, crash_event="mps_events_failed", on_crash=lambda _: _LOOK_S
        )

    def prepared(self, record: ClaimRecord) -> None:
        """A claim was prepared."""
        if _daemons_of(record):
            self.wake()

    def _look(self) -> float:
        users = {uid: record for uid, record in self.records().items() if _daemons_of(record)}
        self._reported = {entry for entry in self._reported if entry[0] in users}
        if not users:
            return math.inf
        try:
            daemons = self.daemons()
        except DraDriverError:
            return _LOOK_S
        for status in daemons:
            for reason, text in notes_of(status):
                for uid, record in users.items():
                    entry = (uid, reason, status.device)
                    if status.device in _daemons_of(record) and entry not in self._reported:
                        self._reported.add(entry)
                        self.recorder.claim_event(record.ref, reason, text, warning=True)
        return _LOOK_S


def _daemons_of(record: ClaimRecord) -> Collection[str]:
    return [step.spec.device for step in record.steps if isinstance(step, RunMps)]
