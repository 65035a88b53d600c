"""Hostile names from outside: no path leaves its directory, and nothing moves the cursor of a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given

from dra_driver.api.config import GROUP_VERSION
from dra_driver.api.resolve import decode
from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.metadata_files import MetadataFiles
from dra_driver.cdi.rules.metadata import check_names, container_path
from dra_driver.cli.main import main
from dra_driver.errors import DraDriverError, InvalidConfigError
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.locks import GpuLocks
from dra_driver.journal.records import RecordStore
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceResult
from dra_driver.model.mig import OwnedInstance, Placement
from dra_driver.model.record import ClaimRecord
from dra_driver.mps_host.host_files import DaemonRecords, MpsLayout
from tests.security.test_fuzz import names

DRIVER = "gpu.nvidia.com"
LINK = "leads-out"
SPEC = {"cdiVersion": "0.5.0", "containerEdits": {}, "devices": []}


def attempts(base: Path, ref: ClaimRef, request: str, device: str) -> Iterator[Callable[[], object]]:
    """Everything that makes a path from a name and then writes, reads or removes."""
    claim = AllocatedClaim(
        ref, (DeviceResult(request, DRIVER, "node", device),), pod_claim_name=request or None
    )
    records = RecordStore(base / "claims")
    ledger = Ledger(base / "ledger", records, "boot")
    specs, metadata = CdiDirectory(base / "cdi", DRIVER), MetadataFiles(base, base / "cdi", DRIVER)
    daemons, gpus = DaemonRecords(MpsLayout(base / "mps")), GpuLocks(base / "locks")
    owned = OwnedInstance(device, device, None, 19, "1g", Placement(0, 1), "boot", "created", 1, 0, None, 0)
    yield lambda: records.save(ClaimRecord(claim, "prepared", "boot", (), ()), durable=False)
    yield lambda: records.get(ref.uid)
    yield lambda: records.delete(ref.uid)
    yield lambda: specs.write(ref.uid, SPEC)
    yield lambda: specs.remove(ref.uid)
    yield lambda: metadata.write(claim, request, lambda _generation: b"{}")
    yield lambda: metadata.remove(ref)
    yield lambda: ledger.save(owned)
    yield lambda: ledger.remove(owned)
    yield lambda: daemons.forget(device)
    yield lambda: take_and_leave(gpus, device)


def take_and_leave(locks: GpuLocks, gpu_uuid: str) -> None:
    with locks.hold({gpu_uuid}, 0.0):
        pass


def outside(root: Path, base: Path) -> dict[str, bytes | None]:
    """The files next to the driver's directories."""
    found = (path for path in root.rglob("*") if not path.is_relative_to(base))
    return {str(path): path.read_bytes() if path.is_file() else None for path in found}


def test_no_name_reads_writes_or_removes_outside(make_memory_path: Callable[[], Path]) -> None:
    root = make_memory_path()
    base = root / "plugin"
    for name in ("claims", "ledger", "cdi", "mps", "locks"):
        (base / name).mkdir(parents=True)
        # A link that a name alone must not follow.
        (base / name / LINK).symlink_to(root / "elsewhere")
    for name in ("victim", "victim.json", "elsewhere/victim", "elsewhere/victim.json"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("precious")
    before = outside(root, base)
    done = set()

    @given(names, names, names, names, names)
    def check(namespace: str, name: str, uid: str, request: str, device: str) -> None:
        for number, attempt in enumerate(attempts(base, ClaimRef(namespace, name, uid), request, device)):
            with suppress(DraDriverError):
                attempt()
                done.add(number)
        assert outside(root, base) == before
        results = (DeviceResult(request, DRIVER, "node", device),)
        claim = AllocatedClaim(ClaimRef(namespace, name, uid), results, (), request or None)
        with suppress(DraDriverError):
            check_names(claim)
            assert "/../" not in container_path(claim, request, DRIVER)
        with suppress(DraDriverError):
            assert MpsLayout(base).directory(device).parent == base

    check()
    good = ClaimRef("default", "claim", "6a1b2c3d-0000-4000-8000-000000000001")
    for number, attempt in enumerate(attempts(base, good, "gpu", "gpu-0")):
        attempt()
        done.add(number)
    assert outside(root, base) == before
    assert len(done) == 11, "each of them works with good names"


EVIL = "a\x1b[2J\x9b\u202e: is fine; sharing"
"""Clears a terminal, reverses a line, and looks like one of our faults."""
SHOWN = '"a\\u001b[2J??: is fine; sharing"'


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({EVIL: 1}, f"{SHOWN}: unknown field"),
        ({"sharing": {"strategy": "MPS", EVIL: 1}}, f"sharing.{SHOWN}: unknown field"),
        (
            {"sharing": {"strategy": "MPS", "mpsConfig": {EVIL: 1}}},
            f"sharing.mpsConfig.{SHOWN}: unknown field",
        ),
    ],
)
def test_field_names_are_quoted_in_what_a_claim_is_refused_with(
    fields: dict[str, object], fault: str
) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        decode({"apiVersion": GROUP_VERSION, "kind": "GpuConfig", **fields})
    assert str(caught.value) == f"GpuConfig is not valid: {fault}"


Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command in this process; returns the exit code and the whole output."""

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return int(ended.value.code or 0), "".join(capsys.readouterr())

    return run


def test_names_do_not_move_the_cursor_of_who_validates_them(tmp_path: Path, call: Call) -> None:
    manifest = tmp_path / "manifest.yaml"
    parameters = {"apiVersion": GROUP_VERSION, "kind": "GpuConfig", EVIL: EVIL}
    requests = [{"name": EVIL, "exactly": {"deviceClassName": EVIL, EVIL: 1}}]
    documents = [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": EVIL, "namespace": EVIL},
            "spec": {
                "devices": {
                    "requests": requests,
                    "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}],
                }
            },
        },
        {"apiVersion": EVIL, "kind": EVIL, "metadata": {"name": EVIL}},
        {EVIL: EVIL, "sharing": {EVIL: {}}},
    ]
    manifest.write_text(yaml.safe_dump_all(documents))
    code, shown = call("validate", str(manifest))
    assert code == 1
    assert f"ResourceClaim {SHOWN}/{SHOWN}" in " ".join(shown.split())
    assert_harmless(shown)


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate", EVIL],
        ["inspect", "--simulate", EVIL],
        ["inspect", f"--{EVIL}"],
        [EVIL],
        ["cluster", "--kubeconfig", EVIL],
        ["cluster", f"--namespace={EVIL}"],
        ["run", "--config", EVIL],
    ],
)
def test_errors_do_not_move_the_cursor(arguments: list[str], call: Call) -> None:
    code, shown = call(*arguments)
    assert code
    assert_harmless(shown)


def test_a_configuration_file_does_not_move_the_cursor(tmp_path: Path, call: Call) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({EVIL: 1, "sharing": {EVIL: EVIL}, "driverName": EVIL}))
    code, shown = call("inspect", "--simulate", "dgx-h100", "--config", str(file))
    assert code == 2
    assert_harmless(shown)


def assert_harmless(shown: str) -> None:
    assert shown
    assert all(map(str.isprintable, shown.splitlines())), shown
