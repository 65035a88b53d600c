"""The pods that an object creates, and the claims that the scheduler creates for their extended resources."""

from __future__ import annotations

from typing import Any

from dra_driver.cli.validation.rules.pods import (
    extended_requests,
    mps_hints,
    pod_specs,
    served_resources,
    unused_claims,
    with_claims_once,
)
from tests.fakes.tables import tabled

Json = dict[str, Any]
POD: Json = {"containers": [{"name": "c"}]}
ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@tabled("spec", "paths", more=[(ITSELF, [])])
def test_pods_that_an_object_makes(spec: Any, paths: list[str]) -> None:
    assert list(pod_specs({"kind": "Any", "spec": spec})) == [(path, POD) for path in paths]


def container(*, amount: Any = 0, restart: str | None = None, name: str = "nvidia.com/gpu") -> Json:
    limits = {"limits": {"cpu": "100m", name: amount}} if amount else {}
    return {"name": "c", "resources": limits} | ({"restartPolicy": restart} if restart else {})


@tabled("initial", "main", "expected")
def test_claims_for_extended_resources(
    initial: list[Json], main: list[Json], expected: dict[str, int]
) -> None:
    served = {"nvidia.com/gpu": "gpu", "deviceclass.resource.kubernetes.io/gpu.nvidia.com": "gpu"}
    spec = {
        "initContainers": [container(**one) for one in initial], "containers": [container(**one) for one in main]
    }  # fmt: skip
    requests = extended_requests(spec, served)
    assert {one["name"]: one["exactly"]["count"] for one in requests} == expected


def test_the_newer_of_two_classes_serves_a_resource() -> None:
    def entry(name: str, made: str) -> Json:
        return {
            "metadata": {"name": name, "creationTimestamp": made},
            "spec": {"extendedResourceName": "nvidia.com/gpu"},
        }

    served = served_resources([entry("new", "2026-02-01T00:00:00Z"), entry("old", "2026-01-01T00:00:00Z")])
    assert served["nvidia.com/gpu"] == "new"
    assert served["deviceclass.resource.kubernetes.io/old"] == "old"


def test_two_entries_for_one_claim_are_one_and_two_for_one_template_are_two() -> None:
    entries = [
        {"name": name, kind: "mine"}
        for name, kind in (
            ("one", "resourceClaimName"), ("two", "resourceClaimName"),
            ("three", "resourceClaimTemplateName"), ("four", "resourceClaimTemplateName"),
        )
    ]  # fmt: skip
    claims = [{"name": "one"}, {"name": "two"}]
    spec = {"containers": [{"name": "c", "resources": {"claims": claims}}], "resourceClaims": entries}
    once = with_claims_once(spec)
    assert [entry["name"] for entry in once["resourceClaims"]] == ["one", "three", "four"]
    assert unused_claims(once) == ["three", "four"]
    assert list(mps_hints(once, {"one": {"r": True}}, {})) == []
    assert len(list(mps_hints(spec, {"one": {"r": True}, "two": {"r": True}}, {}))) == 1
