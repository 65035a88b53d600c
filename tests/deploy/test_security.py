"""The manifests grant what docs/security.md says and no more; its tables are compared with what they speak of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dra_driver.api.resolve import MAX_BYTES
from dra_driver.cli.checks.admission import MARK_RESOURCE, MARK_VERB
from dra_driver.kubelet import dra, grpc_server, liveness
from tests.deploy.test_daemonset import DAEMONSET, installed, mounts_of, of_kind, one

DOCUMENT = Path(__file__).parents[2] / "docs/security.md"


def table(name: str) -> list[list[str]]:
    """The cells of the table between the markers, without its head and without backquotes."""
    _, found, rest = DOCUMENT.read_text().partition(f"<!-- {name} -->\n")
    assert found, name
    lines = rest.partition(f"<!-- end of {name} -->")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")] for line in lines]


def test_rights_are_those_of_the_table() -> None:
    rules = one(installed(), "ClusterRole", "gpu-dra-driver")["rules"]
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


def test_mounts_are_those_of_the_table() -> None:
    (daemonset,) = of_kind(installed(), "DaemonSet")
    documented = {row[0]: (row[1], row[2] == "yes") for row in table("container")}
    assert mounts_of(daemonset["spec"]["template"]["spec"]) == documented
    assert all(row[3] for row in table("container"))


@pytest.mark.parametrize("template", ["daemonset", "mps"])
def test_privileges_are_explained_where_they_are_taken(template: str) -> None:
    text = (DAEMONSET / f"chart/templates/{template}.yaml").read_text()
    assert re.search(r"# .*\n +privileged: (true|\{\{)", text)
    assert re.search(r"# .*\n +hostPID: true", text)
    for capability in ("CAP_SYS_ADMIN", "CAP_SYS_CHROOT", "CAP_MKNOD", "CAP_DAC_OVERRIDE"):
        assert capability in DOCUMENT.read_text()


def test_limits_are_those_of_the_table() -> None:
    assert [int(row[1]) for row in table("limits")] == [
        grpc_server.MAX_REQUEST_BYTES, dra.MAX_CLAIMS, grpc_server.MAX_CALLS, liveness.MAX_PROBES,
        liveness.MAX_PROBE_BYTES, MAX_BYTES,
    ]  # fmt: skip


def test_policies_know_the_plugin_by_the_mark_of_its_role_and_not_by_its_name() -> None:
    """tests/e2e/test_permissions.py shows with a real API server that a renamed plugin is confined."""
    mark = {"apiGroups": ["gpu.nvidia.com"], "resources": [MARK_RESOURCE], "verbs": [MARK_VERB]}
    (role,) = of_kind(installed(), "ClusterRole")
    assert mark in role["rules"]
    protected = set()
    for policy in of_kind(installed(), "ValidatingAdmissionPolicy"):
        conditions = str(policy["spec"]["matchConditions"])
        assert "gpu-dra-driver" not in conditions
        if all(f'"{word}"' in conditions for word in ("gpu.nvidia.com", MARK_RESOURCE, MARK_VERB)):
            rules = policy["spec"]["matchConstraints"]["resourceRules"]
            protected |= {resource for rule in rules for resource in rule["resources"]}
    assert protected >= {"resourceslices", "resourceclaims/status", "events"}
    bindings = of_kind(installed(), "ValidatingAdmissionPolicyBinding")
    assert all(binding["spec"]["validationActions"] == ["Deny"] for binding in bindings)
