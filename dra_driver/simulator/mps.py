"""MPS on a simulated machine: its programs in the host root."""

from __future__ import annotations

import json
from typing import Any

from dra_driver.simulator import mig
from dra_driver.simulator.hostroot.entries import Entries, Text
from dra_driver.simulator.hostroot.scripts import script
from dra_driver.simulator.state import Gpu, State

_START_DELAY_MS = 300

_VOLTA = (7, 0)
_CUDA_13_1_BRANCH = 590


def mps_programs(state: State) -> Entries:
    """The control program with the facts of the machine, the server, and a client to try them with."""
    facts = {
        "branch": _branch(state),
        "start_delay_ms": int(state.system.get("mps_start_delay_ms", _START_DELAY_MS)),
        "devices": [device for gpu in state.shown for device in _devices(state, gpu)],
        "driver_loaded": state.driver_loaded,
        "libcuda": f"usr/lib/{state.system['arch']}-linux-gnu/libcuda.so.1",
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
