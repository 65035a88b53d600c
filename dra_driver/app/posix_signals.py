"""What the daemons do when they get a signal.

A Python signal handler interrupts the main thread anywhere, also while the thread holds a lock. So the handler does
nothing. The interpreter itself writes the number of each signal into a pipe, even while Python code cannot run. A
thread that reads the pipe acts on it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import structlog

from dra_driver.app.logs import Logs

_log = structlog.get_logger(__name__)
_MOST_FRAMES = 64


class SignalWatch:
    """Acts on signals in its own thread. Make it in the main thread; only one may exist at a time."""

    def __init__(self) -> None:
        self._actions: dict[int, Callable[[], object]] = {}
        self._pipe, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="signals", daemon=True).start()

    def on(self, action: Callable[[], object], *numbers: signal.Signals) -> None:
        """Call `action` for each of these signals."""
        for number in numbers:
            self._actions[number] = action
            signal.signal(number, _nothing)

    def _run(self) -> None:
        while True:
            for number in os.read(self._pipe, 64):
                self._act(number)

    def _act(self, number: int) -> None:
        action = self._actions.get(number)
        try:
            if action is not None:
                action()
        except Exception:  # noqa: BLE001  the next signal may be the one to stop
            _log.exception("signal_failed", signal=signal.Signals(number).name)


def watch_signals(logs: Logs) -> SignalWatch:
    """SIGUSR1 switches debug events on and off, SIGUSR2 shows what every thread is doing.

    A crash in a library, or SIGABRT, shows the stacks as well, even if Python code can no longer run.
    """
    faulthandler.enable(sys.stderr)
    watch = SignalWatch()
    watch.on(logs.toggle_debug, signal.SIGUSR1)
    watch.on(lambda: show_stacks(logs.form), signal.SIGUSR2)
    return watch


def show_stacks(form: str) -> None:
    """Every thread's stack: in one event if the log is `json`, else as text before the event."""
    stacks = list(_stacks())
    if form == "json":
        _log.warning("stacks_shown", threads=len(stacks), stacks=stacks)
        return
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    _log.warning("stacks_shown", threads=len(stacks))


def _stacks() -> Iterator[dict[str, Any]]:
    """Name and frames of each thread, the innermost first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield {"thread": names.get(ident, str(ident)), "frames": _frames(frame)}


def _frames(frame: FrameType) -> list[str]:
    shown: list[str] = []
    for inner, line in traceback.walk_stack(frame):
        if len(shown) == _MOST_FRAMES:
            break
        shown.append(f"{inner.f_code.co_filename}:{line} {inner.f_code.co_qualname}")
    return shown


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the signal is in the pipe already."""
