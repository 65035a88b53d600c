"""The files that describe a container's devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.cdi.rules import metadata as devicemetadata
from dra_driver.cdi.rules.metadata import check_names, described, encode, owner_and_generation
from dra_driver.claims.rules.plan import answer, our_part
from dra_driver.errors import ClaimRefusedError
from dra_driver.model.claim import AllocatedClaim, ClaimRef
from dra_driver.model.inventory import DynamicMigDevice, OfferedDevice
from dra_driver.model.mig import OwnedInstance, Placement
from dra_driver.model.mps import MpsDaemonSpec, MpsShared
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import WriteCdiSpec, WriteDeviceMetadata
from dra_driver.slices.rules.attributes import wire_device
from tests.cdi.cdi_schema import faults
from tests.fakes.samples import DRIVER, GPU_0, GPU_1, MIG_1G, MIXED, ONE_G, claim, h100, plan, record, result

GOLDEN = Path(__file__).parent / "golden"
BOTH = ("v1beta1", "v1alpha1")
UID = "4cf8db2d-06c0-4d70-aa51-e59b25b2c16c"
SHARE = "9f6a2c3e-0d5f-4a6b-8b7a-7f3c1ad296f4"
WANTED = claim(GPU_0, result(MIG_1G, "any/part"), GPU_1, uid=UID)


def test_content_is_the_same_object_in_every_version(is_golden: Callable[[Path, str], None]) -> None:
    parts = [result(GPU_0, "any/big"), result(GPU_1, "any/big")]
    devices = [described(part, MIXED.by_name[part.device], None, MIXED, None) for part in parts]
    wanted = replace(claim(*parts, uid=UID), pod_claim_name="training")
    beta = encode(wanted, devices, ("v1beta1",), 3)
    is_golden(GOLDEN / "metadata.json", beta.decode())
    assert encode(wanted, devices, BOTH, 3) == beta + beta.replace(b"v1beta1", b"v1alpha1")
    assert b"podClaimName" not in encode(claim(), [], ("v1alpha1",), 1)


ON_DEMAND = DynamicMigDevice("gpu-00000000-mig-1g10gb-19-0", h100(0), ONE_G, Placement(0, 1))
MADE = OwnedInstance(
    ON_DEMAND.name, h100(0).uuid, None, 19, "1g.10gb", Placement(0, 1), "boot-1", gpu_instance_id=7,
    compute_instance_id=0, uuid="MIG-1",
)  # fmt: skip
MPS = MpsShared(MpsDaemonSpec(GPU_0, "GPU-0", "gpu", "GPU-0"), 10240, 50)


def ints(**values: int) -> dict[str, Any]:
    return {name: {"int": value} for name, value in values.items()}


SHARED = {"shareID": {"string": SHARE}, "shareable": {"bool": True}}
LIMITS = ints(mpsPinnedMemoryLimitMiB=10240, mpsActiveThreadPercentage=50)
IDS = ints(gpuInstanceID=7, computeInstanceID=0)


@pytest.mark.parametrize(
    ("device", "changes", "usage", "made", "more"),
    [
        (MIXED.by_name[GPU_0], {}, None, None, {}),
        (MIXED.by_name[MIG_1G], {}, None, None, IDS),
        (ON_DEMAND, {"admin_access": True}, None, None, {}),
        (ON_DEMAND, {}, None, MADE, {"uuid": {"string": "MIG-1"}, **IDS}),
        (MIXED.by_name[GPU_0], {"share_id": SHARE}, MPS, None, SHARED | LIMITS),
        (MIXED.by_name[GPU_0], {"share_id": SHARE}, replace(MPS, memory_limit_mib=None), None,
         SHARED | ints(mpsActiveThreadPercentage=50)),
    ],
)  # fmt: skip
def test_attributes_are_the_published_ones_and_those_of_today(
    device: OfferedDevice, changes: Any, usage: Any, made: OwnedInstance | None, more: Any
) -> None:
    found = described(result(device.name, **changes), device, usage, MIXED, made).attributes
    assert found == wire_device(device, MIXED)["attributes"] | more
    assert len(found) <= 32
    assert list(found) == sorted(found)


@pytest.mark.parametrize(("kind", "pod_claim_name"), [("claim", None), ("template", "gpus")])
def test_spec_mounts_the_file_where_the_container_looks(
    kind: str, pod_claim_name: str | None, is_golden: Callable[[Path, str], None]
) -> None:
    wanted = replace(WANTED, pod_claim_name=pod_claim_name)
    spec = devicemetadata.cdi_spec(DRIVER, wanted, "any", "/host/metadata.json")
    is_golden(GOLDEN / f"metadata-spec-{kind}.json", json.dumps(spec, indent=1) + "\n")
    assert faults(spec) == []


@pytest.mark.parametrize(
    "wanted",
    [
        replace(WANTED, ref=ClaimRef("../x", "claim", UID)),
        replace(WANTED, ref=ClaimRef("a_b", "claim", UID)),
        replace(WANTED, ref=ClaimRef("default", "", UID)),
        replace(WANTED, ref=ClaimRef("default", "a/b", UID)),
        replace(WANTED, ref=ClaimRef("default", "..", UID)),
        replace(WANTED, ref=ClaimRef("default", "a\n", UID)),
        replace(WANTED, ref=ClaimRef("default", "a" * 254, UID)),
        replace(WANTED, ref=ClaimRef("default", "claim", "../" + UID)),
        claim(result(GPU_0, "..")),
        claim(result(GPU_0, "a_b/sub")),
        claim(result(GPU_0, "")),
        replace(WANTED, pod_claim_name="../../etc"),
        replace(WANTED, pod_claim_name=""),
    ],
)
def test_names_that_lead_elsewhere_are_refused_before_anything_is_done(wanted: AllocatedClaim) -> None:
    with pytest.raises(ClaimRefusedError):
        check_names(wanted)
    with pytest.raises(ClaimRefusedError):
        plan(wanted, metadata=BOTH)


def test_names_that_kubernetes_gives_are_taken() -> None:
    longest = ClaimRef("n" * 63, ".".join(["c" * 63] * 3 + ["c" * 61]), UID)
    check_names(replace(WANTED, ref=longest, pod_claim_name="p" * 63))
    assert devicemetadata.directory_name(longest) == f"{'n' * 63}_{UID}"
    assert devicemetadata.directory_name(ClaimRef("ml", "a.b", UID)) == "ml_a.b"


def test_owner_and_generation_are_read_from_any_file_of_ours() -> None:
    for versions in (BOTH, ("v1beta1",), ("v1alpha1",)):
        assert owner_and_generation(encode(WANTED, [], versions, 7)) == (UID, 7)


@given(
    st.binary(max_size=40) | st.text(max_size=20).map(lambda text: json.dumps({"metadata": text}).encode())
)
def test_other_files_have_no_owner(content: bytes) -> None:
    assert owner_and_generation(content) is None
    assert owner_and_generation(b'{"metadata": {"uid": 1, "generation": 2}}') is None
    assert owner_and_generation(b'{"metadata": {"uid": "a", "generation": true}}') is None
    assert owner_and_generation(encode(WANTED, [], BOTH, 1)[:60]) is None


STEP = WriteDeviceMetadata(BOTH)
OLD = WriteDeviceMetadata(("v1alpha1",))


def prepared(*steps: Any, phase: Any = "prepared", wanted: AllocatedClaim = WANTED) -> ClaimRecord:
    held = plan(wanted).held_devices()
    return replace(record(*held, phase=phase), claim=wanted, steps=steps)


@pytest.mark.parametrize(
    ("versions", "known", "steps"),
    [
        ((), None, (WriteCdiSpec(),)),
        (BOTH, None, (STEP, WriteCdiSpec())),
        (BOTH, prepared(WriteCdiSpec()), (WriteCdiSpec(),)),
        ((), prepared(STEP, WriteCdiSpec()), (STEP, WriteCdiSpec())),
        (BOTH, prepared(OLD, WriteCdiSpec()), (OLD, WriteCdiSpec())),
        (BOTH, prepared(WriteCdiSpec(), phase="preparing"), (STEP, WriteCdiSpec())),
        ((), prepared(STEP, WriteCdiSpec(), phase="preparing"), (STEP, WriteCdiSpec())),
        # Other devices: the record is undone first, and the claim is prepared like a new one.
        ((), prepared(STEP, WriteCdiSpec(), wanted=claim(GPU_1, uid=UID)), (WriteCdiSpec(),)),
        (BOTH, prepared(WriteCdiSpec(), wanted=claim(GPU_1, uid=UID)), (STEP, WriteCdiSpec())),
    ],
)
def test_claim_keeps_what_its_record_has(versions: Any, known: ClaimRecord | None, steps: Any) -> None:
    assert plan(WANTED, known=known, metadata=versions).steps == steps


def test_claim_without_our_devices_has_no_metadata() -> None:
    assert plan(claim(), metadata=BOTH).steps == ()


def test_first_device_of_each_request_brings_the_file() -> None:
    held = plan(WANTED).held_devices()
    ids = [device.cdi_ids for device in answer(WANTED, DRIVER, (STEP, WriteCdiSpec()), held).devices]
    bare = [device.cdi_ids for device in answer(WANTED, DRIVER, (WriteCdiSpec(),), held).devices]
    assert bare == [(f"k8s.{DRIVER}/claim={UID}-{name}",) for name in (GPU_0, MIG_1G, GPU_1)]
    assert ids == [
        (*bare[0], f"{DRIVER}/metadata={UID}_gpu"),
        (*bare[1], f"{DRIVER}/metadata={UID}_any"),
        bare[2],
    ]


def test_pod_claim_name_is_not_a_part_of_the_allocation() -> None:
    """A record of before the name was kept is still the record of its claim."""
    assert replace(WANTED, pod_claim_name="gpus") == WANTED
    assert our_part(replace(WANTED, pod_claim_name="gpus"), DRIVER).pod_claim_name == "gpus"
