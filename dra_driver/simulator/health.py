"""Everything that can go wrong with a simulated GPU except its loss, and the processes that use it."""

from __future__ import annotations

from typing import Any

import pynvml

from dra_driver.simulator.base import MachineBase, Selector
from dra_driver.simulator.state import Holder

XID_RECOVERY_ACTION = 154


class Health(MachineBase):
    """Events, counters, links, fabric, processes."""

    def raise_xid(
        self,
        selector: Selector,
        xid: int,
        *,
        gpu_instance: int | None = None,
        compute_instance: int | None = None,
    ) -> None:
        """Queue an Xid event for every event set that registered before."""
        self.raise_event(
            selector,
            pynvml.nvmlEventTypeXidCriticalError,
            xid,
            gpu_instance=gpu_instance,
            compute_instance=compute_instance,
        )

    def raise_event(
        self,
        selector: Selector,
        kind: int,
        data: int,
        *,
        gpu_instance: int | None = None,
        compute_instance: int | None = None,
    ) -> None:
        with self._change() as state:
            state.add_event(self._find(state, selector), kind, data, gpu_instance, compute_instance)

    def set_recovery_action(self, selector: Selector, action: int) -> None:
        """The driver asks for a reset or the like (NVML_GPU_RECOVERY_ACTION_*), and says so with Xid 154."""
        with self._change() as state:
            gpu = self._find(state, selector)
            gpu.recovery_action = action
            state.add_event(gpu, pynvml.nvmlEventTypeXidCriticalError, XID_RECOVERY_ACTION)
            state.add_event(gpu, pynvml.nvmlEventTypeGpuRecoveryAction, action)

    def set_remapped_rows(
        self,
        selector: Selector,
        *,
        correctable: int = 0,
        uncorrectable: int = 0,
        pending: int = 0,
        failed: int = 0,
    ) -> None:
        with self._change() as state:
            self._find(state, selector).remapped_rows = [correctable, uncorrectable, pending, failed]

    def set_ecc_errors(self, selector: Selector, *, corrected: int = 0, uncorrected: int = 0) -> None:
        with self._change() as state:
            gpu = self._find(state, selector)
            gpu.ecc_corrected, gpu.ecc_uncorrected = corrected, uncorrected

    def set_retired_pages_pending(self, selector: Selector, pending: bool) -> None:
        with self._change() as state:
            self._find(state, selector).retired_pending = int(pending)

    def set_slowdown(self, selector: Selector, reasons: int) -> None:
        """Set why the clocks are held down, as bits of nvmlClocksThrottleReason*; 0 if they are not."""
        with self._change() as state:
            self._find(state, selector).slowdown = reasons

    def reset_gpu(self, selector: Selector) -> None:
        """`nvidia-smi --gpu-reset`: pending changes take effect, and volatile counters start again."""
        with self._change() as state:
            gpu = self._find(state, selector)
            gpu.recovery_action = gpu.retired_pending = gpu.ecc_uncorrected = gpu.ecc_corrected = 0
            gpu.remapped_rows[2] = 0
            gpu.resets += 1

    def set_links_down(self, selector: Selector, links: list[int]) -> None:
        with self._change() as state:
            self._find(state, selector).links_down = list(links)

    def set_links_unsupported(self, selector: Selector, links: list[int]) -> None:
        """Links that this board does not have, among those that it has."""
        with self._change() as state:
            self._find(state, selector).links_unsupported = list(links)

    def set_fabric(self, selector: Selector | None = None, **facts: Any) -> None:
        """Fields of the fabric (state, status, cluster, clique, health_mask, health_summary), of one GPU or all."""
        with self._change() as state:
            if selector is None:
                state.fabric = {**state.fabric, **facts}
            else:
                gpu = self._find(state, selector)
                gpu.fabric = {**gpu.fabric, **facts}

    def hold_gpu(
        self,
        selector: Selector,
        pid: int,
        name: str,
        *,
        gpu_instance: int | None = None,
        compute_instance: int | None = None,
        mps: bool = False,
    ) -> None:
        """A process uses the GPU or one of its instances, so that changes are refused with IN_USE."""
        with self._change() as state:
            holder = Holder(pid, name, gpu_instance, compute_instance, mps=mps)
            self._find(state, selector).holders.append(holder)

    def release_gpu(self, selector: Selector, pid: int | None = None) -> None:
        """End the process; without a pid end all processes."""
        with self._change() as state:
            gpu = self._find(state, selector)
            gpu.holders = [] if pid is None else [item for item in gpu.holders if item.pid != pid]

    release = release_gpu
