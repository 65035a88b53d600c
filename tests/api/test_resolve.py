from typing import Any

import pytest

from dra_driver.api.config import (
    GROUP_VERSION,
    GpuConfig,
    MaintenanceConfig,
    MigDeviceConfig,
    MpsConfig,
    Sharing,
    TimeSlicingConfig,
    VfioDeviceConfig,
)
from dra_driver.api.resolve import ResolvedConfig, config_for_result, decode
from dra_driver.errors import InvalidConfigError
from dra_driver.model.claim import DeviceConfig, DeviceResult
from tests.api.parameter_table import Json, parameters
from tests.fakes.tables import tabled

CONFIGS = {
    config.__name__: config for config in (GpuConfig, MigDeviceConfig, VfioDeviceConfig, MaintenanceConfig)
}
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
def test_every_fault_is_reported_in_one_line(given: Any, fault: str) -> None:
    """Which faults there are is in the table that all share who judge parameters (parameter_table.yaml)."""
    with pytest.raises(InvalidConfigError) as caught:
        decode(given)
    assert str(caught.value) == fault
    assert caught.value.faults


DRIVER = "gpu.nvidia.com"


def result(request: str = "main") -> DeviceResult:
    return DeviceResult(request, DRIVER, "node-a", "gpu-4cf8db2d")


def entry(
    strategy: str | None,
    *requests: str,
    source: Any = "FromClaim",
    driver: str | None = DRIVER,
    kind: str = "GpuConfig",
) -> DeviceConfig:
    sharing = {"sharing": {"strategy": strategy}} if strategy else {}
    return DeviceConfig(
        source, tuple(requests), driver, {"apiVersion": GROUP_VERSION, "kind": kind, **sharing}
    )


def strategy(*configs: DeviceConfig, request: str = "main") -> str | None:
    config = config_for_result(result(request), configs, DRIVER, "gpu").config
    assert isinstance(config, GpuConfig)
    return config.sharing.strategy if config.sharing else None


def test_the_default_applies_when_nothing_is_given() -> None:
    assert config_for_result(result(), (), DRIVER, "gpu") == ResolvedConfig(GpuConfig())
    assert config_for_result(result(), (), DRIVER, "mig") == ResolvedConfig(MigDeviceConfig())
    assert config_for_result(result(), (), DRIVER, "vfio") == ResolvedConfig(VfioDeviceConfig())


@pytest.mark.parametrize(
    ("configs", "wins"),
    [
        ([entry("MPS", source="FromClass")], "MPS"),
        ([entry("MPS"), entry("TimeSlicing", source="FromClass")], "MPS"),
        ([entry("MPS"), entry("TimeSlicing")], "TimeSlicing"),
        ([entry("MPS", source="FromClass"), entry("TimeSlicing", source="FromClass")], "TimeSlicing"),
        ([entry("MPS", "main"), entry(None)], None),
        ([entry("MPS", "other")], None),
        ([entry("MPS", "other", "main")], "MPS"),
        ([entry("MPS", driver="nic.example.com")], None),
        ([entry("MPS"), entry("TimeSlicing", kind="MigDeviceConfig")], "MPS"),
    ],
)
def test_the_last_entry_that_applies_wins(configs: list[DeviceConfig], wins: str | None) -> None:
    assert strategy(*configs) == wins


@pytest.mark.parametrize(
    ("requests", "applies"),
    [(("main",), True), (("main/big",), True), (("main/small",), False), (("big",), False)],
)
def test_a_subrequest_is_named_in_full_or_by_its_request(requests: tuple[str, ...], applies: bool) -> None:
    assert strategy(entry("MPS", *requests), request="main/big") == ("MPS" if applies else None)


def test_the_entry_that_decided_is_reported() -> None:
    configs = [entry(None, source="FromClass"), entry("MPS", "main", "other")]
    resolved = config_for_result(result(), configs, DRIVER, "gpu")
    assert resolved.entry == "allocation config 1 from the claim, requests main, other"
    resolved = config_for_result(result(), configs[:1], DRIVER, "gpu")
    assert resolved == ResolvedConfig(GpuConfig(), "allocation config 0 from the device class")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            entry("MPS", "main", kind="MigDeviceConfig"),
            r"config 0 from the claim, requests main: MigDeviceConfig does not apply to device gpu-4cf8db2d of "
            r"request main, because the device is a whole GPU",
        ),
        (entry(None, driver=None), "config 0 from the claim: gpu-dra-driver supports only opaque parameters"),
        (entry("Magic"), r"config 0 from the claim: GpuConfig is not valid: sharing\.strategy"),
        (entry(None, kind="Other"), "config 0 from the claim: kind: 'Other' is not supported"),
    ],
)
def test_an_entry_that_cannot_be_used_is_refused(config: DeviceConfig, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message) as caught:
        config_for_result(result(), [config], DRIVER, "gpu")
    assert caught.value.faults


def test_entries_of_other_requests_and_drivers_are_not_even_read() -> None:
    broken = {"requests": ("other",), "parameters": "x"}
    configs = [
        DeviceConfig("FromClaim", driver=DRIVER, **broken),
        DeviceConfig("FromClaim", driver=None, **broken),
        DeviceConfig("FromClaim", (), "nic.example.com", "x"),
    ]
    assert config_for_result(result(), configs, DRIVER, "gpu").entry is None
