"""Runs nvidia-smi with arguments that change nothing, and parses its answers."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

from dra_driver.model.ids import pci_bus_id

_TIMEOUT_S = 120
_FIELDS = ("name", "pci.bus_id", "memory.total", "driver_version", "mig.mode.current", "compute_cap")


def _query(names: Sequence[str]) -> tuple[str, ...]:
    return (f"--query-gpu=uuid,{','.join(names)}", "--format=csv,noheader,nounits")


READS: frozenset[tuple[str, ...]] = frozenset(
    {
        ("-L",), ("-q", "-x"), ("topo", "-m"), ("nvlink", "-s"), ("mig", "-lgi"),
        _query(_FIELDS), *(_query([name]) for name in _FIELDS),
    }
)  # fmt: skip
"""The only arguments with which nvidia-smi is run."""
_UNKNOWN = {"", "N/A", "[N/A]", "[Not Supported]", "Not Supported", "[Unknown Error]", "[GPU requires reset]"}
_GPU_LINE = re.compile(r"^GPU (\d+): (.+) \(UUID: (GPU-[^)]+)\)\s*$")
_MIG_LINE = re.compile(r"^\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)]+)\)\s*$")
_LINK_LINE = re.compile(r"^\s+Link (\d+): (.+?)\s*$")
_INSTANCE_LINE = re.compile(r"^\|\s+(\d+)\s+MIG (\S+)\s+(\d+)\s+(\d+)\s+(\d+):(\d+)\s+\|", re.MULTILINE)
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
        self.said: dict[str, str] = {}
        self._environment = {**os.environ, "LC_ALL": "C"}
        if library_dir is not None:
            self._environment["LD_LIBRARY_PATH"] = library_dir

    def gpus(self, *arguments: str) -> list[SmiGpu]:
        """`-L`, or `nvlink -s` with the links. Raises: SmiError."""
        gpus: list[SmiGpu] = []
        for line in self.ask(*(arguments or ("-L",))).splitlines():
            if gpu := _GPU_LINE.match(line):
                gpus.append(SmiGpu(int(gpu[1]), gpu[3]))
            elif gpus and (mig := _MIG_LINE.match(line)):
                gpus[-1].migs.append((mig[3], mig[1]))
            elif gpus and (link := _LINK_LINE.match(line)):
                gpus[-1].links += "inactive" not in link[2].lower() and link[2] not in _UNKNOWN
        return gpus

    def query(self) -> tuple[dict[str, Facts], list[str]]:
        """Values by GPU UUID and field, and the fields that this version does not know. Raises: SmiError."""
        try:
            return self._asked(_FIELDS), []
        except SmiError:
            values: dict[str, Facts] = {}
            unknown = []
            for name in _FIELDS:
                try:
                    for uuid, answer in self._asked([name]).items():
                        values.setdefault(uuid, {}).update(answer)
                except SmiError:
                    unknown.append(name)
            if not values:
                raise
            return values, unknown

    def details(self) -> dict[str, Facts]:
        """What only the XML has, by GPU UUID. Raises: SmiError."""
        try:
            gpus = ElementTree.fromstring(self.ask("-q", "-x")).iter("gpu")
        except ElementTree.ParseError as error:
            raise SmiError(f"nvidia-smi -q -x wrote no XML: {error}") from error
        return {gpu.findtext("uuid", ""): _details(gpu) for gpu in gpus}

    def instances(self) -> list[tuple[int, tuple[int, int, int, int]]]:
        """`mig -lgi`: (GPU index, (GPU instance, profile, start, size)) of each. Raises: SmiError."""
        rows = _INSTANCE_LINE.findall(self.ask("mig", "-lgi"))
        return [
            (int(gpu), (int(instance), int(profile), int(start), int(size)))
            for gpu, _, profile, instance, start, size in rows
        ]

    def matrix(self) -> tuple[dict[tuple[int, int], int], dict[int, int]]:
        """`topo -m`: NVLinks between GPUs by index, and the NUMA node of each GPU. Raises: SmiError."""
        lines = [_ESCAPE.sub("", line) for line in self.ask("topo", "-m").splitlines()]
        header = next((line.split() for line in lines if re.match(r"\s+GPU\d+", line)), [])
        columns = header[: header.index("CPU")] if "CPU" in header else header
        links: dict[tuple[int, int], int] = {}
        numa: dict[int, int] = {}
        for line in lines:
            name, *cells = line.split() or [""]
            if re.fullmatch(r"GPU\d+", name) is None or len(cells) < len(columns):
                continue
            index = int(name.removeprefix("GPU"))
            for column, cell in zip(columns, cells, strict=False):
                if column.startswith("GPU") and re.fullmatch(r"NV\d+", cell):
                    links[index, int(column.removeprefix("GPU"))] = int(cell.removeprefix("NV"))
            affinity = cells[len(columns) :]
            if "NUMA" in header and len(affinity) > 1 and affinity[1].isdecimal():
                numa[index] = int(affinity[1])
        return links, numa

    def _asked(self, names: Sequence[str]) -> dict[str, Facts]:
        lines = self.ask(*_query(names)).splitlines()
        rows = [[cell.strip() for cell in line.split(",")] for line in lines if line.strip()]
        if any(len(row) != len(names) + 1 for row in rows):
            raise SmiError(f"{self.program} answered a query in a form that is not known")
        return {row[0]: dict(zip(names, map(_known, row[1:]), strict=True)) for row in rows}

    def ask(self, *arguments: str) -> str:
        """The answer; a lost GPU makes the exit code bad, but the others are listed all the same. Raises: SmiError."""
        what = f"nvidia-smi {' '.join(arguments)}"
        if arguments not in READS:
            raise AssertionError(f"{what} is not known to change nothing")
        command = [self.program, *arguments]
        options: Mapping[str, object] = {"timeout": _TIMEOUT_S, "env": self._environment, "errors": "replace"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
        except (OSError, subprocess.SubprocessError) as error:
            raise SmiError(f"{what} cannot be run: {' '.join(str(error).split())}") from error
        self.said[what] = done.stdout + done.stderr
        if done.returncode != 0 and not re.search(r"GPU-[0-9a-f]{8}-", done.stdout):
            said = " ".join((done.stderr or done.stdout).split())
            raise SmiError(f"{what} ended with code {done.returncode}: {said[:300]}")
        return str(done.stdout)


def _details(gpu: ElementTree.Element) -> Facts:
    def known(path: str) -> str | None:
        return _known((gpu.findtext(path) or "").strip())

    bus = known("pci/pci_bus_id") or gpu.get("id")
    cluster = known("fabric/clusterUUID") or known("fabric/clusterUuid")
    is_joined = known("fabric/state") == "Completed" and set(cluster or "") - set("0-")
    return {
        "minor": known("minor_number"),
        "PCI bus ID": None if bus is None else pci_bus_id(bus),
        "fabric": f"{cluster} {known('fabric/cliqueId')}".lower() if is_joined else None,
        "architecture": known("product_architecture"),
        "brand": known("product_brand"),
        "addressing mode": known("addressing_mode"),
    }


def _known(text: str) -> str | None:
    return None if text in _UNKNOWN else text
