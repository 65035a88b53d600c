"""Finds the processes that still use a claim's devices. A pod can be deleted while its processes hang in the
NVIDIA driver, or while the kubelet has forgotten the pod.

These processes do not count:

- in a service or login session of the host, by their cgroup: only pods use claims, and a display server never
  exits;
- the MPS server, which exits with its daemon when the claim is unprepared;
- on a device of which another claim holds a share: the process may belong to that claim;
- on a device that the claim has only with adminAccess: the process counts for the claim that holds the
  device;
- on a GPU for a virtual machine: vfio releases the GPU when its device node is closed.

A device is not in use if NVML lists no process (even if NVML cannot see the host's processes) or not the
device, if the GPU is lost or the kernel driver is not loaded, and after a reboot. If NVML fails in another
way, the use is unknown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from dra_driver.base.threads import BoundedCall
from dra_driver.errors import DeviceLostError, DraDriverError, NvmlUnavailableError, RetryableError
from dra_driver.journal.ledger import Ledger
from dra_driver.model.claim import HeldDevice
from dra_driver.model.dataclass import KW_ONLY, dataclass
from dra_driver.model.record import ClaimRecord
from dra_driver.model.units import named
from dra_driver.nvml.reader import NvmlReader

_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class InUse:
    """`text` is such as `process 4711 (python3) still uses gpu-4cf8db2d (GPU GPU-4cf8db2d-…)`."""

    pids: frozenset[int]
    text: str


@dataclass(eq=False)
class GpuProcesses:
    """Queries NVML, for at most `wait_s` seconds. Thread-safe."""

    nvml: NvmlReader
    ledger: Ledger
    _: KW_ONLY
    is_of_the_host: Callable[[int], bool]
    driver_is_gone: Callable[[], bool]
    wait_s: float = 2.0

    def __post_init__(self) -> None:
        self._turn = threading.Lock()
        self._calls: dict[str, BoundedCall[Mapping[int, str]]] = {}

    def of(self, record: ClaimRecord) -> InUse | None:
        """Raise DraDriverError if NVML cannot list the processes now."""
        end = time.monotonic() + self.wait_s
        users: dict[int, str] = {}
        used: list[str] = []
        unsure: RetryableError | None = None
        for held in self._own_devices(record):
            uuid = held.uuid or self.ledger.created_uuid(held.device)
            if uuid is None:
                continue
            try:
                found = self._users_of(uuid, held.device, end)
            except RetryableError as error:
                unsure = unsure or error
                continue
            if found:
                users |= found
                used.append(f"{held.device} (GPU {held.gpu_uuid})")
        if users:
            return InUse(frozenset(users), _text(users, used))
        if unsure is not None:
            raise unsure
        return None

    def describe(self, record: ClaimRecord) -> str | None:
        """Return a clause; None if no process is known."""
        try:
            found = self.of(record)
        except DraDriverError:
            return None
        return None if found is None else found.text

    def _own_devices(self, record: ClaimRecord) -> Iterator[HeldDevice]:
        if record.boot_id != self.ledger.boot_id:
            return
        shared = {
            (held.gpu_uuid, held.device)
            for uid, other in self.ledger.records.all().items()
            for held in other.devices
            if uid != record.ref.uid and not held.admin_access
        }
        for held in record.devices:
            key = (held.gpu_uuid, held.device)
            if not held.admin_access and held.kind != "vfio" and key not in shared:
                shared.add(key)  # yield a device once, even if the claim holds several shares of it
                yield held

    def _users_of(self, uuid: str, device: str, end: float) -> dict[int, str]:
        """Raise RetryableError if NVML does not answer by `end` (time.monotonic()), or fails."""
        hangs = RetryableError(f"NVML did not return the processes on {device} in time")
        if not self._turn.acquire(timeout=max(0.0, end - time.monotonic())):
            raise hangs
        try:
            call = self._calls.setdefault(
                uuid, BoundedCall(f"NVML (processes on {device})", partial(self._ask, uuid))
            )
            if call.is_running:
                raise hangs  # The query has hung since an earlier call, so do not wait for it again.
            call.start()
            found, problem = call.result(max(0.0, end - time.monotonic()))
            if call.is_running:
                raise hangs
            del self._calls[uuid]
        finally:
            self._turn.release()
        if found is None or problem is not None:
            raise RetryableError(problem or f"NVML does not return the processes on {device}")
        return {pid: text for pid, text in found.items() if not self.is_of_the_host(pid)}

    def _ask(self, uuid: str) -> Mapping[int, str]:
        try:
            return self.nvml.processes(uuid)
        except DeviceLostError:
            return {}
        except NvmlUnavailableError:
            if self.driver_is_gone():
                return {}
            raise


def _text(users: Mapping[int, str], used: list[str]) -> str:
    processes = [users[pid] for pid in sorted(users)]
    verb = "uses" if len(processes) == 1 else "use"
    return f"{named(processes, _MAX_NAMED)} still {verb} {', '.join(used)}"
