"""Building the programs of the cluster from pinned Go modules.

Each folder below ``go/`` is one module whose ``tool`` lines, or whose own ``main.go``, are the programs;
they are apart because their dependencies ask for different versions.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from localcluster import locking, progress, shell
from localcluster.errors import ClusterError
from localcluster.layout import CLUSTER_SOURCE, KUBERNETES, Layout

_MODULES = CLUSTER_SOURCE / "go"
_TAGS = {"containerd": "no_btrfs,no_devmapper,no_zfs", "runc": "seccomp"}
_CGO = {"nvidia-cdi-hook": "1", "runc": "1"}
_OLDEST_GO = (1, 26)
_NETWORK = re.compile(
    "dial tcp|i/o timeout|connection reset|TLS handshake|unexpected EOF|50[0-9] |bad gateway", re.I
)


@dataclass(frozen=True, slots=True)
class Part:
    """One program: the module it is built in and its Go package."""

    name: str
    module: str
    package: str

    def module_of(self, layout: Layout) -> str:
        """The folder of the module: that of Kubernetes depends on the release."""
        return layout.kubernetes if self.module == KUBERNETES else self.module


PARTS = (
    Part("kube-apiserver", KUBERNETES, "k8s.io/kubernetes/cmd/kube-apiserver"),
    Part("kube-controller-manager", KUBERNETES, "k8s.io/kubernetes/cmd/kube-controller-manager"),
    Part("kube-scheduler", KUBERNETES, "k8s.io/kubernetes/cmd/kube-scheduler"),
    Part("kubelet", KUBERNETES, "k8s.io/kubernetes/cmd/kubelet"),
    Part("kubectl", KUBERNETES, "k8s.io/kubernetes/cmd/kubectl"),
    Part("etcd", "etcd", "go.etcd.io/etcd/server/v3"),
    Part("containerd", "containerd", "github.com/containerd/containerd/v2/cmd/containerd"),
    Part(
        "containerd-shim-runc-v2",
        "containerd",
        "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
    ),
    Part("ctr", "containerd", "github.com/containerd/containerd/v2/cmd/ctr"),
    Part("runc", "runc", "github.com/opencontainers/runc"),
)
HELM = {
    3: (Part("helm", "helm", "helm.sh/helm/v3/cmd/helm"),),
    4: (Part("helm", "helm4", "helm.sh/helm/v4/cmd/helm"),),
}
"""By major version. Apart, in folders of their own: a cluster comes up without them, and another version of one builds
nothing else anew."""
PROMQL = (Part("promql", "promql", "."),)
"""Prometheus' engine for queries; the tests of dashboard and alerts ask it."""
METADATA = (Part("metadata", "metadata", "."),)
"""Kubernetes' own reader of the files that describe the devices of a claim."""

CDI_HOOK = (
    Part(
        "nvidia-cdi-hook", "nvidia-cdi-hook", "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook"
    ),
)
"""NVIDIA's own, which hosts have; containerd runs it for each container with a GPU."""


COMPUTE_DOMAINS = ("compute-domains", "sigs.k8s.io/dra-driver-nvidia-gpu")
"""NVIDIA's DRA driver, of which the tests want the chart: its part for compute domains runs beside this driver."""


def directory(layout: Layout, parts: tuple[Part, ...] = PARTS) -> Path:
    """Where the programs lie that the present go.mod files and flags give."""
    digest = hashlib.sha256(_machine().encode())
    for module in sorted({part.module_of(layout) for part in parts}):
        digest.update("\0".join(_flags(module)).encode())
        for file in sorted((_MODULES / module).iterdir()):
            digest.update(file.read_bytes())
    return layout.binaries / digest.hexdigest()[:16]


def build(layout: Layout, parts: tuple[Part, ...] = PARTS) -> Path:
    """Build what is missing and return the directory; fast when nothing is."""
    target = directory(layout, parts)
    if not list(_missing(target, parts)):
        return target
    with locking.exclusive(layout.binaries / "lock", wait=True):
        missing = list(_missing(target, parts))
        if missing:
            _require_go()
            target.mkdir(parents=True, exist_ok=True)
        for part in missing:
            with progress.step(f"[{parts.index(part) + 1}/{len(parts)}] {part.name}"):
                _provide_part(part, layout, target)
    return target


def source_of(folder: str, module: str) -> Path:
    """The files of a module that the go.mod in `folder` requires, downloaded first if they are not there."""
    _require_go()
    done = _run_go(["go", "mod", "download", "-json", module], folder)
    if done.returncode != 0:
        raise ClusterError(f"Downloading {module} failed: {(done.stdout + done.stderr).strip()[-2000:]}")
    return Path(json.loads(done.stdout)["Dir"])


def _missing(target: Path, parts: tuple[Part, ...]) -> Iterator[Part]:
    return (part for part in parts if not (target / part.name).exists())


def _provide_part(part: Part, layout: Layout, target: Path) -> None:
    """What every release of Kubernetes shares is there already if the usual one was built."""
    usual = directory(replace(layout, kubernetes=KUBERNETES)) / part.name
    if part.module != KUBERNETES and usual.exists():
        os.link(usual, target / part.name)
    else:
        _build_part(part, part.module_of(layout), target)


def _build_part(part: Part, module: str, target: Path) -> None:
    """Build beside and rename, so that an interrupted build leaves no half file."""
    unfinished = target / f".{part.name}.unfinished"
    done = _run_go(["go", "build", *_flags(module), "-o", str(unfinished), part.package], module)
    if done.returncode != 0:
        raise ClusterError(f"Building {part.name} failed: {done.stderr.strip()[-2000:]}")
    unfinished.replace(target / part.name)


def _run_go(argv: list[str], module: str) -> subprocess.CompletedProcess[str]:
    # Go gives up at the first module that does not come; those that came are kept for the next try.
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
    """Ask inside a module: an older Go may fetch the toolchain the module names."""
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
