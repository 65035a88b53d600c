"""Modules of hack/ are imported as its own programs do, without lasting effects on the process."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from dra_driver.app.logs import configure_logs

sys.path.insert(0, str(Path(__file__).parents[2] / "hack"))


@pytest.fixture(autouse=True)
def _quiet_program() -> Iterator[None]:
    """The program hands the binding a library, which the next test must not find."""
    configure_logs("critical", "console")
    yield
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()
