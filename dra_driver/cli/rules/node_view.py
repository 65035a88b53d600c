"""A node at one moment, as people are shown it; `top -o json` prints it as it is."""

from __future__ import annotations

from dataclasses import dataclass

from dra_driver.model.gpu import GpuLoad


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """A GPU. `name` is its device's, `mode` its MIG mode or None; `load` is None where NVML reports nothing of the GPU.
    One that NVML does not show, and whose UUID is not known, has its PCI bus ID as the name and "" as the UUID.

    `health` is the worst of what is known of it and its instances, as a word; `unknown` if it was not read, `vfio` for
    one that a virtual machine has or may have, since nobody can read it.
    """

    name: str
    uuid: str
    product: str | None = None
    mode: str | None = None
    load: GpuLoad | None = None
    health: str = "unknown"
    index: int | None = None
    pci_bus_id: str | None = None


@dataclass(frozen=True, slots=True)
class Holding:
    """A device of a claim; `since_s` is None where it is not written down. `trouble` is how bad the device is,
    None if it is well as far as is known. `pods` are the names of those that the claim is for, None if unknown."""

    claim: str
    uid: str
    phase: str
    since_s: float | None
    device: str
    kind: str
    uuid: str
    usage: str | None = None
    share_id: str | None = None
    admin_access: bool = False
    mig: str | None = None
    boot: str = "this"
    trouble: str | None = None
    pods: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class SeenInstance:
    """A GPU instance on the GPU with the device name `gpu`; its ID is None if it is held but not there. `holder` says
    in words who holds it."""

    gpu: str
    profile: str
    start: int
    size: int
    gpu_instance_id: int | None
    compute_instance_ids: tuple[int, ...]
    holder: str

    @property
    def slices(self) -> str:
        """The memory slices: `3` or `0-3`."""
        return str(self.start) if self.size == 1 else f"{self.start}-{self.start + self.size - 1}"

    @property
    def ids(self) -> str:
        """`GI 7 CI 0`."""
        if self.gpu_instance_id is None:
            return "not there"
        compute = ",".join(str(number) for number in sorted(self.compute_instance_ids))
        return f"GI {self.gpu_instance_id}" + (f" CI {compute}" if compute else "")


@dataclass(frozen=True, slots=True)
class SeenReason:
    """Why a device is not well; `since_s` is None for what only this look showed. `devices` are the MIG devices of an
    instance. `is_over` says that the reason is written down, but NVML does not show it any more."""

    subject: str
    severity: str
    reason: str
    since_s: float | None
    text: str
    devices: tuple[str, ...] = ()
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class SeenDaemon:
    """The MPS daemon of a device; `clients` is None before the first probe, `directory` where its log is."""

    device: str
    state: str
    since_s: float
    clients: int | None = None
    pid: int | None = None
    problem: str | None = None
    directory: str = ""


@dataclass(frozen=True, slots=True)
class SeenProcess:
    """A process that has memory on the GPU with the device name `gpu`; `gpu_instance_id` in MIG mode only. `pod` is
    `NAMESPACE/NAME`, or the UID of a pod whose claims are not known, and None for a process of the host. One that
    `is_unclaimed` belongs to no prepared claim and no container."""

    gpu: str
    pid: int
    name: str
    memory_bytes: int | None = None
    gpu_instance_id: int | None = None
    pod: str | None = None
    is_unclaimed: bool = False


@dataclass(frozen=True, slots=True)
class SeenProblem:
    """Something that is wrong with the node; `subject` is empty for the node as a whole. `since_s` is how many seconds
    it has lasted, None if it was found just now."""

    problem: str
    subject: str
    text: str
    since_s: float | None = None


@dataclass(frozen=True, slots=True)
class NodeView:
    """All that is shown. `problems` are those of the node, `domains` are NVLink domains with the names of their GPUs;
    `notes` are sentences."""

    node: str
    driver: str
    taken_at: str
    nvidia_version: str | None = None
    cuda_version: str | None = None
    problems: tuple[SeenProblem, ...] = ()
    gpus: tuple[SeenGpu, ...] = ()
    domains: tuple[tuple[str, tuple[str, ...]], ...] = ()
    holdings: tuple[Holding, ...] = ()
    instances: tuple[SeenInstance, ...] = ()
    health: tuple[SeenReason, ...] = ()
    mps: tuple[SeenDaemon, ...] = ()
    processes: tuple[SeenProcess, ...] = ()
    notes: tuple[str, ...] = ()
