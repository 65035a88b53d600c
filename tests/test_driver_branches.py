"""docs/versions.md lists the functions that each branch of the NVIDIA driver lacks. The table is
generated from NVIDIA's own libraries and programs, but keeps the hand-written last column.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pynvml
from debian_programs import Programs

from dra_driver.errors import RetryableError
from dra_driver.host.driver_programs import InstalledPrograms
from dra_driver.model.mps import MpsDaemonSpec, MpsDirectories
from dra_driver.mps_host.daemon_control import DaemonControl, limit_commands
from tests.fakes.tables import IsGenerated, generated
from tests.fakes.waiting import PATIENCE_S

TOP = Path(__file__).parents[1]
MANUAL = TOP / "docs/versions.md"
WHAT_WE_DO = "What we then do"
OLDEST = "R535"
"""The oldest branch that the page calls expected to work."""
OF_BINDING = {
    node.name: node for node in ast.parse(inspect.getsource(pynvml)).body if isinstance(node, ast.FunctionDef)
}
LIMITED = MpsDaemonSpec(
    "gpu-1",
    "GPU-1",
    "gpu",
    "GPU-1",
    multi_user=False,
    default_active_thread_percentage=25,
    default_memory_limit_mib=4096,
)


def test_manual_says_what_the_branch_lacks_and_what_we_then_do(
    nvidia: Programs, update_golden: bool, is_generated: IsGenerated
) -> None:
    lacking = lacking_functions(nvidia) | lacking_commands(nvidia) | lacking_words(nvidia)
    branches, lacks, meanings = parsed(generated(MANUAL, "driver branches")[1])
    if nvidia.branch < OLDEST:  # lacks more, which the page does not list
        assert lacking > lacks[OLDEST]
        return
    if update_golden:
        branches = sorted({*branches, nvidia.branch})
        lacks[nvidia.branch] = lacking
    if nvidia.branch in branches:
        assert lacking == lacks[nvidia.branch], "run `make golden`, then fill in what we do"
    is_generated(MANUAL, "driver branches", table(branches, lacks, meanings))
    unsaid = lacking - meanings.keys() | {name for name, meaning in meanings.items() if meaning in ("", "?")}
    assert unsaid == set(), "run `make golden`, then fill in what we do"


def parsed(within: str) -> tuple[list[str], dict[str, set[str]], dict[str, str]]:
    """The branches, what each lacks, and the hand-written column."""
    first, *rows = within.splitlines()
    branches = re.findall(r"R\d+", first)
    lacks: dict[str, set[str]] = {branch: set() for branch in branches}
    meanings = {}
    for row in rows[3:]:
        name, newest, meaning = (cell.strip() for cell in row.strip("|\n").split("|"))
        meanings[name.strip("`")] = meaning
        for branch in branches[: branches.index(newest) + 1]:
            lacks[branch].add(name.strip("`"))
    return branches, lacks, meanings


def table(branches: list[str], lacks: dict[str, set[str]], meanings: dict[str, str]) -> str:
    """The branches in one line, and a row for each name: the newest branch that lacks it. Older ones lack it too."""
    lines = [
        f"Branches: {', '.join(branches)}.\n\n| What we use | Missing up to | {WHAT_WE_DO} |\n|---|---|---|\n"
    ]
    for name in sorted(set().union(*lacks.values()), key=lambda name: (not name.startswith("nvml"), name)):
        missing = [branch for branch in branches if name in lacks[branch]]
        assert missing == branches[: len(missing)], f"{name} is missing in {missing}"
        lines.append(f"| `{name}` | {missing[-1]} | {meanings.get(name, '?')} |\n")
    return "".join(lines)


# --- functions of NVML ---------------------------------------------------------------------------


def lacking_functions(nvidia: Programs) -> set[str]:
    library = ctypes.CDLL(str(nvidia.library("libnvidia-ml")))
    return {name for name in functions_of_nvml() if not hasattr(library, name)}


@cache
def functions_of_nvml() -> frozenset[str]:
    """The functions of NVIDIA's library that our code uses through the binding, also by name as text."""
    found: set[str] = set()
    left = [name for name in names_in_our_code() if name in OF_BINDING]
    while left:
        symbols, called = looked_up(OF_BINDING[left.pop()])
        found |= symbols
        left += called
    assert {"nvmlInitWithFlags", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMemoryInfo_v2"} < found
    return frozenset(found)


@cache
def names_in_our_code() -> frozenset[str]:
    """All attributes and texts."""
    return frozenset(
        name
        for path in (TOP / "dra_driver").rglob("*.py")
        if "simulator" not in path.parts
        for name in names_in(path.read_text())
    )


def names_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def looked_up(function: ast.FunctionDef) -> tuple[set[str], set[str]]:
    """Return the library functions that a function of the binding uses, and the binding's functions that it
    calls.
    """
    symbols, called = set(), set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "_nvmlGetFunctionPointer":
                [name] = node.args
                assert isinstance(name, ast.Constant), f"{function.name}: the symbol is no literal"
                symbols.add(name.value)
            elif node.func.id.startswith("nvml") and node.func.id in OF_BINDING:
                called.add(node.func.id)
    return symbols, called


# --- MPS -----------------------------------------------------------------------------------------


def lacking_words(nvidia: Programs) -> set[str]:
    """Environment variables and options that occur in no program or library of MPS."""
    readers = [nvidia.library("libcuda"), *(nvidia.root / "usr").glob("*bin/nvidia-cuda-mps-*")]
    known = b"".join(path.read_bytes() for path in readers)
    ours = {
        found[0]
        for name in names_in_our_code()
        if (found := re.match(r"CUDA_MPS_[A-Z_]+|-multiuser-server", name)) is not None
    }
    assert len(readers) == 3
    assert "CUDA_MPS_PIPE_DIRECTORY" in ours
    return {name for name in ours if name.encode() not in known}


def lacking_commands(nvidia: Programs) -> set[str]:
    """Return the commands of ours that the branch's own control daemon does not support."""
    top = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))
    directories = MpsDirectories(*(str(top / name) for name in ("pipe", "log", "shm")))
    for directory in (directories.pipe, directories.log):
        Path(directory).mkdir()
    control = DaemonControl(InstalledPrograms(str(nvidia.root), top / "links"), LIMITED, directories)
    control.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        answers = {}
        for command in commands_to_mps():
            while command not in answers:
                try:
                    answers[command] = control.query_once(command, timeout_s=5)
                except RetryableError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
        return {
            command.partition(" ")[0]
            for command, lines in answers.items()
            if any("Unknown command" in line for line in lines)
        }
    finally:
        control.stop_processes(None)
        shutil.rmtree(top)


def commands_to_mps() -> list[str]:
    """All queries of the MPS host to a daemon with limits and a server, in this order."""
    daemon = KnowsAll()
    daemon.apply_limits()
    assert daemon.query_servers() == (None, 1)
    return list(daemon.requested)


class KnowsAll(DaemonControl):
    """A daemon that takes every limit, with one server that has one client."""

    def __init__(self) -> None:
        super().__init__(lambda: None, LIMITED, MpsDirectories("pipe", "log", "shm"))
        self.requested: dict[str, None] = {}
        self._limits = {getter: wanted for _, getter, wanted in limit_commands(LIMITED)}

    def query_once(self, *questions: str, timeout_s: float) -> list[str]:
        self.requested |= dict.fromkeys(questions)
        answer = self._limits.get(questions[-1], "4711")
        return [answer.removesuffix(" %")]
