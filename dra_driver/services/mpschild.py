"""An MPS host as a child of this process, started with the first daemon that somebody needs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import structlog

from dra_driver.errors import DraDriverError
from dra_driver.model.mps import MpsDaemonSpec, MpsDaemonStatus, MpsKind
from dra_driver.mps.client import MpsClient
from dra_driver.mps.layout import MpsLayout
from dra_driver.mps.spawn import HostProcess, spawn_host

_log = structlog.get_logger(__name__)


class ChildMpsHost:
    """Asks the MPS host of `layout`, and starts one by `command` where none answers.

    Daemons outlive the host, and the next host takes them over, so stopping it stops nobody's work.
    """

    def __init__(self, layout: MpsLayout, command: Sequence[str]) -> None:
        self._layout = layout
        self._command = tuple(command)
        self._client = MpsClient(layout)
        self._lock = threading.Lock()
        self._process: HostProcess | None = None

    def ensure(self, spec: MpsDaemonSpec, timeout_s: float) -> MpsDaemonStatus:
        """The daemon runs and answers when this returns. Raises: as MpsClient.ensure."""
        self._start()
        return self._client.ensure(spec, timeout_s)

    def stop(
        self,
        device: str,
        timeout_s: float,
        *,
        gpu_uuid: str | None = None,
        kind: MpsKind | None = None,
    ) -> None:
        """The daemon of the device is gone when this returns. Raises: as MpsClient.stop."""
        self._start()
        self._client.stop(device, timeout_s, gpu_uuid=gpu_uuid, kind=kind)

    def close(self) -> None:
        """Stop the host; its daemons run on."""
        with self._lock:
            if self._process is not None:
                self._process.stop()
                self._process = None

    def start_quietly(self) -> None:
        """Have a host, or log why there is none; the next claim that needs one tries again."""
        try:
            self._start()
        except DraDriverError as error:
            _log.error("mps_host_not_started", reason=str(error))

    def _start(self) -> None:
        """A host that another process started ends with that one, so it is asked for each time."""
        with self._lock:
            own = self._process is not None and self._process.pid is not None
            if self._process is None or not own or self._process.has_ended:
                self._process = spawn_host(self._command, self._layout)
