"""MPS on a simulated machine: its programs in the host root, their faults, and the clients that connected."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dra_driver.simulator import mig
from dra_driver.simulator.hostroot.entries import Entries, Text
from dra_driver.simulator.hostroot.scripts import script
from dra_driver.simulator.state import Gpu, State

BEHAVIOUR_FILE = "var/lib/nvidia-simulator/mps.json"
START_DELAY_MS = 300

_VOLTA = (7, 0)
_CUDA_13_1_BRANCH = 590


@dataclass(frozen=True, slots=True)
class MpsBehaviour:
    """How control daemons behave from now on; None means as usual.

    With `fail_to_start` they do not start and say this text. `server_state` is the answer of
    get_server_status. With `silent` they take commands and never answer. With `server_lingers` their servers stay when
    the daemon dies. With `selinux_enforcing` a client is refused what does not bear the type of container files.
    """

    start_delay_ms: int | None = None
    fail_to_start: str | None = None
    never_ready: bool | None = None
    silent: bool | None = None
    die_after_s: float | None = None
    server_state: str | None = None
    server_lingers: bool | None = None
    ignore_limits: bool | None = None
    selinux_enforcing: bool | None = None


def set_mps_behaviour(host_root: Path, behaviour: MpsBehaviour, device_uuid: str = "*") -> None:
    """Make the daemons of one device, or of all devices, behave like this."""
    path = host_root / BEHAVIOUR_FILE
    rules = json.loads(path.read_text()) if path.exists() else {}
    rules[device_uuid] = {name: value for name, value in asdict(behaviour).items() if value is not None}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(rules))
    new.replace(path)


def reset_mps_behaviour(host_root: Path) -> None:
    """All daemons behave as usual again."""
    (host_root / BEHAVIOUR_FILE).unlink(missing_ok=True)


def mps_clients(log_directory: Path) -> list[dict[str, Any]]:
    """Every client that connected to the daemon of a log directory, with the limits it got."""
    path = log_directory / "clients.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def mps_programs(state: State) -> Entries:
    """The control program with the facts of the machine, the server, and a client to try them with."""
    facts = {
        "branch": _branch(state),
        "start_delay_ms": int(state.system.get("mps_start_delay_ms", START_DELAY_MS)),
        "devices": [device for gpu in state.present for device in _devices(state, gpu)],
    }
    control = script("nvidia-cuda-mps-control.py").replace("#@FACTS@", json.dumps(facts))
    return {
        "usr/bin/nvidia-cuda-mps-control": Text(control, 0o755),
        "usr/bin/nvidia-cuda-mps-server": Text(script("nvidia-cuda-mps-server.sh"), 0o755),
        "usr/share/nvidia-simulator/nvidia_mps_daemon.py": Text(script("nvidia-cuda-mps-control-daemon.py")),
        "usr/bin/mps-client": Text(script("mps-client.sh"), 0o755),
    }


def _branch(state: State) -> int:
    return int(state.driver_version.partition(".")[0])


def _devices(state: State, gpu: Gpu) -> list[dict[str, Any]]:
    model = state.model_of(gpu)
    volta = tuple(model.compute) >= _VOLTA
    new = _branch(state) >= _CUDA_13_1_BRANCH
    common = {"volta": volta, "most_clients": 16 if not volta else 60 if new else 48}
    rows = [{"uuid": gpu.uuid, "memory_mib": (model.memory_bytes or 0) >> 20, "nodes": [], **common}]
    if gpu.mig_mode:
        rows = []
    for gi, ci in gpu.mig_devices:
        profile = mig.profile_by_id(model, gi.profile_id)
        if profile is not None:
            minors = (mig.cap_minor(gpu.minor, gi.id), mig.cap_minor(gpu.minor, gi.id, ci.id))
            nodes = [f"dev/nvidia-caps/nvidia-cap{minor}" for minor in minors]
            rows.append({"uuid": ci.uuid, "memory_mib": profile.memory_mib, "nodes": nodes, **common})
    return rows
