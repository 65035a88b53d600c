"""All control daemons of a node: started on request, watched, taken over from an earlier host process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import structlog

from dra_driver.errors import FatalError, RetryableError, StateError
from dra_driver.model.mps import MpsDaemonSpec, MpsDaemonStatus, MpsKind
from dra_driver.mps import daemon_processes as processes
from dra_driver.mps.compute_mode import DEFAULT, ComputeMode
from dra_driver.mps.daemon import Daemon, Parts, remove_directory
from dra_driver.mps.daemon_control import ControlProgram
from dra_driver.mps.daemon_conversation import Timings
from dra_driver.mps.layout import MpsLayout
from dra_driver.mps.limit_commands import check_gpu_uuid, check_spec
from dra_driver.mps.mounts import Mounter, half_of_memory
from dra_driver.mps.records import DaemonRecord, DaemonRecords
from dra_driver.mps.selinux import SelinuxLabels
from dra_driver.mps.without_host import HostRunsError, has_traces, held_lock

_log = structlog.get_logger(__name__)

_LOCK_S = 1.0
"""A plugin has the lock for a moment where it writes what no host was there to be asked for."""


@dataclass(frozen=True, slots=True)
class HostTools:
    """What the supervisor works with on this host. `make_capability_nodes` has a device node for each MIG device, or
    raises RetryableError."""

    control: ControlProgram
    mounter: Mounter
    compute_mode: ComputeMode
    make_capability_nodes: Callable[[], None]
    labels: SelinuxLabels


class Supervisor:
    """One a directory. Daemons of different devices are started and stopped at the same time."""

    def __init__(
        self,
        layout: MpsLayout,
        tools: HostTools,
        timings: Timings | None = None,
        *,
        boot_id: str | None = None,
    ) -> None:
        self._layout = layout
        self._parts = Parts(
            layout=layout,
            records=DaemonRecords(layout),
            control=tools.control,
            mounter=tools.mounter,
            compute_mode=tools.compute_mode,
            make_capability_nodes=tools.make_capability_nodes,
            labels=tools.labels,
            boot_id=boot_id or processes.boot_id(),
            shm_bytes=half_of_memory(),
            closing=threading.Event(),
            timings=timings or Timings(),
        )
        self._daemons: dict[str, Daemon] = {}
        self._guard = threading.Lock()
        self._workers: dict[str, threading.Thread] = {}
        self._watch: threading.Thread | None = None
        self._held = ExitStack()

    def open(self) -> None:
        """Take over what is there and start to watch.

        Raises: FatalError if another process does that already, StateError if the directory cannot be used.
        """
        root = self._layout.root
        try:
            root.mkdir(parents=True, exist_ok=True)
            root.chmod(0o711)  # a server may run as the user of its client; records and socket are closed
            self._lock()
        except OSError as error:
            raise StateError(f"cannot use {root} for MPS: {error.strerror or error}") from error
        found, faults = self._parts.records.load()
        for fault in faults:
            _log.error("mps_record_unreadable", fault=fault)
        for device, record in found.items():
            self._daemons[device] = Daemon(record, self._parts, recovered=True)
        self._watch = threading.Thread(target=self._keep_watch, name="mps-watch")
        self._watch.start()

    def begin_closing(self) -> None:
        """End starts that are in progress; the next host process goes on with them."""
        self._parts.closing.set()

    def close(self) -> None:
        """Stop watching. Daemons run on."""
        self.begin_closing()
        if self._watch is not None:
            self._watch.join()
        for worker in list(self._workers.values()):
            worker.join()
        self._held.close()

    def ensure(self, spec: MpsDaemonSpec, timeout_s: float) -> MpsDaemonStatus:
        """The status of the device's daemon once it is ready (or found in FAULT).

        Raises: PermanentError for a spec that cannot be or that differs from the running one, RetryableError if
        the daemon cannot be made ready in time, or another daemon has one of its GPUs; what a failed first start made
        is taken back.
        """
        check_spec(spec)
        deadline = time.monotonic() + timeout_s
        while True:
            daemon = self._daemon(spec)
            status = daemon.ensure(spec, max(0.0, deadline - time.monotonic()))
            if status is not None:
                return status
            self._forget(daemon)

    def stop(
        self, device: str, timeout_s: float, *, gpu_uuid: str | None = None, kind: MpsKind | None = None
    ) -> None:
        """No process of the device's daemon is left; nor a directory, mount, setting or record, as far as these can go.

        What cannot go yet, as a compute mode while nvidia-smi is broken, goes later: the watch sees to it. Where the
        record is lost, `gpu_uuid` and `kind` say which GPU's compute mode becomes the default one.
        Raises: RetryableError, StateError; calling it again goes on where it ended.
        """
        with self._guard:
            daemon = self._daemons.get(device)
            is_served = any(device in other.status.spec.devices[1:] for other in self._living())
        if daemon is not None:
            daemon.stop(timeout_s)
            self._forget(daemon)
        elif is_served:
            return  # by the daemon of several GPUs, which has another name
        elif has_traces(self._layout, self._parts.records, device):
            self._stop_unrecorded(device, gpu_uuid if kind == "gpu" else None, timeout_s)

    def status(self) -> tuple[MpsDaemonStatus, ...]:
        """All daemons, by name."""
        with self._guard:
            daemons = sorted(self._daemons.items())
        return tuple(daemon.status for _, daemon in daemons if not daemon.gone)

    def _stop_unrecorded(self, device: str, gpu_uuid: str | None, timeout_s: float) -> None:
        if gpu_uuid is None:
            self._parts.control.end_users(self._layout.directories(device), self._parts.timings.patience)
            remove_directory(self._parts, device)
            self._parts.records.remove(device)
        else:
            check_gpu_uuid(gpu_uuid)
            spec = MpsDaemonSpec(device, gpu_uuid, "gpu", gpu_uuid)
            record = DaemonRecord(spec, "stopped", self._parts.boot_id, compute_mode_before=DEFAULT)
            with self._guard:
                daemon = self._daemons.setdefault(device, Daemon(record, self._parts, recovered=True))
            daemon.stop(timeout_s)
            self._forget(daemon)
        _log.warning("mps_daemon_without_record_stopped", device=device, compute_mode_of=gpu_uuid)

    def _daemon(self, spec: MpsDaemonSpec) -> Daemon:
        with self._guard:
            daemon = self._daemons.get(spec.device)
            if daemon is None:
                self._refuse_overlap(spec)
                record = DaemonRecord(spec, "running", self._parts.boot_id)
                if spec.kind == "gpu":
                    pairs = zip(spec.devices, spec.gpu_uuids, strict=True)
                    records = self._parts.records
                    record = record.with_modes_before(
                        {uuid: DEFAULT for name, uuid in pairs if has_traces(self._layout, records, name)}
                    )
                daemon = self._daemons[spec.device] = Daemon(record, self._parts, recovered=False)
            return daemon

    def _living(self) -> list[Daemon]:
        return [daemon for daemon in self._daemons.values() if not daemon.gone]

    def _refuse_overlap(self, spec: MpsDaemonSpec) -> None:
        """Two daemons on one GPU would put its compute mode back under each other. The caller holds the guard."""
        if spec.kind == "mig":
            return
        for other in (daemon.status.spec for daemon in self._living()):
            common = set(spec.gpu_uuids) & set(other.gpu_uuids)
            if common and other.kind == "gpu":
                raise RetryableError(
                    f"GPU {min(common)} has the MPS daemon of {', '.join(other.devices)}, which has to stop before "
                    f"{', '.join(spec.devices)} can have one; it stops when the claims that use it are gone"
                )

    def _forget(self, daemon: Daemon) -> None:
        with self._guard:
            if daemon.gone and self._daemons.get(daemon.status.device) is daemon:
                del self._daemons[daemon.status.device]

    def _lock(self) -> None:
        try:
            self._held.enter_context(held_lock(self._layout, _LOCK_S))
        except HostRunsError as error:
            raise FatalError(str(error)) from error

    def _keep_watch(self) -> None:
        timings = self._parts.timings
        probe_at = time.monotonic() + timings.probe
        while not self._parts.closing.is_set():
            now = time.monotonic()
            with self._guard:
                daemons = list(self._daemons.items())
            for device, daemon in daemons:
                if daemon.gone:
                    self._forget(daemon)
                elif daemon.needs_attention(now):
                    self._work(device, daemon.converge)
            if now >= probe_at:
                self._work("probe", partial(_probe_all, [daemon for _, daemon in daemons]))
                probe_at = now + timings.probe
            self._parts.closing.wait(timings.tick)

    def _work(self, name: str, action: Callable[[], object]) -> None:
        """Run it in a thread of its own unless the last one of this name still runs."""
        for done in [key for key, thread in self._workers.items() if not thread.is_alive()]:
            del self._workers[done]
        if name not in self._workers:
            thread = threading.Thread(target=_logged, args=(action,), name=f"mps-{name}")
            try:
                thread.start()
                self._workers[name] = thread
            except RuntimeError as error:  # the next look tries again
                _log.warning("mps_look_delayed", thread=thread.name, reason=str(error))


def _logged(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception:  # noqa: BLE001  the watch starts it again
        _log.exception("mps_watch_failed")


def _probe_all(daemons: list[Daemon]) -> None:
    users = processes.users_by_directory(
        [daemon.pipe for daemon in daemons if not daemon.status.spec.multi_user]
    )
    for daemon in daemons:
        daemon.probe(users.get(daemon.pipe, ()))
