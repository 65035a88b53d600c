"""Claim records as JSON with a format number."""

from __future__ import annotations

from typing import Any

from dra_driver.base.fields import (
    FLAG,
    JSON,
    NUMBER,
    TEXT,
    TEXTS,
    Codec,
    Kind,
    Tagged,
    encode_file,
    left_out,
    list_of,
    needed,
    nullable,
    one_of,
    or_null,
    parse_file,
)
from dra_driver.model.claim import (
    AllocatedClaim,
    ClaimRef,
    DeviceConfig,
    DeviceResult,
    PodRef,
    Pods,
    pods_from,
)
from dra_driver.model.host import HostDevice, ImexChannels, in_order
from dra_driver.model.mig import Placement
from dra_driver.model.mps import MpsShared, SharingMode, TimeSliced
from dra_driver.model.record import (
    BindVfio,
    ClaimRecord,
    CreateMig,
    HeldDevice,
    LeaveMigMode,
    RunMps,
    SetTimeSlice,
    Step,
    WriteCdiSpec,
    WriteDeviceMetadata,
)
from dra_driver.model.schema import JsonObject
from dra_driver.mps_host.host_files import SPEC

FORMAT_VERSION = 1


def encode(record: ClaimRecord) -> bytes:
    """The record as one JSON document."""
    return encode_file(_RECORD.encode(record), FORMAT_VERSION)


def decode(content: bytes) -> ClaimRecord:
    """The record in a JSON document.

    Raises: NewerFormatError, and StateError that says what is wrong with it.
    """
    return parse_file(content, "claim record", _RECORD.decode, known=FORMAT_VERSION)


def step_kind(step: Step) -> str:
    """The kind of a step as records have it."""
    return str(STEP.encode(step)["kind"])


def _imex(name: str, value: Any) -> ImexChannels:
    return "all" if value == "all" else int(NUMBER.read(name, value))


def _host_devices(name: str, value: Any) -> tuple[HostDevice, ...]:
    return in_order(TEXTS.read(name, value))


def _pods(_name: str, value: Any) -> Pods:
    """None if the field is not readable: pods are information for people."""
    return pods_from(value) if isinstance(value, list) else None


def _encode_claim(claim: AllocatedClaim) -> JsonObject:
    return REF.encode(claim.ref) | _CLAIM.encode(claim)


def _decode_claim(_name: str, entry: JsonObject) -> AllocatedClaim:
    return _CLAIM.decode(entry, ref=REF.decode(entry))


_DEVICE_KIND = one_of("device kind", "gpu", "mig", "vfio")
PLACEMENT = Codec(Placement, start=needed(NUMBER), size=needed(NUMBER))
STEP: Tagged[Step] = Tagged(
    "step",
    write_cdi_spec=Codec(WriteCdiSpec),
    write_device_metadata=Codec(WriteDeviceMetadata, versions=needed(TEXTS)),
    set_time_slice=Codec(SetTimeSlice, gpu_uuid=needed(TEXT), interval=needed(NUMBER)),
    run_mps=Codec(RunMps, spec=needed(SPEC.kind)),
    create_mig=Codec(
        CreateMig,
        device=needed(TEXT),
        gpu_uuid=needed(TEXT),
        pci_bus_id=nullable(TEXT),
        profile_id=needed(NUMBER),
        profile_name=needed(TEXT, "profile"),
        placement=needed(PLACEMENT.kind),
    ),
    bind_vfio=Codec(
        BindVfio,
        device=needed(TEXT),
        gpu_uuid=needed(TEXT),
        pci_bus_id=needed(TEXT),
        vfio_driver=needed(TEXT),
    ),
    leave_mig_mode=Codec(LeaveMigMode, gpu_uuid=needed(TEXT), pci_bus_id=nullable(TEXT)),
)
_USAGE: Tagged[SharingMode] = Tagged(
    "sharing mode",
    time_sliced=Codec(TimeSliced, interval=left_out(NUMBER)),
    mps=Codec(
        MpsShared,
        spec=needed(SPEC.kind),
        memory_limit_mib=left_out(NUMBER),
        active_thread_percentage=left_out(NUMBER),
        memory_limits_mib=left_out(list_of(or_null(NUMBER)), ()),
    ),
)
_HELD = Codec(
    HeldDevice,
    device=needed(TEXT),
    kind=needed(_DEVICE_KIND),
    uuid=needed(TEXT),
    gpu_uuid=needed(TEXT),
    admin_access=left_out(FLAG, default=False),
    share_id=left_out(TEXT),
    usage=left_out(_USAGE.kind),
    placement=left_out(PLACEMENT.kind),
    imex=left_out(Kind(_imex), name="imexChannel"),
    host_devices=left_out(Kind(_host_devices, list), ()),
)
_RESULT = Codec(
    DeviceResult,
    request=needed(TEXT),
    driver=needed(TEXT),
    pool=needed(TEXT),
    device=needed(TEXT),
    admin_access=left_out(FLAG, default=False),
    share_id=left_out(TEXT),
    consumed_capacity=left_out(Kind(lambda _name, value: dict(value), dict), {}),
)
_CONFIG = Codec(
    DeviceConfig,
    source=needed(JSON),
    requests=needed(TEXTS),
    driver=nullable(TEXT),
    parameters=needed(JSON),
)
REF = Codec(ClaimRef, namespace=needed(TEXT), name=needed(TEXT), uid=needed(TEXT))
_POD = Codec(PodRef, name=needed(TEXT), uid=needed(TEXT))
_CLAIM = Codec(
    AllocatedClaim,
    results=needed(list_of(_RESULT.kind)),
    configs=needed(list_of(_CONFIG.kind)),
    pod_claim_name=left_out(TEXT),
    pods=left_out(Kind(_pods, list_of(_POD.kind).write)),
)
_RECORD = Codec(
    ClaimRecord,
    claim=needed(Kind(_decode_claim, _encode_claim)),
    phase=needed(one_of("phase", "preparing", "prepared")),
    boot_id=needed(TEXT),
    devices=needed(list_of(_HELD.kind)),
    steps=needed(list_of(STEP.kind)),
    prepared_at=left_out(TEXT),
)
