"""How the MPS control daemons of a simulated machine misbehave: a file in its host root, which they read."""

from __future__ import annotations

import json
from pathlib import Path

_FILE = "var/lib/nvidia-simulator/mps.json"


def misbehave(host_root: Path, device_uuid: str = "*", **rules: object) -> None:
    """Have the daemons of one device, or of all devices, follow these rules from now on.

    With `fail_to_start` they do not start and say this text. From R580 on, `cuda_error` is the error with which CUDA
    fails to start, and `cuda_delay_ms` how long its start takes. `server_state` is the answer of get_server_status.
    With `silent` they take commands and never answer. With `server_lingers` their servers stay when the daemon dies.
    With `selinux_enforcing` a client is refused what does not bear the type of container files.
    """
    path = host_root / _FILE
    known = json.loads(path.read_text()) if path.exists() else {}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(known | {device_uuid: rules}))
    new.replace(path)


def behave(host_root: Path) -> None:
    """All daemons are as usual again."""
    (host_root / _FILE).unlink(missing_ok=True)
