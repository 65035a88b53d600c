"""nvidia-imex on machines in a fabric: its configuration, its control socket, and its program, which asks it."""

from __future__ import annotations

from dra_driver.simulator.hostroot.entries import Entries, Socket, Text
from dra_driver.simulator.hostroot.scripts import quoted, script
from dra_driver.simulator.state import State

STATES = ("ready", "initializing", "hung", "killed", "stopped")
"""What the daemon does. `stopped` takes the socket away; `killed` leaves it behind, and nobody listens."""
_SOCKET = "etc/nvidia-imex/imex_ctrl.sock"
_CONFIG = f"""\
# Of the simulated nvidia-imex.
SERVER_PORT=50000
IMEX_NODE_CONFIG_FILE=/etc/nvidia-imex/nodes_config.cfg
IMEX_CMD_ENABLED=1
IMEX_CMD_PORT=
IMEX_CMD_UNIX_DOMAIN_PATH=/{_SOCKET}
"""


def imex(state: State) -> Entries:
    if not state.fabric.get("cluster"):
        return {}
    daemon = state.system.get("imex", "ready")
    facts = f"MACHINE={quoted(state.machine)}\nSTATE={quoted(daemon)}"
    entries: Entries = {
        "etc/nvidia-imex/config.cfg": Text(_CONFIG),
        "usr/bin/nvidia-imex-ctl": Text(script("nvidia-imex-ctl.sh").replace("#@FACTS@", facts), 0o755),
    }
    if daemon != "stopped":
        entries[_SOCKET] = Socket()
    return entries
