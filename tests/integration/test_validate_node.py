"""`validate` on a node whose driver has created MIG devices: their space will be free again, and is not
foreign.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_commands
import pytest
import yaml

from dra_driver.journal.ledger import Ledger
from dra_driver.journal.records import RecordStore
from dra_driver.journal.rules.cleanups import LedgerEntry
from dra_driver.model.claim import ClaimRef
from dra_driver.model.mig import OwnedInstance, OwnedMode, Placement
from dra_driver.model.steps import CreateMig
from dra_driver.simulator import create_machine
from tests.integration.conftest import DRIVER
from tests.integration.test_commands import claim, request
from tests.integration.test_process import environment

Json = dict[str, Any]
Validate = Callable[..., tuple[int, list[Json], str]]


CLAIMS = yaml.safe_dump_all(
    [claim("whole", request(count=4)), claim("large", request(deviceClassName="mig-7g.80gb.nvidia.com"))]
)


@pytest.fixture
def plugins(memory_path: Path) -> Path:
    return memory_path / "plugins"


@pytest.fixture
def validate(memory_path: Path, plugins: Path) -> Validate:
    """Exit code, reports and the sentence about the machine, whose first GPU has two MIG devices: of the driver, but
    for `foreign` of them."""
    machine = create_machine("hgx-h100-4", memory_path / "machine", device_nodes="described")
    machine.set_mig_mode(0, on=True)
    for start in (0, 1):
        machine.create_mig(0, "1g.10gb", start)
    gpu = machine.current().present[0].uuid
    boot_id = (machine.host_root / "proc/sys/kernel/random/boot_id").read_text().strip()

    def write_ledger(number: int) -> None:
        directory = plugins / DRIVER
        ledger = Ledger(directory / "ledger", RecordStore(directory / "claims"), boot_id)
        ledger.open()
        (directory / "claims").mkdir(exist_ok=True)
        ledger.save(OwnedMode(gpu, None, boot_id))
        for start in range(number):
            device, place = f"gpu-mig-1g10gb-19-{start}", Placement(start, 1)
            ledger.save(OwnedInstance(device, gpu, None, 19, "1g.10gb", place, boot_id, "created"))
            if start == 1:  # its claim has ended
                step = CreateMig(device, gpu, None, 19, "1g.10gb", place)
                ledger.add(LedgerEntry(ClaimRef("default", "claim", "uid-1"), boot_id, step))

    def run(*options: str, foreign: int = 0, with_ledger: bool = True) -> tuple[int, list[Json], str]:
        if with_ledger:
            write_ledger(2 - foreign)
        command = [
            "validate", "-", "-o", "json", *options,
            "--simulate", "hgx-h100-4", "--simulator-dir", str(memory_path / "machine"),
            "--kubelet-plugins-directory-path", str(plugins),
        ]  # fmt: skip
        done = forked_commands.run(command, env=environment(), stdin=CLAIMS)
        assert done.stderr == ""
        shown = json.loads(done.stdout)
        return done.returncode, shown["documents"], shown["machine"]

    return run


def files(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_space_of_our_own_instances_counts_as_free(validate: Validate, plugins: Path) -> None:
    code, reports, _ = validate("--dynamic-mig")
    assert (code, [report["faults"] for report in reports]) == (0, [[], []])
    before = files(plugins)
    # The command may not know that the driver creates MIG devices.
    code, reports, _ = validate()
    assert (code, [report["faults"] for report in reports]) == (0, [[], []])
    assert files(plugins) == before


def test_foreign_instance_is_in_the_way(validate: Validate) -> None:
    code, (whole, large), _ = validate("--dynamic-mig", foreign=1)
    assert code == 1
    assert "asks for 4 devices of class" in whole["faults"][0]
    assert large["faults"] == []  # on another GPU


def test_a_ledger_that_cannot_be_read_is_reported_and_nothing_is_called_foreign(
    validate: Validate, plugins: Path
) -> None:
    (plugins / DRIVER).mkdir(parents=True)
    (plugins / DRIVER / "ledger").write_text("")
    code, reports, sentence = validate(with_ledger=False)
    assert (code, [report["faults"] for report in reports]) == (0, [[], []])
    assert sentence.startswith(
        "fit not checked, because gpu-dra-driver cannot determine which MIG devices it created: "
    )
    assert sentence.endswith("; run this as root")
