"""What is prepared on this node, from the files below the plugin directory alone. Nothing is changed on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from dra_driver.cdi.directory import CdiDirectory
from dra_driver.diagnostics.rules.prepared_claims import (
    FilesOfClaims,
    NodeClaims,
    contradictions,
    owed,
    prepared_claims,
)
from dra_driver.diagnostics.state_on_disk import read_state, set_aside_files
from dra_driver.errors import DraDriverError
from dra_driver.journal.step_codec import encode_step
from dra_driver.model.steps import Step


def read_prepared_claims(
    plugin_directory: Path, cdi_root: Path, driver: str, boot_id: str | None, now: datetime
) -> NodeClaims:
    """What the records say. With `boot_id` None it stays open whether a record is of this boot."""
    state = read_state(plugin_directory, boot_id)
    specs, problem = _specs(cdi_root, driver)
    files = FilesOfClaims(state.records, state.owned, specs, boot_id)
    claims = prepared_claims(files, _kind, now)
    problems = [*state.faults, *([] if problem is None else [problem])]
    problems += [
        f"{file} was set aside, because it is not a readable file of the driver; look at it, then remove it"
        for file in set_aside_files(plugin_directory, cdi_root, driver)
    ]
    return NodeClaims(claims, (*problems, *contradictions(files, claims)), tuple(map(owed, state.debts)))


def _specs(cdi_root: Path, driver: str) -> tuple[Mapping[str, Sequence[str]] | None, str | None]:
    """The devices in each claim's spec by claim UID; None where the directory cannot be read, and why."""
    try:
        return CdiDirectory(cdi_root, driver).list(), None
    except (DraDriverError, OSError) as error:
        return None, str(error)


def _kind(step: Step) -> str:
    return str(encode_step(step)["kind"])
