"""Making the capability nodes of MIG devices. NVML makes a MIG device without them: they appear when somebody runs
nvidia-smi or nvidia-modprobe on the host, and again after each reboot."""

from __future__ import annotations

import threading

from dra_driver.errors import RetryableError
from dra_driver.host.device_nodes import DeviceNodeMaker
from dra_driver.host.mig_caps import MigCaps
from dra_driver.host.rooted_tree import join_root
from dra_driver.model.host import DeviceNode

_CAPABILITIES = "/proc/driver/nvidia/capabilities"


class CapabilityNodes:
    """The nodes below `root`. Containers need none of them, because CDI names the numbers of each node; a CUDA program
    on the host does."""

    def __init__(self, caps: MigCaps, root: str, maker: DeviceNodeMaker) -> None:
        self._caps = caps
        self._root = root
        self._maker = maker
        self._lock = threading.Lock()

    def make_missing(self) -> None:
        """Have a node for every GPU instance and compute instance that is there now, as nvidia-smi does. A node with
        the right numbers is left alone; one with others is from before a reload of the NVIDIA driver, and is made anew.

        Raises: RetryableError if one is missing and cannot be made.
        """
        with self._lock:
            for capability, node in self._caps.all_nodes():
                try:
                    self._have(join_root(self._root, node.path), node)
                except OSError as error:
                    raise RetryableError(
                        f"cannot make the device node {_named(node)}: {error.strerror or error}; "
                        "run the MPS host as root with the host's /dev (in a pod: privileged), "
                        f"or run `nvidia-modprobe -f {_CAPABILITIES}/{capability}` on the node"
                    ) from error

    def _have(self, path: str, node: DeviceNode) -> None:
        """Raises: RetryableError if something else is there, OSError."""
        try:
            self._maker.make(path, node)
        except FileExistsError:
            there = self._maker.read(path)
            if there is None or there.type != node.type:
                raise RetryableError(
                    f"cannot make the device node {_named(node)}: something else is there; remove it from the node, "
                    "and find out what has put it there"
                ) from None
            if (there.major, there.minor) != (node.major, node.minor):
                self._maker.remove(path)
                self._maker.make(path, node)


def _named(node: DeviceNode) -> str:
    return f"{node.path} ({node.type} {node.major}:{node.minor})"
