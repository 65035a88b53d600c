"""The IMEX channels of the NVIDIA driver, and the host's nvidia-imex, which connects the nodes of a fabric.

The protocol of its control socket is not public, so the plugin runs `nvidia-imex-ctl -q -u SOCKET`, which prints READY.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from dra_driver.base.bounded_program import run_program
from dra_driver.errors import RetryableError
from dra_driver.host.gpu_nodes import MigCaps
from dra_driver.host.rooted_tree import RootedTree, text_of
from dra_driver.model.driver_files import (
    IMEX_PROGRAM,
    FindPrograms,
    check_started,
    exit_text,
    not_run,
)
from dra_driver.model.host import DeviceNode, HostPaths, ImexChannels

CHANNELS = "/dev/nvidia-caps-imex-channels"
CONFIG = "/etc/nvidia-imex/config.cfg"
MAJOR_NAME = "nvidia-caps-imex-channels"
_COUNT = re.compile(r"^ImexChannelCount:\s*([0-9]{1,7})\s*$", re.MULTILINE)
_SETTING = re.compile(r"^[ \t]*(IMEX_CMD_[A-Z_]+)[ \t]*=[ \t]*(.*?)[ \t\r]*$", re.MULTILINE)
_READY = "READY"
_TIMEOUT_S = 4.0
_SUPPORTED = "load an NVIDIA driver that supports IMEX channels (`modprobe nvidia`; version 550 or newer)"


class ImexChannelNodes:
    """The channels need not have nodes on the host."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = Path(proc)
        self._caps = MigCaps(proc)

    def major(self) -> int | None:
        return self._caps.majors().get(MAJOR_NAME)

    def count(self) -> int | None:
        if self.major() is None:
            return None
        found = _COUNT.search(text_of(self._proc / "driver/nvidia/params"))
        return int(found[1]) if found is not None and int(found[1]) else None

    def nodes(self, channels: ImexChannels) -> tuple[DeviceNode, ...]:
        """Return the nodes of the channels. Raises: RetryableError if the NVIDIA driver has none."""
        major = self.major()
        if major is None:
            raise RetryableError(
                f"IMEX channels: the kernel lists no {MAJOR_NAME} in {self._proc / 'devices'}; {_SUPPORTED}"
            )
        numbers = range(self.count() or 0) if channels == "all" else (channels,)
        return tuple(DeviceNode(f"{CHANNELS}/channel{number}", "c", major, number) for number in numbers)


class ImexDaemon:
    def __init__(self, paths: HostPaths, find: FindPrograms) -> None:
        self._roots = tuple(dict.fromkeys(root for root in (paths.driver_root, paths.host_root) if root))
        self._find = find

    def refuse_unready(self, timeout_s: float = _TIMEOUT_S) -> None:
        """Raise RetryableError unless nvidia-imex is ready."""
        limit_s = max(0.1, min(timeout_s, _TIMEOUT_S))
        socket = self._socket()
        programs = self._find()
        program = programs.path(IMEX_PROGRAM)
        action = f"query nvidia-imex at {socket}"
        try:
            code, output = run_program(
                [program, "-q", "-u", socket], programs.environment(), timeout_s=limit_s, slot=IMEX_PROGRAM
            )
        except TimeoutError as error:
            raise _unready(f"does not answer: {error}") from error
        except OSError as error:
            raise not_run(action, program, error) from error
        check_started(action, program, code, output)
        said = " ".join(output.split())
        if code or said != _READY:
            printed = repr(said[:200]) if said else "nothing"
            raise _unready(f"reports {printed} ({exit_text(code)})")

    def _socket(self) -> str:
        for root in self._roots:
            tree = RootedTree(root)
            file = tree.file(CONFIG)
            if file is None:
                continue
            try:
                found = settings(Path(tree.local(file)).read_text("utf-8", errors="replace"))
            except OSError as error:
                raise RetryableError(
                    f"cannot read {CONFIG} below {root}: {error.strerror}; this file names nvidia-imex's control socket"
                ) from error
            path = found.get("IMEX_CMD_UNIX_DOMAIN_PATH", "")
            if found.get("IMEX_CMD_ENABLED") != "1" or not path.startswith("/"):
                raise RetryableError(
                    "the state of nvidia-imex is not known, because its control socket is off; set IMEX_CMD_ENABLED=1 "
                    f"and IMEX_CMD_UNIX_DOMAIN_PATH=/etc/nvidia-imex/imex_ctrl.sock in {CONFIG} on the node and "
                    "restart nvidia-imex"
                )
            socket = tree.file_or_socket(path)
            if socket is None:
                raise _unready(f"is not running: its control socket {path} is missing")
            return tree.local(socket)
        raise _unready(f"is not installed: {CONFIG} is missing")


def settings(text: str) -> Mapping[str, str]:
    """If a setting occurs twice, the last value counts."""
    return dict(_SETTING.findall(text))


def _unready(what: str) -> RetryableError:
    return RetryableError(
        f"nvidia-imex on this node {what}; see `systemctl status nvidia-imex` and `nvidia-imex-ctl -N` on the node"
    )
