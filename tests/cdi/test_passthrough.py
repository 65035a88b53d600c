"""CDI specs and metadata of GPUs for virtual machines, over a tree of sysfs and /dev."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dra_driver.api.config import GROUP_VERSION
from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.metadata_files import MetadataFiles, MetadataSteps
from dra_driver.cdi.rules.metadata import container_path
from dra_driver.cdi.rules.spec import encode
from dra_driver.claims.rules.plan import answer
from dra_driver.errors import RetryableError
from dra_driver.host.vfio import VfioCards
from dra_driver.model.claim import DeviceConfig
from dra_driver.model.host import DeviceNode, HostPaths
from dra_driver.model.inventory import Inventory
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import WriteCdiSpec, WriteDeviceMetadata
from tests.cdi.cdi_samples import steps_over
from tests.cdi.cdi_schema import faults
from tests.fakes.samples import (
    DRIVER,
    VFIO_0,
    VFIO_1,
    bound_by_hand,
    card,
    claim,
    h100,
    inventory,
    plan,
    result,
)
from tests.fakes.tables import tabled

GOLDEN = Path(__file__).parent / "golden"
STEP = WriteCdiSpec()
FOUND = inventory(h100(0), h100(1), cards=(card(0), card(1)))
NO_NVIDIA = Inventory(cards=(bound_by_hand(0),))
UID = "4cf8db2d-06c0-4d70-aa51-e59b25b2c16c"


class Nodes:
    """What of /dev there is."""

    def __init__(self) -> None:
        self.paths = {"/dev/vfio/vfio": 196, "/dev/vfio/40": 1, "/dev/vfio/41": 2}

    def read(self, path: str) -> DeviceNode | None:
        number = self.paths.get(path)
        return None if number is None else DeviceNode(path, "c", 240, number, 0o600)


class NoControl:
    """Allows no change of drivers."""

    has_module = True

    def write(self, path: str, text: str) -> None:
        raise AssertionError(path)

    def load_module(self, module: str, timeout_s: float) -> None:
        raise AssertionError(module)

    def maps_memory(self) -> bool:
        return self.has_module

    def users_of(self, nodes: Sequence[str], *, others_only: bool = False) -> list[str] | None:
        raise AssertionError(nodes)


class Bench:
    def __init__(self, directory: Path, found: Inventory = FOUND) -> None:
        self.found = found
        self.nodes = Nodes()
        self.sys = directory / "sys"
        self.directory = directory
        paths = HostPaths(
            driver_root=str(directory / "nothing"), sys=str(self.sys), proc=str(directory / "proc")
        )
        self.specs = CdiDirectory(directory / "cdi", DRIVER)
        self.specs.create()
        self.control = NoControl()
        cards = VfioCards(paths, self.nodes, self.control)
        self.steps = steps_over(directory, self.specs, paths, self.nodes, cards=cards)
        files = MetadataFiles(directory / "plugin", directory / "cdi", DRIVER)
        self.metadata = MetadataSteps(files, SimpleNamespace(latest=lambda: self.found), None)

    def has_iommufd(self, bus_id: str, name: str) -> None:
        """As the kernel shows it once vfio has the function."""
        (self.sys / "bus/pci/devices" / bus_id / "vfio-dev" / name).mkdir(parents=True)
        self.nodes.paths |= {"/dev/iommu": 127, f"/dev/vfio/devices/{name}": 300}

    def plan(self, *devices: Any, **iommu: Any) -> Plan:
        parameters = {"apiVersion": GROUP_VERSION, "kind": "VfioDeviceConfig", "iommu": iommu}
        configs = (DeviceConfig("FromClaim", (), DRIVER, parameters),)
        wanted = claim(*(devices or (VFIO_0,)), uid=UID, configs=configs)
        return plan(wanted, found=self.found)

    def paths(self, plan: Plan) -> dict[str, list[str]]:
        """The nodes of each device in the claim's spec, which is as the schema of CDI has it."""
        self.steps.do(STEP, plan)
        spec = self.specs.read(UID)
        assert spec is not None
        assert faults(spec) == []
        return {
            device["name"].removeprefix(f"{UID}-"): [
                node["path"] for node in device["containerEdits"]["deviceNodes"]
            ]
            for device in spec["devices"]
        }


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_spec_is_the_golden_one(bench: Bench, is_golden: Callable[[Path, str], None]) -> None:
    """It contains nothing of the NVIDIA driver, which is not even installed, and each device is complete by
    itself.
    """
    plan = bench.plan(VFIO_0, result(VFIO_1, "second"), enableAPIDevice=True)
    bench.paths(plan)
    content = bench.specs.file(UID).read_bytes()
    is_golden(GOLDEN / "passthrough.json", json.dumps(json.loads(content), indent=2) + "\n")
    assert content == encode(bench.steps.spec(plan))


@tabled("iommu", "has_iommufd", "expected")
def test_nodes_are_those_that_the_claim_prefers_and_the_kernel_has(
    bench: Bench, iommu: dict[str, Any], has_iommufd: bool, expected: list[str]
) -> None:
    plan = bench.plan(**iommu)
    if has_iommufd:
        bench.has_iommufd(
            card(0).bus_id, "vfio3"
        )  # after the plan: the kernel names it when the card is bound
    assert bench.paths(plan) == {VFIO_0: expected}


@pytest.mark.parametrize("is_in_sysfs", [True, False])
def test_group_is_given_where_the_kernel_has_no_node_of_the_function(bench: Bench, is_in_sysfs: bool) -> None:
    """Kernels since 6.1 name the device in sysfs, also where they are built without VFIO_DEVICE_CDEV."""
    if is_in_sysfs:
        bench.has_iommufd(card(0).bus_id, "vfio3")
        del bench.nodes.paths["/dev/vfio/devices/vfio3"]
    bench.nodes.paths["/dev/iommu"] = 127
    assert bench.paths(bench.plan(backendPolicy="PreferIommuFD")) == {VFIO_0: ["/dev/vfio/40"]}


@pytest.mark.parametrize("path", ["/dev/vfio/40", "/dev/vfio/vfio"])
def test_claim_waits_while_a_node_is_missing(bench: Bench, path: str) -> None:
    del bench.nodes.paths[path]
    with pytest.raises(RetryableError, match=f"device node {path} of {VFIO_0} is missing on the host"):
        bench.steps.do(STEP, bench.plan(enableAPIDevice=True))
    assert bench.specs.read(UID) is None


def test_undo_leaves_nothing(bench: Bench) -> None:
    plan = bench.plan()
    record = ClaimRecord(plan.claim, "prepared", "boot", plan.held_devices(), plan.steps)
    step = next(step for step in plan.steps if isinstance(step, WriteDeviceMetadata))
    for _ in range(2):
        bench.metadata.do(step, plan)
        bench.steps.do(STEP, plan)
    assert bench.steps.in_place(STEP, record)
    assert bench.metadata.in_place(step, record)
    for _ in range(2):
        bench.steps.undo(STEP, record.ref)
        bench.metadata.undo(step, record.ref)
    left = [path for path in bench.directory.rglob("*") if path.is_file()]
    assert left == []


@pytest.mark.parametrize("found", [FOUND, NO_NVIDIA], ids=["nvidia", "bound by hand"])
def test_kubevirt_finds_the_address_of_the_card(tmp_path: Path, found: Inventory) -> None:
    """As its pkg/dra reads: the CDI ids of the answer mount one file a request, in which the first document of a
    version that it knows has one device with the PCI address, and for a guest with NUMA nodes where the card is."""
    bench = Bench(tmp_path, found)
    plan = bench.plan()
    step = next(step for step in plan.steps if isinstance(step, WriteDeviceMetadata))
    bench.metadata.do(step, plan)
    (prepared,) = answer(plan.claim, DRIVER, plan.steps, plan.held_devices()).devices
    kind, _, name = prepared.cdi_ids[1].partition("=")
    (mount,) = [
        edits["mounts"][0]
        for path in (tmp_path / "cdi").glob("*.json")
        for spec in [json.loads(path.read_text())]
        for edits in [device["containerEdits"] for device in spec["devices"] if device["name"] == name]
        if spec["kind"] == kind
    ]
    assert mount["containerPath"] == container_path(plan.claim, "gpu", DRIVER)
    content, documents = Path(mount["hostPath"]).read_text(), []
    while content.strip():
        document, end = json.JSONDecoder().raw_decode(content.lstrip())
        documents.append(document)
        content = content.lstrip()[end:]
    assert [document["apiVersion"].rpartition("/")[2] for document in documents] == ["v1beta1", "v1alpha1"]
    (request,) = documents[1]["requests"]
    (device,) = request["devices"]
    standard = {key.rpartition("/")[2]: value for key, value in device["attributes"].items() if "/" in key}
    assert standard == {
        "pciBusID": {"string": "0000:10:00.0"},
        "pcieRoot": {"string": "pci0000:0f"},
        "numaNode": {"int": 0},
    }
    assert "mdevUUID" not in device["attributes"]


def test_card_without_the_module_that_maps_memory_is_refused_by_group_only(bench: Bench) -> None:
    """As for a card that an administrator has bound, for which no step loads it."""
    bench.control.has_module = False
    with pytest.raises(
        RetryableError, match="the kernel module vfio_iommu_type1 is missing; run `modprobe vfio_iommu_type1`"
    ):
        bench.paths(bench.plan())
    bench.has_iommufd(card(0).bus_id, "vfio3")
    assert bench.paths(bench.plan(backendPolicy="PreferIommuFD")) == {VFIO_0: ["/dev/vfio/devices/vfio3"]}
