"""What `make release` writes, and the image of the Dockerfile: reproducible, and with a working driver."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import image
import pytest
import release

from tests.e2e.conftest import DAEMONSET, NAMESPACE, ROOT, Cluster, pod, wait_for
from tests.e2e.test_updates import rolled_out

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

VERSION = "99.0.1-rc.2"
STEM = f"gpu-dra-driver-{VERSION}"
NAME = f"localhost/gpu-dra-driver:{VERSION}"
EPOCH = 1_700_000_000
FULLY = ("--no-cache", "--file", image.DOCKERFILE, "--tag")
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
    """This repository, with everything changed that a person changes for a version."""
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
    wheel = f"gpu_dra_driver-{VERSION.replace('-rc.', 'rc')}-py3-none-any.whl"
    ends = (".tgz", "-source.tar.gz", "-install.yaml", "-wheel.cdx.json", "-image.cdx.json")
    named = {*(f"{STEM}{end}" for end in ends), wheel, "RELEASE_NOTES.md"}
    assert {file.name for file in dist.iterdir()} == {*named, "SHA256SUMS"}
    assert run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=dist).count(": OK\n") == len(named)
    assert "## " not in (dist / "RELEASE_NOTES.md").read_text().replace("### ", "")
    with tarfile.open(dist / f"{STEM}.tgz") as chart:
        files = {one.name for one in chart if one.isfile()}
    tracked = git(ROOT, "ls-files", "daemonset/chart").split()
    assert files == {name.replace("daemonset/chart", "gpu-dra-driver", 1) for name in tracked}


@pytest.mark.parametrize(("part", "lock"), release.SBOMS.items())
def test_sbom_lists_what_is_locked(dist: Path, part: str, lock: str) -> None:
    document = json.loads((dist / f"{STEM}-{part}.cdx.json").read_text())
    assert document["metadata"]["component"]["name"] == "gpu-dra-driver"
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / lock).read_text(), re.MULTILINE))
    assert {one["name"]: one["version"] for one in document["components"]} == locked


@pytest.fixture(scope="module")
def again(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another checkout, by a user with another umask, at another time."""
    place = tmp_path_factory.mktemp("again")
    run("bash", "-c", f"umask 077; git clone --quiet {repository} again", cwd=place)
    return place / "again"


def test_second_run_gives_the_same_bytes(dist: Path, again: Path) -> None:
    run("bash", "-c", f"umask 077; exec {sys.executable} hack/release.py {VERSION}", cwd=again)
    first, second = (
        {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
        for folder in (dist, again / "dist")
    )
    assert first == second


@pytest.fixture(scope="module")
def archive(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image of the version."""
    image.build(*FULLY, NAME, folder=repository, epoch=EPOCH)
    target = tmp_path_factory.mktemp("image") / "image.tar"
    image.save(NAME, target)
    return target


def test_second_build_gives_the_same_image(archive: Path, again: Path, tmp_path: Path) -> None:
    image.build(*FULLY, f"{NAME}-again", folder=again, epoch=EPOCH)
    image.save(f"{NAME}-again", tmp_path / "again.tar")
    first, second = (manifest(file) for file in (archive, tmp_path / "again.tar"))
    assert (first["Config"], first["Layers"]) == (second["Config"], second["Layers"])


def manifest(file: Path) -> dict[str, Any]:
    """Names in a docker archive are digests of what they name."""
    with tarfile.open(file) as archive:
        [found] = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
    return dict(found)


def test_image_can_be_changed_by_root_alone_and_installs_nothing(archive: Path) -> None:
    """Nor are there mounts of the build in it."""
    names, own = set(), {}
    with tarfile.open(archive) as whole:
        for layer in manifest(archive)["Layers"]:
            with tarfile.open(fileobj=whole.extractfile(layer)) as content:
                for one in content:
                    names.add(one.name)
                    if one.name.startswith("opt/"):
                        own[one.name] = one
    assert {(one.uid, one.gid, one.mode & 0o6022) for one in own.values() if not one.issym()} == {(0, 0, 0)}
    tops = {name.partition("site-packages/")[2].partition("/")[0] for name in own}
    assert {"dra_driver", "grpc", "urllib3"} <= tops
    assert not {"cel_expr_python", "grpc_tools", "pip", "setuptools"} & tops
    assert (
        "opt/gpu-dra-driver/lib/python3.13/site-packages/dra_driver/__pycache__/errors.cpython-313.pyc"
        in names
    )
    unwanted = re.compile(r"(usr/bin/(gcc|cc|pip.*)|root/(ca\.crt|\.cache|\.config).*|src|tools|wheels)")
    assert not list(filter(unwanted.fullmatch, names))


@pytest.fixture
def released(cluster: Cluster, archive: Path) -> Iterator[str]:
    """The driver of the archive serves the node; afterwards the one of before."""
    assert cluster.local.load_image(archive) == [NAME]
    cluster.kubectl("set", "image", DAEMONSET, "-n", NAMESPACE, f"driver={NAME}")
    rolled_out(cluster)
    yield NAME
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
