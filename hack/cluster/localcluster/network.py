"""The pod network: one bridge whose address is also the node's.

There is no kube-proxy. The only Service that matters to a driver is the API
server's own, so two rules send its address to the API server, which listens on
loopback; ``route_localnet`` is set on this bridge alone.
"""

from __future__ import annotations

from pathlib import Path

from localcluster import shell
from localcluster.errors import ClusterError
from localcluster.layout import API_PORT, BRIDGE, BRIDGE_MAC, CNI_RESULTS, NETWORK, NODE_IP, SERVICE_IP

_IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_TO_API = [
    *("-d", f"{SERVICE_IP}/32", "-p", "tcp", "--dport", "443"),
    *("-j", "DNAT", "--to-destination", f"127.0.0.1:{API_PORT}"),
]
_COMMENT = ["-m", "comment", "--comment", NETWORK]
# Table, chain, rule. The accepting rules matter on hosts whose firewall drops by default.
_RULES = (
    ("nat", "PREROUTING", ["-i", BRIDGE, *_COMMENT, *_TO_API]),
    ("nat", "OUTPUT", [*_COMMENT, *_TO_API]),
    ("filter", "INPUT", ["-i", BRIDGE, *_COMMENT, "-j", "ACCEPT"]),
    ("filter", "FORWARD", ["-i", BRIDGE, "-o", BRIDGE, *_COMMENT, "-j", "ACCEPT"]),
)


def ensure() -> None:
    """Create the bridge and the rules; what is there stays as it is."""
    if not _exists():
        shell.run(["ip", "link", "add", "name", BRIDGE, "address", BRIDGE_MAC, "type", "bridge"])
    shell.run(["ip", "address", "replace", f"{NODE_IP}/24", "dev", BRIDGE])
    shell.run(["ip", "link", "set", BRIDGE, "up"])
    # A host without a default route could not even address the Service.
    shell.run(["ip", "route", "replace", f"{SERVICE_IP}/32", "dev", BRIDGE])
    Path(f"/proc/sys/net/ipv4/conf/{BRIDGE}/route_localnet").write_text("1\n")
    for table, chain, rule in _RULES:
        if not shell.succeeds(_iptables(table, "-C", chain, rule)):
            shell.run(_iptables(table, "-I", chain, rule))


def remove() -> None:
    """Take the rules, the bridge and the plugins' notes away; absent ones are fine."""
    for table, chain, rule in _RULES:
        while shell.succeeds(_iptables(table, "-D", chain, rule)):
            continue
    if _exists():
        shell.run(["ip", "link", "delete", BRIDGE])
    for note in CNI_RESULTS.glob(f"{NETWORK}-*"):
        note.unlink(missing_ok=True)


def forwarding() -> str:
    """The host's ip_forward switch, which the bridge plugin turns on."""
    return _IP_FORWARD.read_text().strip()


def restore_forwarding(value: str) -> None:
    """Give the host its own setting back."""
    if forwarding() != value:
        _IP_FORWARD.write_text(f"{value}\n")


def refuse_taken_name() -> None:
    """A bridge without our address on it belongs to somebody else."""
    if _exists() and BRIDGE_MAC not in shell.run(["ip", "link", "show", "dev", BRIDGE]):
        raise ClusterError(f"A network interface {BRIDGE} exists that is not ours: remove it.")


def _exists() -> bool:
    return Path(f"/sys/class/net/{BRIDGE}").exists()


def _iptables(table: str, action: str, chain: str, rule: list[str]) -> list[str]:
    return ["iptables", "--wait", "-t", table, action, chain, *rule]
