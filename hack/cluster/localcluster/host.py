"""Changes the host for the cluster, including its network, and restores it afterwards."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from localcluster import processes, shell
from localcluster.layout import (
    ADDRESSES,
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
)
from localcluster.shell import ClusterError

# Directories that the components create outside of the cluster's directories, the deepest first.
_MADE_BY_OTHERS = (
    KUBELET_ROOT, CONTAINER_LOG_LINKS, *CDI_DIRECTORIES, CNI_RESULTS, CNI_RESULTS.parent, SHIM_SOCKETS,
    SHIM_SOCKETS.parent,
)  # fmt: skip
_PROPAGATING = ("/", "/dev")


@dataclass(frozen=True, slots=True)
class Before:
    """The state of the host before ``up``, which ``down`` restores."""

    forwarding: dict[str, str]
    private_mounts: list[str]
    absent: list[str]
    cdi_specs: list[str]


def remember(layout: Layout) -> None:
    """Save the state of the host, unless it is already saved. Call it before any change."""
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
    """Return the state that ``remember`` saved; None if ``up`` failed before it was saved."""
    try:
        return Before(**json.loads((layout.state / "before.json").read_text()))
    except FileNotFoundError:
        return None


def refuse_foreign_kubelet(layout: Layout) -> None:
    """Raise ClusterError if another kubelet uses this machine: they would delete each other's pods."""
    if holds_kubelet_root(layout):
        return
    running = next(
        (pid for pid in processes.all_pids() if _program(pid) == "kubelet" and processes.sees_our_files(pid)),
        None,
    )
    if running is not None:
        raise ClusterError(f"Another kubelet is running on this machine (process {running}).")
    if KUBELET_ROOT.is_dir() and any(KUBELET_ROOT.iterdir()):
        raise ClusterError(
            f"{KUBELET_ROOT} is not empty, so another kubelet may be using it: "
            "use a machine without a kubelet, or rename the directory."
        )


def holds_kubelet_root(layout: Layout) -> bool:
    """Whether the cluster's directory is mounted at /var/lib/kubelet."""
    try:
        return os.path.samestat(KUBELET_ROOT.stat(), layout.kubelet.stat())
    except FileNotFoundError:
        return False


def mount_kubelet_root(layout: Layout) -> None:
    """Mount the cluster's directory at /var/lib/kubelet, the path in manifests, as a separate shared mount.

    The mount is shared, because containers may mount into it with Bidirectional propagation. It is made private
    first, so that it leaves the host's peer group.
    """
    layout.kubelet.mkdir(parents=True, exist_ok=True)
    if holds_kubelet_root(layout):
        return
    KUBELET_ROOT.mkdir(parents=True, exist_ok=True)
    shell.run(["mount", "--bind", layout.kubelet, KUBELET_ROOT])
    shell.run(["mount", "--make-rprivate", KUBELET_ROOT])
    shell.run(["mount", "--make-rshared", KUBELET_ROOT])


def share_mounts() -> None:
    """Allow containers to use mount propagation from the host, as under systemd.

    Otherwise volumes with HostToContainer propagation are refused.
    """
    for point in _private_mounts():
        shell.run(["mount", "--make-shared", point])


def unmount_all(layout: Layout) -> None:
    """Unmount everything below the cluster's directories."""
    roots = [layout.state]
    if holds_kubelet_root(layout):
        roots.append(KUBELET_ROOT)
    unmount_below(roots)


def unmount_below(roots: Sequence[Path]) -> None:
    """Unmount everything at or below these directories in this mount namespace, the newest mount first.

    The list of mounts is read again each time, because one unmount may remove several of them. A mount also goes when
    its directory is removed in another namespace.
    """
    while points := [point for point in mount_points() if any(map(point.is_relative_to, roots))]:
        try:
            shell.run(["umount", "--lazy", points[-1]])
        except ClusterError:
            if points[-1] in mount_points():
                raise


def restore(layout: Layout) -> None:
    """Restore the state that ``remember`` saved: forwarding, mounts, CDI files, directories, log links."""
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
    """Return the name of the program that a process runs; empty for a kernel thread."""
    words = processes.command_line(pid)
    return Path(words[0]).name if words else ""


def _remove_log_links(layout: Layout) -> None:
    """Remove the links to container logs that the kubelet created in /var/log/containers."""
    for link in CONTAINER_LOG_LINKS.glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(layout.state):
            link.unlink()


@contextmanager
def kept(directories: Iterable[Path]) -> Iterator[None]:
    """Keep `remove_if_empty` of all processes from removing these directories.

    An isolated cluster has a mount there, which the removal would detach; other processes cannot see this mount.
    """
    with ExitStack() as held:
        for directory in directories:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


def remove_if_empty(directory: Path) -> None:
    """Remove a directory, unless another program has put files into it, or an isolated cluster keeps it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        directory.rmdir()
    except BlockingIOError:
        return
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
    finally:
        os.close(descriptor)


def _cdi_specs() -> list[Path]:
    return sorted(
        path
        for directory in CDI_DIRECTORIES
        if directory.is_dir()
        for path in directory.iterdir()
        if path.is_file()
    )


def _private_mounts() -> list[str]:
    """Return the host's mounts that pods use and that do not propagate."""
    private: dict[str, bool] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        tags = fields[6 : fields.index("-")]
        private[fields[4]] = not any(tag.startswith(("shared:", "master:")) for tag in tags)
    return [point for point in _PROPAGATING if private.get(point)]


def mount_points() -> list[Path]:
    """Return the mount points of this namespace in creation order."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [Path(line.split()[4].replace("\\040", " ")) for line in lines]


# --- network ----------------------------------------------------------------------------------------
#
# The network is one bridge, whose address is also the node's address. There is no kube-proxy: the driver uses only the
# API server's Service, and the API server listens on the address of the Service.

_FORWARDING = {
    "ipv4": Path("/proc/sys/net/ipv4/ip_forward"),
    "ipv6": Path("/proc/sys/net/ipv6/conf/all/forwarding"),
}


def make_network(addresses: Addresses) -> None:
    """Create the bridge, the addresses and the rules that do not exist yet."""
    if not _bridge_exists():
        shell.run(["ip", "link", "add", "name", BRIDGE, "address", BRIDGE_MAC, "type", "bridge"])
    length = addresses.pods.partition("/")[2]
    # No other host is on the bridge, so checking for a duplicate address would only delay the kubelet.
    unchecked = ["nodad"] if ":" in addresses.node else []
    shell.run(["ip", "address", "replace", f"{addresses.node}/{length}", "dev", BRIDGE, *unchecked])
    shell.run(["ip", "link", "set", BRIDGE, "up"])
    shell.run(["ip", "address", "replace", _of_service(addresses), "dev", "lo"])
    for chain, rule in _iptables_rules(addresses):
        if not shell.succeeds([addresses.iptables, "--wait", "-C", chain, *rule]):
            shell.run([addresses.iptables, "--wait", "-I", chain, *rule])


def remove_network() -> None:
    """Remove the rules, the addresses, the bridge and the CNI plugins' results, if they exist."""
    for addresses in ADDRESSES.values():
        for chain, rule in _iptables_rules(addresses):
            while shell.succeeds([addresses.iptables, "--wait", "-D", chain, *rule]):
                continue
        shell.succeeds(["ip", "address", "delete", _of_service(addresses), "dev", "lo"])
    if _bridge_exists():
        shell.run(["ip", "link", "delete", BRIDGE])
    for note in CNI_RESULTS.glob(f"{NETWORK}-*"):
        note.unlink(missing_ok=True)


def forwarding() -> dict[str, str]:
    """Return the host's forwarding settings, which the bridge plugin enables, for each IP family that the host has."""
    return {family: path.read_text().strip() for family, path in _FORWARDING.items() if path.exists()}


def restore_forwarding(before: Mapping[str, str]) -> None:
    """Restore the host's forwarding settings."""
    now = forwarding()
    for family, value in before.items():
        if now.get(family, value) != value:
            _FORWARDING[family].write_text(f"{value}\n")


def refuse_taken_name() -> None:
    """Raise ClusterError if another program owns the bridge, which then has another MAC address."""
    if _bridge_exists() and BRIDGE_MAC not in shell.run(["ip", "link", "show", "dev", BRIDGE]):
        raise ClusterError(f"The network interface {BRIDGE} belongs to another program: remove it.")


def _bridge_exists() -> bool:
    return Path(f"/sys/class/net/{BRIDGE}").exists()


def _of_service(addresses: Addresses) -> str:
    return f"{addresses.service}/{128 if ':' in addresses.service else 32}"


def _iptables_rules(addresses: Addresses) -> Iterator[tuple[str, list[str]]]:
    """Yield chain and rule, for hosts whose firewall drops packets by default. A host without iptables needs none."""
    if shell.find_program(addresses.iptables) is not None:
        comment = ["-m", "comment", "--comment", NETWORK, "-j", "ACCEPT"]
        yield "INPUT", ["-i", BRIDGE, *comment]
        yield "FORWARD", ["-i", BRIDGE, "-o", BRIDGE, *comment]
