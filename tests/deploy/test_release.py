"""`make release`: what it refuses, and that its files depend only on the commit."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import release
import yaml

from tests.fakes.tables import tabled

ROOT = Path(__file__).parents[2]
MANIFEST = """kind: DaemonSet
spec:
  containers:
    - image: gpu-dra-driver:1.2.3
"""


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "core.hooksPath=/dev/null"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """All that names the version, and nothing else."""
    root = tmp_path / "repository"
    for name, text in {
        "pyproject.toml": '[project]\nversion = "1.2.3"\n',
        "dra_driver/__init__.py": '"""The driver."""\n\n__version__ = "1.2.3"\n',
        "daemonset/install.yaml": MANIFEST,
        "daemonset/chart/Chart.yaml": "name: gpu-dra-driver\nversion: 1.2.3\nappVersion: 1.2.3\n",
        "daemonset/chart/templates/one.yaml": "kind: One\n",
        "CHANGELOG.md": "# Changelog\n\n## 1.2.3 - 2026-01-02\n\n### Fixed\n- One.\n\n## 1.2.2\n\n- Two.\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root.parent, "init", "--quiet", str(root))
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message=first")
    return root


def test_commit_whose_files_agree_is_released(repository: Path) -> None:
    release.check(repository, "1.2.3")


@tabled("version")
def test_version_is_refused_when_not_one_for_python_and_charts(repository: Path, version: str) -> None:
    with pytest.raises(
        release.RefusedError, match=r"is not a version: write VERSION=1\.2\.3 or VERSION=1\.2\.3-rc\.1\.$"
    ):
        release.check(repository, version)


@tabled("name", "old", "new", "said")
def test_version_is_refused_when_a_file_disagrees(
    repository: Path, name: str, old: str, new: str, said: str
) -> None:
    file = repository / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    git(repository, "commit", "--quiet", "--all", "--message=change")
    with pytest.raises(release.RefusedError, match=re.escape(said)):
        release.check(repository, "1.2.3")


def test_tree_is_refused_when_it_has_changes(repository: Path) -> None:
    (repository / "new").touch()
    with pytest.raises(release.RefusedError, match=r"uncommitted changes \(new\): commit or stash them"):
        release.check(repository, "1.2.3")


def test_release_is_refused_when_the_chart_is_missing(repository: Path) -> None:
    shutil.rmtree(repository / "daemonset" / "chart")
    with pytest.raises(release.RefusedError, match=r"Chart\.yaml is missing: a release needs a chart"):
        release.check(repository, "1.2.3")


def test_refusal_is_one_sentence_and_leaves_dist_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["0.0.0"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("release: ")


def test_release_says_how_images_are_built_and_that_nothing_is_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "SHA256SUMS").write_text("0  file\n")
    monkeypatch.setattr(release, "check", lambda *_args: None)
    monkeypatch.setattr(release, "release", lambda *_args: tmp_path)
    monkeypatch.setattr(release, "_git", lambda *_args: "5b1c 1700000000")
    assert release.main(["1.2.3", "--image", "example.com/x", "--source", "https://example.com/x"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "0  file\n"
    for words in (
        "--file daemonset/Dockerfile", "--tag example.com/x:1.2.3", "SOURCE_DATE_EPOCH=1700000000",
        "image.revision=5b1c", "image.source=https://example.com/x", "cosign sign-blob", "cosign sign IMAGE@DIGEST",
    ):  # fmt: skip
        assert words in shown.err


def test_files_of_this_repository_agree_on_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert set(release.versions(ROOT).values()) == {version}


@pytest.mark.parametrize(
    "heading", ["## 1.2.3", "## 1.2.3 - 2026-01-02", "## [1.2.3] - 2026-01-02", "## v1.2.3"]
)
def test_notes_are_the_section_of_the_version(heading: str) -> None:
    text = (
        f"# Changelog\n\n## Unreleased\n\n- New.\n\n{heading}\n\n### Fixed\n- One.\n\n## 1.2.30\n\n- Two.\n"
    )
    assert release.notes(text, "1.2.3") == "### Fixed\n- One."
    assert release.notes(text, "1.2.30") == "- Two."
    assert release.notes(text, "1.2") == ""


def test_manifests_request_the_released_image() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    installed = (ROOT / "daemonset/install.yaml").read_text()
    text = release.with_image(installed, "registry.example.com/gpu/driver", version)
    images = [
        container["image"]
        for entry in yaml.safe_load_all(text)
        if entry["kind"] == "DaemonSet"
        for container in entry["spec"]["template"]["spec"]["containers"]
    ]
    assert images == [f"registry.example.com/gpu/driver:{version}"]


def test_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"two")
    (tmp_path / "a").write_bytes(b"one")
    lines = [f"{hashlib.sha256(text).hexdigest()}  {name}" for name, text in (("a", b"one"), ("b", b"two"))]
    assert list(release.checksums(tmp_path)) == lines
    subprocess.run(
        ["sha256sum", "--check", "--strict"], cwd=tmp_path, input="\n".join(lines), text=True, check=True
    )


def test_licence_is_apache_2() -> None:
    """The text that Debian ships, byte for byte."""
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == (
        "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
