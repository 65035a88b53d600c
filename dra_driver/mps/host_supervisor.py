"""The MPS host: does what the plugin wants of the control daemons of a node, and says what runs (`host_files`)."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from dra_driver.errors import DraDriverError, FatalError, PermanentError, RetryableError, StateError
from dra_driver.files.atomic import (
    clear_abandoned,
    make_directory,
    remove_file,
    set_aside,
    stamp_at,
    write_atomically,
)
from dra_driver.files.file_lock import LockBusyError, hold_file
from dra_driver.model.mps import MpsDaemonSpec, MpsDaemonStatus
from dra_driver.mps import daemon_processes as processes
from dra_driver.mps import host_files
from dra_driver.mps.daemon import Daemon, HostTools
from dra_driver.mps.daemon_compute_mode import DEFAULT
from dra_driver.mps.daemon_control import HostStoppingError
from dra_driver.mps.daemon_limits import check_spec
from dra_driver.mps.daemon_records import DaemonRecord
from dra_driver.mps.host_files import (
    SUFFIX,
    Report,
    encode_report,
    generation,
    generation_of,
    is_device_name,
    read_wish,
)

_log = structlog.get_logger(__name__)

_LOCK_S = 1.0
"""A predecessor may still be ending."""


class Supervisor:
    """One a directory. Daemons of different devices are started and stopped at the same time."""

    def __init__(self, tools: HostTools) -> None:
        self._tools = tools
        self._layout = tools.layout
        self._daemons: dict[str, Daemon] = {}
        self._answers: dict[str, Report] = {}
        self._published: dict[str, Report] = {}
        self._unwritten: set[str] = set()
        self._guard = threading.Lock()
        self._publishing = threading.Lock()
        self._workers: dict[str, threading.Thread] = {}
        self._watch: threading.Thread | None = None
        self._held = ExitStack()

    def open(self) -> None:
        """Take over what is there and start to watch.

        Raises: FatalError if another process does that already, StateError if the directory cannot be used.
        """
        layout = self._layout
        try:
            layout.root.mkdir(parents=True, exist_ok=True)
            layout.root.chmod(0o711)  # a server may run as the user of its client; all files are closed
            for path in (layout.lock, layout.modes, layout.alive):
                _free(path, Path.is_file)
            for path in (layout.wishes, layout.statuses, layout.libraries):
                _free(path, Path.is_dir)
            descriptor = self._held.enter_context(
                hold_file(layout.lock, threading.Lock(), time.monotonic() + _LOCK_S, "the MPS host")
            )
            os.ftruncate(descriptor, 0)  # until all is taken over
            self._take_over()
            os.pwrite(descriptor, json.dumps({"format": host_files.FORMAT}).encode(), 0)
        except LockBusyError as error:
            raise FatalError(f"another MPS host serves {layout.root} already") from error
        except OSError as error:
            raise StateError(f"cannot use {layout.root} for MPS: {error.strerror or error}") from error
        self._held.callback(os.ftruncate, descriptor, 0)
        self._watch = threading.Thread(target=self._keep_watch, name="mps-watch")
        self._watch.start()

    def close(self) -> None:
        """Stop watching. Daemons run on, and the next host process goes on with starts that are in progress."""
        self._tools.closing.set()
        if self._watch is not None:
            self._watch.join()
        for worker in list(self._workers.values()):
            worker.join()
        self._held.close()

    def status(self) -> tuple[MpsDaemonStatus, ...]:
        """All daemons, by name."""
        return tuple(daemon.status for _, daemon in sorted(self._living().items()))

    def _take_over(self) -> None:
        layout = self._layout
        for directory in (layout.wishes, layout.statuses):
            make_directory(directory, 0o700)
            clear_abandoned(directory)
        found = self._tools.records.all()
        for device, record in found.items():
            self._daemons[device] = Daemon(record, self._tools, recovered=True)
        for path in layout.statuses.glob(f"*{SUFFIX}"):
            _free(path, Path.is_file)
            if path.name.removesuffix(SUFFIX) not in found:
                remove_file(path)
        for device in found:
            self._publish(device)

    # --- what shall run ------------------------------------------------------------------------

    def _keep_watch(self) -> None:
        timings = self._tools.timings
        probe_at, tick_at, sign_at = time.monotonic() + timings.probe, 0.0, 0.0
        while not self._tools.closing.is_set():
            now, wishes = time.monotonic(), self._wishes()
            for device, wanted in wishes.items():
                if not self._is_seen(device, wanted):
                    self._work(device, partial(self._attend, device))
            if now >= tick_at:
                tick_at = now + timings.tick
                self._tick(now, wishes)
            if now >= sign_at and not self._unwritten:
                sign_at = now + timings.sign
                self._give_sign()
            if now >= probe_at:
                probe_at = now + timings.probe
                self._work("probe", partial(_probe_all, list(self._living().values())))
            self._tools.closing.wait(timings.look if self._daemons or wishes else timings.idle)

    def _tick(self, now: float, wishes: Collection[str]) -> None:
        living = self._living()
        for device, daemon in living.items():
            if daemon.needs_attention(now):
                self._work(device, partial(self._attend, device))
        for device in self._answers.keys() - living.keys() - set(wishes):
            del self._answers[device]
        for device in {*living, *self._published, *self._unwritten}:
            self._publish(device)

    def _give_sign(self) -> None:
        """Have the plugin see that this host watches. If that fails, the missing sign says so."""
        with suppress(OSError):
            self._layout.alive.touch(mode=0o600)

    def _wishes(self) -> dict[str, str]:
        """The generation of each device's wish; that to stop comes before that to run."""
        found: dict[str, str] = {}
        with suppress(OSError), os.scandir(self._layout.wishes) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                device, _, kind = entry.name.partition(".")
                if kind in ("json", "stop") and is_device_name(device):
                    found[device] = generation(entry.stat(follow_symlinks=False))
        return found

    def _is_seen(self, device: str, wanted: str) -> bool:
        answer = self._answers.get(device)
        return answer is not None and answer.seen == wanted

    def _attend(self, device: str) -> None:
        """Do what is wanted of one device, or go on with what it has."""
        stop, wish = generation_of(self._layout.unwanted(device)), generation_of(self._layout.wanted(device))
        daemon = self._daemons.get(device)
        try:
            if stop is not None:
                self._answer(device, stop, self._stop)
            elif wish is not None and not self._is_seen(device, wish):
                self._answer(device, wish, self._ensure)
            elif daemon is not None:
                daemon.keep()
        finally:
            self._forget(device)
            self._publish(device)

    def _answer(self, device: str, wanted: str, act: Callable[[str], None]) -> None:
        refusal, is_final = None, False
        try:
            act(device)
        except HostStoppingError:
            return  # the next host has not seen it either
        except DraDriverError as error:
            refusal, is_final = " ".join(str(error).split()), isinstance(error, PermanentError)
        except Exception as error:  # noqa: BLE001  one wish must not keep the host from the others
            _log.exception("mps_request_failed")
            refusal = f"internal error of the MPS host: {error!r}"
        status = MpsDaemonStatus(device, "failed", _unknown(device), since=int(time.time()), problem=refusal)
        self._answers[device] = Report(status, wanted, refusal, is_final)

    def _ensure(self, device: str) -> None:
        """The device's daemon is ready, or found in FAULT.

        Raises: PermanentError for a spec that cannot be or that differs from the running one, RetryableError if
        the daemon cannot be made ready in time, or another daemon has one of its GPUs; what a failed first start made
        is taken back.
        """
        spec = read_wish(self._layout.wanted(device)) or _unknown(device)
        check_spec(spec)
        self._layout.refuse_long_path(device)
        while not self._daemon(spec).ensure(spec):
            self._forget(device)

    def _stop(self, device: str) -> None:
        """No process of the device's daemon is left; nor a directory, mount, setting or record.

        What cannot go yet, as a compute mode while nvidia-smi is broken, goes later. Where the record is lost, the wish
        says which GPU's compute mode becomes the default one. Raises: RetryableError, StateError, PermanentError.
        """
        spec = read_wish(self._layout.unwanted(device))
        living = self._living()
        with self._guard:
            daemon = self._daemons.get(device)
            is_served = any(device in other.status.spec.devices[1:] for other in living.values())
            if daemon is None and not is_served and self._layout.has_traces(device):
                daemon = self._daemons[device] = self._without_record(device, spec)
        if daemon is not None:
            daemon.stop()
        self._forget(device)
        self._answers.pop(device, None)
        self._publish(device)
        remove_file(self._layout.unwanted(device))  # the last, since the plugin waits for it

    def _without_record(self, device: str, spec: MpsDaemonSpec | None) -> Daemon:
        """Raises: PermanentError."""
        gpus: tuple[str, ...] = ()
        if spec is not None and spec.kind == "gpu":
            check_spec(spec)
            gpus = spec.gpu_uuids
        modes = dict.fromkeys(gpus, DEFAULT)
        record = DaemonRecord(spec or _unknown(device), self._tools.boot_id, modes_before=modes)
        _log.warning(
            "mps_daemon_without_record_stopped", device=device, compute_mode_of=", ".join(gpus) or None
        )
        return Daemon(record, self._tools, recovered=True)

    def _daemon(self, spec: MpsDaemonSpec) -> Daemon:
        with self._guard:
            daemon = self._daemons.get(spec.device)
            if daemon is None:
                self._refuse_overlap(spec)
                modes = {}
                if spec.kind == "gpu":
                    has_traces = self._layout.has_traces
                    is_left = has_traces(spec.device)
                    modes = {
                        uuid: DEFAULT
                        for name, uuid in zip(spec.devices, spec.gpu_uuids, strict=True)
                        if is_left or has_traces(name)
                    }
                record = DaemonRecord(spec, self._tools.boot_id, modes_before=modes)
                daemon = self._daemons[spec.device] = Daemon(record, self._tools, recovered=False)
            return daemon

    def _living(self) -> dict[str, Daemon]:
        with self._guard:
            return {device: daemon for device, daemon in self._daemons.items() if not daemon.gone}

    def _refuse_overlap(self, spec: MpsDaemonSpec) -> None:
        """Two daemons on one GPU would put its compute mode back under each other. The caller holds the guard."""
        if spec.kind == "mig":
            return
        for other in (daemon.status.spec for daemon in self._daemons.values() if not daemon.gone):
            common = set(spec.gpu_uuids) & set(other.gpu_uuids)
            if common and other.kind == "gpu":
                raise RetryableError(
                    f"GPU {min(common)} has the MPS daemon of {', '.join(other.devices)}, which has to stop before "
                    f"{', '.join(spec.devices)} can have one; it stops when the claims that use it are gone"
                )

    def _forget(self, device: str) -> None:
        with self._guard:
            if device in self._daemons and self._daemons[device].gone:
                del self._daemons[device]

    # --- what runs -----------------------------------------------------------------------------

    def _publish(self, device: str) -> None:
        """Have the device's status file right; if that fails, the next look tries again."""
        with self._publishing:
            daemon, report = self._daemons.get(device), self._answers.get(device)
            if daemon is not None:
                report = Report(daemon.status) if report is None else replace(report, status=daemon.status)
            elif report is not None and report.refusal is None:
                report = self._answers.pop(device, None) and None
            if report == self._published.get(device):
                self._unwritten.discard(device)
                return
            try:
                if report is None:
                    remove_file(self._layout.status(device))
                    del self._published[device]
                else:
                    content = encode_report(report)
                    write_atomically(self._layout.status(device), content, durable=False, whole=False)
                    self._published[device] = report
                self._unwritten.discard(device)
            except StateError as error:
                self._unwritten.add(device)
                _log.warning("mps_status_not_written", device=device, reason=str(error))

    # --- threads -------------------------------------------------------------------------------

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


def _free(path: Path, is_right: Callable[[Path], bool]) -> None:
    """Rename what is in the place of a file or directory of this host and cannot be one, which would else keep it from
    serving any device. Raises: StateError."""
    if os.path.lexists(path) and (path.is_symlink() or not is_right(path)):
        kept = set_aside(path, "file of the MPS host", stamp_at(path))
        _log.warning("mps_file_set_aside", path=str(path), kept_as=str(kept))


def _unknown(device: str) -> MpsDaemonSpec:
    """For a device of which nothing but its name is known; no daemon can be started with it."""
    return MpsDaemonSpec(device, "", "mig", "")


def _logged(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception:  # noqa: BLE001  the watch starts it again
        _log.exception("mps_watch_failed")


def _probe_all(daemons: list[Daemon]) -> None:
    users = processes.users_by_directory(
        [daemon.directories.pipe for daemon in daemons if not daemon.status.spec.multi_user]
    )
    for daemon in daemons:
        daemon.probe(users.get(daemon.directories.pipe, ()))
