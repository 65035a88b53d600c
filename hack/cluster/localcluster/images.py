"""Builds images without a registry, with the names that the examples use. They contain a static shell, and the C
library that NVIDIA's programs need.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localcluster import api, shell
from localcluster.components import PAUSE_IMAGE
from localcluster.layout import Layout
from localcluster.shell import ClusterError

WORKLOAD_IMAGE = "local/workload:e2e"
WORKLOAD_TAGS = (
    WORKLOAD_IMAGE,
    "docker.io/library/busybox:1.36",
    "docker.io/library/ubuntu:22.04",
    "docker.io/library/ubuntu:24.04",
    "nvcr.io/nvidia/cuda:12.4.1-base-ubuntu22.04",
)
# The simulated nvidia-smi needs flock to find the processes that use NVML. Debian's busybox does not have it.
_FLOCK = Path("/usr/bin/flock")
# Replaces a CUDA program on a simulated machine, to show which MPS limits a container gets.
_MPS_CLIENT = Path(__file__).resolve().parents[3] / "dra_driver/simulator/scripts/mps-client.sh"
_C_LIBRARY = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1")
_LOADERS = (Path("/lib64"), Path("/lib"))
_EMPTY_DIRECTORIES = ("dev", "etc", "proc", "root", "sys", "tmp", "usr/lib", "var")
_FOREVER = "2147483647"
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Image:
    """An image with one layer: its names, its command, and what its configuration has besides."""

    tags: tuple[str, ...]
    command: tuple[str, ...]
    entrypoint: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()


_IMAGES = (Image((PAUSE_IMAGE,), ("/bin/sleep", _FOREVER)), Image(WORKLOAD_TAGS, ("/bin/sh",)))


def write_archive(layout: Layout) -> Path:
    """Write the pause and workload images as one archive that ``ctr`` can import."""
    target = layout.state / "images.tar"
    if target.exists():
        return target
    write(target, _IMAGES, base_layer(layout.from_debian))
    return target


def write(target: Path, images: Sequence[Image], layer: bytes) -> None:
    """Write images that have the same layer as one archive."""
    unfinished = target.with_suffix(".unfinished")
    with tarfile.open(unfinished, "w") as archive:
        add_file(archive, "layer.tar", layer, 0o644)
        manifest = []
        for image in images:
            config = _config(image, hashlib.sha256(layer).hexdigest())
            name = f"{hashlib.sha256(config).hexdigest()}.json"
            add_file(archive, name, config, 0o644)
            manifest.append({"Config": name, "RepoTags": image.tags, "Layers": ["layer.tar"]})
        add_file(archive, "manifest.json", json.dumps(manifest).encode(), 0o644)
    unfinished.replace(target)


def load(layout: Layout, binaries: Path, archive: Path, snapshotter: str) -> list[str]:
    """Import an image archive into the node's containerd, and return the names of its images."""
    if not archive.is_file():
        raise ClusterError(f"The image archive {archive} does not exist.")
    if not api.answers(layout, f"unix:{layout.containerd_socket}"):
        raise ClusterError("The node's containerd is not running: run `cluster.py up` first.")
    said = shell.run(
        [
            *(binaries / "ctr", "--address", layout.containerd_socket, "--namespace", "k8s.io"),
            *("images", "import", "--local", "--snapshotter", snapshotter, archive.absolute()),
        ]
    )
    return [line.split()[1] for line in said.splitlines() if line.startswith("unpacking ")]


def base_layer(programs: Path) -> bytes:
    """Return the images' layer: busybox with all its applets, bash, a C library, and a few files that programs need."""
    buffer, busybox = io.BytesIO(), programs / "busybox"
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for name in _EMPTY_DIRECTORIES:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            layer.addfile(entry)
        add_file(layer, "bin/busybox", busybox.read_bytes(), 0o755)
        add_file(layer, "bin/bash", (programs / "bash-static").read_bytes(), 0o755)
        add_file(layer, "usr/bin/flock", _FLOCK.read_bytes(), 0o755)
        add_file(layer, "usr/bin/mps-client", _MPS_CLIENT.read_bytes(), 0o755)
        add_file(layer, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n", 0o644)
        add_file(layer, "etc/group", b"root:x:0:\n", 0o644)
        for path in _c_library():
            add_file(layer, str(path).lstrip("/"), path.read_bytes(), 0o755)
        for applet in _applets(busybox):
            entry = tarfile.TarInfo(applet)
            entry.type, entry.linkname = tarfile.SYMTYPE, "/bin/busybox"
            layer.addfile(entry)
    return buffer.getvalue()


def _c_library() -> list[Path]:
    """Return the files of this machine's C library, and of its loader at the path that programs expect."""
    folder = Path(f"/lib/{os.uname().machine}-linux-gnu")
    loaders = [top / loader.name for loader in folder.glob("ld-linux*") for top in _LOADERS]
    found = [path for path in [*loaders, *(folder / name for name in _C_LIBRARY)] if path.is_file()]
    if len(found) <= len(_C_LIBRARY):
        raise ClusterError(f"This machine's C library is not in {folder}, where Debian installs it.")
    return found


def _applets(busybox: Path) -> list[str]:
    listed = subprocess.run([busybox, "--list-full"], capture_output=True, text=True, check=True)
    return sorted(set(listed.stdout.split()) - {"bin/busybox", "bin/bash"})


def _config(image: Image, layer_digest: str) -> bytes:
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "amd64")
    return json.dumps(
        {
            "architecture": architecture,
            "os": "linux",
            # Unlike most real programs, a shell's `sleep` does not handle SIGTERM, and the first process of a
            # container ignores signals that it does not handle. Each deleted pod would take its whole grace period.
            "config": {
                "Cmd": image.command,
                "Env": [_PATH, *image.environment],
                **({"Entrypoint": image.entrypoint} if image.entrypoint else {"StopSignal": "SIGKILL"}),
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        }
    ).encode()


def add_file(archive: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    """Add a file to an archive or a layer."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))
