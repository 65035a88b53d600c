"""What hack/ holds is imported as its own programs do, and leaves the process as it was."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
import structlog

from dra_driver.logs import configure_logs

sys.path.insert(0, str(Path(__file__).parents[2] / "hack"))


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """The program sets logs up and hands the binding a library."""
    root = logging.getLogger()
    handlers, level, logs = list(root.handlers), root.level, structlog.get_config()
    configure_logs("critical", "console")
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**logs)
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()
