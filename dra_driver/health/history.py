"""What happened to the health of the GPUs since the start, for people and for counters."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import structlog

from dra_driver.health.rules.endings import XID
from dra_driver.model.health import LOST, UNRESPONSIVE, HealthChange, HealthState, Reason, Severity

_log = structlog.get_logger(__name__)

_KEPT = 32


class HealthHistory:
    """The last changes of each GPU, and its Xids by number. `listener` hears of each change, but of what keeps nobody
    away only the first time."""

    def __init__(self, listener: Callable[[HealthChange], None]) -> None:
        self._listener = listener
        self._changes: dict[str, deque[HealthChange]] = {}
        self._xids: Counter[tuple[str, int]] = Counter()
        self._guard = threading.Lock()  # never held while the listener is called

    def of(self, gpu_uuid: str) -> Sequence[HealthChange]:
        """The last changes of a GPU and its instances, oldest first."""
        with self._guard:
            return tuple(self._changes.get(gpu_uuid, ()))

    def xid_counts(self) -> Mapping[tuple[str, int], int]:
        """How often each GPU UUID reported each Xid."""
        with self._guard:
            return dict(self._xids)

    def count_xid(self, gpu_uuid: str, number: int) -> None:
        """One more."""
        with self._guard:
            self._xids[gpu_uuid, number] += 1

    def forget(self, gone: HealthChange) -> None:
        """A GPU was taken out: tell, and drop what was kept of it."""
        with self._guard:
            self._changes.pop(gone.target.gpu_uuid, None)
            for key in [key for key in self._xids if key[0] == gone.target.gpu_uuid]:
                del self._xids[key]
        self._spread(gone)

    def add(self, change: HealthChange) -> None:
        """Keep, log and tell a change of a state. A slowdown that comes and goes fills neither log nor history; what
        happens to a device that is bad, or goes bad or well, is told each time."""
        is_known = self._keep(change)
        if not is_known or max(change.before, change.after) >= Severity.DEGRADED:
            self._spread(change)

    def note(self, event: HealthChange) -> None:
        """The same for an event that changed nothing: programs that fail over and over fill nothing."""
        if not self._keep(event):
            self._spread(event)

    def _keep(self, change: HealthChange) -> bool:
        """Whether the same was kept already; then it is counted, and becomes the latest."""
        with self._guard:
            entries = self._changes.setdefault(change.target.gpu_uuid, deque(maxlen=_KEPT))
            same = next((kept for kept in entries if _is_same(kept, change)), None)
            if same is not None:
                entries.remove(same)
                change = replace(change, times=same.times + 1)
            entries.append(change)
            return same is not None

    def _spread(self, change: HealthChange) -> None:
        _tell(change)
        try:
            self._listener(change)
        except Exception:  # noqa: BLE001  whoever listens must not end the watch
            _log.exception("health_listener_failed")


def change_between(before: HealthState, after: HealthState, now: int) -> HealthChange:
    """The entry for a state that became another."""
    known = {reason.name: reason.text for reason in before.reasons}
    active = {reason.name: reason.text for reason in after.reasons}
    came = [text for name, text in active.items() if known.get(name) != text]
    gone = [_short(reason) for reason in before.reasons if reason.name not in active]
    went = [f"{'no longer' if active else 'healthy again after'}: {', '.join(gone)}"] if gone else []
    is_hang = any(reason.key == UNRESPONSIVE and reason.text in came for reason in after.reasons)
    text = "; ".join(came + went)
    return HealthChange(after.target, now, before.severity, after.severity, text, is_hang=is_hang)


def _short(reason: Reason) -> str:
    """Without what to do, which does not matter any more."""
    return {LOST: "GPU lost", XID: f"Xid {reason.value}"}.get(reason.key, reason.text)


def _is_same(kept: HealthChange, change: HealthChange) -> bool:
    """Whether both say the same, at whatever time."""
    return kept == replace(change, at=kept.at, times=kept.times)


def _tell(change: HealthChange) -> None:
    log = _log.warning if change.after > change.before else _log.info
    log(
        "health_changed",
        subject=str(change.target),
        before=change.before.name.lower(),
        after=change.after.name.lower(),
        reasons=change.text,
    )
