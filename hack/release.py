"""`make release VERSION=0.2.0`: everything that a version consists of, in `dist/`.

Images for amd64 and arm64 as OCI archives, wheel, source archive, chart, rendered manifests, SBOMs, release notes and
checksums. Two runs from the same commit give the same bytes, as long as Debian's mirror has the same packages: the
SBOM of an image lists them. A version that the files do not agree on, and a tree with changes, are refused, and `dist/`
stays as it was until all is there.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "hack" / name) for name in ("cluster", "image")]

import audit  # noqa: E402
from imagebuild import archives, image, wheels  # noqa: E402
from imagebuild.architectures import ARCHITECTURES, own  # noqa: E402
from localcluster import progress  # noqa: E402
from localcluster.errors import ClusterError  # noqa: E402

NAME = "gpu-dra-driver"
UNSIGNED = (
    "Nothing is signed: `cosign sign-blob --bundle dist/SHA256SUMS.sigstore.json dist/SHA256SUMS` signs all files, and "
    "`cosign sign IMAGE@DIGEST` an image that you pushed."
)
# What Python's packages, the chart and the image's tag can all be named by: PEP 440 and semantic versioning.
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-(alpha|beta|rc)\.(0|[1-9]\d*))?")

Json = dict[str, Any]


class RefusedError(Exception):
    """Why nothing is released, in one sentence that says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write `dist/`; 1 and a sentence if the version cannot be released."""
    parser = argparse.ArgumentParser(prog="release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version")
    parser.add_argument(
        "--image", default=NAME, help="the image's name in the manifests, without tag; default: %(default)s"
    )
    parser.add_argument(
        "--source",
        default="",
        help="the URL of the repository, for the label of the image; default: no label",
    )
    parsed = parser.parse_args(arguments)
    try:
        check(ROOT, parsed.version)
        target = release(ROOT, parsed.version, parsed.image, parsed.source)
    except (RefusedError, ClusterError) as error:
        progress.say(f"release: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    print((target / "SHA256SUMS").read_text(), end="")
    progress.say(UNSIGNED)
    return 0


def check(root: Path, version: str) -> None:
    """Refuse what cannot be released."""
    if not _VERSION.fullmatch(version):
        raise RefusedError(f"{version!r} is no version: write VERSION=1.2.3 or VERSION=1.2.3-rc.1.")
    said = {name: found for name, found in versions(root).items() if found != version}
    if said:
        told = ", ".join(f"{name} says {found or 'nothing'}" for name, found in said.items())
        raise RefusedError(
            f"{version} is not the version of these files: {told}; change and commit them first."
        )
    if not (root / "daemonset" / "chart" / "Chart.yaml").exists():
        raise RefusedError("daemonset/chart/Chart.yaml is missing: a release has a chart.")
    if not notes((root / "CHANGELOG.md").read_text(), version):
        raise RefusedError(f"CHANGELOG.md has no section '## {version}' with text: rename '## Unreleased'.")
    if changed := _git(root, "status", "--porcelain"):
        files = ", ".join(line[3:] for line in changed.splitlines()[:3])
        raise RefusedError(f"the tree has changes that are not committed ({files}): commit or stash them.")


def versions(root: Path) -> dict[str, str]:
    """What every file that names the version says."""
    found = {
        "pyproject.toml": str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]),
        "dra_driver/__init__.py": _python_version(root / "dra_driver" / "__init__.py"),
    }
    for manifest in sorted((root / "daemonset").rglob("*.yaml")):
        if "chart" in manifest.relative_to(root).parts:
            continue
        for tag in re.findall(rf"image: {NAME}:?(\S*)$", manifest.read_text(), re.MULTILINE):
            found[str(manifest.relative_to(root))] = tag
    chart = root / "daemonset" / "chart" / "Chart.yaml"
    described = yaml.safe_load(chart.read_text()) if chart.exists() else {}
    found |= {
        f"Chart.yaml's {key}": str(described[key]) for key in ("version", "appVersion") if key in described
    }
    return found


def notes(changelog: str, version: str) -> str:
    """The text of a version's section; empty if there is none."""
    found = re.search(
        rf"^## \[?v?{re.escape(version)}\]?(?:[ \t][^\n]*)?\n(.*?)(?=^## |\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    return found[1].strip() if found else ""


def release(root: Path, version: str, image_name: str, source: str) -> Path:
    """Write `dist/`, which is replaced as a whole; its path."""
    epoch = int(_git(root, "log", "-1", "--format=%ct"))
    target = root / "dist"
    (root / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root / "build") as name:
        folder = Path(name, "dist")
        folder.mkdir()
        packages(folder, version, epoch)
        (folder / f"{NAME}-{version}.tgz").write_bytes(chart(root, epoch))
        text = (root / "daemonset" / "install.yaml").read_text()
        (folder / f"{NAME}-{version}-install.yaml").write_text(with_image(text, image_name, version))
        images(folder, version, image_name, epoch, origin(root, source))
        (folder / "RELEASE_NOTES.md").write_text(notes((root / "CHANGELOG.md").read_text(), version) + "\n")
        (folder / "SHA256SUMS").write_text("".join(f"{line}\n" for line in checksums(folder)))
        folder.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    return target


def packages(folder: Path, version: str, epoch: int) -> None:
    """Wheel, source archive and the SBOM of both."""
    made = wheels.project(epoch)
    for wheel in made.glob("*.whl"):
        shutil.copyfile(wheel, folder / wheel.name)
    for source in made.glob("*.tar.gz"):
        # setuptools writes the time of the build and the user into it.
        with tempfile.TemporaryDirectory() as name, tarfile.open(source) as content:
            content.extractall(name, filter="data")
            files = [path for path in Path(name).rglob("*") if path.is_file()]
            entries = [(str(path.relative_to(name)), path) for path in files]
            archives.write_tar_gz(folder / source.name, entries, epoch)
    document = audit.sbom(audit.read_lock(audit.LOCK.read_text()), audit.read_installed(), version=version)
    _write_json(folder / f"{NAME}-{version}-wheel.cdx.json", document)


def origin(root: Path, source: str) -> dict[str, str]:
    """What the image's labels say of where it comes from."""
    return {"revision": _git(root, "rev-parse", "HEAD")} | ({"source": source} if source else {})


def images(folder: Path, version: str, image_name: str, epoch: int, made_from: Json) -> None:
    """An archive and an SBOM for each architecture; this machine's first, which compiles for the others."""
    lock = audit.read_lock((ROOT / "requirements-image.txt").read_text())
    for architecture in sorted(ARCHITECTURES.values(), key=lambda one: one != own()):
        stem = f"{NAME}-{version}-linux-{architecture.name}"
        made = image.release(
            architecture, full_name(image_name, version), folder / f"{stem}.oci.tar", epoch, made_from
        )
        reference = f"pkg:oci/{NAME}@{made.digest.replace(':', '%3A')}?arch={architecture.name}&tag={version}"
        subject = {
            "type": "container", "bom-ref": reference, "name": NAME, "version": version, "purl": reference,
        }  # fmt: skip
        debian = [_debian_component(entry) for _, entry in sorted(made.debian.items())]
        document = audit.sbom(lock, audit.read_installed(), version=version, image=subject, beside=debian)
        _write_json(folder / f"{stem}.cdx.json", document)


def full_name(image_name: str, version: str) -> str:
    """The name under which runtimes keep an image that manifests call by `image_name`."""
    first, slash, _ = image_name.partition("/")
    if not slash:
        return f"docker.io/library/{image_name}:{version}"
    registry = "." in first or ":" in first or first == "localhost"
    return f"{image_name}:{version}" if registry else f"docker.io/{image_name}:{version}"


def chart(root: Path, epoch: int) -> bytes:
    """The chart as `helm package` makes it, but for the time of day that helm writes into it."""
    folder = root / "daemonset" / "chart"
    listed = _git(root, "ls-files", "-z", "daemonset/chart").split("\0")
    entries = [(f"{NAME}/{(root / name).relative_to(folder)}", root / name) for name in listed if name]
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "chart.tgz")
        archives.write_tar_gz(file, entries, epoch)
        return file.read_bytes()


def with_image(manifests: str, image_name: str, version: str) -> str:
    """Manifests that name the image as it is called in a registry."""
    return re.sub(rf"(?m)(image: ){NAME}:{re.escape(version)}$", rf"\g<1>{image_name}:{version}", manifests)


def checksums(folder: Path) -> Iterator[str]:
    """A line as sha256sum writes it for every file, by name."""
    for file in sorted(folder.iterdir()):
        with file.open("rb") as content:
            yield f"{hashlib.file_digest(content, 'sha256').hexdigest()}  {file.name}"


def _debian_component(control: dict[str, str]) -> Json:
    name, version, architecture = (control[key] for key in ("Package", "Version", "Architecture"))
    purl = f"pkg:deb/debian/{name}@{version.replace('+', '%2B')}?arch={architecture}"
    return {
        "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, "scope": "required",
    }  # fmt: skip


def _python_version(file: Path) -> str:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(one) for one in node.targets] == ["__version__"]:
            return str(ast.literal_eval(node.value))
    return ""


def _git(root: Path, *arguments: str) -> str:
    # Variables of a hook that this runs in would point to another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RefusedError(f"git {arguments[0]} failed in {root}: {done.stderr.strip()}")
    return done.stdout.rstrip("\n")


def _write_json(file: Path, document: Json) -> None:
    file.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
