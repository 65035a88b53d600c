"""Which processes still compute on what a claim holds.

A pod can be gone for the API server while its processes are not: they hang in the NVIDIA driver, or the kubelet was
told to forget a pod that it could not end. Who counts:

| Process | Counts | Why |
|---|---|---|
| of a container, or of nobody that can be named | yes | it may be the claim's |
| in a service or login session of the host, by its cgroup | no | pods use claims; a display server never ends |
| the server of MPS | no | it ends with the daemon, which taking the claim back stops |
| on a device of which another claim holds a share | no | it may be that claim's; nobody gets the device anew |
| on a device that is held with admin access only | no | the device is somebody else's |

Claims that look on with admin access do not hold the device: what they compute there counts, rather than that the
device is given out under a process.

| NVML | Then |
|---|---|
| shows no process | nobody uses the device. It says so too where it does not see the host's processes |
| does not have the device, or the GPU is lost | the same: nothing computes there, and nobody gets it |
| is away, as the kernel driver is | the same |
| is away for another reason, hangs, fails | that is not sure, and asked again; no Prepare would be served either |

The record of an earlier boot has no processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from dra_driver.errors import DeviceLostError, NvmlUnavailableError, RetryableError
from dra_driver.model.record import ClaimRecord, HeldDevice
from dra_driver.services.patience import Patient

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class InUse:
    """Processes that compute on a claim's devices: their IDs, and a clause `process 4711 (python3) still computes on
    gpu-4cf8db2d (GPU GPU-4cf8db2d-…)`."""

    pids: frozenset[int]
    text: str


class DeviceUsers:
    """Asks NVML, and waits no longer than a moment for it. For many threads."""

    def __init__(
        self,
        processes: Callable[[str], Mapping[int, str]],
        uuid_of: Callable[[str], str | None],
        records: Callable[[], Mapping[str, ClaimRecord]],
        boot_id: str,
        *,
        is_of_the_host: Callable[[int], bool],
        driver_is_gone: Callable[[], bool],
        wait_s: float = 2.0,
    ) -> None:
        """`processes` answers those on a GPU or MIG device by its UUID, as `read_processes`; `uuid_of` the UUID that a
        MIG device made on demand has now, None if it is not there."""
        self._processes = processes
        self._uuid_of = uuid_of
        self._records = records
        self._boot_id = boot_id
        self._is_of_the_host = is_of_the_host
        self._driver_is_gone = driver_is_gone
        self._wait_s = wait_s
        self._turn = threading.Lock()
        self._asked: dict[str, Patient[Mapping[int, str]]] = {}

    def of(self, record: ClaimRecord) -> InUse | None:
        """Who computes on the claim's devices; None if nobody is known to.

        Raises: DraDriverError if that cannot be told now.
        """
        end = time.monotonic() + self._wait_s
        users: dict[int, str] = {}
        used: list[str] = []
        unsure: RetryableError | None = None
        for held in self._own_devices(record):
            uuid = held.uuid or self._uuid_of(held.device)
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

    def _own_devices(self, record: ClaimRecord) -> Iterator[HeldDevice]:
        """The devices that nobody holds beside the claim."""
        if record.boot_id != self._boot_id:
            return
        shared = {
            (held.gpu_uuid, held.device)
            for uid, other in self._records().items()
            for held in other.devices
            if uid != record.ref.uid and not held.admin_access
        }
        for held in record.devices:
            key = (held.gpu_uuid, held.device)
            if not held.admin_access and key not in shared:
                shared.add(key)  # once, though the claim may hold several shares of it
                yield held

    def _users_of(self, uuid: str, device: str, end: float) -> dict[int, str]:
        """Raises: RetryableError if NVML does not tell by `end` (time.monotonic()), or fails."""
        hangs = RetryableError(f"NVML does not answer what computes on {device}")
        if not self._turn.acquire(timeout=max(0.0, end - time.monotonic())):
            raise hangs
        try:
            asked = self._asked.setdefault(uuid, Patient(f"NVML about {device}", partial(self._ask, uuid)))
            if asked.is_asking:
                raise hangs  # since an earlier call, so nobody waits for it any more
            asked.ask()
            found, problem = asked.answer(max(0.0, end - time.monotonic()))
            if asked.is_asking:
                raise hangs
            del self._asked[uuid]
        finally:
            self._turn.release()
        if found is None or problem is not None:
            raise RetryableError(problem or f"NVML does not tell what computes on {device}")
        return {pid: text for pid, text in found.items() if not self._is_of_the_host(pid)}

    def _ask(self, uuid: str) -> Mapping[int, str]:
        try:
            return self._processes(uuid)
        except DeviceLostError:
            return {}
        except NvmlUnavailableError:
            if self._driver_is_gone():
                return {}
            raise


def _text(users: Mapping[int, str], used: list[str]) -> str:
    named = [users[pid] for pid in sorted(users)]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    verb = "computes" if len(named) == 1 else "compute"
    return f"{', '.join(named[:_MOST_NAMED])}{more} still {verb} on {', '.join(used)}"
