"""Builds the programs of the cluster from pinned Go modules.

Each folder below ``go/`` is one module whose ``tool`` lines, or own ``main.go``, are the programs; they are
separate because their dependencies need different versions.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

from localcluster import shell
from localcluster.layout import CLUSTER_SOURCE, KUBERNETES, Layout
from localcluster.shell import ClusterError

_MODULES = CLUSTER_SOURCE / "go"
_TAGS = {"containerd": "no_btrfs,no_devmapper,no_zfs", "runc": "seccomp"}
_CGO = {"nvidia-cdi-hook": "1", "runc": "1"}
_OLDEST_GO = (1, 26)
_NETWORK = re.compile(
    "dial tcp|i/o timeout|connection reset|TLS handshake|unexpected EOF|50[0-9] |bad gateway", re.I
)


CLUSTER = (KUBERNETES, "etcd", "containerd", "runc")
"""The modules of what a cluster consists of. The others are apart: a cluster comes up without them, and another version
of one builds nothing else again."""
HELM = {3: "helm", 4: "helm4"}
"""By major version."""
COMPUTE_DOMAINS = ("compute-domains", "sigs.k8s.io/dra-driver-nvidia-gpu")
"""NVIDIA's DRA driver, for tests of its chart: its part for compute domains can run next to this driver."""


@dataclass(frozen=True, slots=True)
class Part:
    """One program: the folder of the module it is built in and its Go package."""

    name: str
    module: str
    package: str


def parts(layout: Layout, modules: tuple[str, ...]) -> list[Part]:
    """The programs of modules: the tools of each, or its own. The folder of Kubernetes depends on the release."""
    found = []
    for module in modules:
        folder = layout.kubernetes if module == KUBERNETES else module
        tools = re.search(
            r"^tool (?:\((.*?)\)|(\S+))", (_MODULES / folder / "go.mod").read_text(), re.M | re.S
        )
        for package in (tools[1] or tools[2]).split() if tools else ["."]:
            last = package.rpartition("/")[2]
            is_name = re.fullmatch(r"\.|v\d+", last) is None
            found.append(Part(last if is_name else module, folder, package))
    return found


def directory(layout: Layout, modules: tuple[str, ...] = CLUSTER) -> Path:
    """Where the programs lie that the present go.mod files and flags give."""
    digest = hashlib.sha256(_machine().encode())
    for folder in sorted({part.module for part in parts(layout, modules)}):
        digest.update("\0".join(_flags(folder)).encode())
        for file in sorted((_MODULES / folder).iterdir()):
            digest.update(file.read_bytes())
    return layout.binaries / digest.hexdigest()[:16]


def build(layout: Layout, modules: tuple[str, ...] = CLUSTER) -> Path:
    """Build what is missing and return the directory; fast when nothing is."""
    target, wanted = directory(layout, modules), parts(layout, modules)
    if all((target / part.name).exists() for part in wanted):
        return target
    with shell.exclusive(layout.binaries / "lock", wait=True):
        _require_go()
        target.mkdir(parents=True, exist_ok=True)
        for number, part in enumerate(wanted, 1):
            if not (target / part.name).exists():
                with shell.step(f"[{number}/{len(wanted)}] {part.name}"):
                    _provide_part(part, layout, target)
    return target


def source_of(folder: str, module: str) -> Path:
    """The files of a module that the go.mod in `folder` requires, downloaded first if they are not there."""
    _require_go()
    done = _run_go(["go", "mod", "download", "-json", module], folder)
    if done.returncode != 0:
        raise ClusterError(f"Downloading {module} failed: {(done.stdout + done.stderr).strip()[-2000:]}")
    return Path(json.loads(done.stdout)["Dir"])


def _provide_part(part: Part, layout: Layout, target: Path) -> None:
    """What every release of Kubernetes shares is there already if the usual one was built."""
    usual = directory(replace(layout, kubernetes=KUBERNETES)) / part.name
    if part.module != layout.kubernetes and usual.exists():
        os.link(usual, target / part.name)
    else:
        _build_part(part, target)


def _build_part(part: Part, target: Path) -> None:
    """Builds to a temporary name and renames, so that an interrupted build leaves no incomplete file."""
    unfinished = target / f".{part.name}.unfinished"
    done = _run_go(["go", "build", *_flags(part.module), "-o", str(unfinished), part.package], part.module)
    if done.returncode != 0:
        raise ClusterError(f"Building {part.name} failed: {done.stderr.strip()[-2000:]}")
    unfinished.replace(target / part.name)


def _run_go(argv: list[str], module: str) -> subprocess.CompletedProcess[str]:
    # Go fails at the first module that it cannot download, but keeps the others for the next attempt.
    for tries_left in (2, 1, 0):
        done = subprocess.run(
            argv,
            cwd=_MODULES / module,
            env={**os.environ, "CGO_ENABLED": _CGO.get(module, "0"), "GOFLAGS": "", "GOWORK": "off"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0 or not tries_left or not _NETWORK.search(done.stdout + done.stderr):
            break
        time.sleep(10)
    return done


def _flags(module: str) -> list[str]:
    """Build flags; without a version Kubernetes programs call themselves v0.0.0, and helm takes 1.20 for the server."""
    linker = "-s -w"
    if module == "helm":
        minor = _version_of(module, "k8s.io/client-go").split(".")[1]
        prefix = "-X helm.sh/helm/v3/pkg/chartutil.k8sVersion"
        linker += f" {prefix}Major=1 {prefix}Minor={minor}"
        linker += f" -X helm.sh/helm/v3/internal/version.version={_version_of(module, 'helm.sh/helm/v3')}"
    if module == "helm4":
        linker += f" -X helm.sh/helm/v4/internal/version.version={_version_of(module, 'helm.sh/helm/v4')}"
    if module == "nvidia-cdi-hook":
        toolkit = "github.com/NVIDIA/nvidia-container-toolkit"
        linker += f" -X {toolkit}/internal/info.version={_version_of(module, toolkit).removeprefix('v')}"
    if module.startswith(KUBERNETES):
        version = _version_of(module, "k8s.io/kubernetes")
        major, minor = version.removeprefix("v").split(".")[:2]
        prefix = "-X k8s.io/component-base/version."
        linker += f" {prefix}gitVersion={version} {prefix}gitMajor={major} {prefix}gitMinor={minor}"
    tags = [f"-tags={_TAGS[module]}"] if module in _TAGS else []
    return ["-trimpath", "-buildvcs=false", *tags, f"-ldflags={linker}"]


def _version_of(module: str, required: str) -> str:
    text = (_MODULES / module / "go.mod").read_text()
    found = re.search(rf"{re.escape(required)} (v\d\S+)", text)
    if found is None:
        raise ClusterError(f"go/{module}/go.mod does not require {required}.")
    return found[1]


def _machine() -> str:
    return os.uname().machine


def _require_go() -> None:
    """Runs inside a module, because an older Go may download the toolchain that the module names."""
    wanted = ".".join(map(str, _OLDEST_GO))
    if shell.find_program("go") is None:
        raise ClusterError(f"Go {wanted} or newer is needed to build the cluster's programs.")
    done = subprocess.run(
        ["go", "env", "GOVERSION"], cwd=_MODULES / KUBERNETES, capture_output=True, text=True, check=False
    )
    found = re.match(r"go(\d+)\.(\d+)", done.stdout)
    if done.returncode != 0 or found is None or (int(found[1]), int(found[2])) < _OLDEST_GO:
        said = done.stdout.strip() or done.stderr.strip()
        raise ClusterError(f"Go {wanted} or newer is needed, this one says: {said}.")
