"""What a cluster has and who uses it, from slices, claims, pods and metrics as the API has them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from prometheus_client.exposition import generate_latest

from dra_driver.cli.rules.cluster_rows import (
    NOT_PUBLISHED,
    PluginPod,
    Row,
    Totals,
    Used,
    cluster_rows,
    drift,
    loads_of,
    plugin_pod,
    room_text,
    seen_claim,
    seen_class,
    seen_pod,
    seen_slice,
    use_text,
    versions_of,
)
from dra_driver.cli.validation.rules.classes import standard_classes
from dra_driver.model.gpu import GpuLoad
from dra_driver.reporting.metrics import Metrics
from tests.fakes.samples import DRIVER, GPU_0, MIG_1G, NODE
from tests.fakes.scrapes import complete_metrics
from tests.fakes.tables import tabled

GIB = 1 << 30
Json = dict[str, Any]


def device(name: str, kind: str = "gpu", bus: str | None = None, made: bool = True, **more: Any) -> Json:
    attributes = {"type": {"string": kind}, "productName": {"string": "H100"}}
    if made:
        attributes["uuid"] = {"string": f"UUID-{name}"}
    if bus:
        attributes["resource.kubernetes.io/pciBusID"] = {"string": bus}
    return {"name": name, "attributes": attributes, **more}


def slice_of(node: str, *devices: Json, generation: int = 1, total: int = 1, driver: str = DRIVER) -> Json:
    pool = {"name": node, "generation": generation, "resourceSliceCount": total}
    return {"spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": [*devices]}}


def claim(
    name: str, *devices: str, pods: tuple[str, ...] = (), of: str = "gpu.nvidia.com", **more: Any
) -> Json:
    results = [{"driver": DRIVER, "pool": "n", "device": one, "request": "gpu", **more} for one in devices]
    exactly = {"deviceClassName": of, "allocationMode": "ExactCount", "count": 1}
    return {
        "metadata": {"namespace": "ml", "name": name, "uid": f"uid-{name}"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
        "status": {
            "reservedFor": [{"resource": "pods", "name": pod, "uid": pod} for pod in pods],
            **({"allocation": {"devices": {"results": results}}} if results else {}),
        },
    }


def pod(name: str, says: str | None = None, **more: Any) -> Json:
    conditions = [{"type": "PodScheduled", "status": "False", "message": says}] if says else []
    status = {"phase": "Pending", "conditions": conditions, **more.pop("status", {})}
    return {"metadata": {"namespace": "ml", "name": name}, "spec": more, "status": status}


def look(
    slices: list[Json],
    claims: list[Json],
    pods: list[Json] | None = None,
    loads: Any = None,
    classes: Any = None,
) -> tuple[list[Row], Totals]:
    classes = classes or [*standard_classes(DRIVER).values()]
    return cluster_rows(
        DRIVER,
        [seen_slice(one) for one in slices],
        [seen_claim(one, DRIVER) for one in claims],
        [seen_class(one) for one in classes],
        [seen_pod(one) for one in pods or ()],
        loads,
    )


@tabled("slices", "claims", "rows", "totals")
def test_rows_and_totals(slices: list[Json], claims: list[Json], rows: list[list[str]], totals: Json) -> None:
    made = [
        slice_of(row.pop("node", "n"), *(device(**one) for one in row.pop("devices", ())), **row)
        for row in ({**one} for one in slices)
    ]
    wanted = [claim(one["name"], *one["of"], **one.get("more", {})) for one in claims]
    found, sums = look(made, wanted)
    assert [[row.node, row.device, row.claim, row.problem] for row in found] == rows
    assert sums == Totals(**totals)


def test_device_of_a_claim_that_no_slice_has_is_counted_and_shown() -> None:
    empty = slice_of("n")
    rows, sums = look([empty], [claim("train", "gpu-1", "gpu-2", pods=("train-0",))])
    assert rows == [
        Row("n", problem="publishes no devices"),
        Row("n", "gpu-1", "-", "ml/train", ("ml/train-0",), "-", NOT_PUBLISHED),
        Row("n", "gpu-2", "-", "ml/train", ("ml/train-0",), "-", NOT_PUBLISHED),
    ]
    assert str(sums) == "0 GPUs: 0 free, 0 in use, 0 tainted; claimed devices without a slice: 2"


def test_gpu_in_maintenance_is_shown_with_the_claims_on_it_and_not_counted_as_missing() -> None:
    service = claim("reset", "gpu-1", pods=("reset-0",), adminAccess=True)
    parameters = {"driver": DRIVER, "parameters": {"kind": "MaintenanceConfig"}}
    service["status"]["allocation"]["devices"]["config"] = [{"opaque": parameters}]
    users = [claim("train", "gpu-1", pods=("train-0",)), claim("watch", "gpu-1", adminAccess=True)]
    rows, sums = look([slice_of("n", device("gpu-2"))], [service, *users])
    assert rows == [
        Row("n", "gpu-1", "-", "ml/train", ("ml/train-0",), "-", "in maintenance for claim ml/reset"),
        Row("n", "gpu-1", "-", "ml/reset", ("ml/reset-0",), "-", "in maintenance for claim ml/reset"),
        Row("n", "gpu-2", "H100"),
    ]
    assert str(sums) == "1 GPU: 1 free, 0 in use, 0 tainted; 1 more in maintenance"
    rows, sums = look([slice_of("n", device("gpu-1"))], [service])
    assert (rows, sums) == ([Row("n", "gpu-1", "H100")], Totals(gpus=1, free=1))


def test_claim_of_a_group_of_pods_names_the_group() -> None:
    held = claim("train", "a")
    held["status"]["reservedFor"] = [
        {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "train", "uid": "u"}
    ]
    [row], _ = look([slice_of("n", device("a"))], [held])
    assert row.pods == ("ml/podgroups/train",)


def test_shares_of_a_device_have_a_row_each_with_what_they_consume_and_use() -> None:
    slices = [slice_of("n", device("a", allowMultipleAllocations=True), device("b"))]
    claims = [
        claim("one", "a", consumedCapacity={f"{DRIVER}/memory": "20Gi"}),
        claim("two", "a", "b", consumedCapacity={"shares": "1"}),
    ]
    loads = {("n", "a"): Used(GpuLoad(8 * GIB, 80 * GIB, 90)), ("n", "b"): Used(GpuLoad(0, 80 * GIB, None))}
    rows, sums = look(slices, claims, loads=loads)
    assert [(row.device, row.claim, row.use) for row in rows] == [
        ("b", "ml/two", "shares 1; 0.0/80 GiB"),
        ("a", "ml/one", "memory 20Gi; 90% 8.0/80 GiB"),
        ("a", "ml/two", "shares 1; 90% 8.0/80 GiB"),
    ]
    assert sums == Totals(gpus=2, used=2)
    assert use_text(None) is use_text(GpuLoad()) is None


def test_pods_that_share_a_device_have_a_row_each_where_the_use_of_all_of_them_is_known() -> None:
    slices = [slice_of("n", device("a", allowMultipleAllocations=True), device("b"))]
    claims = [
        claim("one", "a", pods=("x", "y")),
        claim("two", "a", pods=("z",)),
        claim("alone", "b", pods=("w",)),
    ]
    own = {
        "ml/x": GpuLoad(4 * GIB, 80 * GIB, 70), "ml/y": GpuLoad(None, 80 * GIB, 5), "ml/z": GpuLoad(0, 80 * GIB, 0),
    }  # fmt: skip
    total = GpuLoad(8 * GIB, 80 * GIB, 75)
    loads = {("n", "a"): Used(total, own), ("n", "b"): Used(total, {"ml/w": GpuLoad(2 * GIB, 80 * GIB, 74)})}
    rows, _ = look(slices, claims, loads=loads)
    assert [(row.claim, row.pods, row.use, row.wasted_bytes) for row in rows] == [
        ("ml/one", ("ml/x",), "70% 4.0/80 GiB", 20 * GIB),
        ("ml/one", ("ml/y",), "5% ?/80 GiB", 20 * GIB),
        ("ml/two", ("ml/z",), "0% 0.0/80 GiB", 20 * GIB),
        ("ml/alone", ("ml/w",), "75% 8.0/80 GiB", 20 * GIB),
    ]
    loads["n", "a"] = Used(total, {"ml/x": own["ml/x"]})
    rows, _ = look(slices, claims, loads=loads)
    assert [(row.claim, row.pods, row.use) for row in rows[:2]] == [
        ("ml/one", ("ml/x", "ml/y"), "75% 8.0/80 GiB"),
        ("ml/two", ("ml/z",), "75% 8.0/80 GiB"),
    ]


def test_claims_and_pods_that_wait_come_last_with_what_the_scheduler_says() -> None:
    nic = {
        "metadata": {"name": "nic"},
        "spec": {"selectors": [{"cel": {"expression": 'device.driver == "nic"'}}]},
    }
    ours = {"metadata": {"name": "gpu.nvidia.com"}, "spec": {"selectors": [{"cel": {"expression": f'"{DRIVER}"'}}],
            "extendedResourceName": "nvidia.com/gpu"}}  # fmt: skip
    ending = claim("ending")
    ending["metadata"]["deletionTimestamp"] = "2026-01-05T09:30:00Z"
    claims = [claim("c"), claim("d"), claim("e", of="gpus.nvidia.com"), claim("foreign", of="nic"), ending]

    def limits(name: str) -> list[Json]:
        return [{"name": "main", "resources": {"limits": {name: "1"}}}]

    pods = [
        pod("by-name", "0/3 nodes", resourceClaims=[{"name": "gpu", "resourceClaimName": "c"}]),
        pod(
            "templated",
            resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "t"}],
            status={"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "c"}]},
        ),
        pod("early", resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "t"}]),
        pod("old-way", "0/1 nodes", containers=limits("nvidia.com/gpu")),
        pod("implicit", containers=limits("deviceclass.resource.kubernetes.io/gpu.nvidia.com")),
        pod("made", containers=limits("nvidia.com/gpu"), status={"extendedResourceClaimStatus": {"x": 1}}),
        pod("other", containers=limits("example.com/gpu")),
    ]
    rows, sums = look([], claims, pods, classes=[nic, ours])
    assert [(row.claim, row.pods, row.problem) for row in rows] == [
        ("ml/c", ("ml/by-name", "ml/templated"), "waits: 0/3 nodes"),
        ("ml/d", (), "waits: no pod waits for this claim"),
        ("ml/e", (), "waits: unknown DeviceClass gpus.nvidia.com"),
        ("-", ("ml/old-way",), "waits: 0/1 nodes"),
        ("-", ("ml/implicit",), "waits: the scheduler has not tried this pod yet"),
    ]
    assert sums == Totals(waiting=5)


def test_loads_are_read_from_the_metrics_of_a_plugin() -> None:
    text = generate_latest(complete_metrics().registry).decode()
    assert loads_of(text, DRIVER) == {
        GPU_0: Used(GpuLoad(60 * GIB, 80 * GIB, 70), {"default/pod-0": GpuLoad(1 * GIB, 80 * GIB, 70)}),
        MIG_1G: Used(GpuLoad(1 * GIB, 10 * GIB, 0), {"default/pod-0": GpuLoad(0, 10 * GIB, None)}),
    }  # fmt: skip
    assert loads_of(text, "gpu.example.com") == {}
    # One that measures nothing is not one without claims.
    assert loads_of(generate_latest(Metrics(DRIVER, NODE, list).registry).decode(), DRIVER) is None


@tabled("changes", "spec", "expected")
def test_pod_of_a_plugin_is_known_by_its_environment(
    changes: Json, spec: Json | None, expected: str | None
) -> None:
    env = {"DRIVER_NAME": DRIVER, "HTTP_ENDPOINT": "[::]:9090", **changes}
    values = [{"name": name, "value": value} for name, value in env.items() if value is not None]
    container = {"image": "a:1", "env": values}
    whole = {"nodeName": "n", "containers": [{}, container]}
    metadata = {"name": "p", "namespace": "gpus"}
    found = plugin_pod({"metadata": metadata, "spec": {} if spec is None else {**whole, **spec}}, DRIVER)
    assert (found.proxy + found.metrics if found and found.port else None) == expected
    assert found is None or found.image == "a:1"


PROFILES = {"1g.10gb": (1, range(7)), "3g.40gb": (4, (0, 4)), "7g.80gb": (8, (0,))}
"""By name: memory slices, and the placements."""


def mig_node(node: str, gpus: int = 1, **more: Any) -> list[Json]:
    """The slices of a node with MIG on demand: counter sets, and devices that consume memory slices."""
    counters = [
        {"name": f"gpu-{gpu}", "counters": {f"slice-{one}": {"value": "1"} for one in range(8)}}
        for gpu in range(gpus)
    ]
    devices = []
    for gpu in range(gpus):
        for profile, (size, starts) in {"": (8, (0,)), **PROFILES}.items():
            for start in starts:
                name = f"gpu-{gpu}-{profile}-{start}" if profile else f"gpu-{gpu}"
                one = device(name, "mig" if profile else "gpu", f"0000:{gpu}", made=not profile, **more)
                if profile:
                    one["attributes"]["profile"] = {"string": profile}
                used = {f"slice-{place}": {"value": "1"} for place in range(start, start + size)}
                one["consumesCounters"] = [{"counterSet": f"gpu-{gpu}", "counters": used}]
                devices.append(one)
    shared = slice_of(node, total=2)
    shared["spec"]["sharedCounters"] = counters
    return [shared, slice_of(node, *devices, total=2)]


def test_room_is_what_still_fits_of_each_profile_and_not_the_number_of_devices() -> None:
    free = {"whole": 2, "1g.10gb": 14, "3g.40gb": 4, "7g.80gb": 2}
    assert look(mig_node("n", 2), [])[1].fits == {"H100": free}
    _, sums = look(mig_node("n", 2), [claim("part", "gpu-0-1g.10gb-5")])
    assert sums.fits == {"H100": {"whole": 1, "1g.10gb": 13, "3g.40gb": 3, "7g.80gb": 1}}
    assert json.loads(json.dumps(asdict(sums)))["fits"] == sums.fits
    text = "H100: room for 1 whole GPU, or 13 x 1g.10gb, or 3 x 3g.40gb, or 1 x 7g.80gb"
    assert room_text("H100", sums.fits["H100"]) == text
    _, sums = look(mig_node("n"), [claim("whole", "gpu-0")])
    assert sums.fits == {"H100": {"1g.10gb": 0, "3g.40gb": 0, "7g.80gb": 0}}


def test_tainted_devices_and_incomplete_pools_have_no_room() -> None:
    taint = {"key": "gpu.nvidia.com/xid", "effect": "NoSchedule"}
    _, sums = look(mig_node("n", taints=[taint]), [])
    assert set(sums.fits["H100"].values()) == {0}
    assert look(mig_node("n")[1:], [])[1].fits == {}
    assert look([slice_of("n", device("gpu-1"))], [])[1].fits == {}, "the totals say it"


def test_nodes_whose_version_differs_from_most_are_named() -> None:
    def node(name: str, driver: str) -> Json:
        one = device("gpu-0")
        one["attributes"] |= {
            "driverVersion": {"version": driver},
            "cudaDriverVersion": {"version": "13.0.0"},
        }
        return slice_of(name, one)

    nodes = [node(f"n-{number}", "580.95.5") for number in range(3)]
    slices = [seen_slice(one) for one in (*nodes, node("old", "570.1.1"))]
    images = [
        PluginPod(f"n-{number}", "gpus", f"gpu-dra-driver:{'0.2.0' if number else '0.1.0'}", "", "", "")
        for number in range(3)
    ]
    assert [*drift(versions_of(slices, images))] == [
        "NVIDIA driver 570.1.1 on old, 580.95.5 on 3 other nodes",
        "image of gpu-dra-driver gpu-dra-driver:0.1.0 on n-0, gpu-dra-driver:0.2.0 on 2 other nodes",
    ]
    assert [*drift(versions_of(slices[:3], images[1:]))] == []
