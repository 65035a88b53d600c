"""What `make release` writes: whole images for both architectures, the same bytes again, and a driver that runs."""

from __future__ import annotations

import hashlib
import io
import json
import posixpath
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import release
from imagebuild import places

from tests.deploy.test_image import check_layout, read_archive
from tests.e2e.conftest import DAEMONSET, NAMESPACE, ROOT, Cluster, pod, wait_for
from tests.e2e.test_updates import rolled_out

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

VERSION = "99.0.1-rc.2"
STEM = f"gpu-dra-driver-{VERSION}"
ELF_MACHINES = {"amd64": 62, "arm64": 183}
LOADERS = {"amd64": "ld-linux-x86-64.so.2", "arm64": "ld-linux-aarch64.so.1"}
NOBODY = 65532


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def git(root: Path, *arguments: str | Path) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "core.hooksPath=/dev/null"]
    return run("git", *identity, *arguments, cwd=root)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This repository as it stands, with everything in it that a person changes for a version."""
    root = tmp_path_factory.mktemp("release") / "gpu-dra-driver"
    for name in git(ROOT, "ls-files", "-co", "--exclude-standard", "-z").split("\0"):
        if name and (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    versions = release.versions(root)
    [old] = set(versions.values())
    for name in versions:
        file = root / ("daemonset/chart/Chart.yaml" if name.startswith("Chart.yaml") else name)
        file.write_text(file.read_text().replace(old, VERSION))
    changelog = root / "CHANGELOG.md"
    heading = f"## {VERSION} - 2026-01-02"
    changelog.write_text(re.sub(r"^## .*", heading, changelog.read_text(), count=1, flags=re.MULTILINE))
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message=release")
    return root


@pytest.fixture(scope="module")
def dist(repository: Path) -> Path:
    run(sys.executable, "hack/release.py", VERSION, cwd=repository)
    return repository / "dist"


def test_dist_holds_all_of_a_version(dist: Path) -> None:
    packages = VERSION.replace("-rc.", "rc")
    assert {file.name for file in dist.iterdir()} == {
        *(f"{STEM}-linux-{name}{end}" for name in ELF_MACHINES for end in (".oci.tar", ".cdx.json")),
        *(f"{STEM}{end}" for end in (".tgz", "-manifests.yaml", "-manifests-base.yaml", "-wheel.cdx.json")),
        f"gpu_dra_driver-{packages}-py3-none-any.whl",
        f"gpu_dra_driver-{packages}.tar.gz",
        "RELEASE_NOTES.md",
        "SHA256SUMS",
    }
    assert run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=dist).count(": OK\n") == 11
    assert "## " not in (dist / "RELEASE_NOTES.md").read_text().replace("### ", "")


@pytest.mark.parametrize("architecture", ELF_MACHINES)
def test_image_is_whole_and_all_its_programs_are_of_its_architecture(dist: Path, architecture: str) -> None:
    """Every library that a program asks for is in the image; nothing of this machine got in."""
    files = read_archive(dist / f"{STEM}-linux-{architecture}.oci.tar")
    config = check_layout(files, f"docker.io/library/gpu-dra-driver:{VERSION}", architecture)
    assert config["config"]["Labels"]["org.opencontainers.image.version"] == VERSION
    [entry] = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(files[f"blobs/{entry['digest'].replace(':', '/')}"])
    programs, names, owners, writable, sizes = {}, set(), set(), {}, []
    for layer in manifest["layers"]:
        blob = files[f"blobs/{layer['digest'].replace(':', '/')}"]
        sizes.append(0)
        with tarfile.open(fileobj=io.BytesIO(blob), mode="r:gz") as archive:
            for member in archive:
                names.add(member.name)
                owners.add((member.uid, member.gid, member.mode & 0o6000))
                if member.mode & 0o022 and not member.issym():
                    writable[member.name] = member.mode
                sizes[-1] += member.size
                if member.isfile():
                    content = archive.extractfile(member).read()  # type: ignore[union-attr]
                    if content.startswith(b"\x7fELF"):
                        programs[member.name] = content
    assert owners == {(0, 0, 0)}
    assert set(writable.values()) == {0o1777}
    assert set(writable) == {"tmp", "var/lock", "var/tmp"}
    assert len(programs) > 100
    assert {struct.unpack_from("<H", content, 18)[0] for content in programs.values()} == {
        ELF_MACHINES[architecture]
    }
    libraries = {posixpath.basename(name) for name in names}
    missing = {
        (name, library)
        for name, content in programs.items()
        for library in needed_libraries(content)
        if library not in libraries
    }
    assert missing == set()
    assert LOADERS[architecture] in libraries
    # Modules and their bytecode, and nothing that installs or tests.
    packages = {name.partition("site-packages/")[2] for name in names if "site-packages/" in name}
    tops = {name.partition("/")[0] for name in packages}
    assert {"dra_driver", "grpc", "urllib3"} <= tops
    assert not {"kubernetes", "grpc_tools", "pip", "setuptools", "aiohttp"} & tops
    assert {
        "dra_driver/__pycache__/errors.cpython-313.pyc",
        "grpc/__pycache__/__init__.cpython-313.pyc",
    } <= packages
    assert sizes[1] + sizes[2] <= 70e6, "the Python packages are larger than 70 MB"


def needed_libraries(content: bytes) -> list[str]:
    """DT_NEEDED of a little-endian 64-bit ELF file, in which both architectures are alike."""
    offset, size, count = struct.unpack_from("<Q", content, 32)[0], *struct.unpack_from("<HH", content, 54)
    segments = [struct.unpack_from("<IIQQQQ", content, offset + size * number) for number in range(count)]

    def in_file(address: int) -> int:
        for kind, _, start, virtual, _, length in segments:
            if kind == 1 and virtual <= address < virtual + length:
                return int(start + address - virtual)
        raise AssertionError(f"address {address:#x} is in no segment")

    found, strings = [], 0
    for kind, _, start, _, _, length in segments:
        if kind == 2:
            for position in range(start, start + length, 16):
                tag, value = struct.unpack_from("<QQ", content, position)
                if tag == 1:
                    found.append(value)
                elif tag == 5:
                    strings = in_file(value)
                elif tag == 0:
                    break
    return [content[strings + name : content.index(b"\0", strings + name)].decode() for name in found]


@pytest.mark.parametrize("architecture", ELF_MACHINES)
def test_sbom_lists_what_is_in_the_image(dist: Path, architecture: str) -> None:
    document = json.loads((dist / f"{STEM}-linux-{architecture}.cdx.json").read_text())
    subject = document["metadata"]["component"]
    index = json.loads(read_archive(dist / f"{STEM}-linux-{architecture}.oci.tar")["index.json"])
    assert index["manifests"][0]["digest"].replace(":", "%3A") in subject["purl"]
    listed = {component["purl"] for component in document["components"]}
    assert f"pkg:pypi/gpu-dra-driver@{VERSION}" in listed
    locked = re.findall(r"^([\w.-]+)==", (ROOT / "requirements-image.txt").read_text(), re.MULTILINE)
    names = {
        purl.removeprefix("pkg:pypi/").partition("@")[0] for purl in listed if purl.startswith("pkg:pypi/")
    }
    assert names == {*(name.lower() for name in locked), "gpu-dra-driver"}
    architectures = {purl.rpartition("arch=")[2] for purl in listed if purl.startswith("pkg:deb/")}
    assert architectures == {architecture, "all"}
    refs = {component["bom-ref"] for component in document["components"]} | {subject["bom-ref"]}
    for entry in document["dependencies"]:
        assert {entry["ref"], *entry["dependsOn"]} <= refs


def test_second_run_gives_the_same_bytes(dist: Path, repository: Path, disk_path: Path) -> None:
    """From another checkout, by a user with another umask, at another time, with the driver's layers made anew."""
    cache = disk_path / "cache" / "gpu-dra-driver" / "image"
    cache.mkdir(parents=True)
    cache.with_name("cluster").symlink_to(places.cache().with_name("cluster"))
    kept = [file for name in ("base-", "dependencies-", "tools-") for file in places.cache().glob(f"{name}*")]
    run("cp", "--archive", "--link", *kept, cache, cwd=disk_path)
    git(disk_path, "clone", "--quiet", repository, "again")
    again = disk_path / "again"
    program = (
        f"umask 077; export XDG_CACHE_HOME={disk_path}/cache; exec {sys.executable} hack/release.py {VERSION}"
    )
    run("bash", "-c", program, cwd=again)
    first = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in dist.iterdir()}
    assert {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (again / "dist").iterdir()
    } == first


@pytest.fixture
def released(cluster: Cluster, dist: Path) -> Iterator[str]:
    """The driver of the archive serves the node; afterwards the one of before."""
    [name] = cluster.local.load_image(dist / f"{STEM}-linux-amd64.oci.tar")
    assert name == f"docker.io/library/gpu-dra-driver:{VERSION}"
    cluster.kubectl("set", "image", DAEMONSET, "-n", NAMESPACE, f"driver={name}")
    rolled_out(cluster)
    yield name
    cluster.kubectl("rollout", "undo", DAEMONSET, "-n", NAMESPACE)
    rolled_out(cluster)


def test_released_image_serves_a_node(cluster: Cluster, released: str) -> None:
    said = cluster.kubectl("exec", DAEMONSET, "-n", NAMESPACE, "--", "gpu-dra-driver", "--version")
    assert said == f"gpu-dra-driver {VERSION}\n"
    cluster.start("released")
    assert cluster.seen_by("released") == cluster.allocated("released")


def test_commands_of_the_image_run_without_root_and_without_writing(cluster: Cluster, released: str) -> None:
    security = {
        "runAsNonRoot": True, "runAsUser": NOBODY, "runAsGroup": NOBODY, "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    inspects = {
        "name": "main",
        "image": released,
        "imagePullPolicy": "Never",
        "args": ["inspect", "--simulate", "dgx-h100", "--node-name", "somewhere", "-o", "json"],
        "securityContext": security,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    cluster.apply([pod("nobody", inspects, volumes=[{"name": "tmp", "emptyDir": {}}])])
    wait_for(
        "the command to end", lambda: cluster.pod("nobody")["status"]["phase"] in ("Succeeded", "Failed")
    )
    said = cluster.kubectl("logs", "nobody")
    assert cluster.pod("nobody")["status"]["phase"] == "Succeeded", said
    assert len(json.loads(said)["items"][0]["spec"]["devices"]) == 8
