"""Making the capability nodes of MIG devices. NVML makes a MIG device without them: they appear when somebody runs
nvidia-smi or nvidia-modprobe on the host, and again after each reboot."""

from __future__ import annotations

from dra_driver.errors import RetryableError
from dra_driver.host.device_nodes import DeviceNodeMaker
from dra_driver.host.mig_caps import MigCaps
from dra_driver.host.rooted_tree import join_root

_CAPABILITIES = "/proc/driver/nvidia/capabilities"


class CapabilityNodes:
    """The nodes below `root`. Containers need none of them, because CDI names the numbers of each node; a CUDA program
    on the host does."""

    def __init__(self, caps: MigCaps, root: str, maker: DeviceNodeMaker) -> None:
        self._caps = caps
        self._root = root
        self._maker = maker

    def make_missing(self) -> None:
        """Have a node for every GPU instance and compute instance that is there now, as nvidia-smi does. A node that
        is there is left alone.

        Raises: RetryableError if one is missing and cannot be made.
        """
        for capability, node in self._caps.all_nodes():
            try:
                self._maker.make(join_root(self._root, node.path), node)
            except FileExistsError:
                continue
            except OSError as error:
                raise RetryableError(
                    f"cannot make the device node {node.path} ({node.type} {node.major}:{node.minor}): "
                    f"{error.strerror or error}; run the MPS host as root with the host's /dev (in a pod: "
                    f"privileged), or run `nvidia-modprobe -f {_CAPABILITIES}/{capability}` on the node"
                ) from error
