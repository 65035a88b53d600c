"""How the MPS control daemons of a simulated machine misbehave: a file in its host root, which they read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FILE = "var/lib/nvidia-simulator/mps.json"
STARTING = "Starting control daemon"
NEVER_READY: dict[str, Any] = {"say": [STARTING], "sleep_s": 3600}
SLOW_CUDA: dict[str, Any] = {"sleep_s": 3600}
IGNORES_LIMITS: dict[str, Any] = {
    "answers": {
        "set_default_active_thread_percentage": "100.0",
        "get_default_active_thread_percentage": "100.0",
        "set_default_device_pinned_mem_limit": "",
        "get_default_device_pinned_mem_limit": "",
    }
}
FAULT: dict[str, Any] = {"answers": {"get_server_status": "FAULT"}}


def fails_to_start(text: str) -> dict[str, Any]:
    """The daemon exits with this text."""
    return {"say": [STARTING, text], "exit": 1}


def misbehave(host_root: Path, device_uuid: str = "*", **rules: object) -> None:
    """Have the daemons of one device, or of all devices, follow these rules of the control program from now on."""
    path = host_root / _FILE
    known = json.loads(path.read_text()) if path.exists() else {}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(known | {device_uuid: rules}))
    new.replace(path)


def behave(host_root: Path) -> None:
    """All daemons are as usual again."""
    (host_root / _FILE).unlink(missing_ok=True)
