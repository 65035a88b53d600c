"""NVML whose calls are noted, and one of which may hang for ever."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pynvml

from tests.fakes.waiting import PATIENCE_S


class HangingNvml:
    """Wraps the binding's library until `leave`, and also libraries that a `session` loads during that time."""

    def __init__(self, session: Any = None) -> None:
        self.called: Counter[str] = Counter()
        self._guard = threading.Lock()
        self.reached = threading.Event()
        self._library = pynvml.nvmlLib
        self._hanging: str | None = None
        self._let = threading.Event()
        self._session = session
        self._load = None if session is None else session._loader
        if session is not None:
            session._loader = self._loaded
        self._be(self)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        real = getattr(self._library, name)

        def call(*given: Any) -> Any:
            with self._guard:
                self.called[name] += 1
            if name == self._hanging:
                self.reached.set()
                assert self._let.wait(PATIENCE_S)
            return real(*given)

        return call

    @contextmanager
    def hanging(self, name: str) -> Iterator[None]:
        """Within it no call of this function returns."""
        self._let.clear()
        self.reached.clear()
        self._hanging = name
        try:
            yield
        finally:
            self._hanging = None
            self._let.set()

    def calls_of(self, work: Callable[[], object]) -> Counter[str]:
        """How often the work calls each function of the library."""
        self.called = Counter()
        work()
        return self.called.copy()

    def leave(self) -> None:
        if self._session is not None:
            self._session._loader = self._load
        self._be(self._library)

    def _loaded(self) -> object:
        assert self._load is not None
        self._library = self._load()
        return self

    def _be(self, library: object) -> None:
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()
