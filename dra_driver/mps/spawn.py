"""The MPS host as a child of the plugin, where it has no DaemonSet of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dra_driver.errors import RetryableError
from dra_driver.mps.client import MpsClient
from dra_driver.mps.layout import MpsLayout

_POLL_S = 0.01
_STOP_S = 10.0


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
