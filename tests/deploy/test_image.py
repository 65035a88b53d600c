"""The content of the image, which does not depend on this machine's Python or processor."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import image
import pytest
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
PYTHON_OF_THE_IMAGE = "3.13"
"""Of Debian trixie."""
MACHINES = ("x86_64", "aarch64")


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
    """Every package of the image, with the version specifiers of other packages for it."""
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


@pytest.mark.parametrize("machine", MACHINES)
def test_lock_of_the_image_is_what_its_python_needs_and_no_more(machine: str) -> None:
    """Nothing is resolved when the image is built (`--no-deps`), so that the lock must be whole."""
    have, wanted = locked(LOCK_OF_IMAGE), needed(PYTHON_OF_THE_IMAGE, machine)
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


def test_manifest_names_the_version_as_tag() -> None:
    """Without a tag a node keeps the `latest` that it has, since it pulls only what is not present."""
    tagged = f"gpu-dra-driver:{dra_driver.__version__}"
    [driver] = [entry for entry in installed() if entry["kind"] == "DaemonSet"]
    [container] = driver["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["imagePullPolicy"]) == (tagged, "IfNotPresent")


def test_build_context_holds_what_the_image_is_made_of_and_nothing_else() -> None:
    """Whatever builds the image: `.dockerignore` is read by docker and buildah."""
    text = (DAEMONSET / "Dockerfile").read_text()
    inputs = {str(path.relative_to(ROOT)).partition("/")[0] for path in image._inputs()}
    assert inputs == {
        ".dockerignore", "LICENSE", "README.md", "daemonset", "dra_driver", "hack", "pyproject.toml",
        "requirements-dev.txt", "requirements-image.txt",
    }  # fmt: skip
    assert set(re.findall(r"requirements[\w-]*\.txt", text)) <= inputs
    assert not re.search(r"--(extra-)?index-url|--trusted-host|https?://", text), "no source of this machine"
