"""Health as NVML reports it: polled signals, events, and sessions that are closed and reopened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pynvml
import pytest

from dra_driver.errors import DeviceLostError, NotSupportedError, NvmlUnavailableError
from dra_driver.health.rules.state import observe
from dra_driver.model.health import (
    DoubleBitError,
    HealthEvent,
    HealthState,
    HealthTarget,
    NvLinks,
    PolledHealth,
    PollResult,
    Xid,
)
from dra_driver.nvml.health_polls import read_health, read_instances
from dra_driver.nvml.health_source import HealthSource
from tests.fakes.hanging_nvml import HangingNvml
from tests.fakes.machines import SimulatedNode, silence
from tests.fakes.tables import tabled

LIVE = (
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetCurrentClocks*Reasons",
)
CLUSTER = "7f3c1ad2-96f4-4e0b-8b7a-0d5f6a2c9e11"


@pytest.fixture
def source(node: SimulatedNode) -> Iterator[HealthSource]:
    made = HealthSource(node.session)
    watch(made, *(gpu.uuid for gpu in node.machine.current().present))
    yield made
    made.close()


def watch(source: HealthSource, *uuids: str) -> None:
    """Register these GPUs in a new event set."""
    source.open_events()
    for gpu in uuids:
        source.register(gpu, None)


def uuid(node: SimulatedNode, index: int = 0) -> str:
    return node.machine.gpu(index).uuid


@pytest.mark.parametrize(
    "name", ["a30-mig-static", "gb10", "gb200-nvl72-tray", "hgx-h100-4", "vm-passthrough"]
)
def test_every_machine_is_well_at_first(opened, name):
    made = opened(name)
    for gpu in made.machine.current().present:
        signals = read_health(gpu.uuid)
        assert observe(HealthState(HealthTarget(gpu.uuid)), PollResult(signals), 1).reasons == ()


def test_every_signal(node):
    machine, gpu = node.machine, uuid(node)
    new = {
        "sram_exceeded": False,
        "memory_unrepairable": False,
        "repairs_pending": frozenset(),
        "power_limit_mw": 700_000,
        "pcie_narrow": False,
        "pcie_slow": False,
        "nvlinks": NvLinks(tuple(range(18)), "NVIDIA H100 80GB HBM3", to_switches=True),
        "nvlink_errors": {"crc": 0, "replay": 0, "recovery": 0},
    }
    well = PolledHealth(0, False, False, None, 0, "ready", "", frozenset(), accepts_work=True, **new)
    assert read_health(gpu) == well
    machine.set_recovery_action(0, pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET)
    machine.set_remapped_rows(0, uncorrectable=1, pending=1, failed=1)
    machine.set_gpu(0, ecc_corrected=9, ecc_uncorrected=4)
    machine.set_gpu(0, slowdown=0x8 | 0x40)
    assert read_health(gpu) == PolledHealth(
        4, True, True, None, 4, "ready", "", frozenset({"thermal"}), accepts_work=True, **new
    )
    machine.set_gpu(0, slowdown=0x8)
    assert read_health(gpu).slowdowns == {"hardware"}
    machine.set_gpu(0, slowdown=0)
    machine.set_remapped_rows(0)
    machine.reset_gpu(0)
    assert read_health(gpu) == well
    assert read_health(uuid(node, 1)) == well


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({"sram_exceeded": True}, {"sram_exceeded": True}),
        ({"memory_unrepairable": True}, {"memory_unrepairable": True}),
        ({"repairs_pending": [1, 0]}, {"repairs_pending": frozenset({"channel"})}),
        ({"repairs_pending": [0, 1]}, {"repairs_pending": frozenset({"tpc"})}),
        ({"pcie_link": [8, 16, 5, 5]}, {"pcie_narrow": True}),
        ({"pcie_link": [16, 16, 1, 5]}, {"pcie_slow": True}),
    ],
)
def test_signal_that_changes_rarely_is_read(node, facts, found):
    well = read_health(uuid(node))
    node.machine.set_gpu(0, **facts)
    assert read_health(uuid(node)) == replace(well, **found)


def test_pcie_generation_of_a_gpu_that_may_be_at_rest_is_unknown_and_ends_nothing(node):
    node.machine.set_gpu(0, pcie_link=[16, 16, 1, 5])
    gpu = uuid(node)
    state = observe(HealthState(HealthTarget(gpu)), PollResult(read_health(gpu)), 1)
    assert state.has("pcie-generation")
    node.machine.set_gpu(0, slowdown=0x1)
    assert read_health(gpu).pcie_slow is None
    assert observe(state, PollResult(read_health(gpu)), 2).has("pcie-generation")
    node.machine.set_fault("nvmlDeviceGetCurrentClocks*Reasons", code="unknown")
    assert observe(state, PollResult(read_health(gpu)), 3).has("pcie-generation")


def test_nvlinks_of_a_gpu_on_switches(node):
    links = NvLinks(tuple(range(18)), "NVIDIA H100 80GB HBM3", to_switches=True)
    node.machine.set_gpu(0, links_down=[4], links_unsupported=[17])
    assert read_health(uuid(node)).nvlinks == replace(links, up=(*range(4), *range(5, 17)))
    node.machine.set_gpu(0, links_down=list(range(18)))
    assert read_health(uuid(node)).nvlinks == replace(links, up=(), to_switches=None)
    node.machine.set_mig_mode(0, True)
    assert read_health(uuid(node)).nvlinks is None, "no link is up in MIG mode"


@pytest.mark.parametrize(("name", "to_switches"), [("hgx-h100-4", False), ("t4-4", None)])
def test_nvlinks_of_a_gpu_without_switches(opened, name, to_switches):
    made = opened(name)
    polled = read_health(uuid(made))
    assert (polled.nvlinks and polled.nvlinks.to_switches) == to_switches
    assert (polled.nvlink_errors is None) == (to_switches is None)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("dgx-a100-40gb", {"crc": 5, "replay": 3, "recovery": 4}),
        ("dgx-b200", {"recovery": 4}),
    ],
)
def test_nvlink_errors_are_those_that_the_gpu_counts(opened, name, found):
    made = opened(name)
    made.machine.set_gpu(0, nvlink_errors={"crc": 2, "crc data": 3, "replay": 3, "recovery": 4})
    assert read_health(uuid(made)).nvlink_errors == found


# --- what a poll costs -------------------------------------------------------------------------------

IDLE_CALLS = {
    "nvmlDeviceGetMinorNumber": 1,
    "nvmlDeviceGetRemappedRows": 1,
    "nvmlDeviceGetRetiredPagesPendingStatus": 1,
    "nvmlDeviceGetTotalEccErrors": 1,
    "nvmlDeviceGetCurrentClocksEventReasons": 1,
    "nvmlDeviceGetGpuFabricInfoV": 1,
    "nvmlDeviceGetFieldValues": 1,
    "nvmlSystemGetConfComputeSettings": 1,
}
RARE_CALLS = {
    "nvmlDeviceGetNvLinkState": 19,
    "nvmlDeviceGetNvLinkRemoteDeviceType": 1,
    "nvmlDeviceGetName": 1,
    "nvmlDeviceGetFieldValues": 1,
    "nvmlDeviceGetSramEccErrorStatus": 1,
    "nvmlDeviceGetUnrepairableMemoryFlag_v1": 1,
    "nvmlDeviceGetRepairStatus": 1,
    "nvmlDeviceGetPowerManagementLimit": 1,
    "nvmlDeviceGetCurrPcieLinkWidth": 1,
    "nvmlDeviceGetMaxPcieLinkWidth": 1,
}
GROWN = (
    "an idle poll of a GPU makes other calls of NVML than before. Eight GPUs are polled every 10 s within 0.4 % of a "
    "core: query what changes rarely in `_rare` of dra_driver/nvml/health_polls.py, or measure with `make bench` "
    "and change the table of this test"
)


def test_idle_poll_of_a_gpu_makes_the_calls_of_this_table_and_no_more(node):
    """On a machine whose idle GPUs support everything that is queried, except a bank remapper."""
    node.machine.set_gpu(0, slowdown=0x1)
    gpu = uuid(node)
    source = HealthSource(node.session)
    first = source.read(gpu, None)
    nvml = HangingNvml(node.session)
    try:
        assert nvml.calls_of(lambda: source.read(gpu, None, first)) == IDLE_CALLS, GROWN
        rare = Counter(IDLE_CALLS) + Counter(RARE_CALLS)
        assert nvml.calls_of(lambda: source.read(gpu, None)) == rare, GROWN
    finally:
        nvml.leave()


def test_gpu_without_a_fabric_is_queried_for_it_once(opened):
    made = opened("t4-4")
    nvml = HangingNvml(made.session)
    try:
        calls = nvml.calls_of(lambda: read_health(uuid(made)))
    finally:
        nvml.leave()
    assert [name for name in calls if "Fabric" in name] == ["nvmlDeviceGetGpuFabricInfoV"]


def test_bank_remap_is_unknown_where_the_branch_has_no_such_query(node):
    assert read_health(uuid(node)).bank_remap_pending is None


@pytest.mark.parametrize(("code", "is_answer"), [("timeout", False), ("not_supported", True)])
def test_gpu_without_any_of_the_live_queries_answers_by_its_temperature(node, code, is_answer):
    for function in LIVE:
        node.machine.set_fault(function, code="not_supported", gpu=0)
    assert read_health(uuid(node)).answered
    node.machine.set_fault("nvmlDeviceGetTemperature*", code=code, gpu=0)
    assert read_health(uuid(node)).answered == is_answer


def test_unreported_value_is_unknown(opened):
    made = opened("t4-4")
    gpu = uuid(made)
    signals = read_health(gpu)
    assert (signals.remap_pending, signals.fabric, signals.pages_pending) == (None, None, False)
    made.machine.set_gpu(0, retired_pending=1)
    assert read_health(gpu).pages_pending is True


def test_a_call_that_fails_hides_no_other_signal(node):
    node.machine.set_fault("nvmlDeviceGetTotalEccErrors", code="unknown")
    node.machine.set_fault("nvmlDeviceGetFieldValues", code="no-permission")
    signals = read_health(uuid(node))
    assert (signals.ecc_uncorrected, signals.recovery_action, signals.remap_pending) == (None, None, False)
    node.machine.set_fault("nvmlDeviceGetRemappedRows", code="reset-required")
    assert read_health(uuid(node)).recovery_action == pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET


def test_gpu_that_answers_nothing_is_silent_and_its_neighbour_is_not(node):
    silence(node.machine, 0)
    found = read_health(uuid(node))
    queries = {"ecc_uncorrected", "fabric", "pages_pending", "recovery_action", "remap_pending", "slowdowns"}
    queries |= {
        "memory_unrepairable",
        "nvlinks",
        "pcie_narrow",
        "power_limit_mw",
        "repairs_pending",
        "sram_exceeded",
    }
    assert found == PolledHealth(
        accepts_work=True, failed=frozenset({*queries, "temperature"}), answered=False
    )
    assert read_health(uuid(node, 1)).answered


@pytest.mark.parametrize("live", ["nvmlDeviceGetRemappedRows", "nvmlDeviceGetTemperature*"])
def test_successful_live_query_is_an_answer(node, live):
    for function in (*LIVE, "nvmlDeviceGetTemperature*"):
        if function != live:
            node.machine.set_fault(function, code="timeout", gpu=0)
    assert read_health(uuid(node)).answered


def test_values_cached_by_the_kernel_driver_are_not_an_answer(node):
    for function in (*LIVE, "nvmlDeviceGetTemperature*"):
        node.machine.set_fault(function, code="timeout", gpu=0)
    found = read_health(uuid(node))
    assert (found.fabric, found.recovery_action, found.answered) == ("ready", 0, False)


def test_recovery_action_that_fails_is_not_one_that_is_missing(node, monkeypatch):
    entry = pynvml.c_nvmlFieldValue_t()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", lambda _, fields: [entry] * len(fields))
    failed = {"nvlink_errors", "recovery_action"}
    for code, names in (("UNKNOWN", failed), ("NOT_SUPPORTED", set()), ("INVALID_ARGUMENT", set())):
        entry.nvmlReturn = getattr(pynvml, f"NVML_ERROR_{code}")
        found = read_health(uuid(node))
        assert (found.recovery_action, found.failed) == (None, names)


@tabled("facts", "state", "text")
def test_fabric(node, facts, state, text):
    node.machine.set_fabric(0, **facts)
    signals = read_health(uuid(node))
    assert (signals.fabric, signals.fabric_text) == (state, text)


@tabled("facts", "state", "text")
def test_fabric_without_its_health_from_a_library_that_knows_only_the_first_form(machine, facts, state, text):
    made = machine("dgx-h100")
    made.machine.set_missing_functions("nvmlDeviceGetGpuFabricInfoV")
    made.machine.set_fabric(0, **facts)
    made.session.reopen()
    signals = read_health(uuid(made))
    assert (signals.fabric, signals.fabric_text) == (state, text)


def test_a_fabric_that_cannot_be_read_now_is_not_requested_in_an_older_form(node):
    """The first version does not report the fabric's health, so its result would end a taint."""
    node.machine.set_fabric(0, health_mask=1)
    node.machine.set_fault("nvmlDeviceGetGpuFabricInfoV", code="unknown")
    assert read_health(uuid(node)).fabric is None


def test_a_lost_gpu_before_and_after_a_new_session(node):
    gpu = uuid(node)
    node.machine.lose_gpu(0)
    with pytest.raises(DeviceLostError):
        read_health(gpu)
    node.session.reopen()
    with pytest.raises(DeviceLostError, match="NVML shows no such GPU"):
        read_health(gpu)
    with pytest.raises(DeviceLostError):
        read_instances(gpu)
    node.machine.unload_driver()
    with pytest.raises(NvmlUnavailableError):
        read_health(uuid(node, 1))


def test_mig_devices_by_their_ids(opened):
    made = opened("h100-mig-static")
    gpu = next(gpu for gpu in made.machine.current().present if gpu.instances)
    expected = {(gi.id, ci.id): ci.uuid for gi, ci in gpu.mig_devices}
    assert expected
    assert read_instances(gpu.uuid) == expected
    plain = opened("dgx-h100")
    assert read_instances(uuid(plain)) == {}


def test_events_with_their_gpu_and_instance(node, source):
    machine = node.machine
    machine.raise_xid(1, 48)
    machine.raise_xid(0, 31, gpu_instance=3, compute_instance=0)
    machine.raise_xid(0, 95, gpu_instance=3)
    machine.raise_xid(2, 0, kind=pynvml.nvmlEventTypeDoubleBitEccError)
    machine.set_recovery_action(2, 1)
    assert [source.wait(1) for _ in range(6)] == [
        HealthEvent(uuid(node, 1), Xid(48)),
        HealthEvent(uuid(node), Xid(31), 3, 0),
        HealthEvent(uuid(node), Xid(95), 3, None),
        HealthEvent(uuid(node, 2), DoubleBitError()),
        HealthEvent(uuid(node, 2), Xid(154)),
        HealthEvent(uuid(node, 2), None),
    ]
    assert source.wait(0) is None


def test_a_gpu_that_falls_off_the_bus_is_named_all_the_same(node, source):
    node.machine.lose_gpu(4)
    gpu = next(gpu for gpu in node.machine.current().present if gpu.lost)
    assert source.wait(1) == HealthEvent(gpu.uuid, Xid(79))
    with pytest.raises(DeviceLostError):
        source.wait(1)


def test_a_gpu_that_cannot_be_registered_hides_no_other(node, source):
    node.machine.set_fault("nvmlDeviceGetSupportedEventTypes", code="not-supported", gpu=0)
    source.open_events()
    with pytest.raises(NotSupportedError, match="Not Supported"):
        source.register(uuid(node), None)
    source.register(uuid(node, 1), None)
    node.machine.raise_xid(1, 48)
    assert source.wait(1) == HealthEvent(uuid(node, 1), Xid(48))


def test_gpu_that_is_not_registered_again_sends_events_until_it_is_forgotten(node, source):
    """As long as its thread hangs."""
    watch(source, *(gpu.uuid for gpu in list(node.machine.current().present)[1:]))
    node.machine.raise_xid(0, 48)
    assert source.wait(1) == HealthEvent(uuid(node), Xid(48))
    source.forget(uuid(node))
    assert source.wait(0) is None
    assert len(source._sets) == 1, "a set that nobody needs is freed"
    node.machine.raise_xid(0, 48)
    node.machine.raise_xid(1, 74)
    assert source.wait(1) == HealthEvent(uuid(node, 1), Xid(74))
    assert source.wait(0) is None


def test_event_sets_of_many_changes_are_freed(node, source):
    everything = [gpu.uuid for gpu in node.machine.current().present]
    for _ in range(5):
        watch(source, *everything)
    assert source.wait(0) is None
    assert len(source._sets) == 1
    node.session.reopen()
    watch(source, *everything)
    assert len(source._sets) == 1


def test_registering_again_loses_nothing_that_no_one_has_heard_yet(node, source):
    node.machine.raise_xid(0, 48)
    node.machine.raise_xid(1, 74)
    watch(source, uuid(node, 1))
    received = [source.wait(1) for _ in range(2)]
    node.machine.raise_xid(1, 79)
    received.append(source.wait(1))
    assert received == [
        HealthEvent(uuid(node, number), Xid(xid)) for number, xid in ((0, 48), (1, 74), (1, 79))
    ]
    source.forget(uuid(node))
    assert source.wait(0) is None


def test_a_new_session_makes_registrations_void(node, source):
    assert source.set_number() == 1
    node.session.reopen()
    assert source.set_number() is None
    for call in (partial(source.wait, 0), partial(source.register, uuid(node), None)):
        with pytest.raises(NvmlUnavailableError, match="registered again"):
            call()
    watch(source, uuid(node))
    assert source.set_number() == 2
    node.machine.raise_xid(0, 48)
    assert source.wait(1) == HealthEvent(uuid(node), Xid(48))
    node.session.close()
    assert source.set_number() is None
    with pytest.raises(NvmlUnavailableError):
        source.wait(0)
    source.close()


@pytest.mark.parametrize("seen_by", ["waiter", "session"])
def test_a_driver_reload_is_counted(node, source, seen_by):
    assert source.driver_loads == 0
    node.session.reopen()
    watch(source, uuid(node))
    assert source.driver_loads == 0, "a new session alone is no reload"
    node.machine.unload_driver()
    if seen_by == "waiter":
        with pytest.raises(NvmlUnavailableError):
            source.wait(0)
    else:
        with pytest.raises(NvmlUnavailableError):
            node.session.reopen()
    node.machine.load_driver()
    node.session.reopen()
    watch(source, uuid(node))
    assert source.driver_loads == 1
