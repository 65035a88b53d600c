"""The Debian packages that the cluster and the image build stand on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from localcluster import progress, shell
from localcluster.errors import ClusterError

# A file or program that shows a package to be there, and the package.
CLUSTER_PACKAGES: Mapping[str, str] = {
    "runc": "runc",
    "/bin/bash-static": "bash-static",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/usr/lib/cni/host-local": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "mount": "mount",
    "openssl": "openssl",
}


def install_missing(packages: Mapping[str, str]) -> None:
    """Install by apt-get what is not there yet; nothing happens when all is."""
    missing = sorted({package for sign, package in packages.items() if not _present(sign)})
    if not missing:
        return
    if shell.find_program("apt-get") is None:
        raise ClusterError(
            f"These Debian packages (or their like) are missing and there is no apt-get "
            f"to install them: {' '.join(missing)}."
        )
    shell.require_root(f"Installing {' '.join(missing)}")
    with progress.step(f"apt-get install {' '.join(missing)}"):
        _apt_get("update")
        _apt_get("install", "--yes", "--no-install-recommends", *missing)


def _present(sign: str) -> bool:
    if sign.startswith("/"):
        return Path(sign).exists()
    return shell.find_program(sign) is not None


def _apt_get(*arguments: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        ["apt-get", "--quiet", "--option=Acquire::Retries=5", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"apt-get {arguments[0]} failed: {done.stderr.strip()[-1500:]}")
