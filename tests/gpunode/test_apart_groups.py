"""The control groups v2 of an isolated place, on a machine that has no others."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "hack" / "cluster"))

from localcluster import apart  # noqa: E402
from localcluster.shell import ClusterError  # noqa: E402

ONLY_V2 = "umount --recursive --lazy /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup"
SEEN = """
import json
from pathlib import Path
root = Path("/sys/fs/cgroup")
(root / "pods").mkdir()
names = ("cgroup.procs", "cgroup.controllers", "cgroup.subtree_control", "pods/cgroup.controllers")
print(json.dumps({name: (root / name).read_text().split() for name in names}))
"""


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """A folder with the files of a control group, whose children may use one of two controllers."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    return tmp_path


def test_missing_controllers_are_delegated(group: Path) -> None:
    apart._delegate(group)
    assert (group / "cgroup.subtree_control").read_text() == "+memory"


def test_group_that_delegates_everything_is_not_written(group: Path) -> None:
    (group / "cgroup.subtree_control").write_text("memory cpu\n")
    apart._delegate(group)
    assert (group / "cgroup.subtree_control").read_text() == "memory cpu\n"


def test_cgroup_v1_group_is_left_alone(tmp_path: Path) -> None:
    apart._delegate(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_group_with_processes_is_named_in_the_error(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(_path: Path, _text: str) -> int:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "write_text", busy)
    with pytest.raises(ClusterError, match=f"{group} contains processes .* get no memory"):
        apart._delegate(group)


@pytest.mark.cluster
def test_isolated_place_on_cgroup_v2_delegates_all_controllers_to_pods() -> None:
    program = [sys.executable, str(ROOT / "hack/cluster/cluster.py"), "apart", sys.executable, "-c", SEEN]
    command = ["unshare", "--mount", "sh", "-c", f'{ONLY_V2} && exec "$@"', "sh", *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["cgroup.procs"] == [], "a process here would keep the kubelet from creating the pods' groups"
    controllers = set(seen["cgroup.controllers"])
    assert set(seen["cgroup.subtree_control"]) == set(seen["pods/cgroup.controllers"]) == controllers
