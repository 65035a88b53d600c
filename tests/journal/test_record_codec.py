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
    ),
    phase="prepared",
    boot_id="boot-1",
    devices=(HeldDevice("gpu-0", "gpu", "GPU-1", "GPU-1", True, "share-1"),),
    steps=(WriteCdiSpec(),),
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
    },
    "phase": "prepared",
    "bootID": "boot-1",
    "devices": [
        {"device": "gpu-0", "kind": "gpu", "uuid": "GPU-1", "gpuUUID": "GPU-1", "adminAccess": True,
         "shareID": "share-1"}
    ],
    "steps": [{"kind": "write_cdi_spec"}],
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


def without(field: str) -> bytes:
    return json.dumps({key: value for key, value in DOCUMENT.items() if key != field}).encode()


def test_record_has_the_documented_form() -> None:
    assert json.loads(encode(RECORD)) == DOCUMENT
    assert FORMAT_VERSION == 1


@given(records)
def test_record_survives_encoding(record: ClaimRecord) -> None:
    content = encode(record)
    assert decode(content) == record
    assert decode(content).claim.pods == record.claim.pods, "which equality does not look at"
    assert encode(decode(content)) == content


def test_metadata_and_the_pods_name_of_the_claim_are_kept() -> None:
    record = replace(
        RECORD,
        claim=replace(RECORD.claim, pod_claim_name="gpus"),
        steps=(WriteDeviceMetadata(("v1beta1",)),),
    )
    document = json.loads(encode(record))
    assert document["claim"]["podClaimName"] == "gpus"
    assert document["steps"] == [{"kind": "write_device_metadata", "versions": ["v1beta1"]}]
    # Not by equality alone: claims are equal without the name.
    assert decode(encode(record)).claim.pod_claim_name == "gpus"


POD = {"name": "trainer-0", "uid": "pod-uid-0"}


def with_pods(pods: Any) -> bytes:
    return changed(claim=DOCUMENT["claim"] | {"pods": pods})


def test_pods_are_kept() -> None:
    record = replace(RECORD, claim=replace(RECORD.claim, pods=(PodRef("trainer-0", "pod-uid-0"),)))
    assert json.loads(encode(record)) == json.loads(with_pods([POD]))
    assert decode(encode(record)).claim.pods == record.claim.pods


def test_claim_without_pods_is_another_than_one_of_which_none_is_known() -> None:
    assert (decode(with_pods([])).claim.pods, decode(with_pods(None)).claim.pods) == ((), None)
    assert decode(changed()).claim.pods is None
    assert "pods" not in json.loads(encode(RECORD))["claim"]


@pytest.mark.parametrize(
    "odd",
    [
        5,
        "trainer-0",
        {"name": "trainer-0", "uid": "pod-uid-0"},
        ["trainer-0"],
        [POD, {"name": "trainer-1"}],
        [POD | {"name": "Trainer"}],
        [POD | {"name": "\x1b]0;x\x07"}],
        [POD | {"name": "a" * 254}],
        [POD | {"uid": "a" * 129}],
        [POD | {"uid": None}],
        [[]] * 2,
    ],
)
def test_pods_that_cannot_be_read_are_unknown_and_keep_no_claim_from_being_served(odd: Any) -> None:
    record = decode(with_pods(odd))
    assert (record, record.claim.pods) == (RECORD, None)


def test_more_pods_than_the_api_allows_are_not_read() -> None:
    many = [{"name": f"p-{number}", "uid": f"u-{number}"} for number in range(1000)]
    record = decode(with_pods(many))
    assert record.claim.pods == tuple(PodRef(f"p-{number}", f"u-{number}") for number in range(256))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a claim record"),
        (b"{", "not a claim record"),
        (b"null", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"\x00" * 100, "not a claim record"),
        (b"\xff\xfe", "not a claim record"),
        (b"[" * 200_000, "not a claim record"),
        (encode(RECORD)[:-20], "not a claim record"),
        (encode(RECORD) * 2, "not a claim record"),
        (without("version"), "format version None is unknown"),
        (changed(version=0), "format version 0 is unknown"),
        (changed(version="1"), "format version '1' is unknown"),
        (changed(version=2), "has format version 2 of a newer release"),
        (changed(phase="done"), "phase 'done' is unknown"),
        (changed(phase=["prepared"]), "is unknown"),
        (without("phase"), "field 'phase' is missing"),
        (without("claim"), "field 'claim' is missing"),
        (without("devices"), "field 'devices' is missing"),
        (without("steps"), "field 'steps' is missing"),
        (without("bootID"), "field 'bootID' is missing"),
        (changed(bootID=None), "field 'bootID' is None, which is not text"),
        (changed(claim=[]), "not a claim record"),
        (changed(claim={}), "field 'namespace' is missing"),
        (changed(claim=DOCUMENT["claim"] | {"uid": None}), "field 'uid' is None, which is not text"),
        (changed(claim=DOCUMENT["claim"] | {"results": None}), "not a claim record"),
        (changed(devices=None), "not a claim record"),
        (changed(devices=["gpu-0"]), "not a claim record"),
        (
            changed(devices=[DOCUMENT["devices"][0] | {"gpuUUID": None}]),
            "field 'gpuUUID' is None, which is not text",
        ),
        (
            changed(devices=[DOCUMENT["devices"][0] | {"shareID": 5}]),
            "field 'shareID' is 5, which is not text",
        ),
        (changed(devices=[DOCUMENT["devices"][0] | {"kind": 7}]), "field 'kind' is 7, which is not text"),
        (changed(devices=[DOCUMENT["devices"][0] | {"kind": "vfio"}]), "device kind 'vfio' is unknown"),
        (
            changed(devices=[DOCUMENT["devices"][0] | {"usage": {"kind": "dmem"}}]),
            "sharing mode 'dmem' is unknown",
        ),
        (changed(steps=[{"kind": "bind_vfio"}]), "step 'bind_vfio' is unknown"),
        (
            changed(steps=[{"kind": "set_time_slice", "gpuUUID": "GPU-1", "interval": "1"}]),
            "field 'interval' is '1', which is not a whole number",
        ),
        (changed(steps=[{}]), "field 'kind' is missing"),
        (
            changed(steps=[{"kind": "write_device_metadata", "versions": "v1beta1"}]),
            "field 'versions' is 'v1beta1', which is not a list of texts",
        ),
        (
            changed(claim=DOCUMENT["claim"] | {"podClaimName": 5}),
            "field 'podClaimName' is 5, which is not text",
        ),
        (changed(preparedAt=5), "field 'preparedAt' is 5, which is not text"),
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
