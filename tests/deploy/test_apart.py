"""An isolated place: a cluster starts there next to another one, and neither affects the other."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from localcluster import host

from tests.fakes.waiting import PATIENCE_S

pytestmark = pytest.mark.cluster  # it needs root, as the tests on a cluster do

CLUSTER = Path(__file__).parents[2] / "hack" / "cluster" / "cluster.py"
OWN = ("/var/lib/kubelet", "/var/lib/gpu-dra-cluster", "/var/lib/gpu-dra-simulator", "/run", "/etc/cdi")


def apart(program: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(CLUSTER), "apart", sys.executable, "-c", program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def traces(of: subprocess.Popen[str]) -> list[str]:
    """The remaining control groups of an isolated place, and its mounts that this process sees."""
    groups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/gpu-dra-apart-{of.pid}")]
    return groups + [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "apart" in line
    ]


def test_nothing_of_the_machine_is_seen_or_changed_there() -> None:
    name = f"gpu-dra-{uuid.uuid4().hex}"
    program = f"""
import json, os
from pathlib import Path
made = []
for place in {OWN}:
    Path(place).mkdir(parents=True, exist_ok=True)
    made.append(Path(place, "{name}"))
    made[-1].touch()
print(json.dumps({{
    "processes": len([one for one in os.listdir("/proc") if one.isdecimal()]),
    "interfaces": os.listdir("/sys/class/net"),
    "pods": [str(one) for one in Path("/var/lib/kubelet").glob("pods/*")],
    "groups": Path("/proc/self/cgroup").read_text().split(),
    "packages": Path("/var/lib/dpkg/status").exists(),
}}))
raise SystemExit(3)
"""
    process = apart(program)
    said, _ = process.communicate(timeout=PATIENCE_S)
    seen = json.loads(said)
    assert process.returncode == 3, "the exit status is the command's"
    assert seen["processes"] == 1
    assert seen["interfaces"] == ["lo"]
    assert seen["pods"] == []
    assert {line.rpartition(":")[2] for line in seen["groups"]} <= {"/", "/init"}
    assert seen["packages"], "the rest of /var/lib is there"
    assert [place for place in OWN if Path(place, name).exists()] == []
    assert traces(process) == []


def test_all_processes_there_end_with_it() -> None:
    mark = uuid.uuid4().hex
    child = f"import time; '{mark}'; print('up', flush=True); time.sleep(600)"
    with apart(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) != 0
    left = [one for one in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(one)]
    assert left == []
    assert traces(process) == []


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""  # it exited in between


def test_no_other_cluster_removes_a_directory_that_is_in_use_there() -> None:
    """The removal would detach what is mounted there."""
    program = (
        "import os; print(flush=True); os.listdir('/etc/cdi'); input(); print(os.path.ismount('/etc/cdi'))"
    )
    command = [sys.executable, str(CLUSTER), "apart", sys.executable, "-c", program]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    first.stdout.readline()
    host.remove_if_empty(Path("/etc/cdi"))
    said, _ = first.communicate("\n", timeout=PATIENCE_S)
    assert said == "True\n"
