"""Runs nvidia-smi with arguments that change nothing, and parses its answers."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

from dra_driver.model.ids import pci_bus_id

_TIMEOUT_S = 120
_QUERY_FIELDS = (
    "index", "name", "pci.bus_id", "memory.total", "driver_version", "mig.mode.current", "compute_cap", "serial",
)  # fmt: skip
_READ_ONLY = (
    ("-L",),
    ("-q", "-x"),
    ("topo", "-m"),
    ("nvlink", "-s"),
    ("mig", "-lgi"),
)
_QUERY = re.compile(r"--query-gpu=[a-z0-9_.,]+\Z")
_UNKNOWN = {"", "N/A", "[N/A]", "[Not Supported]", "Not Supported", "[Unknown Error]", "[GPU requires reset]"}

_GPU_LINE = re.compile(r"^GPU (\d+): (.+) \(UUID: (GPU-[^)]+)\)\s*$")
_MIG_LINE = re.compile(r"^\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)]+)\)\s*$")
_LINK_LINE = re.compile(r"^\s+Link (\d+): (.+?)\s*$")
_INSTANCE_LINE = re.compile(r"^\|\s+(\d+)\s+MIG (\S+)\s+(\d+)\s+(\d+)\s+(\d+):(\d+)\s+\|")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class SmiError(Exception):
    """nvidia-smi did not answer; the text is one line."""


@dataclass(frozen=True, slots=True)
class SmiMig:
    """A MIG device of the list."""

    uuid: str
    profile: str


@dataclass(slots=True)
class SmiGpu:
    """A GPU of the list, with its MIG devices by position."""

    index: int
    uuid: str
    name: str
    migs: list[SmiMig] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SmiInstance:
    """A GPU instance of `mig -lgi`; `gpu` is an index."""

    gpu: int
    profile: str
    profile_id: int
    instance: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class SmiDetails:
    """Facts of a GPU that only the XML has; None if it does not have one."""

    minor: int | None
    bus_id: str | None
    architecture: str | None
    brand: str | None
    addressing: str | None
    fabric: tuple[str, int] | None
    """(cluster UUID, clique) of a completed multi-node fabric"""


@dataclass(frozen=True, slots=True)
class Matrix:
    """`topo -m`: links between GPUs by index, such as `NV18` or `SYS`, and the NUMA node of each GPU."""

    links: dict[tuple[int, int], str]
    numa: dict[int, int]


def is_read_only(arguments: Sequence[str]) -> bool:
    """Whether nvidia-smi with these arguments only lists."""
    if tuple(arguments) in _READ_ONLY:
        return True
    form = "--format=csv,noheader,nounits"
    return len(arguments) == 2 and _QUERY.match(arguments[0]) is not None and arguments[1] == form


class NvidiaSmi:
    """The program at a path; `library_dir` is where it finds NVML if that is in no usual place."""

    def __init__(self, program: str, library_dir: str | None = None) -> None:
        self.program = program
        self._environment = {**os.environ, "LC_ALL": "C"}
        if library_dir is not None:
            self._environment["LD_LIBRARY_PATH"] = library_dir

    def gpus(self) -> list[SmiGpu]:
        """`nvidia-smi -L`. Raises: SmiError."""
        return parse_list(self._run("-L"))

    def query(self) -> tuple[dict[str, dict[str, str | None]], list[str]]:
        """Values by GPU UUID and field, and the fields that this version does not know. Raises: SmiError."""
        try:
            return self._query(_QUERY_FIELDS), []
        except SmiError:
            values: dict[str, dict[str, str | None]] = {}
            unknown = []
            for name in _QUERY_FIELDS:
                try:
                    answers = self._query((name,))
                except SmiError:
                    unknown.append(name)
                    continue
                for uuid, answer in answers.items():
                    values.setdefault(uuid, {}).update(answer)
            if not values:
                raise
            return values, unknown

    def details(self) -> dict[str, SmiDetails]:
        """The XML, by GPU UUID. Raises: SmiError."""
        try:
            return parse_xml(self._run("-q", "-x"))
        except ElementTree.ParseError as error:
            raise SmiError(f"nvidia-smi -q -x wrote no XML: {error}") from error

    def matrix(self) -> Matrix:
        """`topo -m`. Raises: SmiError."""
        return parse_matrix(self._run("topo", "-m"))

    def active_links(self) -> dict[str, int]:
        """`nvlink -s`: active links by GPU UUID. Raises: SmiError."""
        return parse_links(self._run("nvlink", "-s"))

    def instances(self) -> list[SmiInstance]:
        """`mig -lgi`. Raises: SmiError."""
        return parse_instances(self._run("mig", "-lgi"))

    def _query(self, names: Sequence[str]) -> dict[str, dict[str, str | None]]:
        answer = self._run(f"--query-gpu=uuid,{','.join(names)}", "--format=csv,noheader,nounits")
        rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]
        if any(len(row) != len(names) + 1 for row in rows):
            raise SmiError(f"{self.program} answered a query in a form that is not known")
        return {
            row[0]: {
                name: None if cell in _UNKNOWN else cell for name, cell in zip(names, row[1:], strict=True)
            }
            for row in rows
        }

    def _run(self, *arguments: str) -> str:
        """The answer; a lost GPU makes the exit code bad, but the others are listed all the same."""
        if not is_read_only(arguments):
            raise ValueError(f"nvidia-smi {' '.join(arguments)} is not known to change nothing")
        what = f"nvidia-smi {' '.join(arguments)}"
        try:
            done = subprocess.run(
                [self.program, *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                env=self._environment,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SmiError(f"{what} cannot be run: {' '.join(str(error).split())}") from error
        if done.returncode != 0 and not re.search(r"GPU-[0-9a-f]{8}-", done.stdout):
            said = " ".join((done.stderr or done.stdout).split())
            raise SmiError(f"{what} ended with code {done.returncode}: {said[:300]}")
        return done.stdout


def parse_list(text: str) -> list[SmiGpu]:
    """The answer of `-L`."""
    gpus: list[SmiGpu] = []
    for line in text.splitlines():
        gpu = _GPU_LINE.match(line)
        mig = _MIG_LINE.match(line)
        if gpu is not None:
            gpus.append(SmiGpu(int(gpu[1]), gpu[3], gpu[2]))
        elif mig is not None and gpus:
            gpus[-1].migs.append(SmiMig(mig[3], mig[1]))
    return gpus


def parse_xml(text: str) -> dict[str, SmiDetails]:
    """The answer of `-q -x`. Raises: ElementTree.ParseError."""
    return {
        uuid: _details(gpu)
        for gpu in ElementTree.fromstring(text).iter("gpu")
        if (uuid := _known(gpu, "uuid")) is not None
    }


def _details(gpu: ElementTree.Element) -> SmiDetails:
    minor = _known(gpu, "minor_number")
    bus_id = _known(gpu, "pci/pci_bus_id") or gpu.get("id")
    return SmiDetails(
        minor=int(minor) if minor is not None and minor.isdecimal() else None,
        bus_id=None if bus_id is None else pci_bus_id(bus_id),
        architecture=_known(gpu, "product_architecture"),
        brand=_known(gpu, "product_brand"),
        addressing=_known(gpu, "addressing_mode"),
        fabric=_fabric(gpu),
    )


def _fabric(gpu: ElementTree.Element) -> tuple[str, int] | None:
    cluster = _known(gpu, "fabric/clusterUUID") or _known(gpu, "fabric/clusterUuid")
    clique = _known(gpu, "fabric/cliqueId")
    completed = (_known(gpu, "fabric/state") or "").lower() == "completed"
    if not completed or cluster is None or clique is None or not clique.isdecimal():
        return None
    return (cluster.lower(), int(clique)) if set(cluster) - set("0-") else None


def _known(element: ElementTree.Element, path: str) -> str | None:
    text = (element.findtext(path) or "").strip()
    return None if text in _UNKNOWN else text


def parse_links(text: str) -> dict[str, int]:
    """The answer of `nvlink -s`: links that are not called inactive, by GPU UUID."""
    counts: dict[str, int] = {}
    uuid = ""
    for line in text.splitlines():
        gpu = _GPU_LINE.match(line)
        link = _LINK_LINE.match(line)
        if gpu is not None:
            uuid = gpu[3]
            counts[uuid] = 0
        elif link is not None and uuid:
            counts[uuid] += "inactive" not in link[2].lower() and link[2] not in _UNKNOWN
    return counts


def parse_instances(text: str) -> list[SmiInstance]:
    """The answer of `mig -lgi`."""
    rows = filter(None, map(_INSTANCE_LINE.match, text.splitlines()))
    return [
        SmiInstance(int(row[1]), row[2], int(row[3]), int(row[4]), int(row[5]), int(row[6])) for row in rows
    ]


def parse_matrix(text: str) -> Matrix:
    """The answer of `topo -m`; what cannot be read is left out."""
    lines = [_ESCAPE.sub("", line) for line in text.splitlines()]
    header = next((line.split() for line in lines if re.match(r"\s+GPU\d+", line)), [])
    columns = header[: header.index("CPU")] if "CPU" in header else header
    links: dict[tuple[int, int], str] = {}
    numa: dict[int, int] = {}
    for line in lines:
        name, *cells = line.split() or [""]
        if re.fullmatch(r"GPU\d+", name) is None or len(cells) < len(columns):
            continue
        index = int(name.removeprefix("GPU"))
        for column, cell in zip(columns, cells, strict=False):
            if re.fullmatch(r"GPU\d+", column) and column != name:
                links[index, int(column.removeprefix("GPU"))] = cell
        affinity = cells[len(columns) :]
        if "NUMA" in header and len(affinity) > 1 and affinity[1].isdecimal():
            numa[index] = int(affinity[1])
    return Matrix(links, numa)
