"""Reads the plugin's files and the problems that it reports. Does not create, rename or lock files."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from dra_driver.app.settings import Settings
from dra_driver.base.atomic import QUARANTINE, read_plain, state_error
from dra_driver.base.file_lock import UseMark
from dra_driver.base.json_store import UnreadableFile
from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.metadata_files import DIRECTORY as METADATA
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.cli.rules.node_state import BOOT_UNKNOWN, NodeState, SavedHealth
from dra_driver.cli.rules.prepared_claims import NodeClaims, contradictions, prepared_claims, shown
from dra_driver.errors import DraDriverError, InvalidConfigError, StateError
from dra_driver.health.store import decode
from dra_driver.inventory.detachment import Detachments
from dra_driver.journal.ledger import DIRECTORY as LEDGER
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.records import RecordStore
from dra_driver.mig.layout_file import LAYOUT_FILE
from dra_driver.mig.layout_file import decode as decode_layouts
from dra_driver.model.ids import split_address
from dra_driver.model.mig import GpuLayout, OwnedInstance
from dra_driver.model.problems import NodeProblem, ProblemCode
from dra_driver.reporting.node_problems import WORKER_LOCK, Reported, read_problems
from dra_driver.reporting.node_problems import decode as decode_problems

_ANSWER_S = 0.5
_LONGEST = 1 << 22
NOT_RUNNING = (
    "gpu-dra-driver is not running on this node, so pods with GPUs can neither start nor terminate here; "
    "`kubectl get pods -A -o wide -l app.kubernetes.io/name=gpu-dra-driver` shows its pods"
)


def is_only_simulated(settings: Settings) -> bool:
    """Whether the machine is simulated only for this command, so that no plugin runs on it."""
    return settings.simulate is not None and not Path(settings.plugin_directory).is_dir()


def plugin_runs(directory: Path) -> bool:
    """Return False if this cannot be determined."""
    try:
        return UseMark(directory / WORKER_LOCK).is_held()
    except StateError:
        return False


def plugin_problems(directory: Path, http_endpoint: str) -> Reported:
    """Return what the plugin reports. A missing plugin is itself a problem.

    An answer from `http_endpoint` is preferred to the file, which is outdated while the disk is full.
    """
    answered = _plugin_answer(http_endpoint)
    if answered is not None:
        return answered
    try:
        runs, written = read_problems(directory)
    except StateError as error:
        text = f"cannot determine whether gpu-dra-driver is running: {error}"
        return Reported((_of_now("check-failed", text),))
    if runs:
        return written
    return Reported((_of_now("plugin-not-running", NOT_RUNNING),), written.failing)


def _plugin_answer(http_endpoint: str) -> Reported | None:
    if not http_endpoint:
        return None
    try:
        host, port = split_address(http_endpoint)
        with closing(http.client.HTTPConnection(host or "localhost", port, timeout=_ANSWER_S)) as connection:
            connection.request("GET", "/problems")
            answer = connection.getresponse()
            return decode_problems(answer.read(_LONGEST)) if answer.status == http.client.OK else None
    except (OSError, http.client.HTTPException, InvalidConfigError, StateError):
        return None


def _of_now(code: ProblemCode, text: str) -> NodeProblem:
    return NodeProblem(code, text, since=int(time.time()))


Value = TypeVar("Value")


HEALTH_FILE = "health.json"
_REMEDY = "run this command as root, or restart gpu-dra-driver, which replaces a damaged file"


def read_state(
    plugin_directory: Path, boot_id: str | None = None, specs: CdiDirectory | None = None
) -> NodeState:
    """Read everything that can be read. A missing directory counts as empty.

    With `boot_id` None, all pending cleanups and saved health count as from this boot. Without `specs`, pending
    cleanup of claims with unreadable records is left out.
    """
    faults: list[str] = []
    claims, ledgers = (plugin_directory / name for name in ("claims", LEDGER))

    def unread(what: str) -> Callable[[UnreadableFile], None]:
        return lambda it: faults.append(f"{what} {it.kept_as} cannot be read: {it.reason}")

    records = RecordStore(claims, boot_id, unread("the claim record"))
    without_record = partial(_without_record, records, specs)
    ledger = Ledger(ledgers, records, boot_id, without_record, reader=unread("the ledger"))
    of_claims = _read(lambda: list(records.all().values()), claims, faults)
    ledger_faults: list[str] = []
    owned = _read(lambda: ledger.details(OwnedInstance), ledgers, ledger_faults)
    cleanups = [] if ledger_faults else _read(ledger.pending, ledgers, ledger_faults)
    faults += ledger_faults
    health, notes = _read_health(plugin_directory / HEALTH_FILE, boot_id)
    layouts = _read_layouts(plugin_directory / LAYOUT_FILE, faults)
    detachments = Detachments(plugin_directory, boot_id)
    try:
        detachments.written()
    except StateError as error:
        faults.append(str(error))
    return NodeState(
        tuple(of_claims),
        tuple(owned),
        tuple(cleanups),
        health,
        boot_id,
        tuple(faults),
        notes,
        layouts,
        next(iter(ledger_faults), None),
        detachments.maintenances(of_claims),
    )


def _without_record(records: RecordStore, specs: CdiDirectory | None) -> Collection[str]:
    if specs is None:
        return {path.name.partition(".json")[0] for path in records.quarantined()}
    return SpecsWithoutRecord(records, specs).uids()


def _read_layouts(path: Path, faults: list[str]) -> Sequence[GpuLayout]:
    try:
        return decode_layouts(read_plain(path))
    except FileNotFoundError:
        return ()
    except (OSError, StateError) as error:
        faults.append(f"the state of the MIG layout {path} cannot be read: {error}")
        return ()


def _read_health(path: Path, boot_id: str | None) -> tuple[SavedHealth, tuple[str, ...]]:
    try:
        kept, saved_at = decode(read_plain(path)), path.stat().st_mtime
    except FileNotFoundError:
        return SavedHealth(), ()
    except OSError as error:
        return SavedHealth(), (f"cannot read the saved health {path}: {error.strerror or error}; {_REMEDY}",)
    except StateError as error:
        return SavedHealth(), (f"the saved health {path} cannot be read: {error}; {_REMEDY}",)
    if boot_id is None or kept.boot_id == boot_id:
        return SavedHealth(kept.states, frozenset(kept.known), saved_at), ()
    note = "the saved health is from before the last boot, and gpu-dra-driver has not run since; start gpu-dra-driver"
    return SavedHealth(), (note,)


def read_claims(state: NodeState, settings: Settings, now: datetime) -> NodeClaims:
    specs: Mapping[str, Sequence[str]] | None = None
    problems = [*state.faults, *([BOOT_UNKNOWN] if state.records and state.boot_id is None else ())]
    try:
        specs = CdiDirectory(settings.cdi_root, settings.driver_name).list()
    except (DraDriverError, OSError) as error:
        problems.append(str(error))
    claims = prepared_claims(state, specs, now)
    problems += [
        f"{file} was set aside because gpu-dra-driver could not use it; inspect it, then remove it"
        for file in set_aside_files(settings)
    ]
    problems += contradictions(state, specs, claims)
    return NodeClaims(claims, tuple(problems), tuple(map(shown, state.cleanups)))


def set_aside_files(settings: Settings) -> list[Path]:
    """Return files that gpu-dra-driver renamed: unreadable ones, or those with the name of one of its files."""
    found: list[Path] = []
    places = ["", "claims", LEDGER, "locks", "mps", f"{METADATA}/*/*"]
    globs = [(settings.plugin_directory, f"{place}/*{QUARANTINE}*".lstrip("/")) for place in places]
    # Other programs have files there.
    globs.append((Path(settings.cdi_root), f"*{settings.driver_name}*{QUARANTINE}-*"))
    for directory, pattern in globs:
        with suppress(OSError):
            found += sorted(directory.glob(pattern))
    return found


def _read(everything: Callable[[], list[Value]], directory: Path, faults: list[str]) -> list[Value]:
    try:
        directory.stat()
        return everything()
    except FileNotFoundError:
        return []
    except OSError as error:
        faults.append(str(state_error("read", directory, error)))
    except StateError as error:
        faults.append(str(error))
    return []
