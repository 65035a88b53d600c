"""The MPS host as a child of the plugin, where it has no DaemonSet of its own: started with the first daemon that
somebody needs."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from dra_driver.errors import DraDriverError, RetryableError
from dra_driver.model.mps import MpsDaemonSpec, MpsDaemonStatus, MpsKind
from dra_driver.mps.client import MpsClient
from dra_driver.mps.layout import MpsLayout

_log = structlog.get_logger(__name__)

_POLL_S = 0.01
_STOP_S = 10.0


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
        """As MpsClient.stop; a host that cannot be started is as none."""
        self.start_quietly()
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


class HostProcess:
    """A host that this process started, or one that was there already (`pid` is None then)."""

    def __init__(self, child: subprocess.Popen[bytes] | None) -> None:
        self._child = child

    @property
    def pid(self) -> int | None:
        """The child's number."""
        return None if self._child is None else self._child.pid

    @property
    def has_ended(self) -> bool:
        """Whether a child of ours is gone and should be spawned anew."""
        return self._child is not None and self._child.poll() is not None

    def stop(self) -> None:
        """End the child; control daemons run on. A host that was there before is left alone."""
        if self._child is None or self._child.poll() is not None:
            return
        self._child.terminate()
        try:
            self._child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._child.send_signal(signal.SIGKILL)
            self._child.wait()


def spawn_host(
    command: Sequence[str],
    layout: MpsLayout,
    *,
    timeout_s: float = 5.0,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> HostProcess:
    """Return once a host answers: the one that does already, or a new child running `command`.

    `command` is `gpu-dra-driver mps-host` with the flags that lead to the same layout. The child has a session of
    its own; its log goes to our standard error, or to `log`. Raises: RetryableError.
    """
    client = MpsClient(layout, connect_s=0.0)
    if _answers(client):
        return HostProcess(None)
    output = (
        None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    )
    try:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=None if environment is None else dict(environment),
            start_new_session=True,
        )
    except OSError as error:
        raise RetryableError(f"cannot start the MPS host {command[0]}: {error.strerror or error}") from error
    finally:
        if output is not None:
            os.close(output)
    return _wait(HostProcess(child), client, timeout_s)


def _wait(host: HostProcess, client: MpsClient, timeout_s: float) -> HostProcess:
    deadline = time.monotonic() + timeout_s
    while not _answers(client):
        if host.has_ended:
            if _answers(client):  # another process was faster
                return HostProcess(None)
            raise RetryableError("the MPS host ended while it started; its log says why")
        if time.monotonic() >= deadline:
            host.stop()
            raise RetryableError(f"the MPS host did not answer within {timeout_s:g} s of its start")
        time.sleep(_POLL_S)
    return host


def _answers(client: MpsClient) -> bool:
    try:
        client.ping()
    except RetryableError:
        return False
    return True
