"""`make release VERSION=0.2.0`: writes all files of a release to `dist/`; the Makefile then builds the image.

The files are the wheel, source archive, chart, manifests, SBOMs, release notes and checksums. The script also prints
the command that builds and pushes the images for amd64 and arm64. Two runs from the same commit write the same bytes.
The script refuses a version that a file contradicts and a tree with uncommitted changes. It replaces `dist/` only when
all files are complete.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
NAME = "gpu-dra-driver"
SBOMS = {"wheel": "requirements.txt", "image": "requirements-image.txt"}
IMAGES = """\
Build and push the images, each with an SBOM of its content:
  docker buildx build --platform linux/amd64,linux/arm64 --file daemonset/Dockerfile --tag {image}:{version} \\
    --build-arg SOURCE_DATE_EPOCH={epoch} --sbom=true --output type=image,push=true,rewrite-timestamp=true \\
    --label org.opencontainers.image.version={version} --label org.opencontainers.image.revision={revision} \\
    --label org.opencontainers.image.licenses=Apache-2.0{source} .
Nothing is signed. To sign all files: `cosign sign-blob --bundle dist/SHA256SUMS.sigstore.json dist/SHA256SUMS`.
To sign an image that you pushed: `cosign sign IMAGE@DIGEST`."""
# Versions that are valid for Python packages (PEP 440), the chart (semantic versioning) and the image's tag.
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-(alpha|beta|rc)\.(0|[1-9]\d*))?")
_UMASK = 0o022
"""Gives files in archives the same permissions on every machine."""


class RefusedError(Exception):
    """The reason for not releasing, in one sentence that says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write `dist/`. If the version cannot be released, print why and return 1."""
    parser = argparse.ArgumentParser(prog="release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version")
    parser.add_argument(
        "--image", default=NAME, help="the image's name in the manifests, without a tag; default: %(default)s"
    )
    parser.add_argument(
        "--source",
        default="",
        help="the URL of the repository, for the label of the image; default: no label",
    )
    parsed = parser.parse_args(arguments)
    try:
        check(ROOT, parsed.version)
        target = release(ROOT, parsed.version, parsed.image)
    except RefusedError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print((target / "SHA256SUMS").read_text(), end="")
    source = f" --label org.opencontainers.image.source={parsed.source}" if parsed.source else ""
    revision, epoch = _git(ROOT, "log", "-1", "--format=%H %ct").split()
    values = {"image": parsed.image, "version": parsed.version, "source": source}
    print(IMAGES.format(**values, revision=revision, epoch=epoch), file=sys.stderr)
    return 0


def check(root: Path, version: str) -> None:
    """Raise RefusedError if the version cannot be released."""
    if not _VERSION.fullmatch(version):
        raise RefusedError(f"{version!r} is not a version: write VERSION=1.2.3 or VERSION=1.2.3-rc.1.")
    wrong = {name: found for name, found in versions(root).items() if found != version}
    if wrong:
        listed = ", ".join(f"{name} says {found or 'nothing'}" for name, found in wrong.items())
        raise RefusedError(
            f"these files do not have version {version}: {listed}; change and commit them first."
        )
    if not (root / "daemonset" / "chart" / "Chart.yaml").exists():
        raise RefusedError("daemonset/chart/Chart.yaml is missing: a release needs a chart.")
    if not notes((root / "CHANGELOG.md").read_text(), version):
        raise RefusedError(f"CHANGELOG.md has no section '## {version}' with text: rename '## Unreleased'.")
    if changed := _git(root, "status", "--porcelain"):
        files = ", ".join(line[3:] for line in changed.splitlines()[:3])
        raise RefusedError(f"the tree has uncommitted changes ({files}): commit or stash them.")


def versions(root: Path) -> dict[str, str]:
    """Return the version that each file names, by file."""
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
    """Return the text of a version's section in the changelog; empty if there is none."""
    found = re.search(
        rf"^## \[?v?{re.escape(version)}\]?(?:[ \t][^\n]*)?\n(.*?)(?=^## |\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    return found[1].strip() if found else ""


def release(root: Path, version: str, image_name: str) -> Path:
    """Replace `dist/` with the files of the release, and return its path."""
    epoch = _git(root, "log", "-1", "--format=%ct")
    target = root / "dist"
    (root / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root / "build") as name:
        folder, tree = Path(name, "dist"), Path(name, "tree")
        folder.mkdir()
        tree.mkdir()
        archive = ["git", "-C", str(root), "-c", "tar.umask=0022", "archive"]
        source = folder / f"{NAME}-{version}-source.tar.gz"
        _run([*archive, "--format=tar.gz", f"--prefix={NAME}-{version}/", f"--output={source}", "HEAD"])
        _run(["tar", "--extract", "--file", str(source), "--strip-components=1", "--directory", str(tree)])
        wheel = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--no-build-isolation",
        ]
        _run([*wheel, "--wheel-dir", str(folder), str(tree)], SOURCE_DATE_EPOCH=epoch)
        (folder / f"{NAME}-{version}.tgz").write_bytes(chart(tree, epoch))
        manifests = (tree / "daemonset" / "install.yaml").read_text()
        (folder / f"{NAME}-{version}-install.yaml").write_text(with_image(manifests, image_name, version))
        for part, lock in SBOMS.items():
            sbom(tree, lock, folder / f"{NAME}-{version}-{part}.cdx.json")
        (folder / "RELEASE_NOTES.md").write_text(notes((tree / "CHANGELOG.md").read_text(), version) + "\n")
        (folder / "SHA256SUMS").write_text("".join(f"{line}\n" for line in checksums(folder)))
        folder.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    return target


def chart(tree: Path, epoch: str) -> bytes:
    """Return the chart as `helm package` builds it, but without helm's timestamps."""
    owners = ["--sort=name", "--owner=0", "--group=0", "--numeric-owner", f"--mtime=@{epoch}"]
    place = [f"--transform=s,^chart,{NAME},", "--directory", str(tree / "daemonset"), "chart"]
    return gzip.compress(_run(["tar", "--create", *owners, *place]), mtime=0)


def sbom(tree: Path, lock: str, target: Path) -> None:
    """Write the CycloneDX SBOM of the package and of the packages in a lock file."""
    tool = [str(Path(sys.executable).with_name("cyclonedx-py")), "requirements", "--output-reproducible"]
    _run([*tool, "--pyproject", str(tree / "pyproject.toml"), "--output-file", str(target), str(tree / lock)])


def with_image(manifests: str, image_name: str, version: str) -> str:
    """Return the manifests with `image_name`, the image's name in the registry, in place of the local name."""
    return re.sub(rf"(?m)(image: ){NAME}:{re.escape(version)}$", rf"\g<1>{image_name}:{version}", manifests)


def checksums(folder: Path) -> Iterator[str]:
    """Yield a line for each file, sorted by name, in sha256sum's format."""
    for file in sorted(folder.iterdir()):
        with file.open("rb") as content:
            yield f"{hashlib.file_digest(content, 'sha256').hexdigest()}  {file.name}"


def _run(command: Sequence[str], **environment: str) -> bytes:
    done = subprocess.run(
        command, env={**os.environ, **environment}, umask=_UMASK, capture_output=True, check=False
    )
    if done.returncode:
        raise RefusedError(
            f"{Path(command[0]).name} failed: {done.stderr.decode(errors='replace').strip()[-1000:]}"
        )
    return done.stdout


def _python_version(file: Path) -> str:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(one) for one in node.targets] == ["__version__"]:
            return str(ast.literal_eval(node.value))
    return ""


def _git(root: Path, *arguments: str) -> str:
    # If a Git hook runs this script, its variables would point to another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RefusedError(f"git {arguments[0]} failed in {root}: {done.stderr.strip()}")
    return done.stdout.rstrip("\n")


if __name__ == "__main__":
    sys.exit(main())
