"""The `--config` file: every setting of `run` that a flag has, in camelCase, checked strictly."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from dra_driver.model.companions import LAST_IMEX_CHANNEL, HostDevice
from dra_driver.model.health import TAINTED_KEYS
from dra_driver.model.ids import pci_bus_id
from dra_driver.model.sharing import (
    MAX_MPS_SHARES,
    MAX_SHARES,
    NO_SHARING,
    GpuSelector,
    SelectedDevices,
    SharingEntry,
    SharingPolicy,
    SharingRule,
    is_device_uuid,
)

_AbsolutePath = Annotated[str, Field(pattern=r"^/")]
_STRICT = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel, populate_by_name=False)


def _fault(text: str) -> PydanticCustomError:
    return PydanticCustomError("sharing", "{text}", {"text": text})


def _bus_id(text: str) -> str:
    try:
        return pci_bus_id(text)
    except ValueError as error:
        raise _fault(str(error)) from error


def _uuid(text: str) -> str:
    if not is_device_uuid(text):
        raise _fault(
            f"{text!r} is not a UUID of a GPU or MIG device, such as GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"
        )
    return text


def _off(value: Any) -> Any:
    """A bare `off` is the boolean false in YAML."""
    return "off" if value is False else value


class SelectorSection(BaseModel):
    """Devices of a sharing entry. A key that is left out selects all."""

    model_config = _STRICT

    product_name: Annotated[str, Field(min_length=1, max_length=96)] | None = None
    uuids: Annotated[list[Annotated[str, AfterValidator(_uuid)]], Field(min_length=1)] | None = None
    pci_bus_ids: Annotated[list[Annotated[str, AfterValidator(_bus_id)]], Field(min_length=1)] | None = Field(
        default=None, alias="pciBusIDs"
    )
    devices: SelectedDevices = "all"

    @field_validator("devices")
    @classmethod
    def _can_match(cls, devices: SelectedDevices, info: ValidationInfo) -> SelectedDevices:
        uuids: list[str] = info.data.get("uuids") or []
        if devices == "gpu" and uuids and all(uuid.startswith("MIG-") for uuid in uuids):
            raise _fault("the UUIDs are those of MIG devices, so nothing can match")
        return devices

    def value(self) -> GpuSelector:
        return GpuSelector(
            self.product_name,
            frozenset(self.uuids or ()),
            frozenset(self.pci_bus_ids or ()),
            self.devices,
        )


class SharingSection(BaseModel):
    """One entry of the section `sharing`. Faults carry the path of the key that has to change."""

    model_config = _STRICT

    selector: SelectorSection | None = None
    mode: Annotated[Literal["off", "shares", "memory", "unlimited"], BeforeValidator(_off)]
    enforce: Literal["mps", "none"] | None = None
    shares: Annotated[int, Field(ge=1, le=MAX_SHARES)] | None = Field(default=None, validate_default=True)
    multiprocessors: bool | None = None
    multi_user: bool | None = None

    @field_validator("enforce", "multiprocessors")
    @classmethod
    def _needs_a_mode(cls, value: object, info: ValidationInfo) -> object:
        if value is not None and info.data.get("mode") == "off":
            raise _fault("does not fit mode off")
        return value

    @field_validator("shares")
    @classmethod
    def _fits_the_mode(cls, shares: int | None, info: ValidationInfo) -> int | None:
        mode = info.data.get("mode")
        if mode == "shares" and shares is None:
            raise _fault("mode shares needs their number")
        if mode not in ("shares", None) and shares is not None:
            raise _fault(f"does not fit mode {mode}; remove it or use mode shares")
        if info.data.get("enforce") == "mps" and (shares or 0) > MAX_MPS_SHARES:
            raise _fault(
                f"MPS serves at most {MAX_MPS_SHARES} clients a device; use fewer shares or enforce none"
            )
        return shares

    @field_validator("multi_user")
    @classmethod
    def _needs_mps(cls, value: object, info: ValidationInfo) -> object:
        if value is not None and info.data.get("enforce") != "mps":
            raise _fault("needs enforce mps")
        return value

    def value(self) -> SharingEntry:
        selector = GpuSelector() if self.selector is None else self.selector.value()
        if self.mode == "off":
            return SharingEntry(selector, None)
        rule = SharingRule(
            self.mode,
            self.shares,
            self.enforce or "none",
            bool(self.multiprocessors),
            self.multi_user is not False,
        )
        return SharingEntry(selector, rule)


class GpuSection(BaseModel):
    """GPUs by what they are. A key that is left out selects all."""

    model_config = _STRICT

    product_name: Annotated[str, Field(min_length=1, max_length=96)] | None = None
    uuids: Annotated[list[Annotated[str, AfterValidator(_uuid)]], Field(min_length=1)] | None = None
    pci_bus_ids: Annotated[list[Annotated[str, AfterValidator(_bus_id)]], Field(min_length=1)] | None = Field(
        default=None, alias="pciBusIDs"
    )

    @field_validator("uuids")
    @classmethod
    def _are_gpus(cls, uuids: list[str] | None) -> list[str] | None:
        wrong = [uuid for uuid in uuids or () if not uuid.startswith("GPU-")]
        if wrong:
            raise _fault(f"{wrong[0]} is a MIG device's UUID; name the GPU")
        return uuids

    def value(self) -> GpuSelector:
        return GpuSelector(
            self.product_name, frozenset(self.uuids or ()), frozenset(self.pci_bus_ids or ()), "all"
        )


class DynamicMigSection(BaseModel):
    """The section `dynamicMig`: MIG devices that are made on demand."""

    model_config = _STRICT

    enabled: bool
    gpus: GpuSection | None = None
    adopt: Literal["leave", "destroy"] | None = None

    def values(self) -> dict[str, Any]:
        """By the names of Settings."""
        given = {
            "dynamic_mig": self.enabled,
            "dynamic_mig_gpus": None if self.gpus is None else self.gpus.value(),
            "adopt_mig": self.adopt,
        }
        return {name: value for name, value in given.items() if value is not None}


_Xids = list[Annotated[int, Field(ge=1, le=9999)]]


class HealthSection(BaseModel):
    """The section `health`: which Xids count, and the effects of taints."""

    model_config = _STRICT

    ignored_xids: _Xids | None = None
    fatal_xids: _Xids | None = None
    taints: dict[str, Literal["None", "NoSchedule", "NoExecute"]] | None = None
    unhealthy_devices: Literal["auto", "taint", "withdraw"] | None = None

    @field_validator("taints")
    @classmethod
    def _are_known(cls, taints: dict[str, str] | None) -> dict[str, str] | None:
        unknown = sorted(set(taints or ()) - set(TAINTED_KEYS))
        if unknown:
            raise _fault(f"there is no taint {unknown[0]!r}; there are: {', '.join(TAINTED_KEYS)}")
        return taints

    def values(self) -> dict[str, Any]:
        """By the names of Settings."""
        mode = {} if self.unhealthy_devices is None else {"unhealthy_devices": self.unhealthy_devices}
        return {
            "ignored_xids": frozenset(self.ignored_xids or ()),
            "fatal_xids": frozenset(self.fatal_xids or ()),
            "taint_effects": dict(self.taints or {}),
            **mode,
        }


class ImexSection(BaseModel):
    """The section `imex`: the channels of nvidia-imex that claims on GPUs in a fabric get."""

    model_config = _STRICT

    channel: int | Literal["all", "off"]

    @field_validator("channel", mode="before")
    @classmethod
    def _is_one(cls, channel: Any) -> Any:
        is_number = isinstance(channel, int) and not isinstance(channel, bool)
        if channel in ("all", "off") or (is_number and 0 <= channel <= LAST_IMEX_CHANNEL):
            return channel
        if channel is False:
            return "off"
        raise _fault(f"expected off, all or a channel's number from 0 to {LAST_IMEX_CHANNEL}")


class ConfigFile(BaseModel):
    """The document. Unknown keys are errors, because otherwise a misspelt key would silently mean the default."""

    model_config = _STRICT

    node_name: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    driver_name: (
        Annotated[
            str,
            Field(
                max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
            ),
        ]
        | None
    ) = None
    cdi_root: _AbsolutePath | None = Field(default=None, alias="cdiRoot")
    nvidia_driver_root: _AbsolutePath | None = None
    container_driver_root: _AbsolutePath | None = None
    host_root: _AbsolutePath | None = None
    nvidia_cdi_hook_path: _AbsolutePath | None = Field(default=None, alias="nvidiaCDIHookPath")
    kubelet_registrar_directory_path: _AbsolutePath | None = None
    kubelet_plugins_directory_path: _AbsolutePath | None = None
    pod_uid: str | None = Field(default=None, alias="podUID")
    kubeconfig: str | None = None
    kube_api_qps: Annotated[float, Field(ge=0)] | None = Field(default=None, alias="kubeAPIQPS")
    kube_api_burst: Annotated[int, Field(ge=1)] | None = Field(default=None, alias="kubeAPIBurst")
    http_endpoint: str | None = None
    metrics_path: Annotated[str, Field(pattern=r"^/")] | None = None
    healthcheck_port: Annotated[int, Field(ge=-1, le=65535)] | None = None
    mps_host: Literal["external", "child"] | None = None
    simulate: str | None = None
    simulator_dir: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    log_format: Literal["json", "console"] | None = None
    sharing: list[SharingSection] | None = None
    dynamic_mig: DynamicMigSection | None = None
    device_metadata: (
        Annotated[Literal["off", "v1alpha1", "v1beta1", "both"], BeforeValidator(_off)] | None
    ) = None
    health: HealthSection | None = None
    imex: ImexSection | None = None
    host_devices: list[HostDevice] | None = None
    claim_host_devices: list[HostDevice] | None = None

    @field_validator("sharing")
    @classmethod
    def _is_reached(cls, entries: list[SharingSection] | None) -> list[SharingSection] | None:
        selectors = [entry.value().selector for entry in entries or ()]
        for number, selector in enumerate(selectors):
            for earlier in range(number):
                if selectors[earlier].covers(selector):
                    raise _fault(
                        f"entry {number} can never apply: entry {earlier} takes all its devices; order them"
                    )
        return entries

    def sharing_policy(self) -> SharingPolicy:
        """The section `sharing` as a value."""
        return SharingPolicy(tuple(entry.value() for entry in self.sharing)) if self.sharing else NO_SHARING
