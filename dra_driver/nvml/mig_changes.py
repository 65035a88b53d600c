"""Creates and destroys GPU instances and compute instances, and switches MIG mode."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import pynvml

from dra_driver.errors import (
    DeviceBusyError,
    DeviceLostError,
    DraDriverError,
    NotSupportedError,
    NvmlTransientError,
    NvmlUnavailableError,
    NvmlUnknownOutcomeError,
    RetryableError,
)
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DiscoveryFault
from dra_driver.model.mig import GpuInstance, MigProfile, PlacedProfile, Placement
from dra_driver.model.remedies import reset
from dra_driver.nvml.calls import Handle, nvml_errors, supported
from dra_driver.nvml.gpu_users import busy_error, holders_of
from dra_driver.nvml.mig_reading import (
    Tables,
    compute_identity,
    compute_instance_handles,
    compute_profiles,
    gpu_handle,
    gpu_instance_handle,
    is_mig_on,
    mig_mode,
    placement_of,
    read_gpu_instances,
    read_placed_profiles,
    read_profiles,
    whole_compute_profile,
)

P = ParamSpec("P")
T = TypeVar("T")

_LOOK_AT_GPU = "`fuser -v /dev/nvidia*` on the node"
_LOOK_AT_CAPS = "`fuser -v /dev/nvidia-caps/*` on the node"


def _whole(
    method: Callable[Concatenate[MigHardware, P], T],
) -> Callable[Concatenate[MigHardware, P], T]:
    """Run the method as one NVML operation, so that NVML is not shut down before the method returns."""

    @wraps(method)
    def as_operation(self: MigHardware, /, *arguments: P.args, **options: P.kwargs) -> T:
        with self._operation():
            return method(self, *arguments, **options)

    return as_operation


_NO_SPACE = "the NVIDIA driver has no free space at that placement"


class MigHardware:
    """The MIG state of the GPUs.

    Every method looks up its GPU, because a handle does not survive a driver reload. Thread-safe, but the caller must
    ensure that only one thread changes a GPU at a time.

    All methods raise DeviceLostError if the GPU is gone or replaced, NvmlUnavailableError, NotSupportedError,
    NvmlTransientError if the call may work a moment later (NvmlUnknownOutcomeError if it may have worked),
    RetryableError.
    """

    def __init__(
        self,
        operation: Callable[[], AbstractContextManager[object]],
        closed_elsewhere: Callable[[str, str], AbstractContextManager[object]] = lambda *_: nullcontext(),
    ) -> None:
        """Inside `closed_elsewhere`, no other process of the plugin has NVML open. `operation` is reentrant."""
        self._operation = operation
        self._closed_elsewhere = closed_elsewhere
        self._profiles = Tables(read_profiles)
        self._cuts = Tables(read_placed_profiles)

    # --- mode ----------------------------------------------------------------------------------

    @_whole
    def mode(self, gpu_uuid: str, pci_bus_id: str | None) -> tuple[bool, bool] | None:
        """Return MIG mode as (current, after the next reset); None for a GPU without MIG."""
        return mig_mode(gpu_handle(gpu_uuid, pci_bus_id), gpu_uuid)

    @_whole
    def set_mode(self, gpu_uuid: str, pci_bus_id: str | None, on: bool) -> None:
        """Switch MIG mode and verify it. The GPU's minor number may change.

        Raises: DeviceBusyError while a process uses the GPU; RetryableError if the change needs a reset.
        """
        handle = gpu_handle(gpu_uuid, pci_bus_id)
        action = f"switch MIG mode of GPU {gpu_uuid} {'on' if on else 'off'}"
        before = mig_mode(handle, gpu_uuid)
        if before is None:
            raise NotSupportedError(f"cannot {action}: the GPU does not support MIG")
        if before == (on, on):
            return
        waits = RetryableError(
            f"cannot {action}: the mode takes effect at the next reset of the GPU; {reset(gpu_uuid)} or virtual machine"
        )
        try:
            # Every process with NVML open is a client of every GPU.
            with (
                self._closed_elsewhere(gpu_uuid, f"is switching MIG mode of GPU {gpu_uuid}"),
                nvml_errors(action),
            ):
                try:
                    # The call also succeeds without a change; its status says whether the mode changed.
                    status = pynvml.nvmlDeviceSetMigMode(handle, int(on))
                    if status != pynvml.NVML_SUCCESS:
                        raise pynvml.NVMLError(status)
                except pynvml.NVMLError_ResetRequired as error:
                    raise waits from error
        except DeviceBusyError as error:
            raise busy_error(action, holders_of([handle]), "the GPU", _LOOK_AT_GPU) from error
        after = mig_mode(gpu_handle(gpu_uuid, pci_bus_id), gpu_uuid)
        if after is None or after[0] != on:
            raise waits

    @_whole
    def minor(self, gpu_uuid: str, pci_bus_id: str | None) -> int | None:
        handle = gpu_handle(gpu_uuid, pci_bus_id)
        with nvml_errors(f"read the minor number of GPU {gpu_uuid}"):
            return supported(pynvml.nvmlDeviceGetMinorNumber, handle)

    @_whole
    def cuts(self, gpu: Gpu) -> tuple[str, tuple[PlacedProfile, ...]]:
        """Return the GPU's PCI device and vendor ID, such as `0x233010de`, and every profile with its placements."""
        handle = gpu_handle(gpu.uuid, gpu.pci_bus_id)
        with nvml_errors(f"read the PCI ID of GPU {gpu.uuid}"):
            pci_id = int(pynvml.nvmlDeviceGetPciInfo(handle).pciDeviceId)
        if mig_mode(handle, gpu.uuid) is None:
            return f"0x{pci_id:08x}", ()
        return f"0x{pci_id:08x}", self._complete_table(self._cuts, handle, gpu)

    # --- GPU instances -------------------------------------------------------------------------

    @_whole
    def instances(self, gpu_uuid: str, pci_bus_id: str | None) -> tuple[GpuInstance, ...]:
        return self._instances(gpu_handle(gpu_uuid, pci_bus_id), gpu_uuid)

    @_whole
    def create(self, gpu_uuid: str, pci_bus_id: str | None, profile_id: int, placement: Placement) -> int:
        """Create a GPU instance at exactly this placement and return its ID.

        Raises: RetryableError if an instance is in the way; NvmlTransientError if nothing is in the way.
        """
        handle = gpu_handle(gpu_uuid, pci_bus_id)
        action = f"create a GPU instance of profile {profile_id} at {_slices(placement)} of GPU {gpu_uuid}"
        wanted = pynvml.c_nvmlGpuInstancePlacement_t(placement.start, placement.size)
        try:
            with _creation_errors(action):
                try:
                    made = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(
                        handle, profile_id, ctypes.byref(wanted)
                    )
                except pynvml.NVMLError_InsufficientResources as error:
                    raise self._no_room(action, handle, gpu_uuid, profile_id, placement) from error
                except pynvml.NVMLError_InvalidArgument as error:
                    raise RetryableError(
                        f"cannot {action}: the NVIDIA driver does not accept this profile or placement ({error}); "
                        "delete the pod and its claim so that the scheduler allocates another device"
                    ) from error
        except NotSupportedError as error:
            mode = mig_mode(handle, gpu_uuid)
            if mode is None or mode[0]:
                raise
            raise NvmlTransientError(f"cannot {action}: MIG mode was switched off") from error
        try:
            with nvml_errors(f"read it back ({action})"):
                info = pynvml.nvmlGpuInstanceGetInfo(made)
            found, where = int(info.profileId), placement_of(info)
            if (found, where) != (profile_id, placement):
                raise RetryableError(
                    f"cannot {action}: the NVIDIA driver created profile {found} at {_slices(where)} instead"
                )
        except DraDriverError as error:
            _destroy_again(error, pynvml.nvmlGpuInstanceDestroy, made)
            raise
        return int(info.id)

    @_whole
    def destroy(self, gpu_uuid: str, pci_bus_id: str | None, gpu_instance_id: int) -> None:
        handle = gpu_handle(gpu_uuid, pci_bus_id)
        instance = gpu_instance_handle(handle, gpu_uuid, gpu_instance_id)
        if instance is None:
            return
        action = f"destroy GPU instance {gpu_instance_id} of GPU {gpu_uuid}"
        try:
            with nvml_errors(action):
                try:
                    pynvml.nvmlGpuInstanceDestroy(instance)
                except pynvml.NVMLError_NotFound:
                    return
        except DeviceBusyError as error:
            inside = _compute_instances_in(instance)
            holders = holders_of(device for *_, device in inside)
            if inside and not holders:
                left = ", ".join(f"{number} ({uuid})" for number, uuid, _ in inside)
                raise DeviceBusyError(
                    f"cannot {action}: it contains compute instances: {left}; destroy them first"
                ) from error
            raise busy_error(action, holders, "it", _LOOK_AT_CAPS) from error

    # --- compute instances ---------------------------------------------------------------------

    @_whole
    def compute_instances(
        self, gpu_uuid: str, pci_bus_id: str | None, gpu_instance_id: int
    ) -> tuple[tuple[int, str], ...]:
        """Return (ID, UUID of the MIG device) of each."""
        handle = gpu_handle(gpu_uuid, pci_bus_id)
        instance = gpu_instance_handle(handle, gpu_uuid, gpu_instance_id)
        if instance is None:
            return ()
        action = f"list the compute instances of GPU instance {gpu_instance_id} of GPU {gpu_uuid}"
        with nvml_errors(action):
            try:
                return tuple(sorted(compute_identity(row) for row in compute_instance_handles(instance)))
            except pynvml.NVMLError_NotFound as error:
                if gpu_instance_handle(handle, gpu_uuid, gpu_instance_id) is None:
                    return ()
                raise RetryableError(f"cannot {action}: one of the instances was destroyed") from error

    @_whole
    def create_compute(self, gpu_uuid: str, pci_bus_id: str | None, gpu_instance_id: int) -> tuple[int, str]:
        """Create the compute instance that covers a whole GPU instance; return (ID, UUID of the MIG device).

        A failure leaves nothing behind, except with NvmlUnknownOutcomeError. Raises: NvmlTransientError if the GPU
        instance is gone or already has compute instances.
        """
        handle = gpu_handle(gpu_uuid, pci_bus_id)
        action = f"create a compute instance in GPU instance {gpu_instance_id} of GPU {gpu_uuid}"
        instance = gpu_instance_handle(handle, gpu_uuid, gpu_instance_id)
        if instance is None:
            raise NvmlTransientError(f"cannot {action}: another program destroyed the GPU instance")
        profiles = self._table(handle, gpu_uuid)
        with _creation_errors(action):
            profile = profiles.get(int(pynvml.nvmlGpuInstanceGetInfo(instance).profileId))
            offered = compute_profiles(instance)
            chosen = None if profile is None else whole_compute_profile(offered, profile)
            if chosen is None:
                raise NotSupportedError(
                    f"cannot {action}: NVML offers no compute instance that uses the whole GPU instance"
                )
            made = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, chosen)
        try:
            with nvml_errors(f"read it back ({action})"):
                return compute_identity(made)
        except DraDriverError as error:
            _destroy_again(error, pynvml.nvmlComputeInstanceDestroy, made)
            raise

    @_whole
    def destroy_compute(
        self, gpu_uuid: str, pci_bus_id: str | None, gpu_instance_id: int, compute_instance_id: int
    ) -> None:
        handle = gpu_handle(gpu_uuid, pci_bus_id)
        instance = gpu_instance_handle(handle, gpu_uuid, gpu_instance_id)
        if instance is None:
            return
        action = f"destroy compute instance {compute_instance_id} of GPU instance {gpu_instance_id} of GPU {gpu_uuid}"
        try:
            with nvml_errors(action):
                try:
                    compute = pynvml.nvmlGpuInstanceGetComputeInstanceById(instance, compute_instance_id)
                    pynvml.nvmlComputeInstanceDestroy(compute)
                except pynvml.NVMLError_NotFound:
                    return
        except DeviceBusyError as error:
            inside = _compute_instances_in(instance)
            devices = [device for number, _, device in inside if number == compute_instance_id]
            raise busy_error(action, holders_of(devices), "it", _LOOK_AT_CAPS) from error

    # --- reading -------------------------------------------------------------------------------

    def _instances(self, handle: Handle, gpu_uuid: str) -> tuple[GpuInstance, ...]:
        if not is_mig_on(handle, gpu_uuid):
            return ()
        return read_gpu_instances(handle, gpu_uuid, self._table(handle, gpu_uuid).values())

    def _table(self, handle: Handle, gpu_uuid: str) -> dict[int, MigProfile]:
        return self._complete_table(self._profiles, handle, Gpu(uuid=gpu_uuid))

    def _complete_table(self, tables: Tables[T], handle: Handle, gpu: Gpu) -> T:
        with nvml_errors("read the driver version"):
            version = str(pynvml.nvmlSystemGetDriverVersion())
        faults: list[DiscoveryFault] = []
        table = tables.of(handle, gpu, version, faults)
        if faults:
            raise RetryableError(faults[0].text)
        return table

    def _no_room(
        self, action: str, handle: Handle, gpu_uuid: str, profile_id: int, placement: Placement
    ) -> RetryableError:
        """Return a transient error unless existing instances are the reason."""
        try:
            found = self._instances(handle, gpu_uuid)
            profile = self._table(handle, gpu_uuid).get(profile_id)
        except DraDriverError as error:
            return NvmlTransientError(f"cannot {action}: {_NO_SPACE}; the reason cannot be read ({error})")
        in_the_way = [item for item in found if item.placement.overlaps(placement)]
        if in_the_way:
            return RetryableError(f"cannot {action}: {_NO_SPACE}; in the way: {_listed(in_the_way)}")
        same = [item for item in found if item.profile_id == profile_id]
        if profile is not None and len(same) >= profile.max_instances:
            return RetryableError(
                f"cannot {action}: the GPU cannot have more instances of this profile; it has: {_listed(same)}"
            )
        return NvmlTransientError(
            f"cannot {action}: {_NO_SPACE}, although nothing is in the way; the NVIDIA driver may still be scrubbing "
            f"the memory of the previous instance (existing GPU instances: {_listed(found) or 'none'})"
        )


@contextmanager
def _creation_errors(action: str) -> Iterator[None]:
    """Convert "in use" to a transient error: nothing can use a new object yet, so the NVIDIA driver is busy."""
    try:
        with nvml_errors(action):
            yield
    except DeviceBusyError as error:
        raise NvmlTransientError(str(error)) from error


def _listed(instances: Iterable[GpuInstance]) -> str:
    return ", ".join(
        f"GPU instance {item.gpu_instance_id} (profile {item.profile_id}) at {_slices(item.placement)}"
        for item in instances
    )


def _slices(placement: Placement) -> str:
    start, size = placement.start, placement.size
    return f"memory slice {start}" if size == 1 else f"memory slices {start}-{start + size - 1}"


def _destroy_again(error: DraDriverError, destroy: Callable[[Handle], object], made: Handle) -> None:
    try:
        with nvml_errors("destroy the new instance"):
            destroy(made)
    except DraDriverError as second:
        is_gone = isinstance(error, DeviceLostError | NvmlUnavailableError)
        kind = type(error) if is_gone else NvmlUnknownOutcomeError
        raise kind(f"{error}; the new instance may still exist ({second})") from error


def _compute_instances_in(instance: Handle) -> list[tuple[int, str, Handle]]:
    found = []
    try:
        for compute in compute_instance_handles(instance):
            number, uuid = compute_identity(compute)
            found.append((number, uuid, pynvml.nvmlComputeInstanceGetInfo(compute).device))
    except pynvml.NVMLError:
        return found
    return found
