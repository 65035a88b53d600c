"""The opaque parameters as users write them: the only module that needs pydantic; `decode` imports it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)

from dra_driver.api.config import (
    GpuConfig,
    Interval,
    IommuBackend,
    MigDeviceConfig,
    MpsConfig,
    OpaqueConfig,
    Sharing,
    Strategy,
    TimeSlicingConfig,
    VfioDeviceConfig,
)
from dra_driver.errors import InvalidConfigError
from dra_driver.model.units import quantity_bytes

_MIB = 1024 * 1024
_DEVICE_KEY = re.compile(r"^(?:\d{1,4}|(?:GPU|MIG)-[0-9A-Za-z-]{4,})\Z")


def _memory_limit(value: Any) -> int:
    """A quantity in bytes; the daemon takes whole MiB."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("must be a quantity such as 10Gi")  # noqa: TRY004 - pydantic collects only ValueError
    try:
        number = quantity_bytes(str(value))
    except InvalidConfigError as error:
        raise ValueError(str(error)) from error
    if number < _MIB:
        raise ValueError(f"{value} is below the least limit, 1Mi")
    return number


MemoryLimit = Annotated[int, BeforeValidator(_memory_limit)]


class _Part(BaseModel):
    """An unknown field is an error; `null` means that the field was not given, as it does in Kubernetes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise ValueError("must be an object")  # noqa: TRY004 - pydantic collects only ValueError
        return {key: value for key, value in data.items() if value is not None}


class _TimeSlicing(_Part):
    interval: Interval | None = None

    def value(self) -> TimeSlicingConfig:
        return TimeSlicingConfig(self.interval)


class _Mps(_Part):
    percentage: StrictInt | None = Field(None, alias="defaultActiveThreadPercentage", ge=1, le=100)
    limit: MemoryLimit | None = Field(None, alias="defaultPinnedDeviceMemoryLimit")
    limits: dict[str, MemoryLimit] = Field(default_factory=dict, alias="defaultPerDevicePinnedMemoryLimit")
    multi_user: StrictBool | None = Field(None, alias="multiUser")

    @model_validator(mode="after")
    def _check_keys(self) -> _Mps:
        wrong = [key for key in self.limits if _DEVICE_KEY.match(key) is None]
        if wrong:
            raise ValueError(
                f"defaultPerDevicePinnedMemoryLimit: {', '.join(map(repr, wrong))} is not a device UUID or an index"
            )
        return self

    def value(self) -> MpsConfig:
        return MpsConfig(self.percentage, self.limit, self.limits, self.multi_user)


class _MigSharing(_Part):
    strategy: Strategy
    mps: _Mps | None = Field(None, alias="mpsConfig")

    def value(self) -> Sharing:
        if self.strategy == "MPS":
            return Sharing("MPS", mps=(self.mps or _Mps.model_validate({})).value())
        return Sharing("TimeSlicing", time_slicing=TimeSlicingConfig())


class _GpuSharing(_MigSharing):
    time_slicing: _TimeSlicing | None = Field(None, alias="timeSlicingConfig")

    def value(self) -> Sharing:
        if self.strategy == "TimeSlicing" and self.time_slicing is not None:
            return Sharing("TimeSlicing", time_slicing=self.time_slicing.value())
        return super().value()


class _Iommu(_Part):
    backend: IommuBackend = Field("LegacyOnly", alias="backendPolicy")
    enable_api_device: StrictBool = Field(False, alias="enableAPIDevice")


class _Config(_Part):
    api_version: Literal["resource.nvidia.com/v1beta1"] = Field(alias="apiVersion")
    kind: str


class _Gpu(_Config):
    sharing: _GpuSharing | None = None

    def value(self) -> OpaqueConfig:
        return GpuConfig(self.sharing.value() if self.sharing is not None else None)


class _MigDevice(_Config):
    sharing: _MigSharing | None = None

    def value(self) -> OpaqueConfig:
        return MigDeviceConfig(self.sharing.value() if self.sharing is not None else None)


class _Vfio(_Config):
    iommu: _Iommu = Field(default_factory=lambda: _Iommu.model_validate({}))

    def value(self) -> OpaqueConfig:
        return VfioDeviceConfig(self.iommu.backend, self.iommu.enable_api_device)


_MODELS: Mapping[str, type[_Gpu] | type[_MigDevice] | type[_Vfio]] = {
    "GpuConfig": _Gpu,
    "MigDeviceConfig": _MigDevice,
    "VfioDeviceConfig": _Vfio,
}


def validate(kind: str, parameters: Mapping[str, Any]) -> OpaqueConfig:
    """The value of parameters of a known kind. Raises: pydantic.ValidationError with every fault."""
    return _MODELS[kind].model_validate(parameters).value()
