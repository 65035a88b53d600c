from typing import Any

import pytest

from dra_driver.api.config import GROUP_VERSION, GpuConfig, MigDeviceConfig, VfioDeviceConfig
from dra_driver.api.resolve import ResolvedConfig, config_for_result
from dra_driver.errors import InvalidConfigError
from dra_driver.model.claim import DeviceConfig, DeviceResult

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


def test_the_entry_that_decided_is_told() -> None:
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
            r"config 0 from the claim, requests main: MigDeviceConfig does not fit device gpu-4cf8db2d of "
            r"request main, which is a whole GPU",
        ),
        (
            entry(None, driver=None),
            "config 0 from the claim: it has no opaque parameters; this driver knows no",
        ),
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
