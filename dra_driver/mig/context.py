"""What all parts of MIG on demand work with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

from dra_driver.mig.holders import MigHolders
from dra_driver.mig.ledger import MigLedger
from dra_driver.nvml.mig_changes import MigHardware

MigAction = Literal["create", "destroy", "mode-on", "mode-off"]
MigObserver = Callable[[MigAction, str, float, Exception | None], None]
"""Hears what was done, to which device (for a mode: the UUID of which GPU), how many seconds it took, and the error
if it failed."""


@dataclass(frozen=True, slots=True)
class MigContext:
    """The node's hardware and what this driver knows of its own part in it.

    `operation` keeps NVML initialised for a whole action. `left_over` is called when something of ours could not be
    cleared away: the collector has to try again. `clock` and `pause` count in seconds.
    """

    hardware: MigHardware
    ledger: MigLedger
    users: MigHolders
    observe: MigObserver
    left_over: Callable[[], None]
    operation: Callable[[], AbstractContextManager[object]]
    clock: Callable[[], float]
    pause: Callable[[float], None]

    @contextmanager
    def observed(self, action: MigAction, subject: str) -> Iterator[Callable[[], None]]:
        """Report what fails within it. The caller calls what it yields once there is something done to report."""
        began = self.clock()
        try:
            yield lambda: self.observe(action, subject, self.clock() - began, None)
        except Exception as error:
            self.observe(action, subject, self.clock() - began, error)
            raise
