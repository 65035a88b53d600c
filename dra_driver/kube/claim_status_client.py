"""Writes this driver's entries of `status.devices` in ResourceClaims, and reads the pods that use a claim."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import structlog

from dra_driver.base.fields import NUMBER, Codec, Kind, omittable
from dra_driver.errors import ApiRejectedError
from dra_driver.kube.claims import ClaimClient, reserved_pods
from dra_driver.kube.client import ApiClient, is_not_found
from dra_driver.kube.events import REPORT_S
from dra_driver.model.claim import ClaimRef, DeviceFacts, DeviceStatus, MpsFacts, allocation_results
from dra_driver.model.dataclass import KW_ONLY, dataclass
from dra_driver.model.problems import EventObject
from dra_driver.model.schema import JsonObject

_log = structlog.get_logger(__name__)


APPLY_PATCH: Final = "application/apply-patch+yaml"  # JSON is valid YAML
CONDITION: Final = "Ready"
_MANAGER_LENGTH = 128
_DATA_BYTES = 10 * 1024
_MESSAGE_CHARACTERS = 1024  # the API allows 32 KiB, but no one reads that much
_TRIES = 4
_CONFLICT, _INVALID = 409, 422
_RECHECK_AFTER_S = 3600.0
_DATA_VERSION = "v1alpha1"
_Entries = dict[tuple[Any, ...], JsonObject]
"""Entries of `status.devices` by driver, pool, device and share ID."""


@dataclass(eq=False)
class ClaimStatusClient:
    """Reads claims and applies the entries of one driver on one node. Not thread-safe.

    The field manager of server-side apply is for this plugin and node, so drivers, and nodes that had the claim before,
    do not change each other's entries. Raises: ApiUnavailableError, ApiRejectedError.
    """

    api: ApiClient
    driver: str
    node: str
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    def __post_init__(self) -> None:
        self._claims = ClaimClient(self.api)
        self._manager = _field_manager(self.driver, self.node)
        self._dropped_at: float | None = None

    def pods_of(self, ref: ClaimRef) -> tuple[EventObject, ...]:
        """Return no pods if the claim is gone or was replaced."""
        obj = self._read(ref)
        pods = None if obj is None else reserved_pods(obj)
        return tuple(EventObject("Pod", pod.name, pod.uid, ref.namespace) for pod in pods or ())

    def write(self, ref: ClaimRef, devices: Sequence[DeviceStatus], *, is_first: bool = False) -> bool:
        """Make `devices` this plugin's only entries in the claim's status. Return whether that changed the status.

        Writes nothing for a claim that is gone, replaced or not allocated, or for devices outside its allocation.
        `is_first`: the claim was just read and had no status.
        """
        if self._dropped_at is not None and self.clock() - self._dropped_at < _RECHECK_AFTER_S:
            return False
        if is_first and devices:
            try:
                return self._store(ref, self._entries(devices, {}))
            except ApiRejectedError as error:
                if error.status not in (_CONFLICT, _INVALID):
                    raise
        refused_at = ""
        for left in reversed(range(_TRIES)):
            obj = self._read(ref)
            if obj is None or not (obj.get("status") or {}).get("allocation"):
                return False
            wanted, present = self._wanted(obj, devices), self._present(obj)
            if _same_entries(wanted, present):
                return False
            try:
                return self._store(ref, wanted)
            except ApiRejectedError as error:
                # The claim may have changed since it was read: deallocated, replaced, or allocated on another
                # node.
                version = str(obj["metadata"]["resourceVersion"])
                unchanged = error.status == _INVALID and version == refused_at
                if error.status not in (_CONFLICT, _INVALID) or unchanged or not left:
                    raise
                refused_at = version
        return False

    def _store(self, ref: ClaimRef, wanted: _Entries) -> bool:
        """Return False if the claim no longer exists."""
        try:
            stored = self._apply(ref, wanted)
        except ApiRejectedError as error:
            if is_not_found(error):
                return False
            raise
        self._note_dropped(wanted, stored)
        return True

    def _read(self, ref: ClaimRef) -> JsonObject | None:
        obj = self._claims.find(ref, REPORT_S)
        if obj is None or obj["metadata"].get("uid") != ref.uid:
            return None
        return obj

    def _present(self, obj: JsonObject) -> _Entries:
        entries = obj["status"].get("devices") or ()
        return {_key(entry): entry for entry in entries if entry["driver"] == self.driver}

    def _wanted(self, obj: JsonObject, devices: Sequence[DeviceStatus]) -> _Entries:
        allocated = {_key(result) for result in allocation_results(obj)}
        entries = self._entries(devices, self._present(obj))
        return {key: entry for key, entry in entries.items() if key in allocated}

    def _entries(self, devices: Sequence[DeviceStatus], present: _Entries) -> _Entries:
        entries: _Entries = {}
        for device in devices:
            place = {"driver": self.driver, "pool": device.pool, "device": device.device}
            place |= {"shareID": device.share_id} if device.share_id else {}
            before = _condition(present.get(_key(place)) or {})
            entries[_key(place)] = place | {"conditions": [self._ready(device, before)]} | _data(device.facts)
        return entries

    def _ready(self, device: DeviceStatus, before: JsonObject) -> JsonObject:
        status = "True" if device.ready else "False"
        since = before.get("lastTransitionTime") if before.get("status") == status else None
        return {
            "type": CONDITION,
            "status": status,
            "reason": device.reason,
            "message": " ".join(device.message.split())[:_MESSAGE_CHARACTERS],
            "lastTransitionTime": since or self.now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def _apply(self, ref: ClaimRef, wanted: _Entries) -> JsonObject:
        # The UID makes the write fail if the claim was deleted and created again.
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": ref.name, "namespace": ref.namespace, "uid": ref.uid},
            "status": {"devices": list(wanted.values())},
        }
        return self.api.call(
            "PATCH",
            "resourceclaims",
            namespace=ref.namespace,
            name=ref.name,
            subresource="status",
            query={"fieldManager": self._manager, "force": "true"},
            body=body,
            content_type=APPLY_PATCH,
            action=f"write the status of claim {ref.namespace}/{ref.name}",
            timeout_s=REPORT_S,
        )

    def _note_dropped(self, wanted: _Entries, stored: JsonObject) -> None:
        self._dropped_at = None
        if wanted and not (stored.get("status") or {}).get("devices"):
            self._dropped_at = self.clock()
            _log.warning(
                "claim_status_dropped",
                remedy="enable the feature gate DRAResourceClaimDeviceStatus in the API server, so that claims"
                " show the state of their devices; the plugin retries in an hour",
            )


def _field_manager(driver: str, node: str) -> str:
    plain = f"{driver}/{node}"
    if len(plain) <= _MANAGER_LENGTH:
        return plain
    digest = hashlib.sha256(plain.encode()).hexdigest()[:16]
    return f"{plain[: _MANAGER_LENGTH - len(digest) - 1]}-{digest}"


def _key(entry: JsonObject) -> tuple[Any, ...]:
    return entry["driver"], entry["pool"], entry["device"], entry.get("shareID")


def _condition(entry: JsonObject) -> JsonObject:
    return next((c for c in entry.get("conditions") or () if c.get("type") == CONDITION), {})


def _same_entries(wanted: _Entries, present: _Entries) -> bool:
    return wanted.keys() == present.keys() and all(
        _condition(entry) == _condition(present[key]) and entry.get("data") == present[key].get("data")
        for key, entry in wanted.items()
    )


def _data(facts: DeviceFacts) -> JsonObject:
    """Return nothing if the data exceeds the API's limit."""
    data = _FACTS.encode(facts)
    data = {"version": _DATA_VERSION, **data} if data else {}
    fits = len(json.dumps(data).encode()) <= _DATA_BYTES
    return {"data": data} if data and fits else {}


_LIMIT = Kind(NUMBER.read, lambda mib: f"{mib}Mi")
_MPS = Codec(MpsFacts, pinned_memory_limit_mib=omittable(_LIMIT, name="pinnedDeviceMemoryLimit"))
_FACTS = Codec(DeviceFacts, mps=omittable(_MPS.kind))
