"""The examples in the playground: each starts, and its pods get the devices that its README names."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from tests.fakes.waiting import eventually
from tests.playground.test_playground import EXAMPLES, ROOT, Playground, documents, start

__all__ = ["start"]

CONFIGURATIONS = {
    "imex": "imex: {channel: 0}",
    "layout": (ROOT / "docs/tutorials/layout.yaml").read_text(),
    "mig-shares": 'sharing: [{selector: {pciBusIDs: ["0000:53:00.0"]}, mode: shares, shares: 2, enforce: mps}]',
    "parts": """
        sharing:
          - {selector: {pciBusIDs: ["0000:d1:00.0"]}, mode: shares, shares: 4, enforce: mps}
          - {selector: {pciBusIDs: ["0000:c3:00.0"]}, mode: memory, enforce: mps, multiprocessors: true}
        dynamicMig: {enabled: true, gpus: {pciBusIDs: ["0000:df:00.0", "0000:9d:00.0"]}}
    """,
    "passthrough": "passthrough: {enabled: true}",
}
GPUS = [f"gpu {number}" for number in range(8)]
ADMIN = [f"{gpu} admin" for gpu in GPUS]
"""What a pod of a monitoring agent gets."""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """On the disk: MPS daemons have a /dev/shm of their own."""
    with TemporaryDirectory(prefix="p -", dir="/tmp") as path:
        yield Path(path)


def limits(memory: str, percentage: int) -> list[str]:
    """What containers of an MPS claim find in their environment."""
    return [f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={memory}", f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percentage}"]


QUARTER = ["gpu 0 shares=1", *limits("20389M", 25)]
STARTED: dict[tuple[str, str], dict[str, list[list[str]]]] = {
    ("dgx-a100-80gb", "default"): {"h100-else-a100": [["gpu 0 a100"]]},
    ("dgx-h100", "default"): {
        "admin-access": [ADMIN],
        "cuda-job": [["gpu 0"], ["gpu 1"]],
        "extended-resource": [["gpu 0"]],
        "gpu-and-nic": [["gpu 0", "dra.net 1"]],
        "gpu-feature-discovery": [ADMIN],
        "h100-else-a100": [["gpu 0 h100"]],
        "jobset": [GPUS[:4], GPUS[4:]],
        "kai": [GPUS[:2], GPUS[2:4]],
        "kueue": [GPUS[:2], GPUS[2:4], GPUS[4:6], GPUS[6:]],
        "monitoring-daemonset": [ADMIN],
        "mps-shared-claim": [["gpu 0", *limits("10240M", 50)]] * 2,
        "nvlink-domain": [GPUS[:2]],
        "one-gpu": [["gpu 0"]],
        "power-limit": [["gpu 0"]],
        "pytorch-ddp": [GPUS],
        "reset-gpu": [["gpu.nvidia.com 0 admin"]],
        "selectors": [["gpu 0"]],
        "shared-claim": [["gpu 0"], ["gpu 0"]],
        "time-slicing": [["gpu 0"], ["gpu 0"]],
        "two-claims": [["gpu 0", "gpu 1"]],
        "volcano": [GPUS[:2], GPUS[2:4], GPUS[4:6], GPUS[6:]],
    },
    ("dgx-h100", "layout"): {"mixed-inference": [["1g.10gb 0"], ["gpu 1"]]},
    ("dgx-h100", "passthrough"): {"vm-gpu": [["vfio 0"]]},
    ("dgx-h100", "parts"): {
        "gpu-memory": [["gpu 0 memory=39Gi multiprocessors=66", *limits("39936M", 50)]] * 2,
        "gpu-shares": [QUARTER, QUARTER],
        "mig-else-share": [["1g.10gb 0 mig"]],
        "mig-extended-resource": [["1g.10gb 0"]],
        "mig-mps": [["2g.20gb 0", *limits("8192M", 50)]] * 2,
        "mig-on-demand": [["1g.10gb 0"]],
        "mig-same-gpu": [["3g.40gb 0", "2g.20gb 1", "1g.10gb 2", "1g.10gb 3"]],
        "vllm": [["gpu 0 shares=2", *limits("40779M", 50)]] * 2,
    },
    ("gb200-nvl72-tray", "imex"): {"imex-job": [GPUS[:4]]},
    ("h100-mig-static", "mig-shares"): {
        "mig-shares": [["3g.40gb 0 shares=1", *limits("20224M", 50)]] * 2,
        "static-mig": [["1g.10gb 0"]],
    },
}
"""By machine and configuration: what each pod of an example gets, in the order of the file. Pods with the same number
share a device. imex-job starts one pod of two, because the playground has only one tray. A GPU
in maintenance is in no slice."""
STORED = ("Namespace", "ResourceClaim", "ResourceClaimTemplate")
"""The kinds that the playground stores of an example, besides its pods."""


def test_every_example_is_started() -> None:
    names = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
    assert sorted({name for examples in STARTED.values() for name in examples}) == names


@pytest.mark.parametrize(("machine", "config"), STARTED)
def test_example_starts_with_the_devices_of_its_readme(
    start: Callable[..., Playground], tmp_path: Path, machine: str, config: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIGURATIONS.get(config, ""))
    playground = start(machine, "--config", str(file))
    eventually(playground.devices)
    if "gpu-and-nic" in STARTED[machine, config]:
        playground.create(nic_of_dranet(playground.devices()[-1]))
    got = {name: started(playground, name, len(pods)) for name, pods in STARTED[machine, config].items()}
    assert got == STARTED[machine, config]


def test_nvlink_pair_is_found_where_another_pod_has_half_of_a_pair(start: Callable[..., Playground]) -> None:
    playground = start("a100-pcie-pairs")
    eventually(playground.devices)
    playground.apply("one-gpu")
    eventually(lambda: playground.phase("one-gpu") == "Running")
    playground.apply("nvlink-domain")
    eventually(lambda: playground.phase("nvlink-domain") == "Running")
    domains = {device["name"]: device["attributes"]["nvlinkDomain"] for device in playground.devices()}
    [pair] = [claim for claim in playground.claims() if uses(claim, {"nvlink-domain"})]
    first, second = pair["status"]["allocation"]["devices"]["results"]
    assert domains[first["device"]] == domains[second["device"]]


def test_monitor_starts_where_a_gpu_is_lost(start: Callable[..., Playground]) -> None:
    playground = start("dgx-h100")
    eventually(lambda: len(playground.devices()) == 8)
    lose = next(command for command in playground.commands if "simulate lose" in command)
    subprocess.run(["bash", "-c", playground.paste + lose], check=True, capture_output=True)
    eventually(lambda: any(device.get("taints") for device in playground.devices()))
    for example in ("admin-access", "gpu-feature-discovery", "monitoring-daemonset"):
        assert started(playground, example, 1) == [ADMIN]


NVIDIA_SMI = """#!/bin/sh
# As NVIDIA's: it refuses a reset in persistence mode.
echo "$*" >>calls
case $* in
    --query-gpu*) cat mode ;;
    "-pm 0"*) echo Disabled >mode ;;
    "-pm 1"*) echo Enabled >mode ;;
    --gpu-reset*) [ ! -e in-use ] && grep -q Disabled mode ;;
esac
"""


@pytest.mark.parametrize("mode", ["Enabled", "Disabled"])
@pytest.mark.parametrize("is_in_use", [False, True])
def test_job_resets_a_gpu_and_keeps_its_persistence_mode(tmp_path: Path, mode: str, is_in_use: bool) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "mode").write_text(f"{mode}\n")
    if is_in_use:
        (tmp_path / "in-use").touch()
    [container] = documents("reset-gpu")[-1]["spec"]["template"]["spec"]["containers"]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MAINTENANCE_GPUS": "GPU-1,GPU-2"}
    done = subprocess.run(container["command"], cwd=tmp_path, env=env, check=False)
    assert (done.returncode != 0, (tmp_path / "mode").read_text()) == (is_in_use, f"{mode}\n")
    assert "--gpu-reset -i GPU-1,GPU-2" in (tmp_path / "calls").read_text().splitlines()


def test_virtual_machine_names_the_request_of_its_claim() -> None:
    template, machine = documents("vm-gpu")
    [request] = template["spec"]["spec"]["devices"]["requests"]
    spec = machine["spec"]["template"]["spec"]
    claim = {"name": "gpu", "resourceClaimTemplateName": template["metadata"]["name"]}
    assert spec["resourceClaims"] == [claim]
    assert spec["domain"]["devices"]["gpus"] == [
        {"name": "gpu1", "claimName": claim["name"], "requestName": request["name"]}
    ]


def nic_of_dranet(gpu: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """An adapter behind the PCIe root of a GPU, and the class that the README shows."""
    readme = (EXAMPLES / "gpu-and-nic/README.md").read_text()
    yield yaml.safe_load(readme[readme.index("    apiVersion") :].partition("\n\n")[0])
    name = "resource.kubernetes.io/pcieRoot"
    attributes = {"rdma": {"bool": True}, name: gpu["attributes"][name]}
    spec = {
        "driver": "dra.net", "nodeName": "playground-node", "devices": [{"name": "nic", "attributes": attributes}],
        "pool": {"name": "playground-node", "generation": 1, "resourceSliceCount": 1},
    }  # fmt: skip
    yield {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "nic"},
        "spec": spec,
    }


def started(playground: Playground, example: str, count: int) -> list[list[str]]:
    """What the first `count` pods of an example get. Deletes them, and waits until their devices are free again."""
    objects = documents(example)
    playground.create(one for one in objects if one["kind"] in STORED)
    pods = [pod for one in objects for pod in pods_of(one)]
    assert len(pods) == count or example == "imex-job"
    names = [(pod["metadata"].get("namespace", "default"), pod["metadata"]["name"]) for pod in pods[:count]]
    for pod, (namespace, name) in zip(pods, names, strict=False):
        playground.create([pod])
        eventually(lambda of=namespace, name=name: playground.phase(name, of) == "Running")
    numbers: dict[str, int] = {}
    claims = playground.claims()
    got = [
        [text for one in claims if uses(one, {name}) for text in described(playground, one, numbers)]
        for _, name in names
    ]
    for namespace, name in names:
        playground.delete(name, namespace)
    eventually(lambda: not any(uses(claim, {name for _, name in names}) for claim in playground.claims()))
    return got


def uses(claim: dict[str, Any], pods: set[str]) -> bool:
    return not pods.isdisjoint(one["name"] for one in claim.get("status", {}).get("reservedFor", ()))


def described(playground: Playground, claim: dict[str, Any], numbers: dict[str, int]) -> Iterator[str]:
    """For each device of a claim: its type, its number, the chosen alternative of `firstAvailable`, and what the claim
    consumes of it. Then the limits of MPS."""
    slices = playground.call("GET", "/apis/resource.k8s.io/v1/resourceslices")["items"]
    published = {
        (entry["spec"]["driver"], device["name"]): device["attributes"]
        for entry in slices
        for device in entry["spec"].get("devices", [])
    }
    results = claim["status"]["allocation"]["devices"]["results"]
    found = [published.get((result["driver"], result["device"]), {}) for result in results]
    for constraint in claim["spec"]["devices"].get("constraints", []):
        key = constraint["matchAttribute"].removeprefix("gpu.nvidia.com/")
        assert len({json.dumps(attributes[key]) for attributes in found}) == 1
    for result, attributes in zip(results, found, strict=True):
        what = attributes.get("profile") or attributes.get("type") or {"string": result["driver"]}
        consumed = result.get("consumedCapacity", {})
        names = ["shares"] if "shares" in consumed else ["memory", "multiprocessors"]
        taken = [f"{name}={consumed[name]}" for name in names if name in consumed]
        chosen = result["request"].partition("/")[2]
        admin = ["admin"] if result.get("adminAccess") else []
        number = numbers.setdefault(result["device"], len(numbers))
        yield " ".join(filter(None, [what["string"], str(number), chosen, *admin, *taken]))
    [spec] = Path(playground.variables["CDI_ROOT"]).glob(f"*{claim['metadata']['uid']}.yaml")
    yield from dict.fromkeys(re.findall(r"CUDA_MPS_(?:ACTIVE|PINNED)\w+=[\w=]+", spec.read_text()))


def pods_of(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the pods that a controller creates for an object at once."""
    if document["kind"] == "Pod":
        yield document
        return
    if document["kind"] == "VirtualMachine":
        document = launcher_of(document)
    for count, spec in templates(document):
        for number in range(count):
            metadata = document["metadata"] | {"name": f"{document['metadata']['name']}-{number}"}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def launcher_of(machine: dict[str, Any]) -> dict[str, Any]:
    """A virtual machine with the template of the pod that KubeVirt starts for it: the claims of the machine, and a
    container that has the request of each GPU."""
    spec = machine["spec"]["template"]["spec"]
    gpus = spec["domain"]["devices"]["gpus"]
    used = [{"name": gpu["claimName"], "request": gpu["requestName"]} for gpu in gpus]
    container = {"name": "compute", "image": "launcher", "resources": {"claims": used}}
    pod = {"spec": {"containers": [container], "resourceClaims": spec["resourceClaims"]}}
    return machine | {"spec": {"template": pod}}


def templates(content: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """How many pods start at once, and their spec."""
    if isinstance(content, list):
        for inner in content:
            yield from templates(inner)
    elif isinstance(content, dict):
        template = content.get("template")
        if isinstance(template, dict) and "containers" in template["spec"]:
            yield content.get("parallelism", content.get("replicas", 1)), template["spec"]
        else:
            yield from templates(list(content.values()))
