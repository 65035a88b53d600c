"""`validate` compared with the real cluster: what the API server refuses, and the claims that the scheduler
creates for extended resources.
"""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dra_driver.cli.validation.rules.manifests import object_faults
from dra_driver.cli.validation.rules.pods import pod_faults
from dra_driver.cli.validation.rules.taints import taint_rule_faults
from dra_driver.errors import ApiRejectedError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint
from tests.e2e.conftest import Cluster, Json, container, wait_for

pytestmark = pytest.mark.cluster

SPACE = "validate"
DRIVER = "gpu.nvidia.com"
SELECTORS = [{"cel": {"expression": f'device.attributes["{DRIVER}"].type == "gpu"'}}]
TOLERATION = {"key": "a/b", "operator": "Equal", "value": "x", "effect": "NoSchedule"}
EXACTLY = {
    "deviceClassName": DRIVER, "allocationMode": "ExactCount", "count": 2, "selectors": SELECTORS,
    "tolerations": [TOLERATION], "capacity": {"requests": {"memory": "10Gi"}},
}  # fmt: skip
ALTERNATIVES = [
    {"name": "s", "deviceClassName": "mig.nvidia.com", "count": 1, "selectors": SELECTORS},
    {"name": "t", "deviceClassName": DRIVER, "allocationMode": "All"},
]
DEVICES = {
    "requests": [{"name": "a", "exactly": EXACTLY}, {"name": "b", "firstAvailable": ALTERNATIVES}],
    "constraints": [
        {"requests": ["a", "b/s"], "matchAttribute": f"{DRIVER}/nvlinkDomain"},
        {"distinctAttribute": f"{DRIVER}/uuid"},
    ],
    "config": [{"requests": ["a"], "opaque": {"driver": "other.example.com", "parameters": {}}}],
}
RESOURCES = {
    "limits": {"nvidia.com/gpu": "1", "cpu": "1"},
    "requests": {"nvidia.com/gpu": 1},
    "claims": [{"name": "g", "request": "a"}, {"name": "h"}],
}
SPECS: list[tuple[str, str, str, Json]] = [
    ("resource.k8s.io/v1", "ResourceClaim", "resourceclaims", {"devices": DEVICES}),
    ("resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates",
     {"metadata": {"labels": {"a": "b"}}, "spec": {"devices": DEVICES}}),
    ("resource.k8s.io/v1", "DeviceClass", "deviceclasses",
     {"selectors": SELECTORS, "extendedResourceName": "nvidia.com/gpu"}),
    ("resource.k8s.io/v1", "DeviceTaintRule", "devicetaintrules",
     {"deviceSelector": {"driver": DRIVER, "pool": "p", "device": "gpu-0"},
      "taint": {"key": "a/b", "value": "x", "effect": "NoSchedule"}}),
    ("v1", "Pod", "pods",
     {"resources": RESOURCES,
      "resourceClaims": [{"name": "g", "resourceClaimName": "c"}, {"name": "h", "resourceClaimTemplateName": "t"}]}),
]  # fmt: skip
"""Version, kind, resource, and a spec that is right; of a pod what `validate` judges."""
VALUES = [
    None, 0, -1, 1, 2, 40, "", "x", "X_y", "1", "a/b", "a", "b", DRIVER, "All", "Exists", "Equal", "NoExecute", True,
    [], {}, "10Gi", "-1", "1.5", "abc gi", "x" * 70, ["a"], ["a", "a"], ["zz"], {"a": "b"}, "true", "1 + 1",
    "device.foo == 1", f"{DRIVER}/nvlinkDomain", "GPU.nvidia.com", "nvidia.com/gpu",
]  # fmt: skip
KEYS = [
    "count", "selectors", "adminAccess", "tolerations", "allocationMode", "expression", "driver", "requests", "name",
    "limits", "bogus", "operator", "value", "effect", "key", "capacity", "matchAttribute", "distinctAttribute",
    "resourceClaimName", "request", "nvidia.com/gpu", "memory", "gpu", "nvidia.com.gpu", "claims", "exactly", "device",
    "extendedResourceName", "firstAvailable",
]  # fmt: skip


@pytest.fixture
def space(cluster: Cluster) -> Iterator[str]:
    cluster.make_namespace(SPACE, {"resource.kubernetes.io/admin-access": "true"})
    yield SPACE
    cluster.kubectl("delete", "namespace", SPACE, "--timeout=300s")


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Each object or list with each of its keys, at every depth."""
    inner = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(inner):
        yield content, key
        if isinstance(value, (dict, list)):
            yield from places(value)


def changed(chance: random.Random, spec: Json) -> Json:
    """The spec with one part taken away, replaced, added or written twice."""
    spec = copy.deepcopy(spec)
    inside, key = chance.choice([*places(spec)])
    value = inside[key]
    match chance.randrange(4):
        case 0:
            del inside[key]
        case 1 if isinstance(value, dict):
            value[chance.choice(KEYS)] = copy.deepcopy(chance.choice(VALUES))
        case 2 if isinstance(value, list) and value:
            value.append(copy.deepcopy(chance.choice(value)))
        case _:
            inside[key] = copy.deepcopy(chance.choice(VALUES))
    return spec


def found(document: Json) -> list[str]:
    if document["kind"] == "Pod":
        return pod_faults(document["spec"], "spec")
    if document["kind"] == "DeviceTaintRule":
        return taint_rule_faults(document)
    return object_faults(document, DRIVER)


def test_documents_that_the_api_server_refuses_have_faults(cluster: Cluster, space: str) -> None:
    """One way only: `validate` also finds faults in what the API server takes, such as a claim without devices."""
    chance = random.Random(20261127)
    client = ApiClient(load_endpoint(cluster.local.kubeconfig()))
    refused, kinder = 0, []
    for _ in range(1500):
        version, kind, plural, spec = chance.choice(SPECS)
        made = changed(chance, spec)
        if kind == "Pod":
            made["containers"] = [{"name": "x", "image": "i", "resources": made.pop("resources", {})}]
        document = {"apiVersion": version, "kind": kind, "metadata": {"name": "c"}, "spec": made}
        where = "" if kind.startswith("Device") else f"/namespaces/{space}"
        path = f"/{'api' if version == 'v1' else 'apis'}/{version}{where}/{plural}"
        query = {"dryRun": "All", "fieldValidation": "Strict"}
        try:
            client.request("POST", path, action="try it", query=query, body=document)
        except ApiRejectedError as error:
            refused += 1
            if not found(document):
                kinder.append((document, str(error)))
    assert kinder == []
    assert refused > 500


def test_extended_resources_become_the_claim_that_the_scheduler_makes(
    cluster: Cluster, space: str, tmp_path: Path
) -> None:
    resource = "deviceclass.resource.kubernetes.io/gpu.nvidia.com"

    def limited(name: str, gpus: int, command: str, **more: str) -> Json:
        limits = {"limits": {resource: str(gpus)}}
        return container(name, command=command, **more) | {"resources": limits}

    stay = "exec sleep 3600"
    # A pod takes three devices: two for what stays, and one more while the first of its init containers runs.
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "initContainers": [limited("first", 3, "true"), limited("beside", 1, stay, restartPolicy="Always")],
        "containers": [limited("main", 1, stay)],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "three"},
        "spec": {"template": {"spec": pod}},
    }
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "dra_driver.cli.main", "validate", str(file), "--simulate", "dgx-h100"]
    done = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    [report] = json.loads(done.stdout)["documents"]
    cluster.kubectl("apply", "-n", space, "-f", "-", stdin=json.dumps(job))

    def is_placed() -> bool:
        pods = cluster.get("pods", "-n", space, "-l", "job-name=three")["items"]
        return ["nodeName" in pod["spec"] for pod in pods] == [True]

    wait_for("a pod with a node", is_placed)
    [made] = cluster.get("resourceclaims", "-n", space)["items"]
    requests = made["spec"]["devices"]["requests"]
    assert [one["exactly"]["count"] for one in requests] == [1, 1, 1]
    assert {one["name"] for one in requests} == {one["request"] for one in report["devices"]}
