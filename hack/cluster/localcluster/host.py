"""What the cluster changes on the host, its network included, and how the host gets it back."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from localcluster import processes, shell
from localcluster.layout import (
    ADDRESSES,
    API_PORT,
    BRIDGE,
    BRIDGE_MAC,
    CDI_DIRECTORIES,
    CNI_RESULTS,
    CONTAINER_LOG_LINKS,
    KUBELET_ROOT,
    NETWORK,
    SHIM_SOCKETS,
    Addresses,
    Layout,
    endpoint,
)
from localcluster.shell import ClusterError

# Directories that our components create outside ours, the deepest first.
_MADE_BY_OTHERS = (
    KUBELET_ROOT, CONTAINER_LOG_LINKS, *CDI_DIRECTORIES, CNI_RESULTS, CNI_RESULTS.parent, SHIM_SOCKETS,
    SHIM_SOCKETS.parent,
)  # fmt: skip
_PROPAGATING = ("/", "/dev")


@dataclass(frozen=True, slots=True)
class Before:
    """The host as it was: what ``down`` goes back to."""

    forwarding: dict[str, str]
    private_mounts: list[str]
    absent: list[str]
    cdi_specs: list[str]


def remember(layout: Layout) -> None:
    """Write down the state of the host once, before anything is changed."""
    path = layout.state / "before.json"
    if path.exists():
        return
    before = Before(
        forwarding=forwarding(),
        private_mounts=_private_mounts(),
        absent=[str(path) for path in _MADE_BY_OTHERS if not path.exists()],
        cdi_specs=[str(spec) for spec in _cdi_specs()],
    )
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(before)))
    unfinished.replace(path)


def recall(layout: Layout) -> Before | None:
    """Returns what ``remember`` wrote, or None if ``up`` did not get that far."""
    try:
        return Before(**json.loads((layout.state / "before.json").read_text()))
    except FileNotFoundError:
        return None


def refuse_foreign_kubelet(layout: Layout) -> None:
    """Two kubelets in one directory would delete each other's pods."""
    if holds_kubelet_root(layout):
        return
    running = next(
        (pid for pid in processes.all_pids() if _program(pid) == "kubelet" and processes.sees_our_files(pid)),
        None,
    )
    if running is not None:
        raise ClusterError(f"Another kubelet runs on this machine (process {running}).")
    if KUBELET_ROOT.is_dir() and any(KUBELET_ROOT.iterdir()):
        raise ClusterError(
            f"{KUBELET_ROOT} is not empty, so another kubelet seems to own it: "
            "use a machine without one, or move that directory away."
        )


def holds_kubelet_root(layout: Layout) -> bool:
    """Whether our directory lies over /var/lib/kubelet."""
    try:
        return os.path.samestat(KUBELET_ROOT.stat(), layout.kubelet.stat())
    except FileNotFoundError:
        return False


def mount_kubelet_root(layout: Layout) -> None:
    """Mounts our directory over /var/lib/kubelet, as a separate shared mount.

    Manifests name the real path. The mount is shared, because a container may mount into it with
    Bidirectional propagation; it is private first, to leave the host's peer group.
    """
    layout.kubelet.mkdir(parents=True, exist_ok=True)
    if holds_kubelet_root(layout):
        return
    KUBELET_ROOT.mkdir(parents=True, exist_ok=True)
    shell.run(["mount", "--bind", layout.kubelet, KUBELET_ROOT])
    shell.run(["mount", "--make-rprivate", KUBELET_ROOT])
    shell.run(["mount", "--make-rshared", KUBELET_ROOT])


def share_mounts() -> None:
    """Allows containers to use mount propagation from the host, as under systemd.

    Otherwise a volume with HostToContainer propagation is refused.
    """
    for point in _private_mounts():
        shell.run(["mount", "--make-shared", point])


def unmount_all(layout: Layout) -> None:
    """Unmount everything below our directories, the newest mount first.

    The list is read again each time: one unmount may take others with it.
    """
    roots = [layout.state]
    if holds_kubelet_root(layout):
        roots.append(KUBELET_ROOT)
    while points := [point for point in mount_points() if any(map(point.is_relative_to, roots))]:
        shell.run(["umount", "--lazy", points[-1]])


def restore(layout: Layout) -> None:
    """Undo what ``remember`` saw before: forwarding, directories, CDI files, log links."""
    before = recall(layout)
    _remove_log_links(layout)
    if before is None:
        return
    restore_forwarding(before.forwarding)
    for point in before.private_mounts:
        shell.run(["mount", "--make-private", point])
    for spec in _cdi_specs():
        if str(spec) not in before.cdi_specs:
            spec.unlink(missing_ok=True)
    for name in before.absent:
        remove_if_empty(Path(name))


def _program(pid: int) -> str:
    """The name of the program a process runs; empty for a kernel thread."""
    words = processes.command_line(pid)
    return Path(words[0]).name if words else ""


def _remove_log_links(layout: Layout) -> None:
    """The kubelet links every container's log below /var/log/containers."""
    for link in CONTAINER_LOG_LINKS.glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(layout.state):
            link.unlink()


def remove_if_empty(directory: Path) -> None:
    """Remove a directory, unless another program uses it by now."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def _cdi_specs() -> list[Path]:
    return sorted(
        path
        for directory in CDI_DIRECTORIES
        if directory.is_dir()
        for path in directory.iterdir()
        if path.is_file()
    )


def _private_mounts() -> list[str]:
    """Returns the host mounts that pods use and that do not propagate."""
    private: dict[str, bool] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        tags = fields[6 : fields.index("-")]
        private[fields[4]] = not any(tag.startswith(("shared:", "master:")) for tag in tags)
    return [point for point in _PROPAGATING if private.get(point)]


def mount_points() -> list[Path]:
    """Returns the mount points of this namespace in creation order."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [Path(line.split()[4].replace("\\040", " ")) for line in lines]


# --- network ----------------------------------------------------------------------------------------
#
# One bridge whose address is also the node's. There is no kube-proxy: the only Service that matters to a driver is the
# API server's own, so two rules send its address to the API server. With IPv4 that one listens on loopback;
# `route_localnet` is set on this bridge alone.

_FORWARDING = {
    "ipv4": Path("/proc/sys/net/ipv4/ip_forward"),
    "ipv6": Path("/proc/sys/net/ipv6/conf/all/forwarding"),
}
_COMMENT = ["-m", "comment", "--comment", NETWORK]


def make_network(addresses: Addresses) -> None:
    """Create the bridge and the rules; what is there stays as it is."""
    if not _bridge_exists():
        shell.run(["ip", "link", "add", "name", BRIDGE, "address", BRIDGE_MAC, "type", "bridge"])
    length = addresses.pods.partition("/")[2]
    # The bridge has no other member that could use the address, and a check would delay the kubelet.
    unchecked = ["nodad"] if ":" in addresses.node else []
    shell.run(["ip", "address", "replace", f"{addresses.node}/{length}", "dev", BRIDGE, *unchecked])
    shell.run(["ip", "link", "set", BRIDGE, "up"])
    # A host without a default route could not even address the Service.
    shell.run(["ip", "route", "replace", addresses.service, "dev", BRIDGE])
    Path(f"/proc/sys/net/ipv4/conf/{BRIDGE}/route_localnet").write_text("1\n")
    for table, chain, rule in _iptables_rules(addresses):
        if not shell.succeeds(_iptables(addresses, table, "-C", chain, rule)):
            shell.run(_iptables(addresses, table, "-I", chain, rule))


def remove_network() -> None:
    """Take the rules, the bridge and the plugins' notes away; absent ones are fine."""
    for addresses in ADDRESSES.values():
        for table, chain, rule in _iptables_rules(addresses):
            while shell.succeeds(_iptables(addresses, table, "-D", chain, rule)):
                continue
    if _bridge_exists():
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
    """A bridge without our address on it belongs to another program."""
    if _bridge_exists() and BRIDGE_MAC not in shell.run(["ip", "link", "show", "dev", BRIDGE]):
        raise ClusterError(f"A network interface {BRIDGE} exists that is not ours: remove it.")


def _bridge_exists() -> bool:
    return Path(f"/sys/class/net/{BRIDGE}").exists()


def _iptables_rules(addresses: Addresses) -> Iterator[tuple[str, str, list[str]]]:
    """Table, chain, rule. The accepting ones matter on hosts whose firewall drops by default."""
    to_api = ["-d", addresses.service, "-p", "tcp", "--dport", "443"]
    to_api += ["-j", "DNAT", "--to-destination", endpoint(addresses.api, API_PORT)]
    yield "nat", "PREROUTING", ["-i", BRIDGE, *_COMMENT, *to_api]
    yield "nat", "OUTPUT", [*_COMMENT, *to_api]
    yield "filter", "INPUT", ["-i", BRIDGE, *_COMMENT, "-j", "ACCEPT"]
    yield "filter", "FORWARD", ["-i", BRIDGE, "-o", BRIDGE, *_COMMENT, "-j", "ACCEPT"]


def _iptables(addresses: Addresses, table: str, action: str, chain: str, rule: list[str]) -> list[str]:
    return [addresses.iptables, "--wait", "-t", table, action, chain, *rule]
