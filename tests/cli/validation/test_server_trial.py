"""What `validate --server` says: documents are tried by dry run, and each answer is one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playground.apiserver import PlaygroundApiServer

from dra_driver.cli.validation.documents import Document, read_documents
from dra_driver.cli.validation.manifest_check import DocumentReport, check_documents, references
from dra_driver.cli.validation.rules.classes import standard_classes
from dra_driver.cli.validation.server_trial import (
    Answer,
    Made,
    ServerFindings,
    ServerTrial,
    refused,
    unknown_kind,
)
from dra_driver.kube.client import warning_text
from dra_driver.kube.endpoint import load_endpoint
from tests.fakes.samples import DRIVER
from tests.fakes.tables import tabled
from tests.integration.test_process import call

Json = dict[str, Any]
Asked = tuple[ServerFindings, list[DocumentReport]]
GROUP = "resource.k8s.io"


@pytest.fixture
def server() -> Iterator[PlaygroundApiServer]:
    with PlaygroundApiServer() as server:
        for entry in standard_classes(DRIVER).values():
            server.add("deviceclasses", dict(entry), group=GROUP)
        yield server


@pytest.fixture
def ask(server: PlaygroundApiServer, tmp_path: Path) -> Callable[..., Asked]:
    """The findings about documents, and the reports that they lead to."""

    def ask(*contents: Json, namespace: str = "default") -> Asked:
        path = tmp_path / "x.yaml"
        path.write_text(yaml.safe_dump_all(contents))
        documents = list(read_documents([str(path)], ["sharing"]))
        server.write_kubeconfig(tmp_path / "kubeconfig")
        trial = ServerTrial(load_endpoint(tmp_path / "kubeconfig"), namespace)
        findings = trial.findings(documents, references(documents, namespace))
        return findings, check_documents(documents, DRIVER, server=findings, namespace=namespace)

    return ask


def claim(name: str, class_name: str = "gpu.nvidia.com", count: int = 1, **metadata: Any) -> Json:
    exactly = {"deviceClassName": class_name, "count": count}
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, **metadata},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    }


def template(name: str, **metadata: Any) -> Json:
    return claim(name, **metadata) | {"kind": "ResourceClaimTemplate", "spec": {"spec": claim("x")["spec"]}}


def pod(name: str, *entries: Json, **metadata: Any) -> Json:
    container = {
        "name": "c", "image": "i", "resources": {"claims": [{"name": entry["name"]} for entry in entries]}
    }  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **metadata},
        "spec": {"containers": [container], "resourceClaims": list(entries)},
    }


def namespace(name: str) -> Json:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def test_a_quota_that_is_full_does_not_refuse_what_is_there(
    ask: Callable[..., Asked], server: PlaygroundApiServer
) -> None:
    server.add("resourceclaims", claim("old", namespace="default"), group=GROUP)
    # As a quota does it: before anybody looks whether the name is taken.
    full = 'resourceclaims.resource.k8s.io "c" is forbidden: exceeded quota: q, requested: a=1, used: a=1, limited: a=1'
    server.faults.fail(1, 403, method="POST", body=status(full))
    findings, _ = ask(claim("old"), claim("new"), claim("other"))
    assert [answer.outcome for answer in findings.answers.values()] == ["accepted", "refused", "accepted"]


def test_a_user_who_may_not_read_is_told_all_the_same(
    ask: Callable[..., Asked], server: PlaygroundApiServer
) -> None:
    server.add("resourceclaims", claim("old", namespace="default"), group=GROUP)
    server.faults.fail(1, 403, method="GET", path="/resourceclaims/old")
    server.faults.fail(1, 403, method="GET", path="/deviceclasses")
    findings, reports = ask(claim("old"))
    assert findings.answers[0] == Answer("accepted", "it exists already")
    assert findings.classes is None
    assert reports[0].faults == []


def test_documents_are_tried_and_nothing_is_stored(
    ask: Callable[..., Asked], server: PlaygroundApiServer
) -> None:
    before = server.store.version
    findings, reports = ask(
        claim("new"),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}},
        {"sharing": []},  # of the driver
        claim("bad", count=-1),
        {"kind": "Pod", "metadata": {"name": "of-no-version"}, "spec": {"containers": []}},
    )
    outcomes = {number: answer.outcome for number, answer in findings.answers.items()}
    assert outcomes == {0: "accepted", 1: "accepted", 3: "refused", 4: "refused"}
    assert findings.problem is None
    assert [report.verdict for report in reports] == ["OK", "SKIP", "OK", "FAULT", "FAULT"]
    assert reports[4].faults == ["API server: it needs an apiVersion and a kind"]
    assert "API server: accepts it" in reports[0].notes
    # Our own check and the server's stand side by side.
    assert ["is invalid: spec.devices" in fault for fault in reports[3].faults] == [
        False,
        True,
    ]  # fmt: skip
    assert server.store.version == before
    assert server.writes() == []


def test_an_object_that_exists_is_tried_as_a_change(
    ask: Callable[..., Asked], server: PlaygroundApiServer
) -> None:
    server.add("resourceclaims", claim("old", namespace="default"), group=GROUP)
    server.add("pods", pod("busy", namespace="default"))
    stored = server.objects("resourceclaims")
    findings, _ = ask(claim("old"), claim("old", count=2), stored[0], pod("busy"))
    assert [answer.outcome for answer in findings.answers.values()] == [
        "accepted",
        "refused",
        "accepted",
        "accepted",
    ]
    assert findings.answers[0].text == "it exists already"
    assert findings.answers[1].text.startswith("it exists already, and as a change of that: ")
    assert findings.answers[1].text.endswith("field is immutable")
    server.faults.fail(
        1, 403, method="PATCH", body=status('User "u" cannot patch resource "pods" in API group ""')
    )
    findings, _ = ask(pod("busy"))
    assert findings.answers[0] == Answer(
        "not asked", 'it exists already, and User "u" cannot patch resource "pods" in API group ""'
    )
    assert server.objects("resourceclaims") == stored


def test_what_depends_on_other_documents_is_told_as_that(ask: Callable[..., Asked]) -> None:
    findings, reports = ask(
        namespace("ml"),
        claim("inside", namespace="ml"),
        template("t", namespace="ml"),
        pod("p", {"name": "x", "resourceClaimTemplateName": "t"}, namespace="ml"),
        claim("lost", namespace="nowhere"),
    )
    assert [answer.outcome for answer in findings.answers.values()] == [
        *("accepted", "waits", "waits", "waits", "refused")
    ]
    place = reports[0].place
    assert (
        f"API server: cannot check it yet: needs Namespace ml ({place}), which is not in the cluster yet"
        in (reports[1].notes)
    )
    assert [report.verdict for report in reports] == ["SKIP", "OK", "OK", "OK", "FAULT"]
    assert reports[4].faults == ['API server: namespaces "nowhere" not found']


def test_the_namespace_of_documents_that_name_none_is_that_of_the_context(
    ask: Callable[..., Asked], server: PlaygroundApiServer, tmp_path: Path
) -> None:
    server.add("namespaces", {"metadata": {"name": "team"}})
    server.add("resourceclaimtemplates", template("t", namespace="team"), group=GROUP)
    _, reports = ask(pod("p", {"name": "x", "resourceClaimTemplateName": "t"}), namespace="team")
    assert reports[0].hints == []
    assert [one.path for one in server.requests if one.method == "POST"] == ["/api/v1/namespaces/team/pods"]
    kubeconfig = tmp_path / "own"
    server.write_kubeconfig(kubeconfig)
    document = json.loads(kubeconfig.read_text())
    assert load_endpoint(kubeconfig).namespace == "default"
    document["contexts"][0]["context"]["namespace"] = "team"
    kubeconfig.write_text(json.dumps(document))
    assert load_endpoint(kubeconfig).namespace == "team"


def test_classes_claims_and_templates_of_the_cluster_count(
    ask: Callable[..., Asked], server: PlaygroundApiServer
) -> None:
    server.add("deviceclasses", {"metadata": {"name": "own.example.com"}, "spec": {}}, group=GROUP)
    server.add("resourceclaims", claim("there", namespace="default"), group=GROUP)
    _, reports = ask(
        claim("a", "own.example.com"),
        claim("b", "gone.example.com"),
        claim("c", "mig-1g.10gb.nvidia.com"),
        pod("p", {"name": "x", "resourceClaimName": "there"}, {"name": "y", "resourceClaimName": "absent"}),
    )
    assert reports[0].faults == []
    for report, name in ((reports[1], "gone.example.com"), (reports[2], "mig-1g.10gb.nvidia.com")):
        assert report.faults == [
            f"DeviceClass {name} is not in the cluster and not in the files: the claim gets no devices"
        ]
    assert reports[3].hints == [
        "ResourceClaim default/absent is not in the files and not in the cluster: the pods wait for it"
    ]


def status(message: str, code: int = 403, reason: str = "Forbidden", name: str = "x") -> bytes:
    return json.dumps(
        {"kind": "Status", "message": message, "reason": reason, "code": code, "details": {"name": name}}
    ).encode()


def test_a_label_that_the_server_has_looked_for_is_not_hinted_at(
    ask: Callable[..., Asked], server: PlaygroundApiServer
) -> None:
    watching = claim("watching")
    watching["spec"]["devices"]["requests"][0]["exactly"]["adminAccess"] = True
    assert ask(watching)[1][0].hints == []
    server.faults.fail(1, 403, method="POST", body=status("adminAccess needs a label"))
    (hint,) = ask(watching)[1][0].hints
    assert hint.startswith("adminAccess needs the label resource.kubernetes.io/admin-access")


def test_a_user_who_may_not_create_is_told_and_is_no_fault(
    ask: Callable[..., Asked], server: PlaygroundApiServer
) -> None:
    says = (
        'resourceclaims.resource.k8s.io is forbidden: User "eve" cannot create resource "resourceclaims" in API group '
        '"resource.k8s.io" in the namespace "default"'
    )
    server.faults.fail(1, 403, method="POST", body=status(says))
    findings, reports = ask(claim("a"), claim("b"))
    assert findings.answers[0] == Answer("not asked", says)
    assert findings.answers[1].outcome == "accepted"
    assert (reports[0].verdict, reports[0].server) == ("OK", "not asked")


def test_a_webhook_that_does_not_answer_concerns_one_document(
    ask: Callable[..., Asked], server: PlaygroundApiServer
) -> None:
    says = 'Internal error occurred: failed calling webhook "check.example.com": no endpoints available'
    server.faults.fail(1, 500, method="POST", body=status(says, 500, "InternalError"))
    findings, _ = ask(claim("a"), claim("b"))
    assert findings.answers[0].outcome == "not asked"
    assert says in findings.answers[0].text
    assert findings.answers[1].outcome == "accepted"
    assert findings.problem is None


def test_a_server_that_goes_away_is_told_once(ask: Callable[..., Asked], server: PlaygroundApiServer) -> None:
    server.faults.fail(1, 500, method="POST", body=status("etcdserver: no leader", 500, "InternalError"))
    server.faults.fail(2, 503, path="/version")
    findings, reports = ask(claim("a"), claim("b"))
    assert findings.answers == {}
    assert findings.problem is not None
    assert "HTTP 503" in findings.problem
    assert [report.server for report in reports] == [None, None]


def test_warnings_of_the_server_are_hints(ask: Callable[..., Asked], server: PlaygroundApiServer) -> None:
    server.faults.warn("/pods", 'would violate PodSecurity "restricted:latest"')
    findings, reports = ask(pod("p"), claim("c"))
    assert findings.answers[0].warnings == ('would violate PodSecurity "restricted:latest"',)
    assert reports[0].hints == ['API server warns: would violate PodSecurity "restricted:latest"']
    assert reports[1].hints == []
    assert warning_text("something else") == "something else"


MADE = [
    Made("ServiceAccount", "trainer", "a.yaml:1", {}),
    Made("PriorityClass", "urgent", "a.yaml:9", {}),
    Made("CustomResourceDefinition", "jobsets.jobset.x-k8s.io", "crd.yaml:1",
         {"spec": {"group": "jobset.x-k8s.io", "names": {"kind": "JobSet"}}}),
]  # fmt: skip


@tabled("message", "outcome", "text")
def test_a_refusal_is_told_in_the_servers_own_words(message: str, outcome: str, text: str | None) -> None:
    assert refused(f"{message} (HTTP 403)", 403, MADE) == Answer(outcome, text or message)


def test_credentials_that_are_not_accepted_are_no_refusal() -> None:
    assert refused("Unauthorized", 401, []).outcome == "not asked"


def test_a_kind_that_the_server_does_not_have() -> None:
    version = "jobset.x-k8s.io/v1alpha2"
    assert unknown_kind("JobSet", version, [], MADE) == Answer(
        "waits",
        "needs CustomResourceDefinition jobsets.jobset.x-k8s.io (crd.yaml:1), which is not in the cluster yet",
    )
    assert unknown_kind("JobSet", version, [], []).text == (
        f"it has no kind JobSet of {version}; install what brings it, or correct both"
    )
    assert unknown_kind("ResourceClaim", f"{GROUP}/v1", [f"{GROUP}/v1beta1"], []).text == (
        f"it has no {GROUP}/v1; of this group it has {GROUP}/v1beta1"
    )


def test_an_older_server_is_told_by_the_versions_that_it_has(tmp_path: Path) -> None:
    with PlaygroundApiServer(served=("v1beta1",)) as server:
        server.write_kubeconfig(tmp_path / "kubeconfig")
        trial = ServerTrial(load_endpoint(tmp_path / "kubeconfig"), "default")
        findings = trial.findings(
            [Document("f", 1, claim("a")), Document("f", 9, {"kind": "X", "apiVersion": "a/b"})], []
        )
    assert findings.answers[0].text == f"it has no {GROUP}/v1; of this group it has {GROUP}/v1beta1"
    assert findings.answers[1].outcome == "refused"
    assert findings.classes is None


# --- as typed -----------------------------------------------------------------------------------


def test_the_command_beside_its_own_checks(server: PlaygroundApiServer, tmp_path: Path) -> None:
    server.write_kubeconfig(tmp_path / "kubeconfig")
    options = ["--server", "--kubeconfig", str(tmp_path / "kubeconfig"), "--simulate", "t4-4"]
    file = tmp_path / "claims.yaml"
    file.write_text(yaml.safe_dump_all([namespace("ml"), claim("a"), claim("b", namespace="ml")]))
    done = call("validate", str(file), *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "         API server: accepts it" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == f"the API server {server.url} accepts 2, cannot check yet 1"
    file.write_text(yaml.safe_dump_all([claim("a", count=-1)]))
    assert call("validate", str(file), *options).returncode == 1
    file.write_text(yaml.safe_dump_all([claim("a")]))
    server.tokens = {"t"}
    done = call("validate", str(file), *options)
    assert done.returncode == 3
    server.stop()
    done = call("validate", str(file), *options, "-o", "json")
    assert (done.returncode, done.stderr) == (3, "")
    shown = json.loads(done.stdout)
    assert "cannot connect to the API server" in shown["server"]["problem"]
    assert shown["documents"][0]["verdict"] == "OK"
    done = call("validate", str(file), *options)
    assert done.stdout.splitlines()[-1].startswith(
        f"not asked: the API server {server.url}: cannot connect to the API server"
    )
    done = call("validate", str(file), "--context", "x")
    assert (done.returncode, done.stdout) == (2, "")
