"""Checks the cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from dra_driver.app.settings import Settings
from dra_driver.base.installation import apply_again, helm_set
from dra_driver.cli.checks.admission import MARK_RESOURCE, MARK_VERB, AdmissionProof
from dra_driver.cli.checks.check import Check, Shared
from dra_driver.cli.checks.runtime import DOCKER
from dra_driver.cli.rules.findings import Finding, fail, ok, skip, warn
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.api_errors import PathNotFoundError
from dra_driver.kube.client import GROUP, GROUP_VERSION, ApiClient
from dra_driver.kube.cluster import Permission, is_allowed, node_uid, read_node, server_version
from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import dataclass
from dra_driver.model.schema import JsonObject
from dra_driver.model.units import counted, named
from dra_driver.slices.api_support import Support, ask_support
from dra_driver.slices.rules.diff import PARTITIONS_GATE, SHARES_GATE, TAINTS_GATE, Owner

_OLDEST = {"kubelet": (1, 34), "containerd": (1, 7), "cri-o": (1, 28)}
"""The first versions with resource.k8s.io/v1, and with CDI devices from the kubelet, as in docs/versions.md."""
_VERSION = re.compile(r"v?(\d+)\.(\d+)")


def required_permissions(driver: str, *, mig_layouts: bool = False) -> tuple[Permission, ...]:
    slices = ("list", "watch", "create", "update", "delete")
    return (
        Permission("get", "resourceclaims", GROUP),
        *(Permission(verb, "resourceslices", GROUP) for verb in slices),
        Permission(MARK_VERB, MARK_RESOURCE, driver, optional=True),
        Permission("get", "nodes"),
        *(Permission(verb, "nodes", optional=True) for verb in ("list", "watch") if mig_layouts),
        Permission("patch", "resourceclaims", GROUP, subresource="status", optional=True),
        Permission(
            "associated-node:patch", "resourceclaims", GROUP, subresource="driver", name=driver, optional=True
        ),
        Permission("create", "events", optional=True),
        Permission("patch", "events", optional=True),
    )


@dataclass(frozen=True, slots=True)
class ClusterChecks:
    """`client.get()` raises what creating the client raised. `configured` is False outside a pod without a
    kubeconfig.
    """

    client: Shared[ApiClient]
    settings: Settings
    configured: bool = True
    claims: Callable[[], Sequence[ClaimRef]] = tuple
    has_gpus: Callable[[], bool] = lambda: True

    @property
    def driver(self) -> str:
        return self.settings.driver_name

    @property
    def node(self) -> str:
        return self.settings.node_name

    def api_server(self) -> Finding:
        if not self.configured:
            return warn(
                "not checked: doctor does not run in a pod, and has no kubeconfig", "use --kubeconfig"
            )
        client = self.client.get()
        try:
            client.check_group()
        except ApiUnavailableError as error:
            if error.timed_out:
                return warn(
                    f"{client.endpoint.server} did not answer in time, so doctor did not check the cluster",
                    f"check `time curl -k {client.endpoint.server}/readyz` on the node; then run doctor again",
                )
            seen, _, remedy = str(error).partition("; ")
            remedy = (
                remedy
                or f"`curl -kv {client.endpoint.server}/readyz` on the node shows where the connection fails"
            )
            return fail(f"{client.endpoint.server}: {seen}", remedy)
        release = server_version(client) or "unknown"
        return ok(f"Kubernetes {release} at {client.endpoint.server} serves {GROUP_VERSION}")

    def permissions(self) -> Finding:
        needed = required_permissions(self.driver, mig_layouts=self.settings.mig_layouts.is_on)
        client = self.client.get()
        denied = [wanted for wanted in needed if not is_allowed(client, wanted)]
        hard = [str(permission) for permission in denied if not permission.optional]
        if hard:
            return fail(f"not allowed: {', '.join(hard)}", f"{apply_again()} (ClusterRole and its binding)")
        if denied:
            lacks = f"not allowed: {', '.join(map(str, denied))}, so events, device states or MIG layouts are missing"
            if any(permission.verb == MARK_VERB for permission in denied):
                mark = f"{MARK_VERB} {MARK_RESOURCE}.{self.driver}"
                lacks = (
                    f"the role lacks the permission ({mark}), so no policy restricts this account to its node"
                )
            return warn(lacks, f"{apply_again()} (ClusterRole)")
        return ok(f"all {len(needed)} permissions that gpu-dra-driver needs")

    def node_object(self) -> Finding:
        """Check that the node exists, and that nothing else offers its GPUs."""
        try:
            node = read_node(self.client.get(), self.node)
        except ApiRejectedError as error:
            if error.status != 404:
                raise
            return fail(
                f"node {self.node!r} does not exist",
                "set --node-name or NODE_NAME to a name that `kubectl get nodes` lists",
            )
        status = node.get("status") or {}
        old = [
            f"{name} {amount}"
            for name, amount in (status.get("allocatable") or {}).items()
            if str(name).startswith(("nvidia.com/gpu", "nvidia.com/mig-")) and str(amount) != "0"
        ]
        if old:
            return fail(
                f"a device plugin also offers the GPUs of node {self.node}: {', '.join(old)}",
                f"`kubectl label node {self.node} nvidia.com/gpu.deploy.device-plugin=false --overwrite`, or delete "
                "the device plugin's DaemonSet; a DeviceClass with extendedResourceName serves nvidia.com/gpu too",
            )
        info = status.get("nodeInfo") or {}
        versions = ", ".join(
            str(info[key]) for key in ("kubeletVersion", "containerRuntimeVersion") if info.get(key)
        )
        runtime = info.get("containerRuntimeVersion")
        if str(runtime).startswith("docker:"):
            return fail(*DOCKER)
        too_old = _too_old(info)
        if too_old is not None:
            return too_old
        conditions = status.get("conditions") or ()
        ready = next((c.get("status") for c in conditions if c.get("type") == "Ready"), None)
        if ready not in (None, "True"):
            return fail(f"node {self.node} is not ready", f"`kubectl describe node {self.node}`")
        return ok(
            f"node {self.node}{f' ({versions})' if versions else ''}",
            None if runtime is None else str(runtime),
        )

    def _proof(self) -> AdmissionProof:
        return AdmissionProof(self.client.get(), self.driver, self.claims)

    def device_classes(self) -> Finding:
        listed = self._list("deviceclasses")
        names = [str(item["metadata"]["name"]) for item in listed.get("items") or ()]
        ours = [name for name in names if name.endswith("nvidia.com")]
        missing = [name for name in ("gpu.nvidia.com", "mig.nvidia.com") if name not in names]
        renamed = [other for other in names if any(_is_renamed(name, other) for name in missing)]
        if missing:
            why = f"; probably renamed to {named(renamed)}; claims with the old names wait" if renamed else ""
            return warn(
                f"missing: {', '.join(missing)}{why}",
                helm_set("deviceClasses.create=true"),
            )
        return ok(named(ours))

    def slices(self) -> Finding:
        query = {"fieldSelector": f"spec.driver={self.driver},spec.nodeName={self.node}"}
        items = self._list("resourceslices", query=query).get("items") or []
        foreign = sorted({item["spec"]["pool"]["name"] for item in items} - {self.node})
        if foreign:
            return fail(
                f"pools that gpu-dra-driver did not create: {named(foreign)}",
                f"another DRA driver publishes as {self.driver}; find it with `kubectl get resourceslices "
                f"--field-selector spec.nodeName={self.node} --show-managed-fields -o yaml | grep manager`",
            )
        count = sum(len(item["spec"].get("devices") or ()) for item in items)
        if not items and not self.has_gpus():
            return ok("this node publishes no devices, and has no NVIDIA GPU")
        if not items:
            return fail(
                "this node publishes no devices",
                "start gpu-dra-driver; if it is running, its /readyz and log show the problem",
            )
        tainted = sum(
            1 for item in items for device in item["spec"].get("devices") or () if device.get("taints")
        )
        note = f" ({tainted} tainted)" if tainted else ""
        return ok(f"{counted(count, 'device')}{note} in {counted(len(items), 'slice')}")

    def feature_gates(self) -> Finding:
        """Check that the API server stores all fields that gpu-dra-driver publishes."""
        client = self.client.get()
        owner = Owner(self.driver, self.node, node_uid(client, self.node))
        support = ask_support(client, owner, Support(), partitions=True)
        problem = support.no_partitions
        off = set(support.missing) | (set() if problem is None else {PARTITIONS_GATE})
        if problem is not None and self.settings.dynamic_mig:
            why, _, remedy = problem.rpartition("; ")
            return fail(f"--dynamic-mig does nothing: {why}", remedy)
        if SHARES_GATE in off and self.settings.sharing.entries:
            return fail(
                f"{SHARES_GATE} is off, so claims cannot share devices as configured",
                f"use Kubernetes 1.36, or --feature-gates={SHARES_GATE}=true for API server, scheduler and kubelet",
            )
        if TAINTS_GATE in off:
            return warn(
                f"{TAINTS_GATE} is off, so pods can start on broken GPUs",
                f"use Kubernetes 1.36, or --feature-gates={TAINTS_GATE}=true for API server, scheduler and "
                "controller manager",
            )
        if off:
            return ok(f"off, but not needed with this configuration: {', '.join(sorted(off))}")
        return ok("the API server supports partitions, shares and taints")

    def all(self) -> list[Check]:
        looks = {
            "permissions": self.permissions,
            "node": self.node_object,
            "admission policy": lambda: self._proof().slices(),
            "claim policy": lambda: self._proof().claim_status(),
            "DeviceClasses": self.device_classes,
            "slices": self.slices,
            "feature gates": self.feature_gates,
        }
        slow = ("the API server or this node is slow", "check `time kubectl get --raw /readyz`")
        return [
            Check("API server", self.api_server, slow),
            *(Check(name, self._skipping(look), slow) for name, look in looks.items()),
        ]

    def _skipping(self, ask: Callable[[], Finding]) -> Callable[[], Finding]:
        """Skip if the API server is unavailable, or refuses these credentials: other checks report that once."""

        def looked() -> Finding:
            try:
                self.client.get()
            except Exception:  # noqa: BLE001  reported by the check `API server`
                return skip("not checked without the API server")
            try:
                return ask()
            except ApiUnavailableError:
                return skip("not checked without the API server")
            except PathNotFoundError as error:
                return skip(f"not checked: {error}")
            except ApiRejectedError as error:
                if error.status in (401, 403):
                    return skip(
                        "not permitted with these credentials; `permissions` shows whether gpu-dra-driver needs it"
                    )
                raise

        return looked

    def _list(self, plural: str, query: Mapping[str, str] | None = None) -> JsonObject:
        return self.client.get().call("GET", plural, action=f"list {plural}", query=query)


def _too_old(info: Mapping[str, object]) -> Finding | None:
    runtime, _, version = str(info.get("containerRuntimeVersion")).partition("://")
    found = {"kubelet": str(info.get("kubeletVersion")), runtime: version}
    numbers = {name: _VERSION.match(text) for name, text in found.items() if name in _OLDEST}
    old = {
        name: _OLDEST[name]
        for name, match in numbers.items()
        if match is not None and (int(match[1]), int(match[2])) < _OLDEST[name]
    }
    if not old:
        return None
    seen = " and ".join(f"{name} {found[name].removeprefix('v')}" for name in old)
    wanted = " and ".join(f"{name} {major}.{minor} or newer" for name, (major, minor) in old.items())
    cannot = "is too old and cannot" if len(old) == 1 else "are too old and cannot"
    return fail(f"{seen} {cannot} give containers the devices of claims", f"install {wanted} on the node")


def _is_renamed(name: str, other: str) -> bool:
    before, found, behind = other.partition(name)
    return bool(found and (before or behind)) and not before.endswith(".")
