"""The cluster as the driver needs it: API versions, permissions, the node, classes, feature gates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dra_driver.diagnostics.doctor.admission import AdmissionProof
from dra_driver.diagnostics.doctor.checks import Check, Shared
from dra_driver.diagnostics.rules.admission import MARK_RESOURCE, MARK_VERB
from dra_driver.diagnostics.rules.findings import Finding, fail, named, ok, skip, warn
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.api_errors import PathNotFoundError
from dra_driver.kube.client import ApiClient, path_segment
from dra_driver.kube.cluster import node_uid
from dra_driver.kube.convert import GROUP, VERSIONS
from dra_driver.kube.versions import ResourceApi
from dra_driver.model.claim import ClaimRef
from dra_driver.model.units import counted
from dra_driver.slices.api_support import Support, ask_support
from dra_driver.slices.rules.diff import Owner
from dra_driver.slices.rules.dropped_fields import PARTITIONS_GATE, SHARES_GATE, TAINTS_GATE

JsonObject = dict[str, Any]

UPGRADE_LABEL = "nvidia.com/gpu.deploy.dra-driver"
"""The driver manager of NVIDIA's GPU operator gives it another value while it upgrades the NVIDIA driver."""
_OLDEST_MINOR = 32
_SKEW_S = 5.0
_MUCH_SKEW_S = 60.0
_NUMBER = re.compile(r"\d+")
_EXTENDED_GATE = "DRAExtendedResource"
_APPLY = "`kubectl apply -k daemonset` as an administrator"


@dataclass(frozen=True, slots=True)
class Permission:
    """One thing that the driver has to be allowed; without an optional one it only tells less."""

    verb: str
    resource: str
    group: str = GROUP
    subresource: str = ""
    name: str = ""
    optional: bool = False

    def __str__(self) -> str:
        sub = f"/{self.subresource}" if self.subresource else ""
        return f"{self.verb} {self.resource}{sub}"


def needed_permissions(driver: str) -> tuple[Permission, ...]:
    """What the driver's ClusterRole gives it."""
    slices = ("list", "watch", "create", "update", "delete")
    return (
        Permission("get", "resourceclaims"),
        *(Permission(verb, "resourceslices") for verb in slices),
        Permission(MARK_VERB, MARK_RESOURCE, driver, optional=True),
        Permission("get", "nodes", ""),
        Permission("patch", "resourceclaims", subresource="status", optional=True),
        Permission(
            "associated-node:patch", "resourceclaims", subresource="driver", name=driver, optional=True
        ),
        Permission("create", "events", "", optional=True),
        Permission("patch", "events", "", optional=True),
    )


@dataclass(frozen=True, slots=True)
class ClusterChecks:
    """Checks against one API server. `client` raises what kept it from being made; `configured` says whether there
    is anything to make it from."""

    client: Shared[ApiClient]
    driver: str
    node: str
    dynamic_mig: bool = False
    sharing: bool = False
    configured: bool = True
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    claims: Callable[[], Sequence[ClaimRef]] = tuple

    def api_server(self) -> Finding:
        """Does it answer, and is it new enough?"""
        if not self.configured:
            return warn(
                "not asked: this is not a pod, and no kubeconfig was given", "give one with --kubeconfig"
            )
        version = self.client.get().request("GET", "/version", action="ask for the API server's version")
        number = _NUMBER.match(str(version.get("minor", "")))
        shown = str(version.get("gitVersion") or "unknown")
        if number is not None and str(version.get("major")) == "1" and int(number[0]) < _OLDEST_MINOR:
            return fail(f"Kubernetes {shown}", f"upgrade to 1.34, at least 1.{_OLDEST_MINOR}")
        return ok(f"Kubernetes {shown} at {self.client.get().endpoint.server}")

    def resource_api(self) -> Finding:
        """Which versions of resource.k8s.io are served?"""
        return self._asked(self._resource_api)

    def _resource_api(self) -> Finding:
        remedy = (
            "Kubernetes 1.34 serves it; before that: feature gate DynamicResourceAllocation in all components and "
            f"--runtime-config={GROUP}/v1beta1=true"
        )
        try:
            group = self._get(f"/apis/{GROUP}", f"ask for the versions of {GROUP}")
        except ApiRejectedError as error:
            if error.status != 404:
                raise
            return fail(f"{GROUP} is not served", remedy)
        served = [str(entry.get("version")) for entry in group.get("versions") or ()]
        usable = [version for version in VERSIONS if version in served]
        if not usable:
            return fail(f"{GROUP} is served as {', '.join(served)} only", remedy)
        return ok(f"{GROUP}: {', '.join(served)}; {usable[0]} is used")

    def permissions(self) -> Finding:
        """Is the driver allowed what it needs?"""
        return self._asked(self._permissions)

    def _permissions(self) -> Finding:
        denied: list[Permission] = []
        needed = needed_permissions(self.driver)
        for permission in needed:
            attributes = {
                "verb": permission.verb,
                "group": permission.group,
                "resource": permission.resource,
                "subresource": permission.subresource,
                "name": permission.name,
            }
            body = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
            }
            path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
            answer = self.client.get().request(
                "POST", path, action=f"ask whether I may {permission}", body=body
            )
            if not (answer.get("status") or {}).get("allowed"):
                denied.append(permission)
        hard = [str(permission) for permission in denied if not permission.optional]
        if hard:
            return fail(
                f"not allowed: {', '.join(hard)}", f"{_APPLY} (ClusterRole and binding gpu-dra-driver)"
            )
        if any(permission.verb == MARK_VERB for permission in denied):
            return warn(
                f"the role lacks the mark ({MARK_VERB} {MARK_RESOURCE}.{self.driver}), so the admission policies do "
                "not confine this account to its node",
                f"{_APPLY} (ClusterRole gpu-dra-driver)",
            )
        if denied:
            return warn(
                f"not allowed: {', '.join(map(str, denied))}; events or device states will be missing",
                f"{_APPLY} (ClusterRole gpu-dra-driver)",
            )
        return ok(f"all {len(needed)} that the driver needs")

    def node_object(self) -> Finding:
        """Is there a node of this name?"""
        return self._asked(self._node_object)

    def _node_object(self) -> Finding:
        node = self._node()
        if node is None:
            return fail(
                f"there is no node {self.node!r}",
                "`kubectl get nodes`; set --node-name or NODE_NAME to its name",
            )
        conditions = (node.get("status") or {}).get("conditions") or ()
        ready = next((c.get("status") for c in conditions if c.get("type") == "Ready"), None)
        info = (node.get("status") or {}).get("nodeInfo") or {}
        versions = ", ".join(
            str(info[key]) for key in ("kubeletVersion", "containerRuntimeVersion") if info.get(key)
        )
        if ready not in (None, "True"):
            return warn(f"node {self.node} is not ready", f"`kubectl describe node {self.node}`")
        return ok(f"node {self.node}{f' ({versions})' if versions else ''}")

    def allocatable(self) -> Finding:
        """Does the node offer GPUs the old way as well?"""
        return self._asked(self._allocatable)

    def _allocatable(self) -> Finding:
        node = self._node()
        if node is None:
            return skip(f"there is no node {self.node!r}")
        resources = (node.get("status") or {}).get("allocatable") or {}
        old = [
            f"{name} {amount}"
            for name, amount in resources.items()
            if str(name).startswith(("nvidia.com/gpu", "nvidia.com/mig-")) and str(amount) != "0"
        ]
        if old:
            return fail(
                f"a device plugin offers the same GPUs: {', '.join(old)}",
                f"`kubectl label node {self.node} nvidia.com/gpu.deploy.device-plugin=false --overwrite`, or delete "
                "its DaemonSet; pods may then ask for them through a DeviceClass with extendedResourceName",
            )
        return ok("no GPUs of a device plugin")

    def clock(self) -> Finding:
        """Does the node's clock agree with the API server's? Tokens and certificates depend on it."""
        return self._asked(self._clock)

    def _clock(self) -> Finding:
        theirs = self.client.get().server_time()
        if theirs is None:
            return skip("the API server sends no time")
        skew = (self.now() - theirs).total_seconds()
        text = f"this node is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the API server"
        if abs(skew) > _MUCH_SKEW_S:
            return fail(text, "`timedatectl status` on the node; start chrony or systemd-timesyncd")
        if abs(skew) > _SKEW_S:
            return warn(text, "`timedatectl status` on the node; start chrony or systemd-timesyncd")
        return ok("agrees with the API server's")

    def admission_policy(self) -> Finding:
        """Is a node kept from publishing devices of another?"""
        return self._asked(lambda: self._proof().slices())

    def claim_policy(self) -> Finding:
        """Is a node kept from giving devices to other claims and pods?"""
        return self._asked(lambda: self._proof().claim_status())

    def _proof(self) -> AdmissionProof:
        return AdmissionProof(self.client.get(), self.driver, self.node, self.claims)

    def driver_upgrades(self) -> Finding:
        """Which nodes would components/driver-upgrades take the driver from?"""
        return self._asked(self._driver_upgrades)

    def _driver_upgrades(self) -> Finding:
        query = {"fieldSelector": f"spec.driver={self.driver}"}
        items = self._resource("GET", "resourceslices", query=query).get("items") or []
        served = {str(item["spec"].get("nodeName")) for item in items if item["spec"].get("devices")}
        labels = {
            str(node["metadata"]["name"]): (node["metadata"].get("labels") or {}).get(UPGRADE_LABEL)
            for node in self._get("/api/v1/nodes", "list the nodes").get("items") or ()
        }
        paused = sorted(name for name in labels if labels[name] not in (None, "", "true", "false"))
        if paused:
            return warn(
                f"the NVIDIA driver is being upgraded, so the driver's pods are away: {named(paused)}",
                f"if that lasts, see the driver manager's log; `kubectl get nodes -L {UPGRADE_LABEL}`",
            )
        left = sorted(name for name in served if labels.get(name) != "true")
        if not left:
            have = counted(len(served), "node with devices has", "nodes with devices have")
            return ok(f"{have} the label {UPGRADE_LABEL}=true")
        remedy = (
            f"`kubectl label node NODE {UPGRADE_LABEL}=true`, before you apply components/driver-upgrades"
        )
        if len(left) < len(served):
            return warn(f"nodes with devices without the label {UPGRADE_LABEL}=true: {named(left)}", remedy)
        return skip(f"no node has the label {UPGRADE_LABEL}; {remedy}: {named(left)}")

    def device_classes(self) -> Finding:
        """Are there classes by which pods ask for devices?"""
        return self._asked(self._device_classes)

    def _device_classes(self) -> Finding:
        listed = self._resource("GET", "deviceclasses")
        names = [str(item["metadata"]["name"]) for item in listed.get("items") or ()]
        ours = [name for name in names if name.endswith("nvidia.com")]
        missing = [name for name in ("gpu.nvidia.com", "mig.nvidia.com") if name not in names]
        renamed = [other for other in names if any(_is_renamed(name, other) for name in missing)]
        if missing:
            why = f"; renamed, it seems, to {named(renamed)}, but claims ask by the name" if renamed else ""
            return warn(
                f"missing: {', '.join(missing)}{why}", "`kubectl apply -f daemonset/base/device-classes.yaml`"
            )
        return ok(named(ours))

    def slices(self) -> Finding:
        """What is published of this node?"""
        return self._asked(self._slices)

    def _slices(self) -> Finding:
        query = {"fieldSelector": f"spec.driver={self.driver},spec.nodeName={self.node}"}
        items = self._resource("GET", "resourceslices", query=query).get("items") or []
        foreign = sorted({item["spec"]["pool"]["name"] for item in items} - {self.node})
        if foreign:
            return warn(
                f"pools that are not this driver's: {named(foreign)}",
                f"another driver publishes as {self.driver}: `kubectl get resourceslices --field-selector "
                f"spec.nodeName={self.node} -o yaml | grep manager`",
            )
        count = sum(len(item["spec"].get("devices") or ()) for item in items)
        if not items:
            return warn(
                "nothing is published of this node", "start the driver; its /readyz and log tell why not"
            )
        tainted = sum(
            1 for item in items for device in item["spec"].get("devices") or () if device.get("taints")
        )
        note = f", {tainted} of them tainted" if tainted else ""
        return ok(f"{counted(count, 'device')} in {counted(len(items), 'slice')}{note}")

    def feature_gates(self) -> Finding:
        """Does the API server keep what the driver publishes, as it is configured? Dry runs tell."""
        return self._asked(self._feature_gates)

    def _feature_gates(self) -> Finding:
        client = self.client.get()
        api = ResourceApi(client)
        owner = Owner(self.driver, self.node, node_uid(client, self.node))
        support = ask_support(api, owner, Support(), partitions=True)
        problem = support.no_partitions
        off = set(support.missing) | (set() if problem is None else {PARTITIONS_GATE})
        if self._has_extended_resources(api) is False:
            off.add(_EXTENDED_GATE)
        if problem is not None and self.dynamic_mig:
            why, _, remedy = problem.rpartition("; ")
            return fail(f"--dynamic-mig does nothing: {why}", remedy)
        if SHARES_GATE in off and self.sharing:
            return fail(
                f"{SHARES_GATE} is off: no device is shared by claims, as the configuration wants",
                f"Kubernetes 1.36, or --feature-gates={SHARES_GATE}=true for API server, scheduler and kubelet",
            )
        if TAINTS_GATE in off:
            return warn(
                f"{TAINTS_GATE} is off: pods are put on GPUs that are broken",
                f"Kubernetes 1.36, or --feature-gates={TAINTS_GATE}=true for API server, scheduler and controller "
                "manager",
            )
        if off:
            return ok(f"off, and not needed as the driver is configured: {', '.join(sorted(off))}")
        return ok("partitions, shares and taints are kept")

    def _has_extended_resources(self, api: ResourceApi) -> bool | None:
        """None where these credentials may not make classes, as the driver itself."""
        wanted = "nvidia.com/probe"
        body = {
            "apiVersion": f"{GROUP}/v1",
            "kind": "DeviceClass",
            "metadata": {"name": "gpu-dra-driver-probe"},
            "spec": {"extendedResourceName": wanted},
        }
        try:
            stored = api.call(
                "POST",
                "deviceclasses",
                query={"dryRun": "All"},
                body=body,
                action="ask for extended resources",
            )
        except ApiRejectedError:
            return None
        return (stored.get("spec") or {}).get("extendedResourceName") == wanted

    def kubelet_gates(self) -> Finding:
        """Is dynamic resource allocation switched off in the kubelet?"""
        return self._asked(self._kubelet_gates)

    def _kubelet_gates(self) -> Finding:
        path = f"/api/v1/nodes/{path_segment(self.node)}/proxy/configz"
        try:
            config = self._get(path, "ask for the kubelet's configuration")
        except ApiUnavailableError as error:
            # The server answers for a kubelet that it cannot reach; this raises if the server itself is away.
            self.client.get().server_time()
            return skip(str(error))
        gates = (config.get("kubeletconfig") or {}).get("featureGates") or {}
        off = [name for name in ("DynamicResourceAllocation",) if gates.get(name) is False]
        if off:
            return fail(
                f"off in the kubelet: {', '.join(off)}",
                "set it to true in featureGates of the kubelet's configuration file, then `systemctl restart kubelet`",
            )
        return ok("none that matters is off")

    def all(self) -> list[Check]:
        """By name."""
        return [
            Check("API server", self.api_server),
            Check("resource API", self.resource_api),
            Check("permissions", self.permissions),
            Check("node", self.node_object),
            Check("allocatable", self.allocatable),
            Check("clock", self.clock),
            Check("admission policy", self.admission_policy),
            Check("claim policy", self.claim_policy),
            Check("driver upgrades", self.driver_upgrades),
            Check("DeviceClasses", self.device_classes),
            Check("slices", self.slices),
            Check("feature gates", self.feature_gates),
            Check("kubelet's gates", self.kubelet_gates),
        ]

    def _asked(self, ask: Callable[[], Finding]) -> Finding:
        """The answer, or SKIP if the API server is away or these credentials may not ask: the checks `API server` and
        `permissions` report that, once."""
        try:
            self.client.get()
        except Exception:  # noqa: BLE001  reported by the check `API server`
            return skip("the API server cannot be asked")
        try:
            return ask()
        except ApiUnavailableError:
            return skip("the API server cannot be asked")
        except PathNotFoundError as error:
            return skip(f"not served: {error}")
        except ApiRejectedError as error:
            if error.status in (401, 403):
                return skip("these credentials may not ask; the driver itself does not need to")
            raise

    def _get(self, path: str, action: str) -> JsonObject:
        return self.client.get().request("GET", path, action=action)

    def _resource(self, method: str, plural: str, query: Mapping[str, str] | None = None) -> JsonObject:
        return ResourceApi(self.client.get()).call(method, plural, action=f"list {plural}", query=query)

    def _node(self) -> JsonObject | None:
        try:
            return self._get(f"/api/v1/nodes/{path_segment(self.node)}", f"get node {self.node}")
        except ApiRejectedError as error:
            if error.status == 404:
                return None
            raise


def _is_renamed(name: str, other: str) -> bool:
    """Whether a class looks like another one to whose name something was added, as kustomize does by namePrefix."""
    before, found, behind = other.partition(name)
    return bool(found and (before or behind)) and not before.endswith(".")
