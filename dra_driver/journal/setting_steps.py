"""Steps that set one value on a GPU, such as the length of its time slices; and their undo.

    (nothing) ──the value before is in the ledger──▶ noted ──▶ set ──the driver is reloaded──▶ lost
     ▲                                                │         │ ▲                             │
     └──── value restored, then the note removed ◀────┴─────────┘ └───────── set again ◀────────┘

A value that the NVIDIA driver does not report is not noted; its undo restores the default. The note of the first claim
stays until the value is restored, even if another claim sets the value in between. A crash at any point leaves the note
or nothing, and the step and its undo can run again. A reboot voids the note.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

import structlog

from dra_driver.errors import (
    ClaimRefusedError,
    DraDriverError,
    DriverGoneError,
    NotSupportedError,
    RetryableError,
)
from dra_driver.journal.ledger import Ledger
from dra_driver.model.claim import ClaimRef
from dra_driver.model.gpu import SettingBefore
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import SettingStep

_log = structlog.get_logger(__name__)
S = TypeVar("S", bound=SettingStep)


class SettingSteps(Generic[S]):
    """Does and undoes the steps of type `kind`, in the GPU's lane.

    Also a `Restorer` of the cleaner: sets the values again that a reload of the NVIDIA driver reset.
    """

    def __init__(
        self,
        kind: type[S],
        ledger: Ledger,
        *,
        default: int | None,
        otherwise: str,
        set_again_event: str,
        lost_event: str,
        gone_event: str,
    ) -> None:
        """`default` is the value to restore without a note; None leaves the GPU as it is. `otherwise` says what to do
        if the GPU does not accept the value, such as `remove the interval from the claim`.

        The log has `set_again_event` and `lost_event` after a reload, and `gone_event` if nothing can be restored.
        """
        self.what = f"restoring the {kind.shown} after a reload of the NVIDIA driver"
        self._kind, self._ledger, self._default, self._otherwise = kind, ledger, default, otherwise
        self._set_again_event, self._lost_event, self._gone_event = set_again_event, lost_event, gone_event
        self._reloads = self._reloads_handled = 0
        self._lost: dict[tuple[str, S], str | None] = {}  # the last error

    @abstractmethod
    def bounds(self, step: S) -> tuple[int, int] | None:
        """Return the lowest and the highest value of the step's GPU; None if unknown. Raises: like `read`."""

    @abstractmethod
    def read(self, step: S) -> int | None:
        """Return the current value of the step's GPU; None if the NVIDIA driver does not report it.

        Raises: NotSupportedError; DriverGoneError if the GPU or its driver is missing, and the value with it;
        RetryableError.
        """

    @abstractmethod
    def write(self, step: S, value: int) -> None:
        """Set a value on the step's GPU. Raises: like `read`."""

    @abstractmethod
    def text(self, value: int) -> str:
        """Return a value with its unit, for messages."""

    def do(self, step: S, plan: Plan) -> None:
        """Set the value, whatever it is now: a reboot or driver reload resets it.

        Raises: ClaimRefusedError if the GPU does not accept it; StateError; the errors of `read`.
        """
        try:
            self._note(step)
            self._set(step, step.value)
        except NotSupportedError as error:
            refused = ClaimRefusedError(f"{error}; {self._otherwise}")
            refused.has_no_effect = error.has_no_effect
            raise refused from error

    def _note(self, step: S) -> None:
        """Write the current value to the ledger, if it is not there. Refuse a value outside the bounds."""
        try:
            least, most = self.bounds(step) or (step.value, step.value)
            if not least <= step.value <= most:
                raise ClaimRefusedError(
                    f"GPU {step.gpu_uuid} accepts a {step.shown} from {self.text(least)} to {self.text(most)}, but the "
                    f"claim asks for {self.text(step.value)}; {self._otherwise}"
                )
            before = self.read(step)
        except DraDriverError as error:
            error.has_no_effect = True
            raise
        if before is not None and not self._notes(step):
            self._ledger.save(SettingBefore(step.gpu_uuid, self._ledger.boot_id or "", step.tag, before))

    def _notes(self, step: S) -> list[SettingBefore]:
        notes = self._ledger.details(SettingBefore, step.gpu_uuid)
        return [note for note in notes if note.setting == step.tag]

    def _set(self, step: S, value: int) -> bool:
        """Set a value and read it back; return whether it was another one before."""
        if self.read(step) == value:
            return False
        self.write(step, value)
        if (found := self.read(step)) is not None and found != value:
            raise RetryableError(
                f"the NVIDIA driver reported success, but the {step.shown} of GPU {step.gpu_uuid} is "
                f"{self.text(found)}, not {self.text(value)}"
            )
        return True

    def undo(self, step: S, ref: ClaimRef) -> None:
        """Restore the value before the first claim, or the default. Raises: StateError; the errors of `read`."""
        notes = self._notes(step)
        before = notes[0].value if notes else self._default
        try:
            if before is not None:
                self._set(step, before)
        except (NotSupportedError, DriverGoneError) as error:
            # Without the driver or GPU the setting no longer exists.
            _log.info(self._gone_event, gpu_uuid=step.gpu_uuid, reason=str(error))
        for note in notes:
            self._ledger.remove(note)

    def in_place(self, step: S, record: ClaimRecord) -> bool:
        """Return True: the value is not visible without the driver."""
        return True

    def driver_reloaded(self) -> None:
        """Note that the NVIDIA driver was reloaded or the GPUs changed, so every value may be lost."""
        self._reloads += 1

    def gpus(self) -> set[str]:
        """Return the GPUs with lost values. Raises: StateError."""
        reloads = self._reloads
        if reloads != self._reloads_handled:
            records = self._ledger.records.all()
            self._reloads_handled = reloads
            for uid, record in records.items():
                self._lost |= {(uid, step): None for step in record.steps if isinstance(step, self._kind)}
        return {step.gpu_uuid for _, step in self._lost.copy()}

    def restore(self, gpu_uuid: str) -> None:
        """Set the lost values of a GPU again. Runs in the GPU's lane. Log each failure reason once.

        Raises: RetryableError, StateError; the value then counts as lost until the next attempt.
        """
        for lost, reason in self._lost.copy().items():
            (uid, step), reloads = lost, self._reloads
            if step.gpu_uuid != gpu_uuid:
                continue
            try:
                record = self._ledger.records.get(uid)
                if record is not None and step in record.steps and self._set_again(step):
                    _log.info(self._set_again_event, gpu_uuid=gpu_uuid, claim_uid=uid)
            except DraDriverError as error:
                if reason != str(error):
                    _log.error(self._lost_event, gpu_uuid=gpu_uuid, claim_uid=uid, reason=str(error))
                if not isinstance(error, NotSupportedError):
                    self._lost[lost] = str(error)
                    raise
            if reloads == self._reloads:
                self._lost.pop(lost, None)

    def _set_again(self, step: S) -> bool:
        # A value that can be read and has no note was not set yet, so `_note` must still find it.
        return (self.read(step) is None or bool(self._notes(step))) and self._set(step, step.value)
