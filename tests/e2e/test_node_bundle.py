"""The archive of `make node-bundle`, unpacked in an empty folder and run on a simulated machine."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Cluster

pytestmark = pytest.mark.cluster
RUN_S = 1500
REAL_ONLY = {
    "cuda program", "mps limits", "usage by pod", "user namespace", "invalid address", "gpu check",
    "restricted profile",
}  # fmt: skip
"""What a simulated machine cannot answer."""


def test_a_simulated_machine_becomes_a_node_and_is_left_as_it_was(cluster: Cluster, tmp_path: Path) -> None:
    """Next to the cluster of these tests, which it does not see."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    build = [sys.executable, "hack/gpunode/bundle.py", "--python", python, "--preset", "0"]
    made = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tarfile.open(made.split(":")[0]) as archive:
        archive.extractall(tmp_path, filter="fully_trusted")
    results = tmp_path / "results.tar.xz"
    command = ["./run", "--simulate", "dgx-h100", "--change-settings", "--output", str(results)]
    done = subprocess.run(
        command, cwd=tmp_path / "gpu-node-bundle", capture_output=True, text=True, check=False, timeout=RUN_S
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    rows = re.findall(
        r"^(ok|skipped|differs) +[\d.]+  ([a-z ]+?)  ", done.stdout.partition("RESULT")[2], re.M
    )
    assert {what for verdict, what in rows if verdict == "skipped"} == REAL_ONLY
    assert len(rows) > 20
    with tarfile.open(results) as archive:
        names = archive.getnames()
    for answer in ("start/doctor.txt", "start/metrics.txt", "end/slices.yaml", "kubelet-metrics.txt"):
        assert f"gpu-node-results/{answer}" in names
    assert cluster.local.is_up()
