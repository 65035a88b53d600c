"""The pod network: one bridge whose address is also the node's.

There is no kube-proxy. The only Service that matters to a driver is the API
server's own, so two rules send its address to the API server. With IPv4 that one
listens on loopback; ``route_localnet`` is set on this bridge alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from localcluster import shell
from localcluster.errors import ClusterError
from localcluster.layout import (
    ADDRESSES,
    API_PORT,
    BRIDGE,
    BRIDGE_MAC,
    CNI_RESULTS,
    NETWORK,
    Addresses,
    endpoint,
)

_FORWARDING = {
    "ipv4": Path("/proc/sys/net/ipv4/ip_forward"),
    "ipv6": Path("/proc/sys/net/ipv6/conf/all/forwarding"),
}
_COMMENT = ["-m", "comment", "--comment", NETWORK]


def ensure(addresses: Addresses) -> None:
    """Create the bridge and the rules; what is there stays as it is."""
    if not _exists():
        shell.run(["ip", "link", "add", "name", BRIDGE, "address", BRIDGE_MAC, "type", "bridge"])
    length = addresses.pods.partition("/")[2]
    # Nobody else is on the bridge yet who could have the address, and a check would hold the kubelet up.
    unchecked = ["nodad"] if ":" in addresses.node else []
    shell.run(["ip", "address", "replace", f"{addresses.node}/{length}", "dev", BRIDGE, *unchecked])
    shell.run(["ip", "link", "set", BRIDGE, "up"])
    # A host without a default route could not even address the Service.
    shell.run(["ip", "route", "replace", addresses.service, "dev", BRIDGE])
    Path(f"/proc/sys/net/ipv4/conf/{BRIDGE}/route_localnet").write_text("1\n")
    for table, chain, rule in _rules(addresses):
        if not shell.succeeds(_command(addresses, table, "-C", chain, rule)):
            shell.run(_command(addresses, table, "-I", chain, rule))


def remove() -> None:
    """Take the rules, the bridge and the plugins' notes away; absent ones are fine."""
    for addresses in ADDRESSES.values():
        for table, chain, rule in _rules(addresses):
            while shell.succeeds(_command(addresses, table, "-D", chain, rule)):
                continue
    if _exists():
        shell.run(["ip", "link", "delete", BRIDGE])
    for note in CNI_RESULTS.glob(f"{NETWORK}-*"):
        note.unlink(missing_ok=True)


def forwarding() -> dict[str, str]:
    """The host's switches by IP family, which the bridge plugin turns on; a host may know one family only."""
    return {family: path.read_text().strip() for family, path in _FORWARDING.items() if path.exists()}


def restore_forwarding(before: Mapping[str, str]) -> None:
    """Give the host its own settings back."""
    now = forwarding()
    for family, value in before.items():
        if now.get(family, value) != value:
            _FORWARDING[family].write_text(f"{value}\n")


def refuse_taken_name() -> None:
    """A bridge without our address on it belongs to somebody else."""
    if _exists() and BRIDGE_MAC not in shell.run(["ip", "link", "show", "dev", BRIDGE]):
        raise ClusterError(f"A network interface {BRIDGE} exists that is not ours: remove it.")


def _exists() -> bool:
    return Path(f"/sys/class/net/{BRIDGE}").exists()


def _rules(addresses: Addresses) -> Iterator[tuple[str, str, list[str]]]:
    """Table, chain, rule. The accepting ones matter on hosts whose firewall drops by default."""
    to_api = ["-d", addresses.service, "-p", "tcp", "--dport", "443"]
    to_api += ["-j", "DNAT", "--to-destination", endpoint(addresses.api, API_PORT)]
    yield "nat", "PREROUTING", ["-i", BRIDGE, *_COMMENT, *to_api]
    yield "nat", "OUTPUT", [*_COMMENT, *to_api]
    yield "filter", "INPUT", ["-i", BRIDGE, *_COMMENT, "-j", "ACCEPT"]
    yield "filter", "FORWARD", ["-i", BRIDGE, "-o", BRIDGE, *_COMMENT, "-j", "ACCEPT"]


def _command(addresses: Addresses, table: str, action: str, chain: str, rule: list[str]) -> list[str]:
    return [addresses.iptables, "--wait", "-t", table, action, chain, *rule]
