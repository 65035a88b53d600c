"""One thread for work that is done again and again, and that no surprise ends."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import structlog

_log = structlog.get_logger(__name__)


class BackgroundWorker:
    """Calls `work` in a daemon thread named `name`, from `start` to `stop`.

    `work` answers how many seconds to pause before the next call, math.inf for as long as nobody wakes it. Whatever it
    raises is a mistake of ours: it is logged with its traceback as the event `crash_event`, and `on_crash` answers the
    pause then. `wake` ends the pause; a wake during the work counts for the pause after it. A part that has a thread of
    its own is such a worker.
    """

    join_s = 5.0
    """How long `stop` waits."""

    def __init__(
        self,
        name: str,
        work: Callable[[], float],
        *,
        crash_event: str,
        on_crash: Callable[[Exception], float],
    ) -> None:
        self._work = work
        self._crash_event = crash_event
        self._on_crash = on_crash
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called: long work ends early then."""
        return self._stopping.is_set()

    def start(self) -> None:
        """Begin with the first call of `work`."""
        self._thread.start()

    def wake(self) -> None:
        """Have `work` called soon."""
        self._wake.set()

    def pause(self, seconds: float) -> bool:
        """Pause within the work, whatever wakes it; True if the worker is being stopped."""
        return self._stopping.wait(seconds)

    def stop(self) -> bool:
        """Have no more calls; waits a few seconds at most for one that is under way. Harmless before `start`.

        False if that call is still under way.
        """
        self.retire()
        return self.wait_ended(self.join_s)

    def retire(self) -> None:
        """Have no more calls, without a wait for one that is under way."""
        self._stopping.set()
        self._wake.set()

    def wait_ended(self, wait_s: float) -> bool:
        """Whether no call is under way, after `wait_s` seconds at most."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                seconds = self._work()
            except Exception as error:  # noqa: BLE001  a thread that ended would do nothing any more
                _log.exception(self._crash_event)
                seconds = self._on_crash(error)
            self._wake.wait(None if math.isinf(seconds) else max(0.0, seconds))
