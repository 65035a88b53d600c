"""`validate` against the real thing: what the API server takes and refuses, each in one sentence and with nothing
stored, and which claims the scheduler makes for extended resources."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import Cluster, Json, claim_and_pod, container, gpu_config, wait_for
from tests.e2e.conftest import claim as a_claim

pytestmark = pytest.mark.cluster

SPACE = "validate"
QUOTA = "gpu.nvidia.com.deviceclass.resource.k8s.io/devices"


@pytest.fixture
def space(cluster: Cluster) -> Iterator[str]:
    """A namespace in which one GPU may be asked for, and whose pods had better be restricted."""
    cluster.make_namespace(SPACE, {"pod-security.kubernetes.io/warn": "restricted"})
    cluster.kubectl("create", "quota", "gpus", f"--hard={QUOTA}=1", "-n", SPACE)
    yield SPACE
    cluster.kubectl("delete", "namespace", SPACE, "--timeout=300s")


def validate(kubeconfig: Path, documents: list[Json], directory: Path) -> tuple[int, list[Json], str]:
    """Exit code, a report of each document, and the last line for people."""
    file = directory / "documents.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    command = [
        sys.executable, "-m", "dra_driver.cli.main", "validate", str(file), "--simulate", "dgx-h100", "--server",
    ]  # fmt: skip
    command += ["--kubeconfig", str(kubeconfig), "-n", SPACE]
    done = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == done.returncode
    return done.returncode, json.loads(done.stdout)["documents"], shown.stdout.splitlines()[-1]


def claim(name: str, device_class: str = "gpu.nvidia.com", **exactly: Any) -> Json:
    """One without a namespace, as most files have it."""
    made = a_claim(name, device_class, request="gpu", **{"count": 1, **exactly})
    del made["metadata"]["namespace"]
    return made


def test_what_the_api_server_takes_and_refuses_is_told(cluster: Cluster, space: str, tmp_path: Path) -> None:
    there = claim("there")
    cluster.kubectl("apply", "-n", space, "-f", "-", stdin=json.dumps(there))
    _, pod = claim_and_pod("p")
    del pod["metadata"]["namespace"]
    template = {"metadata": {"labels": {"a": "b"}}, "spec": pod["spec"] | {"restartPolicy": "Always"}}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": {"replicas": 2, "selector": {"matchLabels": {"a": "b"}}, "template": template},
    }
    refused = claim("refused", parameters=gpu_config(sharing={"strategy": "Magic"}))
    elsewhere = claim("elsewhere")
    elsewhere["metadata"]["namespace"] = "not-there-yet"
    missing = claim("missing")
    missing["metadata"]["namespace"] = "nowhere"
    accounted = pod | {
        "metadata": {"name": "accounted"},
        "spec": pod["spec"] | {"serviceAccountName": "trainer"},
    }
    documents: list[Json] = [
        there,
        claim("there", count=2),
        claim("second"),
        deployment,
        refused,
        claim("misspelt", cuont=2),
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "not-there-yet"}},
        elsewhere,
        missing,
        claim("no-class", "no.example.com"),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "trainer"}},
        accounted,
        {"apiVersion": "example.com/v1", "kind": "Unknown", "metadata": {"name": "u"}},
    ]
    code, reports, line = validate(cluster.local.kubeconfig(), documents, tmp_path)
    assert code == 1
    told = [
        next((text for text in (*one["faults"], *one["notes"]) if text.startswith("API server: ")), "")
        for one in reports
    ]
    quota = f"exceeded quota: gpus, requested: {QUOTA}=1, used: {QUOTA}=1, limited: {QUOTA}=1"
    policy = "ValidatingAdmissionPolicy 'gpu-dra-driver-parameters'"
    assert told[0] == "API server: accepts it; it exists already"
    # A new object is looked at before its name is: the quota comes first.
    assert told[1].startswith("API server: it exists already, and as a change") or quota in told[1]
    assert told[2].endswith(quota)
    assert told[3] == "API server: accepts it"
    assert any("restricted" in hint for hint in reports[3]["hints"] if hint.startswith("API server warns: "))
    assert policy in told[4], told[4]
    assert "unknown field" in told[5]
    assert told[6] == "API server: accepts it"
    assert "needs Namespace not-there-yet (" in told[7]
    assert told[8] == 'API server: namespaces "nowhere" not found'
    assert "DeviceClass no.example.com is not in the cluster and not in the files" in reports[9]["faults"][0]
    assert told[10] == "API server: accepts it"
    assert "needs ServiceAccount trainer (" in told[11]
    assert told[12].startswith("API server: it has no kind Unknown of example.com/v1")
    assert " refuses " in line
    claims = cluster.get("resourceclaims", "-n", space)["items"]
    assert [one["metadata"]["name"] for one in claims] == ["there"]


def test_a_user_without_the_right_is_told(cluster: Cluster, space: str, tmp_path: Path) -> None:
    token = cluster.kubectl("create", "token", "default", "-n", space).strip()
    document = yaml.safe_load(cluster.local.kubeconfig().read_text())
    document["users"] = [{"name": one["name"], "user": {"token": token}} for one in document["users"]]
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(document))
    kubeconfig.chmod(0o600)
    code, (report,), line = validate(kubeconfig, [claim("a")], tmp_path)
    assert (code, report["faults"]) == (3, [])
    note = report["notes"][-1]
    assert note.startswith("API server: not asked: resourceclaims.resource.k8s.io is forbidden: ")
    assert note.endswith(f'in the namespace "{space}"')
    assert line.endswith("was not asked about 1")


def test_extended_resources_become_the_claim_that_the_scheduler_makes(
    cluster: Cluster, space: str, tmp_path: Path
) -> None:
    cluster.kubectl("delete", "quota", "gpus", "-n", space)
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
    code, (report,), _ = validate(cluster.local.kubeconfig(), [job], tmp_path)
    assert (code, report["server"], report["faults"]) == (0, "accepted", [])
    cluster.kubectl("apply", "-n", space, "-f", "-", stdin=json.dumps(job))

    def is_placed() -> bool:
        pods = cluster.get("pods", "-n", space, "-l", "job-name=three")["items"]
        return ["nodeName" in pod["spec"] for pod in pods] == [True]

    wait_for("a pod with a node", is_placed)
    [made] = cluster.get("resourceclaims", "-n", space)["items"]
    requests = made["spec"]["devices"]["requests"]
    assert [one["exactly"]["count"] for one in requests] == [1, 1, 1]
    assert {one["name"] for one in requests} == {one["request"] for one in report["devices"]}
