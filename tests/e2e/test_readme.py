"""The README's steps to install the driver, as they are printed.

`docker` is a stand-in with buildah below it: it builds on the base of `make image`, since there is no registry to pull
`python:3.13-slim` from, and it pushes into the node. Everything else is what a reader runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from imagebuild import architectures, archives, base, image
from localcluster import debian

import dra_driver
from tests.e2e.conftest import DAEMONSET, NAMESPACE, ROOT, Cluster, install, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

_DOCKER = """#!{python}
import subprocess, sys
buildah = {buildah!r}
command, *words = sys.argv[1:]
if command == "build":
    options = ["--isolation=chroot", "--pull-never", "--build-arg=BASE_IMAGE={base}"]
    subprocess.run([*buildah, "bud", *options, *words], check=True)
elif command == "push":
    [name] = words
    subprocess.run([*buildah, "push", name, "docker-archive:{archive}:" + name], check=True)
    subprocess.run([sys.executable, "{cluster}", "load", "{archive}"], check=True)
else:
    sys.exit(f"docker {{command}} is not known here")
"""


def printed_steps() -> str:
    """All commands of the section, in the order in which they stand there."""
    section = (ROOT / "README.md").read_text().partition("## Install on a cluster\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"\n\n((?:       .*\n)+)", section)
    assert len(blocks) == 3
    return "".join(textwrap.dedent(block) for block in blocks)


@pytest.fixture
def reader(cluster: Cluster, tmp_path: Path) -> Iterator[dict[str, str]]:
    """What a reader's shell has; afterwards the cluster has the driver of the other tests again."""
    debian.install_missing({"buildah": "buildah"})
    architecture = architectures.own()
    [layer, *_] = image._layers(base.ensure(architecture), epoch=0)
    platform = {"architecture": architecture.name, "os": "linux"}
    name = "localhost/python:3.13"
    archives.write_image(tmp_path / "base.tar", name, platform, {}, [layer], 0)
    store = tmp_path / "store"
    buildah = ["buildah", "--root", str(store), "--runroot", f"{store}-run", "--storage-driver", "vfs"]
    pulled = subprocess.run(
        [*buildah, "pull", "--quiet", f"oci-archive:{tmp_path}/base.tar"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert pulled.returncode == 0, pulled.stderr
    subprocess.run([*buildah, "tag", pulled.stdout.split()[-1], name], check=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    text = _DOCKER.format(
        python=sys.executable,
        buildah=buildah,
        base=name,
        archive=tmp_path / "pushed.tar",
        cluster=ROOT / "hack/cluster/cluster.py",
    )
    (programs / "docker").write_text(text)
    (programs / "docker").chmod(0o755)
    (programs / "kubectl").symlink_to(cluster.local.kubectl())
    yield {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "KUBECONFIG": str(cluster.local.kubeconfig()),
    }
    cluster.kubectl("delete", "-f", "examples/one-gpu", "--ignore-not-found", "--timeout=300s")
    install(cluster, "e2e")


def test_steps_to_install_work_as_printed(cluster: Cluster, reader: dict[str, str], tmp_path: Path) -> None:
    clone = tmp_path / "gpu-dra-driver"
    shutil.copytree(
        ROOT,
        clone,
        symlinks=True,
        ignore=shutil.ignore_patterns(".venv", ".git", "build", "dist", ".*_cache"),
    )
    done = subprocess.run(
        ["bash", "-eux", "-c", printed_steps()],
        cwd=clone,
        env=reader,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    installed = cluster.get(DAEMONSET, "-n", NAMESPACE)["spec"]["template"]["spec"]["containers"][0]
    assert installed["image"] == f"registry.example.com/gpu/gpu-dra-driver:{dra_driver.__version__}"
    # Not Never, as in the other tests: the kubelet finds the image under the very name that the manifests ask for.
    assert installed["imagePullPolicy"] == "IfNotPresent"
    wait_for(
        "the driver of the README",
        lambda: len(cluster.staying_pods("node")) == 1 and cluster.driver_is_ready(),
    )
    said = cluster.kubectl("exec", DAEMONSET, "-n", NAMESPACE, "--", "gpu-dra-driver", "--version")
    assert said == f"gpu-dra-driver {dra_driver.__version__}\n"
    # The node of the tests has no GPU, and its pool says so.
    wait_for("the pool without devices", lambda: cluster.devices() == [])
    assert cluster.pod("one-gpu")["status"]["phase"] == "Pending"
