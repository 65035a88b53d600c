import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.errors import StateError
from dra_driver.journal.records import RECORD_FILE
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceConfig, DeviceResult, HeldDevice, PodRef
from dra_driver.model.mig import Placement
from dra_driver.model.mps import MpsDaemonSpec, MpsMember, MpsShared, TimeSliced
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import (
    STEPS,
    BindVfio,
    CreateMig,
    LeaveMigMode,
    LockClocks,
    RunMps,
    SetPowerLimit,
    SetTimeSlice,
    StartMaintenance,
    WriteCdiSpec,
    WriteDeviceMetadata,
)

MPS = MpsDaemonSpec("gpu-1", "GPU-1", "gpu", "GPU-1", True, 50, 2048, (MpsMember("gpu-2", "GPU-2", 1024),))
RECORD = ClaimRecord(
    claim=AllocatedClaim(
        ClaimRef("default", "claim-1", "uid-1"),
        (DeviceResult("req/sub", "gpu.nvidia.com", "node-a", "gpu-0", True, "share-1", {"memory": "1Gi"}),),
        (DeviceConfig("FromClass", ("req",), "gpu.nvidia.com", {"kind": "GpuConfig"}),),
        "gpus",
        (PodRef("trainer-0", "pod-uid-0"),),
    ),
    phase="prepared",
    boot_id="boot-1",
    devices=(
        HeldDevice("gpu-0", "gpu", "GPU-0", "GPU-0", True, "share-1", imex="all", host_devices=("gds",)),
        HeldDevice("gpu-1", "gpu", "GPU-1", "GPU-1", usage=MpsShared(MPS, 1024, 25, (1024, None)), imex=7),
        HeldDevice("gpu-3", "gpu", "GPU-3", "GPU-3", usage=TimeSliced(3)),
        HeldDevice("mig-0", "mig", "", "GPU-4", placement=Placement(4, 2)),
        HeldDevice("vfio-0", "vfio", "0b1c", "GPU-5"),
    ),
    steps=(
        StartMaintenance(("GPU-6",), "Wait", 600),
        LeaveMigMode("GPU-0", None),
        CreateMig("mig-0", "GPU-4", "0000:10:00.0", 14, "2g.20gb", Placement(4, 2)),
        SetTimeSlice("GPU-3", 3),
        SetPowerLimit("GPU-3", 500),
        LockClocks("GPU-3", "graphics", 210, 1200),
        RunMps(MPS),
        BindVfio("vfio-0", "GPU-5", "0000:10:00.0", "vfio-pci"),
        WriteDeviceMetadata(("v1beta1",)),
        WriteCdiSpec(),
    ),
    prepared_at="2026-08-07T12:00:00.000+00:00",
)
decode, encode = RECORD_FILE.read, RECORD_FILE.write
GOLDEN = Path(__file__).parent / "golden" / "record.json"
DOCUMENT = json.loads(encode(RECORD))

text = st.text(max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
st.register_type_strategy(DeviceConfig, st.builds(DeviceConfig, parameters=json_values))
usages = st.none() | st.from_type(TimeSliced) | st.from_type(MpsShared)  # no record has LostMps
st.register_type_strategy(HeldDevice, st.builds(HeldDevice, usage=usages))
records = st.from_type(ClaimRecord)
known = {"version", "release", "claim", "phase", "bootID", "devices", "steps", "preparedAt"}


def changed(**changes: Any) -> bytes:
    return json.dumps(DOCUMENT | changes).encode()


def test_golden_record_has_every_kind_of_step() -> None:
    assert [type(step) for step in RECORD.steps] == [*STEPS]


def test_record_has_the_golden_form(is_golden: Callable[[Path, str], None]) -> None:
    """Another form would need another format number."""
    is_golden(GOLDEN, json.dumps(DOCUMENT | {"release": "0.1.0"}, indent=1, sort_keys=True) + "\n")
    assert decode(GOLDEN.read_bytes()) == RECORD


@given(records)
def test_record_survives_encoding(record: ClaimRecord) -> None:
    content = encode(record)
    decoded = decode(content)
    assert decoded == record
    kept = (decoded.claim.pods, decoded.claim.pod_claim_name)
    assert kept == (record.claim.pods, record.claim.pod_claim_name), "which equality does not look at"
    assert encode(decoded) == content


def test_claim_without_pods_is_another_than_one_of_which_none_is_known() -> None:
    none = decode(changed(claim=DOCUMENT["claim"] | {"pods": []}))
    assert none.claim.pods == ()
    unknown = replace(RECORD, claim=replace(RECORD.claim, pods=None))
    assert "pods" not in json.loads(encode(unknown))["claim"]


def of_claim(**changes: Any) -> bytes:
    return changed(claim=DOCUMENT["claim"] | changes)


def of_device(**changes: Any) -> bytes:
    return changed(devices=[DOCUMENT["devices"][0] | changes])


def of_step(**step: Any) -> bytes:
    return changed(steps=[step])


@pytest.mark.parametrize("field", ["claim", "phase", "bootID", "devices", "steps"])
def test_record_is_refused_when_a_field_is_missing(field: str) -> None:
    with pytest.raises(StateError, match=f"field '{field}' is missing"):
        decode(json.dumps({key: value for key, value in DOCUMENT.items() if key != field}).encode())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a claim record"),
        (b"null", "not a JSON object"),
        (b"\xff\xfe", "not a claim record"),
        (b"[" * 200_000, "not a claim record"),
        (encode(RECORD)[:-20], "not a claim record"),
        (changed(version="1"), "format version '1' is unknown"),
        (changed(version=2), "its format version is 2, and this release reads only 1"),
        (changed(phase="done"), "phase 'done' is unknown"),
        (changed(bootID=None), "field 'bootID' is None, which is not a string"),
        (changed(devices=["gpu-0"]), "not a claim record"),
        (of_claim(results=None), "not a claim record"),
        (of_claim(podClaimName=5), "field 'podClaimName' is 5, which is not a string"),
        (of_device(kind="npu"), "kind 'npu' is unknown"),
        (of_device(usage={"kind": "dmem"}), "sharing mode 'dmem' is unknown"),
        (of_step(kind="drain"), "step 'drain' is unknown"),
        (of_step(kind="set_time_slice", gpuUUID="GPU-1", interval="1"), "'1', which is not a whole number"),
        (
            of_step(kind="write_device_metadata", versions="v1beta1"),
            "'v1beta1', which is not a list of strings",
        ),
    ],
)
def test_record_is_refused_with_the_reason_when_it_is_broken(content: bytes, reason: str) -> None:
    with pytest.raises(StateError) as caught:
        decode(content)
    assert reason in str(caught.value)
