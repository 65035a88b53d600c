"""The parts that see to it that claims let go of devices, put together: waiting, and taking back."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dra_driver.kube.nodes import node_uid
from dra_driver.kube.versions import ResourceApi
from dra_driver.model.claim import ClaimRef
from dra_driver.model.record import ClaimRecord
from dra_driver.services.claimreader import ClaimReader
from dra_driver.services.reconciler import Observer, Reconciler, Taker
from dra_driver.services.waiting import Releases
from dra_driver.settings import Settings
from dra_driver.state.cdi_directory import CdiDirectory
from dra_driver.state.records import RecordStore


class ReleaseParts:
    """`claims` and `releases` are for the preparer, which `start` then wants as the one who takes claims back."""

    def __init__(
        self,
        settings: Settings,
        api: ResourceApi,
        records: RecordStore,
        specs: CdiDirectory,
        observer: Observer,
    ) -> None:
        self._settings = settings
        self._client = api.client
        self._records = records
        self._specs = specs
        self._observer = observer
        self._reconciler: Reconciler | None = None
        self.claims = ClaimReader(api)
        self.releases = Releases(self.claims, records, settings.driver_name, on_wait=self._look_soon)

    def start(self, taker: Taker) -> None:
        """Begin to compare records with the API server."""
        settings = self._settings
        self._reconciler = Reconciler(
            self._records,
            self.claims,
            taker,
            settings.driver_name,
            self._observer,
            unrecorded=self._unrecorded,
            make_sure=lambda: node_uid(self._client, settings.node_name),
        )
        self._reconciler.start()

    def stop(self) -> None:
        """Stop comparing; harmless before the start."""
        if self._reconciler is not None:
            self._reconciler.stop()

    def _look_soon(self, holder: ClaimRef) -> None:
        if self._reconciler is not None:
            self._reconciler.look_soon(holder)

    def _unrecorded(self, records: Mapping[str, ClaimRecord]) -> Collection[str]:
        """Claims that have a CDI spec but no record, nor one that was set aside."""
        set_aside = {path.name.partition(".json")[0] for path in self._records.quarantined()}
        return self._specs.list().keys() - records.keys() - set_aside
