"""Creates, updates and deletes objects in the store by the API server's rules. All objects are in stored form."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from playground.apiserver.failure import Cause, already_exists, bad_request, conflict, invalid, not_found
from playground.apiserver.resources import BY_PLURAL, Resource
from playground.apiserver.rules import (
    CHECKS,
    default_claim_spec,
    drop_deallocated,
    drop_disabled,
    generated_name,
    is_subdomain,
    slice_faults,
)
from playground.apiserver.store import Key, Object, Store, copy_json

_KEPT = ("uid", "creationTimestamp", "deletionTimestamp", "namespace", "generateName")
_MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"
_NAME_TRIES = 8


class Operations:
    """The writes of one server. Do not use an object again after passing it, because a call may change it.

    A dry run performs all checks, and returns the object that would be stored.
    """

    def __init__(self, store: Store, gates: Mapping[str, bool], minor: int) -> None:
        self.store = store
        self.gates = gates
        self.minor = minor

    def create(
        self, resource: Resource, namespace: str | None, obj: Object, *, dry_run: bool = False
    ) -> Object:
        """Create an object, and return the stored object. Raises: ApiFailure 400, 404 (namespace), 409, 422."""
        metadata = _metadata(obj)
        if resource.namespaced:
            self._check_namespace(metadata, namespace)
        self._prepare(resource, obj, None)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
        metadata.pop("deletionTimestamp", None)
        with self.store.changed:
            metadata["name"] = self._new_name(resource, metadata)
            self._check(resource, obj, None)
            return obj if dry_run else self.store.write(resource, _key(metadata), obj)

    def update(
        self, resource: Resource, key: Key, obj: Object, *, status: bool = False, dry_run: bool = False
    ) -> Object:
        """Replace the object or only its status. If nothing changes, the resource version stays the same.

        Raises: ApiFailure 400, 404, 409, 422.
        """
        with self.store.changed:
            before = self._existing(resource, key)
            metadata = _metadata(obj)
            if metadata.setdefault("name", key[1]) != key[1]:
                raise bad_request(f"the name of the object ({metadata['name']}) does not match the URL")
            _check_preconditions(resource, before, metadata)
            after = _merged(resource, before, obj, status=status)
            self._prepare(resource, after, before)
            self._check(resource, after, before)
            if after == before or dry_run:
                return after
            return self.store.write(resource, key, after)

    def delete(
        self, resource: Resource, key: Key, preconditions: Mapping[str, str], *, dry_run: bool = False
    ) -> Object:
        """Delete the object, even if it has finalizers, and return it. Raises: ApiFailure 404, 409."""
        with self.store.changed:
            before = self._existing(resource, key)
            _check_preconditions(resource, before, preconditions)
            return before if dry_run else self.store.write(resource, key, None)

    def _existing(self, resource: Resource, key: Key) -> Object:
        found = self.store.get(resource, key)
        if found is None:
            raise not_found(resource.group, resource.plural, key[1])
        return found

    def _check_namespace(self, metadata: Object, namespace: str | None) -> None:
        if namespace is None or metadata.setdefault("namespace", namespace) != namespace:
            raise bad_request("the namespace of the provided object does not match the namespace of the URL")
        if self.store.get(BY_PLURAL["", "namespaces"], ("", namespace)) is None:
            raise not_found("", "namespaces", namespace)

    def _new_name(self, resource: Resource, metadata: Object) -> str:
        name, prefix = metadata.get("name"), metadata.get("generateName")
        namespace = metadata.get("namespace", "")
        if not name and not prefix:
            required = Cause("metadata.name", "Required value: name or generateName is required")
            raise invalid(resource.group, resource.kind, "", [required])
        for _ in range(1 if name else _NAME_TRIES):
            chosen = name or generated_name(str(prefix))
            if self.store.get(resource, (namespace, chosen)) is None:
                return str(chosen)
        raise already_exists(resource.group, resource.plural, str(chosen))

    def _prepare(self, resource: Resource, obj: Object, before: Object | None) -> None:
        """Do what the API server does before validation: drop disabled fields, set defaults, reset the status."""
        drop_disabled(obj, self.gates, before)
        if before is None and resource.kind == "ResourceClaim":
            obj.pop("status", None)
        if before is None and resource.kind == "Pod":
            obj["status"] = {"phase": "Pending"}
        if resource.kind == "ResourceClaim":
            default_claim_spec(obj.get("spec") or {})
            drop_deallocated(obj, before)
        if resource.kind == "ResourceClaimTemplate":
            default_claim_spec((obj.get("spec") or {}).get("spec") or {})
        if resource.kind == "ResourceSlice":
            for device in (obj.get("spec") or {}).get("devices") or ():
                for taint in device.get("taints") or ():
                    taint.setdefault("timeAdded", now())

    def _check(self, resource: Resource, obj: Object, before: Object | None) -> None:
        name = str(obj["metadata"].get("name", ""))
        if resource.kind == "ResourceSlice":
            causes = slice_faults(obj, before, self.minor)
        else:
            causes = CHECKS[resource.kind](obj, before) if resource.kind in CHECKS else []
        if not is_subdomain(name):
            causes.insert(0, Cause("metadata.name", f'Invalid value: "{name}": must be a DNS subdomain'))
        if causes:
            raise invalid(resource.group, resource.kind, name, causes)


def now() -> str:
    """Return the current time in the API's format, in whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _metadata(obj: Object) -> Object:
    metadata = obj.setdefault("metadata", {})
    if not isinstance(metadata, dict):
        raise bad_request("metadata must be an object")
    return metadata


def _key(metadata: Object) -> Key:
    return str(metadata.get("namespace") or ""), str(metadata["name"])


def _merged(resource: Resource, before: Object, obj: Object, *, status: bool) -> Object:
    """Return the new object. A status write changes only the status and managedFields, any other write everything else.
    Metadata that the server sets does not change.
    """
    if status:
        after = copy_json(before)
        after.pop("status", None)
        if "managedFields" in obj["metadata"]:
            after["metadata"]["managedFields"] = obj["metadata"]["managedFields"]
        return after | ({"status": obj["status"]} if obj.get("status") else {})
    sent = {key: value for key, value in obj["metadata"].items() if key not in _KEPT}
    metadata = sent | {k: before["metadata"][k] for k in _KEPT if k in before["metadata"]}
    metadata["resourceVersion"] = before["metadata"]["resourceVersion"]
    after = obj | {"metadata": metadata}
    if resource.has_status:
        after.pop("status", None)
        after |= {"status": before["status"]} if "status" in before else {}
    return after


def _check_preconditions(resource: Resource, before: Object, wanted: Mapping[str, Any]) -> None:
    metadata, name = before["metadata"], before["metadata"]["name"]
    uid, version = wanted.get("uid"), wanted.get("resourceVersion")
    if uid and uid != metadata["uid"]:
        why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {metadata['uid']}"
        raise conflict(resource.group, resource.plural, name, why)
    if version and version != metadata["resourceVersion"]:
        raise conflict(resource.group, resource.plural, name, _MODIFIED)
