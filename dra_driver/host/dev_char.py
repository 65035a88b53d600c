"""Links in the host's /dev/char to the NVIDIA driver's device nodes.

systemd looks a device up by `/dev/char/<major>:<minor>` when it sets which devices a container may open. udev makes
these links, but not for the NVIDIA driver's nodes. Without them, `systemctl daemon-reload` takes GPUs from running
containers: with runc 1.1.3 to 1.1.6, and with systemd before 240.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog

from dra_driver.base.atomic import point_link
from dra_driver.host.device_nodes import DeviceNodeReader, DevRoot
from dra_driver.host.reading import names_in
from dra_driver.host.rooted_tree import join_root
from dra_driver.model.driver_files import HostNode
from dra_driver.model.host import HostPaths

_log = structlog.get_logger(__name__)

_DIRECTORIES = ("/dev", "/dev/nvidia-caps", "/dev/nvidia-caps-imex-channels")
_PREFIX = "/dev/nvidia"


class DevCharLinks:
    """The links of one host. Only names of device nodes of the NVIDIA driver are ever written."""

    def __init__(self, paths: HostPaths, nodes: DeviceNodeReader) -> None:
        self._dev = DevRoot(paths, nodes)
        self._nodes = nodes
        self._root = paths.dev_root or "/"
        self.directory = join_root(self._root, "/dev/char")
        self._reported: str | None = None
        self._lock = threading.Lock()

    def missing(self, paths: Iterable[str] | None = None) -> dict[str, str]:
        """What each link that is missing or wrong must lead to, by its name such as `195:0`; for the nodes at `paths`
        (as containers see them), or for all nodes of the NVIDIA driver. A link that leads to the right node in another
        way is right, and what is not a link is left alone."""
        found = {}
        for path in self._all() if paths is None else paths:
            node = self._dev.node(path) if path.startswith(_PREFIX) else None
            if node is not None and node.node.type == "c":
                name = f"{node.node.major}:{node.node.minor}"
                if not self._is_right(name, node):
                    found[name] = self._target(node)
        return found

    def make(self, paths: Iterable[str] | None = None) -> None:
        """Make the links that are missing, and replace wrong ones. `paths` as for `missing`. A failure is logged once,
        and again when its reason changes: containers work without the links."""
        made, problem = [], None
        for name, target in self.missing(paths).items():
            try:
                point_link(Path(self.directory, name), target)
                made.append(name)
            except OSError as error:
                problem = f"cannot make links in {self.directory}: {error.strerror or error}"
                break
        with self._lock:
            is_news = problem not in (None, self._reported)
            if paths is None or problem is not None:
                self._reported = problem
        if made:
            _log.info("dev_char_links_made", links=made)
        if is_news:
            _log.warning("dev_char_links_failed", reason=problem)

    def _all(self) -> Iterator[str]:
        root = self._dev.root
        for directory in _DIRECTORIES:
            for name in names_in(join_root(root, directory)):
                yield f"{directory}/{name}"

    def _is_right(self, name: str, wanted: HostNode) -> bool:
        link = os.path.join(self.directory, name)  # noqa: PTH118  in each Prepare
        try:
            target = os.readlink(link)  # noqa: PTH115
        except FileNotFoundError:
            return False
        except OSError:
            return True  # not a link, or not readable: not ours to change
        if target == self._target(wanted):
            return True
        there = self._nodes.read(os.path.normpath(os.path.join(self.directory, target)))  # noqa: PTH118
        return there is not None and (there.major, there.minor) == (wanted.node.major, wanted.node.minor)

    def _target(self, node: HostNode) -> str:
        """Relative for a node in the host's own /dev, as udev does it."""
        own = f"{join_root(self._root, '/dev')}/"
        return f"../{node.host_path.removeprefix(own)}" if node.host_path.startswith(own) else node.host_path
