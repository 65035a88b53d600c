"""The health model: what counts, what clears, what is held back."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.health.rules.state import (
    FLAP_WINDOW_S,
    FLAPS,
    HOLD_MAX_S,
    HOLD_S,
    REBOOT_AFTER_S,
    REMEMBER_S,
    SETTLE_S,
    SETTLE_UNSURE_S,
    UNRESPONSIVE_AFTER_S,
    Ending,
    ending_of,
    observe,
)
from dra_driver.health.rules.xids import CATALOG, XidPolicy, severity_of_xid, xid_text
from dra_driver.journal import lanes
from dra_driver.model.health import (
    DoubleBitError,
    Hanging,
    HealthState,
    HealthTarget,
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
    condition,
)
from dra_driver.model.remedies import RESET_OR_REBOOT
from tests.fakes.tables import read_yaml

GPU = HealthState(HealthTarget("GPU-a"))
INSTANCE = HealthState(HealthTarget("GPU-a", 3, 0))
OK = PolledHealth(
    recovery_action=0,
    remap_pending=False,
    remap_failed=False,
    pages_pending=False,
    ecc_uncorrected=0,
    fabric="ready",
    slowdowns=frozenset(),
    accepts_work=True,
    sram_exceeded=False,
    memory_unrepairable=False,
    bank_remap_pending=False,
    repairs_pending=frozenset(),
    pcie_narrow=False,
    pcie_slow=False,
)
WELL = PollResult(OK)
UNREPORTED = PollResult(replace(OK, recovery_action=None))
NOW = 1_800_000_000
A_YEAR_S = 365 * 24 * 3600
S = Severity


def after(*observations: Observation, state: HealthState = GPU, now: int = NOW) -> HealthState:
    for observation in observations:
        state = observe(state, observation, now)
    return state


def names(state: HealthState) -> list[str]:
    return ["/".join(filter(None, reason.name)) for reason in state.reasons]


def transcribed() -> dict[int, tuple[str, str]]:
    """Immediate action and parts of each number, as NVIDIA's catalog had them on the day in the file."""
    text = (Path(__file__).parents[1] / "data/xid-catalog.csv").read_text()
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {int(row["xid"]): (row["immediate action"], row["parts"]) for row in rows}


OFFICIAL = transcribed()
RESETS_OR_REBOOTS = {"RESET_GPU", "RESTART_BM", "RESTART_VM", "WORKFLOW_XID_48", "WORKFLOW_NVLINK_ERR"}
UNDECIDED = [777, 142, 159, 169, *range(144, 151)]


def test_the_table_says_what_the_catalog_says():
    used = {number: action for number, (action, parts) in OFFICIAL.items() if parts}
    assert {number: entry.action.name for number, entry in CATALOG.items()} == used


@pytest.mark.parametrize("number", [key for key, row in OFFICIAL.items() if row[0] in RESETS_OR_REBOOTS])
@pytest.mark.parametrize("reports_action", [True, False])
def test_xid_that_needs_a_reset_or_reboot_in_the_catalog_is_unhealthy(number, reports_action):
    state = after(Xid(number, reports_action))
    assert (state.severity, names(state)) == (S.UNHEALTHY, [f"xid/{number}"])


@pytest.mark.parametrize("number", [key for key, row in OFFICIAL.items() if row[0] in RESETS_OR_REBOOTS])
def test_the_recovery_action_says_otherwise(number):
    """The driver requests no action half a minute later."""
    assert observe(after(Xid(number)), WELL, NOW + SETTLE_S).reasons == ()


@pytest.mark.parametrize(
    "number", [key for key, entry in CATALOG.items() if entry.action.name == "RESTART_APP"]
)
def test_faults_of_programs_say_nothing_about_the_gpu_except_for_memory_errors(number):
    state = observe(GPU, Xid(number), NOW)
    assert state == GPU if number != 94 else state.severity == S.DEGRADED
    assert xid_text(number, S.DEGRADED).startswith(f"Xid {number}: ")


@pytest.mark.parametrize("number", UNDECIDED)
def test_xid_decided_by_the_recovery_action_does_not_taint_if_that_is_reported(number):
    state = after(Xid(number))
    assert (state.severity, state.setbacks) == (S.INFORMATION, ())
    assert names(observe(state, WELL, NOW + SETTLE_S)) == [f"xid/{number}"]
    assert observe(state, PollResult(PolledHealth()), NOW + REMEMBER_S).reasons == ()


@pytest.mark.parametrize("number", UNDECIDED)
def test_xid_that_the_recovery_action_decides_lasts_until_a_reset_where_no_action_is_reported(number):
    state = after(Xid(number, reports_action=False))
    assert state.severity == S.DEGRADED
    assert observe(state, UNREPORTED, NOW + A_YEAR_S).severity == S.DEGRADED
    assert after(Reset(), UNREPORTED, state=state).reasons == ()


@pytest.mark.parametrize(
    ("number", "ignored", "fatal", "severity"),
    [
        (79, {79}, set(), None),
        (31, set(), {31}, S.UNHEALTHY),
        (777, set(), {777}, S.UNHEALTHY),
        (777, {777}, set(), None),
        (94, {94}, {94}, S.UNHEALTHY),
        (154, set(), set(), None),
    ],
)
def test_the_operator_has_the_last_word(number, ignored, fatal, severity):
    assert (
        severity_of_xid(number, XidPolicy(frozenset(ignored), frozenset(fatal)), reports_action=True)
        == severity
    )


@pytest.mark.parametrize(("reported", "expected"), read_yaml(Path(__file__).with_name("signals.yaml")))
def test_signals_come_and_go_with_the_look(reported, expected):
    signals = PolledHealth(**{k: frozenset(v) if isinstance(v, list) else v for k, v in reported.items()})
    state = observe(GPU, PollResult(signals), NOW)
    assert {"/".join(reason.name): reason.severity.name for reason in state.reasons} == expected
    again = observe(state, PollResult(signals), NOW + 60)
    assert [reason.since for reason in again.reasons] == [NOW] * len(expected)
    # Values that a poll does not report do not end a reason.
    assert observe(again, PollResult(PolledHealth()), NOW + 120).reasons == again.reasons
    assert observe(again, WELL, NOW + 180).reasons == ()
    assert observe(INSTANCE, PollResult(signals), NOW) == INSTANCE


def test_an_operation_that_hangs_makes_a_gpu_unresponsive_until_it_ends():
    assert UNRESPONSIVE_AFTER_S == lanes.UNRESPONSIVE_AFTER_S
    what = "the setting of the time slice"
    assert observe(GPU, Hanging(what, UNRESPONSIVE_AFTER_S - 0.1), NOW) == GPU
    state = observe(GPU, Hanging(what, UNRESPONSIVE_AFTER_S), NOW)
    text = f"the GPU does not respond: {what} takes too long; if this lasts, drain the node and reboot it"
    since = NOW - UNRESPONSIVE_AFTER_S
    assert state.reasons == (Reason("unresponsive", "", S.DEGRADED, since, since, text, "poll"),)
    for harmless in (WELL, Reset(), Hanging(what, REBOOT_AFTER_S - 0.1)):
        assert observe(state, harmless, NOW + 700).reasons == state.reasons
    [late] = observe(state, Hanging(what, REBOOT_AFTER_S), NOW + 900).reasons
    assert (late.severity, late.since) == (S.UNHEALTHY, since)
    assert "drain the node and reboot it" in late.text
    assert observe(state, Hanging(), NOW + 901).reasons == ()


def test_a_harmless_event_does_not_make_a_bad_gpu_healthy():
    for order in permutations([Xid(79), Xid(63), Xid(31), Xid(777), DoubleBitError(), Unreachable()]):
        assert after(*order).severity is S.LOST
        assert names(after(*order)) == ["ecc/double-bit", "gpu-lost", "xid/63", "xid/777", "xid/79"]


def test_an_xid_clears_when_nothing_is_requested_and_time_has_passed():
    state = after(Xid(74))
    assert names(observe(state, WELL, NOW + SETTLE_S - 1)) == ["xid/74"]
    assert observe(state, WELL, NOW + SETTLE_S).reasons == ()
    repeated = observe(state, Xid(74), NOW + 20)
    assert repeated.reasons[0].since == NOW
    assert names(observe(repeated, WELL, NOW + SETTLE_S)) == ["xid/74"]
    assert observe(repeated, WELL, NOW + 20 + SETTLE_S).reasons == ()


@pytest.mark.parametrize(
    "signals",
    [
        replace(OK, recovery_action=1),
        replace(OK, remap_pending=True),
        replace(OK, remap_failed=True),
        replace(OK, pages_pending=True),
    ],
)
def test_an_xid_stays_while_the_check_fails(signals):
    state = observe(after(Xid(48)), PollResult(signals), NOW + 100_000)
    assert "xid/48" in names(state)


RESETS = sorted(number for number, row in OFFICIAL.items() if row[0] == "RESET_GPU")


@pytest.mark.parametrize("event", [*map(Xid, RESETS), Xid(79), Xid(48), Xid(74), Xid(92), DoubleBitError()])
def test_event_lasts_until_a_reset_where_the_branch_reports_no_recovery_action(event):
    state = observe(observe(after(event), event, NOW + 100), UNREPORTED, NOW + 100)
    for passed in (SETTLE_S, SETTLE_UNSURE_S, A_YEAR_S):
        assert names(observe(state, UNREPORTED, NOW + 100 + passed)) == names(state)
    unwell = observe(state, PollResult(replace(OK, recovery_action=None, remap_pending=True)), NOW + 200)
    assert "row-remap/pending" in names(unwell)
    assert after(Reset(), UNREPORTED, UNREPORTED, state=unwell, now=NOW + 300).reasons == ()


def test_xid_of_a_program_ends_by_time_where_the_branch_reports_no_recovery_action():
    fatal = XidPolicy(fatal=frozenset({31}))
    state = observe(observe(GPU, Xid(94), NOW), Xid(31), NOW, fatal)
    assert names(observe(state, UNREPORTED, NOW + SETTLE_UNSURE_S - 1)) == ["xid/31", "xid/94"]
    assert observe(state, UNREPORTED, NOW + SETTLE_UNSURE_S).reasons == ()


def test_serviced_ends_what_began_before_and_only_when_the_gpu_is_well():
    state = observe(observe(after(Xid(119), DoubleBitError()), Xid(62), NOW + 10), Xid(94), NOW)
    serviced = observe(state, Serviced(NOW + 9), NOW + 20)
    assert names(serviced) == names(state), "it alone proves nothing"
    assert names(after(SILENT, SILENT, state=serviced)) == sorted([*names(state), "unresponsive/no-answer"])
    assert names(after(UNREPORTED, UNREPORTED, state=serviced, now=NOW + 20)) == ["xid/62", "xid/94"]
    asks = PollResult(replace(OK, recovery_action=1))
    assert {*names(state)} <= {*names(after(asks, state=serviced))}
    lost = after(Unreachable(), Serviced(NOW + 9))
    assert names(lost) == ["gpu-lost"], "that ends with an answer"


SILENT = PollResult(PolledHealth(failed=frozenset({"slowdowns", "recovery_action"}), answered=False))


def test_silent_gpu_is_unresponsive_after_the_second_poll_in_a_row_until_it_answers():
    once = observe(GPU, SILENT, NOW)
    assert (once.reasons, after(WELL, SILENT, state=once).reasons) == ((), ())
    state = after(SILENT, SILENT, state=once)
    assert (names(state), state.severity) == (["unresponsive/no-answer"], S.DEGRADED)
    assert after(SILENT, Reset(), Hanging(), MonitoringState(), state=state, now=NOW + A_YEAR_S) == state
    assert after(WELL, state=state).shown == ()
    hung = observe(state, NoAnswer(35.0), NOW + 100)
    assert (names(hung), hung.reasons[0].since) == (["unresponsive/nvml-hangs"], NOW)
    assert names(after(SILENT, SILENT, state=hung)) == ["unresponsive/no-answer"]
    assert after(Reset(), Hanging(), state=hung) == hung
    [alone] = observe(GPU, NoAnswer(35.0), NOW).reasons
    assert (alone.since, RESET_OR_REBOOT in alone.text) == (NOW - 35, False), "nvidia-smi hangs too"
    assert (after(WELL, state=hung).shown, after(SILENT, state=hung).severity) == ((), S.DEGRADED)
    hanging = after(Hanging("the time slice", UNRESPONSIVE_AFTER_S), state=state)
    assert names(hanging) == ["unresponsive", "unresponsive/no-answer"]
    assert names(after(WELL, state=hanging)) == ["unresponsive"]
    assert names(after(Hanging(), state=hanging)) == ["unresponsive/no-answer"]
    assert after(SILENT, SILENT, state=INSTANCE) == INSTANCE, "the state of the whole GPU has it"


EVERYTHING = [Xid(119), Xid(777), Xid(94), Xid(13), DoubleBitError(), Unreachable()]


@pytest.mark.parametrize("is_reset", [False, True])
def test_silent_poll_ends_no_reason(is_reset):
    bad = PollResult(
        PolledHealth(1, True, True, True, 3, "broken", "", frozenset({"thermal"}), accepts_work=False)
    )
    state = after(bad, *EVERYTHING, *([Reset()] if is_reset else []))
    later = after(SILENT, SILENT, SILENT, state=state, now=NOW + A_YEAR_S)
    assert {*names(state)} <= {*names(later)}
    other = PolledHealth(2, fabric="limited", failed=frozenset({"slowdowns"}), answered=False)
    added = {*names(state), "recovery-action/reboot", "fabric/limited"}
    assert added <= {*names(after(PollResult(other), state=state))}
    fabric = PollResult(
        PolledHealth(fabric="ready", recovery_action=0, failed=frozenset({"slowdowns"}), answered=False)
    )
    assert {*names(state)} <= {*names(after(fabric, state=state))}, (
        "the kernel driver knows these without the GPU"
    )


@pytest.mark.parametrize("failed", ["recovery_action", "remap_pending", "pages_pending"])
@pytest.mark.parametrize("is_reset", [False, True])
def test_query_that_failed_ends_no_event(failed, is_reset):
    state = after(Xid(119), Xid(94), DoubleBitError(), *([Reset()] if is_reset else []))
    values = {"remap_pending": {"remap_pending": None, "remap_failed": None}}.get(failed, {failed: None})
    poll = PollResult(replace(OK, **values, failed=frozenset({failed})))
    assert names(after(poll, poll, state=state, now=NOW + A_YEAR_S)) == names(state)
    assert after(WELL, WELL, state=state, now=NOW + A_YEAR_S).reasons == ()


def test_memory_errors_end_when_their_count_stayed_still_after_the_reset():
    def look(count: int | None, *failed: str) -> PollResult:
        return PollResult(replace(OK, recovery_action=None, ecc_uncorrected=count, failed=frozenset(failed)))

    state = after(look(5), look(7), Reset())
    assert names(after(look(1), state=state)) == ["ecc/uncorrected"]
    assert names(after(look(1), look(None, "ecc_uncorrected"), state=state)) == ["ecc/uncorrected"]
    assert after(look(1), look(1), state=state).reasons == ()
    again = after(look(1), look(2), look(2), state=state)
    assert names(again) == ["ecc/uncorrected"], "memory errors after the reset need another one"
    assert after(look(None), look(None), state=after(DoubleBitError(), Reset())).reasons == ()


def test_time_ends_xids_of_programs_alone():
    by_time = {
        number
        for number in OFFICIAL
        if ending_of(Reason("xid", str(number), S.UNHEALTHY, NOW, NOW, "")) is Ending.TIME
    }
    assert by_time == {
        number for number, row in OFFICIAL.items() if row[0] in ("RESTART_APP", "WORKFLOW_XID_45")
    } | {43, 137}


@pytest.mark.parametrize("signals", [OK, PolledHealth()])
def test_a_reset_clears_at_the_next_look(signals):
    state = after(Xid(48), Reset())
    assert state.severity is S.UNHEALTHY, "a reset alone proves nothing"
    assert observe(state, PollResult(signals), NOW).reasons == ()
    assert names(observe(state, PollResult(replace(OK, recovery_action=2)), NOW)) == [
        "recovery-action/reboot",
        "xid/48",
    ]
    assert names(after(Xid(48), Reset(), Xid(48), PollResult(signals))) == ["xid/48"], (
        "it came again after the reset"
    )


def test_a_lost_gpu_that_answers_was_reset():
    state = after(Xid(79), Unreachable())
    assert state.severity is S.LOST
    assert names(observe(state, Unreachable(), NOW + 500)) == ["gpu-lost", "xid/79"]
    assert observe(state, PollResult(PolledHealth()), NOW + 1).reasons == ()


def test_memory_errors_count_from_the_first_check_on():
    def look(count: int) -> PollResult:
        return PollResult(replace(OK, ecc_uncorrected=count))

    state = after(look(5))
    assert state.reasons == ()
    state = observe(state, look(7), NOW + 10)
    assert (state.severity, names(state)) == (S.DEGRADED, ["ecc/uncorrected"])
    assert "7 uncorrectable" in state.reasons[0].text
    assert observe(state, look(7), NOW + 10 + SETTLE_S).reasons == ()
    fallen = observe(
        after(Xid(95), state=state, now=NOW + 10), PollResult(PolledHealth(ecc_uncorrected=0)), NOW + 11
    )
    assert names(fallen) == ["ecc/uncorrected"], (
        "only a reset takes the count back, which must stay still then"
    )
    assert after(PollResult(PolledHealth(ecc_uncorrected=0)), state=fallen).reasons == ()


def test_unmonitored_is_information_and_goes():
    state = after(MonitoringState("the GPU has no events"))
    assert (state.severity, names(state)) == (S.INFORMATION, ["unmonitored"])
    assert after(MonitoringState(), state=state).reasons == ()


def test_another_instance_under_the_same_ids_starts_clean():
    bad = after(Xid(95), InstanceSeen("MIG-1"), state=INSTANCE)
    assert (bad.severity, bad.identity) == (S.UNHEALTHY, "MIG-1")
    assert after(InstanceSeen("MIG-1"), state=bad) == bad
    assert after(InstanceSeen("MIG-2"), state=bad) == replace(INSTANCE, identity="MIG-2")
    assert after(InstanceSeen(None), state=bad) == INSTANCE
    assert after(Unreachable(), MonitoringState("no"), state=bad) == bad, "that is the GPU's own state"
    assert observe(bad, WELL, NOW + SETTLE_S).reasons == ()


def _bad_and_well(state: HealthState, at: int) -> HealthState:
    return observe(observe(state, Xid(74), at), WELL, at + SETTLE_S)


def test_a_gpu_that_goes_bad_again_and_again_is_held_longer_each_time():
    state, at = GPU, NOW
    for _ in range(FLAPS - 1):
        state = _bad_and_well(state, at)
        assert state.severity is S.OK
        at += 100
    for turn in range(3):
        state = _bad_and_well(state, at)
        at += SETTLE_S
        hold = HOLD_S * 2**turn
        assert (state.severity, names(state), state.held_until) == (S.DEGRADED, ["flapping"], at + hold)
        assert names(observe(state, WELL, at + hold - 1)) == ["flapping"]
        well = observe(state, WELL, at + hold)
        assert (well.reasons, well.held_until) == ((), None)
    quiet = at + FLAP_WINDOW_S + HOLD_MAX_S
    assert _bad_and_well(observe(state, WELL, quiet), quiet).severity is S.OK


def test_old_setbacks_are_forgotten_but_not_what_they_brought():
    late = NOW + FLAP_WINDOW_S
    state = observe(replace(GPU, setbacks=(NOW, late - 10)), Xid(74), late)
    assert state.setbacks == (late - 10, late)
    far = late + 5000
    flapping = Reason("flapping", "", S.DEGRADED, NOW, NOW, "held")
    held = replace(
        state, reasons=(flapping, *state.reasons), setbacks=(late - 10, late, late), held_until=far
    )
    assert observe(held, WELL, late + SETTLE_S).held_until == far


def test_a_milder_policy_does_not_make_what_happened_milder():
    strict, mild = XidPolicy(fatal=frozenset({777})), XidPolicy()
    state = observe(observe(GPU, Xid(777), NOW, strict), Xid(777), NOW + 1, mild)
    assert state.severity is S.UNHEALTHY


def test_the_hold_has_an_end():
    state = GPU
    for turn in range(12):
        state = _bad_and_well(state, NOW + turn * 60)
    assert state.held_until == NOW + 11 * 60 + SETTLE_S + HOLD_MAX_S


def test_a_clock_that_was_set_back_holds_nothing_for_ever():
    state = GPU
    for turn in range(3):
        state = _bad_and_well(state, NOW + turn * 60)
    state = observe(state, Xid(74), NOW + 300)
    earlier = NOW - 10_000_000
    state = observe(state, WELL, earlier)
    assert names(state) == ["xid/74"]
    assert observe(state, WELL, earlier + SETTLE_S).severity is S.OK


def test_without_a_recent_look_nothing_is_known():
    words = [condition(state, is_fresh=True) for state in (None, GPU, after(Xid(777)), after(Xid(94)))]
    assert words == ["ok", "ok", "information", "degraded"]
    assert condition(after(Xid(79)), is_fresh=True) == "unhealthy"
    assert condition(after(Unreachable()), is_fresh=True) == "lost"
    assert condition(after(Xid(79)), is_fresh=False) == condition(None, is_fresh=False) == "unknown"


_numbers = st.sampled_from([13, 31, 48, 63, 74, 79, 94, 154, 777])
_events = st.one_of(
    st.builds(Xid, _numbers),
    st.just(DoubleBitError()),
    st.just(Unreachable()),
    st.just(MonitoringState("no events")),
)
_signals = st.builds(
    PolledHealth,
    recovery_action=st.sampled_from([None, 0, 1, 4]),
    remap_pending=st.sampled_from([None, False, True]),
    ecc_uncorrected=st.sampled_from([None, 0, 1, 2]),
    fabric=st.sampled_from([None, "ready", "pending"]),
    accepts_work=st.sampled_from([None, True, False]),
)
_anything = st.one_of(_events, st.builds(PollResult, _signals), st.just(Reset()), st.just(MonitoringState()))


@given(st.lists(_events, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_events_does_not_matter(events, random):
    shuffled = list(events)
    random.shuffle(shuffled)
    assert after(*shuffled).shown == after(*events).shown


@given(st.lists(_anything, max_size=8), _events)
def test_an_event_never_makes_it_better(before, event):
    state = after(*before)
    assert after(event, state=state).severity >= state.severity


@given(st.lists(st.tuples(_anything, st.integers(0, 400)), max_size=12))
def test_cleared_reason_does_not_return_by_itself(steps):
    state, now = GPU, NOW
    for observation, passed in steps:
        now += passed
        state = observe(state, observation, now)
    state = after(Reset(), WELL, WELL, MonitoringState(), state=state, now=now)
    assert set(names(state)) <= {"flapping"}
    for wait in (1, SETTLE_S, HOLD_MAX_S, 2 * HOLD_MAX_S):
        state = observe(state, WELL, now + wait)
        assert set(names(state)) <= {"flapping"}
    assert state.reasons == ()


@given(st.lists(_anything, max_size=8))
def test_looking_twice_changes_nothing(observations):
    state = after(*observations, WELL, WELL)
    assert after(WELL, state=state) == state
