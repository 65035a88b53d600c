import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.errors import StateError
from dra_driver.journal.record_codec import FORMAT_VERSION, decode, encode
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceConfig, DeviceResult, PodRef
from dra_driver.model.record import ClaimRecord, HeldDevice
from dra_driver.model.steps import WriteCdiSpec, WriteDeviceMetadata

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
    devices=(HeldDevice("gpu-0", "gpu", "GPU-1", "GPU-1", True, "share-1"),),
    steps=(WriteDeviceMetadata(("v1beta1",)), WriteCdiSpec()),
    prepared_at="2026-08-07T12:00:00.000+00:00",
)
DOCUMENT = {
    "version": 1,
    "claim": {
        "namespace": "default",
        "name": "claim-1",
        "uid": "uid-1",
        "results": [
            {
                "request": "req/sub", "driver": "gpu.nvidia.com", "pool": "node-a", "device": "gpu-0",
                "adminAccess": True, "shareID": "share-1", "consumedCapacity": {"memory": "1Gi"},
            }
        ],
        "configs": [
            {"source": "FromClass", "requests": ["req"], "driver": "gpu.nvidia.com",
             "parameters": {"kind": "GpuConfig"}}
        ],
        "podClaimName": "gpus",
        "pods": [{"name": "trainer-0", "uid": "pod-uid-0"}],
    },
    "phase": "prepared",
    "bootID": "boot-1",
    "devices": [
        {"device": "gpu-0", "kind": "gpu", "uuid": "GPU-1", "gpuUUID": "GPU-1", "adminAccess": True,
         "shareID": "share-1"}
    ],
    "steps": [{"kind": "write_device_metadata", "versions": ["v1beta1"]}, {"kind": "write_cdi_spec"}],
    "preparedAt": "2026-08-07T12:00:00.000+00:00",
}  # fmt: skip

text = st.text(max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
results = st.builds(
    DeviceResult,
    text,
    text,
    text,
    text,
    st.booleans(),
    st.none() | text,
    st.dictionaries(text, text, max_size=2),
)
configs = st.builds(
    DeviceConfig,
    st.sampled_from(["FromClass", "FromClaim"]),
    st.lists(text, max_size=2).map(tuple),
    st.none() | text,
    json_values,
)
helds = st.builds(
    HeldDevice,
    text,
    st.sampled_from(["gpu", "mig"]),
    text,
    text,
    st.booleans(),
    st.none() | text,
    imex=st.sampled_from([None, 0, 2047, "all"]),
    host_devices=st.sampled_from([(), ("gds",), ("mofed", "nvswitch")]),
)
pods = st.builds(
    PodRef,
    st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True),
    st.from_regex(r"[a-f0-9]{8}-[a-f0-9]{4}", fullmatch=True),
)
known = {"version", "claim", "phase", "bootID", "devices", "steps", "preparedAt"}
records = st.builds(
    ClaimRecord,
    claim=st.builds(
        AllocatedClaim,
        st.builds(ClaimRef, text, text, text),
        st.lists(results, max_size=2).map(tuple),
        st.lists(configs, max_size=2).map(tuple),
        st.none() | text,
        st.none() | st.lists(pods, max_size=3).map(tuple),
    ),
    phase=st.sampled_from(["preparing", "prepared"]),
    boot_id=text,
    devices=st.lists(helds, max_size=2).map(tuple),
    steps=st.sampled_from([(), (WriteCdiSpec(),), (WriteDeviceMetadata(("v1beta1", "v1alpha1")),)]),
    prepared_at=st.none() | text,
)


def changed(**changes: Any) -> bytes:
    return json.dumps(DOCUMENT | changes).encode()


def test_record_has_the_documented_form() -> None:
    assert json.loads(encode(RECORD)) == DOCUMENT
    assert FORMAT_VERSION == 1


@given(records)
def test_record_survives_encoding(record: ClaimRecord) -> None:
    content = encode(record)
    decoded = decode(content)
    assert decoded == record
    kept = (decoded.claim.pods, decoded.claim.pod_claim_name)
    assert kept == (record.claim.pods, record.claim.pod_claim_name), "which equality does not look at"
    assert encode(decoded) == content


POD = {"name": "trainer-0", "uid": "pod-uid-0"}


def with_pods(pods: Any) -> bytes:
    return changed(claim=DOCUMENT["claim"] | {"pods": pods})


def test_claim_without_pods_is_another_than_one_of_which_none_is_known() -> None:
    assert (decode(with_pods([])).claim.pods, decode(with_pods(None)).claim.pods) == ((), None)
    unknown = replace(RECORD, claim=replace(RECORD.claim, pods=None))
    assert "pods" not in json.loads(encode(unknown))["claim"]


@pytest.mark.parametrize(
    "odd",
    [
        5,
        ["trainer-0"],
        [POD, {"name": "trainer-1"}],
        [POD | {"name": "\x1b]0;x\x07"}],
        [POD | {"uid": "a" * 129}],
    ],
)
def test_pods_that_cannot_be_read_are_unknown_and_keep_no_claim_from_being_served(odd: Any) -> None:
    record = decode(with_pods(odd))
    assert (record, record.claim.pods) == (RECORD, None)


def test_more_pods_than_the_api_allows_are_not_read() -> None:
    many = [{"name": f"p-{number}", "uid": f"u-{number}"} for number in range(1000)]
    record = decode(with_pods(many))
    assert record.claim.pods == tuple(PodRef(f"p-{number}", f"u-{number}") for number in range(256))


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
        (changed(version=2), "has format version 2 of a newer release"),
        (changed(phase="done"), "phase 'done' is unknown"),
        (changed(bootID=None), "field 'bootID' is None, which is not text"),
        (changed(devices=["gpu-0"]), "not a claim record"),
        (of_claim(results=None), "not a claim record"),
        (of_claim(podClaimName=5), "field 'podClaimName' is 5, which is not text"),
        (of_device(kind="vfio"), "device kind 'vfio' is unknown"),
        (of_device(usage={"kind": "dmem"}), "sharing mode 'dmem' is unknown"),
        (of_step(kind="bind_vfio"), "step 'bind_vfio' is unknown"),
        (of_step(kind="set_time_slice", gpuUUID="GPU-1", interval="1"), "'1', which is not a whole number"),
        (
            of_step(kind="write_device_metadata", versions="v1beta1"),
            "'v1beta1', which is not a list of texts",
        ),
    ],
)
def test_record_is_refused_with_the_reason_when_it_is_broken(content: bytes, reason: str) -> None:
    with pytest.raises(StateError) as caught:
        decode(content)
    assert reason in str(caught.value)


@given(st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_record_or_a_state_error(content: bytes) -> None:
    with pytest.raises(StateError):
        decode(content)


@given(st.sampled_from(sorted(known)), json_values)
def test_any_value_in_a_field_is_a_record_or_a_state_error(field: str, value: Any) -> None:
    with suppress(StateError):
        assert isinstance(decode(changed(**{field: value})), ClaimRecord)
