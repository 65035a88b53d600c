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
        kind: int = pynvml.nvmlEventTypeXidCriticalError,
        gpu_instance: int | None = None,
        compute_instance: int | None = None,
    ) -> None:
        """Queue an Xid event, or one of another `kind`, for every event set that registered before."""
        with self._change() as state:
            state.add_event(self._find(state, selector), kind, xid, gpu_instance, compute_instance)

    def set_recovery_action(self, selector: Selector, action: int) -> None:
        """The NVIDIA driver requests a reset or the like (NVML_GPU_RECOVERY_ACTION_*), and reports Xid 154."""
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

    def set_gpu(self, selector: Selector, **facts: Any) -> None:
        """Set fields of `Gpu`: its counters, links, what holds its clocks down."""
        with self._change() as state:
            gpu = self._find(state, selector)
            for name, value in facts.items():
                setattr(gpu, name, value)

    def reset_gpu(self, selector: Selector) -> None:
        """`nvidia-smi --gpu-reset`: pending changes take effect, and volatile counters start again."""
        with self._change() as state:
            gpu = self._find(state, selector)
            gpu.recovery_action = gpu.retired_pending = gpu.ecc_uncorrected = gpu.ecc_corrected = 0
            gpu.remapped_rows[2] = 0
            gpu.resets += 1

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
        utilisation: int = 40,
    ) -> None:
        """A process uses the GPU or one of its instances, so that changes are refused with IN_USE."""
        with self._change() as state:
            holder = Holder(pid, name, gpu_instance, compute_instance, mps=mps, utilisation=utilisation)
            self._find(state, selector).holders.append(holder)

    def release_gpu(self, selector: Selector, pid: int | None = None) -> None:
        """End the process; without a pid end all processes."""
        with self._change() as state:
            gpu = self._find(state, selector)
            gpu.holders = [] if pid is None else [item for item in gpu.holders if item.pid != pid]
