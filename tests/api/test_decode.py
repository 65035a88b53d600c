from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra_driver.api.config import (
    GROUP_VERSION,
    GpuConfig,
    MigDeviceConfig,
    MpsConfig,
    Sharing,
    TimeSlicingConfig,
    VfioDeviceConfig,
)
from dra_driver.api.decode import decode
from dra_driver.errors import InvalidConfigError

MIB = 1024 * 1024


def parameters(kind: str = "GpuConfig", **fields: Any) -> dict[str, Any]:
    return {"apiVersion": GROUP_VERSION, "kind": kind, **fields}


def time_slicing(**fields: Any) -> dict[str, Any]:
    return parameters(sharing={"strategy": "TimeSlicing", **fields})


def mps(**fields: Any) -> dict[str, Any]:
    return parameters(sharing={"strategy": "MPS", "mpsConfig": fields})


TIME_SLICED = GpuConfig(Sharing("TimeSlicing", time_slicing=TimeSlicingConfig()))


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (parameters(), GpuConfig()),
        (parameters(sharing=None), GpuConfig()),
        (time_slicing(), TIME_SLICED),
        (time_slicing(timeSlicingConfig=None), TIME_SLICED),
        (time_slicing(timeSlicingConfig={}), TIME_SLICED),
        (time_slicing(timeSlicingConfig={"interval": None}), TIME_SLICED),
        (
            time_slicing(timeSlicingConfig={"interval": "Long"}),
            GpuConfig(Sharing("TimeSlicing", time_slicing=TimeSlicingConfig("Long"))),
        ),
        (parameters(sharing={"strategy": "MPS"}), GpuConfig(Sharing("MPS", mps=MpsConfig()))),
        (mps(), GpuConfig(Sharing("MPS", mps=MpsConfig()))),
        (
            mps(
                defaultActiveThreadPercentage=50,
                defaultPinnedDeviceMemoryLimit="10Gi",
                defaultPerDevicePinnedMemoryLimit={"0": "1.5Gi", "GPU-4cf8db2d-06c0": 2 * MIB},
                multiUser=True,
            ),
            GpuConfig(
                Sharing(
                    "MPS",
                    mps=MpsConfig(50, 10240 * MIB, {"0": 1536 * MIB, "GPU-4cf8db2d-06c0": 2 * MIB}, True),
                )
            ),
        ),
        (parameters("MigDeviceConfig"), MigDeviceConfig()),
        (
            parameters("MigDeviceConfig", sharing={"strategy": "TimeSlicing"}),
            MigDeviceConfig(Sharing("TimeSlicing", time_slicing=TimeSlicingConfig())),
        ),
        (
            parameters("MigDeviceConfig", sharing={"strategy": "MPS", "mpsConfig": {"multiUser": False}}),
            MigDeviceConfig(Sharing("MPS", mps=MpsConfig(multi_user=False))),
        ),
        (parameters("VfioDeviceConfig"), VfioDeviceConfig()),
        (parameters("VfioDeviceConfig", iommu=None), VfioDeviceConfig()),
        (
            parameters("VfioDeviceConfig", iommu={"backendPolicy": "PreferIommuFD", "enableAPIDevice": True}),
            VfioDeviceConfig("PreferIommuFD", True),
        ),
    ],
)
def test_good_parameters_become_values_with_defaults(given: dict[str, Any], value: Any) -> None:
    assert decode(given) == value


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (None, "the parameters must be an object with apiVersion and kind, not null"),
        ("text", "the parameters must be an object with apiVersion and kind, not str"),
        ({}, f"apiVersion: is required; use {GROUP_VERSION}"),
        (
            {"apiVersion": "resource.nvidia.com/v1", "kind": "GpuConfig"},
            f"apiVersion: 'resource.nvidia.com/v1' is not supported; use {GROUP_VERSION}",
        ),
        (
            parameters("Gpu"),
            "kind: 'Gpu' is not supported; use one of GpuConfig, MigDeviceConfig, VfioDeviceConfig",
        ),
        (
            parameters({"a": 1}),
            "kind: must be a string; use one of GpuConfig, MigDeviceConfig, VfioDeviceConfig",
        ),
        (parameters(x="a" * 11000), "the parameters have 11070 bytes; at most 10240 are allowed"),
        (parameters(x={1}), "the parameters are not valid JSON: Object of type set is not JSON serializable"),
        (parameters(shring=1), "GpuConfig is not valid: shring: unknown field"),
        (parameters(sharing=[]), "GpuConfig is not valid: sharing: must be an object"),
        (parameters(sharing={}), "GpuConfig is not valid: sharing.strategy: is required"),
        (
            parameters(sharing={"strategy": "Time"}),
            "GpuConfig is not valid: sharing.strategy: must be TimeSlicing or MPS",
        ),
        (
            time_slicing(timeSlicingConfig={"interval": "long"}),
            "GpuConfig is not valid: sharing.timeSlicingConfig.interval: "
            "must be Default, Short, Medium or Long",
        ),
        (
            time_slicing(mpsConfig={}),
            "GpuConfig is not valid: sharing.mpsConfig: does not fit strategy TimeSlicing; "
            "remove it or use strategy MPS",
        ),
        (
            parameters(sharing={"strategy": "MPS", "timeSlicingConfig": {}}),
            "GpuConfig is not valid: sharing.timeSlicingConfig: does not fit strategy MPS; "
            "remove it or use strategy TimeSlicing",
        ),
        (
            parameters("MigDeviceConfig", sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {}}),
            "MigDeviceConfig is not valid: sharing.timeSlicingConfig: unknown field",
        ),
        (
            mps(defaultActiveThreadPercentage=0),
            "GpuConfig is not valid: sharing.mpsConfig.defaultActiveThreadPercentage: "
            "must be a whole number from 1 to 100",
        ),
        (
            time_slicing(mpsConfig=None),
            "GpuConfig is not valid: sharing.mpsConfig: does not fit strategy TimeSlicing; "
            "remove it or use strategy MPS",
        ),
        (
            mps(defaultActiveThreadPercentage=101),
            "GpuConfig is not valid: sharing.mpsConfig.defaultActiveThreadPercentage: "
            "must be a whole number from 1 to 100",
        ),
        (
            mps(defaultPinnedDeviceMemoryLimit="1023Ki"),
            "GpuConfig is not valid: sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: "
            "1023Ki is below the least limit, 1Mi",
        ),
        (
            mps(defaultPinnedDeviceMemoryLimit=True),
            "GpuConfig is not valid: sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: "
            "must be a quantity such as 10Gi",
        ),
        (
            mps(defaultPerDevicePinnedMemoryLimit={"one": "1Gi"}),
            "GpuConfig is not valid: sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit: "
            "'one' is not a device UUID or an index",
        ),
        (mps(multiUser="yes"), "GpuConfig is not valid: sharing.mpsConfig.multiUser: must be true or false"),
        (
            parameters("VfioDeviceConfig", iommu={"backendPolicy": "Any", "enableApiDevice": True}),
            "VfioDeviceConfig is not valid: iommu.backendPolicy: "
            "must be LegacyOnly or PreferIommuFD; iommu.enableApiDevice: unknown field",
        ),
    ],
)
def test_faulty_parameters_are_refused_with_every_fault_in_one_line(given: Any, fault: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        decode(given)
    assert str(caught.value) == fault
    assert caught.value.faults


def test_unfitting_part_hides_no_other_fault() -> None:
    with pytest.raises(InvalidConfigError) as caught:
        decode(mps(defaultActiveThreadPercentage=0) | {"sharing": {
            "strategy": "MPS", "timeSlicingConfig": None, "mpsConfig": {"defaultActiveThreadPercentage": 0}, "bogus": 1,
        }})  # fmt: skip
    assert [fault.partition(": ")[0] for fault in caught.value.faults] == [
        "sharing.timeSlicingConfig",
        "sharing.mpsConfig.defaultActiveThreadPercentage",
        "sharing.bogus",
    ]


def test_faults_are_listed_one_by_one() -> None:
    with pytest.raises(InvalidConfigError) as caught:
        decode(mps(defaultActiveThreadPercentage="50", defaultPinnedDeviceMemoryLimit="x", more=1))
    assert [fault.partition(":")[0] for fault in caught.value.faults] == [
        "sharing.mpsConfig.defaultActiveThreadPercentage",
        "sharing.mpsConfig.defaultPinnedDeviceMemoryLimit",
        "sharing.mpsConfig.more",
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = ("sharing", "strategy", "timeSlicingConfig", "mpsConfig", "multiUser", "iommu", "interval")


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(["GpuConfig", "MigDeviceConfig", "VfioDeviceConfig"]),
    fields=st.dictionaries(st.sampled_from(NAMES), JSON | st.dictionaries(st.sampled_from(NAMES), JSON)),
)
def test_any_input_is_decoded_or_refused_in_one_line(kind: str, fields: dict[str, Any]) -> None:
    text = ""
    try:
        decode(parameters(kind, **fields))
    except InvalidConfigError as error:
        text = str(error)
    assert "\n" not in text
