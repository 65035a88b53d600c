"""The examples of MIG on demand with the shipped classes, decided by the playground's scheduler on one H100."""

from __future__ import annotations

from typing import Any

import pytest
from playground.apiserver import PlaygroundApiServer
from playground.scheduler import AllocationError, PlaygroundScheduler

from dra_driver.api.config import MigDeviceConfig
from dra_driver.api.decode import decode
from dra_driver.mig.rules.counters import partitioned
from dra_driver.slices.rules.build import build_pool
from tests.fakes.samples import DRIVER, NODE, h100, inventory
from tests.mig.migtables import MODELS, table
from tests.validation.test_sharing_manifests import GROUP, ROOT, documents

CLASSES = documents("daemonset/components/mig-classes/device-classes.yaml")
PLURALS = {
    "ResourceClaim": "resourceclaims",
    "ResourceClaimTemplate": "resourceclaimtemplates",
    "Pod": "pods",
}


@pytest.fixture
def server() -> PlaygroundApiServer:
    """A node with one H100 whose MIG devices are made on demand, and the classes of the component."""
    server = PlaygroundApiServer()
    for entry in CLASSES:
        server.add("deviceclasses", entry, group=GROUP)
    gpu = h100(0, partitioning=partitioned(table(MODELS["h100-sxm"]), (), offers_whole=True))
    parts = build_pool(inventory(gpu), NODE).slices
    for number, part in enumerate(parts):
        pool = {"name": NODE, "generation": 1, "resourceSliceCount": len(parts)}
        spec: dict[str, Any] = {"driver": DRIVER, "nodeName": NODE, "pool": pool}
        spec |= {"sharedCounters": list(part.shared_counters)} if part.shared_counters else {}
        spec |= {"devices": list(part.devices)} if part.devices else {}
        server.add("resourceslices", {"metadata": {"name": f"s{number}"}, "spec": spec}, group=GROUP)
    return server


def apply(server: PlaygroundApiServer, name: str) -> None:
    """Create what an example has, and schedule its pods."""
    scheduler = PlaygroundScheduler(server)
    for item in documents(f"examples/{name}/{name}.yaml"):
        item["metadata"]["namespace"] = "default"
        server.add(PLURALS[item["kind"]], item, group="" if item["kind"] == "Pod" else GROUP)
        if item["kind"] == "Pod":
            assert scheduler.schedule_pod("default", item["metadata"]["name"])["spec"]["nodeName"] == NODE


@pytest.mark.parametrize(
    ("name", "profiles"),
    [
        ("mig-on-demand", ["1g10gb-19"]),
        ("mig-same-gpu", ["3g40gb-9", "2g20gb-14", "1g10gb-19", "1g10gb-19"]),
        ("mig-mps", ["2g20gb-14"]),
    ],
)
def test_example_is_allocated(server: PlaygroundApiServer, name: str, profiles: list[str]) -> None:
    apply(server, name)
    (claim,) = server.objects("resourceclaims")
    allocated = claim["status"]["allocation"]["devices"]
    got = [result["device"] for result in allocated["results"]]
    assert [device.split("-mig-")[1].rpartition("-")[0] for device in got] == profiles
    configs = [decode(entry["opaque"]["parameters"]) for entry in allocated.get("config", ())]
    if name == "mig-mps":
        (config,) = configs
        assert isinstance(config, MigDeviceConfig)
        assert config.sharing is not None
        assert config.sharing.strategy == "MPS"
        assert len(server.objects("pods", group="")) == len(claim["status"]["reservedFor"]) == 2


def test_gpu_is_full_after_its_profiles(server: PlaygroundApiServer) -> None:
    apply(server, "mig-same-gpu")
    with pytest.raises(AllocationError):
        apply(server, "mig-mps")


def test_extended_resource_of_the_example_is_that_of_a_class() -> None:
    (pod,) = documents("examples/mig-extended-resource/mig-extended-resource.yaml")
    (container,) = pod["spec"]["containers"]
    named = {entry["spec"]["extendedResourceName"] for entry in CLASSES}
    assert set(container["resources"]["limits"]) <= named
    assert "resourceClaims" not in pod["spec"]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("mig-*")), ids=lambda path: path.name)
def test_readme_names_what_the_folder_has(path: Any) -> None:
    text = (path / "README.md").read_text()
    assert f"kubectl apply -f examples/{path.name}" in text
    for item in documents(f"examples/{path.name}/{path.name}.yaml"):
        if item["kind"] == "Pod":
            assert f"kubectl logs {item['metadata']['name']}" in text
