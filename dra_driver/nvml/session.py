"""The process's single NVML session: loads the library, initialises it, shuts it down."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pynvml
import structlog

from dra_driver.base.file_lock import UseMark
from dra_driver.errors import (
    DraDriverError,
    NvmlDetachedError,
    NvmlInUseError,
    NvmlLibraryError,
    NvmlPausedError,
    NvmlUnavailableError,
    StateError,
)
from dra_driver.nvml.calls import nvml_errors

_log = structlog.get_logger(__name__)

LibraryLoader = Callable[[], object]

_PATIENCE_S = 3.0
_HANGS_AFTER_S = 60.0
"""For a change to a GPU, and for NVML's own initialisation or shutdown."""
_CALL_HANGS_AFTER_S = 10.0
_CHECK_EVERY_S = 1.0
_SHUTDOWN_S, _OPENING_S = 10.0, 15.0
"""How long a pause waits. Without persistence mode, shutdown and initialisation each take a second per GPU."""
_DEVICE_FILES = "/dev/nvidia"
_REMEDY = "a GPU may need a reset: check the kernel log for Xid errors"


def load_library(path: str) -> object:
    """Load the NVML library. Raises: NvmlLibraryError; NvmlUnavailableError if the file no longer exists."""
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        if not Path(path).exists():
            raise NvmlUnavailableError(f"cannot load the NVML library {path}: {error}") from error
        raise NvmlLibraryError(
            f"cannot load the NVML library {path}: {error}; install the NVIDIA driver for this machine's architecture "
            "again; if this node has no GPU, remove the driver"
        ) from error


class NvmlSession:
    """Owns the binding's global state.

    Calls need no lock, because NVML is thread-safe. Every call is made inside `kept_open`, or inside `operation` if
    interrupting it would leave a GPU half changed.

    NVML is never shut down during a call, because that may hang or crash the process. Closing waits for running calls;
    until then operations can begin as usual. Other calls are refused unless an operation is running:

        closed ──reopen──▶ opening ──▶ open ──a pause waits; no call is running──▶ closing ──▶ paused
                              ▲          └── a call hangs, or the wait is too long: refused, no change   │
                              └────────────────────── the last pause ends ◀──────────────────────────────┘

    `opening` and `closing` may hang in the NVIDIA driver. A pause is then refused after some seconds. When the hanging
    call returns, NVML is opened again.
    """

    def __init__(
        self,
        loader: LibraryLoader,
        clock: Callable[[], float] = time.monotonic,
        mark: UseMark | None = None,
    ) -> None:
        """Hold `mark` while NVML is initialised, so that other processes can see it."""
        self._loader = loader
        self.mark = mark
        self._clock = clock
        # Whether NVML is initialised.
        self.is_open = False
        # How often NVML was initialised, and how often it was paused.
        self.openings = 0
        self.pauses = 0
        self._driver_absent = False
        # How often NVML was initialised after the driver had been missing.
        self.driver_loads = 0
        # Called before each shutdown, which does not close the device files of objects that still exist.
        self.before_shutdown: list[Callable[[], None]] = []
        self._turn = threading.Condition()
        self._operations: dict[int, float] = {}  # start times, by thread
        self._calls: dict[object, float] = {}
        self._change: tuple[str, float] | None = None  # the current change of NVML, and its start time
        self._waiting = 0  # number of threads that wait for running calls to end
        self._pausing = 0
        # Until the first opening, operations wait for it.
        self._is_first = True
        self._reopens = self._is_over = False
        self._failure: DraDriverError | None = None

    @contextmanager
    def kept_open(self) -> Iterator[int]:
        """Keep NVML initialised during the calls made inside.

        Yields the number of the opening: handles of an earlier opening are invalid. Raises: NvmlUnavailableError, also
        if a thread waits to close NVML and no operation is running.
        """
        call = object()
        with self._turn:
            if not self.is_open or (self._waiting and not self._operations):
                raise self._why_closed()
            self._calls[call] = self._clock()
        try:
            yield self.openings
        finally:
            with self._turn:
                del self._calls[call]
                if self._waiting:
                    self._turn.notify_all()

    @contextmanager
    def operation(self, patience: Callable[[], float]) -> Iterator[None]:
        """Keep NVML initialised until the operation ends, however long. Reentrant in the same thread.

        Waits up to `patience` seconds for an opening, unless it hangs. Raises: NvmlUnavailableError, or the error of
        the last `reopen`.
        """
        thread = threading.get_ident()
        if thread in self._operations:
            yield
            return
        with self._turn:
            if self._is_expected():
                self._turn.wait_for(lambda: not self._is_expected(), patience())
            if not self.is_open:
                raise self._why_closed()
            self._operations[thread] = self._clock()
        try:
            yield
        finally:
            with self._turn:
                del self._operations[thread]
                self._turn.notify_all()

    def close(self) -> None:
        with self._turn:
            was_open, self.is_open = self.is_open, False
            self._is_over = True
            self._turn.notify_all()
            try:
                self._wait_until_free("shut NVML down", _PATIENCE_S)
            except NvmlInUseError as error:
                # The process exits, which shuts NVML down without interrupting a change to a GPU. While a
                # call hangs, the shutdown may hang too.
                _log.warning("nvml_not_shut_down", reason=str(error).partition(";")[0])
                return
            self._begin("shut down")
        if not self._changed(self._shut_down if was_open else lambda: None, _PATIENCE_S):
            _log.warning("nvml_not_shut_down", reason="shut NVML down: it hangs in the NVIDIA driver")

    def release(self, why: str) -> None:
        """Shut NVML down until the next `reopen`; `why` is the error text until then.

        Raises: NvmlInUseError, without any change, while a call is running.
        """
        with self._turn:
            self._wait_until_free("shut NVML down", _PATIENCE_S)
            was_open = self._begin("shut down")
            self._is_first = self._reopens = False
            self._failure = NvmlDetachedError(why)
        try:
            if was_open:
                self._shut_down()
        finally:
            self._end()

    def reopen(self) -> None:
        """Initialise NVML, after a shutdown if it is open, so that NVML detects GPUs that came or went.

        Raises: NvmlUnavailableError; RetryableError if access is refused; NvmlInUseError, without any change, if a call
        does not end within a few seconds, or while NVML is paused.
        """
        with self._turn:
            self._wait_until_free("initialise NVML again", _PATIENCE_S)
            if self._pausing:
                raise NvmlInUseError(str(NvmlPausedError()))
            was_open = self._begin("initialised")
            self._is_first = False
        try:
            if was_open:
                # The mark is kept, so other processes see NVML as open throughout.
                self._end_session()
            self._open_counted()
        finally:
            self._end()

    @contextmanager
    def closed(self, patience: Callable[[], float]) -> Iterator[None]:
        """Close NVML in this process, so that another kernel driver can bind a GPU.

        The first caller closes NVML, and the last one initialises it again; operations wait until then. Must not be
        used within an operation. Raises: NvmlInUseError if a call does not end within `patience` seconds (then nothing
        has changed) or if the shutdown hangs.
        """
        if threading.get_ident() in self._operations:
            raise RuntimeError("NVML cannot be closed within an operation of the same thread")
        until = time.monotonic() + patience()
        with self._turn:
            self._wait_until_free("close NVML for a moment", until - time.monotonic())
            self.pauses += 1
            self._pausing += 1
            closes = self.is_open
            if closes:
                self._reopens = self._begin("shut down")
        try:
            wait_s = max(_SHUTDOWN_S, until - time.monotonic())
            if closes and not self._changed(self._shut_down, wait_s, then=self._open_again):
                raise NvmlInUseError(
                    f"close NVML for a moment: its shutdown has not finished after {wait_s:.0f} s; {_REMEDY}"
                )
            yield
        finally:
            with self._turn:
                self._pausing -= 1
            self._open_again()

    def change_lasts_s(self) -> float:
        change = self._change
        return 0.0 if change is None else self._clock() - change[1]

    # --- taking turns: the caller of these holds `_turn` ---------------------------------------

    def _is_expected(self) -> bool:
        """Whether NVML is closed and about to be opened."""
        if self.is_open or self._is_over or self.change_lasts_s() >= _HANGS_AFTER_S:
            return False
        return self._is_first or self._reopens or bool(self._pausing) or self._change is not None

    def _wait_until_free(self, what: str, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        self._waiting += 1
        try:
            while (found := self._in_the_way()) is not None:
                text, lasts_s, hangs_after_s = found
                if lasts_s >= hangs_after_s:
                    raise NvmlInUseError(
                        f"cannot {what}: {text} has been in progress for more than {hangs_after_s:.0f} s, so it may "
                        f"hang in the NVIDIA driver; {_REMEDY}"
                    )
                left = until - time.monotonic()
                if left <= 0:
                    raise NvmlInUseError(f"cannot {what}: {text} is in progress; gpu-dra-driver retries soon")
                self._turn.wait(min(left, _CHECK_EVERY_S))
        finally:
            self._waiting -= 1

    def _in_the_way(self) -> tuple[str, float, float] | None:
        """Return a running call, its duration in seconds, and the duration at which it counts as hanging."""
        if self._change is not None:
            what = "shutdown" if self._change[0] == "shut down" else "initialisation"
            return f"the {what} of NVML", self.change_lasts_s(), _HANGS_AFTER_S
        for text, begun, hangs_after_s in (
            ("a change to a GPU", self._operations, _HANGS_AFTER_S),
            ("an NVML call", self._calls, _CALL_HANGS_AFTER_S),
        ):
            if begun:
                return text, self._clock() - min(begun.values()), hangs_after_s
        return None

    def _begin(self, what: str) -> bool:
        """Reserve opening and closing until `_end`. Returns whether NVML was open."""
        was_open, self.is_open = self.is_open, False
        self._change = (what, self._clock())
        return was_open

    def _why_closed(self) -> NvmlUnavailableError:
        """Return a new error object, because a traceback belongs to one thread."""
        if self._change is not None and self.change_lasts_s() >= _HANGS_AFTER_S:
            return NvmlPausedError(self._hang_text(self._change[0]))
        if self._pausing or self._waiting:
            return NvmlPausedError()
        if self._change is not None or self._is_expected():
            return NvmlPausedError(f"NVML is being {self._change[0] if self._change else 'initialised'}")
        if self._failure is None:
            return NvmlUnavailableError("NVML is not initialised")
        kind = (
            type(self._failure) if isinstance(self._failure, NvmlUnavailableError) else NvmlUnavailableError
        )
        return kind(str(self._failure))

    # --- opening and closing -------------------------------------------------------------------

    def _changed(
        self, work: Callable[[], None], wait_s: float, then: Callable[[], None] = lambda: None
    ) -> bool:
        """Run `work`, which may hang, in a new thread; return whether it ended within `wait_s` seconds."""
        ended = threading.Event()

        def do() -> None:
            try:
                work()
            finally:
                self._end()
                ended.set()
            then()

        try:
            threading.Thread(target=do, name="nvml", daemon=True).start()
        except (RuntimeError, MemoryError):  # no thread is available
            do()
        if ended.wait(wait_s) or (change := self._change) is None:
            return True
        _log.error("nvml_hangs", reason=self._hang_text(change[0]))
        return False

    def _hang_text(self, what: str) -> str:
        return f"NVML is being {what}, which has taken {self.change_lasts_s():.0f} s so far; {_REMEDY}"

    def _end(self) -> None:
        with self._turn:
            self._change = None
            self._turn.notify_all()

    def _open_again(self) -> None:
        with self._turn:
            if self._pausing or self._change is not None or not self._reopens or self._is_over:
                return
            self._begin("initialised")
        self._changed(self._open_or_log, _OPENING_S)

    def _open_or_log(self) -> None:
        try:
            self._open_counted()
        except DraDriverError as error:
            _log.warning("nvml_reopen_failed", reason=str(error))

    def _open_counted(self) -> None:
        self._reopens = False
        try:
            self._open()
        except DraDriverError as error:
            self._failure = error
            is_absent = isinstance(error, NvmlUnavailableError) and not isinstance(error, NvmlDetachedError)
            self._driver_absent |= is_absent
            raise
        self._failure = None
        self.driver_loads += self._driver_absent
        self._driver_absent = False
        self.openings += 1
        self.is_open = True

    def _open(self) -> None:
        # The loader is called while the mark is held: a process that requests all others to close NVML, and then sees
        # no mark, can be sure that no process is about to open it.
        with nvml_errors("initialise NVML"), self._marked():
            pynvml.nvmlLib = self._loader()
            pynvml._nvmlGetFunctionPointer_cache.clear()
            # Without this flag, initialisation fails on a node without bound GPUs, and GPUs bound later would never
            # appear.
            pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Hold the mark from before the initialisation. A failure to lock does not prevent the use of NVML."""
        if self.mark is not None:
            with suppress(StateError):
                self.mark.hold()
        try:
            yield
        except BaseException:
            if self.mark is not None:
                self.mark.release()
            raise

    def _end_session(self) -> None:
        for free in self.before_shutdown:
            free()
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def _shut_down(self) -> None:
        """Keep the mark if device files stay open: the NVIDIA driver then refuses to reset these GPUs."""
        self._end_session()
        left = open_device_files()
        if left:
            _log.error("nvml_device_files_open", files=left)
        elif self.mark is not None:
            self.mark.release()


def open_device_files() -> list[str]:
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(str(descriptor.readlink()))
    return sorted(path for path in found if path.startswith(_DEVICE_FILES))
