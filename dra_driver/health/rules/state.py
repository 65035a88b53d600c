"""Decides how observations change the health of a device, and how each reason ends.

A harmless event never makes a bad device look healthy: its severity is the worst of its active reasons. A reason ends
only as its `Ending` says, never because a query failed. Two polls in a row without an answer make the GPU unresponsive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import chain

from dra_driver.health.rules.polling import (
    NVLINK,
    Finding,
    is_memory_read,
    nvlink_errors_found,
    nvlink_findings,
    reasons_found,
    requests_action,
    seen_nvlinks,
)
from dra_driver.health.rules.xids import NO_CHANGES, XidPolicy, action_of, severity_of_xid, xid_text
from dra_driver.model.dataclass import replace
from dra_driver.model.health import (
    LOST,
    UNMONITORED,
    UNRESPONSIVE,
    DoubleBitError,
    Hanging,
    HealthState,
    InstanceSeen,
    MonitoringState,
    NoAnswer,
    Observation,
    PolledHealth,
    PollResult,
    Reason,
    Reset,
    Serviced,
    Severity,
    Unreachable,
    Xid,
)
from dra_driver.model.remedies import RESET_OR_REBOOT
from dra_driver.model.units import counted

XID = "xid"
ECC = "ecc"
FLAPPING = "flapping"
_EVENT_KEYS = frozenset({XID, ECC})
_NO_ACTION = 0
_IF_IT_LASTS = "if this lasts, drain the node and reboot it"
LOST_NOW: Finding = (
    LOST,
    "",
    Severity.LOST,
    f"the GPU fell off the bus and does not answer; {RESET_OR_REBOOT}",
)


SETTLE_S = 30
"""How long NVML's recovery action must be NONE after the last event, because errors come in bursts."""
SETTLE_UNSURE_S = 600
"""For a program's fault if the NVIDIA driver reports no recovery action."""
REMEMBER_S = 600
"""How long an informational event remains a reason."""
SILENT_POLLS = 2
"""A single unanswered poll may coincide with a reset."""
NO_ANSWER, NVML_HANGS = "no-answer", "nvml-hangs"
"""Every query fails, or an NVML call does not return. After a hang a GPU cannot be reset, because nvidia-smi hangs
too.
"""
HANGS_NOW: Finding = (
    UNRESPONSIVE,
    NVML_HANGS,
    Severity.DEGRADED,
    f"the GPU does not answer: an NVML call does not return; {_IF_IT_LASTS}",
)
FLAPS, FLAP_WINDOW_S = 3, 3600
"""A device that becomes bad FLAPS times within FLAP_WINDOW_S seconds stays tainted after it recovers."""
HOLD_S, HOLD_MAX_S = 600, 4 * 3600
"""For how long, in seconds; doubled with each repetition."""
UNRESPONSIVE_AFTER_S = 60
"""How long an operation must hang until its GPU is unresponsive; claims wait for the same time."""
REBOOT_AFTER_S = 15 * 60


class Ending(Enum):
    GOOD_VALUE = "the query that found the fault reads a good value"
    ANSWER = "a live query of the GPU succeeds"
    RESET = "the GPU was reset, or NVML reports the recovery action NONE; no memory repair is pending"
    STILL = "like RESET, and the error count has not grown since"
    TIME = "time passes without another such event, and NVML requests no action"
    OURS = "gpu-dra-driver's hung operation has finished, events arrive again, or the hold time is over"


_BY_KEY: Mapping[str, Ending] = {
    ECC: Ending.STILL,
    FLAPPING: Ending.OURS,
    LOST: Ending.ANSWER,
    UNMONITORED: Ending.OURS,
}
"""Reasons with other keys end with a good value, unless `ending_of` handles their key itself."""


def ending_of(reason: Reason) -> Ending:
    if reason.key == UNRESPONSIVE:
        return Ending.ANSWER if reason.value else Ending.OURS
    if reason.key == XID:
        is_mild = reason.severity <= Severity.INFORMATION or action_of(int(reason.value)).is_program_fault
        return Ending.TIME if is_mild else Ending.RESET
    return _BY_KEY.get(reason.key, Ending.GOOD_VALUE)


def waits_for_reset(reason: Reason) -> bool:
    return ending_of(reason) in (Ending.RESET, Ending.STILL) and not reason.reset_seen


def observe(
    state: HealthState, observation: Observation, now: int, policy: XidPolicy = NO_CHANGES
) -> HealthState:
    """Return the state after an observation made at `now`.

    For an instance, observations of its whole GPU only clear reasons: new ones are added to the GPU's own state.
    """
    match observation:
        case Xid(number, reports_action):
            severity = severity_of_xid(number, policy, reports_action=reports_action)
            if severity is None:
                return state
            after = _with(state, Reason(XID, str(number), severity, now, now, xid_text(number, severity)))
        case DoubleBitError():
            text = "the NVIDIA driver reported an uncorrectable memory error"
            after = _with(state, Reason(ECC, "double-bit", Severity.UNHEALTHY, now, now, text))
        case PollResult(polled) if not polled.answered:
            after = _after_silence(state, polled, now)
        case PollResult(polled):
            after = _after_poll(state, polled, now)
        case Unreachable():
            after = _with_found(state, {LOST: [LOST_NOW]}, now)
        case NoAnswer(for_s):
            after = _no_answer(state, HANGS_NOW, now - int(for_s))
        case MonitoringState(problem):
            found = [] if problem is None else [(UNMONITORED, "", Severity.INFORMATION, problem)]
            after = _with_found(state, {UNMONITORED: found}, now)
        case Hanging(what, for_s):
            found = [] if what is None else _hang(what, for_s)
            found += _unanswered(state)
            after = _with_found(state, {UNRESPONSIVE: found}, now - int(for_s))
        case Reset():
            after = _reset(state)
        case Serviced(at):
            after = _serviced(state, at)
        case InstanceSeen(identity):
            after = _identified(state, identity)
    return _damped(state, after, now)


def _hang(what: str, for_s: float) -> list[Finding]:
    if for_s < UNRESPONSIVE_AFTER_S:
        return []
    if for_s < REBOOT_AFTER_S:
        text = f"the GPU does not respond: {what} takes too long; {_IF_IT_LASTS}"
        return [(UNRESPONSIVE, "", Severity.DEGRADED, text)]
    text = (
        f"the GPU does not respond: {what} has taken more than {REBOOT_AFTER_S // 60} minutes; drain the node and "
        "reboot it"
    )
    return [(UNRESPONSIVE, "", Severity.UNHEALTHY, text)]


def _with(state: HealthState, news: Reason) -> HealthState:
    """Add a reason. A known reason keeps the time of its first evidence."""
    known = next((reason for reason in state.reasons if reason.name == news.name), None)
    if known is not None:
        news = replace(
            news,
            since=known.since,
            severity=max(known.severity, news.severity),
            last_at=max(known.last_at, news.last_at),
        )
    return _having(state, [*(reason for reason in state.reasons if reason is not known), news])


def _having(state: HealthState, reasons: Iterable[Reason]) -> HealthState:
    return replace(state, reasons=tuple(sorted(reasons, key=lambda reason: reason.name)))


def _with_found(state: HealthState, found: Mapping[str, list[Finding]], now: int) -> HealthState:
    if state.target.is_instance:
        return state
    known = {reason.name: reason for reason in state.reasons}
    kept = [reason for reason in state.reasons if reason.key not in found]
    for findings in found.values():
        for key, value, severity, text in findings:
            before = known.get((key, value))
            since = now if before is None else before.since
            kept.append(Reason(key, value, severity, since, since, text, "poll"))
    return _having(state, kept)


def _unanswered(state: HealthState) -> list[Finding]:
    return [(*reason.name, reason.severity, reason.text) for reason in state.reasons if _is_silence(reason)]


def _is_silence(reason: Reason) -> bool:
    return reason.key == UNRESPONSIVE and ending_of(reason) is Ending.ANSWER


def _after_silence(state: HealthState, polled: PolledHealth, now: int) -> HealthState:
    """Values that the kernel driver knows without the GPU add reasons, but end none."""
    if state.target.is_instance:
        return state
    known = {reason.name for reason in state.reasons}
    for key, value, severity, text in chain.from_iterable(reasons_found(polled).values()):
        if (key, value) not in known:
            state = _with(state, Reason(key, value, severity, now, now, text, "poll"))
    polls = min(state.silent_polls + 1, SILENT_POLLS)
    state = replace(state, silent_polls=polls)
    if polls < SILENT_POLLS or state.has(LOST):
        return state
    text = f"the GPU does not answer: every query fails; {RESET_OR_REBOOT}"
    return _no_answer(state, (UNRESPONSIVE, NO_ANSWER, Severity.DEGRADED, text), now)


def _no_answer(state: HealthState, found: Finding, since: int) -> HealthState:
    key, value, severity, text = found
    before = next(filter(_is_silence, state.reasons), None)
    if before is not None and (before.value, before.text) == (value, text):
        return state  # the same object, so that nothing is written to disk
    since = since if before is None else before.since
    others = [reason for reason in state.reasons if reason is not before]
    return _having(state, [*others, Reason(key, value, severity, since, since, text, "poll")])


def _after_poll(state: HealthState, polled: PolledHealth, now: int) -> HealthState:
    if shows_reset(state, polled):
        state = _reset(state)
    is_still = _is_still(state, polled)
    if not state.target.is_instance:
        state = _with_memory_errors(state, polled, now)
        state = _with_nvlinks(state, polled, now)
        state = _with_found(state, {LOST: [], **reasons_found(polled)}, now)
        answered = [reason for reason in state.reasons if not _is_silence(reason)]
        state = _having(replace(state, silent_polls=0), answered)
    kept: list[Reason] = []
    for reason in state.reasons:
        if reason.key in _EVENT_KEYS:
            # A clock that was set back must not keep a reason forever.
            timed = replace(reason, last_at=min(reason.last_at, now), since=min(reason.since, now))
            if not _is_over(timed, polled, now, is_still=is_still):
                kept.append(timed)
        elif reason.key != FLAPPING or now < (state.held_until or 0) <= now + HOLD_MAX_S:
            kept.append(reason)
    is_held = any(reason.key == FLAPPING for reason in kept)
    return _having(replace(state, held_until=state.held_until if is_held else None), kept)


def shows_reset(state: HealthState, polled: PolledHealth) -> bool:
    """Whether the poll proves that the GPU was reset since `state` was recorded.

    A lost GPU comes back only by a reset, and only a reset lowers the memory error counter.
    """
    known, found = state.ecc_uncorrected, polled.ecc_uncorrected
    was_recounted = known is not None and found is not None and found < known
    return was_recounted or (state.has(LOST) and polled.answered)


def _is_still(state: HealthState, polled: PolledHealth) -> bool:
    """Whether the memory error counter is unchanged since the last poll (for an instance: was read) or is missing."""
    if polled.ecc_uncorrected is None:
        return "ecc_uncorrected" not in polled.failed
    return state.target.is_instance or state.ecc_uncorrected == polled.ecc_uncorrected


def _with_memory_errors(state: HealthState, polled: PolledHealth, now: int) -> HealthState:
    """Record new memory errors. Those before the first poll matter only if other values request an action."""
    found = polled.ecc_uncorrected
    if found is None:
        return state
    known, state = state.ecc_uncorrected, replace(state, ecc_uncorrected=found)
    if known is None or found <= known:
        return state
    text = f"{counted(found, 'uncorrectable memory error')} since the NVIDIA driver was loaded or the GPU was reset"
    return _with(state, Reason(ECC, "uncorrected", Severity.DEGRADED, now, now, text, "poll"))


def _with_nvlinks(state: HealthState, polled: PolledHealth, now: int) -> HealthState:
    found = dict(nvlink_errors_found(state, polled))
    if polled.nvlink_errors is not None:
        state = replace(state, nvlink_errors=polled.nvlink_errors)
    if polled.nvlinks is not None:
        seen = seen_nvlinks(state.nvlinks, polled.nvlinks)
        state, found[NVLINK] = replace(state, nvlinks=seen), nvlink_findings(polled, seen)
    return _with_found(state, found, now)


def _is_over(reason: Reason, polled: PolledHealth, now: int, *, is_still: bool) -> bool:
    if requests_action(polled) or not is_memory_read(polled):
        return False
    if ending_of(reason) is Ending.STILL and not is_still:
        return False
    if reason.reset_seen:
        return True
    passed, is_sure = now - reason.last_at, polled.recovery_action == _NO_ACTION
    if reason.severity <= Severity.INFORMATION:
        return passed >= REMEMBER_S
    if is_sure:
        return passed >= SETTLE_S
    # Without recovery actions, the driver cannot report that no action is needed, or that the GPU was reset.
    return ending_of(reason) is Ending.TIME and passed >= SETTLE_UNSURE_S


def _reset(state: HealthState) -> HealthState:
    """Mark reasons from events. They stay until a poll shows that the reset helped."""
    marked = [
        replace(reason, reset_seen=True) if reason.key in _EVENT_KEYS else reason for reason in state.reasons
    ]
    return _having(replace(state, ecc_uncorrected=None), marked)


def rebooted(state: HealthState, now: int) -> HealthState:
    return replace(observe(state, Reset(), now), nvlinks=None)


def _serviced(state: HealthState, at: int) -> HealthState:
    """Do the same as `_reset`, but keep later events and the error counter."""
    marked = [
        replace(reason, reset_seen=True) if reason.last_at < at and waits_for_reset(reason) else reason
        for reason in state.reasons
    ]
    return _having(state, marked)


def _identified(state: HealthState, identity: str | None) -> HealthState:
    """Set the identity. A new MIG instance with the same IDs starts with a clean state."""
    if identity is None or (state.identity is not None and state.identity != identity):
        return HealthState(state.target, identity=identity)
    return replace(state, identity=identity)


def _is_bad(state: HealthState) -> bool:
    return any(reason.severity >= Severity.DEGRADED for reason in state.reasons if reason.key != FLAPPING)


def _damped(before: HealthState, after: HealthState, now: int) -> HealthState:
    """Taint a device longer if it becomes bad repeatedly."""
    if _is_bad(after) and not _is_bad(before):
        recent = [at for at in after.setbacks if now - FLAP_WINDOW_S < at <= now]
        return replace(after, setbacks=(*recent, now))
    if _is_bad(after) or not _is_bad(before):
        return after
    times = len([at for at in after.setbacks if now - FLAP_WINDOW_S < at <= now])
    if times < FLAPS:
        return after
    until = now + min(HOLD_S * 2 ** (times - FLAPS), HOLD_MAX_S)
    text = f"the device became unhealthy {times} times in {FLAP_WINDOW_S} s, so its taint stays for {until - now} s"
    held = Reason(FLAPPING, "", Severity.DEGRADED, now, now, text)
    return _with(replace(after, held_until=max(until, after.held_until or 0)), held)
