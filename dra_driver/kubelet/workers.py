"""Threads for gRPC handlers. They start when calls come, and end when there are none."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import structlog

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")
_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Workers(Executor):
    """An executor with up to `limit` threads; each ends after `idle_s` seconds without work.

    Unlike ThreadPoolExecutor it frees the memory of its threads after a burst. Its threads are daemons, so a handler
    that hangs in the NVIDIA driver does not keep the process from ending.
    """

    def __init__(self, name: str, *, limit: int, idle_s: float = 10.0) -> None:
        self._name = name
        self._limit = limit
        self._idle_s = idle_s
        self._changed = threading.Condition()
        self._tasks: deque[_Task] = deque()
        self._threads = 0
        self._waiting = 0
        self._closed = False

    @property
    def threads(self) -> int:
        """The number of threads alive now, busy or waiting."""
        return self._threads

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        future: Future[_T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{self._name}: no calls are taken after shutdown")
            self._tasks.append((future, fn, args, kwargs))
            if self._waiting >= len(self._tasks):
                self._changed.notify()
            elif self._threads < self._limit:
                self._add_thread()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more calls. Accepted calls still run unless they are cancelled; this does not wait for them."""
        with self._changed:
            self._closed = True
            if cancel_futures:
                while self._tasks:
                    self._tasks.popleft()[0].cancel()
            self._changed.notify_all()

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads += 1
        try:
            thread.start()
        except RuntimeError:
            # No thread can start. The task stays queued for the other threads, or for those of a later task.
            self._threads -= 1
            _log.exception("worker_not_started", pool=self._name, threads=self._threads)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            future, fn, args, kwargs = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - the future carries it to the caller
                future.set_exception(error)
            else:
                future.set_result(result)
            del task, future, fn, args, kwargs

    def _next(self) -> _Task | None:
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: self._tasks or self._closed, timeout=self._idle_s)
            self._waiting -= 1
            if self._tasks:
                return self._tasks.popleft()
            self._threads -= 1
            return None
