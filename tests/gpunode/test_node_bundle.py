"""The archive of `make node-bundle`, unpacked in an empty folder and run on a simulated machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
RUN_S = 1500
REAL_ONLY = {
    "cuda program", "mps limits", "usage by pod", "user namespace", "invalid address", "gpu check",
    "restricted profile",
}  # fmt: skip
"""What a simulated machine cannot answer."""
ENVIRONMENT = os.environ | {"PYTHON": str(Path(sys.executable).resolve())}
"""The image gets the interpreter of this process, as it gets that of Debian or Ubuntu elsewhere."""


def test_simulated_machine_becomes_a_node_and_is_left_as_it_was(tmp_path: Path) -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    build = [sys.executable, "hack/gpunode/bundle.py", "--python", python, "--preset", "0"]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    with tarfile.open(built.stdout.split(":")[0]) as archive:
        archive.extractall(tmp_path, filter="fully_trusted")
    results = tmp_path / "results.tar.xz"
    command = ["./run", "--simulate", "dgx-h100", "--change-settings", "--output", str(results)]
    done = subprocess.run(
        command, cwd=tmp_path / "gpu-node-bundle", env=ENVIRONMENT,
        capture_output=True, text=True, check=False, timeout=RUN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    rows = re.findall(
        r"^(ok|skipped|differs) +[\d.]+  ([a-z ]+?)  ", done.stdout.partition("RESULT")[2], re.M
    )
    assert {what for verdict, what in rows if verdict == "skipped"} == REAL_ONLY
    assert {("ok", "compute mode"), ("ok", "mig layout"), ("ok", "mig on demand")} <= set(rows)
    assert len(rows) > 20
    with tarfile.open(results) as archive:
        names = archive.getnames()
        cluster = archive.extractfile("gpu-node-results/mps/cluster.txt")
        assert cluster is not None
        seen_by_users = cluster.read().decode()
    answers = ("start/doctor.txt", "start/metrics.txt", "layout/inspect.txt", "end/slices.yaml")
    for answer in (*answers, "kubelet-metrics.txt"):
        assert f"gpu-node-results/{answer}" in names
    assert re.search(r"^gpu-node .*default/mps-shared-claim .*mps-a", seen_by_users, re.M), seen_by_users
