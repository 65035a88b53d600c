"""The parts that see to it that claims let go of devices, put together: waiting, and taking back."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dra_driver.app.migparts import MigParts
from dra_driver.errors import DraDriverError
from dra_driver.host.fingerprint import driver_fingerprint
from dra_driver.host.processes import is_of_the_host
from dra_driver.kube.nodes import node_uid
from dra_driver.kube.versions import ResourceApi
from dra_driver.model.claim import ClaimRef
from dra_driver.model.record import ClaimRecord
from dra_driver.platforms import NvmlReader
from dra_driver.services.claimpods import ClaimPods, RecordedPods
from dra_driver.services.claimreader import ClaimReader
from dra_driver.services.deviceusers import DeviceUsers
from dra_driver.services.reconciler import Observer, Reconciler, Taker
from dra_driver.services.waiting import Releases
from dra_driver.settings import Settings
from dra_driver.state.cdi_directory import CdiDirectory
from dra_driver.state.claimlocks import ClaimLocks
from dra_driver.state.records import RecordStore


class ReleaseParts:
    """`claims` and `releases` are for the preparer, which `start` then wants as the one who takes claims back."""

    def __init__(
        self,
        settings: Settings,
        api: ResourceApi,
        records: RecordStore,
        claim_locks: ClaimLocks,
        specs: CdiDirectory,
        observer: Observer,
        pods: ClaimPods,
    ) -> None:
        self._settings = settings
        self._client = api.client
        self._records = records
        self._recorded_pods = RecordedPods(records, claim_locks.hold)
        self._specs = specs
        self._observer = observer
        self._reconciler: Reconciler | None = None
        self._users: DeviceUsers | None = None
        self.claims = ClaimReader(api, pods.note)
        self.releases = Releases(
            self.claims, records, settings.driver_name, on_wait=self._look_soon, users=self._users_of
        )

    def start(self, taker: Taker, nvml: NvmlReader, mig: MigParts, boot_id: str, proc: str) -> None:
        """Begin to compare records with the API server, and with what NVML shows."""
        settings = self._settings
        self._users = DeviceUsers(
            nvml.processes,
            mig.uuid_of,
            self._records.all,
            boot_id,
            is_of_the_host=lambda pid: is_of_the_host(proc, pid),
            driver_is_gone=lambda: not driver_fingerprint(proc),
        )
        self._reconciler = Reconciler(
            self._records,
            self.claims,
            taker,
            settings.driver_name,
            self._observer,
            unrecorded=self._unrecorded,
            in_use=self._users.of,
            make_sure=lambda: node_uid(self._client, settings.node_name),
            keep_pods=self._recorded_pods.keep,
        )
        self._reconciler.start()

    def stop(self) -> None:
        """Stop comparing; harmless before the start."""
        if self._reconciler is not None:
            self._reconciler.stop()

    def _look_soon(self, holder: ClaimRef) -> None:
        if self._reconciler is not None:
            self._reconciler.look_soon(holder)

    def _users_of(self, holder: ClaimRecord) -> str | None:
        """For people: what still computes on the devices of a claim that somebody waits for."""
        try:
            found = None if self._users is None else self._users.of(holder)
        except DraDriverError:
            return None
        return None if found is None else found.text

    def _unrecorded(self, records: Mapping[str, ClaimRecord]) -> Collection[str]:
        """Claims that have a CDI spec but no record, nor one that was set aside."""
        set_aside = {path.name.partition(".json")[0] for path in self._records.quarantined()}
        return self._specs.list().keys() - records.keys() - set_aside
