"""One NVML session for the whole process: loading the library, initialising, shutting down."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pynvml
import structlog

from dra_driver.errors import (
    DraDriverError,
    NvmlDetachedError,
    NvmlInUseError,
    NvmlLibraryError,
    NvmlPausedError,
    NvmlUnavailableError,
    StateError,
)
from dra_driver.files.file_lock import UseMark
from dra_driver.nvml.failures import nvml_errors

_log = structlog.get_logger(__name__)

LibraryLoader = Callable[[], object]

_PATIENCE_S = 3.0
_HUNG_AFTER_S = 60.0


def load_library(path: str) -> object:
    """The NVML library at `path`. Raises: NvmlLibraryError with the dynamic linker's reason; NvmlUnavailableError if
    there is no such file any more."""
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        if not Path(path).exists():
            raise NvmlUnavailableError(f"cannot load the NVML library {path}: {error}") from error
        raise NvmlLibraryError(
            f"cannot load the NVML library {path}: {error}; install the NVIDIA driver of this machine's architecture "
            "anew, or if this node has no GPU, remove it"
        ) from error


class NvmlSession:
    """Owns the binding's global state.

    The library is loaded by path and handed to the binding, because it lies below a driver root and not
    on the linker's path. After a driver reload `reopen` maps the new library. Calls need no lock: NVML is
    thread-safe. A call that a shutdown must not cut off is made inside `kept_open`, if the next look makes up for it,
    or inside `operation`, if a GPU would be left half changed.
    """

    def __init__(
        self,
        loader: LibraryLoader,
        clock: Callable[[], float] = time.monotonic,
        mark: UseMark | None = None,
    ) -> None:
        """`mark` is held while NVML is initialised, so that other processes see that."""
        self._loader = loader
        self._mark = mark
        self._clock = clock
        self._lock = threading.Lock()
        # Whether NVML is initialised.
        self.is_open = False
        # How often it was initialised, and how often it was closed for a moment.
        self.openings = 0
        self.pauses = 0
        self._pausing = 0
        self._reopens = self._is_over = False
        self._driver_absent = False
        # How often NVML could be initialised after it could not, for want of a driver.
        self.driver_loads = 0
        self._users = 0
        self._turn = threading.Condition()
        self._begun: dict[int, float] = {}
        self._change_began: float | None = None
        # Who comes before the first opening waits for it.
        self._is_changing = self._is_first = True
        self._failure: DraDriverError | None = None

    @contextmanager
    def kept_open(self) -> Iterator[int]:
        """NVML is shut down only after the calls made inside have ended, unless they take longer than a few seconds.

        Yields the number of the opening: handles and event sets of an earlier one must not be used any more.
        Raises: NvmlUnavailableError if NVML is not initialised.
        """
        with self._turn:
            if not self.is_open:
                raise self._why_closed()
            self._users += 1
        try:
            yield self.openings
        finally:
            with self._turn:
                self._users -= 1
                self._turn.notify_all()

    @contextmanager
    def operation(self, patience: Callable[[], float]) -> Iterator[None]:
        """NVML stays initialised until everything inside is done, however long a change of a GPU takes; within
        an operation of the same thread this does nothing more.

        While NVML is being initialised, or is about to be, this waits for it; only then `patience` is asked for how
        many seconds at most. Raises: NvmlUnavailableError, as from `reopen` where that failed; what `patience` raises.
        """
        thread = threading.get_ident()
        if thread in self._begun:
            yield
            return
        with self._turn:
            if self._is_changing:
                self._turn.wait_for(lambda: not self._is_changing, patience())
            if self._is_changing or not self.is_open:
                raise self._why_closed()
            self._begun[thread] = self._clock()
        try:
            yield
        finally:
            with self._turn:
                del self._begun[thread]
                self._turn.notify_all()

    def close(self) -> None:
        """Shut NVML down for good; errors do not matter any more."""
        with self._lock:
            with self._turn:
                was_open, self.is_open, self._is_changing = self.is_open, False, False
                self._is_over = True
                self._turn.notify_all()
                self._turn.wait_for(lambda: not self._users and not self._begun, _PATIENCE_S)
                if self._begun or self._users:
                    # The process ends, which shuts NVML down without cutting off a GPU's change. While a call hangs,
                    # the shutdown may hang too.
                    what = "change of a GPU" if self._begun else "call of NVML"
                    _log.warning("nvml_left_open", reason=f"a {what} is still under way")
                    return
            if was_open:
                self._shut_down()

    def let_go(self, why: str) -> None:
        """Shut NVML down until the next `reopen`; `why` is what everybody hears meanwhile. Raises: NvmlInUseError, with
        NVML as it was, while a change of a GPU is under way."""
        with self._lock, self._changing():
            if self.is_open:
                self._end_uses(_PATIENCE_S)
                self._shut_down()
            self._failure = NvmlDetachedError(why)
            self._reopens = False

    @contextmanager
    def closed(self, patience: Callable[[], float]) -> Iterator[None]:
        """NVML of this process is closed inside, so that another kernel driver can have a GPU. Whoever comes first
        closes it, others join, and the last one initialises it again; operations wait for that.

        `patience` is asked for how many seconds at most operations that have begun are waited for. Not to be used
        within an operation. Raises: NvmlInUseError, with NVML as it was, if one takes longer; what `patience` raises.
        """
        if threading.get_ident() in self._begun:
            raise RuntimeError("NVML cannot be closed within an operation of the same thread")
        with self._turn:
            self.pauses += 1
            self._pausing += 1
            self._is_changing = True
        try:
            self._close_within(patience())
            yield
        finally:
            with self._turn:
                self._pausing -= 1
            self._end_pause()

    def _close_within(self, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        if not self._lock.acquire(timeout=max(0.0, wait_s)):
            raise NvmlInUseError("close NVML for a moment: it is being initialised; it is tried again soon")
        try:
            if self.is_open:
                self._end_uses(max(0.0, until - time.monotonic()))
                self._shut_down()
                self._reopens = True
        finally:
            self._lock.release()

    def _end_pause(self) -> None:
        with self._lock:
            if self._pausing:
                return
            try:
                if self._reopens and not self.is_open and not self._is_over:
                    self._open_counted()
            except NvmlPausedError:
                # Of another process; the next `reopen` or end of a pause makes up for it, and operations wait.
                return
            except DraDriverError as error:
                _log.warning("nvml_not_opened_again", reason=str(error))
            with self._turn:
                self._is_changing = self._is_first or bool(self._pausing)
                self._turn.notify_all()

    def reopen(self) -> None:
        """Initialise NVML, after a shutdown if it is initialised: so NVML learns of GPUs that came or went.

        This waits for operations that have begun, and no new ones begin meanwhile. An operation that has not ended
        after a minute hangs in the NVIDIA driver and must not keep everybody from a new session. Raises:
        NvmlUnavailableError; RetryableError where access is refused;
        NvmlInUseError, with NVML as it was, if an operation takes longer than a few seconds, or while NVML is closed
        for a moment.
        """
        with self._lock, self._changing():
            if self._pausing:
                raise NvmlInUseError(str(NvmlPausedError()))
            if self.is_open:
                self._end_uses(_PATIENCE_S)
                # The mark stays: for others NVML is open throughout.
                with suppress(pynvml.NVMLError):
                    pynvml.nvmlShutdown()
            self._open_counted()

    def _end_uses(self, wait_s: float) -> None:
        """Raises: NvmlInUseError if operations are not over after so long."""
        with self._turn:
            self._turn.wait_for(lambda: not self._begun, wait_s)
            self._give_way_to_operations()
            self.is_open = False
            self._turn.wait_for(lambda: not self._users, _PATIENCE_S)

    def _give_way_to_operations(self) -> None:
        """Raises: NvmlInUseError if operations are under way and none of them hangs."""
        if not self._begun:
            return
        longest = self._clock() - min(self._begun.values())
        if longest < _HUNG_AFTER_S:
            raise NvmlInUseError("shut NVML down: a change of a GPU is under way; it is tried again soon")
        _log.error(
            "nvml_operation_hangs",
            seconds=round(longest),
            remedy="NVML is initialised anew under it; look for Xid errors in the kernel log, a GPU may need a reset",
        )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._turn:
            self._is_changing = True
            self._change_began = self._clock()
        try:
            yield
        finally:
            with self._turn:
                self._is_first = False
                self._change_began = None
                # The last one out of a pause may still be about to open NVML again.
                self._is_changing = bool(self._pausing) or self._reopens
                self._turn.notify_all()

    def change_lasts_s(self) -> float:
        """For how many seconds NVML is being initialised or shut down; 0 if it is not. It takes a few seconds unless it
        hangs in the NVIDIA driver."""
        began = self._change_began
        return 0.0 if began is None else self._clock() - began

    def _open_counted(self) -> None:
        try:
            self._open()
        except DraDriverError as error:
            self._failure = error
            self._reopens &= isinstance(error, NvmlPausedError)
            is_absent = isinstance(error, NvmlUnavailableError) and not isinstance(error, NvmlDetachedError)
            self._driver_absent |= is_absent
            raise
        self._failure = None
        self._reopens = False
        self.driver_loads += self._driver_absent
        self._driver_absent = False
        self.openings += 1
        self.is_open = True

    def _open(self) -> None:
        # The loader is asked while the mark is held: whoever asks everybody to close NVML, and then sees no mark, is
        # sure that nobody is about to open NVML.
        with nvml_errors("initialise NVML"), self._marked():
            pynvml.nvmlLib = self._loader()
            pynvml._nvmlGetFunctionPointer_cache.clear()
            # Without this flag a node whose GPUs are not bound yet fails here, and later ones never show.
            pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Hold the mark from before the initialisation on, unless that fails. A disk that does not take the lock keeps
        nobody from NVML."""
        if self._mark is not None:
            with suppress(StateError):
                self._mark.hold()
        try:
            yield
        except BaseException:
            if self._mark is not None:
                self._mark.let_go()
            raise

    def _shut_down(self) -> None:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
        if self._mark is not None:
            self._mark.let_go()

    def _why_closed(self) -> NvmlUnavailableError:
        """The error of the last opening as a new object, since a traceback belongs to one thread."""
        if self._pausing:
            return NvmlPausedError()
        if self._is_changing:
            return NvmlUnavailableError("NVML is being initialised")
        if self._failure is None:
            return NvmlUnavailableError("NVML is not initialised")
        kind = (
            type(self._failure) if isinstance(self._failure, NvmlUnavailableError) else NvmlUnavailableError
        )
        return kind(str(self._failure))
