"""docs/cdi.md says what a container gets: its tables are compared with what the driver finds and writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dra_driver.cdi.rules.spec import claim_spec
from dra_driver.host.driver_root import DriverRoot
from dra_driver.host.gpu_nodes import GpuNodes
from dra_driver.model.driver_files import DriverFiles
from dra_driver.model.host import HostPaths
from dra_driver.simulator import SimulatedDeviceNodes, create_machine
from tests.cdi.cdi_samples import DRIVER, UID
from tests.host.trees import COMMON_NODES, LIBRARIES, VERSION, FakeNodes, link, put, put_libraries

DOCUMENT = Path(__file__).parents[2] / "docs/cdi.md"
LIB = "/usr/lib/x86_64-linux-gnu"
CONFIG_DIRS = ("/etc", "/usr/local/share", "/usr/share")


def table(name: str) -> list[list[str]]:
    """The cells of the table between the markers, without its head."""
    _, found, rest = DOCUMENT.read_text().partition(f"<!-- {name} -->\n")
    assert found, name
    lines = rest.partition(f"<!-- end of {name} -->")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def written_out(pattern: str) -> Iterator[str]:
    """Expand a pattern of the page to paths: each alternative in braces, one name for each star."""
    head, brace, rest = pattern.partition("{")
    if not brace:
        yield pattern.replace("<lib>", LIB).replace("<version>", VERSION).replace("*", "1")
        return
    choices, _, tail = rest.partition("}")
    for choice in choices.split(","):
        yield from written_out(f"{head}{choice}{tail}")


def files_of_the_table(config_dir: str) -> dict[str, str]:
    """The path in the container by the path on the host."""
    found = {}
    for _, on_host, in_container in table("files"):
        for path in (path for pattern in quoted(on_host) for path in written_out(pattern)):
            top = in_container.strip("`").removesuffix("/…")
            container_path = path if in_container == "same path" else path.replace("<config>", top)
            found[path.replace("<config>", config_dir)] = container_path
    return found


@pytest.fixture
def nodes(tmp_path: Path) -> FakeNodes:
    """A host with the driver's libraries, and nothing else of it."""
    nodes = FakeNodes()
    put_libraries(tmp_path, LIB)
    for path, (major, minor) in COMMON_NODES.items():
        nodes.add(f"{tmp_path}{path}", major, minor)
    return nodes


def scan(root: Path, nodes: FakeNodes) -> DriverFiles:
    return DriverRoot(HostPaths(str(root), "/"), nodes=nodes).scan(VERSION)


@pytest.mark.parametrize("config_dir", CONFIG_DIRS)
def test_a_container_gets_the_files_of_the_table_and_no_others(
    config_dir: str, tmp_path: Path, nodes: FakeNodes
) -> None:
    expected = files_of_the_table(config_dir)
    for path in expected:
        put(tmp_path, path).chmod(0o755)
    files = scan(tmp_path, nodes)
    found = (*files.libraries, *files.binaries, *files.firmware, *files.sockets, *files.configs)
    libraries = {f"{LIB}/{name}.so.{VERSION}" for name in LIBRARIES}
    assert {file.host_path: file.container_path for file in found} == {
        path: path for path in libraries
    } | expected


def test_the_links_of_the_table_are_made(tmp_path: Path, nodes: FakeNodes) -> None:
    put(tmp_path, f"{LIB}/libnvidia-vulkan-producer.so.{VERSION}")
    link(tmp_path, f"{LIB}/libnvidia-ml.so", "libnvidia-ml.so.1")
    put(tmp_path, f"/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{VERSION}")
    made = {found.path: found.target for found in scan(tmp_path, nodes).links}
    for path_cell, target, _ in table("links"):
        path = next(written_out(quoted(path_cell)[0]))
        wanted = [next(written_out(text)) for text in quoted(target)]
        assert path in made
        assert not wanted or made[path] == wanted[0]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The spec of a GPU of a simulated machine with the newest hook."""
    machine = create_machine(
        "dgx-h100", tmp_path_factory.mktemp("machine"), device_nodes="described", cdi_hook=True
    )
    root = str(machine.host_root)
    paths = HostPaths(root, "/", proc=f"{root}/proc", sys=f"{root}/sys")
    reader = SimulatedDeviceNodes(machine.host_root)
    bus_id = sorted((machine.host_root / "proc/driver/nvidia/gpus").iterdir())[0].name
    gpu = GpuNodes(paths, nodes=reader).whole_gpu("gpu-0", 0, bus_id)
    return claim_spec(UID, DRIVER, DriverRoot(paths, nodes=reader).scan(None), [gpu])


def test_the_hooks_are_those_of_the_table_in_its_order(spec: dict[str, Any]) -> None:
    hooks = [hook["args"][1] for hook in spec["containerEdits"]["hooks"]]
    assert hooks == [quoted(row[0])[0] for row in table("hooks") if row[2] == "yes"]
    assert {row[1] for row in table("hooks")} | {row[2] for row in table("hooks")} == {"yes", "no"}


def test_the_other_edits_of_the_table_are_in_the_spec(spec: dict[str, Any]) -> None:
    text = json.dumps(spec)
    named = {name for row in table("edits") for name in quoted(row[0])}
    assert {name for name in named if f'"{name}' not in text} == set()


def test_toolkit_of_the_page_is_the_one_whose_hook_runs_in_e2e() -> None:
    required = (DOCUMENT.parents[1] / "hack/cluster/go/nvidia-cdi-hook/go.mod").read_text()
    [version] = re.findall(r"nvidia-container-toolkit v([\d.]+)", required)
    page = DOCUMENT.read_text()
    assert f"container toolkit {version}, except" in page
    assert f"NVIDIA's own hook, {version}," in page
    assert f"tag: v{version}" in page


def test_no_directory_is_mounted(tmp_path: Path, nodes: FakeNodes) -> None:
    """A directory would add other libraries of the host; here every file of the table is one."""
    for path in files_of_the_table("/usr/share"):
        (tmp_path / path.lstrip("/")).mkdir(parents=True)
    files = scan(tmp_path, nodes)
    found = (*files.binaries, *files.firmware, *files.sockets, *files.configs)
    assert found == ()
    assert len(files.libraries) == len(LIBRARIES)
