"""The classes of daemonset/ and claims of examples/, decided by the playground's scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from playground.apiserver import PlaygroundApiServer
from playground.scheduler import PlaygroundScheduler

from dra_driver.api.decode import decode
from dra_driver.settings import resolve
from dra_driver.slices.rules.build import build_pool
from tests.fakes.samples import DRIVER, MIXED, NODE, h100, inventory

ROOT = Path(__file__).parents[2]
GROUP = "resource.k8s.io"
CLASSES = ("daemonset/base/device-classes.yaml", "daemonset/components/shares/device-class.yaml")
EXAMPLES = ("time-slicing", "mps-shared-claim", "gpu-shares", "gpu-memory", "mig-shares", "selectors")


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / path).read_text()))


def section(name: str) -> str:
    """The `sharing:` section that an example's README shows."""
    lines = (ROOT / "examples" / name / "README.md").read_text().splitlines()
    if "    sharing:" not in lines:
        return ""
    start = lines.index("    sharing:")
    end = lines.index("", start)
    return "\n".join(line[4:] for line in lines[start:end])


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_allocated_on_a_node_that_is_configured_as_it_says(name: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(section(name))
    sharing = resolve({"node_name": NODE}, config).sharing
    server = PlaygroundApiServer()
    for item in (item for path in CLASSES for item in documents(path)):
        server.add("deviceclasses", item, group=GROUP)
    pool = build_pool(inventory(h100(0, multiprocessors=132), MIXED.gpus[2]), NODE, sharing)
    spec = {
        "driver": DRIVER,
        "nodeName": NODE,
        "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
        "devices": list(pool.slices[0].devices),
    }
    server.add("resourceslices", {"metadata": {"name": "s"}, "spec": spec}, group=GROUP)
    scheduler = PlaygroundScheduler(server)
    plurals = {
        "ResourceClaim": "resourceclaims",
        "ResourceClaimTemplate": "resourceclaimtemplates",
        "Pod": "pods",
    }
    for item in documents(f"examples/{name}/{name}.yaml"):
        item["metadata"]["namespace"] = "default"
        group = "" if item["kind"] == "Pod" else GROUP
        server.add(plurals[item["kind"]], item, group=group)
        if item["kind"] == "Pod":
            assert scheduler.schedule_pod("default", item["metadata"]["name"])["spec"]["nodeName"] == NODE
    claims = server.objects("resourceclaims")
    assert len(claims) == (2 if section(name) else 1)
    results = [claim["status"]["allocation"]["devices"]["results"] for claim in claims]
    assert len({result["device"] for (result,) in results}) == 1
    assert all("shareID" in result for (result,) in results) == bool(section(name))
    for claim in claims:
        for entry in claim["status"]["allocation"]["devices"].get("config", ()):
            assert decode(entry["opaque"]["parameters"])


def test_configuration_of_the_component_is_valid() -> None:
    path = ROOT / "daemonset/components/shares/config.yaml"
    assert len(resolve({"node_name": NODE}, path).sharing.entries) == 1
