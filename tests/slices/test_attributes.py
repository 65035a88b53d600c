import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.mig.rules.counters import partitioned as beside
from dra_driver.model.gpu import Fabric, Gpu
from dra_driver.model.inventory import DriverVersions, Inventory, StaticMigDevice, VfioDevice, WholeGpu
from dra_driver.model.mig import Partitioning, PlacedProfile, Placement
from dra_driver.slices.rules.attributes import ENTRIES, Entry, semver, wire_device
from tests.fakes.samples import (
    GPU_0,
    ONE_G,
    TWO_G,
    VERSIONS,
    VFIO_0,
    bound,
    card,
    h100,
    inventory,
    mig,
    partitioned,
    uuid,
)
from tests.fakes.tables import IsGenerated, data_of, tabled

API_PAGE = Path(__file__).parents[2] / "docs/api.md"
CLUSTER = "7f3c1ad2-96f4-4e0b-8b7a-0d5f6a2c9e11"
STD = "resource.kubernetes.io/"

DATA = data_of(__file__)
FORMS: dict[str, str | dict[str, str]] = DATA["forms"]
# The pattern of semver.org, which the API server's library follows.
OFFICIAL = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(?:-((?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?"
    r"(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?",
    re.ASCII,
)


def wire(gpu: Gpu, **domains: str) -> dict[str, Any]:
    node = Inventory(VERSIONS, (gpu,), domains, confidential_compute="ppcie", imex_channels=2048)
    return wire_device(next(iter(node.devices())), node)


def attributes_of_kind(kind: str) -> set[str]:
    """Those of a device of which everything is known, and which is not shared."""
    return {entry.name for entry in ENTRIES if not entry.is_capacity and is_on(entry, kind)}


def check_form(device: dict[str, Any]) -> None:
    """Every attribute has its type and its form."""
    kind, types = device["attributes"]["type"]["string"], {entry.name: entry.type for entry in ENTRIES}
    for name, value in device["attributes"].items():
        assert list(value) == [types[name]], (device["name"], name)
        [found] = value.values()
        expected = {"string": str, "version": str, "int": int, "bool": bool}[types[name]]
        assert type(found) is expected, (device["name"], name)
        form = FORMS[name] if expected is str else ".*"
        assert re.fullmatch(form[kind] if isinstance(form, dict) else form, str(found)), (name, value)


@pytest.mark.parametrize(("marks", "title"), [("attributes", "Attribute"), ("capacities", "Capacity")])
def test_manual_describes_every_entry(marks: str, title: str, is_generated: IsGenerated) -> None:
    rows: dict[str, list[str]] = {}
    for entry in ENTRIES:
        if entry.is_capacity == (marks == "capacities"):
            kinds = [kind for kind in ("gpu", "mig", "vfio") if is_on(entry, kind)]
            cells = f"{entry.type} | {', '.join(kinds) or 'shared'} | {entry.says}".rstrip()
            names = rows.setdefault(cells, [])
            shown = f"`{re.sub('[0-9]+$', '<N>', entry.name)}`"
            names += [shown] if shown not in names else []
    lines = [f"| {', '.join(names)} | {cells} |\n" for cells, names in rows.items()]
    is_generated(
        API_PAGE, marks, "".join([f"| {title} | Type | Devices | Value |\n|---|---|---|---|\n", *lines])
    )


CLASSES = {"gpu": WholeGpu, "mig": StaticMigDevice, "vfio": VfioDevice}


def is_on(entry: Entry, kind: str) -> bool:
    return entry.of(CLASSES[kind]) is not None


def test_whole_gpu_has_every_attribute_when_all_is_known() -> None:
    gpu = h100(0, fabric=Fabric(CLUSTER, (32766,)))
    device = wire(gpu, **{uuid(0): f"{CLUSTER}.32766"})
    assert device == DATA["whole GPU"]
    assert set(device["attributes"]) == attributes_of_kind("gpu")
    assert list(device["attributes"]) == sorted(device["attributes"])
    check_form(device)


def test_card_has_every_attribute_with_any_driver() -> None:
    found = [inventory(h100(0), cards=(card(0),)), inventory(cards=(bound(0),))]
    devices = [wire_device(node.by_name[VFIO_0], node) for node in found]
    assert devices == [DATA["card"]] * 2
    assert set(devices[0]["attributes"]) == attributes_of_kind("vfio")
    check_form(devices[0])
    bare = inventory(
        cards=(bound(0, product_name=None, addressable_memory=None, pcie_root=None, numa_node=None),)
    )
    device = wire_device(bare.by_name[VFIO_0], bare)
    assert "capacity" not in device
    assert attributes_of_kind("vfio") - device["attributes"].keys() == {
        "productName",
        STD + "pcieRoot",
        STD + "numaNode",
    }


def test_minor_number_is_not_an_attribute_where_mig_mode_comes_and_goes() -> None:
    placed = PlacedProfile(ONE_G, (Placement(6, 1),))
    cut = replace(h100(2), partitioning=Partitioning((placed,), ((ONE_G, Placement(6, 1)),)))
    whole, part = inventory(cut).devices()
    for device, name in ((whole, "index"), (part, "parentIndex")):
        attributes = wire_device(device, inventory(cut))["attributes"]
        assert (attributes[name], "minor" in attributes, "parentMinor" in attributes) == (
            {"int": 2}, False, False,
        )  # fmt: skip


def test_mig_device_has_its_own_and_its_parents_attributes() -> None:
    device = wire(partitioned(2, mig(2, TWO_G, 4, 2, 3), mig(2, ONE_G, 6, 1, 9)))
    assert device == DATA["MIG device"]
    assert set(device["attributes"]) == attributes_of_kind("mig")
    check_form(device)


def test_only_type_and_uuid_are_there_when_nothing_else_is_known() -> None:
    node = Inventory(DriverVersions(), (Gpu(uuid(0)),))
    assert wire_device(node.by_name[GPU_0], node) == {
        "name": GPU_0,
        "attributes": {"type": {"string": "gpu"}, "uuid": {"string": uuid(0)}},
    }


@pytest.mark.parametrize(
    ("field", "attributes"),
    [
        ("index", {"index"}), ("minor", {"minor"}), ("pci_bus_id", {STD + "pciBusID"}),
        ("product_name", {"productName"}), ("brand", {"brand"}), ("architecture", {"architecture"}),
        ("cuda_compute_capability", {"cudaComputeCapability"}), ("addressing_mode", {"addressingMode"}),
        ("pcie_root", {STD + "pcieRoot"}), ("numa_node", {STD + "numaNode"}), ("nvlink_links", {"nvlinkLinks"}),
        ("power_limits_w", {"powerLimitMinWatts", "powerLimitMaxWatts"}),
        ("power_limit_default_w", {"powerLimitDefaultWatts"}),
        ("mig_capable", {"migCapable"}), ("module_id", {"gpuModuleID"}),
        ("chassis", {"chassisSerialNumber", "slotNumber", "trayIndex"}),
        ("fabric", {"fabricClusterUUID", "fabricCliqueID", "imexChannels"}),
    ],
)  # fmt: skip
def test_unknown_value_costs_only_its_attribute(field: str, attributes: set[str]) -> None:
    gpu = h100(0, fabric=Fabric(CLUSTER, (1,)))
    known = wire(gpu)
    without = wire(replace(gpu, **{field: None}))
    assert set(known["attributes"]) - set(without["attributes"]) == attributes
    rest = {name: value for name, value in known["attributes"].items() if name not in attributes}
    assert without == {**known, "attributes": rest}


def test_zero_and_false_are_published_when_they_are_known() -> None:
    gpu = h100(0, index=0, minor=0, numa_node=0, nvlink_links=0, mig_capable=False)
    attributes = wire(gpu)["attributes"]
    assert attributes["nvlinkLinks"] == {"int": 0}
    assert attributes["migCapable"] == {"bool": False}
    assert attributes["index"] == attributes["minor"] == {"int": 0}


def test_empty_text_is_absent() -> None:
    assert "productName" not in wire(h100(0, product_name=""))["attributes"]


@given(st.text(min_size=1, max_size=80).filter(lambda text: text.isprintable()))
def test_long_text_is_cut_to_64_bytes_without_breaking_a_character(name: str) -> None:
    value = wire(h100(0, product_name=name))["attributes"]["productName"]["string"]
    assert name.startswith(value)
    assert len(value.encode()) <= 64
    assert value == name or len(value.encode()) > 64 - 4


def test_bus_id_is_absent_when_its_domain_has_no_standard_form() -> None:
    device = wire(h100(0, pci_bus_id="10000:01:00.0"))
    assert STD + "pciBusID" not in device["attributes"]


def test_domain_is_that_of_the_gpu_itself() -> None:
    node = inventory(h100(0), h100(1), **{uuid(1): "nvlink-00000001"})
    devices = {name: wire_device(device, node) for name, device in node.by_name.items()}
    assert "nvlinkDomain" not in devices["gpu-00000000"]["attributes"]
    assert devices["gpu-00000001"]["attributes"]["nvlinkDomain"] == {"string": "nvlink-00000001"}


def on_demand(**changes: Any) -> Gpu:
    rows = tuple(
        PlacedProfile(profile, tuple(Placement(start, size) for start in starts))
        for profile, size, starts in ((ONE_G, 1, range(7)), (TWO_G, 2, (0, 2, 4)))
    )
    return h100(0, partitioning=beside(Partitioning(rows), (), offers_whole=True), **changes)


def test_mig_device_that_can_be_made_has_all_but_a_uuid_and_memory_slices() -> None:
    node = replace(inventory(on_demand()), confidential_compute="ppcie")
    made = wire(partitioned(0, mig(0, TWO_G, 4, 2, 3)))
    device = wire_device(node.by_name[f"{GPU_0}-mig-2g20gb-14-4"], node)
    assert device["name"] == made["name"]
    del made["attributes"]["uuid"], made["capacity"]["memorySlice4"], made["capacity"]["memorySlice5"]
    del made["attributes"]["parentMinor"]
    assert device == made
    check_form(device)


@pytest.mark.parametrize(("known", "stated"), [(132, "132"), (None, "32")])
def test_gpu_that_can_be_cut_reports_its_engines_and_keeps_its_memory(known: int | None, stated: str) -> None:
    device = wire(on_demand(multiprocessors=known))
    assert device["attributes"] == wire(h100(0, minor=None))["attributes"]
    assert list(device["capacity"]) == sorted(device["capacity"])
    assert {name: entry["value"] for name, entry in device["capacity"].items()} == {
        "copyEngines": "2",
        "decoders": "2",
        "encoders": "0",
        "jpegEngines": "2",
        "memory": "81559Mi",
        "multiprocessors": stated,
        "ofaEngines": "0",
    }


def test_gpu_that_is_not_cut_because_nothing_fits_reports_its_memory_only() -> None:
    node = replace(inventory(on_demand()), confidential_compute="ppcie").without_partitions()
    assert [wire_device(device, node) for device in node.devices()] == [wire(h100(0, minor=None))]


@tabled("text", "expected")
def test_version_is_made_semantic(text: str | None, expected: str | None) -> None:
    assert semver(text) == expected


@given(
    st.text(max_size=20)
    | st.lists(st.text("0123456789", min_size=1, max_size=9), min_size=1, max_size=6).map(".".join)
)
def test_version_is_always_one_that_the_api_server_takes(text: str) -> None:
    version = semver(text)
    assert version is None or OFFICIAL.fullmatch(version)
