"""Small driver roots and device nodes for tests, created without root."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dra_driver.base.atomic import is_settled
from dra_driver.model.host import DeviceNode
from tests.fakes.waiting import eventually

VERSION = "570.124.06"
LIBRARIES = (
    "libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler", "libcudadebugger", "libnvidia-nvvm",
    "libnvidia-cfg", "libnvidia-opencl", "libnvidia-allocator", "libnvcuvid", "libnvidia-encode",
    "libnvidia-opticalflow", "libGLX_nvidia", "libEGL_nvidia", "libnvidia-glcore",
)  # fmt: skip
HOOK_VERBS = (
    "create-symlinks", "update-ldcache", "enable-cuda-compat", "disable-device-node-modification",
    "update-application-profile",
)  # fmt: skip
BINARIES = ("nvidia-smi", "nvidia-debugdump", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
NIXOS_GBM = "/nix/store/5aa7-egl-gbm-1.1.2/lib/libnvidia-egl-gbm.so.1.1.2"
COMMON_NODES = {
    "/dev/nvidiactl": (195, 255),
    "/dev/nvidia-modeset": (195, 254),
    "/dev/nvidia-uvm": (511, 0),
    "/dev/nvidia-uvm-tools": (511, 1),
}


@dataclass
class FakeNodes:
    """Device nodes by the path under which the process under test sees them."""

    nodes: dict[str, DeviceNode] = field(default_factory=dict)

    def add(self, path: str, major: int, minor: int, *, mode: int = 0o666, gid: int = 0) -> None:
        self.nodes[path] = DeviceNode(path, "c", major, minor, mode, 0, gid)

    def read(self, path: str) -> DeviceNode | None:
        return self.nodes.get(path)


def put(root: Path, path: str, content: str = "") -> Path:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return file


def put_program(root: Path, path: str, script: str) -> Path:
    file = put(root, path, f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def put_hook(
    root: Path,
    path: str = "/usr/bin/nvidia-cdi-hook",
    *,
    verbs: tuple[str, ...] = HOOK_VERBS,
    version: str = "1.20.1",
) -> Path:
    """A hook whose help lists these verbs, laid out as the real one does."""
    commands = "".join(f"   {verb}  Does what --{verb} says\\n" for verb in verbs)
    text = (
        f"NAME:\\n   hook\\n\\nVERSION:\\n   {version}\\n   commit: 9fb00fa7\\n\\nCOMMANDS:\\n{commands}"
        "   help, h  Help\\n\\nGLOBAL OPTIONS:\\n   --quiet\\n"
    )
    words = "hook --help" if path.endswith("/nvidia-ctk") else "--help"
    return put_program(root, path, f"""[ "$*" = "{words}" ] || exit 1\nprintf '{text}'""")


def elf(machine: str, *, bits: int = 64) -> bytes:
    """The header of an ELF file, as far as its architecture."""
    number = {"x86_64": 62, "aarch64": 183, "i386": 3}[machine]
    return b"\x7fELF" + bytes([bits // 32, 1, 1]) + bytes(11) + number.to_bytes(2, "little") + bytes(44)


def put_elf_libraries(root: Path, directory: str, machine: str, version: str = VERSION) -> None:
    """Like `put_libraries`, but each file states its architecture. Replaces files of `put_libraries`."""
    if not (root / directory.lstrip("/")).exists():
        put_libraries(root, directory, version)
    for file in (root / directory.lstrip("/")).glob(f"lib*.so.{version}"):
        file.write_bytes(elf(machine))


def link(root: Path, path: str, target: str) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.symlink_to(target)


def put_libraries(root: Path, directory: str, version: str = VERSION, *, links: bool = True) -> None:
    for library in LIBRARIES:
        put(root, f"{directory}/{library}.so.{version}")
    if links:
        link(root, f"{directory}/libcuda.so.1", f"libcuda.so.{version}")
        link(root, f"{directory}/libcuda.so", "libcuda.so.1")
        link(root, f"{directory}/libnvidia-ml.so.1", f"libnvidia-ml.so.{version}")


def put_nixos_libraries(root: Path, version: str = VERSION) -> str:
    """The libraries as NixOS has them: a directory of links, itself behind a link, that lead to a package of the store.
    Returns the directory of the package."""
    package = f"/nix/store/0b3c-nvidia-x11-{version}/lib"
    merged = "/nix/store/9f1d-graphics-drivers"
    put_libraries(root, package, version)
    put(root, f"{package}/vdpau/libvdpau_nvidia.so.{version}")
    for file in (NIXOS_GBM, "/nix/store/7c2e-mesa-25.0/lib/libgallium-25.0.so"):
        put(root, file)
        link(root, f"{merged}/lib/{file.rpartition('/')[2]}", file)
    for entry in (root / package[1:]).iterdir():
        link(root, f"{merged}/lib/{entry.name}", f"{package}/{entry.name}")
    link(root, "/run/opengl-driver", merged)
    return package


def driver_root(root: Path, *, directory: str = "/usr/lib/x86_64-linux-gnu", hook: bool = True) -> FakeNodes:
    """A complete root, and the nodes below it with eight GPUs."""
    put_libraries(root, directory)
    for binary in BINARIES:
        put(root, f"/usr/bin/{binary}").chmod(0o755)
    for name in ("gsp_ga10x.bin", "gsp_tu10x.bin"):
        put(root, f"/lib/firmware/nvidia/{VERSION}/{name}")
    put(root, "/run/nvidia-persistenced/socket")
    link(root, "/var/run", "/run")
    put(root, "/etc/OpenCL/vendors/nvidia.icd")
    put(root, "/usr/share/vulkan/icd.d/nvidia_icd.json")
    put(root, "/sbin/ldconfig")
    if hook:
        put_hook(root)
    nodes = FakeNodes()
    for path, (major, minor) in COMMON_NODES.items():
        nodes.add(f"{root}{path}", major, minor)
    for minor in range(8):
        nodes.add(f"{root}/dev/nvidia{minor}", 195, minor)
        nodes.add(f"{root}/dev/dri/card{minor + 1}", 226, minor + 1, mode=0o660, gid=44)
        nodes.add(f"{root}/dev/dri/renderD{minor + 128}", 226, minor + 128, mode=0o660, gid=109)
    return nodes


def pci_function(sys: Path, bus_id: str, *, parent: str = "pci0000:16/0000:16:01.0", **files: str) -> Path:
    """A PCI function below `/sys`; `files` are attribute files such as `vendor`."""
    place = sys / "devices" / parent / bus_id
    place.mkdir(parents=True)
    devices = sys / "bus/pci/devices"
    devices.mkdir(parents=True, exist_ok=True)
    (devices / bus_id).symlink_to(f"../../../devices/{parent}/{bus_id}")
    for name, content in {"vendor": "0x10de", "device": "0x2330", "class": "0x030200", **files}.items():
        (place / name).write_text(content + "\n")
    return place


def age(root: Path) -> None:
    """Wait until whatever changes from now on gets another time."""
    newest = max(path.lstat().st_ctime_ns for path in (root, *root.rglob("*")))
    eventually(lambda: is_settled(newest))
