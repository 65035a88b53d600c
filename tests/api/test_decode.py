from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra_driver.api.config import (
    GpuConfig,
    MigDeviceConfig,
    MpsConfig,
    Sharing,
    TimeSlicingConfig,
    VfioDeviceConfig,
)
from dra_driver.api.decode import decode
from dra_driver.errors import InvalidConfigError
from tests.api.parameter_table import Json, parameters
from tests.fakes.tables import tabled

CONFIGS = {config.__name__: config for config in (GpuConfig, MigDeviceConfig, VfioDeviceConfig)}
PARTS = {"time_slicing": TimeSlicingConfig, "mps": MpsConfig}


@tabled("kind", "fields", "value")
def test_good_parameters_become_values_with_defaults(kind: str, fields: Json, value: Json) -> None:
    expected = dict(value)
    if sharing := value.get("sharing"):
        parts = {name: PARTS[name](**of_it) for name, of_it in sharing.items() if name in PARTS}
        expected["sharing"] = Sharing(sharing["strategy"], **parts)
    assert decode(parameters(kind, **fields)) == CONFIGS[kind](**expected)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (None, "the parameters must be an object with apiVersion and kind, not null"),
        (parameters(x={1}), "the parameters are not valid JSON: Object of type set is not JSON serializable"),
        (
            parameters(shring=1, sharing=[]),
            "GpuConfig is not valid: sharing: must be an object; shring: unknown field",
        ),
        (
            parameters("MigDeviceConfig", sharing={}),
            "MigDeviceConfig is not valid: sharing.strategy: is required",
        ),
    ],
)
def test_every_fault_is_told_in_one_line(given: Any, fault: str) -> None:
    """Which faults there are is in the table that all share who judge parameters (parameter_table.yaml)."""
    with pytest.raises(InvalidConfigError) as caught:
        decode(given)
    assert str(caught.value) == fault
    assert caught.value.faults


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
def test_any_input_is_decoded_or_refused_in_one_line(kind: str, fields: Json) -> None:
    text = ""
    try:
        decode(parameters(kind, **fields))
    except InvalidConfigError as error:
        text = str(error)
    assert "\n" not in text
