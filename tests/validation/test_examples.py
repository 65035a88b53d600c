"""The classes of daemonset/ and the claims of examples/, decided by the playground's scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from playground.apiserver import PlaygroundApiServer
from playground.scheduler import AllocationError, PlaygroundScheduler

from dra_driver.api.config import MigDeviceConfig
from dra_driver.api.decode import decode
from dra_driver.mig.rules.counters import partitioned
from dra_driver.model.gpu import Gpu
from dra_driver.model.sharing import NO_SHARING, SharingPolicy
from dra_driver.settings import resolve
from dra_driver.slices.rules.build import build_pool
from tests.fakes.samples import DRIVER, MIXED, NODE, h100, inventory
from tests.fakes.tables import tabled
from tests.mig.migtables import MODELS, table

ROOT = Path(__file__).parents[2]
GROUP = "resource.k8s.io"
CLASSES = ("base/device-classes", "components/shares/device-class", "components/mig-classes/device-classes")
PLURALS = {
    "ResourceClaim": "resourceclaims",
    "ResourceClaimTemplate": "resourceclaimtemplates",
    "Pod": "pods",
}
Json = dict[str, Any]


def documents(path: str) -> list[Json]:
    return list(yaml.safe_load_all((ROOT / path).read_text()))


def section(name: str) -> str:
    """The `sharing:` section that an example's README shows."""
    lines = (ROOT / "examples" / name / "README.md").read_text().splitlines()
    if "    sharing:" not in lines:
        return ""
    start = lines.index("    sharing:")
    end = lines.index("", start)
    return "\n".join(line[4:] for line in lines[start:end])


def node(*gpus: Gpu, sharing: SharingPolicy = NO_SHARING) -> PlaygroundApiServer:
    """An API server with all classes, and the slices of one node."""
    server = PlaygroundApiServer()
    for entry in (entry for path in CLASSES for entry in documents(f"daemonset/{path}.yaml")):
        server.add("deviceclasses", entry, group=GROUP)
    parts = build_pool(inventory(*gpus), NODE, sharing).slices
    for number, part in enumerate(parts):
        pool = {"name": NODE, "generation": 1, "resourceSliceCount": len(parts)}
        spec: Json = {"driver": DRIVER, "nodeName": NODE, "pool": pool}
        spec |= {"sharedCounters": list(part.shared_counters)} if part.shared_counters else {}
        spec |= {"devices": list(part.devices)} if part.devices else {}
        server.add("resourceslices", {"metadata": {"name": f"s{number}"}, "spec": spec}, group=GROUP)
    return server


def allocated(server: PlaygroundApiServer, name: str) -> list[Json]:
    """The claims of an example, after all of its pods have been scheduled."""
    scheduler = PlaygroundScheduler(server)
    for item in documents(f"examples/{name}/{name}.yaml"):
        item["metadata"]["namespace"] = "default"
        server.add(PLURALS[item["kind"]], item, group="" if item["kind"] == "Pod" else GROUP)
        if item["kind"] == "Pod":
            assert scheduler.schedule_pod("default", item["metadata"]["name"])["spec"]["nodeName"] == NODE
    return [claim["status"] for claim in server.objects("resourceclaims")]


@pytest.mark.parametrize(
    "name", ["time-slicing", "mps-shared-claim", "gpu-shares", "gpu-memory", "mig-shares", "selectors"]
)
def test_example_is_allocated_on_a_node_that_is_configured_as_it_says(name: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(section(name))
    sharing = resolve({"node_name": NODE}, config).sharing
    claims = allocated(node(h100(0, multiprocessors=132), MIXED.gpus[2], sharing=sharing), name)
    assert len(claims) == (2 if section(name) else 1)
    results = [claim["allocation"]["devices"]["results"] for claim in claims]
    assert len({result["device"] for (result,) in results}) == 1
    assert all("shareID" in result for (result,) in results) == bool(section(name))
    for claim in claims:
        for entry in claim["allocation"]["devices"].get("config", ()):
            assert decode(entry["opaque"]["parameters"])


@pytest.fixture
def on_demand() -> PlaygroundApiServer:
    """A node with one H100 whose MIG devices are made on demand."""
    return node(h100(0, partitioning=partitioned(table(MODELS["h100-sxm"]), (), offers_whole=True)))


@tabled("name", "profiles")
def test_example_with_mig_on_demand_is_allocated(
    on_demand: PlaygroundApiServer, name: str, profiles: list[str]
) -> None:
    (claim,) = allocated(on_demand, name)
    devices = claim["allocation"]["devices"]
    got = [result["device"] for result in devices["results"]]
    assert [device.split("-mig-")[1].rpartition("-")[0] for device in got] == profiles
    if name == "mig-mps":
        (config,) = [decode(entry["opaque"]["parameters"]) for entry in devices["config"]]
        assert isinstance(config, MigDeviceConfig)
        assert config.sharing is not None
        assert config.sharing.strategy == "MPS"
        assert len(on_demand.objects("pods", group="")) == len(claim["reservedFor"]) == 2


def test_gpu_is_full_after_its_profiles(on_demand: PlaygroundApiServer) -> None:
    allocated(on_demand, "mig-same-gpu")
    with pytest.raises(AllocationError):
        allocated(on_demand, "mig-mps")


def test_configuration_of_the_component_is_valid() -> None:
    path = ROOT / "daemonset/components/shares/config.yaml"
    assert len(resolve({"node_name": NODE}, path).sharing.entries) == 1


def test_extended_resource_of_the_example_is_that_of_a_class() -> None:
    (pod,) = documents("examples/mig-extended-resource/mig-extended-resource.yaml")
    (container,) = pod["spec"]["containers"]
    named = {entry["spec"]["extendedResourceName"] for entry in documents(f"daemonset/{CLASSES[2]}.yaml")}
    assert set(container["resources"]["limits"]) <= named
    assert "resourceClaims" not in pod["spec"]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("mig-*")), ids=lambda path: path.name)
def test_readme_names_what_the_folder_has(path: Path) -> None:
    text = (path / "README.md").read_text()
    assert f"kubectl apply -f examples/{path.name}" in text
    for item in documents(f"examples/{path.name}/{path.name}.yaml"):
        if item["kind"] == "Pod":
            assert f"kubectl logs {item['metadata']['name']}" in text
