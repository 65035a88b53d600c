"""The pods that an object makes, and the claims that the scheduler makes for their extended resources."""

from __future__ import annotations

from typing import Any

import pytest

from dra_driver.validation.rules.extended_resources import extended_requests, served_resources
from dra_driver.validation.rules.workloads import pod_specs

Json = dict[str, Any]
POD: Json = {"containers": [{"name": "c"}]}
TEMPLATE: Json = {"template": {"spec": POD}}
ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("spec", "paths"),
    [
        (POD, ["spec"]),
        (TEMPLATE | {"replicas": "many"}, ["spec.template.spec"]),
        ({"jobTemplate": {"spec": TEMPLATE}}, ["spec.jobTemplate.spec.template.spec"]),
        (
            {"replicatedJobs": [{"template": {"spec": TEMPLATE}}, "x", {"template": {"spec": TEMPLATE}}]},
            [f"spec.replicatedJobs[{number}].template.spec.template.spec" for number in (0, 2)],
        ),
        ({"pytorchReplicaSpecs": {"Worker": TEMPLATE}}, ["spec.pytorchReplicaSpecs.Worker.template.spec"]),
        ({"template": {"spec": {"containers": "x"}}}, []),
        ({"versions": [{"schema": {"properties": {"spec": {"containers": {"type": "array"}}}}}]}, []),
        ({"template": "x"}, []),
        (1, []),
        (ITSELF, []),
    ],
)  # fmt: skip
def test_pods_that_an_object_makes(spec: Any, paths: list[str]) -> None:
    assert list(pod_specs({"kind": "Any", "spec": spec})) == [(path, POD) for path in paths]


def container(amount: int = 0, *, restart: str | None = None, name: str = "nvidia.com/gpu") -> Json:
    limits = {"limits": {"cpu": "100m", name: amount}} if amount else {}
    return {"name": "c", "resources": limits} | ({"restartPolicy": restart} if restart else {})


@pytest.mark.parametrize(
    ("initial", "main", "expected"),
    [
        ([], [container(2)], {"container-0-request-1": 2}),
        ([], [container(2), container(), container(1)], {"container-0-request-1": 2, "container-2-request-1": 1}),
        ([container(1)], [container(2)], {"container-1-request-1": 2}),
        ([container(3)], [container(2)], {"container-0-request-1": 1, "container-1-request-1": 2}),
        ([container(3), container(4)], [container(2)], {"container-1-request-1": 2, "container-2-request-1": 2}),
        ([container(1, restart="Always")], [container(1)], {"container-0-request-1": 1, "container-1-request-1": 1}),
        # What a sidecar before it has is not free for an init container.
        ([container(1, restart="Always"), container(1)], [container()],
         {"container-0-request-1": 1, "container-1-request-1": 1}),
        ([], [container()], {}),
        ([], [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "half"}}}], {}),
        ([], [container(1, name="deviceclass.resource.kubernetes.io/gpu.nvidia.com")], {"container-0-request-1": 1}),
        ([], [container(1, name="example.com/gpu")], {}),
    ],
)  # fmt: skip
def test_claims_for_extended_resources(
    initial: list[Json], main: list[Json], expected: dict[str, int]
) -> None:
    served = {"nvidia.com/gpu": "gpu", "deviceclass.resource.kubernetes.io/gpu.nvidia.com": "gpu"}
    requests = extended_requests({"initContainers": initial, "containers": main}, served)
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
