"""`gpu-dra-driver mps-host` as a process, which a node without a cluster starts itself."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from dra_driver.mps_host.host_files import MpsHostFiles, MpsLayout

_START_S = 10.0
_STOP_S = 10.0


class MpsHostProcess:
    """An MPS host at work from the constructor until `stop`. Its control daemons run on after it.

    `command` is `gpu-dra-driver mps-host` with the flags that lead to `layout`. The process has a session of its own,
    so Ctrl-C in a terminal does not reach it; its output goes to the file `log`.
    """

    def __init__(self, command: Sequence[str], layout: MpsLayout, log: Path) -> None:
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        files, deadline = MpsHostFiles(layout), time.monotonic() + _START_S
        while files.host_problem() is not None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the MPS host did not start: {log.read_text()}")
            time.sleep(0.01)

    def stop(self) -> None:
        """End the process; harmless twice."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
