"""Installs NVIDIA's CDI hook on a simulated host. The hook creates the links through which containers find the NVIDIA
driver's libraries.

python hack/cdi_hook.py HOST_ROOT
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "cluster"))

import localcluster
from localcluster.shell import ClusterError


def put_cdi_hook(host_root: Path) -> None:
    """Copy the hook to /usr/local/bin, where it is found before the simulator's hook, which does nothing."""
    programs = host_root / "usr/local/bin"
    programs.mkdir(parents=True, exist_ok=True)
    shutil.copy(localcluster.cdi_hook(), programs)


def main(arguments: list[str]) -> int:
    """Install the hook; return 1 if it cannot be built."""
    try:
        put_cdi_hook(Path(arguments[0]))
    except ClusterError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
