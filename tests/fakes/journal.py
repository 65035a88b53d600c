"""What an instance of the plugin has on disk for claims and GPUs, and what works on that."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from dra_driver.journal.cleaner import Cleaner, Restorer
from dra_driver.journal.executor import Executor
from dra_driver.journal.lanes import Lanes
from dra_driver.journal.ledger import DIRECTORY as LEDGER
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.locks import GpuLocks
from dra_driver.journal.records import RecordStore
from dra_driver.model.record import ClaimRecord


class Journaled:
    """Base of the nodes of tests. `work_with` may be called again, with what does other steps."""

    runner: Any
    cleaner: Cleaner
    executor: Executor

    def open_journal(
        self,
        directory: Path,
        boot_id: str,
        counted: Callable[[Any], Any] = lambda subject: subject,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Record, locks and ledgers below `directory`; `counted` sees what changes them."""
        self.boot_id = boot_id
        self._counted = counted
        self.records = RecordStore(directory / "claims")
        self.records.open(boot_id)
        self.locks = GpuLocks(directory / "locks")
        self.locks.open()
        self.lanes = Lanes(self.locks)
        self.ledger = Ledger(directory / LEDGER, self.records, boot_id, self.without_record, clock=clock)
        self.ledger.open()

    def work_with(self, runner: Any, restorers: Sequence[Restorer] = (), **options: Any) -> None:
        """Have steps done and undone by `runner`."""
        self.runner = runner
        self.cleaner = Cleaner(self._counted(self.ledger), self.lanes, runner, restorers=restorers)
        self.executor = Executor(
            self._counted(self.records),
            self.cleaner,
            runner,
            self.lanes,
            self.boot_id,
            now=lambda: "2026-08-07T12:00:00.000+00:00",
            **options,
        )

    def without_record(self) -> Collection[str]:
        """UIDs of claims with a CDI spec and without a readable record."""
        return ()

    def work_off(self, wait_s: float | None = None) -> None:
        """Run pending cleanup in the lanes; what fails or hangs remains."""
        self.cleaner.clean_all(wait_s)

    def record_of(self, uid: str = "uid-1") -> ClaimRecord:
        """The record of a claim that has one."""
        found = self.records.get(uid)
        assert found is not None
        return found
