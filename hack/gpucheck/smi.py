"""Runs nvidia-smi with arguments that change nothing, and parses its answers."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, field
from xml.etree import ElementTree

from dra_driver.model.ids import pci_bus_id

_TIMEOUT_S = 120
FIELDS = ("name", "pci.bus_id", "memory.total", "driver_version", "mig.mode.current", "compute_cap")
QUERIES: dict[tuple[str, ...], tuple[str, ...]] = {
    fields: (f"--query-gpu=uuid,{','.join(fields)}", "--format=csv,noheader,nounits")
    for fields in (FIELDS, FIELDS[:-1])
}
"""By fields: R470 does not know the last one, and then answers none."""
READS = frozenset(
    {("-L",), ("-q", "-x"), ("topo", "-m"), ("nvlink", "-s"), ("mig", "-lgi"), *QUERIES.values()}
)
"""The only arguments with which nvidia-smi is run."""
_UNKNOWN = {"", "N/A", "[N/A]", "[Not Supported]", "Not Supported", "[Unknown Error]", "[GPU requires reset]"}
_GPU_LINE = re.compile(r"^GPU (\d+): (.+) \(UUID: (GPU-[^)]+)\)\s*$")
_MIG_LINE = re.compile(r"^\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)]+)\)\s*$")
_LINK_LINE = re.compile(r"^\s+Link (\d+): (.+?)\s*$")
_INSTANCE_LINE = re.compile(r"^\|\s+(\d+)\s+MIG \S+\s+(\d+)\s+(\d+)\s+(\d+):(\d+)\s+\|", re.MULTILINE)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")

Facts = dict[str, str | None]


class SmiError(ValueError):
    """nvidia-smi did not answer; the text is one line."""


@dataclass(slots=True)
class SmiGpu:
    """A GPU of the list. `migs` has UUID and profile of each MIG device, `links` counts the active NVLinks."""

    index: int
    uuid: str
    migs: list[tuple[str, str]] = field(default_factory=list)
    links: int = 0


class NvidiaSmi:
    """The program at a path; `library_dir` is where it finds NVML if that is in no usual place."""

    def __init__(self, program: str, library_dir: str | None = None) -> None:
        self.program = program
        self._environment = {**os.environ, "LC_ALL": "C"}
        if library_dir is not None:
            self._environment["LD_LIBRARY_PATH"] = library_dir

    def gpus(self, *arguments: str) -> list[SmiGpu]:
        """`-L`, or `nvlink -s` with the links. Raises: SmiError."""
        gpus: list[SmiGpu] = []
        for line in self.ask(*arguments).splitlines():
            if gpu := _GPU_LINE.match(line):
                gpus.append(SmiGpu(int(gpu[1]), gpu[3]))
            elif gpus and (mig := _MIG_LINE.match(line)):
                gpus[-1].migs.append((mig[3], mig[1]))
            elif gpus and (link := _LINK_LINE.match(line)):
                gpus[-1].links += "inactive" not in link[2].lower() and link[2] not in _UNKNOWN
        return gpus

    def query(self) -> dict[str, Facts]:
        """Values by GPU UUID and field. Raises: SmiError."""
        try:
            return self._asked(FIELDS)
        except SmiError:
            return self._asked(FIELDS[:-1])

    def _asked(self, fields: tuple[str, ...]) -> dict[str, Facts]:
        lines = [line for line in self.ask(*QUERIES[fields]).splitlines() if line.strip()]
        rows = [[cell.strip() for cell in line.split(",")] for line in lines]
        if any(len(row) != len(fields) + 1 for row in rows):
            raise SmiError(f"{self.program} answered a query in a form that is not known")
        return {row[0]: dict(zip(fields, map(_known, row[1:]), strict=True)) for row in rows}

    def details(self) -> dict[str, Facts]:
        """What only the XML has, by GPU UUID. Raises: SmiError."""
        try:
            gpus = ElementTree.fromstring(self.ask("-q", "-x")).iter("gpu")
        except ElementTree.ParseError as error:
            raise SmiError(f"nvidia-smi -q -x wrote no XML: {error}") from error
        return {gpu.findtext("uuid", ""): _details(gpu) for gpu in gpus}

    def instances(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        """`mig -lgi`: profile, start and size by GPU index and GPU instance. Raises: SmiError."""
        rows = (map(int, row) for row in _INSTANCE_LINE.findall(self.ask("mig", "-lgi")))
        return {(gpu, instance): (profile, start, size) for gpu, profile, instance, start, size in rows}

    def matrix(self) -> dict[tuple[int, int], int]:
        """`topo -m`: the NVLinks between GPUs by index. Raises: SmiError."""
        lines = [_ESCAPE.sub("", line).split() for line in self.ask("topo", "-m").splitlines()]
        columns = next((line for line in lines if line[:1] == ["GPU0"] and "X" not in line), [])
        links: dict[tuple[int, int], int] = {}
        for name, *cells in filter(None, lines):
            for column, cell in zip(columns, cells, strict=False):
                if re.fullmatch(r"NV\d+", cell) and name.startswith("GPU") and column.startswith("GPU"):
                    links[int(name[3:]), int(column[3:])] = int(cell[2:])
        return links

    def ask(self, *arguments: str) -> str:
        """The answer; a lost GPU makes the exit code bad, but the others are listed all the same. Raises: SmiError."""
        what = f"nvidia-smi {' '.join(arguments)}"
        if arguments not in READS:
            raise AssertionError(f"{what} is not known to change nothing")
        try:
            done = subprocess.run(
                [self.program, *arguments],
                capture_output=True, text=True, errors="replace", check=False,
                timeout=_TIMEOUT_S, env=self._environment,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            raise SmiError(f"{what} cannot be run: {error}") from error
        if done.returncode != 0 and not re.search(r"GPU-[0-9a-f]{8}-", done.stdout):
            raise SmiError(f"{what} ended with code {done.returncode}: {done.stderr or done.stdout}")
        return done.stdout


def _details(gpu: ElementTree.Element) -> Facts:
    def known(path: str) -> str | None:
        return _known((gpu.findtext(path) or "").strip())

    cluster = known("fabric/clusterUUID") or known("fabric/clusterUuid")
    is_joined = known("fabric/state") == "Completed" and set(cluster or "") - set("0-")
    return {
        "minor": known("minor_number"),
        "fabric": f"{cluster} {known('fabric/cliqueId')}".lower() if is_joined else None,
        "architecture": known("product_architecture"),
        "brand": known("product_brand"),
        "addressing mode": known("addressing_mode"),
    }


def _known(text: str) -> str | None:
    return None if text in _UNKNOWN else text


def bus_id(text: str | None) -> str | None:
    """As the driver writes it, where it is one."""
    try:
        return None if text is None else pci_bus_id(text)
    except ValueError:
        return text
