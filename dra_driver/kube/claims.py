"""Reads ResourceClaims by name, and extracts what a node driver needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

from dra_driver.errors import ApiRejectedError, ApiUnavailableError, ClaimRefusedError
from dra_driver.kube.api_errors import PathNotFoundError
from dra_driver.kube.client import ApiClient, is_not_found
from dra_driver.model.claim import (
    AllocatedClaim,
    ClaimNow,
    ClaimRef,
    DeviceConfig,
    DeviceResult,
    Pods,
    ReportedDevice,
    allocation_results,
    pods_from,
)
from dra_driver.model.dataclass import dataclass

_POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"


@dataclass(eq=False)
class ClaimClient:
    """Requires only the permission to `get` claims. Raises: ApiRejectedError, ApiUnavailableError."""

    api: ApiClient

    def read(self, ref: ClaimRef, timeout_s: float | None = None) -> AllocatedClaim:
        """Return the claim that the kubelet names. Raises: ClaimRefusedError if it is deleted, replaced or not
        allocated.
        """
        obj = self.find(ref, timeout_s)
        if obj is None:
            raise ClaimRefusedError(
                f"claim {ref.namespace}/{ref.name} does not exist in the API server; it was deleted"
            )
        return parse_allocated_claim(obj, ref)

    def current(self, ref: ClaimRef, timeout_s: float | None = None) -> ClaimNow | None:
        obj = self.find(ref, timeout_s)
        return None if obj is None else parse_claim_now(obj, ref)

    def find(self, ref: ClaimRef, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return None if the claim does not exist.

        A 404 from a proxy, or for a path that is not served, is still an error.
        """
        try:
            return self.api.call(
                "GET",
                "resourceclaims",
                namespace=ref.namespace,
                name=ref.name,
                action=f"retrieve claim {ref.namespace}/{ref.name}",
                timeout_s=timeout_s,
            )
        except PathNotFoundError:
            raise
        except ApiRejectedError as error:
            if is_not_found(error) and error.reason == "NotFound":
                return None
            raise


def parse_claim_now(obj: dict[str, Any], ref: ClaimRef) -> ClaimNow:
    """Return the state of a v1 claim. Raises: ApiUnavailableError if `obj` is not one."""
    try:
        metadata, status = obj["metadata"], obj.get("status") or {}
        allocation = status.get("allocation")
        allocated = None
        if allocation is not None:
            allocated = frozenset(
                (str(item["driver"]), str(item["pool"]), str(item["device"]))
                for item in allocation_results(obj)
            )
        return ClaimNow(
            str(metadata["uid"]),
            metadata.get("deletionTimestamp") is not None,
            bool(status.get("reservedFor")),
            allocated,
            reserved_pods(obj),
            reported_devices(status.get("devices")),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ApiUnavailableError(
            f"retrieve claim {ref.namespace}/{ref.name}: the response is not a valid claim: {error!r}"
        ) from error


def reserved_pods(obj: dict[str, Any]) -> Pods:
    """Return the pods for which a v1 claim is reserved; None if only for other objects, or if the field is invalid."""
    consumers = (obj.get("status") or {}).get("reservedFor") or []
    if not isinstance(consumers, list):
        return None
    entries = [entry for entry in consumers if isinstance(entry, dict) and _is_pod(entry)]
    return pods_from(entries) if entries or not consumers else None


def _is_pod(entry: dict[str, Any]) -> bool:
    return entry.get("resource") == "pods" and not entry.get("apiGroup")


def parse_allocated_claim(obj: dict[str, Any], ref: ClaimRef) -> AllocatedClaim:
    """Return the results and configs of all drivers in a v1 claim, in the server's order.

    Raises: ClaimRefusedError if the claim is not allocated (checked first), was replaced, or cannot be read.
    """
    status = obj.get("status") or {}
    allocation = status.get("allocation")
    if allocation is None:
        raise ClaimRefusedError(f"claim {ref.namespace}/{ref.name} not allocated")
    metadata = obj.get("metadata") or {}
    if metadata.get("uid") != ref.uid:
        raise ClaimRefusedError(f"claim {ref.namespace}/{ref.name} got replaced")
    devices = allocation.get("devices") or {}
    try:
        results = tuple(_result(entry) for entry in devices.get("results") or ())
        written = ((obj.get("spec") or {}).get("devices") or {}).get("config") or ()
        configs = tuple(_config(entry, results, written) for entry in devices.get("config") or ())
    except (KeyError, TypeError, AttributeError) as error:
        raise ClaimRefusedError(
            f"claim {ref.namespace}/{ref.name} has an allocation that cannot be read: {error!r}"
        ) from error
    pod_claim_name = (metadata.get("annotations") or {}).get(_POD_CLAIM_NAME)
    return AllocatedClaim(
        ref, results, configs, pod_claim_name, reserved_pods(obj), reported_devices(status.get("devices"))
    )


def reported_devices(entries: Any) -> frozenset[ReportedDevice] | None:
    """Return the devices that the status of a claim names; None if the status is invalid.

    >>> reported_devices([{"driver": "gpu.nvidia.com", "pool": "node-1", "device": "gpu-0"}])
    frozenset({('gpu.nvidia.com', 'node-1', 'gpu-0', None)})
    """
    try:
        return frozenset(
            (entry["driver"], entry["pool"], entry["device"], entry.get("shareID")) for entry in entries or ()
        )
    except (KeyError, TypeError, AttributeError):
        return None


def _result(entry: dict[str, Any]) -> DeviceResult:
    return DeviceResult(
        request=_text(entry, "request"),
        driver=_text(entry, "driver"),
        pool=_text(entry, "pool"),
        device=_text(entry, "device"),
        admin_access=bool(entry.get("adminAccess")),
        share_id=entry.get("shareID") or None,
        consumed_capacity={k: str(v) for k, v in (entry.get("consumedCapacity") or {}).items()},
    )


def _text(entry: dict[str, Any], name: str) -> str:
    value = entry[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is not a string")
    return value


def _config(
    entry: dict[str, Any], results: Sequence[DeviceResult], written: Sequence[dict[str, Any]]
) -> DeviceConfig:
    """Return a config with the request names that the scheduler removes, from Kubernetes 1.37 on, if an entry names all
    requests: only parameters that name a request must fit it.

    `written` are the config entries in the claim's spec.
    """
    source: Literal["FromClass", "FromClaim"] = "FromClass" if entry["source"] == "FromClass" else "FromClaim"
    opaque = entry.get("opaque") or {}
    requests = tuple(entry.get("requests") or ())
    if not requests and source == "FromClass":
        requests = tuple(dict.fromkeys(result.request for result in results))
    elif not requests:
        named = [one.get("requests") or () for one in written if (one.get("opaque") or {}) == opaque]
        requests = tuple(dict.fromkeys(chain.from_iterable(named))) if all(named) else ()
    return DeviceConfig(
        source=source,
        requests=requests,
        driver=opaque.get("driver"),
        parameters=opaque.get("parameters"),
    )
