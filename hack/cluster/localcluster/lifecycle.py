"""Starts and stops the cluster and single components, and reports their state.

Every step of ``up`` ensures a state instead of performing an action, so ``up`` can complete a cluster that is
incomplete for any reason.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from localcluster import (
    api,
    binaries,
    certificates,
    debian,
    host,
    images,
    processes,
    shell,
)
from localcluster.components import NAMES, Component, Options, all_components, write_configs
from localcluster.layout import SYSTEM_PATH, Layout
from localcluster.shell import ClusterError

_READY_SECONDS = 300.0


def up(layout: Layout, options: Options) -> None:
    """Start the cluster, and return when a pod can be created on it."""
    shell.require_root("A cluster")
    debian.install_missing(debian.CLUSTER_PACKAGES)
    debian.provide(layout.from_debian)
    built = binaries.build(layout)
    with shell.exclusive(layout.state / "lock"):
        _prepare(layout, options)
        components = all_components(layout, built, options_of(layout))
        with shell.step("etcd, containerd"):
            _start_together(layout, components, ("etcd", "containerd"))
        with shell.step("kube-apiserver"):
            _start_together(layout, components, ("kube-apiserver",))
        with shell.step("kube-controller-manager, kube-scheduler, kubelet, images"):
            _start_rest(layout, components, built)
        with shell.step("node ready"):
            _wait("The node did not become ready", lambda: api.node_ready(layout))
            _wait("No default account appeared", lambda: api.default_account_exists(layout))


def down(layout: Layout) -> None:
    """Remove everything that ``up`` created, even if ``up`` failed half-way. Can be repeated."""
    if not layout.state.exists():
        return
    shell.require_root("Removing the cluster")
    with shell.exclusive(layout.state / "lock"), shell.step("down"):
        _take_down(layout)
        shutil.rmtree(layout.state)


def change(layout: Layout, name: str, *, stop: bool, start: bool) -> None:
    """Stop one component, start it and wait until it is healthy, or both. Pods keep running."""
    shell.require_root("Changing a component")
    if name not in NAMES:
        raise ClusterError(f"There is no component {name}: choose one of {', '.join(NAMES)}.")
    if not layout.kubeconfig.exists():
        raise ClusterError("There is no cluster: run `cluster.py up` first.")
    with shell.exclusive(layout.state / "lock"):
        process = find(layout, name)
        if stop:
            processes.stop([process] if process is not None else [])
            _pid_file(layout, name).unlink(missing_ok=True)
        if start:
            component = all_components(layout, binaries.build(layout), options_of(layout))[name]
            _launch(layout, component)
            _wait_serving(layout, component)


def find(layout: Layout, name: str) -> processes.Process | None:
    """Return the process of a component; None if it is not running."""
    return processes.recall(_pid_file(layout, name))


def _prepare(layout: Layout, options: Options) -> None:
    host.refuse_foreign_kubelet(layout)
    host.refuse_taken_name()
    layout.state.chmod(0o755)
    host.remember(layout)
    _save_options(layout, options)
    kept = options_of(layout)
    with shell.step("certificates"):
        certificates.ensure(layout, kept.addresses)
    write_configs(layout, kept)
    for directory in (layout.run, layout.logs, layout.pod_logs):
        directory.mkdir(parents=True, exist_ok=True)
    host.make_network(kept.addresses)
    host.share_mounts()
    host.mount_kubelet_root(layout)


def _start_together(layout: Layout, components: dict[str, Component], names: tuple[str, ...]) -> None:
    for name in names:
        _launch(layout, components[name])
    for name in names:
        _wait_serving(layout, components[name])


def _start_rest(layout: Layout, components: dict[str, Component], built: Path) -> None:
    """Load the images before the kubelet starts, so that no pod waits for its sandbox image."""
    for name in ("kube-controller-manager", "kube-scheduler"):
        _launch(layout, components[name])
    images.load(layout, built, images.write_archive(layout), options_of(layout).snapshotter)
    _start_together(layout, components, ("kubelet", "kube-controller-manager", "kube-scheduler"))


def _launch(layout: Layout, component: Component) -> None:
    if find(layout, component.name) is not None:
        return
    programs = Path(component.argv[0]).parent
    processes.start(
        component.argv,
        environment={
            "PATH": f"{programs}:{SYSTEM_PATH}",
            "HOME": os.environ.get("HOME", "/root"),
        },
        log=layout.log(component.name),
        pid_file=_pid_file(layout, component.name),
    )


def _wait_serving(layout: Layout, component: Component) -> None:
    def serves() -> bool:
        if find(layout, component.name) is None:
            raise ClusterError(_epitaph(layout, component.name))
        return api.answers(layout, component.probe)

    log = layout.log(component.name)
    _wait(f"{component.name} did not become healthy (log: {log})", serves)


def _epitaph(layout: Layout, name: str) -> str:
    log = layout.log(name)
    last = log.read_text(errors="replace").splitlines()[-8:] if log.exists() else []
    return "\n  ".join([f"{name} exited soon after its start; see {log}:", *last])


def _wait(complaint: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{complaint} within {_READY_SECONDS:.0f} s.")
        time.sleep(0.1)


def _take_down(layout: Layout) -> None:
    """Kill all processes and undo all changes. SIGTERM is not necessary, because all state is deleted anyway."""
    running = [process for name in NAMES if (process := find(layout, name))]
    processes.stop(running, grace_seconds=0)
    processes.kill_all(layout)
    processes.remove_shim_sockets(layout)
    host.unmount_all(layout)
    processes.remove_cgroups()
    host.remove_network()
    host.restore(layout)


def _save_options(layout: Layout, options: Options) -> None:
    """Save the options, unless there are some already: the options of a running cluster do not change."""
    path = layout.state / "options.json"
    if not path.exists():
        path.write_text(json.dumps(asdict(options)))


def options_of(layout: Layout) -> Options:
    """Return the options of the first ``up``; the defaults if there is no cluster."""
    try:
        return Options(**json.loads((layout.state / "options.json").read_text()))
    except FileNotFoundError:
        return Options()


def _pid_file(layout: Layout, name: str) -> Path:
    return layout.run / f"{name}.pid"


# --- status -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """The status of a component; ``pid`` is None if it is not running."""

    name: str
    pid: int | None
    healthy: bool
    log: Path


def state(layout: Layout) -> list[ComponentStatus]:
    """Return the status of every component, running or not."""
    return [_read_one(layout, name) for name in NAMES]


def table(rows: list[ComponentStatus]) -> str:
    """Return the rows as a table for a terminal."""
    lines = [f"{'COMPONENT':<24} {'PID':>8} {'HEALTHY':<8} LOG"]
    for row in rows:
        healthy = "yes" if row.healthy else "no"
        lines.append(f"{row.name:<24} {row.pid or '-':>8} {healthy:<8} {row.log}")
    return "\n".join(lines)


def _read_one(layout: Layout, name: str) -> ComponentStatus:
    process = find(layout, name)
    component = all_components(layout, binaries.directory(layout), options_of(layout))[name]
    return ComponentStatus(
        name=name,
        pid=process.pid if process else None,
        healthy=process is not None and api.answers(layout, component.probe),
        log=layout.log(name),
    )
