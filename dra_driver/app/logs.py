"""Logs, and the signals that control or inspect the daemons.

A Python signal handler interrupts the main thread anywhere, even while it holds a lock, so the handler does nothing.
Instead, the interpreter writes the signal's number into a pipe, even while Python code cannot run, and a thread reads
the pipe and acts.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import FrameType, TracebackType
from typing import Any

import structlog

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_log = structlog.get_logger(__name__)

_HIDDEN = "[hidden]"
_MAX_DEPTH = 12  # the frames of a nested exception are at depth seven
_MAX_CHARACTERS = 16 * 1024  # per value; the middle of a longer value is omitted
_CUT = " […] "
_BREAKS = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u202a-\u202e\u2066-\u2069]")
_SECRET_FIELDS = re.compile(r"(?i)authorization|password|^token$|_token$|key.data$")
# Texts may come from anyone, so each pattern takes linear time for any text.
_SECRETS = (
    # An error about a header contains the header's value.
    re.compile(r"(?P<kept>Invalid header value ).*", re.DOTALL),
    re.compile(r"(?i)(?P<kept>authorization['\"]?\s*+[:=]\s*+)(?:b?['\"][^'\"]*['\"]?|[^,;}\]]+)"),
    re.compile(r"(?i)(?P<kept>\bbearer\s++)[^\s'\",;]{8,}"),
    re.compile(
        r"(?i)(?P<kept>\b(?:[a-z]+-)?(?:token|password|(?:key|certificate|authority)-data)['\"]?\s*+[:=]\s*+)['\"]?[^\s'\"]{6,}"
    ),
    re.compile(r"(?P<kept>)(?<![\w-])eyJ[\w-]{8,}+\.[\w-]++\.[\w-]+"),
    re.compile(r"(?P<kept>)-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|\Z)", re.DOTALL),
    re.compile(r"(?P<kept>)\bLS0tLS1CRUdJTi[\w+/=]+"),  # PEM in base64, as in a kubeconfig
    re.compile(r"(?P<kept>\b[a-z][a-z0-9+.-]{0,30}://)[^/\s@]+(?=@)"),
)

# Every text with a secret matches this pattern. Most texts do not, and skip the slower patterns above.
_HINTS = re.compile(r"(?i)header value|authorization|bearer|token|password|-data|://|eyj|begin|ls0t")

Event = MutableMapping[str, Any]


class Logs:
    def __init__(self, level: str, form: str) -> None:
        self.level = level
        self.form = form
        self._quiet = "info" if level == "debug" else level

    def toggle_debug(self) -> None:
        before = self.level
        self.level = self._quiet if before == "debug" else "debug"
        if before == "debug":
            _log.info("log_level_changed", before=before, after=self.level)
        structlog.configure(wrapper_class=_logger_class(self.level))
        if before != "debug":
            _log.info("log_level_changed", before=before, after=self.level)

    def log_crashes(self) -> None:
        """Log what Python would print itself: uncaught exceptions and warnings."""
        logging.captureWarnings(True)
        sys.excepthook = _program_crashed
        threading.excepthook = _thread_crashed


def configure_logs(level: str, form: str) -> Logs:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            *_renderers(form),
        ],
        wrapper_class=_logger_class(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _LibraryMessages)]:
        root.removeHandler(handler)
    root.addHandler(_LibraryMessages(logging.WARNING))
    return Logs(level, form)


def _logger_class(level: str) -> type[Any]:
    return structlog.make_filtering_bound_logger(_LEVELS[level])


def _renderers(form: str) -> list[Any]:
    # Local variables in a traceback could contain a token, so neither form shows them.
    if form == "json":
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        return [
            structlog.processors.ExceptionRenderer(frames),
            _clean,
            structlog.processors.JSONRenderer(default=str),
        ]
    return [
        structlog.processors.ExceptionRenderer(),
        _clean,
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        ),
    ]


def _clean(_logger: Any, _method: str, event: Event) -> Event:
    """Put every value on one line and remove secrets. Only the console's traceback keeps its lines."""
    return {
        key: _without_secrets(value)
        if key == "exception" and isinstance(value, str)
        else _shown(value, key, _MAX_DEPTH)
        for key, value in event.items()
    }


def _shown(value: Any, field: str, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if _SECRET_FIELDS.search(field):
        return _HIDDEN
    if isinstance(value, Mapping) and depth:
        return {_one_line(key): _shown(inner, str(key), depth - 1) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and depth:
        return [_shown(inner, field, depth - 1) for inner in value]
    return _one_line(value)


def _one_line(value: Any) -> str:
    try:
        text = str(value)
    except Exception as error:  # noqa: BLE001  a log line must not break the work that it reports
        text = f"<{type(value).__name__} that cannot be converted to text: {type(error).__name__}>"
    text = _without_secrets(text)
    if _BREAKS.search(text) is None:
        return text.strip()
    lines = (line.strip() for line in _BREAKS.split(text))
    return " ".join(line for line in lines if line)


def _without_secrets(text: str) -> str:
    text = _CONTROLS.sub("?", text)  # no escape sequence may reach a terminal
    if _HINTS.search(text):
        for pattern in _SECRETS:
            text = pattern.sub(rf"\g<kept>{_HIDDEN}", text)
    # Shorten last, because half a token matches no pattern.
    if len(text) > _MAX_CHARACTERS:
        half = _MAX_CHARACTERS // 2
        text = f"{text[:half]}{_CUT}{text[-half:]}"
    return text


class _LibraryMessages(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  the args do not match the format
            text = str(record.msg)
        level = min(
            (known for known in _LEVELS.values() if known >= record.levelno), default=logging.CRITICAL
        )
        _log.log(level, "library_message", library=record.name, text=text, exc_info=record.exc_info)


def _program_crashed(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if issubclass(kind, Exception):
        _log.critical("program_crashed", exc_info=(kind, error, traceback))
    else:
        sys.__excepthook__(kind, error, traceback)


def _thread_crashed(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or isinstance(args.exc_value, SystemExit):
        return
    name = args.thread.name if args.thread is not None else None
    _log.error(
        "thread_crashed",
        thread=name,
        exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
    )


_MAX_FRAMES = 64


class SignalWatch:
    """Create it in the main thread; only one may exist at a time."""

    def __init__(self) -> None:
        self._actions: dict[int, Callable[[], object]] = {}
        self._pipe, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="signals", daemon=True).start()

    def on(self, action: Callable[[], object], *numbers: signal.Signals) -> None:
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
    """Let SIGUSR1 switch debug events on and off, and SIGUSR2 show what every thread is doing.

    A crash in a library, or SIGABRT, shows the stacks too, even if Python code can no longer run.
    """
    faulthandler.enable(sys.stderr)
    watch = SignalWatch()
    watch.on(logs.toggle_debug, signal.SIGUSR1)
    watch.on(lambda: show_stacks(logs.form), signal.SIGUSR2)
    return watch


def show_stacks(form: str) -> None:
    """Log every thread's stack: in one event for `json`, else as text before the event."""
    stacks = list(_stacks())
    if form == "json":
        _log.warning("stacks_logged", threads=len(stacks), stacks=stacks)
        return
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    _log.warning("stacks_logged", threads=len(stacks))


def _stacks() -> Iterator[dict[str, Any]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield {"thread": names.get(ident, str(ident)), "frames": _frames(frame)}


def _frames(frame: FrameType) -> list[str]:
    shown: list[str] = []
    for inner, line in traceback.walk_stack(frame):
        if len(shown) == _MAX_FRAMES:
            break
        shown.append(f"{inner.f_code.co_filename}:{line} {inner.f_code.co_qualname}")
    return shown


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the signal is already in the pipe."""
