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
"""For how long an operation, or NVML's own initialisation or shutdown, may be under way before it counts as hanging."""
_LOOK_HANGS_AFTER_S = 10.0
_LOOK_S = 1.0
"""How often it is looked whether a call hangs by now."""
_SHUTDOWN_S, _OPENING_S = 10.0, 15.0
"""How long a pause waits for them. Without persistence mode they take a second for each GPU."""
_DEVICE_FILES = "/dev/nvidia"
_REMEDY = "look for Xid errors in the kernel log, a GPU may need a reset"


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
    thread-safe. A call is made inside `kept_open` (a look), or inside `operation` if a GPU would be left half changed.

    NVML is never shut down under a call, because that may hang, or end the process. Closing waits for the calls; until
    then operations begin as usual, and looks give way:

        closed ──reopen──▶ opening ──▶ open ──a pause waits; no call is under way──▶ closing ──▶ paused
                              ▲          └── a call hangs, or the wait is too long: refused, all is as it was │
                              └────────────────────── the last pause ends ◀───────────────────────────────────┘

    `opening` and `closing` may hang in the NVIDIA driver. A pause leaves such a call behind in its thread after some
    seconds and is refused; operations wait no longer than their patience; when the call ends, NVML is opened again.
    """

    def __init__(
        self,
        loader: LibraryLoader,
        clock: Callable[[], float] = time.monotonic,
        mark: UseMark | None = None,
    ) -> None:
        """`mark` is held while NVML is initialised, and the one after it while an operation is under way, so that other
        processes see that."""
        self._loader = loader
        self.mark = mark
        self._busy_mark = None if mark is None else mark.following()
        self._clock = clock
        # Whether NVML is initialised.
        self.is_open = False
        # How often it was initialised, and how often it was closed for a moment.
        self.openings = 0
        self.pauses = 0
        self._driver_absent = False
        # How often NVML could be initialised after it could not, for want of a driver.
        self.driver_loads = 0
        # Called before each shutdown. NVML does not close the device files of what is not freed by then.
        self.before_shutdown: list[Callable[[], None]] = []
        self._turn = threading.Condition()
        self._operations: dict[int, float] = {}  # when they began, by thread
        self._looks: dict[object, float] = {}
        self._change: tuple[str, float] | None = None  # what is done to NVML now, and since when
        self._waiting = 0  # for NVML to be free
        self._pausing = 0
        # Who comes before the first opening waits for it.
        self._is_first = True
        self._reopens = self._is_over = False
        self._failure: DraDriverError | None = None

    @contextmanager
    def kept_open(self) -> Iterator[int]:
        """NVML is shut down only after the calls made inside have ended.

        Yields the number of the opening: handles and event sets of an earlier one must not be used any more.
        Raises: NvmlUnavailableError if NVML is not initialised, or someone waits for the last looks to end.
        """
        look = object()
        with self._turn:
            if not self.is_open or (self._waiting and not self._operations):
                raise self._why_closed()
            self._looks[look] = self._clock()
        try:
            yield self.openings
        finally:
            with self._turn:
                del self._looks[look]
                self._turn.notify_all()

    @contextmanager
    def operation(self, patience: Callable[[], float]) -> Iterator[None]:
        """NVML stays initialised until everything inside is done, however long a change of a GPU takes; within
        an operation of the same thread this does nothing more.

        While NVML is being initialised, or is about to be, this waits for it, unless that hangs; only then `patience`
        is asked for how many seconds at most. Raises: NvmlUnavailableError, as from `reopen` where that failed; what
        `patience` raises.
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
            self._show_operations()
        try:
            yield
        finally:
            with self._turn:
                del self._operations[thread]
                self._show_operations()
                self._turn.notify_all()

    def close(self) -> None:
        """Shut NVML down for good; errors do not matter any more."""
        with self._turn:
            was_open, self.is_open = self.is_open, False
            self._is_over = True
            self._turn.notify_all()
            try:
                self._wait_until_free("shut NVML down", _PATIENCE_S)
            except NvmlInUseError as error:
                # The process ends, which shuts NVML down without cutting off a GPU's change. While a call hangs, the
                # shutdown may hang too.
                _log.warning("nvml_left_open", reason=str(error).partition(";")[0])
                return
            self._begin("shut down")
        if not self._changed(self._shut_down if was_open else lambda: None, _PATIENCE_S):
            _log.warning("nvml_left_open", reason="shut NVML down: it hangs in the NVIDIA driver")

    def release(self, why: str) -> None:
        """Shut NVML down until the next `reopen`; `why` is what everybody hears meanwhile. Raises: NvmlInUseError, with
        NVML as it was, while a call of NVML is under way."""
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
        """Initialise NVML, after a shutdown if it is initialised: so NVML learns of GPUs that came or went.

        Raises: NvmlUnavailableError; RetryableError where access is refused; NvmlInUseError, with NVML as it was, if a
        call of NVML does not end within a few seconds, at once while one hangs, or while NVML is closed for a moment.
        """
        with self._turn:
            self._wait_until_free("initialise NVML anew", _PATIENCE_S)
            if self._pausing:
                raise NvmlInUseError(str(NvmlPausedError()))
            was_open = self._begin("initialised")
            self._is_first = False
        try:
            if was_open:
                # The mark stays: for others NVML is open throughout.
                self._end_session()
            self._open_counted()
        finally:
            self._end()

    @contextmanager
    def closed(self, patience: Callable[[], float]) -> Iterator[None]:
        """NVML of this process is closed inside, so that another kernel driver can have a GPU. Whoever comes first
        closes it, others join, and the last one initialises it again; operations wait for that.

        `patience` is asked for how many seconds at most calls of NVML are waited for, and then its shutdown. Not to be
        used within an operation. Raises: NvmlInUseError, with NVML as it was, if a call takes longer, at once while one
        hangs; the same if the shutdown hangs; what `patience` raises.
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
                    f"close NVML for a moment: its shutdown has not ended for {wait_s:.0f} s; {_REMEDY}"
                )
            yield
        finally:
            with self._turn:
                self._pausing -= 1
            self._open_again()

    def change_lasts_s(self) -> float:
        """For how many seconds NVML is being initialised or shut down; 0 if it is not. It takes a few seconds unless it
        hangs in the NVIDIA driver."""
        change = self._change
        return 0.0 if change is None else self._clock() - change[1]

    # --- taking turns: the caller of these holds `_turn` ---------------------------------------

    def _is_expected(self) -> bool:
        """Whether NVML is closed, and is about to be open."""
        if self.is_open or self._is_over or self.change_lasts_s() >= _HANGS_AFTER_S:
            return False
        return self._is_first or self._reopens or bool(self._pausing) or self._change is not None

    def _wait_until_free(self, what: str, wait_s: float) -> None:
        """Wait until no call of NVML is under way. Raises: NvmlInUseError if that takes longer, or one hangs."""
        until = time.monotonic() + wait_s
        self._waiting += 1
        try:
            while (found := self._in_the_way()) is not None:
                text, lasts_s, hangs_after_s = found
                if lasts_s >= hangs_after_s:
                    raise NvmlInUseError(
                        f"{what}: {text} has been under way for more than {hangs_after_s:.0f} s, so it may hang in the "
                        f"NVIDIA driver; {_REMEDY}"
                    )
                left = until - time.monotonic()
                if left <= 0:
                    raise NvmlInUseError(f"{what}: {text} is under way; it is tried again soon")
                self._turn.wait(min(left, _LOOK_S))
        finally:
            self._waiting -= 1

    def _in_the_way(self) -> tuple[str, float, float] | None:
        """A call under way, for how many seconds, and after how many it counts as hanging."""
        if self._change is not None:
            return f"NVML is being {self._change[0]}, which", self.change_lasts_s(), _HANGS_AFTER_S
        for text, begun, hangs_after_s in (
            ("a change of a GPU", self._operations, _HANGS_AFTER_S),
            ("a call of NVML", self._looks, _LOOK_HANGS_AFTER_S),
        ):
            if begun:
                return text, self._clock() - min(begun.values()), hangs_after_s
        return None

    def _begin(self, what: str) -> bool:
        """No one else opens or closes NVML until `_end`. Whether it was open."""
        was_open, self.is_open = self.is_open, False
        self._change = (what, self._clock())
        return was_open

    def _show_operations(self) -> None:
        if self._busy_mark is not None:
            with suppress(StateError):
                (self._busy_mark.hold if self._operations else self._busy_mark.release)()

    def _why_closed(self) -> NvmlUnavailableError:
        """That NVML is closed for a moment, or the error of the last opening as a new object, since a traceback belongs
        to one thread."""
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
        """Do what may hang in a thread of its own, and end the change; `then` is done after that. Whether it has ended
        after so many seconds."""
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
        except (RuntimeError, MemoryError):  # there is no thread to be had
            do()
        if ended.wait(wait_s) or (change := self._change) is None:
            return True
        _log.error("nvml_hangs", reason=self._hang_text(change[0]))
        return False

    def _hang_text(self, what: str) -> str:
        return f"NVML is being {what}, and that has not ended for {self.change_lasts_s():.0f} s; {_REMEDY}"

    def _end(self) -> None:
        with self._turn:
            self._change = None
            self._turn.notify_all()

    def _open_again(self) -> None:
        """Initialise NVML after the last pause, unless its shutdown still hangs."""
        with self._turn:
            if self._pausing or self._change is not None or not self._reopens or self._is_over:
                return
            self._begin("initialised")
        self._changed(self._open_or_tell, _OPENING_S)

    def _open_or_tell(self) -> None:
        try:
            self._open_counted()
        except NvmlPausedError:
            return  # of another process; the next `reopen` or end of a pause makes up for it, and operations wait
        except DraDriverError as error:
            _log.warning("nvml_not_opened_again", reason=str(error))

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
        # sure that no one is about to open NVML.
        with nvml_errors("initialise NVML"), self._marked():
            pynvml.nvmlLib = self._loader()
            pynvml._nvmlGetFunctionPointer_cache.clear()
            # Without this flag a node whose GPUs are not bound yet fails here, and later ones never show.
            pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Hold the mark from before the initialisation on, unless that fails. A disk that does not take the lock keeps
        no one from NVML."""
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
        """Where device files stay open, the mark stays too: the NVIDIA driver would refuse a reset of these GPUs."""
        self._end_session()
        left = _open_device_files()
        if left:
            _log.error("nvml_left_device_files", files=left)
        elif self.mark is not None:
            self.mark.release()


def _open_device_files() -> list[str]:
    """The NVIDIA driver's device files that this process has open."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(str(descriptor.readlink()))
    return sorted(path for path in found if path.startswith(_DEVICE_FILES))
