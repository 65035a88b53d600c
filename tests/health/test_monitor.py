"""The health monitor against simulated GPUs, through the real binding."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import pytest

from dra_driver.errors import NvmlUnavailableError, RetryableError, StateError
from dra_driver.health.book import HealthBook
from dra_driver.health.monitor import Monitor, PollThread
from dra_driver.health.rules.state import REBOOT_AFTER_S, SETTLE_S, SETTLE_UNSURE_S, UNRESPONSIVE_AFTER_S
from dra_driver.health.rules.taints import device_taints
from dra_driver.health.store import HealthStore, KeptHealth, ServicedGpus
from dra_driver.model.gpu import Fabric, FabricRegistration, UnreadyFabric
from dra_driver.model.health import (
    HealthChange,
    HealthEvent,
    HealthTarget,
    PolledHealth,
    Severity,
    Xid,
    condition,
)
from dra_driver.nvml.health_source import HealthSource
from tests.fakes.machines import SimulatedNode, silence
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S, eventually

MIG_GPU = 3
CLUSTER = "7f3c1ad2-96f4-4e0b-8b7a-0d5f6a2c9e11"


def condition_of(monitor: Monitor, target: HealthTarget) -> str:
    return condition(monitor.book.states().get(target), is_fresh=monitor.book.is_fresh(target.gpu_uuid))


class Bench:
    """A machine, and a monitor that a test drives. Unless the machine has another `name`, three of its GPUs are whole,
    and one is in MIG mode with two devices."""

    def __init__(self, directory: Path, name: str = "hgx-h100-4") -> None:
        self.directory = directory
        self.node = SimulatedNode(name, directory / "machine")
        self.machine = self.node.machine
        if name == "hgx-h100-4":
            self.machine.set_mig_mode(MIG_GPU, True)
            self.first = self.machine.create_mig(MIG_GPU, "1g.10gb", 0)
            self.second = self.machine.create_mig(MIG_GPU, "3g.40gb", 4)
        self.inventory = self.node.read()
        self.uuids = [gpu.uuid for gpu in self.machine.current().present]
        self.shown: Collection[str] | None = self.uuids
        self.places = {gpu.uuid: gpu.bus_id for gpu in self.machine.current().present}
        self.on_bus = set(self.places.values())
        self.now = 1_800_000_000.0
        self.changes = 0
        self.hanging: dict[str, tuple[str, float]] = {}
        self.transitions: list[HealthChange] = []
        self.fabrics: list[tuple[str, FabricRegistration]] = []
        self.monitor = self.restarted()
        self.turn()
        self.changes = 0

    def restarted(self, boot_id: str = "boot-1") -> Monitor:
        """A monitor as after a restart of the plugin."""
        self.source = HealthSource(self.node.session)
        self.store = HealthStore(self.directory / "health.json")
        clocks = {"clock": lambda: self.now, "monotonic": lambda: self.now}
        serviced = ServicedGpus(self.directory, boot_id)
        book = HealthBook(self.store, boot_id, self._changed, self.transitions.append, serviced, **clocks)
        self.monitor = Monitor(
            book,
            self.source,
            lambda: None if self.shown is None else {uuid: self.places[uuid] for uuid in self.shown},
            lambda place: place in self.on_bus,
            lambda: self.hanging,
            self._polled,
        )
        self.monitor.book.restore()
        return self.monitor

    def problems(self) -> list[tuple[str, str]]:
        return [(problem.code, problem.subject) for problem in self.monitor.problems({})]

    def turn(self, passed: float = 0, times: int = 1) -> None:
        for _ in range(times):
            self.now += passed
            self.monitor.turn()
            self.monitor.listener.turn(0)
            for poller in self.monitor.pollers.values():
                poller.turn()
            self.monitor.book.write()

    def reasons(self, index: int, *instance: int) -> list[str]:
        state = self.monitor.book.state(HealthTarget(self.uuids[index], *instance))
        return ["/".join(filter(None, reason.name)) for reason in state.reasons]

    def condition(self, index: int) -> str:
        return condition_of(self.monitor, HealthTarget(self.uuids[index]))

    def tainted(self) -> dict[str, list[str]]:
        """Taints as `key=value:effect` by the index of the GPU, or `profile` of the MIG device."""
        found = {}
        for device in self.inventory.devices():
            taints = device_taints(device, self.monitor.book.states(), {})
            name = str(device.gpu.index) if device.uuid == device.gpu.uuid else device.profile.name
            if taints:
                found[name] = [
                    f"{item['key'].removeprefix('gpu.nvidia.com/')}={item.get('value')}:{item['effect']}"
                    for item in taints
                ]
        return found

    def _polled(self, uuid: str, polled: PolledHealth) -> None:
        if polled.fabric is not None:
            self.fabrics.append((uuid, polled.fabric_registration))

    def _changed(self) -> None:
        self.changes += 1


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.monitor.stop()
    made.node.close()


def test_well_gpus_cost_nothing(bench):
    file = bench.directory / "health.json"
    written = file.stat().st_mtime_ns
    bench.turn(3, times=20)
    assert [bench.condition(index) for index in range(4)] == ["ok"] * 4
    assert (bench.changes, file.stat().st_mtime_ns, bench.tainted()) == (0, written, {})
    assert bench.monitor.book.answered_at(bench.uuids[0]) >= bench.now - 10
    assert bench.problems() == []


@tabled("xid", "tainted")
def test_an_xid_of_each_class_on_a_whole_gpu(bench, xid, tainted):
    bench.machine.raise_xid(0, xid)
    bench.turn()
    assert bench.tainted() == tainted
    assert bench.monitor.book.history.xid_counts() == {(bench.uuids[0], xid): 1}
    assert [f"Xid {xid}" in change.text for change in bench.monitor.book.history.of(bench.uuids[0])] == [True]


@pytest.mark.parametrize(("driver", "effect"), [("560.35.03", "NoSchedule"), ("580.95.05", "None")])
def test_unknown_xid_taints_if_the_driver_reports_no_recovery_action(bench, driver, effect):
    bench.machine.unload_driver()
    bench.machine.load_driver(driver)
    bench.node.session.reopen()
    bench.turn()
    bench.machine.raise_xid(0, 777)
    bench.machine.raise_xid(1, 147)
    bench.turn()
    assert bench.tainted() == {"0": [f"xid=777:{effect}"], "1": [f"xid=147:{effect}"]}


def test_polls_search_no_gpu_by_its_uuid(bench):
    """Such a search first queries every GPU, and waits for a busy one."""
    bench.machine.set_fault("nvmlDeviceGetHandleByUUID", code="unknown")
    bench.machine.create_mig(MIG_GPU, "1g.10gb", 1)
    bench.turn(60)
    assert [bench.condition(index) for index in range(4)] == ["ok"] * 4


def test_an_xid_of_a_mig_gpu_hits_all_of_it_and_one_of_an_instance_only_that(bench):
    bench.machine.raise_xid(MIG_GPU, 95, gpu_instance=bench.first[0], compute_instance=bench.first[1])
    bench.turn()
    assert bench.tainted() == {"1g.10gb": ["xid=95:NoSchedule"]}
    assert bench.condition(MIG_GPU) == "ok"
    bench.machine.raise_xid(MIG_GPU, 74)
    bench.turn()
    assert bench.tainted() == {"1g.10gb": ["xid=74:NoSchedule"], "3g.40gb": ["xid=74:NoSchedule"]}
    bench.turn(SETTLE_S)
    assert bench.tainted() == {}


def test_an_instance_that_was_recreated_starts_clean(bench):
    gi, ci, _ = bench.first
    bench.machine.set_recovery_action(MIG_GPU, 4)
    bench.machine.raise_xid(MIG_GPU, 95, gpu_instance=gi, compute_instance=ci)
    bench.turn()
    assert bench.reasons(MIG_GPU, gi, ci) == ["xid/95"]
    bench.turn(100)
    assert bench.reasons(MIG_GPU, gi, ci) == ["xid/95"], "the driver still asks for an action"
    bench.machine.destroy_mig(MIG_GPU, gi)
    assert bench.machine.create_mig(MIG_GPU, "1g.10gb", 0)[:2] == (gi, ci)
    bench.turn(10)
    assert bench.reasons(MIG_GPU, gi, ci) == []
    bench.machine.raise_xid(MIG_GPU, 95, gpu_instance=gi)
    bench.turn()
    assert bench.reasons(MIG_GPU, gi) == ["xid/95"]
    bench.machine.destroy_mig(MIG_GPU, gi)
    bench.turn(10)
    assert [target for target in bench.monitor.book.states() if target.is_instance] == []


def test_devices_hit_by_an_event_are_known_before_the_next_poll(bench):
    gi, ci, uuid = bench.first
    reported: list[str | None] = []
    bench.monitor.book.on_shown = lambda: reported.append(
        bench.monitor.book.state(HealthTarget(bench.uuids[MIG_GPU], gi, ci)).identity
    )
    bench.machine.raise_xid(MIG_GPU, 95, gpu_instance=gi, compute_instance=ci)
    bench.turn()
    assert reported == [uuid]
    bench.machine.destroy_mig(MIG_GPU, gi)
    again = bench.machine.create_mig(MIG_GPU, "1g.10gb", 0)
    assert again[:2] == (gi, ci)
    bench.inventory = bench.node.read()
    assert bench.tainted() == {}, "also before the monitor looked again"
    bench.turn()
    bench.machine.raise_xid(MIG_GPU, 94, gpu_instance=gi, compute_instance=ci)
    bench.turn()
    assert bench.tainted() == {"1g.10gb": ["xid=94:NoSchedule"]}


def test_an_event_hits_the_whole_gpu_when_no_one_can_report_which_instances_there_are(bench, monkeypatch):
    def gone(gpu_uuid: str, pci_bus_id: str | None) -> Mapping[tuple[int, int], str]:
        raise NvmlUnavailableError("gone")

    gi, ci, _ = bench.first
    monkeypatch.setattr(bench.source, "instances", gone)
    bench.machine.raise_xid(MIG_GPU, 95, gpu_instance=gi, compute_instance=ci)
    bench.turn()
    assert bench.tainted() == {"1g.10gb": ["xid=95:NoSchedule"], "3g.40gb": ["xid=95:NoSchedule"]}
    bench.turn(10)
    assert bench.reasons(MIG_GPU) == ["xid/95"], "no later look takes it for that of an instance that is gone"


@pytest.mark.parametrize(("gpu", "instance"), [(0, (0, 0)), (0, (0, None)), (MIG_GPU, (9, 0))])
def test_an_event_hits_the_whole_gpu_when_its_instance_is_not_known(bench, logs, gpu, instance):
    """nvml.h promises 0xFFFFFFFF for the whole GPU; there are libraries that answer zeros."""
    gi, ci = instance
    for xid in (95, 31, 94):
        bench.machine.raise_xid(gpu, xid, gpu_instance=gi, compute_instance=ci)
    bench.turn()
    bench.turn(10)
    assert bench.reasons(gpu) == ["xid/94", "xid/95"]
    assert [change.target for change in bench.transitions] == [HealthTarget(bench.uuids[gpu])] * 3
    assert [target for target in bench.monitor.book.states() if target.is_instance] == []
    (line,) = [line for line in logs if line["event"] == "event_of_unknown_device"]
    assert (line["gpu_uuid"], line["xid"]) == (bench.uuids[gpu], 95)
    assert (line["gpu_instance_id"], line["compute_instance_id"]) == instance


@pytest.mark.parametrize("named", [None, "MIG-4b1d"])
def test_an_event_triggers_a_poll_of_all_gpus_when_nvml_names_none_of_them(bench, logs, monkeypatch, named):
    events = [HealthEvent(named, Xid(48)), HealthEvent(named, Xid(79))]
    monkeypatch.setattr(bench.source, "wait", lambda timeout_s: events.pop(0) if events else None)
    bench.machine.set_remapped_rows(1, pending=1)
    bench.turn()
    assert bench.tainted() == {"1": ["row-remap=pending:NoSchedule"]}
    assert [
        (line["gpu_uuid"], line["xid"]) for line in logs if line["event"] == "event_of_unknown_device"
    ] == [(named, 48)]


def test_a_recovery_action_is_seen_at_once_and_its_end_clears(bench):
    bench.machine.raise_xid(1, 119)
    bench.machine.set_recovery_action(1, 1)
    bench.turn()
    assert bench.reasons(1) == ["recovery-action/reset", "xid/119"]
    bench.turn(1000)
    assert bench.condition(1) == "unhealthy"
    bench.machine.set_recovery_action(1, 0)
    bench.turn()
    assert (bench.condition(1), bench.reasons(1), bench.tainted()) == ("ok", [], {})
    texts = [change.text for change in bench.monitor.book.history.of(bench.uuids[1])]
    assert texts[-1].startswith("healthy again after: the NVIDIA driver requests a GPU reset")
    reported = [change.text for change in bench.transitions if change.target.gpu_uuid == bench.uuids[1]]
    assert set(reported) == set(texts)


def test_xid_154_calls_for_a_look(bench):
    bench.machine.set_remapped_rows(0, pending=1)
    bench.machine.raise_xid(0, 31)
    bench.turn()
    assert bench.reasons(0) == []
    bench.machine.raise_xid(0, 154)
    bench.turn()
    assert bench.reasons(0) == ["row-remap/pending"]


def test_a_reset_that_only_the_error_counter_shows_clears_the_gpu_and_its_instances(bench):
    bench.machine.set_fault("nvmlDeviceGetFieldValues", code="not-supported")
    gi, ci, _ = bench.first
    bench.machine.set_gpu(MIG_GPU, ecc_uncorrected=3)
    bench.machine.raise_xid(MIG_GPU, 95, gpu_instance=gi, compute_instance=ci)
    bench.machine.raise_xid(MIG_GPU, 48)
    bench.turn(10)
    bench.turn(SETTLE_UNSURE_S - 20)
    assert (bench.reasons(MIG_GPU), bench.reasons(MIG_GPU, gi, ci)) == (
        ["ecc/uncorrected", "xid/48"],
        ["xid/95"],
    )
    bench.machine.set_gpu(MIG_GPU, ecc_uncorrected=0)
    bench.turn(10)
    assert bench.reasons(MIG_GPU) == ["ecc/uncorrected"], "its count has to stay still"
    bench.turn(10)
    assert (bench.reasons(MIG_GPU), bench.reasons(MIG_GPU, gi, ci)) == ([], [])


def test_every_poll_that_reads_a_fabric_reports_the_registration(bench):
    bench.machine.set_fabric(0, state=2)
    bench.machine.set_fabric(1, state=3, cluster=CLUSTER, clique=5)
    bench.machine.set_fault("nvmlDeviceGetGpuFabricInfo*", code="unknown", gpu=2)
    under_way = UnreadyFabric("pending", "the registration is in progress")
    for _ in range(2):
        bench.fabrics.clear()
        bench.turn(10)
        reported = dict(bench.fabrics)
        assert reported == {
            bench.uuids[0]: under_way,
            bench.uuids[1]: Fabric(CLUSTER, (5,)),
            bench.uuids[MIG_GPU]: None,
        }


def test_a_gpu_that_falls_off_the_bus_and_comes_back(bench):
    seen: list[tuple[str, list[str]]] = []
    bench.monitor.book.on_shown = lambda: seen.append((bench.condition(0), bench.reasons(0)))
    bench.machine.lose_gpu(0)
    bench.turn()
    assert seen == [("unhealthy", ["xid/79"]), ("lost", ["gpu-lost", "xid/79"])], (
        "told before the GPU is asked"
    )
    assert bench.tainted() == {"0": ["gpu-lost=None:NoSchedule", "xid=79:NoSchedule"]}
    bench.node.session.reopen()
    bench.shown = bench.uuids[1:]
    bench.turn(1000)
    bench.turn(10)
    assert bench.condition(0) == "lost", "looked after although discovery does not show it"
    bench.machine.restore_gpu(0)
    bench.node.session.reopen()
    bench.shown = bench.uuids
    bench.turn(10)
    assert (bench.condition(0), bench.reasons(0)) == ("ok", [])


def test_gpu_that_answers_nothing_is_tainted_after_the_second_poll_until_it_answers(bench):
    bench.machine.raise_xid(0, 119)
    bench.turn()
    silence(bench.machine, 0)
    bench.turn(10)
    assert bench.tainted() == {"0": ["xid=119:NoSchedule"]}
    for passed in (10, 600, 3600):
        bench.turn(passed)
        assert bench.tainted() == {"0": ["unresponsive=no-answer:NoSchedule", "xid=119:NoSchedule"]}
    assert (bench.condition(0), bench.condition(1)) == ("unknown", "ok")
    assert [change.is_hang for change in bench.transitions] == [False, True]
    bench.machine.clear_faults()
    bench.turn(10)
    assert (bench.condition(0), bench.tainted()) == ("ok", {})


def test_gpu_that_cannot_be_found_for_another_reason_is_silent(bench):
    bench.source._handles.clear()
    bench.machine.set_fault("nvmlDeviceGetHandleBy*", code="unknown")
    bench.turn(10)
    assert bench.tainted() == {}
    bench.turn(10)
    assert bench.tainted()["1"] == ["unresponsive=no-answer:NoSchedule"]


def test_gpu_that_was_serviced_is_well_after_its_next_poll_and_its_neighbour_is_not(bench):
    gi, ci, _ = bench.first
    bench.machine.set_fault("nvmlDeviceGetFieldValues", code="not-supported")
    bench.turn(10)
    for gpu in (0, MIG_GPU):
        bench.machine.raise_xid(gpu, 119)
    bench.machine.raise_xid(MIG_GPU, 95, gpu_instance=gi, compute_instance=ci)
    bench.turn(600)
    before = {
        "0": ["xid=119:NoSchedule"],
        "1g.10gb": ["xid=95:NoSchedule"],
        "3g.40gb": ["xid=119:NoSchedule"],
    }
    assert bench.tainted() == before
    other_boot = ServicedGpus(bench.directory, "boot-0")
    other_boot.add(bench.uuids[MIG_GPU], int(bench.now))
    bench.turn(10, times=2)
    assert bench.tainted() == before
    ServicedGpus(bench.directory, "boot-1").add(bench.uuids[MIG_GPU], int(bench.now))
    bench.turn(10, times=2)
    assert bench.tainted() == {"0": ["xid=119:NoSchedule"]}
    bench.machine.raise_xid(MIG_GPU, 119)
    bench.turn(10, times=2)
    assert set(bench.tainted()) == set(before), "it came again"
    (bench.directory / "serviced.json").write_text("{")
    bench.turn(10)
    ServicedGpus(bench.directory, "boot-1").add(bench.uuids[0], int(bench.now))
    bench.turn(10, times=2)
    assert set(bench.tainted()) == set(before) - {"0"}


def test_silence_while_nvml_is_closed_or_the_driver_is_reloaded_does_not_count(bench):
    bench.machine.unload_driver()
    bench.turn(10, times=5)
    bench.node.session.release("closed")
    bench.turn(10, times=5)
    bench.machine.load_driver()
    bench.node.session.reopen()
    bench.turn(10)
    assert (bench.tainted(), bench.transitions) == ({}, [])


def lose_and_hide(bench: Bench) -> str:
    """Make a GPU fall off the bus, and discovery omit it; return its UUID."""
    bench.machine.lose_gpu(0)
    bench.turn()
    bench.node.session.reopen()
    bench.shown = bench.uuids[1:]
    bench.turn(10)
    return bench.uuids[0]


def kept(bench: Bench) -> set[str]:
    """The GPUs in the file."""
    document = json.loads((bench.directory / "health.json").read_text())
    return {state["gpuUUID"] for state in document["states"]}


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_gpu_that_was_pulled_is_forgotten_after_ten_minutes(bench, is_replaced):
    gone = lose_and_hide(bench)
    if is_replaced:
        bench.places[bench.uuids[1]] = bench.places[gone]
    else:
        bench.on_bus.remove(bench.places[gone])
    bench.turn(10)
    bench.transitions.clear()
    for passed in (300, 290):
        bench.turn(passed)
        assert (bench.condition(0), gone in kept(bench)) == ("lost", True)
    changes = bench.changes
    bench.turn(10)
    assert (gone in kept(bench), bench.reasons(0), bench.monitor.book.answered_at(gone)) == (False, [], None)
    assert (bench.monitor.book.history.xid_counts(), bench.monitor.book.history.of(gone)) == ({}, ())
    assert bench.changes == changes + 1
    [change] = bench.transitions
    assert (change.is_gone, change.target) == (True, HealthTarget(gone))
    assert (
        change.text == f"the NVIDIA driver no longer manages the GPU at {bench.places[gone]}; "
        "gpu-dra-driver discards its health history"
    )
    bench.turn(10)
    assert (bench.condition(0), len(bench.transitions)) == ("unknown", 1), "it is not watched any more"


def test_a_lost_gpu_stays_lost_while_it_is_on_the_bus_also_over_restarts(bench):
    gone = lose_and_hide(bench)
    bench.turn(3600)
    bench.restarted()
    bench.turn(3600, times=3)
    assert (bench.condition(0), gone in kept(bench)) == ("lost", True)
    bench.on_bus.remove(bench.places[gone])
    bench.turn(10)
    bench.turn(600)
    assert gone not in kept(bench)


def test_a_gpu_is_not_forgotten_while_nvml_reports_nothing(bench):
    """A driver that is reloaded for an hour; then the ten minutes start again."""
    gone = lose_and_hide(bench)
    bench.on_bus.remove(bench.places[gone])
    bench.turn(10)
    bench.shown = None
    bench.turn(3600)
    assert gone in kept(bench)
    bench.shown = bench.uuids[1:]
    bench.turn(10)
    assert gone in kept(bench)


def test_a_gpu_that_comes_back_within_ten_minutes_keeps_its_health(bench):
    gone = lose_and_hide(bench)
    bench.on_bus.remove(bench.places[gone])
    bench.turn(599)
    bench.machine.restore_gpu(0)
    bench.node.session.reopen()
    bench.shown = bench.uuids
    bench.turn(10)
    bench.shown = bench.uuids[1:]
    bench.turn(10)
    bench.turn(599)
    assert gone in kept(bench)


@pytest.mark.parametrize(("boot", "is_kept"), [("boot-1", True), ("boot-2", False)])
def test_a_lost_gpu_whose_place_is_not_known_stays_until_a_reboot(bench, boot, is_kept):
    gone = lose_and_hide(bench)
    path = bench.directory / "health.json"
    document = json.loads(path.read_text())
    for state in document["states"]:
        state.pop("pciBusID", None)
    path.write_text(json.dumps(document))
    bench.restarted(boot)
    bench.turn(3600, times=3)
    assert (gone in kept(bench)) is is_kept


def test_the_last_gpu_of_a_node_is_forgotten_too(bench):
    lose_and_hide(bench)
    bench.on_bus.clear()
    bench.shown = []
    bench.turn(10)
    bench.turn(600)
    assert bench.monitor.book.states() == {}


def test_a_lost_gpu_that_no_one_named_is_found(bench):
    with bench.machine._change() as state:
        state.present[2].lost = True
    bench.turn()
    assert [bench.condition(index) for index in range(4)] == ["ok", "ok", "lost", "ok"]


def test_a_driver_reload_clears_what_it_mends(bench):
    bench.machine.raise_xid(0, 62)
    bench.turn()
    bench.node.session.reopen()
    bench.turn()
    assert bench.reasons(0) == ["xid/62"], "a new session is no reload"
    bench.machine.unload_driver()
    bench.turn(10, times=4)
    assert (bench.condition(0), bench.condition(1)) == ("unknown", "unknown")
    assert bench.problems() == [("health-unknown", uuid) for uuid in bench.uuids]
    bench.shown = None
    bench.turn(10)
    assert bench.problems() == []
    bench.machine.load_driver()
    bench.node.session.reopen()
    bench.shown = bench.uuids
    bench.turn()
    assert (bench.condition(0), bench.reasons(0)) == ("ok", [])
    bench.machine.raise_xid(1, 48)
    bench.turn()
    assert bench.reasons(1) == ["xid/48"], "events are heard in the new session"


def test_reasons_outlive_a_restart_and_a_reboot_clears_them(bench):
    gi, ci, _ = bench.first
    bench.machine.raise_xid(0, 48)
    bench.machine.set_remapped_rows(1, pending=1)
    bench.machine.raise_xid(MIG_GPU, 95, gpu_instance=gi, compute_instance=ci)
    bench.turn(10)
    before = dict(bench.tainted())
    assert set(before) == {"0", "1", "1g.10gb"}
    bench.now += 5
    restarted = bench.restarted()
    assert (bench.tainted(), bench.condition(0)) == (before, "unknown")
    bench.turn()
    assert (bench.tainted(), bench.condition(0)) == (before, "unhealthy")
    assert restarted.book.state(HealthTarget(bench.uuids[0])).reasons[0].since < bench.now
    bench.machine.reboot()
    bench.node.session.reopen()
    bench.shown = bench.uuids[:2]
    bench.restarted("boot-2")
    assert set(bench.tainted()) == {"0", "1"}, "nothing is well before it was looked at"
    bench.turn()
    assert bench.tainted() == {}
    assert {target.gpu_uuid for target in bench.monitor.book.states()} == set(bench.uuids), (
        "not shown yet, but on the bus"
    )
    bench.on_bus -= {bench.places[uuid] for uuid in bench.uuids[2:]}
    bench.turn(10)
    bench.turn(600)
    assert {target.gpu_uuid for target in bench.monitor.book.states()} == set(bench.uuids[:2])


def test_changed_driver_version_since_the_last_run_is_a_reload(bench):
    bench.machine.raise_xid(0, 48)
    bench.turn()
    bench.monitor.stop()
    bench.machine.load_driver("575.57.08")
    bench.node.session.reopen()
    bench.restarted()
    bench.turn()
    assert bench.reasons(0) == []


def test_a_gpu_whose_events_are_not_available(bench):
    bench.machine.set_fault("nvmlDeviceRegisterEvents", code="not-supported", gpu=0)
    bench.monitor.devices_changed()
    bench.turn()
    assert bench.tainted() == {"0": ["unmonitored=None:None"]}
    bench.machine.raise_xid(1, 48)
    bench.turn()
    assert bench.reasons(1) == ["xid/48"]
    bench.machine.set_fault("nvmlDeviceRegisterEvents", code="not-supported")
    bench.monitor.devices_changed()
    bench.turn()
    bench.turn(10)
    assert bench.condition(2) == "information", "looks go on without events"
    bench.machine.clear_faults()
    bench.monitor.devices_changed()
    bench.turn()
    assert bench.reasons(0) == []


def test_a_program_that_fails_over_and_over_fills_nothing(bench, logs):
    for _ in range(70):
        bench.machine.raise_xid(0, 31)
    file = bench.directory / "health.json"
    written = file.stat().st_mtime_ns
    bench.turn()
    bench.turn()
    (entry,) = bench.monitor.book.history.of(bench.uuids[0])
    assert (entry.times, entry.before, entry.after) == (70, Severity.OK, Severity.OK)
    assert (bench.changes, file.stat().st_mtime_ns, len(bench.transitions)) == (0, written, 1)
    assert len([line for line in logs if line["event"] == "health_changed"]) == 1


@pytest.mark.parametrize("function", ["nvmlEventSetWait_v2", "nvmlEventSetCreate"])
def test_events_that_fail_do_not_stop_the_polls(bench, logs, function):
    bench.machine.set_fault(function, code="unknown")
    bench.monitor.devices_changed()
    bench.machine.set_remapped_rows(0, pending=1)
    bench.turn(10, times=3)
    assert "row-remap/pending" in bench.reasons(0)
    assert len([line for line in logs if line["event"] == "gpu_events_failed"]) <= 1
    bench.machine.clear_faults()
    bench.turn(10)
    bench.machine.raise_xid(1, 48)
    bench.turn()
    assert "xid/48" in bench.reasons(1)


def test_driver_version_that_cannot_be_read_is_not_a_reload_and_leaves_no_event_set_behind(bench):
    bench.machine.raise_xid(0, 62)
    bench.machine.set_fault("nvmlDeviceGetFieldValues", code="not-supported")
    bench.turn()
    bench.machine.set_fault("nvmlSystemGetDriverVersion", code="unknown")
    bench.monitor.devices_changed()
    bench.turn(10, times=4)
    assert bench.reasons(0) == ["unmonitored", "xid/62"]
    assert len(bench.source._sets) == 1
    bench.machine.clear_faults()
    bench.machine.set_fault("nvmlSystemGetDriverVersion", code="not-supported")
    bench.machine.set_fault("nvmlDeviceGetFieldValues", code="not-supported")
    bench.turn(10, times=3)
    assert bench.reasons(0) == ["xid/62"]
    assert len(bench.source._sets) == 1


def test_a_gpu_whose_health_is_known_again_is_reported(bench):
    bench.turn()
    bench.monitor.book._answers.clear()
    before = bench.changes
    bench.turn(10, times=2)
    assert bench.changes == before + 4


def test_file_names_the_gpus_whose_health_is_known(bench):
    def known() -> list[str]:
        return json.loads((bench.directory / "health.json").read_text())["known"]

    assert known() == sorted(bench.uuids)
    silence(bench.machine, 0)
    bench.turn(10, times=4)
    assert known() == sorted(bench.uuids[1:])
    bench.restarted().book.write()
    assert "known" not in json.loads((bench.directory / "health.json").read_text())


def test_a_disk_that_refuses_costs_only_the_memory(bench, logs, monkeypatch):
    def refuse(kept: KeptHealth) -> None:
        raise StateError("the disk is full")

    monkeypatch.setattr(bench.store, "save", refuse)
    bench.machine.raise_xid(0, 48)
    bench.turn()
    assert (bench.reasons(0), bench.changes) == (["xid/48"], 1)
    assert "health_not_saved" in [line["event"] for line in logs]


class HangingSource:
    """NVML whose calls for the GPUs in `hangs` hang until `release`."""

    driver_loads = 0

    def __init__(self) -> None:
        self.event: HealthEvent | Exception | None = None
        self.hangs: set[str] = set()
        self.taken, self.listening = threading.Event(), threading.Event()
        self.hanging, self.release = threading.Event(), threading.Event()
        self.closed = False
        self.number: int | None = None

    def change_lasts_s(self) -> float:
        return 0.0

    def driver_version(self) -> str | None:
        return "1"

    def set_number(self) -> int | None:
        return self.number

    def open_events(self) -> None:
        self.number = (self.number or 0) + 1

    def register(self, gpu_uuid: str, pci_bus_id: str | None) -> None:
        self.hang(gpu_uuid)

    def forget(self, gpu_uuid: str) -> None:
        pass

    def wait(self, timeout_s: float) -> HealthEvent | None:
        self.listening.set()
        event = self.event
        if event is not None:
            self.event = None  # not before one is there: it could be set just then
        if isinstance(event, Exception):
            self.taken.set()
            raise event
        if event is None:
            time.sleep(timeout_s)
        return event

    def hang(self, gpu_uuid: str) -> None:
        if gpu_uuid in self.hangs:
            self.hanging.set()
            self.release.wait(PATIENCE_S)

    def read(self, gpu_uuid: str, pci_bus_id: str | None, before: PolledHealth | None = None) -> PolledHealth:
        self.hang(gpu_uuid)
        return PolledHealth()

    def instances(self, gpu_uuid: str, pci_bus_id: str | None) -> Mapping[tuple[int, int], str]:
        self.hang(gpu_uuid)
        return {(1, 0): "MIG-a"}

    def close(self) -> None:
        self.closed = True


class Threaded:
    """A monitor with its threads, which watches GPU-a and GPU-b. The clock of the GPUs' threads is `time`."""

    def __init__(self, path: Path) -> None:
        self.source, self.time, self.hanging = HangingSource(), [0.0], {}
        self.gpus: dict[str, str | None] | None = {"GPU-a": None, "GPU-b": None}
        self.reported: list[HealthChange] = []
        book = HealthBook(
            HealthStore(path / "health.json"),
            "boot",
            lambda: None,
            self.reported.append,
            monotonic=lambda: self.time[0],
        )
        self.monitor = Monitor(
            book, self.source, lambda: self.gpus, lambda _: True, lambda: self.hanging, lambda *_: None
        )
        self.monitor.start()
        assert self.source.listening.wait(PATIENCE_S)
        # Its start asked for polls. None of them may still run: it would answer at a later time.
        eventually(lambda: all(one._due and not one.is_busy for one in self.monitor.pollers.values()))
        assert all(poller._set_number for poller in self.monitor.pollers.values())
        assert all(map(self.monitor.book.is_fresh, self.gpus))

    def hang(self, *gpus: str) -> None:
        """The next polls of these GPUs do not return."""
        self.source.hangs |= {*gpus}
        for gpu in gpus:
            self.source.hanging.clear()
            self.monitor.pollers[gpu].poll_soon()
            assert self.source.hanging.wait(PATIENCE_S)

    def listener_waits_since(self, moment: float) -> None:
        """A wait that began earlier would count as one that hangs, when the clock jumps."""
        eventually(lambda: self.monitor.listener._calling_since == moment)

    def reasons(self, gpu: str, *instance: int) -> list[str]:
        state = self.monitor.book.state(HealthTarget(gpu, *instance))
        return ["/".join(filter(None, reason.name)) for reason in state.reasons]

    def problems(self) -> dict[str, tuple[str, str]]:
        return {one.subject: (one.code, one.text) for one in self.monitor.problems({"GPU-a": "gpu-a"})}


@pytest.fixture
def threaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Threaded]]:
    """Start monitors with their threads."""
    monkeypatch.setattr("dra_driver.health.monitor._WAIT_S", 0.005)
    monkeypatch.setattr("dra_driver.health.monitor._LATE_S", 0.05)
    monkeypatch.setattr("dra_driver.health.monitor._CHECK_EVERY_S", 0.05)
    monkeypatch.setattr("dra_driver.health.monitor._SHORTEST_PAUSE_S", 0.005)
    started: list[Threaded] = []

    def start() -> Threaded:
        started.append(Threaded(tmp_path))
        return started[-1]

    yield start
    for made in started:
        made.source.release.set()
        assert made.monitor.stop()
        assert made.source.closed
        names = {thread.name for thread in threading.enumerate()}
        assert not [name for name in names if name.startswith("health")]


def test_poll_that_becomes_due_while_its_thread_starts_is_not_missed(threaded, monkeypatch):
    start = PollThread.start
    monkeypatch.setattr("dra_driver.health.poller._POLL_EVERY_S", 3600.0)
    monkeypatch.setattr(PollThread, "start", lambda thread: (start(thread), time.sleep(0.05)))
    threaded()


def test_gpu_whose_poll_does_not_return_is_unresponsive_and_its_neighbour_is_fresh(threaded):
    made = threaded()
    made.hang("GPU-a")
    made.time[0] = 29.0
    made.monitor.check_for_hangs()
    assert (made.reasons("GPU-a"), made.problems()) == ([], {})
    made.listener_waits_since(29.0)
    made.time[0] = 31.0
    made.monitor.pollers["GPU-b"].poll_soon()
    eventually(lambda: made.monitor.book.is_fresh("GPU-b"))
    made.monitor.check_for_hangs()
    assert (made.reasons("GPU-a"), made.reasons("GPU-b")) == (["unresponsive/nvml-hangs"], [])
    [(subject, (code, text))] = made.problems().items()
    assert (subject, code) == ("gpu-a", "gpu-unresponsive")
    assert text.startswith("GPU gpu-a (GPU-a): the GPU does not answer: an NVML call does not return")
    assert [condition_of(made.monitor, HealthTarget(gpu)) for gpu in ("GPU-a", "GPU-b")] == ["unknown", "ok"]
    eventually(lambda: made.reported)
    assert [(change.target.gpu_uuid, change.is_hang) for change in made.reported] == [("GPU-a", True)]
    made.source.hangs.clear()
    made.source.release.set()
    eventually(lambda: made.reasons("GPU-a") == [])
    eventually(lambda: made.problems() == {})


@pytest.mark.parametrize("hung", [("GPU-a",), ("GPU-a", "GPU-b")])
def test_event_is_taken_in_at_once_while_gpus_hang(threaded, hung):
    made = threaded()
    made.hang(*hung)
    made.source.event = HealthEvent("GPU-b", Xid(95))
    eventually(lambda: made.reasons("GPU-b") == ["xid/95"])
    made.source.event = HealthEvent("GPU-b", Xid(48), 1, 0)
    if "GPU-b" not in hung:
        eventually(lambda: made.reasons("GPU-b", 1, 0) == ["xid/48"])
        return
    eventually(lambda: made.source.event is None)
    made.time[0] = 31.0
    eventually(lambda: (made.monitor.check_for_hangs(), "xid/48" in made.reasons("GPU-b"))[1])


def test_gpu_that_comes_back_while_its_old_call_hangs_gets_no_second_call(threaded):
    made = threaded()
    made.hang("GPU-a")
    old = made.monitor.pollers["GPU-a"]
    gpus, made.gpus = made.gpus, {"GPU-b": None}
    made.monitor.devices_changed()
    eventually(lambda: old.is_over)
    made.gpus = gpus
    made.monitor.turn()
    assert made.monitor.pollers["GPU-a"] is old
    made.source.hangs.clear()
    made.source.release.set()
    eventually(lambda: made.monitor.pollers["GPU-a"] is not old)
    eventually(lambda: made.monitor.pollers["GPU-a"]._set_number)


def test_poll_that_hangs_gives_each_gpu_a_thread_until_it_returns(threaded):
    def threads() -> int:
        return sum(thread.name == "health-polls" for thread in threading.enumerate())

    made = threaded()
    eventually(lambda: threads() == 1)
    made.hang("GPU-a", "GPU-b")
    assert threads() == 2
    made.source.hangs.clear()
    made.source.release.set()
    eventually(lambda: threads() == 1)
    made.time[0] = 31.0
    made.monitor.pollers["GPU-a"].poll_soon()
    eventually(lambda: all(map(made.monitor.book.is_fresh, ("GPU-a", "GPU-b"))))


def test_poll_that_fails_unexpectedly_keeps_no_other_gpu_from_being_polled(threaded, logs):
    made = threaded()
    read = made.source.read

    def fail(uuid: str, *more: object) -> PolledHealth:
        if uuid == "GPU-a":
            raise RuntimeError("surprise")
        return read(uuid, *more)

    made.source.read = fail
    made.time[0] = 31.0
    made.monitor.pollers["GPU-a"].poll_soon()
    eventually(lambda: made.monitor.book.is_fresh("GPU-b"))
    assert not made.monitor.book.is_fresh("GPU-a")


def test_health_that_was_not_read_for_half_a_minute_is_a_problem(threaded, monkeypatch):
    def closed(*_: object) -> PolledHealth:
        raise NvmlUnavailableError("gone")

    made = threaded()
    monkeypatch.setattr(made.source, "read", closed)
    made.time[0] = 29.0
    made.listener_waits_since(29.0)
    made.time[0] = 31.0
    found = made.problems()
    assert {subject: code for subject, (code, _) in found.items()} == {
        "gpu-a": "health-unknown",
        "GPU-b": "health-unknown",
    }
    assert found["GPU-b"][1].startswith("the health of GPU GPU-b has not been read for 30 s;")
    assert (made.reasons("GPU-a"), made.reasons("GPU-b")) == ([], []), "no poll failed"
    made.gpus = None
    assert made.problems() == {}, "NVML is closed on purpose"


def test_wait_for_events_that_does_not_return_leaves_the_gpus_unmonitored(threaded):
    made = threaded()
    let, reached = threading.Event(), threading.Event()

    def hang(_timeout_s: float) -> None:
        reached.set()
        let.wait(PATIENCE_S)

    made.source.wait = hang
    assert reached.wait(PATIENCE_S)
    made.time[0] = 31.0
    made.monitor.check_for_hangs()
    assert [made.reasons(gpu) for gpu in ("GPU-a", "GPU-b")] == [["unmonitored"]] * 2
    del made.source.wait
    let.set()
    eventually(lambda: [made.reasons(gpu) for gpu in ("GPU-a", "GPU-b")] == [[], []])


def test_disk_that_hangs_holds_up_no_health(threaded, monkeypatch):
    made = threaded()
    let, reached = threading.Event(), threading.Event()

    def hang(_kept: KeptHealth) -> None:
        reached.set()
        let.wait(PATIENCE_S)

    monkeypatch.setattr(made.monitor.book.store, "save", hang)
    made.source.event = HealthEvent("GPU-a", Xid(48))
    assert reached.wait(PATIENCE_S)
    eventually(lambda: made.source.event is None)
    made.source.event = HealthEvent("GPU-b", Xid(95))
    eventually(lambda: (made.reasons("GPU-a"), made.reasons("GPU-b")) == (["xid/48"], ["xid/95"]))
    let.set()


def test_gpu_is_unresponsive_while_an_operation_hangs_even_if_nvml_hangs_too(threaded, monkeypatch):
    monkeypatch.setattr("dra_driver.health.monitor._CHECK_EVERY_S", 3600.0)  # only the test checks
    made = threaded()
    made.hang("GPU-a")
    made.hanging["GPU-a"] = ("the start of the MPS daemon", -UNRESPONSIVE_AFTER_S)
    made.monitor.check_for_hangs()
    text = (
        "the GPU does not respond: the start of the MPS daemon takes too long; if this lasts, drain the node and "
        "reboot it"
    )
    assert made.problems() == {"gpu-a": ("gpu-unresponsive", f"GPU gpu-a (GPU-a): {text}")}
    made.hanging["GPU-a"] = ("the start of the MPS daemon", float(-REBOOT_AFTER_S))
    for _ in range(2):
        made.monitor.check_for_hangs()
    made.hanging.clear()
    made.monitor.check_for_hangs()
    assert made.problems() == {}
    late = "the GPU does not respond: the start of the MPS daemon has taken more than 15 minutes"
    assert [(change.before, change.after) for change in made.reported] == [
        (Severity.OK, Severity.DEGRADED),
        (Severity.DEGRADED, Severity.UNHEALTHY),
        (Severity.UNHEALTHY, Severity.OK),
    ]
    assert made.reported[0].text == text
    assert late in made.reported[1].text


def test_an_operation_that_hung_is_over_after_a_restart(bench):
    hanging = {bench.uuids[0]: ("the setting of the time slice", bench.now - UNRESPONSIVE_AFTER_S)}
    bench.hanging = hanging
    bench.monitor.check_for_hangs()
    bench.hanging = {}
    bench.monitor.book.write()
    assert bench.tainted() == {"0": ["unresponsive=None:NoSchedule"]}
    monitor = bench.restarted()
    assert bench.reasons(0) == ["unresponsive"], "doctor reads it in the file"
    monitor.check_for_hangs()
    assert (bench.reasons(0), bench.tainted()) == ([], {})


def test_observations_of_two_threads_are_all_kept(bench):
    monitor, target = bench.monitor, HealthTarget(bench.uuids[0])
    reached, let = threading.Event(), threading.Event()

    class SlowPlaces(dict):
        def get(self, *key):
            if threading.current_thread() is event:
                reached.set()
                assert let.wait(PATIENCE_S)
            return super().get(*key)

    began = bench.now - UNRESPONSIVE_AFTER_S
    bench.hanging = {bench.uuids[0]: ("the creation of a MIG device", began)}
    monitor.book.places = SlowPlaces(monitor.book.places)
    event = threading.Thread(target=monitor.book.take, args=({target: (Xid(48),)},))
    look = threading.Thread(target=monitor.check_for_hangs)
    event.start()
    assert reached.wait(PATIENCE_S)
    look.start()
    look.join(0.2)
    let.set()
    event.join(PATIENCE_S)
    look.join(PATIENCE_S)
    assert bench.reasons(0) == ["unresponsive", "xid/48"]


@pytest.mark.parametrize(
    "surprise", [RuntimeError("surprise"), RetryableError("later"), NvmlUnavailableError("gone")]
)
def test_a_surprise_does_not_end_the_thread(threaded, surprise):
    made = threaded()
    made.source.event = surprise
    assert made.source.taken.wait(PATIENCE_S)
    made.source.event = HealthEvent("GPU-a", Xid(48))
    eventually(lambda: "xid/48" in made.reasons("GPU-a"))


def test_a_callback_that_fails_does_not_end_the_watch(bench, logs):
    def fail(change: HealthChange) -> None:
        raise RuntimeError("surprise")

    bench.monitor.book.history._on_transition = fail
    bench.machine.raise_xid(0, 48)
    bench.turn()
    assert bench.changes == 1
    assert "health_listener_failed" in [line["event"] for line in logs]
