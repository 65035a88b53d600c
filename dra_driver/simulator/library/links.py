"""NVLink, peer access and fabric."""

from __future__ import annotations

import uuid
from typing import Any

import pynvml

from dra_driver.simulator.catalogue import PLACEHOLDER_BUS
from dra_driver.simulator.library.core import Core, number, put, target
from dra_driver.simulator.machine_state import (
    REMOTE_SWITCH,
    Gpu,
    Model,
    State,
    active_links,
    nvlink_peers,
    nvml_bus_id,
    pci_numbers,
)
from dra_driver.simulator.mig import Refusal

_GPU_FABRIC_V3_SINCE = 575
_UNICAST_POINTER = 0


class Links(Core):
    """nvmlDeviceGetNvLink*, P2P, topology, fabric."""

    def _link(self, handle: Any, link: Any) -> tuple[State, Gpu, Model, int]:
        state, gpu = self.gpu(handle)
        model = state.model_of(gpu)
        if not model.nvlinks:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if not 0 <= number(link) < model.nvlinks:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if number(link) in gpu.links_unsupported:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return state, gpu, model, number(link)

    def _active(self, handle: Any, link: Any) -> tuple[State, Gpu, Model, int, str]:
        """(…, remote type, remote address) of a link that is up."""
        state, gpu, model, wanted = self._link(handle, link)
        for index, kind, remote in active_links(gpu):
            if index == wanted:
                return state, gpu, model, kind, remote or PLACEHOLDER_BUS
        raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: Any, out: Any) -> None:  # noqa: N802
        _, gpu, _, wanted = self._link(handle, link)
        put(out, int(any(index == wanted for index, _, _ in active_links(gpu))))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: Any, out: Any) -> None:  # noqa: N802
        put(out, self._active(handle, link)[3])

    def nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle: Any, link: Any, out: Any) -> None:  # noqa: N802
        state, _, _, kind, remote = self._active(handle, link)
        info = target(out)
        if kind == REMOTE_SWITCH and remote == PLACEHOLDER_BUS:
            if state.nvlink.get("remote") == "not-supported":
                raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
            info.domain = info.bus = info.device = info.pciDeviceId = 0xFFFFFFFF
            info.busId, info.busIdLegacy = b"FFFFFFFF:FF:FF.0", b"FFFF:FF:FF.0"
            return
        peer = next((item for item in state.gpus if item.bus_id == remote), None)
        info.domain, info.bus, info.device = pci_numbers(remote)
        info.busId, info.busIdLegacy = nvml_bus_id(remote).encode(), remote.upper().encode()
        if peer is not None:
            info.pciDeviceId = state.model_of(peer).pci_id
        else:
            switch = next((item for item in state.functions if item.bus_id == remote), None)
            info.pciDeviceId = (switch.device << 16 | 0x10DE) if switch else 0

    # --- peers ---------------------------------------------------------------------------------

    def nvmlDeviceGetP2PStatus(self, first: Any, second: Any, index: Any, out: Any) -> None:  # noqa: N802
        state, ours = self.gpu(first)
        _, theirs = self.gpu(second)
        kind = number(index[0] if isinstance(index, tuple) else index)
        if ours.uuid == theirs.uuid or not 0 <= kind < pynvml.NVML_P2P_CAPS_INDEX_UNKNOWN:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        put(out, self._p2p(state, ours, theirs, kind))

    def _p2p(self, state: State, ours: Gpu, theirs: Gpu, kind: int) -> int:
        if ours.mig_mode or theirs.mig_mode:
            return int(pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)
        peers = nvlink_peers(state, ours, theirs)
        if kind == pynvml.NVML_P2P_CAPS_INDEX_NVLINK:
            return int(pynvml.NVML_P2P_STATUS_OK if peers else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)
        if kind == pynvml.NVML_P2P_CAPS_INDEX_ATOMICS and not peers:
            return int(pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)
        if peers or not (ours.virtualization or theirs.virtualization):
            return int(pynvml.NVML_P2P_STATUS_OK)
        return int(pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED)

    # --- fabric --------------------------------------------------------------------------------

    def nvmlDeviceGetGpuFabricInfo(self, handle: Any, out: Any) -> None:  # noqa: N802
        info = target(out)
        info.cliqueId = _first_clique(self._fill_fabric(handle, info))

    def nvmlDeviceGetGpuFabricInfoV(self, handle: Any, out: Any) -> None:  # noqa: N802
        info = target(out)
        known = {pynvml.nvmlGpuFabricInfo_v2}
        if self.state().branch >= _GPU_FABRIC_V3_SINCE:
            known.add(pynvml.nvmlGpuFabricInfo_v3)
        if info.version not in known:
            raise Refusal(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        fabric = self._fill_fabric(handle, info)
        info.cliqueId = _first_clique(fabric)
        info.healthMask, summary = _health(fabric)
        if info.version == pynvml.nvmlGpuFabricInfo_v3:
            info.healthSummary = summary

    def nvmlDeviceGetGpuFabricInfo_v4(self, handle: Any, out: Any) -> None:  # noqa: N802
        info = target(out)
        fabric = self._fill_fabric(handle, info)
        info.healthMask, info.healthSummary = _health(fabric)
        info.numCliques = len(_cliques(fabric))
        for entry, (kind, clique) in zip(info.cliques, _cliques(fabric), strict=False):
            entry.type, entry.id = kind, clique

    def _fill_fabric(self, handle: Any, info: Any) -> dict[str, Any]:
        state, gpu = self.gpu(handle)
        if not state.model_of(gpu).fabric:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        fabric = {**state.fabric, **gpu.fabric}
        info.state = fabric.get("state", pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED)
        info.status = fabric.get("status", 0)
        cluster = uuid.UUID(fabric["cluster"]).bytes if fabric.get("cluster") else bytes(16)
        for index, byte in enumerate(cluster):
            info.clusterUuid[index] = byte
        return fabric


def _cliques(fabric: dict[str, Any]) -> list[list[int]]:
    """(type, number) of each clique, in NVML's order."""
    return sorted(fabric.get("cliques") or [[_UNICAST_POINTER, fabric.get("clique", 0)]])


def _first_clique(fabric: dict[str, Any]) -> int:
    return next((number for kind, number in _cliques(fabric) if kind == _UNICAST_POINTER), 0)


def _health(fabric: dict[str, Any]) -> tuple[int, int]:
    """The mask and the summary."""
    summary = fabric.get("health_summary", 0)
    is_complete = fabric.get("state") == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
    return fabric.get("health_mask", 0), summary or int(is_complete)
