"""NVLinks as a signal of health: compared with the links since the boot and with equal GPUs, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.health import poller
from dra_driver.health.rules.polling import compared, seen_nvlinks
from dra_driver.health.rules.state import observe
from dra_driver.health.rules.taints import device_taints
from dra_driver.health.store import HealthStore, KeptHealth
from dra_driver.model.health import HealthState, HealthTarget, NvLinks, PolledHealth, PollResult
from tests.health.test_monitor import MIG_GPU, Bench

GPU = HealthTarget("GPU-1")
ALL = NvLinks(tuple(range(18)), "NVIDIA H100 80GB HBM3", to_switches=True)
DIRECT = replace(ALL, to_switches=False)
NONE = replace(ALL, up=(), to_switches=None)
EVERY = poller._RARE_EVERY_S

MakeBench = Callable[[str], Bench]


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[MakeBench]:
    made: list[Bench] = []

    def make(name: str) -> Bench:
        made.append(Bench(tmp_path, name))
        return made[-1]

    yield make
    for bench in made:
        bench.monitor.stop()
        bench.node.close()


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    made = make_bench("dgx-h100")
    made.turn(10)
    return made


def without(links: NvLinks, *down: int) -> NvLinks:
    return replace(links, up=tuple(link for link in links.up if link not in down))


def found(state: HealthState) -> list[tuple[str, str, str]]:
    return [(reason.key, reason.value, reason.severity.name) for reason in state.reasons]


def polled(state: HealthState, links: NvLinks | None, *others: NvLinks | None) -> HealthState:
    return observe(state, PollResult(compared(PolledHealth(nvlinks=links), others)), 10)


# --- what follows from the links ---------------------------------------------------------------------


@pytest.mark.parametrize(("links", "severity"), [(ALL, "DEGRADED"), (DIRECT, "INFORMATION")])
def test_link_that_was_up_and_is_down_is_a_reason_until_it_is_up_again(links: NvLinks, severity: str) -> None:
    state = polled(HealthState(GPU), links)
    assert (state.reasons, state.nvlinks) == ((), links)
    state = polled(state, without(links, 3, 7))
    assert found(state) == [("nvlink", "down", severity)]
    where = "switches" if links.to_switches else "other GPUs"
    assert state.reasons[0].text == f"NVLinks to {where} have gone down since the boot: 3, 7"
    assert found(polled(state, None)) == [("nvlink", "down", severity)], (
        "a poll that did not read them ends nothing"
    )
    state = polled(state, without(links, 3))
    assert state.reasons[0].text.endswith("since the boot: 3")
    assert polled(state, links).reasons == ()


def test_all_links_that_are_down_are_known_to_have_led_to_switches() -> None:
    state = polled(polled(HealthState(GPU), ALL), NONE)
    assert found(state) == [("nvlink", "down", "DEGRADED")]


@pytest.mark.parametrize(
    ("mine", "others", "reasons"),
    [
        (without(ALL, 5), [ALL, without(ALL, 5, 6)], [("nvlink", "fewer", "DEGRADED")]),
        (NONE, [ALL], [("nvlink", "fewer", "DEGRADED")]),
        (ALL, [without(ALL, 5)], []),
        (ALL, [], []),
        (without(ALL, 5), [None], []),
        (without(ALL, 5), [replace(ALL, product_name="NVIDIA H200")], []),
        (replace(without(ALL, 5), product_name=None), [replace(ALL, product_name=None)], []),
        (without(DIRECT, 5), [DIRECT], [("nvlink", "fewer", "INFORMATION")]),
        # A pair of boards without a bridge, next to one that has bridges.
        (NONE, [DIRECT], []),
        (without(DIRECT, 5), [ALL], []),
    ],
)
def test_gpu_with_fewer_links_than_an_equal_one_has_a_reason_from_the_start(
    mine: NvLinks, others: list[NvLinks | None], reasons: list[tuple[str, str, str]]
) -> None:
    state = polled(HealthState(GPU), mine, *others)
    assert found(state) == reasons
    assert polled(state, replace(ALL, to_switches=mine.to_switches), *others).reasons == ()


def test_links_since_the_boot_are_all_that_were_ever_up() -> None:
    assert seen_nvlinks(None, NONE) == NONE
    assert seen_nvlinks(without(ALL, 1), without(ALL, 2)) == ALL
    assert seen_nvlinks(ALL, NONE) == ALL


@pytest.mark.parametrize("kind", ["crc", "recovery", "replay"])
def test_errors_that_grow_are_a_reason_until_they_are_still(kind: str) -> None:
    state = HealthState(GPU)

    def count(errors: int | None) -> list[tuple[str, str, str]]:
        nonlocal state
        errors_of = None if errors is None else {kind: errors}
        state = observe(state, PollResult(PolledHealth(nvlink_errors=errors_of)), 10)
        return found(state)

    grown = [("nvlink-errors", kind, "INFORMATION")]
    assert count(5) == [], "errors of before the first poll are not news"
    assert count(6) == grown
    assert count(None) == grown, "a poll that did not read them ends nothing"
    assert count(9) == grown
    assert count(9) == []
    assert count(0) == [], "a reset starts the count again"
    assert count(1) == grown


# --- over restarts and boots -------------------------------------------------------------------------


def test_links_are_kept_over_a_restart_and_error_counts_are_not(tmp_path: Path) -> None:
    kept = KeptHealth("boot-1", None, (HealthState(GPU, nvlinks=ALL, nvlink_errors={"crc": 1}),))
    HealthStore(tmp_path / "health.json").save(kept)
    assert HealthStore(tmp_path / "health.json").load() == KeptHealth(
        "boot-1", None, (HealthState(GPU, nvlinks=ALL),)
    )


def test_link_that_goes_down_while_the_plugin_is_away_is_noticed_in_the_same_boot_only(bench: Bench) -> None:
    for gpu in range(8):
        bench.machine.set_gpu(gpu, links_down=[4])
    bench.monitor.stop()
    bench.restarted("boot-1").stop()
    bench.turn()
    assert [bench.reasons(gpu) for gpu in range(8)] == [["nvlink/down"]] * 8
    bench.monitor.stop()
    bench.restarted("boot-2")
    bench.turn()
    assert [bench.reasons(gpu) for gpu in range(8)] == [[]] * 8


# --- the whole way -----------------------------------------------------------------------------------


def test_gpu_on_switches_with_a_link_down_gets_a_taint_within_a_minute(bench: Bench) -> None:
    bench.machine.set_gpu(2, links_down=[4])
    bench.turn(10, times=5)
    assert bench.tainted() == {"2": ["nvlink=down:NoSchedule"]}
    bench.machine.set_gpu(2, links_down=[])
    bench.turn(10)
    assert bench.tainted() == {}


def test_gpu_on_switches_that_never_had_all_links_is_noticed_with_the_second_poll(bench: Bench) -> None:
    bench.machine.set_gpu(0, links_down=[4])
    (bench.directory / "health.json").unlink()
    bench.restarted("boot-1")
    bench.turn()
    bench.turn(10)
    assert bench.tainted() == {"0": ["nvlink=fewer:NoSchedule"]}
    state = bench.monitor.book.state(HealthTarget(bench.uuids[0]))
    assert state.reasons[0].text == ("only 17 NVLinks to switches are up; another GPU of this machine had 18")


def test_gpu_with_direct_links_is_distinguished_and_its_mig_devices_are_not_affected(
    make_bench: MakeBench,
) -> None:
    bench = make_bench("hgx-h100-4")
    for gpu in (0, MIG_GPU):
        bench.machine.set_gpu(gpu, links_down=list(range(18)))
    bench.turn(EVERY)
    assert bench.tainted() == {"0": ["nvlink=down:None"]}, "the other one is in MIG mode"
    bench.machine.set_gpu(MIG_GPU, links_down=[4])
    bench.turn(EVERY)
    bench.machine.set_gpu(MIG_GPU, links_down=[4, 5])
    bench.turn(EVERY)
    assert bench.reasons(MIG_GPU) == ["nvlink/down"]
    shares = [device for device in bench.inventory.devices() if device.gpu.uuid == bench.uuids[MIG_GPU]]
    assert [device_taints(device, bench.monitor.book.states(), {}) for device in shares] == [(), ()]


@pytest.mark.parametrize("name", ["dgx-a100-40gb", "dgx-b200"])
def test_link_that_recovers_again_and_again_is_shown_without_a_taint(
    make_bench: MakeBench, name: str
) -> None:
    bench = make_bench(name)
    bench.turn(10)
    bench.machine.set_gpu(0, nvlink_errors={"recovery": 3})
    bench.turn(EVERY)
    assert (bench.reasons(0), bench.tainted()) == (["nvlink-errors/recovery"], {})
    bench.turn(10)
    assert bench.reasons(0) == ["nvlink-errors/recovery"], "the next poll does not read the counts"
    bench.turn(EVERY)
    assert bench.reasons(0) == []


def test_rarely_changing_values_are_read_in_each_poll_while_the_gpu_is_bad(bench: Bench) -> None:
    bench.machine.set_gpu(0, memory_unrepairable=True)
    bench.turn(10)
    assert bench.reasons(0) == []
    bench.turn(EVERY)
    assert bench.reasons(0) == ["memory/unrepairable"]
    bench.machine.set_gpu(0, memory_unrepairable=False)
    bench.turn(10)
    assert bench.reasons(0) == []


def test_event_has_everything_read_at_once(bench: Bench) -> None:
    bench.machine.set_gpu(0, sram_exceeded=True, links_down=[1])
    bench.machine.raise_xid(0, 154)
    bench.turn()
    assert bench.reasons(0) == ["nvlink/down", "sram/threshold-exceeded"]


def test_flag_that_was_read_a_while_ago_still_keeps_an_xid(bench: Bench) -> None:
    """NVML requests no action, but the memory needs a repair."""
    bench.machine.set_gpu(0, repairs_pending=[1, 0])
    bench.turn(EVERY)
    bench.machine.raise_xid(0, 95)
    bench.turn(10, times=6)
    assert bench.reasons(0) == ["repair/channel-pending", "xid/95"]


def test_links_that_cannot_be_read_end_nothing_and_are_read_again_with_the_next_poll(bench: Bench) -> None:
    bench.machine.set_gpu(0, links_down=[1])
    bench.turn(EVERY)
    bench.machine.set_fault("nvmlDeviceGetNvLinkState", code="timeout", gpu=0)
    bench.machine.set_gpu(0, links_down=[])
    bench.turn(10)
    assert bench.reasons(0) == ["nvlink/down"]
    bench.machine.clear_faults()
    bench.turn(10)
    assert bench.reasons(0) == []
