"""The fuzz targets: every function that reads bytes from a socket, a claim, a file or a program.

Each target catches the errors that the function's docstring names, and no others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from google.protobuf.message import DecodeError

from dra_driver.api.decode import decode as decode_parameters
from dra_driver.api.resolve import config_for_result
from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.metadata_files import MetadataFiles
from dra_driver.cdi.rules.metadata import cdi_file, check_names, container_path, directory_name, requests_of
from dra_driver.cdi.rules.spec import file_stem
from dra_driver.diagnostics.doctor.runtime import RuntimeChecks, read_configs
from dra_driver.errors import (
    ClaimRefusedError,
    DraDriverError,
    InvalidConfigError,
    PermanentError,
    StateError,
)
from dra_driver.health import store as healthstore
from dra_driver.host import nvidia_smi
from dra_driver.host.imex import ImexChannelNodes
from dra_driver.host.imex import settings as imex_settings
from dra_driver.host.mig_caps import MigCaps
from dra_driver.host.sysfs import Sysfs
from dra_driver.journal import record_codec as codec
from dra_driver.journal import records
from dra_driver.journal.claim_locks import ClaimLocks
from dra_driver.journal.records import RecordStore
from dra_driver.kube.claims import parse_allocated_claim
from dra_driver.kube.convert import from_version, to_version
from dra_driver.kubelet.claim_check import check_claims
from dra_driver.kubelet.pb import dra_v1_pb2, registration_pb2
from dra_driver.mig import ledger
from dra_driver.mig.ledger import MigLedger
from dra_driver.model.claim import AllocatedClaim, ClaimRef
from dra_driver.model.driver_programs import DriverPrograms
from dra_driver.model.ids import is_dns_label, pci_bus_id
from dra_driver.model.units import format_bytes, parse_quantity
from dra_driver.mps import limit_commands as limits
from dra_driver.mps import protocol
from dra_driver.mps.layout import MpsLayout
from dra_driver.mps.records import DaemonRecords
from dra_driver.settings import read_config_file
from fuzz import answers, samples
from fuzz.loop import Target
from fuzz.samples import DEVICE, DRIVER, GPU, UID

Json = dict[str, Any]
Parser = Callable[[bytes], object]

BASE = Path("/base")
SMI = DriverPrograms("/", {"nvidia-smi": "/nvidia-smi"}, "/bin")


def targets(scratch: Path) -> tuple[Target, ...]:
    """All of them; those that read files get directories of their own below `scratch`."""
    parsers: dict[str, Parser] = {
        "kubelet-message": kubelet_message,
        "claim-names": claim_names,
        "claim": claim_object,
        "parameters": parameters,
        "record": record,
        "record-file": record_file(_made(scratch / "claims")),
        "ledger-file": ledger_file(_made(scratch / "mig")),
        "health-file": health_file,
        "lock-file": lock_file(_made(scratch / "locks")),
        "cdi-file": cdi_spec_file(_made(scratch / "cdi"), ".json"),
        "cdi-file-yaml": cdi_spec_file(_made(scratch / "cdi"), ".yaml"),
        "metadata-file": metadata_file(_made(scratch / "metadata")),
        "mps-record": mps_record(_made(scratch / "mps")),
        "mps-message": mps_message,
        "mps-answer": mps_answer,
        "nvidia-smi": smi_output,
        "proc": proc(_made(scratch / "proc")),
        "runtime-config": runtime_config(_made(scratch / "host")),
        "config-file": config_file(_made(scratch / "settings")),
        "quantity": quantity,
        **answers.parsers(scratch),
    }
    return tuple(Target(name, samples.seeds(name), parser) for name, parser in parsers.items())


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def kubelet_message(content: bytes) -> None:
    """What the kubelet's calls carry: accepted names stay below any directory that they are put into."""
    for message in (dra_v1_pb2.NodePrepareResourcesRequest, dra_v1_pb2.NodeUnprepareResourcesRequest):
        with suppress(DecodeError):
            request = message.FromString(content)
            checked = check_claims(
                ClaimRef(claim.namespace, claim.name, claim.uid) for claim in request.claims
            )
            for ref in checked.accepted:
                for name in (ref.namespace, ref.name, ref.uid):
                    _check_below(BASE / name, "an accepted claim reference")
            for uid, fault in checked.refused.items():
                if not fault or "\n" in fault or len(fault) > 1024:
                    raise AssertionError(f"the refusal of {uid[:50]!r} is no short line")
            if {ref.uid for ref in checked.accepted} & checked.refused.keys():
                raise AssertionError("a claim is accepted and refused")
    with suppress(DecodeError):
        registration_pb2.RegistrationStatus.FromString(content)


def claim_names(content: bytes) -> None:
    """Names as any other part of the driver would put them into paths, past the check at the socket."""
    namespace, name, uid, request, pod_claim, *_ = [*content.decode(errors="replace").split("\n"), *[""] * 5]
    ref = ClaimRef(namespace, name, uid)
    held = {"request": request, "driver": DRIVER, "pool": "node", "device": "gpu-0"}
    body = {"metadata": {"uid": uid}, "status": {"allocation": {"devices": {"results": [held]}}}}
    claim = parse_allocated_claim(body, ref)
    with suppress(ClaimRefusedError):
        _check_below(BASE / f"{file_stem(DRIVER, uid)}.json", "a CDI spec")
    with suppress(StateError):
        _check_below(BASE / f"{records._checked(uid)}.json", "a claim record")
    with suppress(PermanentError):
        _check_below(MpsLayout(BASE).record(name), "an MPS record")
    with suppress(PermanentError):
        _check_below(MpsLayout(BASE).directory(name), "an MPS directory")
    with suppress(StateError):
        _check_below(BASE / f"{ledger._checked_device(name)}.json", "a ledger entry")
    with suppress(StateError):
        _check_below(BASE / f"{ledger._mode_name(uid)}.json", "the ledger of a MIG mode")
    with suppress(ClaimRefusedError):
        _check_metadata_paths(AllocatedClaim(ref, claim.results, (), pod_claim or None))


def _check_metadata_paths(claim: AllocatedClaim) -> None:
    check_names(claim)
    _check_below(BASE / directory_name(claim.ref), "a metadata directory")
    for request in requests_of(claim):
        _check_below(BASE / request, "a directory of a request")
        _check_below(BASE / cdi_file(DRIVER, claim.ref.uid, request), "a metadata CDI spec")
        inside = container_path(claim, request, DRIVER)
        if "/../" in inside or inside.count("/") != 8:
            raise AssertionError(f"a container path leads elsewhere: {inside!r}")


def _check_below(path: Path, what: str) -> None:
    name = path.name
    if (
        path.parent != BASE
        or name in ("", ".", "..")
        or "/" in name
        or "\0" in name
        or len(name.encode()) > 300
    ):
        raise AssertionError(f"{what} leaves its directory: {str(path)!r}")


def claim_object(content: bytes) -> None:
    """A claim as the API server sends it, whose allocation may hold anything."""
    allocation = _json(content)
    ref = ClaimRef("default", "claim", UID)
    body = {"apiVersion": "resource.k8s.io/v1beta1", "kind": "ResourceClaim", "metadata": {"uid": UID},
            "spec": {"devices": {}}, "status": {"allocation": {"devices": allocation}}}  # fmt: skip
    if not isinstance(allocation, dict):
        return
    with suppress(ClaimRefusedError):
        claim = parse_allocated_claim(from_version(to_version(body, "v1beta1")), ref)
        for result in claim.results:
            with suppress(InvalidConfigError):
                config_for_result(result, claim.configs, DRIVER, "gpu")


def parameters(content: bytes) -> None:
    """Opaque parameters: a value or a list of faults, each on one line."""
    try:
        decode_parameters(_json(content))
    except InvalidConfigError as error:
        if not error.faults or "\n" in str(error):
            raise AssertionError(f"faults {error.faults!r} of {str(error)!r}") from error


def record(content: bytes) -> None:
    """A claim record: what can be read is written and read again as the same."""
    with suppress(StateError):
        found = codec.decode(content)
        again = codec.decode(codec.encode(found))
        if (again, again.claim.pods) != (found, found.claim.pods):
            raise AssertionError("a record changes by being written")
        shown = "".join(f"{pod.name}{pod.uid}" for pod in found.claim.pods or ())
        if not (shown.isascii() and shown.isprintable()):
            raise AssertionError(f"pods {shown!r} may move a cursor")


def record_file(directory: Path) -> Parser:
    def parse(content: bytes) -> None:
        """The directory of records with one bad file in it."""
        store = RecordStore(directory)
        with _file(directory, f"{UID}.json", content):
            store.all()
            store.get(UID)

    return parse


def ledger_file(directory: Path) -> Parser:
    def parse(content: bytes) -> None:
        """The MIG ledger with a bad entry and a bad mode in it."""
        with _file(directory, f"{DEVICE}.json", content), _file(directory, f"mode-{GPU}.json", content):
            kept = MigLedger(directory)
            if any(not is_dns_label(device) for device in kept.all()):
                raise AssertionError("a device of any name")
            kept.owned_modes()
            kept.owned_lately("boot")

    return parse


def health_file(content: bytes) -> None:
    """What is remembered of the GPUs' health."""
    with suppress(StateError):
        kept = healthstore.decode(content)
        healthstore.decode(healthstore.encode(kept))


def lock_file(directory: Path) -> Parser:
    def parse(content: bytes) -> None:
        """A lock file, which remembers what was unprepared."""
        locks = ClaimLocks(directory)
        for path in directory.glob("*.lock"):
            path.write_bytes(content)
        with locks.hold(UID, 1.0) as turn:
            turn.was_unprepared_since(0)
            turn.note_unprepared()

    with ClaimLocks(directory).hold(UID, 1.0):
        return parse


def cdi_spec_file(directory: Path, suffix: str) -> Parser:
    def parse(content: bytes) -> None:
        """CDI specs of this driver and of others."""
        found = CdiDirectory(directory, DRIVER)
        with _file(directory, f"{file_stem(DRIVER, UID)}{suffix}", content):
            found.list()
            found.read(UID)
            RuntimeChecks(str(directory), None).specs()

    return parse


def metadata_file(directory: Path) -> Parser:
    def parse(content: bytes) -> None:
        """The files that describe devices to containers."""
        place = directory / "dra-device-metadata/default_claim/gpu"
        place.mkdir(parents=True, exist_ok=True)
        (place / "metadata.json").write_bytes(content)
        MetadataFiles(directory, directory / "cdi", DRIVER).forget(UID)

    return parse


def mps_record(directory: Path) -> Parser:
    def parse(content: bytes) -> None:
        """The records of MPS daemons with a bad one among them."""
        with _file(directory, "gpu-0.json", content):
            DaemonRecords(MpsLayout(directory)).load()

    return parse


def mps_message(content: bytes) -> None:
    """Both sides of the conversation with the MPS host; what is understood can be said again."""
    with suppress(DraDriverError):
        protocol.decode_reply(content)
    with suppress(protocol.ProtocolError):
        request = protocol.decode_request(content)
        if protocol.decode_request(protocol.encode_request(request)) != request:
            raise AssertionError("a request changes by being said again")
        if isinstance(request, protocol.Ensure):
            with suppress(PermanentError):
                limits.check_spec(request.spec)
                _check_one_line(limits.limit_commands(request.spec))


def _check_one_line(commands: tuple[tuple[str, str, str], ...]) -> None:
    for setter, getter, _ in commands:
        if "\n" in setter or "\n" in getter:
            raise AssertionError("a command for the control daemon has two lines")


def mps_answer(content: bytes) -> None:
    """What the control daemon says of its limits."""
    text = content.decode(errors="replace")
    for wanted in ("25 %", "4096 MiB"):
        limits.is_answer(wanted, text)


def smi_output(content: bytes) -> None:
    """What nvidia-smi says, with any exit code."""
    code = content[0] if content else 0
    said = content[1:].decode(errors="replace")
    with mock.patch.object(nvidia_smi, "run_program", return_value=(code, said)), suppress(DraDriverError):
        nvidia_smi.NvidiaSmi(lambda: SMI).set_time_slice(GPU, 1)


def proc(directory: Path) -> Parser:
    access = directory / "driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access"
    access.parent.mkdir(parents=True, exist_ok=True)

    def parse(content: bytes) -> None:
        """Files of the kernel and of the driver in /proc, and of PCI functions in /sys."""
        for path in (directory / "devices", directory / "meminfo", access.parent.parent / "access", access):
            path.write_bytes(content)
        caps, sysfs = MigCaps(str(directory)), Sysfs(str(directory), str(directory))
        with suppress(DraDriverError):
            for node in caps.nodes(0, 1, 0):
                if not node.path.removeprefix("/dev/nvidia-caps/nvidia-cap").isdecimal():
                    raise AssertionError(f"a node anywhere: {node.path!r}")
        caps.majors()
        imex = ImexChannelNodes(str(directory))
        (directory / "driver/nvidia/params").write_bytes(content)
        imex.count()
        with suppress(DraDriverError):
            imex.nodes(0)
        for name in imex_settings(content.decode(errors="replace")):
            if not name.startswith("IMEX_CMD_"):
                raise AssertionError(f"a setting of another kind: {name!r}")
        function = directory / "bus/pci/devices/0000:1b:00.0"
        function.mkdir(parents=True, exist_ok=True)
        for name in ("vendor", "device", "class", "numa_node"):
            (function / name).write_bytes(content)
        sysfs.nvidia_functions()
        sysfs.numa_node(function.name)

    return parse


def runtime_config(host: Path) -> Parser:
    files = [
        host / "etc/containerd/config.toml",
        host / "etc/containerd/more.toml",
        host / "etc/crio/crio.conf",
    ]

    def parse(content: bytes) -> None:
        """The configuration of the container runtimes, which `doctor` reads."""
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        found = []
        with suppress(Exception):  # `doctor` tells any error as a check that failed
            found = list(read_configs(str(host)))
        for config in found:
            if not (host / config.file.lstrip("/")).resolve().is_relative_to(host.resolve()):
                raise AssertionError(f"a file outside: {config.file}")

    return parse


def config_file(directory: Path) -> Parser:
    def parse(content: bytes) -> None:
        """The administrator's file."""
        path = directory / "config.yaml"
        path.write_bytes(content)
        with suppress(InvalidConfigError):
            read_config_file(path)

    return parse


def quantity(content: bytes) -> None:
    """Numbers with suffixes, and bus IDs."""
    text = content.decode(errors="replace")
    with suppress(InvalidConfigError):
        value = parse_quantity(text)
        if len(format_bytes(value)) > 200:
            raise AssertionError("a quantity that grows")
    with suppress(ValueError):
        pci_bus_id(text)


class _file:  # noqa: N801 - used like a function
    """A file for the length of a `with`; what it was renamed to goes as well."""

    def __init__(self, directory: Path, name: str, content: bytes) -> None:
        self._path = directory / name
        self._content = content

    def __enter__(self) -> None:
        self._path.write_bytes(self._content)

    def __exit__(self, *_: object) -> None:
        for left in self._path.parent.glob(f"{self._path.name}*"):
            left.unlink()


def _json(content: bytes) -> Any:
    """The JSON in the bytes; None where there is none, as gRPC and HTTP clients would refuse it before."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
