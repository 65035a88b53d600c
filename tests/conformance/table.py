"""The table of docs/conformance.md, made from the tests themselves: their numbers, words and marks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DOCUMENT = ROOT / "docs" / "conformance.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
ITEMS = range(1, 26)
"""1 to 22 are what upstream's own tests check of drivers, 23 to 25 what else can go wrong."""

ELSEWHERE = {
    "tests/e2e/test_outages.py::test_restart_of_every_component_under_load_loses_nothing": (
        1,
        "A kubelet that starts anew, as any other component, finds the driver, and pods start.",
    ),
    "tests/e2e/test_health.py::test_an_xid_is_told_everywhere_and_so_is_recovery": (
        10,
        "The kubelet shows the health of a pod's device, bad and good again.",
    ),
    "tests/e2e/test_release.py::test_force_deleted_pods_are_replaced_within_seconds": (
        12,
        "Claims of force-deleted pods are unprepared, and pods that need the same devices run after that.",
    ),
    "tests/e2e/test_slices.py::test_rolling_update_serves_throughout_and_writes_nothing": (
        16,
        "Pods that come during an update run, and the slices are as before.",
    ),
    "tests/e2e/test_health.py::test_claim_status_is_there_while_it_is_allocated": (
        18,
        "The API server keeps our entry of a claim's status: the device, its data, and that it is ready.",
    ),
    "tests/e2e/test_pods.py::test_extended_resource_needs_no_claim": (
        21,
        "A limit in the pod is enough to get a GPU.",
    ),
    "tests/e2e/test_pods.py::test_admin_access_sees_all_gpus_while_one_is_in_use": (
        21,
        "Admin access sees all GPUs while one is in use.",
    ),
    "tests/kubelet/test_playground_kubelet.py::test_dra_socket_may_come_after_the_registration": (
        5,
        "The DRA service may come up after its registration, and come back.",
    ),
    "tests/kubelet/test_playground_kubelet.py::test_one_socket_may_serve_registration_and_dra": (
        5,
        "One socket may serve both.",
    ),
    "tests/kubelet/test_lifecycle.py::test_stale_sockets_are_replaced_and_those_of_others_left_alone": (
        24,
        "Sockets of a dead instance are replaced.",
    ),
    "tests/kubelet/test_dra.py::test_odd_authority_is_accepted": (
        24,
        "A caller with an odd authority is served.",
    ),
    "tests/slices/test_diff.py::test_generation_grows_when_a_slice_is_created_or_several_change": (
        25,
        "The pool keeps its generation while one slice changes and none is made, and moves on with all slices else.",
    ),
    "tests/e2e/test_permissions.py::test_own_nodes_slice_is_allowed": (
        19,
        "In every version of the API a slice of the own node may be written.",
    ),
    "tests/e2e/test_permissions.py::test_what_is_not_its_own_is_refused": (
        19,
        "New slices of another node, of the whole cluster and of another driver are refused.",
    ),
    "tests/e2e/test_permissions.py::test_touching_another_nodes_slice_is_refused": (
        19,
        "Another node's slice that is there can be neither changed nor deleted.",
    ),
    "tests/kubelet/test_lifecycle.py::test_longest_paths_are_served": (
        24,
        "A socket is served at a path of 106 and of 107 bytes.",
    ),
    "tests/kubelet/test_sockets.py::test_directory_without_room_is_refused_with_its_name_and_the_room_there_is": (
        24,
        "A directory that leaves no room for a socket is refused with its name and how long it may be.",
    ),
    "tests/kubelet/test_sockets.py::test_registrar_name_is_the_first_that_fits_in_107_bytes": (
        24,
        "Names of sockets are shortened in steps until the path has no more than 107 bytes.",
    ),
    "tests/kube/test_endpoint.py::test_token_file_keeps_last_token_while_unreadable": (
        25,
        "The last token serves on while the file is empty or gone.",
    ),
    "tests/kube/test_client.py::test_request_is_repeated_when_another_thread_read_the_new_token_first": (
        25,
        "A request that was refused with the old token is sent again with the new one.",
    ),
}
"""Tests outside of this directory that show more of a number, each with what it shows."""

_NAME = re.compile(r"test_c(\d\d)_\w+")
_ON_CLUSTER = re.compile(r"^pytestmark = \[?pytest\.mark\.cluster", re.MULTILINE)


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One test."""

    number: int
    on_cluster: bool
    test: str
    what: str

    @property
    def where(self) -> str:
        """As the document explains it."""
        if self.on_cluster:
            return "real cluster"
        return "part" if self.test in ELSEWHERE else "socket"


def entries() -> list[Entry]:
    """All conformance tests in order of their numbers; those at the sockets first."""
    return sorted(entry for file in HERE.glob("test_*.py") for entry in _of_file(file))


def entries_elsewhere() -> list[Entry]:
    """Tests of other directories that count as well. Raises: LookupError if one of them is not there."""
    return [_elsewhere(test, number, what) for test, (number, what) in ELSEWHERE.items()]


def _elsewhere(test: str, number: int, what: str) -> Entry:
    file, name = test.split("::")
    text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
    if name not in {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}:
        raise LookupError(f"there is no test {test}; correct the list of tests elsewhere")
    return Entry(number, bool(_ON_CLUSTER.search(text)), test, what)


def _of_file(file: Path) -> Iterator[Entry]:
    tree = ast.parse(file.read_text())
    on_cluster = bool(_ON_CLUSTER.search(file.read_text()))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and (match := _NAME.fullmatch(node.name)):
            what = " ".join((ast.get_docstring(node) or "").split())
            yield Entry(int(match[1]), on_cluster, f"{file.name}::{node.name}", what)


def table() -> str:
    """The entries as Markdown."""
    lines = ["| No. | What | Where | Test |", "|---|---|---|---|"]
    for entry in sorted([*entries(), *entries_elsewhere()]):
        lines.append(f"| {entry.number} | {entry.what} | {entry.where} | `{entry.test}` |")
    return "\n".join(lines)


def in_document(text: str) -> str:
    """The table that the document shows."""
    return text.split(BEGIN)[1].split(END, maxsplit=1)[0].strip()


def with_table(text: str) -> str:
    """The document with the table of now."""
    head, tail = text.split(BEGIN, maxsplit=1)[0], text.split(END)[1]
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"
