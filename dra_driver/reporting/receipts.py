"""Keeps the receipts of claims: measures the GPUs of prepared claims, counts, and writes one bounded file.

    prepared ──▶ running ──Unprepare──▶ ended ──1,000 claims have ended since──▶ forgotten
                    └─ ended while no process of the plugin worked ──▶ cut ──▶ (as above)

Prepare and Unprepare only queue a note; another thread does the rest, so a GPU that hangs delays no claim.

| A crash … | loses |
|---|---|
| while a claim runs | busy time since the last write of which NVML has no samples; no time, no energy |
| after a claim ended, before the next write | the end of the claim: it is `cut` at the last write |
| before the first write of a claim that has ended | the claim, which ran for less than a minute |

A reboot cuts all claims; the kubelet prepares them again.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import structlog

from dra_driver.base.fields import Codec, FileFormat
from dra_driver.base.json_store import JsonStore, log_unreadable
from dra_driver.errors import StateError
from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import KW_ONLY, dataclass, field, replace
from dra_driver.model.gpu import GpuMeasure
from dra_driver.model.inventory import Inventory
from dra_driver.model.problems import NodeProblem
from dra_driver.model.record import ClaimRecord
from dra_driver.model.schema import JsonObject
from dra_driver.reporting.rules.advice import Advice, Size, Sizes, advice_of, sizes_of
from dra_driver.reporting.rules.claim_usage import Made, mig_addresses
from dra_driver.reporting.rules.receipts import Hold, Part, Receipt, gains, opened
from dra_driver.reporting.usage import Wanted

_log = structlog.get_logger(__name__)

RECEIPTS_FILE = "receipts.json"
_NAME = RECEIPTS_FILE.removesuffix(".json")
_KEPT = 1000
_MEASURE_S = 10.0
"""NVML keeps about 20 s of samples."""
_WRITE_S = 60.0
_MAX_SERIES = 500
"""The rest has an empty namespace: namespaces must not flood the time series database."""


@dataclass(frozen=True, slots=True)
class KeptReceipts:
    """The content of the file. `ended` are encoded receipts, oldest first. `energies` has the last reading of each GPU
    by UUID: its time, in seconds since 1970, and joules.
    """

    running: tuple[Receipt, ...] = ()
    ended: tuple[JsonObject, ...] = ()
    energies: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=dict)


_RECEIPT = Codec(Receipt)
_SIZE = Codec(Size)
_ADVICE = Codec(Advice)
decode_receipt = _RECEIPT.decode


def _decoded(document: JsonObject) -> KeptReceipts:
    for one in document["ended"]:
        _RECEIPT.decode(one)
    return KeptReceipts(
        tuple(map(_RECEIPT.decode, document["running"])),
        tuple(document["ended"]),
        {str(uuid): (float(at), float(energy)) for uuid, (at, energy) in document["energies"].items()},
        {product: tuple(map(_SIZE.decode, of)) for product, of in document.get("sizes", {}).items()},
    )


_FILE = FileFormat(
    "file of receipts",
    _decoded,
    lambda kept: {
        "running": [_RECEIPT.encode(one) for one in kept.running],
        "ended": list(kept.ended),
        "energies": {uuid: list(one) for uuid, one in kept.energies.items()},
        "sizes": {product: [*map(_SIZE.encode, sizes)] for product, sizes in kept.sizes.items()},
    },
)


def receipt_store(directory: Path) -> JsonStore[KeptReceipts]:
    return JsonStore(
        directory,
        _FILE.what,
        lambda _, content: _FILE.read(content),
        _FILE.write,
        log_unreadable(
            unreadable_event="receipts_unreadable",
            name="file",
            remedy="the plugin starts with no receipts; inspect the file, then remove it",
            newer="the plugin cannot save receipts; install the newer release again, or remove the file",
        ),
        is_name=lambda name: name == _NAME,
    )


def read_kept(directory: Path) -> KeptReceipts:
    """Raises: StateError."""
    store = receipt_store(directory)
    kept = store.get(_NAME)
    if kept is None and store.in_place():
        raise StateError(f"{store.path(_NAME)} cannot be read; see the log of gpu-dra-driver")
    return kept or KeptReceipts()


def ended_receipts(kept: KeptReceipts) -> Sequence[Receipt]:
    return [_RECEIPT.decode(one) for one in reversed(kept.ended)]


def kept_advice(kept: KeptReceipts, driver: str) -> Sequence[Advice]:
    return advice_of([*kept.running, *ended_receipts(kept)], kept.sizes, driver)


def advice_of_page(text: str) -> Sequence[Advice]:
    """Decode the page `/advice`. Raises: ValueError if another release wrote it."""
    try:
        return [_ADVICE.decode(one) for one in json.loads(text)["advice"]]
    except (StateError, TypeError, KeyError) as error:
        raise ValueError(f"the plugin is of another release than this command: {error}") from error


@dataclass(eq=False)
class Receipts:
    """`prepared`, `unprepared` and `advice_as_json` may be called by any thread; the others by one at a time.

    `measure` reads GPUs in limited time. `driver_loads` counts reloads of the NVIDIA driver.
    """

    store: JsonStore[KeptReceipts]
    measure: Callable[[Wanted], Mapping[str, GpuMeasure]]
    inventory: Callable[[], Inventory | None]
    records: Callable[[], Mapping[str, ClaimRecord]]
    made: Made
    driver_loads: Callable[[], int]
    _: KW_ONLY
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._notes: deque[tuple[ClaimRef, ClaimRecord | None, float]] = deque()
        self._running: dict[str, Receipt] = {}
        self._holds: dict[str, list[Hold]] = {}
        self._ended: deque[JsonObject] = deque(maxlen=_KEPT)
        self._last: dict[str, GpuMeasure] = {}
        self._sums: dict[tuple[str, str, str], Part] = {}
        self._restored: dict[str, Receipt] = {}
        self._measure_at = self._write_at = 0.0
        self._loads = 0
        self._is_changed = self._is_open = False

    def start(self) -> None:
        """Raises: StateError if the disk fails."""
        self.store.load()
        kept = self.store.get(_NAME) or KeptReceipts()
        self._ended.extend(kept.ended)
        self._restored = {one.claim.uid: one for one in kept.running}
        self._last = {uuid: GpuMeasure(at, energy) for uuid, (at, energy) in kept.energies.items()}
        for record in self.records().values():
            # Before an Unprepare can remove the record: the devices are not known yet.
            if record.ref.uid in self._restored and record.phase == "prepared":
                self.prepared(record)
        self._is_open = True

    def stop(self) -> None:
        """Running claims lose nothing, so only GPUs of ended claims are read."""
        if self._is_open:
            self._is_open = False
            with suppress(StateError):
                if self._follow(self.clock()):
                    self._account()
                self._write()
        self.store.close()

    def prepared(self, record: ClaimRecord) -> None:
        self._notes.append((record.ref, record, self.clock()))

    def unprepared(self, ref: ClaimRef) -> None:
        self._notes.append((ref, None, self.clock()))

    def sums(self) -> Mapping[tuple[str, str, str], Part]:
        """Since the start of the process, by namespace, product and kind."""
        return self._sums.copy()

    def advice_as_json(self, driver: str) -> bytes:
        found = [_ADVICE.encode(one) for one in kept_advice(self._kept(), driver)]
        return json.dumps({"advice": found}).encode()

    def _kept(self) -> KeptReceipts:
        last = self._last.copy().items()
        energies = {uuid: (one.at, one.energy_j) for uuid, one in last if one.energy_j is not None}
        sizes = sizes_of(self.inventory() or Inventory())
        return KeptReceipts(tuple(self._running.copy().values()), tuple(self._ended.copy()), energies, sizes)

    def problems(self) -> Sequence[NodeProblem]:
        """Measure and write when due. Returns a problem if a newer release wrote the file. Raises: StateError."""
        if not self._is_open or self.inventory() is None:
            return ()
        now = self.clock()
        is_due = self._follow(now)
        if is_due or now >= self._measure_at:
            self._measure_at = now + _MEASURE_S
            self._account()
        if self._is_changed and now >= self._write_at:
            self._write_at = now + _WRITE_S
            self._write()
        return self.store.problems()

    def _follow(self, now: float) -> bool:
        changed = False
        while self._notes:
            ref, record, at = self._notes.popleft()
            changed |= self._open(record, at) if record is not None else self._end(ref.uid, at)
        records = self.records()
        for record in records.values():
            if record.phase == "prepared":
                changed |= self._open(record, _prepared_at(record, now))
        for uid in self._running:
            if uid not in records or records[uid].phase != "prepared":
                changed |= self._end(uid, now)
        for receipt in self._restored.values():
            self._keep(replace(receipt, end="cut"))
        self._restored = {}
        return changed

    def _open(self, record: ClaimRecord, at: float) -> bool:
        uid, restored = record.ref.uid, self._restored.pop(record.ref.uid, None)
        if uid in self._running:
            return False
        at = at if restored is None else restored.until
        made, holds = opened(record, self.inventory() or Inventory(), at)
        if restored is not None and len(restored.parts) != len(made.parts):
            self._keep(replace(restored, end="cut"))
        elif restored is not None:
            made = restored
        if holds:
            self._running[uid], self._holds[uid] = made, holds
        return bool(holds)

    def _end(self, uid: str, at: float) -> bool:
        holds = self._holds.get(uid, [])
        is_new = any(hold.ended is None for hold in holds)
        if is_new:
            self._holds[uid] = [replace(hold, ended=max(at, hold.began)) for hold in holds]
        return is_new

    def _account(self) -> None:
        loads, self._loads = self._loads, self.driver_loads()
        if loads != self._loads:  # the energy counters began at 0
            self._last = {uuid: GpuMeasure(one.at) for uuid, one in self._last.items()}
        of_gpus: dict[str, list[Hold]] = {}
        for hold in (hold for holds in self._holds.values() for hold in holds):
            of_gpus.setdefault(hold.device.gpu_uuid, []).append(hold)
        devices = {hold.device.device: hold.device for holds in of_gpus.values() for hold in holds}
        addresses = mig_addresses(devices, self.inventory() or Inventory(), self.made)
        since = {
            uuid: self._last[uuid].at if uuid in self._last else min(hold.began for hold in holds)
            for uuid, holds in of_gpus.items()
        }
        wanted: Wanted = {
            uuid: (
                [addresses[name] for name in {one.device.device for one in holds} & addresses.keys()],
                since[uuid],
            )
            for uuid, holds in of_gpus.items()
        }
        found = self.measure(wanted) if wanted else {}
        uuids = {name: address.uuid for name, address in addresses.items()}
        for uuid, holds in of_gpus.items():
            after, before = found.get(uuid), self._last.get(uuid)
            until = self.clock() if after is None else after.at
            if until <= since[uuid]:
                continue  # the clock was set back
            for hold, gain in gains(holds, since[uuid], until, before, after, uuids):
                self._gain(hold, gain, until)
            self._last[uuid] = after or GpuMeasure(until)
        self._last = {uuid: self._last[uuid] for uuid in of_gpus.keys() & self._last.keys()}
        for uid, holds in [*self._holds.items()]:
            if holds[0].ended is not None:
                self._close(uid, holds[0].ended)
        self._is_changed |= bool(of_gpus)

    def _gain(self, hold: Hold, gain: Part, until: float) -> None:
        receipt = self._running[hold.uid]
        parts = [part.plus(gain) if index == hold.part else part for index, part in enumerate(receipt.parts)]
        self._running[hold.uid] = replace(receipt, until=until, parts=tuple(parts))
        part = parts[hold.part]
        key = receipt.claim.namespace, part.product, part.kind
        if key not in self._sums and len(self._sums) >= _MAX_SERIES:
            key = "", part.product, part.kind
        self._sums[key] = self._sums.get(key, Part(part.product, part.kind, 0)).plus(gain)

    def _close(self, uid: str, ended: float) -> None:
        del self._holds[uid]
        self._keep(replace(self._running.pop(uid), until=ended, end="ended"))

    def _keep(self, receipt: Receipt) -> None:
        self._ended.append(_RECEIPT.encode(receipt))
        self._is_changed = True

    def _write(self) -> None:
        self.store.write(_NAME, self._kept(), durable=False, whole=True)
        self._is_changed = False


def _prepared_at(record: ClaimRecord, now: float) -> float:
    with suppress(ValueError):
        return min(now, datetime.fromisoformat(record.prepared_at or "").timestamp())
    return now
