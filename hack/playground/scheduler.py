"""The playground's scheduler: creates claims from templates, allocates devices, and assigns pods to nodes."""

from __future__ import annotations

import copy
from typing import Any

from dra_driver.cli.validation.rules.allocator import AllocationError, allocate
from dra_driver.cli.validation.rules.pods import (
    extended_requests,
    requested_resources,
    served_resources,
)
from playground.apiserver.server import PlaygroundApiServer
from playground.pools import free_devices

__all__ = ["AllocationError", "PlaygroundScheduler"]

_GROUP = "resource.k8s.io"
_POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"

_NOT_SCHEDULED = "kube-scheduler allocates claims, but only for pods that are created without nodeName"

Object = dict[str, Any]


class PlaygroundScheduler:
    """Makes the same changes as kube-scheduler and the claim controller, directly in the server's store."""

    def __init__(self, server: PlaygroundApiServer) -> None:
        self._server = server

    def allocate_claim(
        self, namespace: str, name: str, *, node: str | None = None, pod: Object | None = None
    ) -> Object:
        """Allocate a claim, unless it is already allocated, reserve it for `pod`, and return the stored claim.

        Without `node`, use the first node with matching devices. Raises: AllocationError, ApiFailure.
        """
        with self._server.store.changed:
            claim = self._get("resourceclaims", namespace, name)
            self._allocate([claim], [node] if node else self._nodes())
            if pod is not None:
                reserve(claim["status"], pod)
            return self._write_status("resourceclaims", _GROUP, claim)

    def release_claim(self, namespace: str, name: str, *, pod: Object | None = None) -> Object:
        """Remove the reservation of `pod`, or all reservations if `pod` is None. Deallocate the claim if none is left,
        and return the stored claim.
        """
        with self._server.store.changed:
            claim = self._get("resourceclaims", namespace, name)
            uid = pod["metadata"]["uid"] if pod is not None else None
            status = claim.setdefault("status", {})
            kept = [entry for entry in status.get("reservedFor") or () if uid and entry["uid"] != uid]
            claim["status"] = status | {"reservedFor": kept} if kept else {}
            return self._write_status("resourceclaims", _GROUP, claim)

    def schedule_pod(self, namespace: str, name: str, *, node: str | None = None) -> Object:
        """Create the pod's claims, allocate and reserve all of them on one node, assign the pod to the node, and return
        the stored pod.

        Raises: AllocationError. Even then, the claims from templates have been created.
        """
        with self._server.store.changed:
            pod = self._get("pods", namespace, name, group="")
            names = self._claims_of(pod)
            nodes = [node] if node else self._nodes()
            claims = [self._get("resourceclaims", namespace, claim_name) for claim_name in names]
            for claim in claims:
                nodes = self._nodes_for(claim, nodes)
            extended = self._extended_claim(pod)
            chosen = self._allocate([*claims, *extended], nodes)
            for claim in extended:
                made = self._server.add("resourceclaims", claim, group=_GROUP)["metadata"]["name"]
                claim["metadata"]["name"] = made
                pod.setdefault("status", {})["extendedResourceClaimStatus"] = {"resourceClaimName": made}
                self._write_status("pods", "", pod)
            for claim in (*claims, *extended):
                reserve(claim["status"], pod)
                self._write_status("resourceclaims", _GROUP, claim)
            pod = self._get("pods", namespace, name, group="")
            pod["spec"]["nodeName"] = chosen
            resource = self._server.resource("pods", group="")
            return self._server.operations.update(resource, (namespace, name), pod)

    def admit_pod(self, namespace: str, name: str) -> str | None:
        """Return why the kubelet refuses a pod that has a node; None if it starts the pod.

        A pod that was created with a node passes by the scheduler. Like the claim controller, this creates its claims
        from templates, and reserves only those that are already allocated.
        """
        with self._server.store.changed:
            pod = self._get("pods", namespace, name, group="")
            for claim_name in self._claims_of(pod):
                claim = self._get("resourceclaims", namespace, claim_name)
                if not (claim.get("status") or {}).get("allocation"):
                    return (
                        f"pod {name} is not allowed to use ResourceClaim {namespace}/{claim_name}: it is not "
                        f"allocated; {_NOT_SCHEDULED}"
                    )
                before = copy.deepcopy(claim["status"].get("reservedFor"))
                reserve(claim["status"], pod)
                if claim["status"]["reservedFor"] != before:
                    self._write_status("resourceclaims", _GROUP, claim)
            served = served_resources(self._server.objects("deviceclasses"))
            requests = extended_requests(pod["spec"], served)
            if requests and "extendedResourceClaimStatus" not in (pod.get("status") or {}):
                return f"pod {name} has no claim for its extended resources; {_NOT_SCHEDULED}"
        return None

    def _extended_claim(self, pod: Object) -> list[Object]:
        """Return a list with the claim for the extended resources of a pod; empty if it requests none. kube-scheduler
        stores this claim only after it has found a node.

        Raises: AllocationError for a resource without a class.
        """
        served = served_resources(self._server.objects("deviceclasses"))
        asked = {name for one in pod["spec"].get("containers") or () for name in requested_resources(one)}
        unknown = sorted(name for name in asked - served.keys() if "/" in name)
        if unknown:
            raise AllocationError(f"Insufficient {unknown[0]}: no DeviceClass has this extendedResourceName")
        requests = extended_requests(pod["spec"], served)
        metadata = _owned(pod, "extended-resources", {})
        metadata["annotations"] = {"resource.kubernetes.io/extended-resource-claim": "true"}
        return [{"metadata": metadata, "spec": {"devices": {"requests": requests}}}] if requests else []

    def _allocate(self, claims: list[Object], nodes: list[str]) -> str:
        """Allocate devices for the claims without an allocation, on the first node where all fit. Return the node."""
        fresh = [claim for claim in claims if not (claim.get("status") or {}).get("allocation")]
        classes = {one["metadata"]["name"]: one for one in self._server.objects("deviceclasses")}
        slices, held = self._server.objects("resourceslices"), self._server.objects("resourceclaims")
        failure = AllocationError("no node has slices")
        for node in nodes:
            try:
                found = allocate(free_devices(slices, held, node), fresh, classes, node)
            except AllocationError as error:
                failure = error
                continue
            for claim, allocation in zip(fresh, found, strict=True):
                claim.setdefault("status", {})["allocation"] = allocation
            return node
        raise failure

    def _claims_of(self, pod: Object) -> list[str]:
        """Return the names of a pod's claims. Create the claims from templates, like the claim controller."""
        namespace, known = pod["metadata"]["namespace"], {}
        for entry in (pod.get("status") or {}).get("resourceClaimStatuses") or ():
            known[entry["name"]] = entry.get("resourceClaimName")
        names = []
        for entry in pod["spec"].get("resourceClaims") or ():
            name = entry.get("resourceClaimName") or known.get(entry["name"])
            if name is None:
                template = self._get("resourceclaimtemplates", namespace, entry["resourceClaimTemplateName"])
                name = self._claim_from(template, pod, entry["name"])["metadata"]["name"]
                known[entry["name"]] = name
            names.append(name)
        if known:
            statuses = [{"name": key, "resourceClaimName": value} for key, value in known.items()]
            pod.setdefault("status", {})["resourceClaimStatuses"] = statuses
            self._write_status("pods", "", pod)
        return names

    def _claim_from(self, template: Object, pod: Object, entry: str) -> Object:
        metadata = _owned(pod, entry, copy.deepcopy(template["spec"].get("metadata") or {}))
        metadata["annotations"] = (metadata.get("annotations") or {}) | {_POD_CLAIM_NAME: entry}
        claim = {"metadata": metadata, "spec": copy.deepcopy(template["spec"]["spec"])}
        return self._server.add("resourceclaims", claim, group=_GROUP)

    def _nodes(self) -> list[str]:
        named = {item["spec"].get("nodeName") for item in self._server.objects("resourceslices")}
        return sorted(name for name in named if name)

    def _nodes_for(self, claim: Object, nodes: list[str]) -> list[str]:
        """Return the nodes where a claim can be used: those of its allocation, or all if it is not allocated."""
        allocation = (claim.get("status") or {}).get("allocation")
        if not allocation:
            return nodes
        terms = allocation["nodeSelector"]["nodeSelectorTerms"]
        allowed = {value for term in terms for entry in term["matchFields"] for value in entry["values"]}
        return [node for node in nodes if node in allowed]

    def _get(self, plural: str, namespace: str, name: str, *, group: str = _GROUP) -> Object:
        found = self._server.store.get(self._server.resource(plural, group=group), (namespace, name))
        if found is None:
            raise AllocationError(f"{plural} {namespace}/{name} does not exist")
        return copy.deepcopy(found)

    def _write_status(self, plural: str, group: str, obj: Object) -> Object:
        key = (obj["metadata"]["namespace"], obj["metadata"]["name"])
        resource = self._server.resource(plural, group=group)
        return copy.deepcopy(self._server.operations.update(resource, key, obj, status=True))


def _owned(pod: Object, entry: str, metadata: Object) -> Object:
    """Return the metadata of a claim that is created for a pod and deleted with the pod."""
    owner = {
        "apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"],
        "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip
    return metadata | {
        "generateName": f"{pod['metadata']['name']}-{entry}-",
        "namespace": pod["metadata"]["namespace"],
        "ownerReferences": [owner],
    }


def reserve(status: Object, pod: Object) -> None:
    """Add a pod to `reservedFor`, unless it is already there."""
    reserved = status.setdefault("reservedFor", [])
    entry = {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    if entry not in reserved:
        reserved.append(entry)
