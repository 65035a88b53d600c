"""The drawing of a GPU's memory slices, and who is said to hold what."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.cli.inspect import WIDTH, draw_gpu, draw_gpus
from dra_driver.cli.rules.mig_map import GpuMap, SeenInstance, gpu_maps, remaining_room
from dra_driver.cli.rules.node_state import NodeState
from dra_driver.journal.rules.cleanups import PendingCleanup
from dra_driver.model.claim import AllocatedClaim, ClaimRef, HeldDevice
from dra_driver.model.gpu import Gpu
from dra_driver.model.mig import GpuInstance, OwnedInstance, Placement
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import CreateMig, Step, WriteCdiSpec
from tests.fakes.samples import GPU_0, h100, inventory, mig, uuid
from tests.fakes.tables import tabled
from tests.mig.migtables import MODELS, Silicon, table

H100 = table(MODELS["h100-sxm"])
BOOT = "boot-1"
GOLDEN = Path(__file__).with_name("golden")


def test_drawing(is_golden: Callable[[Path, str], None]) -> None:
    drawn = draw_gpu(
        GpuMap(
            "gpu-4cf8db2d",
            "NVIDIA H100 80GB HBM3",
            "on, MIG devices on demand",
            8,
            (
                SeenInstance("1g.10gb+me", Placement(0, 1), "not created by gpu-dra-driver", 13, (0, 1)),
                SeenInstance("2g.20gb", Placement(2, 2), "not created by gpu-dra-driver", 4),
                SeenInstance("3g.40gb", Placement(4, 4), "claim ml/training", 2, (0,)),
            ),
            (("1g.10gb", 1), ("3g.40gb", 0)),
        )
    )
    is_golden(GOLDEN / "mig-gpu.txt", drawn)


def test_whole_gpu_and_several_gpus(is_golden: Callable[[Path, str], None]) -> None:
    whole = GpuMap("gpu-1", None, "off", 4, whole_owner="claim default/all")
    drawn = draw_gpus([whole, replace(whole, name="gpu-2")])
    is_golden(GOLDEN / "whole-gpus.txt", drawn)
    assert draw_gpus([]) == ""


drawn_instances = st.builds(
    SeenInstance,
    st.text(max_size=20),
    st.builds(Placement, st.integers(0, 20), st.integers(0, 9)),
    st.text(max_size=300),
    st.none() | st.integers(0, 99),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
)
maps = st.builds(
    GpuMap,
    st.just("gpu-4cf8db2d"),
    st.none() | st.text(max_size=150),
    st.just("on"),
    st.integers(0, 40),
    st.lists(drawn_instances, max_size=8).map(tuple),
    st.lists(st.tuples(st.text(max_size=20), st.integers(0, 7)), max_size=9).map(tuple),
    st.none() | st.text(max_size=300),
)


@given(maps)
def test_drawing_of_any_text_is_narrow_printable_and_framed(entry: GpuMap) -> None:
    lines = draw_gpu(entry).split("\n")
    assert all(line.isprintable() for line in lines)
    boxes = [line for line in lines if line.startswith(("+", "|"))]
    assert len({len(line) for line in boxes}) <= 1
    assert all(len(line) <= WIDTH for line in boxes)
    if 0 < entry.memory_slices <= 16:
        top, titles, ids, bottom = boxes
        assert top == bottom
        corners = [place for place, sign in enumerate(top) if sign == "+"]
        assert all(titles[place] == ids[place] == "|" for place in corners)


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_room_is_what_the_silicon_takes(model: Any) -> None:
    choose = random.Random(3)
    for _ in range(6):
        silicon = Silicon(model)
        for _ in range(choose.randrange(5)):
            free = sorted(silicon.free())
            if free:
                silicon.create(choose.choice(free))
        counted = dict(remaining_room(table(model), silicon.instances))
        for row in model.mig:
            filled = Silicon(model)
            for instance in silicon.instances:
                filled.create(instance.slot)
            number = 0
            while mine := sorted(
                (start + row.size, start) for known, start in filled.free() if known == row.id
            ):
                filled.create((row.id, mine[0][1]))
                number += 1
            assert counted.get(row.name, 0) == number, row.name


# --- who holds what ------------------------------------------------------------------------------


def existing(*found: tuple[int, str, int], mode: bool = True, devices: bool = True) -> Gpu:
    """GPU 0 with GPU instances: ID, profile name, start."""
    instances, migs = [], []
    for number, name, start in found:
        row = next(row for row in H100.profiles if row.profile.name == name)
        place = next(place for place in row.placements if place.start == start)
        instances.append(GpuInstance(number, row.profile.profile_id, place))
        migs.append(mig(0, row.profile, start, place.size, number))
    return h100(
        0,
        mig_enabled=mode,
        mig_devices=tuple(migs) if devices else (),
        partitioning=replace(H100, withheld=tuple(instances)),
    )


def claimed(name: str, profile: str, start: int, **changes: Any) -> ClaimRecord:
    """A claim for a device that was created for it."""
    row = next(row for row in H100.profiles if row.profile.name == profile)
    place = next(place for place in row.placements if place.start == start)
    label = profile.replace(".", "").replace("+", "-")
    device = f"{GPU_0}-mig-{label}-{row.profile.profile_id}-{start}"
    made = CreateMig(device, uuid(0), None, row.profile.profile_id, profile, place)
    held = HeldDevice(device, "mig", "", uuid(0), placement=place, **changes)
    return of_claim(name, held, made, WriteCdiSpec())


def cleanup_of(ended: ClaimRecord) -> PendingCleanup:
    return PendingCleanup(ended.ref.uid, ended, ended.steps[:1], 0)


def of_claim(name: str, held: HeldDevice, *steps: Step, phase: Any = "prepared") -> ClaimRecord:
    ref = ClaimRef("default", name, f"uid-{name}")
    return ClaimRecord(AllocatedClaim(ref, (), ()), phase, BOOT, (held,), steps)


def owned(profile: str, start: int, **changes: Any) -> OwnedInstance:
    row = next(row for row in H100.profiles if row.profile.name == profile)
    place = next(place for place in row.placements if place.start == start)
    entry = OwnedInstance("device", uuid(0), None, row.profile.profile_id, profile, place, BOOT, "created")
    return replace(entry, **changes)


def map_of(gpu: Gpu, *records: ClaimRecord, on_demand: bool = True, **known: Any) -> GpuMap:
    state = NodeState(records, boot_id=BOOT, **known)
    (entry,) = gpu_maps(inventory(gpu, h100(1)), state, lambda found: on_demand and found.uuid == gpu.uuid)
    return entry


def owners(entry: GpuMap) -> dict[int, str]:
    """Return the owners by first memory slice."""
    return {drawn.place.start: drawn.holder for drawn in entry.instances}


def test_holders_of_devices_on_demand() -> None:
    gpu = existing(
        (7, "1g.10gb", 0), (8, "1g.10gb", 1), (9, "1g.10gb", 2), (10, "1g.10gb", 3), (2, "3g.40gb", 4)
    )
    entry = map_of(
        gpu,
        claimed("b", "1g.10gb", 0, share_id="s2"),
        claimed("a", "1g.10gb", 0, share_id="s1"),
        claimed("onlooker", "3g.40gb", 4, admin_access=True),
        owned=[
            owned("1g.10gb", 1, gpu_instance_id=8),
            owned("1g.10gb", 2, phase="creating"),
            owned("1g.10gb", 3, gpu_instance_id=10),
        ],
        cleanups=[cleanup_of(claimed("ended", "1g.10gb", 1))],
    )
    assert owners(entry) == {
        0: "claim default/a, claim default/b",
        1: "created by gpu-dra-driver, not used by a claim, will be destroyed",
        2: "being created by gpu-dra-driver",
        3: "created by gpu-dra-driver, not used by a claim",
        4: "not created by gpu-dra-driver",
    }
    assert entry.mode == "on, MIG devices on demand"
    assert entry.room == ()


@tabled("stale")
def test_ledger_speaks_of_another_instance(stale: dict[str, Any]) -> None:
    entry = map_of(existing((7, "1g.10gb", 0)), owned=[owned("1g.10gb", 0, **stale)])
    assert owners(entry) == {0: "not created by gpu-dra-driver"}


def test_holders_of_devices_that_someone_made() -> None:
    gpu = existing((7, "1g.10gb", 0), (2, "3g.40gb", 4))
    held = HeldDevice(f"{GPU_0}-mig-3g40gb-9-4", "mig", gpu.mig_devices[1].uuid, gpu.uuid)
    entry = map_of(gpu, of_claim("x", held, phase="preparing"), on_demand=False)
    assert owners(entry) == {0: "free", 4: "claim default/x (preparing)"}
    assert entry.mode == "on"
    assert dict(entry.room)["2g.20gb"] == 1
    bare = map_of(existing((7, "1g.10gb", 0), devices=False), on_demand=False)
    assert owners(bare) == {0: "not published"}
    assert bare.instances[0].compute_instance_ids == ()


def test_device_of_a_claim_that_is_not_there_keeps_its_place() -> None:
    entry = map_of(existing(mode=False), claimed("after-reboot", "3g.40gb", 0))
    assert [(drawn.gpu_instance_id, drawn.holder) for drawn in entry.instances] == [
        (None, "claim default/after-reboot")
    ]
    assert dict(entry.room)["3g.40gb"] == 1
    assert "slices 0-3, 3g.40gb, absent: claim default/after-reboot" in draw_gpu(entry)


def test_whole_gpu_leaves_no_room() -> None:
    held = HeldDevice(GPU_0, "gpu", uuid(0), uuid(0))
    looking = replace(held, admin_access=True)
    assert map_of(existing(mode=False), of_claim("looking", looking)).whole_owner is None
    entry = map_of(existing(mode=False), of_claim("whole", held))
    assert (entry.whole_owner, entry.room) == ("claim default/whole", ())


def test_records_that_cannot_be_read_make_no_one_a_stranger() -> None:
    entry = map_of(existing((7, "1g.10gb", 0)), faults=("a record cannot be read",))
    assert owners(entry)[0].startswith("unknown")


def test_only_gpus_that_are_cut_are_drawn() -> None:
    plain = inventory(h100(0), existing(mode=False))
    assert gpu_maps(plain, NodeState(), lambda gpu: False) == []
    assert len(gpu_maps(plain, NodeState(), lambda gpu: True)) == 1
