"""The driver's token can change its own node's slices and the status of its devices, in every served API version."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from localcluster import chart

from tests.e2e.conftest import NAMESPACE, RESOURCE_VERSIONS, Cluster, claim, container, pod, wait_for

pytestmark = pytest.mark.cluster

SPACE = "permissions"
OLDER = "e2e-older-server"
LABEL = "app.kubernetes.io/name=gpu-dra-driver"
Json = dict[str, Any]


@pytest.fixture
def token(cluster: Cluster) -> str:
    """A token as the driver's pod has it, bound to the pod and so to the node."""
    # One that is ending takes its tokens with it.
    return cluster.token_of(cluster.staying_pods("node")[-1]["metadata"]["name"])


def a_slice(version: str, name: str, *, driver: str = "gpu.nvidia.com", pool: str, where: Json) -> Json:
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": driver,
            "pool": {"name": pool, "generation": 1, "resourceSliceCount": 1},
            "devices": [],
            **where,
        },
    }


def denied(cluster: Cluster, token: str, manifest: Json, action: str = "create") -> bool:
    """Whether the API server forbids this to the driver's token."""
    said = refusal(cluster, token, manifest, action)
    assert not said or "orbidden" in said or "denied" in said, said
    return bool(said)


def refusal(cluster: Cluster, token: str, manifest: Json, action: str = "create") -> str:
    """What the API server says to the driver's token; a dry run changes nothing."""
    config = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))
    server = config["clusters"][0]["cluster"]["server"]
    # Without the administrator's certificate, which would win over the token.
    command = [str(cluster.local.kubectl()), "--kubeconfig=/dev/null", "--token", token, "--server", server]
    command += ["--insecure-skip-tls-verify", action, "--dry-run=server", "-f", "-"]
    if action != "delete":
        command.append("--validate=false")
    done = subprocess.run(command, input=json.dumps(manifest), capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


@pytest.mark.core
@pytest.mark.parametrize("version", RESOURCE_VERSIONS)
def test_own_nodes_slice_is_allowed(cluster: Cluster, token: str, version: str) -> None:
    mine = a_slice(version, "permission-test", pool=cluster.node, where={"nodeName": cluster.node})
    assert not denied(cluster, token, mine)


@pytest.mark.core
@pytest.mark.parametrize("version", RESOURCE_VERSIONS)
@pytest.mark.parametrize(
    "foreign",
    [
        {"pool": "other-node", "where": {"nodeName": "other-node"}},
        {"pool": "everybody", "where": {"allNodes": True}},
        {"pool": "gpu-node", "where": {"nodeName": "gpu-node"}, "driver": "nic.example.com"},
    ],
    ids=["other node", "all nodes", "other driver"],
)
def test_access_to_objects_of_others_is_refused(
    cluster: Cluster, token: str, version: str, foreign: Json
) -> None:
    assert denied(cluster, token, a_slice(version, "permission-test", **foreign))


@pytest.mark.core
@pytest.mark.parametrize("action", ["replace", "delete"])
@pytest.mark.parametrize("version", RESOURCE_VERSIONS)
def test_touching_another_nodes_slice_is_refused(
    cluster: Cluster, token: str, version: str, action: str
) -> None:
    other = a_slice("v1", "other-nodes-slice", pool="other-node", where={"nodeName": "other-node"})
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(other))
    try:
        there = {**other, "apiVersion": f"resource.k8s.io/{version}"}
        there["spec"] = {**there["spec"], "pool": {**there["spec"]["pool"], "generation": 9}}
        assert denied(cluster, token, there, action=action)
    finally:
        cluster.kubectl("delete", "resourceslice", "other-nodes-slice")


@dataclass(frozen=True)
class Answer:
    status: int
    body: Json

    def refused_by(self, words: str) -> bool:
        """Whether the server understood it and said no, for this reason."""
        return self.status in (403, 422) and words in self.body["message"]


class Api:
    """The API server with the permissions of a token."""

    def __init__(self, cluster: Cluster, token: str) -> None:
        config = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))
        server = config["clusters"][0]["cluster"]
        self._url = server["server"]
        authority = base64.b64decode(server["certificate-authority-data"]).decode()
        self._tls = ssl.create_default_context(cadata=authority)
        self._token = token

    def ask(self, method: str, path: str, body: Json | None = None, kind: str = "application/json") -> Answer:
        """Writes are dry runs."""
        extra = "" if method == "GET" else ("&" if "?" in path else "?") + "dryRun=All"
        request = urllib.request.Request(
            f"{self._url}{path}{extra}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": kind},
        )
        try:
            with urllib.request.urlopen(request, context=self._tls, timeout=30) as answer:
                return Answer(answer.status, json.load(answer))
        except urllib.error.HTTPError as error:
            return Answer(error.code, json.load(error))


APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
POLICY = "'gpu-dra-driver-own-devices' denied request"


@pytest.fixture(scope="module")
def claims(_cluster: Cluster) -> Iterator[dict[str, tuple[str, str]]]:
    """(driver, pool) of the device that each claim has: ours, one of another node, one of another driver."""
    found = {
        "mine": ("gpu.nvidia.com", _cluster.node),
        "of-another-node": ("gpu.nvidia.com", "other-node"),
        "of-another-driver": ("nic.example.com", _cluster.node),
    }
    _cluster.kubectl("create", "namespace", SPACE)
    for name, (driver, pool) in found.items():
        _cluster.apply([claim(name, request="any", namespace=SPACE)])
        device = {"request": "any", "driver": driver, "pool": pool, "device": "one"}
        node = {"key": "metadata.name", "operator": "In", "values": [pool]}
        allocation = {
            "devices": {"results": [device]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [node]}]},
        }
        status: Json = {"allocation": allocation}
        if name == "of-another-driver":
            status["devices"] = [entry(driver, pool)]
        patch = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
        _cluster.kubectl("patch", "resourceclaim", name, "-n", SPACE, *patch)
    yield found
    _cluster.kubectl("delete", "namespace", SPACE, "--timeout=300s")


def entry(driver: str, pool: str) -> Json:
    return {"driver": driver, "pool": pool, "device": "one", "data": {"seen": "by a test"}}


def path_of(version: str, name: str) -> str:
    return f"/apis/resource.k8s.io/{version}/namespaces/{SPACE}/resourceclaims/{name}"


def apply_status(api: Api, version: str, name: str, devices: list[Json]) -> Answer:
    """Server-side apply of the status of devices, as the driver does it."""
    body = {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "status": {"devices": devices},
    }
    return api.ask("PATCH", f"{path_of(version, name)}/status?fieldManager=test&force=true", body, APPLY)


def harmful(api: Api, version: str, node: str) -> dict[str, Answer]:
    """What a broken node might try with the status of claims."""
    merge = {
        "taking a device from a claim": ("mine", {"allocation": None}),
        "taking a claim for a pod": (
            "mine",
            {"reservedFor": [{"resource": "pods", "name": "x", "uid": "y"}]},
        ),
        "taking another node's device from a claim": ("of-another-node", {"allocation": None}),
        "forgetting another driver's device": ("of-another-driver", {"devices": None}),
    }
    answers = {
        what: api.ask("PATCH", f"{path_of(version, name)}/status", {"status": status}, MERGE)
        for what, (name, status) in merge.items()
    }
    answers["telling another node's device"] = apply_status(
        api, version, "of-another-node", [entry("gpu.nvidia.com", "other-node")]
    )
    answers["telling another driver's device"] = apply_status(
        api,
        version,
        "of-another-driver",
        [{**entry("nic.example.com", node), "data": {"seen": "by a thief"}}],
    )
    return answers


@pytest.mark.parametrize("version", RESOURCE_VERSIONS)
def test_status_of_own_devices_and_nothing_else_of_a_claim(
    cluster: Cluster, token: str, claims: dict[str, tuple[str, str]], version: str
) -> None:
    api = Api(cluster, token)
    driver, pool = claims["mine"]
    reported = apply_status(api, version, "mine", [entry(driver, pool)])
    assert reported.status == 200, reported
    assert [one["data"] for one in reported.body["status"]["devices"]] == [{"seen": "by a test"}]
    for what, answer in harmful(api, version, cluster.node).items():
        assert answer.status in (403, 422), (what, answer)
    # What is not of the status does not change with it.
    for name in claims:
        metadata = {"labels": {"a": "b"}, "finalizers": ["a.example.com/b"]}
        answer = api.ask("PATCH", f"{path_of(version, name)}/status", {"metadata": metadata}, MERGE)
        assert not {"labels", "finalizers"} & answer.body["metadata"].keys(), answer
        assert api.ask("PATCH", path_of(version, name), {"metadata": metadata}, MERGE).status == 403


@pytest.mark.core
def test_own_events_and_no_others(cluster: Cluster, token: str) -> None:
    api = Api(cluster, token)
    events = "/api/v1/namespaces/default/events"
    ours, others = an_event("gpu.nvidia.com", cluster.node), an_event("kubelet", cluster.node)
    foreign = {
        "of another component": others,
        "of another node": an_event("gpu.nvidia.com", "other-node"),
        "whose parts differ": {**ours, "source": others["source"]},
        "without an origin": {key: ours[key] for key in ("apiVersion", "kind", "metadata", "involvedObject")},
    }
    denied = "'gpu-dra-driver-own-events'"
    wait_for("the policy to be in force", lambda: api.ask("POST", events, others).refused_by(denied))
    assert api.ask("POST", events, ours).status == 201
    for what, event in foreign.items():
        assert api.ask("POST", events, event).refused_by(denied), what
    for event, change, is_refused in (
        (ours, {"count": 2}, False),
        (ours, {key: others[key] for key in ("source", "reportingComponent")}, True),
        (others, {"message": "all is well"}, True),
        (others, {key: ours[key] for key in ("source", "reportingComponent")}, True),
    ):
        cluster.apply([event])
        try:
            answer = api.ask("PATCH", f"{events}/permission-test", change, MERGE)
            assert answer.refused_by(denied) if is_refused else answer.status == 200, (event, change, answer)
        finally:
            cluster.kubectl("delete", "event", "permission-test", "-n", "default")


def an_event(component: str, node: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "permission-test", "namespace": "default"},
        "involvedObject": {"kind": "Pod", "namespace": "default", "name": "some-pod"},
        "source": {"component": component, "host": node},
        "reportingComponent": component,
        "reportingInstance": node,
        "type": "Warning",
        "reason": "Test",
        "message": "it is only a test",
    }


RENAMED = ("gpus-elsewhere", "team-a-gpu-dra-driver-x")


@pytest.fixture
def older_server(cluster: Cluster) -> Iterator[None]:
    """Grants what Kubernetes before 1.36 does not check, so that only the policy decides."""
    rules = [
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims/binding"], "verbs": ["patch"]},
        {
            "apiGroups": ["resource.k8s.io"],
            "resources": ["resourceclaims/driver"],
            "verbs": ["associated-node:patch", "arbitrary-node:patch"],
        },
    ]
    rbac = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": OLDER}, "rules": rules}
    accounts = [
        {"kind": "ServiceAccount", "name": name, "namespace": namespace}
        for namespace, name in ((NAMESPACE, "gpu-dra-driver"), RENAMED)
    ]
    binding = {
        "apiVersion": f"{rbac}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": OLDER},
        "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": OLDER},
        "subjects": accounts,
    }
    cluster.apply([role, binding])
    yield
    cluster.kubectl("delete", "clusterrolebinding,clusterrole", OLDER)
    # The API server's authorizer learns of it a little later.
    requested = ("auth", "can-i", "patch", "resourceclaims.resource.k8s.io", "--subresource=binding")
    driver = f"--as=system:serviceaccount:{NAMESPACE}:gpu-dra-driver"
    wait_for(
        "the rights to be gone", lambda: cluster.kubectl(*requested, driver, check=False).startswith("no")
    )


@pytest.mark.usefixtures("older_server")
@pytest.mark.parametrize("version", RESOURCE_VERSIONS)
def test_the_policy_alone_confines_the_status_as_well(
    cluster: Cluster, token: str, claims: dict[str, tuple[str, str]], version: str
) -> None:
    api = Api(cluster, token)
    driver, pool = claims["mine"]
    wait_for(
        "the policy to be what refuses",
        lambda: all(answer.refused_by(POLICY) for answer in harmful(api, version, cluster.node).values()),
    )
    assert apply_status(api, version, "mine", [entry(driver, pool)]).status == 200
    no_one = Api(cluster, cluster.kubectl("create", "token", "gpu-dra-driver", "-n", NAMESPACE).strip())
    assert apply_status(no_one, version, "mine", [entry(driver, pool)]).refused_by(POLICY)


def of_account(name: str, account: str, namespace: str) -> Json:
    """A pod that does nothing, and ends at once."""
    stays = container(command="exec sleep 3600")
    more = {"serviceAccountName": account, "terminationGracePeriodSeconds": 0}
    return pod(name, stays, namespace=namespace, **more)


@pytest.fixture
def renamed(cluster: Cluster) -> Iterator[str]:
    """A token of a driver with another name and namespace; only its policies exist during the test."""
    namespace, account = RENAMED
    text = chart.template({"fullnameOverride": account}, namespace=namespace)
    # Two drivers of one name on a node is another story.
    left_out = ("DaemonSet", "DeviceClass")
    manifests = [entry for entry in yaml.safe_load_all(text) if entry and entry["kind"] not in left_out]
    cluster.kubectl("create", "namespace", namespace)
    policies = ("validatingadmissionpolicies,validatingadmissionpolicybindings", "-l", LABEL)
    before = cluster.get(*policies)
    for entry in before["items"]:
        entry["metadata"] = {key: entry["metadata"][key] for key in ("name", "labels")}
        entry.pop("status", None)
    cluster.kubectl("delete", *policies)
    try:
        cluster.apply(manifests)
        cluster.apply([of_account("renamed", account, namespace)])
        wait_for("the pod to be bound", lambda: cluster.pod("renamed", namespace)["spec"].get("nodeName"))
        yield cluster.token_of("renamed", account, namespace)
    finally:
        kinds = (
            "validatingadmissionpolicies,validatingadmissionpolicybindings,clusterroles,clusterrolebindings"
        )
        mine = [entry["metadata"]["name"] for entry in manifests if entry["kind"] != "Namespace"]
        cluster.kubectl("delete", kinds, "--ignore-not-found", *sorted(set(mine)))
        cluster.kubectl("delete", "namespace", namespace, "--ignore-not-found", "--timeout=300s")
        cluster.apply(before["items"])


@pytest.mark.usefixtures("older_server")
def test_a_renamed_driver_is_confined_all_the_same(
    cluster: Cluster, renamed: str, claims: dict[str, tuple[str, str]]
) -> None:
    api = Api(cluster, renamed)
    slices = "/apis/resource.k8s.io/v1/resourceslices"
    other = a_slice("v1", "permission-test", pool="other-node", where={"nodeName": "other-node"})
    mine = a_slice("v1", "permission-test", pool=cluster.node, where={"nodeName": cluster.node})
    by_name = f"'{RENAMED[1]}-own-{{}}' denied request"
    wait_for(
        "the renamed policy to refuse",
        lambda: api.ask("POST", slices, other).refused_by(by_name.format("node")),
    )
    assert api.ask("POST", slices, mine).status == 201
    wait_for(
        "the renamed policy of the status to refuse",
        lambda: all(
            answer.refused_by(by_name.format("devices"))
            for answer in harmful(api, "v1", cluster.node).values()
        ),
    )
    assert apply_status(api, "v1", "mine", [entry(*claims["mine"])]).status == 200


def test_an_account_that_may_do_everything_is_left_alone(cluster: Cluster) -> None:
    account = ("serviceaccount", "may-do-everything", "-n", "default")
    role = ("clusterrolebinding", "e2e-may-do-everything")
    cluster.kubectl("create", *account)
    try:
        cluster.kubectl(
            *("create", *role, "--clusterrole=cluster-admin", "--serviceaccount=default:may-do-everything")
        )
        api = Api(cluster, cluster.kubectl("create", "token", *account[1:]).strip())
        other = a_slice("v1", "permission-test", pool="other-node", where={"nodeName": "other-node"})
        slices = "/apis/resource.k8s.io/v1/resourceslices"
        wait_for("the right to be known", lambda: api.ask("POST", slices, other).status == 201)
    finally:
        cluster.kubectl("delete", *role, "--ignore-not-found")
        cluster.kubectl("delete", *account)


def test_doctor_proves_both_policies(cluster: Cluster, claims: dict[str, tuple[str, str]]) -> None:
    """In the pod, with its own token."""
    assert claims
    pod = cluster.staying_pods("node")[-1]["metadata"]["name"]
    inside = ("exec", pod, "-n", NAMESPACE, "--", "gpu-dra-driver", "doctor", "-o", "json")
    cluster.start("proof")
    found = findings(cluster.kubectl(*inside, check=False))
    assert found["admission policy"] == (
        "OK",
        "the policy gpu-dra-driver-own-node does not let this account publish slices for another node",
    )
    assert found["claim policy"][0] == "OK"
    assert found["claim policy"][1].startswith("the API server itself does not let this account")

    def seen() -> tuple[str, str]:
        return findings(cluster.kubectl(*inside, check=False))["admission policy"]

    warning = json.dumps({"spec": {"validationActions": ["Warn"]}})
    patch = ("patch", "validatingadmissionpolicybinding", "gpu-dra-driver-own-node", "--type=merge", "-p")
    cluster.kubectl(*patch, warning)
    try:
        wait_for("the API server to heed the binding", lambda: seen()[0] == "WARN")
        assert "the API server accepted this request in a dry run" in seen()[1]
    finally:
        denying = json.dumps({"spec": {"validationActions": ["Deny"]}})
        cluster.kubectl(*patch, denying)
        wait_for("the policy to be back", lambda: seen()[0] == "OK")


def findings(document: str) -> dict[str, tuple[str, str]]:
    """Status and text of each check that doctor printed."""
    return {check["check"]: (check["status"], check["seen"]) for check in json.loads(document)["checks"]}


def test_rights_are_the_contract_and_nothing_more(cluster: Cluster, token: str) -> None:
    """What the API server itself says that the token may do, beyond what every account may."""
    found, urls = rights_of(cluster, token)
    everybodys, _ = rights_of(cluster, cluster.kubectl("create", "token", "default", "-n", "default").strip())
    dra = "resource.k8s.io"
    every = ("list", "watch", "create", "update", "delete")
    assert found - everybodys == {
        (dra, "resourceclaims", "get"),
        (dra, "resourceclaims/status", "patch"),
        (dra, "resourceclaims/driver", "associated-node:patch", "gpu.nvidia.com"),
        *((dra, "resourceslices", verb) for verb in every),
        ("gpu.nvidia.com", "drivers", "confine"),
        ("", "nodes", "get"),
        ("", "events", "create"),
        ("", "events", "patch"),
    }
    assert urls <= {"get"}


def rights_of(cluster: Cluster, token: str) -> tuple[set[tuple[str, ...]], set[str]]:
    """Group, resource, verb and names of each right in the namespace `default`, and the verbs for other URLs."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": "default"},
    }
    answer = Api(cluster, token).ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", review)
    rights = {
        (group, resource, verb, *rule.get("resourceNames", ()))
        for rule in answer.body["status"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    return rights, {verb for rule in answer.body["status"]["nonResourceRules"] for verb in rule["verbs"]}


def test_attacks_with_a_stolen_token_are_refused(
    cluster: Cluster, token: str, claims: dict[str, tuple[str, str]]
) -> None:
    api = Api(cluster, token)
    pod = cluster.staying_pods("node")[-1]["metadata"]["name"]
    label = {"metadata": {"labels": {"a": "b"}}}
    pods, core = f"/api/v1/namespaces/{NAMESPACE}/pods", "/api/v1"
    policies = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
    attempts: list[tuple[str, str, Json | None]] = [
        ("DELETE", f"{pods}/{pod}", None),
        ("GET", pods, None),
        ("POST", f"{pods}/{pod}/eviction", {"apiVersion": "policy/v1", "kind": "Eviction"}),
        ("DELETE", path_of("v1", "mine"), None),
        ("DELETE", path_of("v1", "of-another-node"), None),
        ("GET", "/apis/resource.k8s.io/v1/resourceclaims", None),
        ("DELETE", "/apis/resource.k8s.io/v1/resourceslices", None),
        ("GET", f"{core}/secrets", None),
        ("GET", f"{core}/namespaces/{NAMESPACE}/secrets", None),
        ("GET", f"{core}/namespaces/{NAMESPACE}/configmaps", None),
        ("GET", f"{core}/nodes", None),
        ("PATCH", f"{core}/nodes/{cluster.node}", label),
        ("PATCH", f"{core}/nodes/{cluster.node}/status", {"status": {"capacity": {"example.com/x": "1"}}}),
        ("DELETE", f"{core}/nodes/{cluster.node}", None),
        ("GET", f"{core}/events", None),
        ("DELETE", f"{core}/namespaces/default/events", None),
        ("POST", f"{core}/namespaces/{NAMESPACE}/serviceaccounts/gpu-dra-driver/token", {}),
        ("PATCH", "/apis/resource.k8s.io/v1/deviceclasses/gpu.nvidia.com", label),
        ("PATCH", f"{policies}/gpu-dra-driver-own-node", label),
        ("PATCH", "/apis/rbac.authorization.k8s.io/v1/clusterroles/gpu-dra-driver", label),
        ("PATCH", f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/gpu-dra-driver", label),
    ]
    for method, path, body in attempts:
        answer = api.ask(method, path, body, MERGE if method == "PATCH" else "application/json")
        assert answer.refused_by("cannot"), (method, path, answer)


def test_the_token_ends_with_its_pod(cluster: Cluster) -> None:
    """A copied token is useless when the pod is gone."""
    cluster.apply([of_account("short-lived", "gpu-dra-driver", NAMESPACE)])
    wait_for("the pod to be bound", lambda: cluster.pod("short-lived", NAMESPACE)["spec"].get("nodeName"))
    api = Api(cluster, cluster.token_of("short-lived"))
    slices = "/apis/resource.k8s.io/v1/resourceslices"
    assert api.ask("GET", slices).status == 200
    cluster.kubectl("delete", "pod", "short-lived", "-n", NAMESPACE, "--timeout=300s")
    wait_for("the token to be refused", lambda: api.ask("GET", slices).status == 401)
