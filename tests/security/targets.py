"""Every function that reads bytes from a socket, a claim, a file, a program or a person, as a target for hypothesis.

Each returns for whatever the parser announces: it catches the errors that the parser's docstring names, and no others.
"""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from google.protobuf.message import DecodeError

from dra_driver.api.resolve import config_for_result
from dra_driver.api.resolve import decode as decode_parameters
from dra_driver.app import logs
from dra_driver.app.config_file import read_document
from dra_driver.app.settings import config_values
from dra_driver.base import bounded_program
from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.rules.spec import devices_of
from dra_driver.cli.checks.runtime import read_configs
from dra_driver.cli.validation.documents import read_documents
from dra_driver.cli.validation.rules.cel import NotJudgedError, SelectorError, view
from dra_driver.cli.validation.rules.selectors import compiled
from dra_driver.errors import (
    ApiRejectedError,
    ApiUnavailableError,
    ClaimRefusedError,
    DraDriverError,
    InvalidConfigError,
    NotSupportedError,
    StateError,
)
from dra_driver.host.driver_programs import NvidiaSmi
from dra_driver.host.gpu_nodes import MigCaps
from dra_driver.host.imex import ImexChannelNodes
from dra_driver.host.imex import settings as imex_settings
from dra_driver.host.rooted_tree import RootedTree
from dra_driver.host.sysfs import Sysfs
from dra_driver.journal.records import RECORD_FILE
from dra_driver.kube.api_errors import ApiErrors
from dra_driver.kube.claims import parse_allocated_claim, parse_claim_now
from dra_driver.kube.client import WatchStream
from dra_driver.kube.watch import version_after
from dra_driver.kubelet.dra import check_claims
from dra_driver.kubelet.pb import dra_v1_pb2, registration_pb2
from dra_driver.model.claim import ClaimRef
from dra_driver.model.driver_files import DriverPrograms
from dra_driver.model.ids import pci_bus_id
from dra_driver.model.units import format_bytes, parse_quantity
from dra_driver.mps_host import daemon_control as limits
from dra_driver.mps_host.host_files import DaemonRecords, MpsLayout

DRIVER = "gpu.nvidia.com"
UID = "6a1b2c3d-0000-4000-8000-000000000001"
GPU = "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"
CPU_S, CPU_S_PER_BYTE = 4.0, 50e-6
MEMORY, MEMORY_PER_BYTE = 32 << 20, 2_000
_DEPTH = 1000  # Python's own, as the driver has it
_BASE = Path("/base")
_SMI = DriverPrograms("/", {"nvidia-smi": "/nvidia-smi"}, "/bin")
_DEVICE = view(
    "a",
    {"attributes": {"type": {"string": "gpu"}, "version": {"version": "9.0.0"}, "list": {"strings": ["a"]}}},
)
_LONGEST_WAIT_S = 600.0
_LONGEST_ERROR = 2_000
_LONGEST_LOG_TEXT = 20_000

TARGETS: dict[str, Callable[[bytes, Path], object]] = {}
"""By name, which is that of its samples; a target may write below the directory. It returns what the parser read, and
nothing for an input that the parser refuses.
"""


def target(parse: Callable[[bytes, Path], object]) -> Callable[[bytes, Path], object]:
    TARGETS[parse.__name__.replace("_", "-")] = parse
    return parse


def require(holds: object, otherwise: str) -> None:
    """Raise AssertionError, which is a finding."""
    if not holds:
        raise AssertionError(otherwise)


def decoded(content: bytes) -> str:
    return content.decode(errors="replace")


@contextmanager
def bounded(size: int) -> Iterator[None]:
    """Raise AssertionError where the block takes more than an input of this size may take."""

    def late(*_: object) -> None:
        raise _TooLongError

    before, depth = signal.signal(signal.SIGVTALRM, late), sys.getrecursionlimit()
    sys.setrecursionlimit(_DEPTH)  # hypothesis raises it
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S + CPU_S_PER_BYTE * size)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    resident = _kib("VmRSS")
    try:
        yield
    except _TooLongError as error:
        raise AssertionError(f"too much work for {size} bytes") from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        sys.setrecursionlimit(depth)
    peak = (_kib("VmHWM") - resident) * 1024
    require(peak <= MEMORY + MEMORY_PER_BYTE * size, f"{peak} bytes of memory for an input of {size}")


def _kib(field: str) -> int:
    """A line of this process' status in /proc."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1])


class _TooLongError(BaseException):
    """No Exception, so that no parser takes it for one of its own."""


@target
def kubelet_message(content: bytes, _directory: Path) -> object:
    """What the kubelet's calls carry: accepted names stay below any directory that they are put into."""
    accepted: list[object] = []
    for message in (dra_v1_pb2.NodePrepareResourcesRequest, dra_v1_pb2.NodeUnprepareResourcesRequest):
        with suppress(DecodeError):
            request = message.FromString(content)
            refs, refused = check_claims(
                ClaimRef(claim.namespace, claim.name, claim.uid) for claim in request.claims
            )
            accepted += refs
            for ref in refs:
                for name in (ref.namespace, ref.name, ref.uid):
                    _check_below(_BASE / name, "an accepted claim reference")
            for uid, fault in refused.items():
                require(
                    fault and "\n" not in fault and len(fault) <= 1024,
                    f"the refusal of {uid[:50]!r} is no short line",
                )
            require(
                refused.keys().isdisjoint(ref.uid for ref in refs),
                "a claim is accepted and refused",
            )
    with suppress(DecodeError):
        registration_pb2.RegistrationStatus.FromString(content)
    with suppress(DecodeError):
        accepted += [registration_pb2.PluginInfo.FromString(content).type == "DRAPlugin"]
    return any(accepted)


def _check_below(path: Path, what: str) -> None:
    name = path.name
    require(
        path.parent == _BASE and name != ".." and "\0" not in name and len(name.encode()) <= 300,
        f"{what} leaves its directory: {str(path)!r}",
    )


@target
def claim(content: bytes, _directory: Path) -> object:
    """A claim as the API server sends it, whose allocation may hold anything."""
    allocation = _json(content)
    ref = ClaimRef("default", "claim", UID)
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"uid": UID},
            "spec": {"devices": {}}, "status": {"allocation": {"devices": allocation}}}  # fmt: skip
    if not isinstance(allocation, dict):
        return None
    found: list[object] = []
    with suppress(ClaimRefusedError):
        parsed = parse_allocated_claim(body, ref)
        for result in parsed.results:
            with suppress(InvalidConfigError):
                found.append(config_for_result(result, parsed.configs, DRIVER, "gpu"))
    return found


@target
def parameters(content: bytes, _directory: Path) -> object:
    """Opaque parameters: a value or a list of faults, each on one line."""
    try:
        return decode_parameters(_json(content))
    except InvalidConfigError as error:
        require(error.faults and "\n" not in str(error), f"faults {error.faults!r} of {str(error)!r}")
        return None


@target
def record(content: bytes, _directory: Path) -> object:
    """A claim record: what can be read is written and read again as the same."""
    with suppress(StateError):
        found = RECORD_FILE.read(content)
        again = RECORD_FILE.read(RECORD_FILE.write(found))
        require((again, again.claim.pods) == (found, found.claim.pods), "a record changes by being written")
        shown = "".join(f"{pod.name}{pod.uid}" for pod in found.claim.pods or ())
        require(shown.isascii() and shown.isprintable(), f"pods {shown!r} may move a cursor")
        return found
    return None


@target
def cdi_file(content: bytes, directory: Path) -> object:
    """CDI specs of this driver."""
    found = CdiDirectory(directory, DRIVER)
    found.file(UID).write_bytes(content)
    found.list()
    return devices_of(UID, found.read(UID))


@target
def mps_record(content: bytes, directory: Path) -> object:
    """The records of MPS daemons with a bad one among them."""
    (directory / "gpu-0.json").write_bytes(content)
    return DaemonRecords(MpsLayout(directory)).all()


@target
def mps_answer(content: bytes, _directory: Path) -> object:
    """What the control daemon says of its limits."""
    text = decoded(content)
    return [wanted for wanted in ("25 %", "4096 MiB") if limits.is_answer(wanted, text)]


@target
def nvidia_smi(content: bytes, _directory: Path) -> object:
    """What nvidia-smi says, with any exit code."""
    code = content[0] if content else 0
    said = content[1:].decode(errors="replace")
    with mock.patch.object(bounded_program, "run_program", return_value=(code, said)):
        try:
            NvidiaSmi(lambda: _SMI).set_time_slice(GPU, 1)
        except DraDriverError as error:
            return said in str(error) or isinstance(error, NotSupportedError)
    return code == 0


@target
def proc(content: bytes, directory: Path) -> object:
    """Files of the kernel and of the driver in /proc, and of PCI functions in /sys."""
    access = directory / "driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access"
    access.parent.mkdir(parents=True)
    for path in (directory / "devices", access.parent.parent / "access", access):
        path.write_bytes(content)
    caps, sysfs = MigCaps(str(directory)), Sysfs(str(directory), str(directory))
    found: list[object] = []
    with suppress(DraDriverError):
        for node in caps.nodes(0, 1, 0):
            found.append(node)
            require(
                node.path.removeprefix("/dev/nvidia-caps/nvidia-cap").isdecimal(),
                f"a node anywhere: {node.path!r}",
            )
    found.append(caps.majors())
    imex = ImexChannelNodes(str(directory))
    (directory / "driver/nvidia/params").write_bytes(content)
    found.append(imex.count())
    with suppress(DraDriverError):
        imex.nodes(0)
    for name in imex_settings(decoded(content)):
        require(name.startswith("IMEX_CMD_"), f"a setting of another kind: {name!r}")
        found.append(name)
    function = directory / "bus/pci/devices/0000:1b:00.0"
    function.mkdir(parents=True)
    for name in ("vendor", "device", "class", "numa_node"):
        (function / name).write_bytes(content)
    sysfs.nvidia_functions()
    sysfs.numa_node(function.name)
    return any(found)


@target
def runtime_config(content: bytes, host: Path) -> object:
    """The configuration of the container runtimes, which `doctor` reads."""
    for name in ("containerd/config.toml", "containerd/more.toml", "crio/crio.conf"):
        file = host / "etc" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    found = []
    with suppress(Exception):  # `doctor` reports any error as a failed check
        found = list(read_configs(RootedTree(str(host))))
    for config in found:
        require(
            (host / config.file.lstrip("/")).resolve().is_relative_to(host.resolve()),
            f"a file outside: {config.file}",
        )
    return found


@target
def config_file(content: bytes, directory: Path) -> object:
    """The administrator's file."""
    path = directory / "config.yaml"
    path.write_bytes(content)
    with suppress(InvalidConfigError):
        return config_values(read_document(path), path)
    return None


@target
def quantity(content: bytes, _directory: Path) -> object:
    """Numbers with suffixes, and bus IDs."""
    text = decoded(content)
    found: list[object] = []
    with suppress(InvalidConfigError):
        value = parse_quantity(text)
        found.append(text)
        require(len(format_bytes(value)) <= 200, "a quantity that grows")
    with suppress(ValueError):
        found.append(pci_bus_id(text))
    return found


@target
def api_refusal(content: bytes, _directory: Path) -> object:
    """A failed request: a line of status code and Retry-After, then the body of the API server or of a proxy."""
    head, _, body = content.partition(b"\n")
    code, _, retry_after = head.decode("latin-1").partition(" ")
    response = mock.Mock(status=int(code) if code.isdecimal() and len(code) < 4 else 503, data=body)
    response.reason, response.headers = "a reason", {"Retry-After": retry_after}
    try:
        ApiErrors("try").check_status(response, response.data)
    except ApiUnavailableError as error:
        _check_error(error)
        require(
            bool(0 <= (error.retry_after_s or 0) <= _LONGEST_WAIT_S), f"a wait of {error.retry_after_s} s"
        )
        return "503" not in head.decode("latin-1") or error.retry_after_s
    except ApiRejectedError as error:
        _check_error(error)
        return error.status == int(code)
    return None


def _check_error(error: Exception) -> None:
    require(
        "\n" not in str(error) and len(str(error)) <= _LONGEST_ERROR, f"no short line: {str(error)[:100]!r}"
    )


@target
def api_claim(content: bytes, _directory: Path) -> object:
    """The object that is there now under the name of a claim."""
    with suppress(ApiUnavailableError), ApiErrors("look").mapped():
        found = json.loads(content)
        if isinstance(found, dict):
            return parse_claim_now(found, ClaimRef("default", "claim", "uid")).allocated
    return None


@target
def api_watch(content: bytes, _directory: Path) -> object:
    """The body of a watch, cut into pieces anywhere."""
    body = io.BytesIO(content)
    response = mock.Mock(read1=lambda _size: body.read(1024))
    stream = WatchStream(response, ApiErrors("watch"))
    versions: list[object] = []
    with suppress(ApiUnavailableError, ApiRejectedError):
        for event in stream:
            versions.append(version_after("1", event))
    return versions


@target
def documents(content: bytes, directory: Path) -> object:
    """YAML for `validate`: what is taken can be written out."""
    path = directory / "some.yaml"
    path.write_bytes(content)
    found: list[object] = []
    with suppress(InvalidConfigError):
        for document in read_documents([str(path)]):
            found.append(document)
            _ = document.place, document.name
            with suppress(TypeError, ValueError, RecursionError):
                json.dumps(document.content)
    return found


@target
def selector(content: bytes, _directory: Path) -> object:
    """CEL of selectors, for a device."""
    text = decoded(content)
    with suppress(InvalidConfigError, NotJudgedError, SelectorError):
        return (compiled(text).matches(_DEVICE),)
    return None


@target
def log_text(content: bytes, _directory: Path) -> object:
    """A logged text of any origin: a line of limited length."""
    text = decoded(content)
    shown = logs._clean(None, "info", {"event": "told", "text": text, "more": [text, {"a": text}]})
    for line in (shown["text"], shown["more"][0], shown["more"][1]["a"]):
        require("\n" not in line and len(line) <= _LONGEST_LOG_TEXT, "a long line, or several")
    return shown["text"] != text


def _json(content: bytes) -> Any:
    """The JSON in the bytes; None where there is none, as gRPC and HTTP clients would refuse it before."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
