import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dra_driver.errors import DriverGoneError, NvmlUnavailableError, RetryableError, StateError
from dra_driver.host import libraries
from dra_driver.host.driver_programs import InstalledPrograms, find_program
from dra_driver.host.driver_root import DriverRoot, find_nvml_library
from dra_driver.host.rooted_tree import RootedTree
from dra_driver.model.driver_files import BASE_HOOK_VERBS, DriverFile, DriverFiles
from dra_driver.model.host import DeviceNode, HostPaths
from tests.fakes.tables import tabled
from tests.host.trees import (
    COMMON_NODES,
    HOOK_VERBS,
    LIBRARIES,
    NIXOS_GBM,
    VERSION,
    FakeNodes,
    age,
    driver_root,
    elf,
    link,
    put,
    put_elf_libraries,
    put_hook,
    put_libraries,
    put_nixos_libraries,
)

HOST_ROOT = "/run/nvidia/driver"


@pytest.fixture(autouse=True)
def _of_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on the parameter `machine`, otherwise on x86_64."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    monkeypatch.setattr(libraries, "MACHINE", parameters.get("machine", "x86_64"))


@pytest.fixture
def nodes(tmp_path: Path) -> FakeNodes:
    return driver_root(tmp_path)


def root_at(path: Path, nodes: FakeNodes, host_root: str = HOST_ROOT) -> DriverRoot:
    paths = HostPaths(str(path), host_root, proc=str(path / "proc"), sys=str(path / "sys"))
    return DriverRoot(paths, nodes=nodes)


def scan(path: Path, nodes: FakeNodes, version: str | None = VERSION) -> DriverFiles:
    return root_at(path, nodes).scan(version)


def containers(files: tuple[DriverFile, ...]) -> list[str]:
    return [file.container_path for file in files]


def test_directory_that_cannot_be_read_now_does_not_mean_that_the_driver_is_missing(
    tmp_path: Path, nodes: FakeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = root_at(tmp_path, nodes)
    assert root.problem(VERSION) is None

    def refuse(path: str) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(os, "scandir", refuse)
    (tmp_path / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").unlink()
    for call in (lambda: root.scan(VERSION), lambda: find_nvml_library(str(tmp_path))):
        with pytest.raises(StateError, match=r"cannot read .*: Too many open files"):
            call()
    assert "Too many open files" in (root.problem(VERSION) or "")


def test_every_part_is_found_with_its_three_paths_when_the_root_is_complete(
    tmp_path: Path, nodes: FakeNodes
) -> None:
    files = scan(tmp_path, nodes)
    directory = "/usr/lib/x86_64-linux-gnu"
    assert files.version == VERSION
    assert containers(files.libraries) == sorted(f"{directory}/{name}.so.{VERSION}" for name in LIBRARIES)
    libcuda = next(file for file in files.libraries if "libcuda.so" in file.path)
    assert libcuda == DriverFile(
        f"{tmp_path}{directory}/libcuda.so.{VERSION}",
        f"{HOST_ROOT}{directory}/libcuda.so.{VERSION}",
        f"{directory}/libcuda.so.{VERSION}",
    )
    assert files.library_dirs == files.driver_dirs == (directory,)
    assert containers(files.binaries) == [
        "/usr/bin/nvidia-smi", "/usr/bin/nvidia-debugdump", "/usr/bin/nvidia-cuda-mps-control",
        "/usr/bin/nvidia-cuda-mps-server",
    ]  # fmt: skip
    assert containers(files.firmware) == [
        f"/lib/firmware/nvidia/{VERSION}/{name}" for name in ("gsp_ga10x.bin", "gsp_tu10x.bin")
    ]
    assert containers(files.sockets) == ["/run/nvidia-persistenced/socket"]
    assert containers(files.configs) == [
        "/etc/OpenCL/vendors/nvidia.icd",
        "/etc/vulkan/icd.d/nvidia_icd.json",
    ]
    assert files.hook == f"{HOST_ROOT}/usr/bin/nvidia-cdi-hook"
    assert files.hook_verbs == HOOK_VERBS
    assert files.ldconfig == f"{HOST_ROOT}/sbin/ldconfig"
    assert {node.node.path for node in files.nodes} == set(COMMON_NODES)
    assert {node.host_path for node in files.nodes} == {f"{HOST_ROOT}{path}" for path in COMMON_NODES}
    assert files.notes == ()


def test_links_that_programs_load_are_listed_when_the_host_has_only_some(
    tmp_path: Path, nodes: FakeNodes
) -> None:
    links = {link.path.rpartition("/")[2]: link for link in scan(tmp_path, nodes).links}
    targets = {name: entry.target for name, entry in links.items()}
    assert targets["libcuda.so.1"] == f"libcuda.so.{VERSION}"
    assert targets["libcuda.so"] == "libcuda.so.1"
    assert targets["libnvidia-ml.so.1"] == f"libnvidia-ml.so.{VERSION}"
    assert targets["libnvidia-ptxjitcompiler.so.1"] == f"libnvidia-ptxjitcompiler.so.{VERSION}"
    assert targets["libnvidia-nvvm.so.4"] == f"libnvidia-nvvm.so.{VERSION}"
    assert targets["libGLX_indirect.so.0"] == f"libGLX_nvidia.so.{VERSION}"
    assert targets["nvidia-drm_gbm.so"] == "../libnvidia-allocator.so.1"
    assert "libnvidia-glcore.so.1" not in targets
    assert links["libcuda.so"].host_path == f"{HOST_ROOT}/usr/lib/x86_64-linux-gnu/libcuda.so.{VERSION}"


def test_each_file_is_found_once_when_lib_is_a_link_to_usr_lib(tmp_path: Path, nodes: FakeNodes) -> None:
    (tmp_path / "lib/firmware").rename(tmp_path / "usr/lib/firmware")
    (tmp_path / "lib").rmdir()
    link(tmp_path, "/lib", "/usr/lib")
    files = scan(tmp_path, nodes)
    assert len(files.libraries) == len(LIBRARIES)
    assert files.firmware[0].host_path == f"{HOST_ROOT}/usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"


def test_alternatives_are_followed_inside_the_root_when_links_are_absolute(tmp_path: Path) -> None:
    nodes = driver_root(tmp_path, directory="/usr/lib/x86_64-linux-gnu/nvidia/current")
    current = "/usr/lib/x86_64-linux-gnu/nvidia/current"
    link(tmp_path, "/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/etc/alternatives/libcuda.so.1")
    link(tmp_path, "/etc/alternatives/libcuda.so.1", f"{current}/libcuda.so.1")
    files = scan(tmp_path, nodes)
    links = {entry.path: (entry.target, entry.host_path) for entry in files.links}
    assert files.library_dirs == (current,)
    assert links["/usr/lib/x86_64-linux-gnu/libcuda.so.1"] == (
        f"nvidia/current/libcuda.so.{VERSION}",
        f"{HOST_ROOT}{current}/libcuda.so.{VERSION}",
    )


def test_links_to_files_elsewhere_are_followed_when_no_directory_has_libcuda_itself(tmp_path: Path) -> None:
    """As on NixOS, whose root is mounted below another directory of the container, as all roots are."""
    nodes = driver_root(tmp_path)
    shutil.rmtree(tmp_path / "usr/lib")
    package, shown = put_nixos_libraries(tmp_path), "/run/opengl-driver/lib"
    files = scan(tmp_path, nodes)
    expected = {
        **{f"{shown}/{name}.so.{VERSION}": f"{package}/{name}.so.{VERSION}" for name in LIBRARIES},
        f"{shown}/vdpau/libvdpau_nvidia.so.{VERSION}": f"{package}/vdpau/libvdpau_nvidia.so.{VERSION}",
        f"{shown}/libnvidia-egl-gbm.so.1.1.2": NIXOS_GBM,
    }
    assert files.libraries == tuple(
        DriverFile(f"{tmp_path}{file}", f"{HOST_ROOT}{file}", path) for path, file in sorted(expected.items())
    )
    assert (files.driver_dirs, files.library_dirs) == ((shown,), (shown, f"{shown}/vdpau"))
    links = {entry.path: (entry.target, entry.host_path) for entry in files.links}
    assert links[f"{shown}/libcuda.so"] == ("libcuda.so.1", f"{HOST_ROOT}{package}/libcuda.so.{VERSION}")
    assert links[f"{shown}/libcuda.so.1"][0] == f"libcuda.so.{VERSION}"
    assert links[f"{shown}/libnvidia-ml.so.1"][0] == f"libnvidia-ml.so.{VERSION}"
    assert all(path.startswith(f"{shown}/") and path not in expected for path in links)
    assert files.notes == ()
    assert find_nvml_library(str(tmp_path)) == f"{tmp_path}{package}/libnvidia-ml.so.{VERSION}"


@pytest.mark.parametrize("links", [("libcuda.so.1", "libnvidia-ml.so.1"), tuple(LIBRARIES)])
def test_libraries_are_found_by_the_links_of_a_usual_directory_alone(
    tmp_path: Path, links: tuple[str, ...]
) -> None:
    nodes = driver_root(tmp_path, directory="/opt/nvidia")
    for name in links:
        file = name if name.endswith(".1") else f"{name}.so.{VERSION}"
        link(tmp_path, f"/usr/lib64/{file}", f"/opt/nvidia/{file}")
    files = scan(tmp_path, nodes)
    stems = {name.partition(".so")[0] for name in links}
    assert {file.container_path: file.host_path for file in files.libraries} == {
        f"/usr/lib64/{stem}.so.{VERSION}": f"{HOST_ROOT}/opt/nvidia/{stem}.so.{VERSION}" for stem in stems
    }
    assert ("/usr/lib64/libcuda.so.1", f"libcuda.so.{VERSION}") in {
        (one.path, one.target) for one in files.links
    }


def test_a_library_behind_links_is_left_out_when_it_is_made_for_another_architecture(tmp_path: Path) -> None:
    nodes = driver_root(tmp_path)
    shutil.rmtree(tmp_path / "usr/lib")
    package = put_nixos_libraries(tmp_path)
    put_elf_libraries(tmp_path, package, "aarch64")
    reported = rf"because this machine is x86_64: for example, {package}/libcuda\S* is for aarch64"
    with pytest.raises(RetryableError, match=reported):
        scan(tmp_path, nodes)


def test_nothing_outside_is_found_when_a_link_leads_out_of_the_root(tmp_path: Path) -> None:
    put(tmp_path, "/outside/nvidia-smi")
    root = tmp_path / "root"
    link(root, "/usr/bin/nvidia-smi", "../../../outside/nvidia-smi")
    assert find_program(RootedTree(str(root)).program, "nvidia-smi") is None
    link(root, "/usr/sbin/nvidia-smi", str(tmp_path / "outside/nvidia-smi"))
    assert find_program(RootedTree(str(root)).program, "nvidia-smi") is None


def test_a_loop_of_links_is_nothing(tmp_path: Path) -> None:
    link(tmp_path, "/usr/bin", "/usr/bin/x")
    link(tmp_path, "/usr/lib64", "/usr/lib64")
    assert find_program(RootedTree(str(tmp_path)).program, "nvidia-smi") is None


def test_32_bit_libraries_are_left_out(tmp_path: Path, nodes: FakeNodes) -> None:
    put_libraries(tmp_path, "/usr/lib64")
    for file in (tmp_path / "usr/lib64").glob("lib*.so.5*"):
        file.write_bytes(elf("i386", bits=32))
    assert scan(tmp_path, nodes).library_dirs == ("/usr/lib/x86_64-linux-gnu",)


MACHINES = pytest.mark.parametrize(("machine", "other"), [("x86_64", "aarch64"), ("aarch64", "x86_64")])


@MACHINES
def test_libraries_of_another_architecture_are_left_out_with_one_note(
    tmp_path: Path, machine: str, other: str
) -> None:
    own, foreign = f"/usr/lib/{machine}-linux-gnu", f"/usr/lib/{other}-linux-gnu"
    nodes = driver_root(tmp_path, directory=own)
    put_elf_libraries(tmp_path, own, machine)
    put_elf_libraries(tmp_path, foreign, other)
    for directory, made_for in ((own, machine), (foreign, other)):
        put(tmp_path, f"{directory}/nvidia/xorg/nvidia_drv.so").write_bytes(elf(made_for))
        put(tmp_path, f"{directory}/vdpau/libvdpau_nvidia.so.{VERSION}").write_bytes(elf(made_for))
    files = scan(tmp_path, nodes)
    assert files.version == VERSION
    assert files.library_dirs == (own, f"{own}/vdpau")
    assert f"{own}/nvidia/xorg/nvidia_drv.so" in containers(files.configs)
    assert [path for path in containers(files.libraries + files.configs) if foreign in path] == []
    assert [link.path for link in files.links if foreign in link.path] == []
    assert files.linker_dirs == (own, "/usr/lib64")
    count = len(LIBRARIES) + 1  # X.org modules are searched only next to our libraries
    assert files.notes == (
        f"{count} libraries below the driver root {HOST_ROOT} are not used, because this machine "
        f"is {machine}: for example, {foreign}/libEGL_nvidia.so.{VERSION} is for {other}",
    )


@MACHINES
def test_library_of_another_architecture_among_ours_is_omitted(
    tmp_path: Path, machine: str, other: str
) -> None:
    nodes = driver_root(tmp_path, directory="/usr/lib64")
    put_elf_libraries(tmp_path, "/usr/lib64", machine)
    put(tmp_path, f"/usr/lib64/libcudadebugger.so.{VERSION}").write_bytes(elf(other))
    files = scan(tmp_path, nodes)
    left_out = set(LIBRARIES) - {
        path.rpartition("/")[2].partition(".")[0] for path in containers(files.libraries)
    }
    assert left_out == {"libcudadebugger"}
    assert "1 library below" in files.notes[0]


@MACHINES
def test_an_older_driver_of_another_architecture_does_not_decide_the_version(
    tmp_path: Path, machine: str, other: str
) -> None:
    nodes = driver_root(tmp_path, directory=f"/usr/lib/{machine}-linux-gnu")
    put_elf_libraries(tmp_path, f"/usr/lib/{machine}-linux-gnu", machine)
    put_elf_libraries(tmp_path, "/usr/lib64", other, "550.54.15")
    assert scan(tmp_path, nodes, None).version == VERSION
    found = find_nvml_library(str(tmp_path))
    assert found == f"{tmp_path}/usr/lib/{machine}-linux-gnu/libnvidia-ml.so.{VERSION}"


@MACHINES
def test_a_driver_of_another_architecture_alone_is_an_error_that_says_so(
    tmp_path: Path, machine: str, other: str
) -> None:
    directory = f"/usr/lib/{other}-linux-gnu"
    nodes = driver_root(tmp_path, directory=directory)
    put_elf_libraries(tmp_path, directory, other)
    reported = rf"because this machine is {machine}: .*{directory}/lib.*install the NVIDIA driver"
    with pytest.raises(RetryableError, match=reported):
        scan(tmp_path, nodes)
    with pytest.raises(NvmlUnavailableError, match=reported):
        find_nvml_library(str(tmp_path))


def test_a_library_that_is_not_an_elf_file_is_of_every_architecture(tmp_path: Path) -> None:
    """Such as those of a simulated machine, or a file that is still being written."""
    nodes = driver_root(tmp_path, directory="/usr/lib/aarch64-linux-gnu")
    put(tmp_path, f"/usr/lib/aarch64-linux-gnu/libnvcuvid.so.{VERSION}").write_bytes(elf("x86_64")[:12])
    files = scan(tmp_path, nodes)
    assert (len(files.libraries), files.notes) == (len(LIBRARIES), ())


def test_the_linkers_cache_is_queried_when_no_usual_directory_has_the_driver(tmp_path: Path) -> None:
    nodes = driver_root(tmp_path, directory="/opt/vendor/driver/lib")
    cache = tmp_path / "etc/ld.so.cache"
    cache.write_bytes(b"glibc-ld.so.cache1.1\x00libcuda.so.1\x00/opt/vendor/driver/lib/libcuda.so.1\x00")
    assert scan(tmp_path, nodes).driver_dirs == ("/opt/vendor/driver/lib",)
    found = find_nvml_library(str(tmp_path))
    assert found == f"{tmp_path}/opt/vendor/driver/lib/libnvidia-ml.so.{VERSION}"


def test_the_loaded_version_is_taken_when_two_are_installed(tmp_path: Path, nodes: FakeNodes) -> None:
    put_libraries(tmp_path, "/usr/lib64", "550.54.15")
    assert scan(tmp_path, nodes).version == VERSION
    assert scan(tmp_path, nodes, "550.54.15").library_dirs == ("/usr/lib64",)
    assert scan(tmp_path, nodes, None).version == "550.54.15"


def test_a_half_upgraded_driver_is_an_error(tmp_path: Path, nodes: FakeNodes) -> None:
    with pytest.raises(RetryableError, match=rf"half upgraded: version 575\.1 is loaded.*{VERSION}.*reboot"):
        scan(tmp_path, nodes, "575.1")


@tabled("missing", "message")
def test_a_missing_library_is_an_error(tmp_path: Path, nodes: FakeNodes, missing: str, message: str) -> None:
    for file in (tmp_path / "usr/lib/x86_64-linux-gnu").glob(f"{missing}*"):
        file.unlink()
    with pytest.raises(RetryableError, match=message):
        scan(tmp_path, nodes)


def test_the_problem_is_what_a_prepare_would_fail_with(tmp_path: Path, nodes: FakeNodes) -> None:
    root = root_at(tmp_path, nodes)
    assert (root.problem(VERSION), root.problem(None)) == (None, None)
    for missing in (
        "dev/nvidia-uvm",
        *(f"usr/lib/x86_64-linux-gnu/{name}.so.{VERSION}" for name in LIBRARIES[:2]),
    ):
        nodes.nodes.pop(f"{tmp_path}/{missing}", None)
        (tmp_path / missing).unlink(missing_ok=True)
        with pytest.raises(RetryableError) as caught:
            root.scan(VERSION)
        assert root.problem(VERSION) == str(caught.value)


@pytest.mark.parametrize("missing", ["/dev/nvidiactl", "/dev/nvidia-uvm"])
def test_a_missing_node_is_an_error_that_names_the_remedy(
    tmp_path: Path, nodes: FakeNodes, missing: str
) -> None:
    del nodes.nodes[f"{tmp_path}{missing}"]
    put(tmp_path, "/dev/other")
    with pytest.raises(
        RetryableError, match=rf"{missing} is missing on the host: load the .*nvidia-modprobe"
    ):
        scan(tmp_path, nodes)


def test_nodes_of_a_private_dev_are_not_taken_when_the_host_lacks_them(tmp_path: Path) -> None:
    driver_root(tmp_path)
    nodes = FakeNodes()
    nodes.add(f"{tmp_path}/dev/null", 1, 3)
    for path, (major, minor) in COMMON_NODES.items():
        nodes.add(path, major, minor)
    with pytest.raises(RetryableError, match="/dev/nvidiactl is missing on the host"):
        scan(tmp_path, nodes)


def test_nodes_of_the_host_are_taken_when_the_driver_root_has_no_dev(tmp_path: Path) -> None:
    driver_root(tmp_path)
    nodes = FakeNodes()
    for path, (major, minor) in COMMON_NODES.items():
        nodes.add(path, major, minor)
    files = scan(tmp_path, nodes)
    assert {node.host_path for node in files.nodes} == set(COMMON_NODES)


def test_a_missing_modeset_node_is_only_noted(tmp_path: Path, nodes: FakeNodes) -> None:
    del nodes.nodes[f"{tmp_path}/dev/nvidia-modeset"]
    files = scan(tmp_path, nodes)
    assert len(files.nodes) == 3
    assert files.notes == ("device node /dev/nvidia-modeset is missing on the host; CUDA does not need it",)


@pytest.mark.parametrize("directory", ["/usr/lib64", "/opt/vendor/lib", "/usr/lib/x86_64-linux-gnu"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_linkers_look_where_the_directory_or_else_the_machine_says(
    tmp_path: Path, directory: str, machine: str
) -> None:
    nodes = driver_root(tmp_path, directory=directory)
    put(tmp_path, "/etc/ld.so.cache", f"{directory}/libcuda.so.1\0")
    named = "x86_64" if "x86_64" in directory else machine
    files = scan(tmp_path, nodes)
    assert files.linker_dirs == (f"/usr/lib/{named}-linux-gnu", "/usr/lib64")


@pytest.fixture
def no_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the cache, as for calls with some time between them."""
    monkeypatch.setattr("dra_driver.host.driver_root._FRESH_S", 0.0)


@pytest.mark.usefixtures("no_bursts")
def test_a_hook_that_comes_to_the_hosts_root_is_seen(tmp_path: Path) -> None:
    nodes = driver_root(tmp_path / "driver", hook=False)
    paths = HostPaths(str(tmp_path / "driver"), HOST_ROOT, host_root=str(tmp_path / "host"))
    root = DriverRoot(paths, nodes=nodes)
    assert root.files(VERSION).hook is None
    age(tmp_path)
    assert root.files(VERSION) is root.files(VERSION)
    put_hook(tmp_path / "host", "/usr/local/nvidia/toolkit/nvidia-cdi-hook")
    files = root.files(VERSION)
    assert files.hook == "/usr/local/nvidia/toolkit/nvidia-cdi-hook"
    assert files.hook_verbs == HOOK_VERBS


@pytest.mark.usefixtures("no_bursts")
def test_a_hook_that_was_slow_once_is_queried_again_though_no_file_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = driver_root(tmp_path / "driver", hook=False)
    paths = HostPaths(str(tmp_path / "driver"), HOST_ROOT, host_root=str(tmp_path / "host"))
    root = DriverRoot(paths, nodes=nodes)
    put_hook(tmp_path / "host", "/usr/local/nvidia/toolkit/nvidia-cdi-hook")
    age(tmp_path)
    with monkeypatch.context() as slow:
        slow.setattr("dra_driver.host.hook.run_program", Mock(side_effect=TimeoutError))
        files = root.files(VERSION)
    assert files.hook_verbs == BASE_HOOK_VERBS
    assert root.files(VERSION) is files
    monkeypatch.setattr(
        "dra_driver.host.hook._Answer.is_due", property(lambda answer: answer.due_at < math.inf)
    )
    files = root.files(VERSION)
    assert files.hook_verbs == HOOK_VERBS
    assert root.files(VERSION) is files


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "usr/bin/nvidia-cdi-hook").unlink(),
        lambda root: put_hook(root, verbs=("create-symlinks",)),
        lambda root: (root / "usr/lib/x86_64-linux-gnu/libcuda.so.1").unlink(),
        lambda root: put_libraries(root, "/usr/lib64", "575.1"),
        lambda root: put(root, "/run/nvidia-fabricmanager/socket"),
        lambda root: put(root, "/lib/firmware/nvidia/575.1/gsp_ga10x.bin"),
    ],
)
def test_the_fingerprint_changes_when_a_part_is_replaced(tmp_path: Path, nodes: FakeNodes, change) -> None:
    age(tmp_path)
    root = root_at(tmp_path, nodes)
    before = root.fingerprint()
    assert root.fingerprint() == before
    hash(before)
    change(tmp_path)
    assert root.fingerprint() != before


def test_the_fingerprint_changes_with_the_file_system(
    tmp_path: Path, nodes: FakeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = root_at(tmp_path, nodes)
    before = root.fingerprint()
    lstat = os.lstat

    def mounted_again(path: str | int, **more: int) -> os.stat_result:
        made, (fields, named) = lstat(path, **more).__reduce__()
        return made((*fields[:2], fields[2] + 1, *fields[3:]), named)

    monkeypatch.setattr(os, "lstat", mounted_again)
    assert root.fingerprint() != before


@pytest.mark.usefixtures("no_bursts")
def test_files_are_scanned_again_only_when_something_changed(
    tmp_path: Path, nodes: FakeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = root_at(tmp_path, nodes)
    with monkeypatch.context() as running:
        running.setattr("dra_driver.host.driver_root.is_settled", lambda _: False)
        assert root.files(VERSION) is not root.files(VERSION), "an installation may still run"
    age(tmp_path)
    first = root.files(VERSION)
    assert root.files(VERSION) is first
    (tmp_path / "usr/bin/nvidia-cdi-hook").unlink()
    assert root.files(VERSION).hook is None
    with pytest.raises(RetryableError):
        root.files("575.1")
    nodes.add(f"{tmp_path}/dev/nvidia-uvm", 510, 0)
    assert {node.node.major for node in root.files(VERSION).nodes} == {195, 510, 511}


def test_egl_platforms_are_found_where_the_driver_is_not(tmp_path: Path) -> None:
    """As on Debian, which keeps the driver in a directory of its own and builds these libraries itself."""
    debian = "/usr/lib/x86_64-linux-gnu"
    nodes = driver_root(tmp_path, directory=f"{debian}/nvidia/current")
    put(tmp_path, f"{debian}/libnvidia-egl-gbm.so.1.1.2")
    put(tmp_path, f"{debian}/libnvidia-nvvm70.so.4")
    files = scan(tmp_path, nodes)
    assert [path for path in containers(files.libraries) if "/current/" not in path] == [
        f"{debian}/libnvidia-egl-gbm.so.1.1.2"
    ]
    assert files.driver_dirs == (f"{debian}/nvidia/current",)
    assert files.library_dirs == (debian, f"{debian}/nvidia/current")


def test_a_program_that_may_not_be_run_is_passed_over(tmp_path: Path, nodes: FakeNodes) -> None:
    put(tmp_path, "/usr/local/bin/nvidia-smi")
    assert "/usr/bin/nvidia-smi" in containers(scan(tmp_path, nodes).binaries)
    assert find_program(RootedTree(str(tmp_path)).program, "nvidia-smi") == (
        "/usr/bin/nvidia-smi",
        "/usr/bin/nvidia-smi",
    )


def test_an_x_servers_module_is_taken_from_the_drivers_directory_first(
    tmp_path: Path, nodes: FakeNodes
) -> None:
    own = "/usr/lib/x86_64-linux-gnu/nvidia/xorg"
    for directory in ("/usr/lib64/xorg/modules/extensions", "/usr/lib/xorg/modules/updates/extensions", own):
        put(tmp_path, f"{directory}/libglxserver_nvidia.so.{VERSION}")
    files = scan(tmp_path, nodes)
    assert [path for path in containers(files.configs) if "xorg" in path] == [
        f"{own}/libglxserver_nvidia.so.{VERSION}"
    ]
    [made] = [entry for entry in files.links if "glxserver" in entry.path]
    assert (made.path, made.target) == (f"{own}/libglxserver_nvidia.so", f"libglxserver_nvidia.so.{VERSION}")
    assert made.host_path == f"{HOST_ROOT}{own}/libglxserver_nvidia.so.{VERSION}"


def test_gkes_vulkan_files_are_found_in_the_driver_root_itself(tmp_path: Path, nodes: FakeNodes) -> None:
    (tmp_path / "usr/share/vulkan/icd.d/nvidia_icd.json").unlink()
    put(tmp_path, "/vulkan/icd.d/nvidia_icd.json")
    [icd] = [file for file in scan(tmp_path, nodes).configs if "vulkan" in file.container_path]
    assert (icd.host_path, icd.container_path) == (
        f"{HOST_ROOT}/vulkan/icd.d/nvidia_icd.json",
        "/etc/vulkan/icd.d/nvidia_icd.json",
    )


def test_nvml_is_found_when_no_one_made_its_link(tmp_path: Path) -> None:
    put_libraries(tmp_path, "/usr/lib64", links=False)
    assert find_nvml_library(str(tmp_path)) == f"{tmp_path}/usr/lib64/libnvidia-ml.so.{VERSION}"


def test_the_error_lists_where_it_looked_when_nvml_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NvmlUnavailableError, match=rf"looked in .*{tmp_path}/usr/lib64, .*driver root"):
        find_nvml_library(str(tmp_path))


@tabled("libraries", "cached", "program", "found", "links")
def test_layout_of_a_distribution_gives_libraries_and_programs(
    tmp_path: Path, libraries: str, cached: bool, program: str, found: str, links: dict[str, str]
) -> None:
    """`program` is where nvidia-smi is, `links` has further links of the host."""
    put_libraries(tmp_path, libraries)
    put(tmp_path, program).chmod(0o755)
    for path, target in links.items():
        link(tmp_path, path, target)
    if cached:
        (tmp_path / "etc").mkdir()
        cache = b"glibc-ld.so.cache1.1\0" + f"{libraries}/libcuda.so.1".encode() + b"\0"
        (tmp_path / "etc/ld.so.cache").write_bytes(cache)
    nodes = FakeNodes(
        {path: DeviceNode(path, "c", *numbers, 0o666, 0, 0) for path, numbers in COMMON_NODES.items()}
    )
    files = DriverRoot(
        HostPaths(
            str(tmp_path), HOST_ROOT, proc=str(tmp_path / "proc"), sys=str(tmp_path / "sys"), dev_root="/"
        ),
        nodes=nodes,
    ).scan(VERSION)
    assert {path.rpartition("/")[0] for path in containers(files.libraries)} == {libraries}
    assert containers(files.binaries) == [found]
    assert find_nvml_library(str(tmp_path)) == f"{tmp_path}{libraries}/libnvidia-ml.so.{VERSION}"
    programs = InstalledPrograms(str(tmp_path), tmp_path / "links")()
    assert programs.paths["nvidia-smi"] == f"{tmp_path}{program}"


@tabled("machine", "files", "links", "says")
def test_system_without_a_supported_driver_is_named(
    tmp_path: Path, nodes: FakeNodes, machine: str, files: list[str], links: dict[str, str], says: str
) -> None:
    """Its libcuda of version 1.1 is not a driver that was half upgraded, and no reboot would help."""
    root = tmp_path / "host"
    for path in files:
        put(root, path)
    for path, target in links.items():
        link(root, path, target)
    installation = root_at(root, nodes, host_root="/")
    for version in ("595.71", None):
        assert installation.problem(version) == says


@tabled("files", "says")
def test_system_without_nvml_is_named_by_the_missing_library(
    tmp_path: Path, files: list[str], says: str
) -> None:
    for path in files:
        put(tmp_path, path)
    with pytest.raises(DriverGoneError, match=says):
        find_nvml_library(str(tmp_path))


def test_supported_driver_next_to_a_sign_of_another_system_is_used(tmp_path: Path, nodes: FakeNodes) -> None:
    put(tmp_path, "/usr/lib/wsl/lib/libcuda.so.1.1")
    put(tmp_path, "/etc/nv_tegra_release")
    assert scan(tmp_path, nodes).version == VERSION
