"""ResourceClaims: reading one by name, and taking from it what a node driver needs."""

from __future__ import annotations

from typing import Any, Literal

from dra_driver.errors import ClaimRefusedError
from dra_driver.kube.versions import ResourceApi
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceConfig, DeviceResult


class ClaimClient:
    """Reads ResourceClaims; needs `get` on them and nothing else."""

    def __init__(self, api: ResourceApi) -> None:
        self._api = api

    def get_claim(self, namespace: str, name: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The claim in v1 shape; `timeout_s` bounds the request, None means the client's own bound.

        Raises: ApiRejectedError (404 if it is gone), ApiUnavailableError; their texts start with
        "retrieve claim <namespace>/<name>: ".
        """
        return self._api.call(
            "GET",
            "resourceclaims",
            namespace=namespace,
            name=name,
            action=f"retrieve claim {namespace}/{name}",
            timeout_s=timeout_s,
        )

    def get_allocated(self, ref: ClaimRef, *, timeout_s: float | None = None) -> AllocatedClaim:
        """Read the claim that the kubelet names and parse it. Raises: as the two steps."""
        return parse_allocated_claim(self.get_claim(ref.namespace, ref.name, timeout_s=timeout_s), ref)


def parse_allocated_claim(obj: dict[str, Any], ref: ClaimRef) -> AllocatedClaim:
    """Results and configs of all drivers of a v1 claim, in the server's order.

    Raises: ClaimRefusedError "claim ns/name not allocated" (looked at first) or "claim ns/name got
    replaced" if the UID is not the one in `ref`.
    """
    allocation = (obj.get("status") or {}).get("allocation")
    if allocation is None:
        raise ClaimRefusedError(f"claim {ref.namespace}/{ref.name} not allocated")
    if (obj.get("metadata") or {}).get("uid") != ref.uid:
        raise ClaimRefusedError(f"claim {ref.namespace}/{ref.name} got replaced")
    devices = allocation.get("devices") or {}
    try:
        results = tuple(_result(entry) for entry in devices.get("results") or ())
        configs = tuple(_config(entry) for entry in devices.get("config") or ())
    except (KeyError, TypeError, AttributeError) as error:
        raise ClaimRefusedError(
            f"claim {ref.namespace}/{ref.name} has an allocation that cannot be read: {error!r}"
        ) from error
    return AllocatedClaim(ref, results, configs)


def _result(entry: dict[str, Any]) -> DeviceResult:
    return DeviceResult(
        request=entry["request"],
        driver=entry["driver"],
        pool=entry["pool"],
        device=entry["device"],
        admin_access=bool(entry.get("adminAccess")),
        share_id=entry.get("shareID") or None,
        consumed_capacity={k: str(v) for k, v in (entry.get("consumedCapacity") or {}).items()},
    )


def _config(entry: dict[str, Any]) -> DeviceConfig:
    source: Literal["FromClass", "FromClaim"] = "FromClass" if entry["source"] == "FromClass" else "FromClaim"
    opaque = entry.get("opaque") or {}
    return DeviceConfig(
        source=source,
        requests=tuple(entry.get("requests") or ()),
        driver=opaque.get("driver"),
        parameters=opaque.get("parameters"),
    )
