"""Which pods an object makes, which claims they have, and how many of them fit on nodes at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dra_driver.validation.machine_fit import MachineFit, Nodes
from dra_driver.validation.pod_count import PodCount
from dra_driver.validation.rules.counting import MOST_PODS_OF_A_CLAIM, Demand, count_pods
from dra_driver.validation.rules.extended_resources import extended_requests, served_resources
from dra_driver.validation.rules.standard_classes import standard_classes
from dra_driver.validation.rules.workloads import surge, workload
from tests.fakes.samples import DRIVER

Json = dict[str, Any]
POD: Json = {"containers": [{"name": "c"}]}
TEMPLATE: Json = {"template": {"spec": POD}}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"kind": "Pod", "spec": POD}, [("spec", 1)]),
        ({"kind": "Deployment", "spec": TEMPLATE}, [("spec.template.spec", 1)]),
        ({"kind": "Deployment", "spec": TEMPLATE | {"replicas": 0}}, [("spec.template.spec", 0)]),
        ({"kind": "StatefulSet", "spec": TEMPLATE | {"replicas": 3}}, [("spec.template.spec", 3)]),
        ({"kind": "ReplicaSet", "spec": TEMPLATE | {"replicas": 2}}, [("spec.template.spec", 2)]),
        ({"kind": "DaemonSet", "spec": TEMPLATE | {"replicas": 2}}, [("spec.template.spec", None)]),
        ({"kind": "Job", "spec": TEMPLATE}, [("spec.template.spec", 1)]),
        ({"kind": "Job", "spec": TEMPLATE | {"completions": 9}}, [("spec.template.spec", 1)]),
        ({"kind": "Job", "spec": TEMPLATE | {"parallelism": 4}}, [("spec.template.spec", 4)]),
        ({"kind": "Job", "spec": TEMPLATE | {"parallelism": 4, "completions": 3}}, [("spec.template.spec", 3)]),
        (
            {"kind": "CronJob", "spec": {"jobTemplate": {"spec": TEMPLATE | {"parallelism": 2}}}},
            [("spec.jobTemplate.spec.template.spec", 2)],
        ),
        (
            {
                "kind": "JobSet",
                "spec": {
                    "replicatedJobs": [
                        {"name": "driver", "template": {"spec": TEMPLATE}},
                        {"name": "workers", "replicas": 3, "template": {"spec": TEMPLATE | {"parallelism": 4}}},
                    ]
                },
            },
            [
                ("spec.replicatedJobs[0].template.spec.template.spec", 1),
                ("spec.replicatedJobs[1].template.spec.template.spec", 12),
            ],
        ),
        ({"kind": "OfSomebody", "spec": TEMPLATE | {"replicas": "many"}}, [("spec.template.spec", 1)]),
        ({"kind": "Rollout", "spec": TEMPLATE | {"replicas": 4}}, [("spec.template.spec", 4)]),
        ({"kind": "ConfigMap", "data": {}}, []),
        ({"kind": "Job", "spec": {"template": "x"}}, []),
        ({"kind": "JobSet", "spec": {"replicatedJobs": ["x", {"template": 1}]}}, []),
        ({"kind": "CronJob", "spec": {"jobTemplate": 1}}, []),
        ({"kind": "Pod", "spec": 1}, []),
    ],
)  # fmt: skip
def test_pods_that_an_object_makes(document: Json, expected: list[tuple[str, int | None]]) -> None:
    found = workload(document)
    assert [(group.path, group.count) for group in found.groups] == expected
    assert all(group.spec == POD for group in found.groups)
    assert found.faults == []


@pytest.mark.parametrize("number", ["3", -1, True, 1.5])
def test_a_number_of_pods_that_is_none_is_a_fault(number: Any) -> None:
    (fault,) = workload({"kind": "Deployment", "spec": TEMPLATE | {"replicas": number}}).faults
    assert str(fault) == f"spec.replicas: {number!r} is not a whole number of at least 0"


@pytest.mark.parametrize(
    ("kind", "strategy", "count", "expected"),
    [
        ("Deployment", {}, 1, 1),
        ("Deployment", {}, 3, 1),
        ("Deployment", {}, 4, 0),  # a quarter of four may go first
        ("Deployment", {"type": "Recreate"}, 1, 0),
        ("Deployment", {"rollingUpdate": {"maxSurge": 0}}, 1, 0),
        ("Deployment", {"rollingUpdate": {"maxUnavailable": 1}}, 1, 0),
        ("Deployment", {"rollingUpdate": {"maxUnavailable": "50%", "maxSurge": "0%"}}, 2, 0),
        ("Deployment", {"rollingUpdate": {"maxUnavailable": 0}}, 8, 1),
        ("StatefulSet", {}, 1, 0),
    ],
)
def test_a_rolling_update_that_needs_a_pod_more(kind: str, strategy: Json, count: int, expected: int) -> None:
    assert surge({"kind": kind, "spec": {"strategy": strategy}}, count) == expected


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


# --- counting -----------------------------------------------------------------------------------


def takes(devices: int) -> Json:
    exactly = {"deviceClassName": "gpu.nvidia.com", "count": devices}
    return {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}


def counted(demands: Sequence[Demand], sizes: Sequence[int]) -> tuple[int, tuple[int, ...], int]:
    """On nodes with so many devices each: fitting pods, of each demand, and nodes that are used."""

    def allocates(kind: int, others: Sequence[Json], spec: Json) -> Json | None:
        wanted = spec["devices"]["requests"][0]["exactly"]["count"]
        return {"n": wanted} if sum(one["n"] for one in others) + wanted <= kind else None

    found = count_pods(demands, sizes, allocates)
    assert (found.shortage is None) == (found.fitting == found.wanted)
    return found.fitting, found.each, found.nodes


def test_pods_of_a_template_each_have_a_claim() -> None:
    assert counted([Demand((takes(2),), count=5)], [8]) == (4, (4,), 1)
    assert counted([Demand((takes(2),), count=5)], [8, 3]) == (5, (5,), 2)
    assert counted([Demand((takes(2), takes(3)), count=5)], [8, 12]) == (3, (3,), 2)
    assert counted([Demand((takes(9),), count=2)], [8, 8]) == (0, (0,), 0)
    assert counted([Demand(count=7)], [1]) == (7, (7,), 1)


def test_pods_with_a_named_claim_share_it_on_one_node() -> None:
    named = {"default/shared": takes(6)}
    assert counted([Demand((), named, 4)], [8, 8]) == (4, (4,), 1)
    # Each of the pods has a device of its own besides, on that node.
    assert counted([Demand((takes(1),), named, 4)], [8, 8]) == (2, (2,), 1)
    # Two workloads with one claim are on one node too.
    assert counted([Demand((), named, 1), Demand((takes(3),), named, 1)], [8, 8]) == (1, (1, 0), 1)
    assert counted([Demand((), named, MOST_PODS_OF_A_CLAIM + 1)], [8])[0] == MOST_PODS_OF_A_CLAIM


def test_a_daemon_set_has_one_pod_on_each_node() -> None:
    assert counted([Demand((takes(2),), count=None)], [8, 1, 8]) == (2, (2,), 2)


def test_large_pods_go_first_where_the_other_order_leaves_gaps() -> None:
    # One after the other, the small pods would take the room of the large one.
    assert counted([Demand((takes(1),), count=8), Demand((takes(8),), count=1)], [8, 8]) == (9, (8, 1), 2)


def test_alike_nodes_are_tried_once() -> None:
    calls = []

    def allocates(kind: int, others: Sequence[Json], spec: Json) -> Json | None:
        calls.append(kind)
        return {} if len(others) < 8 else None

    found = count_pods([Demand((takes(1),), count=50_000)], [0] * 5000, allocates)
    assert (found.fitting, found.nodes) == (40_000, 5000)
    assert len(calls) == 9


# --- on machines --------------------------------------------------------------------------------


def machine(gpus: int, name: str = "m") -> MachineFit:
    devices = [
        {"name": f"gpu-{number}", "attributes": {"type": {"string": "gpu"}, "rack": {"string": str(number // 2)}}}
        for number in range(gpus)
    ]  # fmt: skip
    pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
    return MachineFit(
        name,
        DRIVER,
        [{"spec": {"driver": DRIVER, "nodeName": name, "pool": pool, "devices": devices}}],
    )


def told(demand: Demand, *machines: Nodes) -> str:
    return PodCount(machines, standard_classes(DRIVER)).verdict([demand]).short


def test_what_is_short_is_one_sentence() -> None:
    four = Nodes(machine(4))
    assert told(Demand((takes(3),), count=2), four) == (
        "request gpu wants 3 of class gpu.nvidia.com (1 of 4 matching devices have room); 2 such nodes would do"
    )
    assert told(Demand((takes(3),), count=2), four, Nodes(machine(2, "n"))) == (
        "request gpu wants 3 of class gpu.nvidia.com (2 of 2 matching devices have room), at best on n"
    )
    assert told(Demand((takes(1),), {"default/all": takes(4)}, 1), four).startswith(
        "request gpu wants 1 of class gpu.nvidia.com (0 of 4 matching devices have room)"
    )
    assert told(Demand((), {"default/one": takes(1)}, 300), four) == (
        "at most 256 pods can use one claim (default/one)"
    )
    assert told(Demand((), {"default/one": takes(1)}, None), Nodes(machine(4), 2)) == (
        "they share claim default/one, so all have to be on its node"
    )


def test_a_constraint_that_is_short_is_named() -> None:
    pair = takes(2)
    pair["devices"]["constraints"] = [{"requests": ["gpu"], "matchAttribute": f"{DRIVER}/rack"}]
    # The first claim of the pod takes one of the only pair.
    assert told(Demand((takes(1), pair), count=1), Nodes(machine(3))) == (
        "request gpu wants 2 of class gpu.nvidia.com (2 of 3 matching devices have room), but no choice of devices "
        f"serves the claim with constraint {DRIVER}/rack"
    )


def test_alternatives_are_counted_each_and_told_together() -> None:
    bodies = [
        {"name": "mig", "deviceClassName": "mig.nvidia.com"},
        {"name": "whole", "deviceClassName": "gpu.nvidia.com"},
    ]
    spec = {"devices": {"requests": [{"name": "gpu", "firstAvailable": bodies}]}}
    assert told(Demand((spec,), count=9), Nodes(machine(8))) == (
        "request gpu wants 1 of class mig.nvidia.com (0 of 0 matching devices have room) or else "
        "1 of class gpu.nvidia.com (0 of 8 matching devices have room); 2 such nodes would do"
    )
