"""What the image is made of, and that neither this machine's Python nor its processor decides it."""

from __future__ import annotations

import ast
import gzip
import hashlib
import io
import json
import re
import stat
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from imagebuild import archives, image, places, wheels
from imagebuild.architectures import ARCHITECTURES
from localcluster import debian
from localcluster.errors import ClusterError
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dra_driver
from tests.deploy.test_daemonset import DAEMONSET, installed

ROOT = Path(__file__).parents[2]
DECLARED = [
    Requirement(line)
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
]
LEFT_OUT = {"cel-expr-python"}
LOCK_OF_IMAGE = ROOT / "requirements-image.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def locked(file: Path) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;]+) \\$", file.read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def environment(python: str, machine: str) -> dict[str, str]:
    """What markers see in the image, whatever they would see here."""
    others = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_version": f"{python}.0",
    }
    return {**default_environment(), **others, "platform_machine": machine, "extra": ""}


def needed(python: str, machine: str) -> dict[str, set[str]]:
    """Every package of the image, with the version specifiers that others ask of it."""
    target = environment(python, machine)
    waiting = [entry for entry in DECLARED if entry.name not in LEFT_OUT]
    found: dict[str, set[str]] = {}
    while waiting:
        entry = waiting.pop()
        name = canonicalize_name(entry.name)
        new = name not in found
        found.setdefault(name, set()).add(str(entry.specifier))
        if not new and not entry.extras:
            continue
        for line in distribution(name).requires or ():
            other = Requirement(line)
            extras = [{"extra": extra} for extra in entry.extras] or [{}]
            if other.marker is None or any(other.marker.evaluate({**target, **extra}) for extra in extras):
                waiting.append(other)
    return found


def test_every_import_of_the_driver_is_declared() -> None:
    owners = packages_distributions()
    declared = {canonicalize_name(entry.name) for entry in DECLARED}
    for file in (ROOT / "dra_driver").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"dra_driver"}:
                found = {canonicalize_name(owner) for owner in owners.get(top, ())}
                assert found & declared, f"{file}: {top} of {found} is not declared"


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("machine", [one.machine for one in ARCHITECTURES.values()])
def test_lock_of_the_image_is_what_its_python_needs_and_no_more(python: str, machine: str) -> None:
    """Nothing is resolved when wheels are fetched, so that the lock must be whole for every Python of an image."""
    have, wanted = locked(LOCK_OF_IMAGE), needed(python, machine)
    assert set(have) == set(wanted)
    for name, specifiers in wanted.items():
        for specifier in specifiers:
            assert Requirement(f"{name}{specifier}").specifier.contains(have[name], prereleases=True)


def test_lock_of_the_image_has_the_versions_that_are_tested_and_hashes_and_no_index() -> None:
    everything, text = locked(ROOT / "requirements.txt"), LOCK_OF_IMAGE.read_text()
    here = locked(LOCK_OF_IMAGE)
    assert here == {name: everything[name] for name in here}
    assert not (LEFT_OUT | {"grpcio-tools", "setuptools", "pip"}) & set(here)
    assert len(here) == len(re.findall(r"^[a-z]", text, re.MULTILINE))
    assert not re.search(r"--(extra-)?index-url|--find-links|--trusted-host|://", text)
    for block in re.split(r"\n(?=[a-z])", text.strip()):
        assert "--hash=sha256:" in block


def test_manifests_name_the_version_as_tag() -> None:
    """Without a tag a node keeps the `latest` that it has, since it pulls only what is not present."""
    assert (
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == dra_driver.__version__
    )
    tagged = f"gpu-dra-driver:{dra_driver.__version__}"
    texts = [
        path.read_text()
        for path in DAEMONSET.rglob("*.yaml")
        if "chart" not in path.relative_to(DAEMONSET).parts
    ]
    named = {
        line.partition("image: ")[2] for text in texts for line in text.splitlines() if "image: " in line
    }
    assert {name for name in named if "gpu-dra-driver" in name} == {tagged}
    [driver] = [entry for entry in installed() if entry["kind"] == "DaemonSet"]
    [container] = driver["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["imagePullPolicy"]) == (tagged, "IfNotPresent")


def test_containerfile_makes_the_same_as_the_archive() -> None:
    text = places.CONTAINERFILE.read_text().replace("\\\n", " ")
    said = dict(re.findall(r"(\w+)=(\S+)", re.search(r"^ENV (.*)$", text, re.MULTILINE)[1]))  # type: ignore[index]
    assert [f"{name}={value}" for name, value in said.items()] == image._CONFIG["Env"]
    for word, key in (("ENTRYPOINT", "Entrypoint"), ("CMD", "Cmd")):
        assert json.loads(re.search(rf"^{word} (.*)$", text, re.MULTILINE)[1]) == image._CONFIG[key]  # type: ignore[index]


@pytest.mark.parametrize("version", ["3", "3.13.1", "cpython-3.13", ""])
def test_python_version_is_refused_when_it_is_not_two_numbers(version: str) -> None:
    with pytest.raises(ClusterError, match=r"write it as 3\.13"):
        wheels.dependencies(version, list(ARCHITECTURES.values()))


def tree(folder: Path) -> Path:
    """A root file system with what may go wrong in one."""
    (folder / "usr/bin").mkdir(parents=True)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    program = folder / "usr/bin/program"
    program.write_bytes(b"\x7fELF program")
    program.chmod(0o4777)
    (folder / "usr/bin/same").hardlink_to(program)
    (folder / "usr/bin/link").symlink_to("program")
    (folder / "private").write_text("only mine")
    (folder / "private").chmod(0o600)
    return folder


def test_layer_belongs_to_root_and_only_root_may_write_it(tmp_path: Path) -> None:
    layer = archives.write_layer(tmp_path / "layer.gz", tree(tmp_path / "tree"), "opt/here", "a test")
    with tarfile.open(layer.file, "r:gz") as archive:
        entries = {entry.name: entry for entry in archive}
        assert archive.extractfile("opt/here/usr/bin/same").read() == b"\x7fELF program"  # type: ignore[union-attr]
    assert {(entry.uid, entry.gid, entry.uname, entry.mtime) for entry in entries.values()} == {(0, 0, "", 0)}
    modes = {name: stat.S_IMODE(entry.mode) for name, entry in entries.items()}
    assert modes == {
        "opt": 0o755, "opt/here": 0o755, "opt/here/private": 0o644, "opt/here/tmp": 0o1777, "opt/here/usr": 0o755,
        "opt/here/usr/bin": 0o755, "opt/here/usr/bin/link": 0o777, "opt/here/usr/bin/program": 0o755,
        "opt/here/usr/bin/same": 0o755,
    }  # fmt: skip
    assert layer.unpacked == len("only mine") + 2 * len(b"\x7fELF program")
    assert archives.read_layer(layer.file) == layer


def read_archive(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as archive:
        return {entry.name: archive.extractfile(entry).read() for entry in archive if entry.isfile()}  # type: ignore[union-attr]


def check_layout(files: dict[str, bytes], name: str, architecture: str) -> dict[str, Any]:
    """Follow an OCI archive from its index to its layers as a runtime does; the image's configuration."""
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    unused = {path for path in files if path.startswith("blobs/sha256/")}

    def blob(descriptor: dict[str, Any]) -> bytes:
        path = f"blobs/{descriptor['digest'].replace(':', '/')}"
        unused.discard(path)
        content = files[path]
        assert len(content) == descriptor["size"]
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == descriptor["digest"]
        return content

    [entry] = json.loads(files["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == name
    assert entry["platform"]["architecture"] == architecture
    manifest = json.loads(blob(entry))
    config: dict[str, Any] = json.loads(blob(manifest["config"]))
    assert (config["architecture"], config["os"]) == (architecture, "linux")
    diff_ids = []
    for layer in manifest["layers"]:
        assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar+gzip"
        with tarfile.open(fileobj=io.BytesIO(blob(layer)), mode="r:gz") as archive:
            names = archive.getnames()
            assert len(names) == len(set(names))
        diff_ids.append(f"sha256:{hashlib.sha256(gzip.decompress(blob(layer))).hexdigest()}")
    assert diff_ids == config["rootfs"]["diff_ids"]
    assert len(config["history"]) == len(diff_ids)
    assert not unused
    return config


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_archive_is_a_whole_oci_layout_and_the_same_bytes_again(tmp_path: Path, architecture: str) -> None:
    made = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        layers = [
            archives.write_layer(folder / "a.gz", tree(folder / "tree"), "", "first"),
            archives.write_layer(folder / "b.gz", tree(folder / "other"), "opt/driver", "second"),
        ]
        platform = {"architecture": architecture, "os": "linux"}
        config = {"Cmd": ["run"], "Labels": {"version": "1.2.3"}}
        file = folder / "image.tar"
        archives.write_image(file, "docker.io/library/x:1.2.3", platform, config, layers, 1_700_000_000)
        made.append(file)
    found = check_layout(read_archive(made[0]), "docker.io/library/x:1.2.3", architecture)
    assert found["config"] == {"Cmd": ["run"], "Labels": {"version": "1.2.3"}}
    assert found["created"] == "2023-11-14T22:13:20Z"
    assert made[0].read_bytes() == made[1].read_bytes()


def test_image_says_what_it_is_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As labels, which runtimes show, and as annotations, which registries show."""
    layers = [archives.write_layer(tmp_path / "a.gz", tree(tmp_path / "tree"), "", "first")] * 3
    ground = SimpleNamespace(architecture=ARCHITECTURES["amd64"], packages={})
    monkeypatch.setattr(image.base, "ensure", lambda *_args, **_more: ground)
    monkeypatch.setattr(image, "_layers", lambda *_args: layers)
    file, project = tmp_path / "image.tar", places.project_settings()["project"]
    made = image.release(
        ARCHITECTURES["amd64"], "x/y:1", file, 0, {"revision": "5b1c", "source": "https://example.com/x"}
    )
    files = read_archive(file)
    manifest = json.loads(files[f"blobs/{made.digest.replace(':', '/')}"])
    config = check_layout(files, "x/y:1", "amd64")
    assert manifest["annotations"] == config["config"]["Labels"]
    assert manifest["annotations"] == {
        "org.opencontainers.image.title": "gpu-dra-driver",
        "org.opencontainers.image.description": project["description"],
        "org.opencontainers.image.version": project["version"],
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.revision": "5b1c",
        "org.opencontainers.image.source": "https://example.com/x",
    }


def test_wheel_is_unpacked_without_its_scripts(tmp_path: Path) -> None:
    wheel = tmp_path / "one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as content:
        for name in ("one/__init__.py", "one-1.0.data/purelib/two.py", "one-1.0.data/platlib/three.so"):
            content.writestr(name, name)
        content.writestr("one-1.0.data/scripts/one", "#!python")
        content.writestr("one-1.0.data/headers/one.h", "")
        content.writestr("one-1.0.dist-info/METADATA", "Name: one")
    image._unpack(wheel, tmp_path / "packages")
    found = {
        str(path.relative_to(tmp_path / "packages"))
        for path in (tmp_path / "packages").rglob("*")
        if path.is_file()
    }
    assert found == {"one/__init__.py", "two.py", "three.so", "one-1.0.dist-info/METADATA"}


def repository(folder: Path, *versions: str) -> None:
    """A package source with some versions of the package `thing`."""
    entries = []
    for version in versions:
        control = (
            f"Package: thing\nVersion: {version}\nArchitecture: all\nMaintainer: nobody\nDescription: none\n"
        )
        tree = folder / f"tree-{version}"
        (tree / "DEBIAN").mkdir(parents=True)
        (tree / "DEBIAN/control").write_text(control)
        file = folder / f"thing_{version}_all.deb"
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", "--build", tree, file], check=True, capture_output=True
        )
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        entries.append(f"{control}Filename: ./{file.name}\nSize: {file.stat().st_size}\nSHA256: {digest}\n")
    (folder / "Packages").write_text("\n".join(entries))


def test_what_the_builders_apt_prefers_is_not_in_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, etc = tmp_path / "source", tmp_path / "etc"
    repository(source, "1", "2")
    pins = "Package: thing\nPin: version 1\nPin-Priority: 1001\n"
    (etc / "preferences.d").mkdir(parents=True)
    (etc / "apt.conf.d").mkdir()
    (etc / "preferences").write_text(pins)
    (etc / "preferences.d/pins").write_text(pins)
    (tmp_path / "apt.conf").write_text(f'Dir::Etc "{etc}";\nAPT::Default-Release "elsewhere";\n')
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    apart = debian._apart

    def of_the_source(top: Path, *suites: str) -> list[str]:
        options = apart(top, *suites)
        (top / "sources.list").write_text(f"deb [trusted=yes] copy:{source} ./\n")
        return options

    monkeypatch.setattr(debian, "mirror", lambda _release: "file:/nowhere")
    monkeypatch.setattr(debian, "_sites", dict)
    monkeypatch.setattr(debian, "_apart", of_the_source)
    (tmp_path / "downloads").mkdir()
    files = debian.download(["thing"], "trixie", "amd64", tmp_path / "downloads")
    assert [file.name for file in files] == ["thing_2_all.deb"]
