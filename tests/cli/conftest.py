from collections.abc import Iterator

import pynvml
import pytest

from tests.fakes.fixtures import h100, logs, node

__all__ = ["h100", "logs", "node"]


@pytest.fixture
def closed_nvml() -> Iterator[None]:
    """For commands that run in the test's process: the next test finds no library in the binding."""
    yield
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()
