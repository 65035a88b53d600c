"""Names of ours that schedulers, quotas and autoscalers read, and docs/schedulers.md, which documents them.

Other projects have these names in their code, or their users in configurations: a changed name silently
breaks a quota or costs a node.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml

from dra_driver.app.settings import DEFAULT_DRIVER_NAME
from dra_driver.cli.validation.documents import Document
from dra_driver.cli.validation.manifest_check import check_documents
from dra_driver.cli.validation.rules.cel import SelectorError, view
from dra_driver.cli.validation.rules.classes import standard_classes
from dra_driver.cli.validation.rules.selectors import compiled
from dra_driver.model.inventory import Inventory
from dra_driver.model.sharing import SharingRule, share_all
from dra_driver.slices.rules.build import Pool, build_pool
from dra_driver.slices.rules.diff import Owner, slice_changes
from tests.deploy.test_daemonset import DAEMONSET, installed, of_kind
from tests.fakes.machines import SimulatedNode, read_inventory
from tests.fakes.tables import read_yaml
from tests.slices.test_golden_partitions import MODE_NEEDS_A_RESET, beside_what_exists

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/schedulers.md").read_text()
EXAMPLES = ROOT / "examples"
NODE = "node-a"
Json = dict[str, Any]


READS = read_yaml(Path(__file__).with_name("values").joinpath("schedulers.yaml"))


def names_for(who: str, kind: str) -> set[str]:
    return set(READS[who].get(kind, ()))


@pytest.fixture(scope="module")
def classes() -> dict[str, Json]:
    """Every DeviceClass of the chart, by name."""
    mig = yaml.safe_load_all((DAEMONSET / "chart/files/mig-classes.yaml").read_text())
    shares = standard_classes("gpu.nvidia.com")["shares.gpu.nvidia.com"]
    return {
        entry["metadata"]["name"]: entry for entry in (*of_kind(installed(), "DeviceClass"), *mig, shares)
    }


def inventory_of(machine: str, directory: Path, *, on_demand: bool = False) -> Inventory:
    node = SimulatedNode(machine, directory)
    try:
        if not on_demand:
            return node.discover()
        if machine in MODE_NEEDS_A_RESET:
            node.machine.set_mig_mode(0, True)
        node.session.reopen()
        found = read_inventory(on_demand=lambda gpu: True)
        return replace(found, gpus=tuple(map(beside_what_exists, found.gpus)))
    finally:
        node.close()


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pool]:
    """Every way of offering GPUs: whole, cut by hand, cut on demand, shared in each mode."""
    made = tmp_path_factory.mktemp("machines")
    with structlog.testing.capture_logs():
        whole = inventory_of("dgx-h100", made / "whole")
        pools = {
            "whole": build_pool(whole, NODE),
            "static": build_pool(inventory_of("h100-mig-static", made / "static"), NODE),
        }
        for machine in ("a30-4", "dgx-a100-80gb", "hgx-h100-4", "dgx-b200", "rtx-pro-6000-8"):
            pools[machine] = build_pool(inventory_of(machine, made / machine, on_demand=True), NODE)
        for mode, shares in (("shares", 4), ("memory", None), ("unlimited", None)):
            rule = SharingRule(mode, shares, enforce="mps", multiprocessors=True)
            pools[mode] = build_pool(whole, NODE, share_all(rule))
    return pools


@pytest.fixture(scope="module")
def devices(pools: dict[str, Pool]) -> list[Json]:
    assert [fault for pool in pools.values() for fault in pool.faults] == []
    return [device for pool in pools.values() for content in pool.slices for device in content.devices]


def golden(name: str) -> list[Json]:
    content = yaml.load((ROOT / f"tests/golden/{name}.yaml").read_text(), Loader=yaml.CSafeLoader)
    return [device for entry in content["slices"] for device in entry["devices"]]


@pytest.mark.parametrize("who", READS)
def test_names_that_a_scheduler_reads_are_published(
    who: str, pools: dict[str, Pool], devices: list[Json]
) -> None:
    attributes = READS[who].get("attributes", {})
    types = {
        name: kind for device in devices for name, value in device["attributes"].items() for kind in value
    }
    assert {name: types.get(name) for name in attributes} == attributes
    assert names_for(who, "capacities") <= {name for device in devices for name in device.get("capacity", ())}
    sets = [one for pool in pools.values() for content in pool.slices for one in content.shared_counters]
    eaten = [use for device in devices for use in device.get("consumesCounters", ())]
    assert (len(sets) > 20, len(eaten) > 200) == (True, True)
    assert all(names_for(who, "counters") <= set(entry["counters"]) for entry in (*sets, *eaten))


def test_a_whole_gpu_has_what_karpenter_expects_of_it() -> None:
    """Its templates are those of NVIDIA's driver for a p5.48xlarge."""
    for device in golden("dgx-h100"):
        types = {name: next(iter(value)) for name, value in device["attributes"].items()}
        assert READS["Karpenter"]["attributes"].items() <= types.items()
        values = {name: next(iter(value.values())) for name, value in device["attributes"].items()}
        assert (values["type"], values["productName"]) == ("gpu", "NVIDIA H100 80GB HBM3")
        assert (values["architecture"], values["brand"]) == ("Hopper", "Nvidia")
        assert values["cudaComputeCapability"] == "9.0.0"
        assert list(device["capacity"]) == ["memory"]


def test_slices_belong_to_a_node_and_make_a_whole_pool(pools: dict[str, Pool]) -> None:
    """Else Karpenter and the Cluster Autoscaler wait for ever, and KAI sees no GPUs on the node."""
    for pool in pools.values():
        written = slice_changes(pool, (), Owner(DEFAULT_DRIVER_NAME, NODE, "a-uid")).creates
        assert len(written) == len(pool.slices)
        for entry in written:
            spec = entry["spec"]
            assert (spec["driver"], spec["nodeName"]) == ("gpu.nvidia.com", NODE)
            assert spec["pool"] == {"name": NODE, "generation": 1, "resourceSliceCount": len(written)}
            assert not spec.keys() & {"allNodes", "nodeSelector", "perDeviceNodeSelection"}
            assert ("devices" in spec) != ("sharedCounters" in spec)
            for device in spec.get("devices", ()):
                assert not device.keys() & {"allNodes", "nodeName", "nodeSelector"}


def selecting(entry: Json) -> list[str]:
    return [one["cel"]["expression"] for one in entry["spec"]["selectors"]]


def chosen(entry: Json, device: Json, *, fields: bool = True) -> bool:
    """Whether a class selects a device. Without `fields`, by attributes and capacities alone, as Kueue does."""
    seen = view(DEFAULT_DRIVER_NAME, device)
    seen = seen if fields else replace(seen, allow_multiple_allocations=False)
    try:
        return all(compiled(expression).matches(seen) for expression in selecting(entry))
    except SelectorError:
        return False


def test_every_class_selects_devices_that_are_published(
    classes: dict[str, Json], devices: list[Json]
) -> None:
    """By whatever names its selectors have now."""
    parts = {name for name in classes if name.startswith("mig-")}
    assert classes.keys() - parts == {
        "gpu.nvidia.com", "mig.nvidia.com", "timeslice.gpu.nvidia.com", "mps.gpu.nvidia.com",
        "shares.gpu.nvidia.com",
    }  # fmt: skip
    empty = {name for name in classes if not any(chosen(classes[name], device) for device in devices)}
    # Of machines that are not among those above.
    assert empty <= parts
    assert len(parts - empty) > 20


def test_classes_that_kueue_cannot_judge_are_reported(classes: dict[str, Json], devices: list[Json]) -> None:
    unseen = {
        name
        for name, entry in classes.items()
        if any(chosen(entry, device) for device in devices)
        and not any(chosen(entry, device, fields=False) for device in devices)
    }
    assert unseen <= {"shares.gpu.nvidia.com"}
    assert not unseen or "selects by `allowMultipleAllocations` are refused" in PAGE


def test_kai_knows_gpus_by_names(classes: dict[str, Json]) -> None:
    counted = {name for name in classes if "gpu" in name.lower()}
    assert "gpu" in DEFAULT_DRIVER_NAME
    assert counted == {
        "gpu.nvidia.com", "timeslice.gpu.nvidia.com", "mps.gpu.nvidia.com", "shares.gpu.nvidia.com",
    }  # fmt: skip


def test_no_two_classes_have_the_same_extended_resource(classes: dict[str, Json]) -> None:
    """Of two the newer one would count, for kube-scheduler and for Kueue."""
    names = [entry["spec"].get("extendedResourceName") for entry in classes.values()]
    given = [name for name in names if name is not None]
    assert len(given) == len(set(given))
    assert [
        name
        for name, entry in classes.items()
        if entry["spec"].get("extendedResourceName") == "nvidia.com/gpu"
    ] == ["gpu.nvidia.com"]


BLOCKS: list[Json] = [
    document
    for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for document in yaml.load_all(text, Loader=yaml.CSafeLoader)
]


def block(kind: str) -> Json:
    [found] = [document for document in BLOCKS if document.get("kind") == kind]
    return found


def test_claims_and_classes_of_the_manual_are_right() -> None:
    objects = [document for document in BLOCKS if "kind" in document]
    documents = [Document("docs/schedulers.md", 1, content) for content in objects]
    reports = check_documents(documents, DEFAULT_DRIVER_NAME)
    assert [fault for report in reports for fault in (*report.faults, *report.hints)] == []
    assert [report.name for report in reports if report.verdict == "OK"] == [
        "ResourceClaim shared", "DeviceClass mig.gpu.nvidia.com", "ResourceClaimTemplate mig-3g",
    ]  # fmt: skip


def test_the_class_for_kai_is_counted_and_selects_what_the_class_for_mig_devices_does(
    classes: dict[str, Json], devices: list[Json]
) -> None:
    made = block("DeviceClass")
    assert "gpu" in made["metadata"]["name"]
    assert made["metadata"]["name"] not in classes
    assert selecting(made) == selecting(classes["mig.nvidia.com"])


def test_the_configuration_of_kueue_names_what_there_is(
    classes: dict[str, Json], pools: dict[str, Pool]
) -> None:
    mappings = block("Configuration")["resources"]["deviceClassMappings"]
    named = [name for mapping in mappings for name in mapping["deviceClassNames"]]
    assert len(named) == len(set(named)), "Kueue refuses a class that is counted in two ways"
    assert set(named) <= classes.keys()
    sources = {
        kind: (mapping["deviceClassNames"], entry[kind])
        for mapping in mappings
        for entry in mapping.get("sources", ())
        for kind in entry
    }
    assert sources.keys() == {"counter", "capacity"}
    for kind, pool in (("counter", "hgx-h100-4"), ("capacity", "memory")):
        names, source = sources[kind]
        expression = source["deviceSelector"]["cel"]["expression"]
        assert source["driver"] == DEFAULT_DRIVER_NAME
        published = [device for content in pools[pool].slices for device in content.devices]
        for name in names:
            meant = [device for device in published if chosen(classes[name], device)]
            assert meant
            assert all(compiled(expression).matches(view(DEFAULT_DRIVER_NAME, device)) for device in meant)
            for device in meant:
                amounts = (
                    [name for use in device["consumesCounters"] for name in use["counters"]]
                    if kind == "counter"
                    else device["capacity"]
                )
                assert source["name"] in amounts


def test_the_claim_for_kueue_has_one_price(pools: dict[str, Pool]) -> None:
    """Kueue charges the largest counter of all devices that match."""
    [request] = block("ResourceClaimTemplate")["spec"]["spec"]["devices"]["requests"]
    [selector] = [one["cel"]["expression"] for one in request["exactly"]["selectors"]]
    prices = set()
    for content in pools["hgx-h100-4"].slices:
        for device in content.devices:
            if device["attributes"]["type"] != {"string": "mig"}:
                continue
            if compiled(selector).matches(view(DEFAULT_DRIVER_NAME, device)):
                prices |= {use["counters"]["memory"]["value"] for use in device["consumesCounters"]}
    assert len(prices) == 1


def test_the_quota_of_kubernetes_lists_every_class_for_whole_gpus_and_parts(classes: dict[str, Json]) -> None:
    by_class = "{}.deviceclass.resource.k8s.io/devices"
    extended = {entry["spec"].get("extendedResourceName"): name for name, entry in classes.items()}
    hard = block("ResourceQuota")["spec"]["hard"]
    listed = {name for name in classes if by_class.format(name) in hard}
    listed |= {extended[key.removeprefix("requests.")] for key in hard if key.startswith("requests.")}
    assert len(listed) == len(hard)
    assert listed == {name for name in classes if not name.startswith("mig-")}


KEY = re.compile(r"(?:(?P<dimension>[^/]+)\.)?deviceclass/(?P<name>.+)")


def test_queues_of_volcano_name_classes_and_capacities_that_there_are(
    classes: dict[str, Json], pools: dict[str, Pool]
) -> None:
    example = yaml.safe_load_all((EXAMPLES / "volcano/volcano.yaml").read_text())
    queues = [
        one for one in (*example, *BLOCKS) if str(one.get("apiVersion")).startswith("scheduling.volcano.sh/")
    ]
    assert len(queues) == 2
    keys = [KEY.fullmatch(key) for queue in queues for key in queue["spec"]["capability"]]
    found = {(key["name"], key["dimension"]) for key in keys if key is not None}
    assert {name for name, _ in found} <= classes.keys()
    dimensions = {dimension for _, dimension in found if dimension}
    shared = [device for content in pools["memory"].slices for device in content.devices]
    assert dimensions == {"memory", "multiprocessors"}
    assert all(dimensions <= device["capacity"].keys() for device in shared)


@pytest.mark.parametrize("name", ["kai", "kueue", "volcano"])
def test_examples_for_a_scheduler_name_classes_that_there_are(name: str, classes: dict[str, Json]) -> None:
    text = (EXAMPLES / name / f"{name}.yaml").read_text()
    assert {line.split(": ")[1] for line in text.splitlines() if "deviceClassName:" in line} <= classes.keys()
    assert f"../../docs/schedulers.md#{name}" in (EXAMPLES / name / "README.md").read_text()


def test_pods_of_the_example_for_kai_are_in_a_queue_without_children() -> None:
    documents = list(yaml.safe_load_all((EXAMPLES / "kai/kai.yaml").read_text()))
    queues = {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "Queue"}
    [job] = [one for one in documents if one["kind"] == "Job"]
    label = "kai.scheduler/queue"
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"][label] == job["metadata"]["labels"][label] == "team-a"
    assert block("ResourceClaim")["metadata"]["labels"][label] == "team-a"
    assert "team-a" in queues
    assert [spec.get("parentQueue") for spec in queues.values()] == [None, "gpu-teams"]
    assert all(
        {"quota", "limit"} == one.keys() for spec in queues.values() for one in spec["resources"].values()
    )
