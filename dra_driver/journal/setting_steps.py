"""Steps that set one value on a GPU, such as the length of its time slices; and their undo.

    (nothing) ──the value before is in the ledger──▶ noted ──▶ set ──the driver is reloaded──▶ lost
     ▲                                                │         │ ▲                             │
     └──── value restored, then the note removed ◀────┴─────────┘ └───────── set again ◀────────┘

The node's configuration can have a value for GPUs without a claim; then the undo sets it and keeps the note, until a
plugin without this configuration starts. A value that the NVIDIA driver does not report is not noted; its undo restores
the driver's default. The note of the first change stays until the value is restored, even if another claim sets the
value in between. A crash at any point leaves the note or nothing, and the step and its undo can run again. A reboot
voids the note.

If another program changes a value that is set, nothing fights with it: the change is a problem of the node until the
value is right again or the claim ends.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import structlog

from dra_driver.errors import (
    ClaimRefusedError,
    DeviceLostError,
    DraDriverError,
    DriverGoneError,
    NotSupportedError,
    RetryableError,
)
from dra_driver.journal.ledger import Ledger
from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import replace
from dra_driver.model.gpu import SettingBefore
from dra_driver.model.plan import Plan
from dra_driver.model.problems import NodeProblem
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
        otherwise: str,
        at_rest: S | None = None,
        has_rest_value: bool = False,
        gpus: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """`otherwise` says what to do if the GPU does not accept the value, such as `remove the interval from the
        claim`. For a setting that the NVIDIA driver reports, `at_rest` is a step for any GPU; with `has_rest_value`,
        its value is that of GPUs without a claim. `gpus` returns the UUIDs of the node's GPUs.
        """
        self.what = f"restoring the {kind.shown} after a reload of the NVIDIA driver"
        self._kind, self._ledger, self._otherwise = kind, ledger, otherwise
        self._at_rest, self._has_rest_value, self._all_gpus = at_rest, has_rest_value, gpus
        self._reloads = self._reloads_handled = 0
        self._lost: dict[tuple[str, S], str | None] = {}
        """The last error, by UID of the claim and step. Without a UID, the step is for a GPU without a claim."""
        self._set_values: dict[str, Any] = {}
        self._others: dict[str, tuple[Any, Any, bool]] = {}
        """By GPU, what was set, the other value that the last poll read, and whether the poll before read it too."""

    @abstractmethod
    def read(self, step: S) -> Any:
        """Return the current value of the step's GPU; None if the NVIDIA driver does not report it.

        Raises: NotSupportedError; DriverGoneError if the GPU or its driver is missing, and the value with it;
        RetryableError.
        """

    @abstractmethod
    def write(self, step: S, value: Any) -> None:
        """Set a value on the step's GPU; None restores the driver's default. Raises: like `read`."""

    @abstractmethod
    def text(self, value: Any) -> str:
        """Return a value with its unit, for messages."""

    # --- claims --------------------------------------------------------------------------------

    def do(self, step: S, plan: Plan) -> None:
        """Set the value, whatever it is now: a reboot or driver reload resets it.

        Raises: ClaimRefusedError if the GPU does not accept it; StateError; the errors of `read`.
        """
        try:
            self._note_and_set(step)
        except NotSupportedError as error:
            refused = ClaimRefusedError(f"{error}; {self._otherwise}")
            refused.has_no_effect = error.has_no_effect
            raise refused from error

    def _note_and_set(self, step: S) -> bool:
        """Write the current value to the ledger, if it is not there, and set the value; return whether it changed."""
        try:
            before = self.read(step)
        except DraDriverError as error:
            error.has_no_effect = True
            raise
        note = None
        if self._at_rest is not None and not self._notes(step.gpu_uuid):
            note = SettingBefore(step.gpu_uuid, self._ledger.boot_id or "", step.tag, before)
            self._ledger.save(note)
        try:
            return self._set(step, step.value)
        except DraDriverError as error:
            if error.has_no_effect and note is not None:
                self._ledger.remove(note)
            raise

    def _notes(self, gpu_uuid: str | None = None) -> list[SettingBefore]:
        if self._at_rest is None:
            return []
        notes = self._ledger.details(SettingBefore, gpu_uuid)
        return [note for note in notes if note.setting == self._at_rest.tag]

    def _set(self, step: S, value: Any) -> bool:
        """Set a value and read it back; return whether it was another one before."""
        self._set_values.pop(step.gpu_uuid, None)
        is_other = not self.is_same(self.read(step), value)
        if is_other:
            self.write(step, value)
            if (found := self.read(step)) is not None and not self.is_same(found, value):
                raise RetryableError(
                    f"the NVIDIA driver reported success, but the {step.shown} of GPU {step.gpu_uuid} is "
                    f"{self.text(found)}, not {self.text(value)}"
                )
        self._set_values[step.gpu_uuid] = value
        return is_other

    def undo(self, step: S, ref: ClaimRef) -> None:
        """Restore the value of a GPU without a claim. Raises: StateError; the errors of `read`."""
        try:
            self._rest(step)
        except (NotSupportedError, DriverGoneError) as error:
            # Without the driver or GPU the setting no longer exists.
            _log.info("setting_gone", gpu_uuid=step.gpu_uuid, setting=step.shown, reason=str(error))
            self._forget(step.gpu_uuid)

    def _rest(self, step: S) -> bool:
        """Set the value of a GPU without a claim; return whether it was another one before."""
        if self._at_rest is not None and self._has_rest_value:
            return self._note_and_set(self.accepted(replace(self._at_rest, gpu_uuid=step.gpu_uuid)))
        is_other, notes = False, self._notes(step.gpu_uuid)
        if notes:
            is_other = self._set(step, notes[0].value)
        elif self._at_rest is None:
            self.write(step, None)
        self._forget(step.gpu_uuid)
        return is_other

    def accepted(self, step: S) -> S:
        """Return the step for a GPU without a claim with a value that the GPU accepts. Raises: like `read`."""
        return step

    def is_same(self, found: Any, value: Any) -> bool:
        """Whether a value that was read is the one that was set."""
        return bool(found == value)

    def _forget(self, gpu_uuid: str) -> None:
        for note in self._notes(gpu_uuid):
            self._ledger.remove(note)
        self._set_values.pop(gpu_uuid, None)

    def in_place(self, step: S, record: ClaimRecord) -> bool:
        """Return True: the value is not visible without the driver."""
        return True

    # --- after a start of the plugin, and a reload of the driver ---------------------------------

    def driver_reloaded(self) -> None:
        """Note that the NVIDIA driver was reloaded or the GPUs changed, so every value may be lost."""
        self._reloads += 1

    def gpu_reset(self, gpu_uuid: str) -> None:
        """Note that a GPU without a claim may have been reset, and has lost its value."""
        if self._at_rest is not None:
            self._lost[("", replace(self._at_rest, gpu_uuid=gpu_uuid))] = None

    def gpus(self) -> set[str]:
        """Return the GPUs with lost values. Raises: StateError."""
        reloads = self._reloads
        if reloads != self._reloads_handled:
            records, noted = self._ledger.records.all(), {note.gpu_uuid for note in self._notes()}
            # Without a value for GPUs without a claim, what an earlier configuration has changed is restored.
            resting = [*self._all_gpus()] if self._has_rest_value else noted
            self._reloads_handled = reloads
            self._set_values.clear()
            for uid, record in records.items():
                self._lost |= {(uid, step): None for step in record.steps if isinstance(step, self._kind)}
            for lost in [lost for lost in self._lost.copy() if not lost[0]]:
                self._lost.pop(lost, None)
            for gpu in resting:
                self.gpu_reset(gpu)
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
                if self._set_again(uid, step):
                    _log.info(
                        "setting_restored", gpu_uuid=gpu_uuid, setting=step.shown, claim_uid=uid or None
                    )
            except DraDriverError as error:
                if not uid and isinstance(error, DeviceLostError):
                    self._lost.pop(lost, None)  # its return is a change of the hardware
                    continue
                if reason != str(error):
                    _log.error(
                        "setting_lost",
                        gpu_uuid=gpu_uuid,
                        setting=step.shown,
                        claim_uid=uid or None,
                        reason=str(error),
                    )
                if not isinstance(error, NotSupportedError):
                    self._lost[lost] = str(error)
                    raise
            if reloads == self._reloads:
                self._lost.pop(lost, None)

    def _set_again(self, uid: str, step: S) -> bool:
        """Set the value of a claim, or with an empty `uid` that of a GPU without a claim; return whether it was another
        one before.
        """
        if not uid:
            return not self._is_needed(step.gpu_uuid) and self._rest(step)
        record = self._ledger.records.get(uid)
        if record is None or step not in record.steps or record.phase != "prepared":
            return False
        if record.boot_id != self._ledger.boot_id:
            return False  # after a reboot, the kubelet prepares the claim again, or no pod needs it
        # A value that can be read and has no note was not set yet, so `do` must still find it.
        return (self.read(step) is None or bool(self._notes(step.gpu_uuid))) and self._set(step, step.value)

    def _is_needed(self, gpu_uuid: str) -> bool:
        """Whether a claim has set the value on this GPU in this boot, and it was not undone yet."""
        boot_id, records = self._ledger.boot_id, self._ledger.records.all().values()
        entered = [one.step for one in self._ledger.entries({gpu_uuid}) if one.boot_id == boot_id]
        held = [
            step for one in records if (one.phase, one.boot_id) == ("prepared", boot_id) for step in one.steps
        ]
        return any(isinstance(step, self._kind) and step.gpu_uuid == gpu_uuid for step in (*entered, *held))

    # --- what another program changed ------------------------------------------------------------

    def polled(self, gpu_uuid: str, found: Any) -> None:
        """Compare a value that was just read with the one that was set; None is a poll without the value.

        Only two equal polls in a row prove that another program changed the value: a poll may read it right before a
        step sets it.
        """
        wanted = self._set_values.get(gpu_uuid)
        if wanted is None or (found is not None and self.is_same(found, wanted)):
            self._others.pop(gpu_uuid, None)
        elif found is not None:
            before = self._others.get(gpu_uuid)
            self._others[gpu_uuid] = (wanted, found, before is not None and before[:2] == (wanted, found))

    def problems(self) -> list[NodeProblem]:
        """Return a problem for each value that could not be set again, and for each that another program changed."""
        lost = [
            (
                step.gpu_uuid,
                f"cannot restore the {step.shown} of GPU {step.gpu_uuid}: {reason}; gpu-dra-driver retries",
            )
            for (_, step), reason in self._lost.copy().items()
            if reason is not None
        ]
        changed = [
            (
                gpu,
                f"another program changed the {self._kind.shown} of GPU {gpu} from {self.text(wanted)} to "
                f"{self.text(found)}; find and stop it, and set {self.text(wanted)} again with nvidia-smi",
            )
            for gpu, (wanted, found, is_proven) in self._others.copy().items()
            if is_proven and self._set_values.get(gpu) == wanted
        ]
        return [
            *(NodeProblem("setting-lost", text, gpu) for gpu, text in lost),
            *(NodeProblem("setting-changed", text, gpu) for gpu, text in changed),
        ]
