"""What `validate --server` knows of a cluster: its classes, and the claims and templates that pods name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playground.apiserver import PlaygroundApiServer

from dra_driver.cli.validation.cluster_objects import read_cluster, references
from dra_driver.cli.validation.documents import read_documents
from dra_driver.cli.validation.manifest_check import DocumentReport, check_documents
from dra_driver.cli.validation.rules.classes import standard_classes
from dra_driver.kube.endpoint import load_endpoint
from tests.fakes.samples import DRIVER
from tests.integration.test_process import call

Json = dict[str, Any]
GROUP = "resource.k8s.io"


@pytest.fixture
def server() -> Iterator[PlaygroundApiServer]:
    with PlaygroundApiServer() as server:
        for entry in standard_classes(DRIVER).values():
            server.add("deviceclasses", dict(entry), group=GROUP)
        yield server


@pytest.fixture
def reports(server: PlaygroundApiServer, tmp_path: Path) -> Callable[..., list[DocumentReport]]:
    """The reports on documents, with what the cluster has."""

    def reports(*contents: Json, namespace: str = "default") -> list[DocumentReport]:
        path = tmp_path / "x.yaml"
        path.write_text(yaml.safe_dump_all(contents))
        documents = list(read_documents([str(path)], ["sharing"]))
        server.write_kubeconfig(tmp_path / "kubeconfig")
        cluster = read_cluster(load_endpoint(tmp_path / "kubeconfig"), references(documents, namespace))
        return check_documents(documents, DRIVER, cluster=cluster, namespace=namespace)

    return reports


def claim(name: str, class_name: str = "gpu.nvidia.com", count: int = 1, **metadata: Any) -> Json:
    exactly = {"deviceClassName": class_name, "count": count}
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, **metadata},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    }


def pod(name: str, *entries: Json) -> Json:
    resources = {"claims": [{"name": entry["name"]} for entry in entries]}
    containers = [{"name": "c", "image": "i", "resources": resources}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": containers, "resourceClaims": list(entries)},
    }


def test_classes_claims_and_templates_of_the_cluster_count(
    reports: Callable[..., list[DocumentReport]], server: PlaygroundApiServer
) -> None:
    server.add("deviceclasses", {"metadata": {"name": "own.example.com"}, "spec": {}}, group=GROUP)
    server.add("resourceclaims", claim("there", namespace="default"), group=GROUP)
    of_own, of_gone, of_profile, of_pod = reports(
        claim("a", "own.example.com"),
        claim("b", "gone.example.com"),
        claim("c", "mig-1g.10gb.nvidia.com"),
        pod("p", {"name": "x", "resourceClaimName": "there"}, {"name": "y", "resourceClaimName": "absent"}),
    )
    assert of_own.faults == []
    for report, name in ((of_gone, "gone.example.com"), (of_profile, "mig-1g.10gb.nvidia.com")):
        assert report.faults == [
            f"DeviceClass {name} is not in the cluster and not in the files: the claim gets no devices"
        ]
    assert of_pod.hints == [
        "ResourceClaim default/absent is not in the files and not in the cluster: the pods wait for it"
    ]


def test_the_namespace_of_documents_that_name_none_is_that_of_the_context(
    reports: Callable[..., list[DocumentReport]], server: PlaygroundApiServer, tmp_path: Path
) -> None:
    server.add("namespaces", {"metadata": {"name": "team"}})
    template = claim("t") | {"kind": "ResourceClaimTemplate", "spec": {"spec": claim("x")["spec"]}}
    template["metadata"]["namespace"] = "team"
    server.add("resourceclaimtemplates", template, group=GROUP)
    [report] = reports(pod("p", {"name": "x", "resourceClaimTemplateName": "t"}), namespace="team")
    assert report.hints == []
    kubeconfig = tmp_path / "own"
    server.write_kubeconfig(kubeconfig)
    document = json.loads(kubeconfig.read_text())
    assert load_endpoint(kubeconfig).namespace == "default"
    document["contexts"][0]["context"]["namespace"] = "team"
    kubeconfig.write_text(json.dumps(document))
    assert load_endpoint(kubeconfig).namespace == "team"


def test_the_command_says_whether_it_read_the_cluster(server: PlaygroundApiServer, tmp_path: Path) -> None:
    server.write_kubeconfig(tmp_path / "kubeconfig")
    options = ["--server", "--kubeconfig", str(tmp_path / "kubeconfig"), "--simulate", "t4-4"]
    file = tmp_path / "claims.yaml"
    file.write_text(yaml.safe_dump_all([claim("a"), pod("p", {"name": "x", "resourceClaimName": "there"})]))
    server.add("resourceclaims", claim("there", namespace="default"), group=GROUP)
    done = call("validate", str(file), *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"the cluster {server.url}: DeviceClasses and claims were read"
    assert server.writes() == []
    server.faults.fail(1, 403, method="GET", path="/resourceclaims/there")
    done = call("validate", str(file), *options)
    assert done.returncode == 3
    assert "not read: cannot get ResourceClaim default/there" in done.stdout.splitlines()[-1]
    server.stop()
    done = call("validate", str(file), *options, "-o", "json")
    assert (done.returncode, done.stderr) == (3, "")
    shown = json.loads(done.stdout)
    assert "cannot connect to the API server" in shown["server"]["problem"]
    assert [one["verdict"] for one in shown["documents"]] == ["OK", "not judged"]
    file.write_text(yaml.safe_dump(claim("a", count=-1)))
    assert call("validate", str(file), *options).returncode == 1
    done = call("validate", str(file), "--context", "x")
    assert (done.returncode, done.stdout) == (2, "")
