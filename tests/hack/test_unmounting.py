"""Mounts below the directories of a cluster are removed, whatever other namespaces remove at the same time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "hack" / "cluster"))

from localcluster import host, shell
from localcluster.shell import ClusterError

OWN, FOREIGN = Path("/own"), Path("/foreign")


@pytest.mark.parametrize("goes", [True, False])
def test_mount_that_another_namespace_removes_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, goes: bool
) -> None:
    mounted = [FOREIGN, OWN, OWN / "below"]

    def run(command: Sequence[object]) -> None:
        point = command[-1]
        assert isinstance(point, Path)
        if point == OWN or goes:
            mounted.remove(point)
        if point != OWN:
            raise ClusterError("umount: no mount point specified")

    monkeypatch.setattr(host, "mount_points", mounted.copy)
    monkeypatch.setattr(shell, "run", run)
    if goes:
        host.unmount_below([OWN])
        assert mounted == [FOREIGN]
    else:
        with pytest.raises(ClusterError):
            host.unmount_below([OWN])
