"""Checks what the plugin reports, its files, and the kubelet's directories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dra_driver.app.settings import Settings
from dra_driver.base.file_lock import is_locked
from dra_driver.base.installation import logs
from dra_driver.cli.checks.check import Check, not_written, of_text
from dra_driver.cli.rules.findings import (
    Finding,
    fail,
    keeps_pods_away,
    ok,
    skip,
    warn,
)
from dra_driver.cli.rules.node_state import BOOT_UNKNOWN, NodeState
from dra_driver.cli.state_on_disk import set_aside_files
from dra_driver.model.dataclass import dataclass
from dra_driver.model.units import counted, named
from dra_driver.mps_host.host_files import MpsHostFiles, mps_layout
from dra_driver.reporting.node_problems import Reported
from dra_driver.sharing.rules.client_limits import notes_of

_UNREAD = "not known, because some of the plugin's files cannot be read: see `records`"


@dataclass(frozen=True, slots=True)
class KubeletChecks:
    """`reported` is None if no plugin can be running."""

    settings: Settings
    node_state: Callable[[], NodeState]
    reported: Callable[[], Reported] | None = None

    def plugin(self) -> list[Finding]:
        if self.reported is None:
            return [skip("no plugin runs on a machine that is simulated only for this command")]
        problems, failing = self.reported()
        found = [
            fail(
                f"{one.operation.capitalize()} of claim {one.ref.namespace}/{one.ref.name} fails (tried "
                f"{counted(one.count, 'time')}): {one.error.rpartition('; ')[0] or one.error}",
                one.error.rpartition("; ")[2] if "; " in one.error else logs(),
            )
            for one in failing
        ]
        # Another check lists pending cleanup.
        listed = {"cleanup-pending", "claims-failing"} if failing else {"cleanup-pending"}
        found += [
            of_text(problem.text, fails=keeps_pods_away(problem))
            for problem in problems
            if problem.code not in listed
        ]
        return found or [ok("the plugin is running and reports no problems")]

    def directories(self) -> Finding:
        # A pod without privileges has only its own plugin directory mounted.
        state = self.settings.plugin_directory
        registry = Path(self.settings.kubelet_registrar_directory_path)
        plugins = state if state.is_dir() else state.parent
        for path, flag in (
            (registry, "--kubelet-registrar-directory-path"),
            (plugins, "--kubelet-plugins-directory-path"),
        ):
            if not path.is_dir():
                return fail(
                    f"{path} does not exist",
                    f"`ps -o args= -C kubelet` shows the kubelet's --root-dir; set {flag} (and the mount) to match",
                )
            problem = not_written(path)
            if problem is not None:
                return problem
        return ok(f"gpu-dra-driver can write to {registry} and {plugins}")

    def records(self) -> Finding:
        state = self.node_state()
        if state.faults:
            more = f" (and {len(state.faults) - 1} more)" if len(state.faults) > 1 else ""
            return fail(
                state.faults[0] + more,
                "see `gpu-dra-driver claims`; the plugin renames unreadable files, except those of a newer release",
            )
        aside = set_aside_files(self.settings)
        if aside:
            places = sorted({str(path.parent) for path in aside})
            return warn(
                f"{counted(len(aside), 'file')} set aside as unusable: {named([path.name for path in aside])}",
                f"inspect them in {' and '.join(places)}, then remove them",
            )
        waiting = sum(1 for record in state.records if record.phase != "prepared")
        if waiting:
            return warn(
                f"{counted(len(state.records), 'claim')}, {waiting} not prepared yet",
                "`gpu-dra-driver claims` lists them",
            )
        if state.records and state.boot_id is None:
            return warn(*BOOT_UNKNOWN.split("; "))
        return ok(counted(len(state.records), "prepared claim"))

    def cleanup(self) -> Finding:
        state = self.node_state()
        found = state.cleanups
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            # Pods do not get a device until its cleanup is done, unless only its time slice is left.
            withheld = [one for one in found if one.withholds(state.boot_id)]
            pending, _, remedy = (withheld or found)[0].text.rpartition("; ")
            finding = fail if withheld else warn
            return finding(pending + more, f"{remedy}; `gpu-dra-driver cleanup` lists all pending cleanup")
        return skip(_UNREAD) if state.faults else ok("no pending cleanup found")

    def mig_layout(self) -> Finding:
        node = self.node_state()
        found = node.layouts
        if not found:
            return skip(_UNREAD) if node.faults else ok("the node has no MIG layout")
        for state in ("refused", "waiting"):
            concerned = [one for one in found if one.state == state]
            if concerned:
                text = f"layout {concerned[0].layout} is not applied to {counted(len(concerned), 'GPU')} ({state})"
                who = named([one.gpu_uuid for one in concerned if one.text == concerned[0].text])
                return warn(f"{text}: {who}: {concerned[0].text}", "see docs/mig.md")
        others = sum(1 for one in found if one.state == "unsupported")
        without = f"; without MIG: {counted(others, 'GPU')}" if others else ""
        return ok(f"layout {found[0].layout} is applied to {counted(len(found) - others, 'GPU')}{without}")

    def mps_host(self) -> Finding:
        layout = mps_layout(self.settings.plugin_directory)
        if not layout.lock.exists():
            return ok(
                "the MPS host has never run on this node; only MPS claims need it (chart value mps.enabled)"
            )
        files = MpsHostFiles(layout)
        problem = files.host_problem()
        if problem is not None:
            # A starting host needs no action, and a stopped one matters only if a claim has a daemon.
            is_there = is_locked(layout.lock)
            return of_text(problem, fails=not files.is_starting() and (is_there or files.is_in_use()))
        waiting = files.unseen()
        if waiting:
            return warn(
                f"the MPS host has not yet applied the changes to {', '.join(waiting)}",
                "run doctor again in 30 seconds; if the warning stays, see the log of the MPS host's pod",
            )
        daemons = files.statuses()
        notes = [text for status in daemons for _, text in notes_of(status)]
        if notes:
            return warn("; ".join(notes), "see docs/sharing.md, MPS")
        return ok(f"the MPS host runs; it has {counted(len(daemons), 'daemon')}")

    def all(self) -> list[Check]:
        return [
            Check("plugin", self.plugin),
            Check("kubelet directories", self.directories),
            Check("records", self.records),
            Check("cleanup", self.cleanup),
            Check("MIG layout", self.mig_layout),
            Check("MPS host", self.mps_host),
        ]
