"""Names and content of the metadata files that describe a container's devices, and their CDI specs.

A file belongs to one top-level request. It has a JSON document for each version of the format, newest first; a reader
uses the first version that it knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from dra_driver.cdi.rules.spec import checked_claim_uid, minimum_version
from dra_driver.errors import ClaimRefusedError
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceResult
from dra_driver.model.dataclass import dataclass
from dra_driver.model.ids import is_dns_label, is_subdomain
from dra_driver.model.inventory import DynamicMigDevice, Inventory, OfferedDevice, StaticMigDevice
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.mps import MpsShared, SharingMode
from dra_driver.model.schema import JsonObject
from dra_driver.sharing.rules.shared_device import SHAREABLE
from dra_driver.slices.rules.attributes import attributes_of

CONTAINER_DIRECTORY = "/var/run/kubernetes.io/dra-device-attributes"
_API_GROUP = "metadata.resource.k8s.io"
_CLASS = "metadata"
_MOUNT_OPTIONS = ("ro", "bind")
_LONGEST_FILE_NAME = 255


@dataclass(frozen=True, slots=True)
class DescribedDevice:
    result: DeviceResult
    attributes: JsonObject


def check_names(claim: AllocatedClaim) -> None:
    """Check the names in paths. Raises: ClaimRefusedError."""
    check_ref(claim.ref)
    for result in claim.results:
        _check("request", result.base_request, is_dns_label)
    if claim.pod_claim_name is not None:
        _check("annotation with the pod's claim name", claim.pod_claim_name, is_dns_label)


def check_ref(ref: ClaimRef) -> None:
    checked_claim_uid(ref.uid)
    _check("namespace", ref.namespace, is_dns_label)
    _check("name", ref.name, is_subdomain)


def _check(what: str, name: str, is_valid: Callable[[str], bool]) -> None:
    if not is_valid(name):
        raise ClaimRefusedError(
            f"the claim's {what} {name!r} cannot be part of a path, so its containers cannot get the metadata "
            "of their devices; correct the name, or set --device-metadata off"
        )


def requests_of(claim: AllocatedClaim) -> tuple[str, ...]:
    return tuple(dict.fromkeys(result.base_request for result in claim.results))


def directory_name(ref: ClaimRef) -> str:
    """Replace a claim name that is too long by the UID."""
    name = f"{ref.namespace}_{ref.name}"
    return name if len(name) <= _LONGEST_FILE_NAME else f"{ref.namespace}_{ref.uid}"


def container_path(claim: AllocatedClaim, request: str, driver: str) -> str:
    kind, name = ("resourceclaims", claim.ref.name)
    if claim.pod_claim_name is not None:
        kind, name = ("resourceclaimtemplates", claim.pod_claim_name)
    return f"{CONTAINER_DIRECTORY}/{kind}/{name}/{request}/{driver}-metadata.json"


def cdi_id(driver: str, claim_uid: str, request: str) -> str:
    return f"{driver}/{_CLASS}={_cdi_device(claim_uid, request)}"


def cdi_file_prefix(driver: str) -> str:
    return f"{driver}_{_CLASS}_"


def cdi_file(driver: str, claim_uid: str, request: str) -> str:
    return f"{cdi_file_prefix(driver)}{_cdi_device(claim_uid, request)}.json"


def cdi_spec(driver: str, claim: AllocatedClaim, request: str, host_path: str) -> JsonObject:
    mount = {
        "hostPath": host_path,
        "containerPath": container_path(claim, request, driver),
        "options": list(_MOUNT_OPTIONS),
    }
    device = {"name": _cdi_device(claim.ref.uid, request), "containerEdits": {"mounts": [mount]}}
    spec = {"cdiVersion": "", "kind": f"{driver}/{_CLASS}", "devices": [device]}
    return {**spec, "cdiVersion": minimum_version(spec)}


def _cdi_device(claim_uid: str, request: str) -> str:
    return f"{claim_uid}_{request}"


def described(
    result: DeviceResult,
    offered: OfferedDevice,
    usage: SharingMode,
    inventory: Inventory,
    created: OwnedInstance | None,
) -> DescribedDevice:
    """Return a device's attributes in its slice, and those that are known only after its Prepare.

    `created` is the instance of a MIG device on demand.
    """
    attributes = {**attributes_of(offered, inventory), **_current_ids(offered, created)}
    if result.share_id is not None:
        attributes["shareID"] = {"string": result.share_id}
        attributes[SHAREABLE] = {"bool": True}
    if isinstance(usage, MpsShared):
        attributes |= _ints(
            mpsPinnedMemoryLimitMiB=usage.memory_limit_mib,
            mpsActiveThreadPercentage=usage.active_thread_percentage,
        )
    return DescribedDevice(result, {name: attributes[name] for name in sorted(attributes)})


def _current_ids(offered: OfferedDevice, created: OwnedInstance | None) -> JsonObject:
    match offered:
        case StaticMigDevice(mig=mig):
            return _ints(gpuInstanceID=mig.gpu_instance_id, computeInstanceID=mig.compute_instance_id)
        case DynamicMigDevice() if created is not None:
            uuid = {} if not created.uuid else {"uuid": {"string": created.uuid}}
            ids = _ints(gpuInstanceID=created.gpu_instance_id, computeInstanceID=created.compute_instance_id)
            return uuid | ids
        case _:
            return {}


def _ints(**values: int | None) -> JsonObject:
    return {name: {"int": value} for name, value in values.items() if value is not None}


def encode(
    claim: AllocatedClaim,
    devices: Sequence[DescribedDevice],
    versions: Iterable[str],
    generation: int,
) -> bytes:
    """Return the content of a file. Equal input yields equal bytes."""
    by_request: dict[str, list[JsonObject]] = {}
    for device in devices:
        result = device.result
        entry: JsonObject = {"driver": result.driver, "pool": result.pool, "name": result.device}
        if device.attributes:
            entry["attributes"] = device.attributes
        by_request.setdefault(result.request, []).append(entry)
    ref = claim.ref
    metadata = {"name": ref.name, "namespace": ref.namespace, "uid": ref.uid, "generation": generation}
    pod_claim = {} if claim.pod_claim_name is None else {"podClaimName": claim.pod_claim_name}
    requests = [{"name": name, "devices": entries} for name, entries in by_request.items()]
    return b"".join(
        json.dumps(
            {
                "kind": "DeviceMetadata",
                "apiVersion": f"{_API_GROUP}/{version}",
                "metadata": metadata,
                **pod_claim,
                "requests": requests,
            },
            indent=2,
        ).encode("ascii")
        + b"\n"
        for version in versions
    )


def owner_and_generation(content: bytes) -> tuple[str, int] | None:
    """Return the claim UID and the generation; None if the file is not a metadata file of the plugin."""
    try:
        document, _ = json.JSONDecoder().raw_decode(content.decode())
        metadata = document["metadata"]
        uid, generation = metadata["uid"], metadata["generation"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(uid, str) or not isinstance(generation, int) or isinstance(generation, bool):
        return None
    return uid, generation
