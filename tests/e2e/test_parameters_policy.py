"""The API server refuses by a policy what a Prepare would refuse: the table of tests/api, with the same words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.client import MERGE_PATCH, ApiClient
from dra_driver.kube.endpoint import load_endpoint
from tests.api.parameter_table import CLAIMS, PARAMETERS, Claim, Json, Parameters, mps, parameters
from tests.deploy.test_daemonset import installed, one
from tests.e2e.conftest import RESOURCE_VERSIONS, Cluster, wait_for

pytestmark = pytest.mark.cluster

DRIVER = "gpu.nvidia.com"
POLICY = "gpu-dra-driver-parameters"
DENIED = f"ValidatingAdmissionPolicy '{POLICY}' with binding '{POLICY}' denied request: "
GROUP = "/apis/resource.k8s.io"
PATHS = {
    "ResourceClaim": "spec.devices.",
    "ResourceClaimTemplate": "spec.spec.devices.",
    "DeviceClass": "spec.",
}


PLACES = {
    "ResourceClaim": "resourceclaims",
    "ResourceClaimTemplate": "resourceclaimtemplates",
    "DeviceClass": "deviceclasses",
}
NAME = "parameters.example.com"


def made(kind: str, devices: Json, version: str = "v1") -> Json:
    """A claim, template or class with these devices."""
    spec = {
        "ResourceClaim": {"devices": devices},
        "ResourceClaimTemplate": {"spec": {"devices": devices}},
        "DeviceClass": {"config": devices["config"]},
    }[kind]
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": kind,
        "metadata": {"name": NAME},
        "spec": spec,
    }


class Server:
    """An API server, and what it says of claims, templates and classes."""

    def __init__(self, kubeconfig: Path) -> None:
        self.client = ApiClient(load_endpoint(kubeconfig), timeout_s=60)

    def refusal(
        self, kind: str, devices: Json, version: str = "v1", *, namespace: str = "default"
    ) -> str | None:
        """Why an object with these devices may not be created; None if it may."""
        inside = "" if kind == "DeviceClass" else f"namespaces/{namespace}/"
        place = f"{GROUP}/{version}/{inside}{PLACES[kind]}"
        return self.requested("POST", place, made(kind, devices, version), dry_run=True)

    def requested(
        self, method: str, path: str, body: Json | None = None, *, dry_run: bool = False
    ) -> str | None:
        """Why a request was refused; None if it was not."""
        try:
            self.client.request(
                method,
                path,
                action="ask",
                body=body,
                query={"dryRun": "All"} if dry_run else {},
                content_type=MERGE_PATCH if method == "PATCH" else "application/json",
            )
        except ApiRejectedError as error:
            return str(error)
        return None


@pytest.fixture
def server(cluster: Cluster) -> Iterator[Server]:
    requested = Server(cluster.local.kubeconfig())
    # A moment after an install the API server may not know the policy yet.
    bad = with_parameters({})
    wait_for("the policy to be in force", lambda: DENIED in str(requested.refusal("ResourceClaim", bad)))
    yield requested
    requested.client.close()


def with_parameters(value: Any, **exactly: Any) -> Json:
    """Parameters of another driver, which are none of ours, and then these; `exactly` is what else the request says."""
    others = {"driver": "nic.example.com", "parameters": {"kind": "Nic"}}
    return {
        "requests": [{"name": "a", "exactly": {"deviceClassName": "gpu.nvidia.com", **exactly}}],
        "config": [{"opaque": others}, {"opaque": {"driver": DRIVER, "parameters": value}}],
    }


def in_version(devices: Json, version: str) -> Json:
    """Requests of v1beta1 have no `exactly`."""
    if version != "v1beta1":
        return devices
    requests = [
        {"name": request["name"], **request.get("exactly", {}), **without(request, "name", "exactly")}
        for request in devices["requests"]
    ]
    return devices | {"requests": requests}


def without(given: Json, *names: str) -> Json:
    return {name: value for name, value in given.items() if name not in names}


def reported(refusal: str | None) -> list[str]:
    """The faults in a refusal by the policy. Their order is the server's."""
    _, by_the_policy, text = str(refusal).partition(DENIED)
    assert by_the_policy, refusal
    return split(text.removesuffix(" (HTTP 422)"))


def wanted(faults: tuple[str, ...], path: str) -> list[str]:
    return split("; ".join(f"{path}{fault}" for fault in faults))


def split(text: str) -> list[str]:
    """The sentences of faults, some of which have two parts, in an order that does not depend on the server."""
    return sorted(text.split("; "))


def judge(server: Server, case: Parameters, kind: str, version: str, namespace: str) -> None:
    """With adminAccess, which some parameters need."""
    devices = in_version(with_parameters(case.value, adminAccess=True), version)
    refusal = server.refusal(kind, devices, version, namespace=namespace)
    if case.refused_by_server:
        assert case.refused_by_server in str(refusal)
    elif case.policy or not case.faults:
        assert refusal is None
    else:
        assert reported(refusal) == wanted(case.faults, f"{PATHS[kind]}config[1].opaque.parameters.")


@pytest.fixture(scope="module")
def admin_namespace(_cluster: Cluster) -> Iterator[str]:
    """A namespace in which Kubernetes allows adminAccess; it checks that before the policies."""
    _cluster.make_namespace("parameters", {"resource.kubernetes.io/admin-access": "true"})
    yield "parameters"
    _cluster.kubectl("delete", "namespace", "parameters", "--timeout=300s")


@pytest.mark.parametrize("kind", PATHS)
def test_parameters(server: Server, admin_namespace: str, kind: str) -> None:
    for case in PARAMETERS:
        judge(server, case, kind, "v1", admin_namespace)


@pytest.mark.parametrize("version", RESOURCE_VERSIONS[1:])
def test_every_version_is_judged(server: Server, admin_namespace: str, version: str) -> None:
    for case in PARAMETERS[:: len(PARAMETERS) // 8]:
        for kind in PATHS:
            judge(server, case, kind, version, admin_namespace)


@pytest.mark.parametrize("version", RESOURCE_VERSIONS)
def test_parameters_that_do_not_fit_the_claim(server: Server, admin_namespace: str, version: str) -> None:
    for case in CLAIMS:
        judge_claim(server, case, version, admin_namespace)


def judge_claim(server: Server, case: Claim, version: str, namespace: str) -> None:
    for kind in ("ResourceClaim", "ResourceClaimTemplate"):
        refusal = server.refusal(kind, in_version(case.devices, version), version, namespace=namespace)
        if case.faults:
            assert reported(refusal) == wanted(case.faults, PATHS[kind])
        else:
            assert refusal is None, case.name


def test_many_faults_are_reported_as_far_as_the_server_takes_a_text(server: Server) -> None:
    many = parameters(**{f"unknown{number}": 1 for number in range(500)})
    (text,) = [str(server.refusal("ResourceClaim", with_parameters(many)))]
    assert "opaque.parameters.unknown" in text


def test_control_characters_of_a_name_do_not_reach_the_terminal(server: Server) -> None:
    value = parameters(**{"a\x1b[31mb\u202ec\n": 1})
    [fault] = reported(server.refusal("ResourceClaim", with_parameters(value)))
    assert fault == 'spec.devices.config[1].opaque.parameters."a [31mb c\\n": unknown field'


@pytest.mark.parametrize("limits", [16, 650], ids=["of usual size", "of 10 KiB"])
def test_a_fault_is_found_in_the_first_eight_entries_of_the_largest_claim(
    server: Server, limits: int
) -> None:
    """The API server limits the cost of a policy; Prepare checks the other entries."""
    names = [f"request-{number}" for number in range(32)]
    requested = [{"name": name, "exactly": {"deviceClassName": "gpu.nvidia.com"}} for name in names]
    by_device = {str(number): "10Gi" for number in range(limits)}

    def refusal(faulty: int) -> str | None:
        entries = []
        for number in range(32):
            multi_user = "yes" if number == faulty else True
            value = mps(defaultPerDevicePinnedMemoryLimit=by_device, multiUser=multi_user)
            entries.append({"requests": names, "opaque": {"driver": DRIVER, "parameters": value}})
        return server.refusal("ResourceClaim", {"requests": requested, "config": entries})

    path = "spec.devices.config[7].opaque.parameters.sharing.mpsConfig"
    assert reported(refusal(7)) == [f"{path}.multiUser: must be true or false"]
    assert refusal(8) is None


def test_claim_stored_before_the_policy_can_still_change_and_end(cluster: Cluster, server: Server) -> None:
    """Labels, finalizers, status and deletion of claims whose parameters the policy would refuse."""
    cluster.kubectl("delete", "validatingadmissionpolicybinding", POLICY)
    bad = with_parameters(parameters(shring=1))
    try:
        for kind in PATHS:
            # kubectl writes JSON without blanks. The API server keeps parameters as they were written, a patch writes
            # them without blanks, and what differs in blanks is another spec.
            create = partial(
                cluster.kubectl, "create", "-f", "-", stdin=json.dumps(made(kind, bad)), check=False
            )
            wait_for(f"a {kind} to be let in", create)
    finally:
        cluster.apply([one(installed(), "ValidatingAdmissionPolicyBinding", POLICY)])
    try:
        wait_for(
            "the policy to be back",
            lambda: DENIED in str(server.refusal("ResourceClaimTemplate", bad)),  # or it only exists already
        )
        base = f"{GROUP}/v1/namespaces/default"
        places = (f"{base}/resourceclaims", f"{base}/resourceclaimtemplates", f"{GROUP}/v1/deviceclasses")
        for place in places:
            for finalizers in (["a.example.com/b"], None):
                change = {"metadata": {"labels": {"a": "b"}, "finalizers": finalizers}}
                assert server.requested("PATCH", f"{place}/{NAME}", change) is None
        status = {"status": {"devices": None}}
        assert server.requested("PATCH", f"{places[0]}/{NAME}/status", status) is None
        # The spec of a class may change, and is then checked.
        config = [{"opaque": {"driver": DRIVER, "parameters": parameters(sharing=1)}}]
        changed = server.requested("PATCH", f"{places[2]}/{NAME}", {"spec": {"config": config}})
        assert reported(changed) == ["spec.config[0].opaque.parameters.sharing: must be an object"]
    finally:
        for kind in PATHS:
            cluster.kubectl("delete", kind.lower(), NAME, "--ignore-not-found", "--timeout=60s")


def test_the_policy_compiles_without_a_warning(cluster: Cluster, server: Server) -> None:
    assert server
    found = json.loads(cluster.kubectl("get", "validatingadmissionpolicy", POLICY, "-o", "json"))
    assert not found.get("status", {}).get("typeChecking", {}).get("expressionWarnings")
