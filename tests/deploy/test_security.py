"""The manifests grant what docs/security.md says and no more; its tables are compared with what they speak of."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import parameters_policy
import pytest
import yaml

from dra_driver.api.decode import MAX_BYTES
from dra_driver.cli.rules.admission import MARK_RESOURCE, MARK_VERB
from dra_driver.kubelet import dra, grpc_server, liveness
from tests.deploy.test_daemonset import DAEMONSET, assert_has, one, rendered, with_components

DOCUMENT = Path(__file__).parents[2] / "docs/security.md"
COMPONENTS = sorted(
    path.name for path in (DAEMONSET / "components").iterdir() if (path / "kustomization.yaml").exists()
)
Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def installed() -> list[Manifest]:
    """What `kubectl apply -k daemonset` installs."""
    return rendered(DAEMONSET)


def table(name: str) -> list[list[str]]:
    """The cells of the table between the markers, without its head and without backquotes."""
    _, found, rest = DOCUMENT.read_text().partition(f"<!-- {name} -->\n")
    assert found, name
    lines = rest.partition(f"<!-- end of {name} -->")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")] for line in lines]


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {
        entry["metadata"]["name"]: entry["spec"]["template"]["spec"]
        for entry in manifests
        if entry["kind"] == "DaemonSet"
    }


def mounts_of(pod: Manifest) -> dict[str, tuple[str, bool]]:
    """(host path, read only) by the place in the container."""
    (container,) = pod["containers"]
    volumes = {entry["name"]: entry.get("hostPath", {}).get("path", "") for entry in pod["volumes"]}
    return {
        entry["mountPath"]: (volumes[entry["name"]], entry.get("readOnly", False))
        for entry in container["volumeMounts"]
    }


def test_rights_are_those_of_the_table(installed: list[Manifest]) -> None:
    rules = one(installed, "ClusterRole", "gpu-dra-driver")["rules"]
    granted = [
        [group or "core", resource, ", ".join(rule["verbs"]), ", ".join(rule.get("resourceNames", ()))]
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    ]
    assert sorted(granted) == sorted(row[:4] for row in table("rights"))
    assert all(row[4] for row in table("rights")), "each with its reason"
    assert "*" not in str(rules)
    assert not any("nonResourceURLs" in rule for rule in rules)


def test_mounts_are_those_of_the_table(installed: list[Manifest]) -> None:
    (pod,) = pods(installed).values()
    documented = {row[0]: (row[1], row[2] == "yes") for row in table("container")}
    assert mounts_of(pod) == documented
    assert all(row[3] for row in table("container"))


@pytest.mark.parametrize("component", [None, *COMPONENTS])
def test_no_pod_shares_more_of_the_host_than_its_work_needs(component: str | None, tmp_path: Path) -> None:
    for name, pod in pods(with_components(tmp_path, *([component] if component else []))).items():
        assert not any(pod.get(key) for key in ("hostNetwork", "hostIPC", "shareProcessNamespace"))
        assert bool(pod.get("hostPID")) == (name.endswith("-mps") or component != "restricted"), name
        assert pod["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert not any("hostPort" in port for port in container.get("ports", ()))
        assert bool(pod.get("initContainers")) == (component == "cdi-hook")
        for place, (source, is_read_only) in mounts_of(pod).items():
            assert is_read_only or source not in ("/", "/etc", "/usr", "/run", "/var", "/var/run"), place
            assert not source.endswith(".sock"), place


@pytest.mark.parametrize(
    "case",
    yaml.safe_load(Path(__file__).with_name("values").joinpath("granted.yaml").read_text()),
    ids=lambda case: case["what"],
)
def test_components_grant_what_they_promise(case: dict[str, Any], tmp_path: Path) -> None:
    assert_has(with_components(tmp_path, *case["components"]), case["has"])


def test_the_step_that_installs_the_hook_changes_nothing_of_the_driver(
    installed: list[Manifest], tmp_path: Path
) -> None:
    (base,), (pod,) = (pods(made).values() for made in (installed, with_components(tmp_path, "cdi-hook")))
    assert pod["containers"] == base["containers"]


def test_the_restricted_driver_of_the_e2e_tests_has_no_processes_of_the_host_either() -> None:
    assert not pods(rendered(DAEMONSET / "overlays/e2e-restricted"))["gpu-dra-driver"].get("hostPID")


def test_privileges_are_explained_where_they_are_taken() -> None:
    privileged = []
    for path in DAEMONSET.rglob("daemonset.yaml"):
        if path.relative_to(DAEMONSET).parts[0] == "chart":
            continue  # a template; base and mps are rendered from it
        text = path.read_text()
        for entry in yaml.load_all(text, Loader=yaml.CSafeLoader):
            containers = entry["spec"]["template"]["spec"].get("containers", ())
            if any(container.get("securityContext", {}).get("privileged") for container in containers):
                privileged.append(path.parent.name)
                assert re.search(r"# .*\n +privileged: true", text), path
                assert re.search(r"# .*\n +hostPID: true", text), path
    assert sorted(privileged) == ["base", "mps"]
    text = DOCUMENT.read_text()
    for capability in ("CAP_SYS_ADMIN", "CAP_SYS_CHROOT", "CAP_MKNOD", "CAP_DAC_OVERRIDE"):
        assert capability in text


def test_limits_are_those_of_the_table() -> None:
    assert [int(row[1]) for row in table("limits")] == [
        grpc_server.MAX_REQUEST_BYTES, dra.MAX_CLAIMS, grpc_server.MAX_CALLS, liveness.MAX_PROBES,
        liveness.MAX_PROBE_BYTES, MAX_BYTES,
    ]  # fmt: skip


def test_the_policy_for_parameters_is_what_their_fields_say() -> None:
    written = (DAEMONSET / "base/parameters-policy.yaml").read_text()
    assert written == parameters_policy.policy(), "run `make manifests`"


def test_the_manuals_patch_warns_of_parameters_only(tmp_path: Path) -> None:
    manual = (DAEMONSET / "README.md").read_text().partition("gpu-dra-driver-parameters")[2]
    text = manual.partition("```yaml\n")[2].partition("```")[0]
    shutil.copytree(DAEMONSET, tmp_path / "daemonset")
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay/kustomization.yaml").write_text(f"resources: [../daemonset]\n{text}")
    found = {
        entry["metadata"]["name"]: entry["spec"]["validationActions"]
        for entry in rendered(tmp_path / "overlay")
        if entry["kind"] == "ValidatingAdmissionPolicyBinding"
    }
    assert found == {
        "gpu-dra-driver-own-devices": ["Deny"],
        "gpu-dra-driver-own-events": ["Deny"],
        "gpu-dra-driver-own-node": ["Deny"],
        "gpu-dra-driver-parameters": ["Warn"],
    }


RENAMED = {"namePrefix": "team-a-", "nameSuffix": "-x", "namespace": "gpus", "resources": ["../daemonset"]}


def test_a_rename_keeps_the_mark_that_the_policies_look_for(tmp_path: Path) -> None:
    """tests/e2e/test_permissions.py shows the same with a real API server."""
    shutil.copytree(DAEMONSET, tmp_path / "daemonset")
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay/kustomization.yaml").write_text(yaml.safe_dump(RENAMED))
    renamed = rendered(tmp_path / "overlay")
    by_kind = {
        kind: [entry for entry in renamed if entry["kind"] == kind] for kind in {e["kind"] for e in renamed}
    }
    mark = {"apiGroups": ["gpu.nvidia.com"], "resources": [MARK_RESOURCE], "verbs": [MARK_VERB]}
    marked = {role["metadata"]["name"] for role in by_kind["ClusterRole"] if mark in role["rules"]}
    (subject,) = (
        subject
        for binding in by_kind["ClusterRoleBinding"]
        for subject in binding["subjects"]
        if binding["roleRef"]["name"] in marked
    )
    assert (subject["namespace"], subject["name"]) == ("gpus", "team-a-gpu-dra-driver-x")
    (daemonset,) = by_kind["DaemonSet"]
    assert daemonset["metadata"]["namespace"] == "gpus"
    assert daemonset["spec"]["template"]["spec"]["serviceAccountName"] == subject["name"]
    policies, bindings = (by_kind[f"ValidatingAdmissionPolicy{part}"] for part in ("", "Binding"))
    protected = set()
    for policy in policies:
        conditions = str(policy["spec"]["matchConditions"])
        if all(f'"{word}"' in conditions for word in ("gpu.nvidia.com", MARK_RESOURCE, MARK_VERB)):
            rules = policy["spec"]["matchConstraints"]["resourceRules"]
            protected |= {resource for rule in rules for resource in rule["resources"]}
    assert protected >= {"resourceslices", "resourceclaims/status", "events"}
    assert all("Deny" in binding["spec"]["validationActions"] for binding in bindings)
    assert not any("gpu-dra-driver" in str(policy["spec"]["matchConditions"]) for policy in policies)
    names = {policy["metadata"]["name"] for policy in policies}
    assert {binding["spec"]["policyName"] for binding in bindings} == names
