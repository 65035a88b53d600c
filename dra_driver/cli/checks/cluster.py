"""Checks the cluster: API, permissions, node, admission, classes, slices, feature gates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
from dra_driver.model.schema import JsonObject
from dra_driver.model.units import counted, named
from dra_driver.slices.api_support import Support, ask_support
from dra_driver.slices.rules.diff import PARTITIONS_GATE, SHARES_GATE, TAINTS_GATE, Owner

_SLOW = ("did not answer in time", "no time was left")
"""Parts of client errors that mean a timeout, not a refusal."""


def required_permissions(driver: str, *, mig_layouts: bool = False) -> tuple[Permission, ...]:
    """Return the permissions of the ClusterRole; `mig_layouts` adds those for following the node's labels."""
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
    """Checks one API server. `client` raises the error that prevented its creation; `configured` is whether
    there is a configuration at all.
    """

    client: Shared[ApiClient]
    driver: str
    node: str
    dynamic_mig: bool = False
    sharing: bool = False
    mig_layouts: bool = False
    configured: bool = True
    claims: Callable[[], Sequence[ClaimRef]] = tuple

    def api_server(self) -> Finding:
        """Check that the API server answers and serves the API."""
        if not self.configured:
            return warn("not checked: this is not a pod, and no kubeconfig was given", "use --kubeconfig")
        client = self.client.get()
        try:
            client.check_group()
        except ApiUnavailableError as error:
            if any(sign in str(error) for sign in _SLOW):
                return warn(
                    f"{client.endpoint.server} did not answer in time, so doctor did not check the cluster",
                    f"`time curl -k {client.endpoint.server}/readyz` from the node; run doctor again when it is faster",
                )
            seen, _, remedy = str(error).partition("; ")
            remedy = (
                remedy
                or f"`curl -kv {client.endpoint.server}/readyz` from the node shows where the connection fails"
            )
            return fail(f"{client.endpoint.server}: {seen}", remedy)
        release = server_version(client) or "unknown"
        return ok(f"Kubernetes {release} at {client.endpoint.server}, {GROUP_VERSION} is used")

    def permissions(self) -> Finding:
        """Check the permissions of gpu-dra-driver."""
        needed = required_permissions(self.driver, mig_layouts=self.mig_layouts)
        client = self.client.get()
        denied = [wanted for wanted in needed if not is_allowed(client, wanted)]
        hard = [str(permission) for permission in denied if not permission.optional]
        if hard:
            return fail(f"not allowed: {', '.join(hard)}", f"{apply_again()} (ClusterRole and its binding)")
        if denied:
            lacks = f"not allowed: {', '.join(map(str, denied))}; events, device states or MIG layouts will be missing"
            if any(permission.verb == MARK_VERB for permission in denied):
                mark = f"{MARK_VERB} {MARK_RESOURCE}.{self.driver}"
                lacks = (
                    f"the role lacks the permission ({mark}), so no policy restricts this account to its node"
                )
            return warn(lacks, f"{apply_again()} (ClusterRole)")
        return ok(f"all {len(needed)} that gpu-dra-driver needs")

    def node_object(self) -> Finding:
        """Check that the node exists, and that nothing else offers its GPUs."""
        try:
            node = read_node(self.client.get(), self.node)
        except ApiRejectedError as error:
            if error.status != 404:
                raise
            return fail(
                f"there is no node {self.node!r}",
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
                f"a device plugin offers the same GPUs of node {self.node}: {', '.join(old)}",
                f"`kubectl label node {self.node} nvidia.com/gpu.deploy.device-plugin=false --overwrite`, or delete "
                "its DaemonSet; pods can then request them through a DeviceClass with extendedResourceName",
            )
        info = status.get("nodeInfo") or {}
        versions = ", ".join(
            str(info[key]) for key in ("kubeletVersion", "containerRuntimeVersion") if info.get(key)
        )
        conditions = status.get("conditions") or ()
        ready = next((c.get("status") for c in conditions if c.get("type") == "Ready"), None)
        if ready not in (None, "True"):
            return warn(f"node {self.node} is not ready", f"`kubectl describe node {self.node}`")
        runtime = info.get("containerRuntimeVersion")
        if str(runtime).startswith("docker:"):
            return fail(*DOCKER)
        return ok(
            f"node {self.node}{f' ({versions})' if versions else ''}",
            None if runtime is None else str(runtime),
        )

    def _proof(self) -> AdmissionProof:
        return AdmissionProof(self.client.get(), self.driver, self.claims)

    def device_classes(self) -> Finding:
        """Check that the DeviceClasses exist."""
        listed = self._list("deviceclasses")
        names = [str(item["metadata"]["name"]) for item in listed.get("items") or ()]
        ours = [name for name in names if name.endswith("nvidia.com")]
        missing = [name for name in ("gpu.nvidia.com", "mig.nvidia.com") if name not in names]
        renamed = [other for other in names if any(_is_renamed(name, other) for name in missing)]
        if missing:
            why = f"; renamed, it seems, to {named(renamed)}, but claims use this name" if renamed else ""
            return warn(
                f"missing: {', '.join(missing)}{why}",
                helm_set("deviceClasses.create=true"),
            )
        return ok(named(ours))

    def slices(self) -> Finding:
        """Check the published slices of this node."""
        query = {"fieldSelector": f"spec.driver={self.driver},spec.nodeName={self.node}"}
        items = self._list("resourceslices", query=query).get("items") or []
        foreign = sorted({item["spec"]["pool"]["name"] for item in items} - {self.node})
        if foreign:
            return fail(
                f"pools that gpu-dra-driver did not create: {named(foreign)}",
                f"another DRA driver publishes as {self.driver}: `kubectl get resourceslices --field-selector "
                f"spec.nodeName={self.node} -o yaml | grep manager`",
            )
        count = sum(len(item["spec"].get("devices") or ()) for item in items)
        if not items:
            return warn(
                "this node publishes no devices",
                "start gpu-dra-driver; its /readyz and log show what is wrong",
            )
        tainted = sum(
            1 for item in items for device in item["spec"].get("devices") or () if device.get("taints")
        )
        note = f", {tainted} of them tainted" if tainted else ""
        return ok(f"{counted(count, 'device')} in {counted(len(items), 'slice')}{note}")

    def feature_gates(self) -> Finding:
        """Check by dry runs that the API server keeps what gpu-dra-driver publishes with this configuration."""
        client = self.client.get()
        owner = Owner(self.driver, self.node, node_uid(client, self.node))
        support = ask_support(client, owner, Support(), partitions=True)
        problem = support.no_partitions
        off = set(support.missing) | (set() if problem is None else {PARTITIONS_GATE})
        if problem is not None and self.dynamic_mig:
            why, _, remedy = problem.rpartition("; ")
            return fail(f"--dynamic-mig does nothing: {why}", remedy)
        if SHARES_GATE in off and self.sharing:
            return fail(
                f"{SHARES_GATE} is off, so claims cannot share devices as configured",
                f"Kubernetes 1.36, or --feature-gates={SHARES_GATE}=true for API server, scheduler and kubelet",
            )
        if TAINTS_GATE in off:
            return warn(
                f"{TAINTS_GATE} is off, so pods can start on broken GPUs",
                f"Kubernetes 1.36, or --feature-gates={TAINTS_GATE}=true for API server, scheduler and controller "
                "manager",
            )
        if off:
            return ok(f"off, and not needed with this configuration: {', '.join(sorted(off))}")
        return ok("API server supports partitions, shares and taints")

    def all(self) -> list[Check]:
        """Return the checks by name."""
        return [
            Check("API server", self.api_server),
            Check("permissions", self._skipping(self.permissions)),
            Check("node", self._skipping(self.node_object)),
            Check("admission policy", self._skipping(lambda: self._proof().slices())),
            Check("claim policy", self._skipping(lambda: self._proof().claim_status())),
            Check("DeviceClasses", self._skipping(self.device_classes)),
            Check("slices", self._skipping(self.slices)),
            Check("feature gates", self._skipping(self.feature_gates)),
        ]

    def _skipping(self, ask: Callable[[], Finding]) -> Callable[[], Finding]:
        """Wrap `ask` so that it returns SKIP if the API server is unavailable, or these credentials may not
        query it.

        The checks `API server` and `permissions` report those problems once.
        """

        def looked() -> Finding:
            try:
                self.client.get()
            except Exception:  # noqa: BLE001  reported by the check `API server`
                return skip("the API server does not answer")
            try:
                return ask()
            except ApiUnavailableError:
                return skip("the API server does not answer")
            except PathNotFoundError as error:
                return skip(f"not checked: {error}")
            except ApiRejectedError as error:
                if error.status in (401, 403):
                    return skip(
                        "these credentials may not check this; gpu-dra-driver itself does not need to"
                    )
                raise

        return looked

    def _list(self, plural: str, query: Mapping[str, str] | None = None) -> JsonObject:
        return self.client.get().call("GET", plural, action=f"list {plural}", query=query)


def _is_renamed(name: str, other: str) -> bool:
    """Whether the class's name is another one with something added."""
    before, found, behind = other.partition(name)
    return bool(found and (before or behind)) and not before.endswith(".")
