"""The layout of a node on the simulated silicon: real ledger, records, lanes and locks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.base.atomic import write_atomically
from dra_driver.errors import ApiUnavailableError, NvmlTransientError
from dra_driver.mig.layout_file import LAYOUT_FILE, LayoutFile, decode
from dra_driver.mig.layouts import TAINTED_FIRST_S, NodeLayouts
from dra_driver.model.claim import HeldDevice
from dra_driver.model.gpu import Card, Gpu
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import GpuLayout, LayoutEntry, MigLayouts, OwnedInstance, OwnedMode
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import StartMaintenance
from tests.fakes.mignode import MigNode, make_idle
from tests.fakes.preparing import Crash
from tests.fakes.samples import bound
from tests.fakes.samples import claim as a_claim

MIXED = MigLayouts(
    {
        "mixed": (LayoutEntry(True, {"3g.40gb": 1, "1g.10gb": 2}),),
        "other": (LayoutEntry(True, {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 1}),),
        "too-much": (LayoutEntry(True, {"3g.40gb": 2, "1g.10gb": 1}),),
    },
    "mixed",
)
THREE, TWO, ONE = 9, 14, 19


class Layouts:
    """The plugin with a keeper of its own."""

    def __init__(self, node: MigNode, wanted: MigLayouts = MIXED) -> None:
        self.node = node
        self.labels: dict[str, str] | Exception = {}
        self.reported: list[GpuLayout] = []
        self.scans = 0
        self.cards: tuple[Card, ...] = ()
        self.planning = node.records.planning
        self.keeper = NodeLayouts(
            node.context,
            node.devices,
            node.mode,
            node.lanes,
            LayoutFile(node.directory / LAYOUT_FILE),
            wanted,
            labels=self._labels,
            inventory=lambda: Inventory(
                gpus=(Gpu(uuid=node.gpu_uuid, pci_bus_id=node.machine.gpu(0).bus_id),), cards=self.cards
            ),
            is_on_demand=lambda _gpu: False,
            rescan=self._rescan,
            on_change=self._changed,
        )

    def _labels(self) -> Mapping[str, str]:
        if isinstance(self.labels, Exception):
            raise self.labels
        return self.labels

    def _rescan(self) -> None:
        self.scans += 1
        # A claim that is planned now gets an error that asks for a retry.
        with (
            self.planning.hold(0),
            pytest.raises(NvmlTransientError, match="is applying the node's MIG layout"),
        ):
            self.keeper.refuse_changing({self.node.gpu_uuid})

    def _changed(self, new: Sequence[GpuLayout]) -> None:
        self.reported += new

    def look(self) -> GpuLayout | None:
        self.keeper.look()
        return self.keeper.states().get(self.node.gpu_uuid)

    def settle(self) -> GpuLayout:
        """Check until the taint is old enough, and once more; with the cleaner in between."""
        self.look()
        self.node.work_off()
        self.node.clock.pause(TAINTED_FIRST_S)
        self.look()
        self.node.work_off()
        state = self.look()
        assert state is not None
        return state

    def label(self, name: str) -> None:
        self.labels = {"nvidia.com/mig.config": name}


@pytest.fixture
def labelled(node: MigNode) -> Layouts:
    """The label of the node decides, and `mixed` is applied."""
    layouts = Layouts(node, MigLayouts(MIXED.named, from_label=True))
    layouts.label("mixed")
    layouts.settle()
    return layouts


def hold(node: MigNode, device: str = "gpu-0", uid: str = "uid-1", **more: Any) -> None:
    held = HeldDevice(**{"device": device, "kind": "gpu", "uuid": "u", "gpu_uuid": node.gpu_uuid, **more})
    node.records.save(ClaimRecord(a_claim(device, uid=uid), "prepared", node.boot_id, (held,), ()))


def slots(node: MigNode) -> list[tuple[int, int]]:
    """Profile and start of each instance with its compute instance."""
    mode, found = node.on_gpu()
    assert mode == bool(found)
    assert all(compute == 1 for *_, compute in found)
    return sorted((profile, start) for _, profile, start, _ in found)


def profiles(node: MigNode) -> list[int]:
    return [profile for profile, _ in slots(node)]


def test_a_gpu_is_tainted_first_then_cut_and_then_left_alone(node: MigNode) -> None:
    layouts = Layouts(node)
    state = layouts.look()
    assert (state.state, node.on_gpu()) == ("waiting", (False, []))
    node.clock.pause(TAINTED_FIRST_S - 0.1)
    layouts.look()
    assert node.on_gpu() == (False, [])
    assert layouts.settle().state == "applied"
    assert profiles(node) == [THREE, ONE, ONE]
    assert all(entry.is_of_layout for entry in node.ledger.details(OwnedInstance))
    assert [one.state for one in layouts.reported] == ["waiting", "applied"]
    assert layouts.reported[0].since <= layouts.reported[1].since
    assert layouts.scans == 1
    layouts.keeper.refuse_changing({node.gpu_uuid})
    made = {entry.uuid for entry in node.ledger.details(OwnedInstance)}
    layouts.settle()
    assert made == {entry.uuid for entry in node.ledger.details(OwnedInstance)}
    kept = decode((node.directory / LAYOUT_FILE).read_bytes())
    assert [(one.layout, one.state) for one in kept] == [("mixed", "applied")]


def test_a_gpu_that_a_virtual_machine_has_keeps_its_place_among_the_others(node: MigNode) -> None:
    second = {"mixed": (LayoutEntry(True, {"1g.10gb": 1}, devices=(1,)),)}
    layouts = Layouts(node, MigLayouts(second, "mixed"))
    assert layouts.look() is None
    layouts.cards = (bound(0, bus_id="0000:00:01.0"),)
    assert layouts.settle().state == "applied"
    assert layouts.keeper.states().keys() == {node.gpu_uuid}


def test_a_device_whose_undo_has_failed_keeps_its_gpu_until_it_is_destroyed(node: MigNode) -> None:
    node.prepare(node.wanted("1g.10gb", 3))
    node.machine.hold_gpu(0, 4711, "python3", gpu_instance=10, compute_instance=0)
    node.unprepare()
    layouts = Layouts(node)
    state = layouts.settle()
    assert (state.state, state.text.startswith("Cleanup pending for claim default/claim-uid-1")) == (
        "waiting",
        True,
    )
    assert slots(node) == [(ONE, 3)]
    node.machine.release_gpu(0)
    assert layouts.settle().state == "applied"
    assert profiles(node) == [THREE, ONE, ONE]


@pytest.mark.parametrize("is_maintenance", [False, True])
def test_a_claim_keeps_its_gpu_until_it_ends(node: MigNode, is_maintenance: bool) -> None:
    hold(node, admin_access=is_maintenance)
    if is_maintenance:
        step = StartMaintenance((node.gpu_uuid,), "Wait", 900)
        node.records.save(replace(node.records.all()["uid-1"], steps=(step,)))
    layouts = Layouts(node)
    state = layouts.settle()
    assert (state.state, node.on_gpu()) == ("waiting", (False, []))
    assert "claim default/" in state.text
    assert "uses the GPU" in state.text
    node.records.delete("uid-1")
    assert layouts.settle().state == "applied"


def test_claim_with_admin_access_does_not_hold_a_gpu_and_a_lost_claim_does(node: MigNode) -> None:
    hold(node, admin_access=True)
    name = Inventory(gpus=(Gpu(uuid=node.gpu_uuid),)).gpu_names[node.gpu_uuid]
    node.lost = {"uid-2": (f"{name}-mig-19-3",)}
    layouts = Layouts(node)
    assert "record was lost" in layouts.settle().text
    node.lost = {}
    assert layouts.settle().state == "applied"


def test_a_process_on_an_instance_keeps_it(node: MigNode, labelled: Layouts) -> None:
    before = slots(node)
    number = node.machine.gpu(0).instances[0].id
    node.machine.hold_gpu(0, pid=4711, name="train", gpu_instance=number)
    labelled.label("all-disabled")
    state = labelled.settle()
    assert state.state == "waiting"
    assert "4711" in state.text
    assert set(slots(node)) <= set(before)
    node.machine.release_gpu(0)
    assert labelled.settle().state == "applied"
    assert node.on_gpu() == (False, [])


def test_layout_that_does_not_fit_is_refused_without_a_change(node: MigNode, labelled: Layouts) -> None:
    before = node.state()
    for name, text in (("too-much", "2 x 3g.40gb"), ("nothing", "unknown layout 'nothing'")):
        labelled.label(name)
        state = labelled.settle()
        assert state.state == "refused"
        assert text in state.text
    assert node.state() == before


def test_a_label_that_flips_back_half_way_keeps_what_still_fits(node: MigNode, labelled: Layouts) -> None:
    three = next(entry.uuid for entry in node.ledger.details(OwnedInstance) if entry.profile_id == THREE)
    labelled.label("other")
    labelled.look()
    node.clock.pause(TAINTED_FIRST_S)
    with node.dying_after(3), pytest.raises(Crash):
        labelled.look()
    labelled.label("mixed")
    assert labelled.settle().state == "applied"
    assert profiles(node) == [THREE, ONE, ONE]
    assert three in {entry.uuid for entry in node.ledger.details(OwnedInstance)}
    labelled.labels = {}
    assert labelled.look() is None
    node.work_off()
    assert profiles(node) == [THREE, ONE, ONE]


def test_the_label_wins_over_the_configuration_and_mig_manager_over_both(node: MigNode) -> None:
    layouts = Layouts(node, MigLayouts(MIXED.named, "mixed", from_label=True))
    layouts.label("all-1g.10gb")
    assert layouts.settle().state == "applied"
    assert profiles(node) == [ONE] * 7
    layouts.labels = {"nvidia.com/mig.config.state": "success"}
    state = layouts.settle()
    assert state.state == "refused"
    assert "mig-manager runs on this node" in state.text
    assert profiles(node) == [ONE] * 7
    layouts.labels = ApiUnavailableError("no")
    layouts.settle()
    assert profiles(node) == [ONE] * 7


def test_instances_of_others_stay_or_go_as_it_is_said(node: MigNode) -> None:
    node.machine.set_mig_mode(0, True)
    made = node.hardware.create(*node.address, TWO, node.wanted("2g.20gb", 0).placement)
    node.hardware.create_compute(*node.address, made)
    before = node.on_gpu()
    state = Layouts(node).settle()
    assert state.state == "refused"
    assert "created by another program" in state.text
    assert node.on_gpu() == before
    assert Layouts(node, MigLayouts(MIXED.named, "other")).settle().state == "applied"
    assert profiles(node) == [THREE, TWO, ONE]
    assert Layouts(node, MigLayouts({}, "all-disabled", destroys_foreign=True)).settle().state == "applied"
    assert node.on_gpu() == (False, [])


def test_the_mode_alone_is_switched_and_stays(node: MigNode) -> None:
    assert Layouts(node, MigLayouts({}, "all-enabled")).settle().state == "applied"
    assert node.on_gpu() == (True, [])
    node.settle()
    assert node.on_gpu() == (True, [])


def test_a_reboot_recreates_everything(node: MigNode) -> None:
    Layouts(node).settle()
    hold(node, "gpu-0-mig", kind="mig")
    make_idle(node.simulated, mig_mode=False)
    after = node.restarted(boot_id="boot-2")
    after.work_off()
    assert Layouts(after).settle().state == "applied"
    assert profiles(after) == [THREE, ONE, ONE]
    assert {entry.boot_id for entry in after.ledger.details(OwnedInstance)} == {"boot-2"}


def test_a_claim_on_a_whole_gpu_keeps_it_over_a_reboot(node: MigNode) -> None:
    hold(node)
    after = Layouts(node.restarted(boot_id="boot-2"))
    assert "uses the GPU" in after.settle().text
    assert node.on_gpu() == (False, [])


def test_the_next_instance_reports_nothing_again_and_continues_with_the_taint(node: MigNode) -> None:
    hold(node)
    first = Layouts(node)
    waiting = first.settle()
    following = node.restarted()
    second = Layouts(following)
    assert second.keeper.states() == {node.gpu_uuid: waiting}
    following.records.delete("uid-1")
    assert second.settle().state == "applied"
    third = Layouts(node.restarted())
    third.settle()
    assert third.reported == []


@pytest.mark.parametrize("begin", ["mixed", "all-1g.10gb"])
@pytest.mark.parametrize("changes", range(1, 22))
def test_a_death_after_any_change_ends_where_an_uninterrupted_one_does(
    node: MigNode, begin: str, changes: int
) -> None:
    """From a layout to another, with a death after each change of it."""
    by_label = MigLayouts(MIXED.named, from_label=True)
    first = Layouts(node, by_label)
    first.label(begin)
    first.settle()
    first.label("other")
    first.look()
    node.clock.pause(TAINTED_FIRST_S)
    with node.dying_after(changes) as done:
        try:
            first.look()
        except Crash:
            assert len(done) == changes
    second = Layouts(node.restarted(), by_label)
    second.label("other")
    second.node.work_off()
    assert second.settle().state == "applied"
    assert profiles(node) == [THREE, TWO, ONE]
    entries = second.node.ledger.details(OwnedInstance)
    assert sorted(entry.profile_id for entry in entries) == [THREE, TWO, ONE]
    assert all(entry.is_of_layout and entry.phase == "created" for entry in entries)


def test_a_gpu_that_needs_a_reset_says_so_and_is_cut_after_it(machine: Any, tmp_path: Path) -> None:
    simulated = machine("dgx-a100-40gb")
    make_idle(simulated, mig_mode=False)
    simulated.machine.set_gpu(0, virtualization=1)
    node = MigNode(simulated, tmp_path)
    wanted = MigLayouts({}, "all-balanced")
    layouts = Layouts(node, wanted)
    for _ in range(2):
        state = layouts.settle()
        assert state.state == "waiting"
        assert "--gpu-reset" in state.text
    assert node.reported_modes == [("mode-on", node.gpu_uuid, "RetryableError")]
    node.machine.reboot()
    simulated.session.reopen()
    after = node.restarted(boot_id="boot-2")
    assert Layouts(after, wanted).settle().state == "applied"
    assert len(slots(node)) == 4


def test_a_prepare_is_not_planned_while_its_gpu_changes(
    node: MigNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.mig.layouts._PLANNING_S", 0.1)
    layouts = Layouts(node)
    layouts.look()
    node.clock.pause(TAINTED_FIRST_S)
    with layouts.planning.hold(1):
        state = layouts.look()
    assert state.state == "waiting"
    assert node.on_gpu() == (False, [])


def test_gpu_whose_ledger_a_newer_release_wrote_is_not_cut(node: MigNode) -> None:
    """The instances on it may belong to claims whose records this release cannot read either."""
    layouts = Layouts(node, MigLayouts(MIXED.named, from_label=True, destroys_foreign=True))
    layouts.label("mixed")
    layouts.settle()
    before = slots(node)
    [ledger] = (node.directory / "ledger").glob("*.json")
    document = json.loads(ledger.read_text()) | {"version": 2, "release": "9.0.0"}
    write_atomically(ledger, json.dumps(document).encode())
    node.ledger.open()
    layouts.label("other")
    state = layouts.settle()
    assert (state.state, slots(node)) == ("waiting", before)
    assert "gets no new claims: gpu-dra-driver 9.0.0 wrote the ledger" in state.text


def test_mig_mode_in_the_ledger_of_a_newer_release_is_not_left(node: MigNode) -> None:
    """A device on the GPU may be of a kind that this release does not know."""
    mode = OwnedMode(node.gpu_uuid, None, node.boot_id)
    node.ledger.save(mode)
    assert node.mode.gpus() == {node.gpu_uuid}
    [ledger] = (node.directory / "ledger").glob("*.json")
    write_atomically(ledger, json.dumps(json.loads(ledger.read_text()) | {"version": 2}).encode())
    node.ledger.open()
    assert (node.ledger.details(OwnedMode), node.mode.gpus()) == ([mode], set())
