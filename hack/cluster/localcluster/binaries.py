"""Builds the programs of the cluster from pinned Go modules.

Each folder below ``go/`` is a Go module. Its programs are its ``main.go`` and its ``tool`` lines. The modules are
separate, because they need different versions of the same dependencies.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

from localcluster import debian, shell
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
"""The modules of the cluster's programs. A cluster does not need the other modules, and a new version of one of them
does not cause a rebuild of the cluster's programs."""
HELM = {3: "helm", 4: "helm4"}
"""The module of each major version of Helm."""
COMPUTE_DOMAINS = ("compute-domains", "sigs.k8s.io/dra-driver-nvidia-gpu")
"""NVIDIA's DRA driver, for tests of its chart. Its compute domains can run next to this driver."""


NAMES = {
    KUBERNETES: ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet"),
    "containerd": ("ctr",),
}
"""Programs that are several, depending on the name by which they are called. The names are links to the program."""


@dataclass(frozen=True, slots=True)
class Part:
    """A program, the folder of its module, and its Go package."""

    name: str
    module: str
    package: str


def parts(layout: Layout, modules: tuple[str, ...]) -> list[Part]:
    """Return the programs of the modules: their own program, and their tools.

    Kubernetes has a folder for each release; `layout` selects one of them.
    """
    found = []
    for module in modules:
        folder = layout.kubernetes if module == KUBERNETES else module
        if (_MODULES / folder / "main.go").exists():
            found.append(Part(module, folder, "."))
        tools = re.search(
            r"^tool (?:\((.*?)\)|(\S+))", (_MODULES / folder / "go.mod").read_text(), re.M | re.S
        )
        for package in (tools[1] or tools[2]).split() if tools else ():
            last = package.rpartition("/")[2]
            is_name = re.fullmatch(r"v\d+", last) is None
            found.append(Part(last if is_name else module, folder, package))
    return found


def directory(layout: Layout, modules: tuple[str, ...] = CLUSTER) -> Path:
    """Return the directory of the programs. It depends on the content of the modules' folders and on the flags."""
    digest = hashlib.sha256(_machine().encode())
    for folder in sorted({part.module for part in parts(layout, modules)}):
        digest.update("\0".join(_flags(folder)).encode())
        for file in sorted((_MODULES / folder).iterdir()):
            digest.update(file.read_bytes())
    return layout.binaries / digest.hexdigest()[:16]


def build(layout: Layout, modules: tuple[str, ...] = CLUSTER) -> Path:
    """Build the missing programs, and return their directory."""
    target, wanted = directory(layout, modules), parts(layout, modules)
    missing = [part for part in wanted if not (target / part.name).exists()]
    if not missing:
        return target
    debian.install_missing(debian.BUILD_PACKAGES)
    shell.say(f"Go builds {', '.join(part.name for part in missing)}; this takes minutes, once")
    with shell.exclusive(layout.binaries / "lock", wait=True):
        target.mkdir(parents=True, exist_ok=True)
        for number, part in enumerate(missing, 1):
            if not (target / part.name).exists():  # another process may have built it
                with shell.step(f"[{number}/{len(missing)}] {part.name}"):
                    _provide_part(part, layout, target)
    return target


def source_of(folder: str, module: str) -> Path:
    """Return the directory of a module that the go.mod in `folder` requires. Download it if it is missing."""
    done = _run_go(["go", "mod", "download", "-json", module], folder)
    if done.returncode != 0:
        raise ClusterError(f"Downloading {module} failed: {(done.stdout + done.stderr).strip()[-2000:]}")
    return Path(json.loads(done.stdout)["Dir"])


def _provide_part(part: Part, layout: Layout, target: Path) -> None:
    """Build a program. For an older release of Kubernetes, reuse the programs that are the same in all releases."""
    usual = directory(replace(layout, kubernetes=KUBERNETES)) / part.name
    if part.module != layout.kubernetes and usual.exists():
        os.link(usual, target / part.name)
    else:
        _build_part(part, target)


def _build_part(part: Part, target: Path) -> None:
    """Build to a temporary name and rename it, so that an interrupted build leaves no incomplete file."""
    unfinished = target / f".{part.name}.unfinished"
    done = _run_go(["go", "build", *_flags(part.module), "-o", str(unfinished), part.package], part.module)
    if done.returncode != 0:
        raise ClusterError(f"Building {part.name} failed: {done.stderr.strip()[-2000:]}")
    for name in NAMES.get(part.name, ()):
        (target / name).unlink(missing_ok=True)
        (target / name).symlink_to(part.name)
    unfinished.replace(target / part.name)


def _run_go(argv: list[str], module: str) -> subprocess.CompletedProcess[str]:
    _require_go()
    # Go fails at the first module that it cannot download, but keeps the modules that it has already downloaded.
    for tries_left in (2, 1, 0):
        done = subprocess.run(
            argv,
            cwd=_MODULES / module,
            env={
                **os.environ,
                "CGO_ENABLED": _CGO.get(module, "0"),
                "GOFLAGS": "",
                "GOWORK": "off",
                "GOGC": "200",  # a tenth less time, for more memory
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0 or not tries_left or not _NETWORK.search(done.stdout + done.stderr):
            break
        time.sleep(10)
    return done


def _flags(module: str) -> list[str]:
    """Return the build flags. They set versions: otherwise Kubernetes programs report v0.0.0, and helm assumes 1.20."""
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


@functools.cache
def _require_go() -> None:
    """Raise ClusterError if Go is missing or too old. `go` runs in a module, so it may fetch go.mod's toolchain."""
    wanted = ".".join(map(str, _OLDEST_GO))
    if shell.find_program("go") is None:
        raise ClusterError(f"Go {wanted} or newer is needed to build the cluster's programs.")
    done = subprocess.run(
        ["go", "env", "GOVERSION"], cwd=_MODULES / KUBERNETES, capture_output=True, text=True, check=False
    )
    found = re.match(r"go(\d+)\.(\d+)", done.stdout)
    if done.returncode != 0 or found is None or (int(found[1]), int(found[2])) < _OLDEST_GO:
        said = done.stdout.strip() or done.stderr.strip()
        raise ClusterError(f"Go {wanted} or newer is needed; `go env GOVERSION` printed: {said}.")
