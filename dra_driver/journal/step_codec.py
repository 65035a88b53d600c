"""Steps, sharing modes and held devices as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, assert_never

from dra_driver.errors import StateError
from dra_driver.model.companions import ImexChannels, in_order
from dra_driver.model.mig import Placement
from dra_driver.model.mps import MpsDaemonSpec, MpsMember
from dra_driver.model.record import DeviceKind, HeldDevice
from dra_driver.model.sharing_mode import MpsShared, SharingMode, TimeSliced
from dra_driver.model.steps import (
    CreateMig,
    LeaveMigMode,
    RunMps,
    SetTimeSlice,
    Step,
    WriteCdiSpec,
    WriteDeviceMetadata,
)

JsonObject = dict[str, Any]

_DEVICE_KINDS: Mapping[str, DeviceKind] = {"gpu": "gpu", "mig": "mig"}
_SPEC_NAMES = {
    "device": "device",
    "uuid": "uuid",
    "kind": "kind",
    "gpu_uuid": "gpuUUID",
    "multi_user": "multiUser",
    "default_active_thread_percentage": "defaultActiveThreadPercentage",
    "default_memory_limit_mib": "defaultMemoryLimitMiB",
}


def text(entry: JsonObject, name: str) -> str:
    """The text in a field. Raises: KeyError if the field is missing, StateError if it is not a text."""
    value = entry[name]
    if not isinstance(value, str):
        raise StateError(f"field {name!r} is {value!r}, which is not text")
    return value


def optional_text(entry: JsonObject, name: str) -> str | None:
    """The text in a field that may be absent or null."""
    return None if entry.get(name) is None else text(entry, name)


def number(entry: JsonObject, name: str) -> int:
    """The whole number in a field. Raises: KeyError if the field is missing, StateError if it is not a whole number."""
    value = entry[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise StateError(f"field {name!r} is {value!r}, which is not a whole number")
    return value


def _texts(entry: JsonObject, name: str) -> tuple[str, ...]:
    values = entry[name]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise StateError(f"field {name!r} is {values!r}, which is not a list of texts")
    return tuple(values)


def optional_number(entry: JsonObject, name: str) -> int | None:
    """The whole number in a field that may be absent or null."""
    return None if entry.get(name) is None else number(entry, name)


def _optional_numbers(entry: JsonObject, name: str) -> tuple[int | None, ...]:
    values = entry.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, int | None) for value in values):
        raise StateError(f"field {name!r} is {values!r}, which is not a list of whole numbers")
    return tuple(values)


def encode_placement(placement: Placement) -> JsonObject:
    """A placement as a JSON object."""
    return {"start": placement.start, "size": placement.size}


def decode_placement(entry: JsonObject) -> Placement:
    """The placement in a JSON object. Raises: KeyError, TypeError, StateError."""
    return Placement(number(entry, "start"), number(entry, "size"))


def encode_step(step: Step) -> JsonObject:
    """A step as a JSON object with its kind."""
    match step:
        case WriteCdiSpec():
            return {"kind": "write_cdi_spec"}
        case WriteDeviceMetadata(versions):
            return {"kind": "write_device_metadata", "versions": list(versions)}
        case SetTimeSlice(gpu_uuid, interval):
            return {"kind": "set_time_slice", "gpuUUID": gpu_uuid, "interval": interval}
        case RunMps(spec):
            return {"kind": "run_mps", "spec": _encode_spec(spec)}
        case CreateMig():
            return {
                "kind": "create_mig",
                "device": step.device,
                "gpuUUID": step.gpu_uuid,
                "pciBusID": step.pci_bus_id,
                "profileID": step.profile_id,
                "profile": step.profile_name,
                "placement": encode_placement(step.placement),
            }
        case LeaveMigMode(gpu_uuid, bus_id):
            return {"kind": "leave_mig_mode", "gpuUUID": gpu_uuid, "pciBusID": bus_id}
        case _:
            assert_never(step)


def decode_step(entry: JsonObject) -> Step:
    """The step in a JSON object; Raises: KeyError, StateError."""
    match text(entry, "kind"):
        case "write_cdi_spec":
            return WriteCdiSpec()
        case "write_device_metadata":
            return WriteDeviceMetadata(_texts(entry, "versions"))
        case "set_time_slice":
            return SetTimeSlice(text(entry, "gpuUUID"), number(entry, "interval"))
        case "run_mps":
            return RunMps(_decode_spec(entry["spec"]))
        case "create_mig":
            return CreateMig(
                device=text(entry, "device"),
                gpu_uuid=text(entry, "gpuUUID"),
                pci_bus_id=optional_text(entry, "pciBusID"),
                profile_id=number(entry, "profileID"),
                profile_name=text(entry, "profile"),
                placement=decode_placement(entry["placement"]),
            )
        case "leave_mig_mode":
            return LeaveMigMode(text(entry, "gpuUUID"), optional_text(entry, "pciBusID"))
        case kind:
            raise StateError(f"step {kind!r} is unknown")


def encode_held(held: HeldDevice) -> JsonObject:
    """A held device as a JSON object, without the fields that are not set."""
    entry: JsonObject = {
        "device": held.device,
        "kind": held.kind,
        "uuid": held.uuid,
        "gpuUUID": held.gpu_uuid,
    }
    if held.admin_access:
        entry["adminAccess"] = True
    if held.share_id is not None:
        entry["shareID"] = held.share_id
    if isinstance(held.usage, TimeSliced | MpsShared):
        entry["usage"] = _encode_usage(held.usage)
    if held.placement is not None:
        entry["placement"] = encode_placement(held.placement)
    if held.imex is not None:
        entry["imexChannel"] = held.imex
    if held.host_devices:
        entry["hostDevices"] = list(held.host_devices)
    return entry


def decode_held(entry: JsonObject) -> HeldDevice:
    """The held device in a JSON object; Raises: KeyError, StateError."""
    return HeldDevice(
        device=text(entry, "device"),
        kind=_device_kind(entry),
        uuid=text(entry, "uuid"),
        gpu_uuid=text(entry, "gpuUUID"),
        admin_access=bool(entry.get("adminAccess", False)),
        share_id=optional_text(entry, "shareID"),
        usage=_decode_usage(entry.get("usage")),
        placement=decode_placement(entry["placement"]) if entry.get("placement") else None,
        imex=_decode_imex(entry),
        host_devices=in_order(_texts(entry, "hostDevices")) if entry.get("hostDevices") else (),
    )


def _device_kind(entry: JsonObject) -> DeviceKind:
    kind = text(entry, "kind")
    if kind not in _DEVICE_KINDS:
        raise StateError(f"device kind {kind!r} is unknown")
    return _DEVICE_KINDS[kind]


def _decode_imex(entry: JsonObject) -> ImexChannels | None:
    return "all" if entry.get("imexChannel") == "all" else optional_number(entry, "imexChannel")


def _encode_usage(usage: TimeSliced | MpsShared) -> JsonObject:
    match usage:
        case TimeSliced(interval):
            return {"kind": "time_sliced"} | ({} if interval is None else {"interval": interval})
        case MpsShared(spec, memory, percentage, limits):
            entry: JsonObject = {"kind": "mps", "spec": _encode_spec(spec)}
            if memory is not None:
                entry["memoryLimitMiB"] = memory
            if percentage is not None:
                entry["activeThreadPercentage"] = percentage
            if limits:
                entry["memoryLimitsMiB"] = list(limits)
            return entry


def _decode_usage(entry: JsonObject | None) -> SharingMode:
    if entry is None:
        return None
    match text(entry, "kind"):
        case "time_sliced":
            return TimeSliced(optional_number(entry, "interval"))
        case "mps":
            return MpsShared(
                _decode_spec(entry["spec"]),
                optional_number(entry, "memoryLimitMiB"),
                optional_number(entry, "activeThreadPercentage"),
                _optional_numbers(entry, "memoryLimitsMiB"),
            )
        case kind:
            raise StateError(f"sharing mode {kind!r} is unknown")


def _encode_spec(spec: MpsDaemonSpec) -> JsonObject:
    values = {name: getattr(spec, name) for name in (entry.name for entry in fields(spec))}
    others = [
        {"device": other.device, "gpuUUID": other.gpu_uuid}
        | (
            {}
            if other.default_memory_limit_mib is None
            else {"defaultMemoryLimitMiB": other.default_memory_limit_mib}
        )
        for other in values.pop("others")
    ]
    known = {_SPEC_NAMES[name]: value for name, value in values.items() if value is not None}
    return known | ({"others": others} if others else {})


def _decode_spec(entry: JsonObject) -> MpsDaemonSpec:
    return MpsDaemonSpec(
        device=text(entry, "device"),
        uuid=text(entry, "uuid"),
        kind=_device_kind(entry),
        gpu_uuid=text(entry, "gpuUUID"),
        multi_user=bool(entry["multiUser"]),
        default_active_thread_percentage=optional_number(entry, "defaultActiveThreadPercentage"),
        default_memory_limit_mib=optional_number(entry, "defaultMemoryLimitMiB"),
        others=tuple(
            MpsMember(
                text(other, "device"), text(other, "gpuUUID"), optional_number(other, "defaultMemoryLimitMiB")
            )
            for other in entry.get("others", ())
        ),
    )
