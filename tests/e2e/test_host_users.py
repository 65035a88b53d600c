"""Pods with `hostUsers: false`, on a host that has the NVIDIA driver's nodes in its own /dev."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import SIMULATOR_DIR, Cluster, claim_and_pod, wait_for
from tests.e2e.test_metadata import roll_out

pytestmark = pytest.mark.cluster

NODES = SIMULATOR_DIR / "root" / "dev"
LOOK = """
nvidia-smi -L
read -r _ host _ </proc/self/uid_map && echo "root is $host"
find / -xdev -name libcuda.so -type l -exec echo "link {}" ";"
for node in $(find /dev/dri /dev/nvidia* -type c | sort); do
  stat -c "$node %t:%T" $node
  (: <$node) 2>&1
done
echo end
exec sleep 3600
"""


@pytest.fixture(scope="module", autouse=True)
def _nodes_of_the_host() -> Iterator[None]:
    """runc creates no node in a user namespace: it binds the host's node with the same path. Nodes created by
    NVIDIA's programs remain.
    """
    found = [node for node in sorted(NODES.rglob("*")) if node.is_char_device() and not node.is_symlink()]
    nodes = {Path("/dev") / node.relative_to(NODES): node.stat() for node in found}
    folders = sorted({path.parent for path in nodes})
    missing = [path for path in [*folders, *nodes] if not path.exists()]
    # However this process ends, the other one removes them.
    keeper = ["sh", "-c", 'cat; rm -df "$@"', "keeper", *map(str, reversed(missing))]
    with subprocess.Popen(keeper, stdin=subprocess.PIPE, start_new_session=True):
        for path in missing:
            if path in folders:
                path.mkdir()
                continue
            os.mknod(path, nodes[path].st_mode, nodes[path].st_rdev)
            os.chown(path, nodes[path].st_uid, nodes[path].st_gid)
            path.chmod(stat.S_IMODE(nodes[path].st_mode))
        yield


@pytest.fixture(scope="module", params=[True, False], ids=["hooks", "no hooks"])
def with_hooks(request: pytest.FixtureRequest, _cluster: Cluster) -> Iterator[bool]:
    """Whether NVIDIA's hooks run in containers."""
    if request.param:
        yield True
        return
    try:
        roll_out(_cluster, "NVIDIA_CDI_HOOK_PATH=none")
        yield False
    finally:
        roll_out(_cluster, "NVIDIA_CDI_HOOK_PATH-")


def test_a_pod_in_a_user_namespace_opens_the_nodes_that_everyone_may_open(
    cluster: Cluster, with_hooks: bool
) -> None:
    """Like its twin with the same claim and the host's users. A group of the host does not exist there."""
    claim, usual = claim_and_pod("usual", command=LOOK)
    _, apart = claim_and_pod("apart", command=LOOK)
    apart["spec"] |= {"hostUsers": False, "resourceClaims": usual["spec"]["resourceClaims"]}
    cluster.apply([claim, usual, apart])
    cluster.wait_running("usual", "apart")
    printed = {name: _printed(cluster, name) for name in ("usual", "apart")}
    assert cluster.seen_by("apart") == cluster.seen_by("usual") == cluster.allocated("usual")
    roots = {name: lines.pop(1) for name, lines in printed.items()}
    assert roots["usual"] == "root is 0"
    assert int(roots["apart"].removeprefix("root is ")) >= 1 << 16
    assert any(line.startswith("link /") for line in printed["apart"]) == with_hooks
    denied = [line for line in printed["apart"] if "Permission denied" in line]
    assert len(denied) == 2
    assert all("/dev/dri/" in line for line in denied)
    without_groups = [[line for line in lines if "/dev/dri/" not in line] for lines in printed.values()]
    assert without_groups[0] == without_groups[1]
    # The kernel searched for the NVIDIA driver, which a machine without a GPU does not have.
    assert {"/dev/nvidia-uvm 1fc:0", "/dev/nvidiactl c3:ff"} < set(printed["apart"])


def _printed(cluster: Cluster, pod: str) -> list[str]:
    wait_for(f"the output of {pod}", lambda: cluster.logs(pod).endswith("end\n"))
    return cluster.logs(pod).splitlines()
