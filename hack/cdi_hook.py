"""NVIDIA's CDI hook on a simulated host: containers find the driver's libraries only through the links it
creates.

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
    """Where it is found before the simulator's, which does nothing."""
    programs = host_root / "usr/local/bin"
    programs.mkdir(parents=True, exist_ok=True)
    shutil.copy(localcluster.cdi_hook(), programs)


def main(arguments: list[str]) -> int:
    """1 if the hook cannot be built."""
    try:
        put_cdi_hook(Path(arguments[0]))
    except ClusterError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
