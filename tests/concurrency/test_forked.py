"""Work in a child process. Each case runs in a fresh interpreter, which has one thread, as `Forked` wants it."""

import subprocess
import sys

import pytest

_START = """
import os, sys
from dra_driver.concurrency.forked import Forked
from dra_driver.errors import DraDriverError, FatalError, InvalidConfigError
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _START + code], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_result_comes_back_and_what_the_work_imported_does_not() -> None:
    done = run(
        "def work():\n"
        "    import yaml\n"
        "    return os.getpid(), frozenset(yaml.safe_load('[1, 2]')), 'x' * 1_000_000\n"
        "forked = Forked(work)\n"
        "pid, numbers, text = forked.result()\n"
        "assert numbers == {1, 2} and len(text) == 1_000_000\n"
        "assert pid != os.getpid() and 'yaml' not in sys.modules\n"
        "assert not os.path.exists(f'/proc/{pid}')\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_comes_back_whole() -> None:
    done = run(
        "def work(): raise InvalidConfigError('a; b', faults=('a', 'b'))\n"
        "try: Forked(work).result()\n"
        "except InvalidConfigError as error: print(error, error.faults)\n"
    )
    assert (done.stdout, done.stderr) == ("a; b ('a', 'b')\n", "")


def test_nobody_needs_to_wait_for_children() -> None:
    done = run(
        "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print(Forked(lambda: 5).result())\n"
    )
    assert (done.stdout, done.stderr) == ("5\n", "")


@pytest.mark.parametrize(
    "end",
    ["os._exit(3)", "os.kill(os.getpid(), 9)", "1 / 0", "sys.exit(0)"],
)
def test_a_child_that_dies_is_told(end: str) -> None:
    done = run(f"def work(): {end}\ntry: Forked(work).result()\nexcept FatalError as error: print(error)\n")
    assert "a process that reads the configuration ended" in done.stdout
    assert done.stdout.count("\n") == 1


def test_the_child_writes_nothing_that_its_parent_has_written() -> None:
    done = run("print('once', end=''); Forked(lambda: 1).result()\n")
    assert done.stdout == "once"
