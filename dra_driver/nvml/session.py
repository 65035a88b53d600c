"""One NVML session for the whole process: loading the library, initialising, shutting down."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pynvml

from dra_driver.errors import NvmlUnavailableError
from dra_driver.nvml.failures import nvml_errors

LibraryLoader = Callable[[], object]


def load_library(path: str) -> object:
    """The NVML library at `path`, or NvmlUnavailableError with the dynamic linker's reason."""
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise NvmlUnavailableError(f"cannot load the NVML library {path}: {error}") from error


class NvmlSession:
    """Owns the binding's global state.

    The library is loaded by path and handed to the binding, because it lies below a driver root and not
    on the linker's path. After a driver reload `reopen` maps the new library. Calls themselves need no
    lock: NVML is thread-safe.
    """

    def __init__(self, loader: LibraryLoader) -> None:
        self._loader = loader
        self._lock = threading.Lock()
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether NVML is initialised."""
        return self._is_open

    def open(self) -> None:
        """Initialise NVML; nothing happens if it is already.

        Raises: NvmlUnavailableError; RetryableError where access is refused.
        """
        with self._lock:
            if self._is_open:
                return
            pynvml.nvmlLib = self._loader()
            pynvml._nvmlGetFunctionPointer_cache.clear()
            with nvml_errors("initialise NVML"):
                # Without this flag a node whose GPUs are not bound yet fails here, and later ones never show.
                pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
            self._is_open = True

    def close(self) -> None:
        """Shut NVML down; errors do not matter any more."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError:
                return

    def reopen(self) -> None:
        """Shut down and initialise anew, which is how NVML learns of GPUs that came or went."""
        self.close()
        self.open()
