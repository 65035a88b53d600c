"""Checks the NVIDIA driver and the GPUs on the host."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from dra_driver.app.settings import Settings
from dra_driver.base.installation import helm_set
from dra_driver.base.threads import NotAnsweredError
from dra_driver.cli.checks.check import Check, Look, Shared
from dra_driver.cli.rules.findings import Finding, fail, ok, skip, warn
from dra_driver.cli.rules.health_findings import health_findings
from dra_driver.cli.rules.node_view import NodeView
from dra_driver.cli.scratch import scratch_directory
from dra_driver.errors import (
    DraDriverError,
    NvmlDetachedError,
    NvmlLibraryError,
    NvmlPausedError,
    NvmlUnavailableError,
    RetryableError,
)
from dra_driver.health.rules.taints import TaintPolicy
from dra_driver.host.device_nodes import DevCharLinks, DeviceNodeReader, DevRoot, HostDeviceFinder
from dra_driver.host.driver_programs import InstalledPrograms
from dra_driver.host.driver_root import find_nvml_library
from dra_driver.host.hook import HookFinder
from dra_driver.host.imex import ImexChannelNodes, ImexDaemon
from dra_driver.host.libraries import note_of_left_out, scan_libraries
from dra_driver.host.rooted_tree import RootedTree, join_root, names_in
from dra_driver.host.sysfs import Sysfs
from dra_driver.model.dataclass import dataclass
from dra_driver.model.driver_files import IMEX_PROGRAM
from dra_driver.model.gpu import GpuProcess, is_vfio
from dra_driver.model.host import (
    HOST_DEVICE_NODES,
    HOST_DEVICE_REMEDIES,
    MAX_IMEX_CHANNELS,
    HostPaths,
    ImexChannels,
    PciFunction,
)
from dra_driver.model.inventory import Inventory
from dra_driver.model.remedies import FABRIC, reboot
from dra_driver.model.units import counted, named
from dra_driver.reporting.rules.claim_usage import unclaimed_text

_KERNEL_VERSION = re.compile(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)\s")
_WITHOUT_PCI = {"microsoft": "Windows Subsystem for Linux (WSL2)", "tegra": "an NVIDIA Jetson"}
"""Machines whose GPU is not a PCI device, by a word in `uname -r`."""
_GPU_NODE = re.compile(r"nvidia(\d+)\Z")


class _NotKnownError(Exception):
    """The check `NVML` reports why."""


@dataclass(frozen=True, slots=True)
class DriverChecks:
    """`inventory` raises NVML's errors. `gpu_users` returns programs that have a GPU open, except those of
    gpu-dra-driver and claims; None if unknown.
    """

    paths: HostPaths
    nodes: DeviceNodeReader
    inventory: Shared[Inventory]
    node_view: Callable[[], NodeView]
    settings: Settings
    gpu_users: Callable[[], Sequence[str] | None] = lambda: None

    def gpus_on_the_bus(self) -> Finding:
        """Check that there are GPUs, and their drivers."""
        functions = self._sysfs.gpus()
        for sign, name in _WITHOUT_PCI.items() if not functions else ():
            if sign in self._kernel_release():
                return fail(
                    f"this node is {name}: its GPU is not a PCI device, and gpu-dra-driver does not support it",
                    "use NVIDIA's device plugin on this node (docs/versions.md)",
                )
        if not functions:
            return warn(
                "no NVIDIA GPU on the PCI bus",
                "expected on a node without a GPU; otherwise run `lspci -d 10de:` on the node",
            )
        passed = self._under_vfio(functions)
        unbound = [item.bus_id for item in functions if item.driver is None]
        others = [
            f"{item.bus_id} ({item.driver})"
            for item in functions
            if item.driver not in (None, "nvidia") and item.bus_id not in passed
        ]
        if others:
            return fail(
                f"bound to another driver: {named(others)}",
                "unload that driver (for example, `modprobe -r nouveau`) and blacklist it, then reboot the node",
            )
        if unbound:
            return fail(
                f"not bound to a driver: {named(unbound)}",
                f"run `modprobe nvidia && echo {unbound[0]} > /sys/bus/pci/drivers_probe` on the node; if that fails, "
                "`dmesg | grep -i nvrm` shows why",
            )
        if passed and self.settings.passthrough:
            return ok(f"{len(functions)} on the PCI bus, {len(passed)} bound to vfio for virtual machines")
        if passed:
            return warn(
                f"bound to vfio for virtual machines: {named(passed)}; containers cannot use them",
                f"if containers should use them: `driverctl unset-override {passed[0]}` on the node",
            )
        return ok(f"{len(functions)} on the PCI bus, bound to nvidia")

    def kernel_driver(self) -> Finding:
        version = self._loaded_version()
        if version is None:
            path = f"{self.paths.proc}/driver/nvidia/version"
            return fail(
                f"not loaded ({path} is missing)",
                "run `modprobe nvidia` on the node; if that fails, `dmesg | grep -i nvrm` shows why",
            )
        return ok(f"{version} loaded", version)

    def driver_root(self) -> Finding:
        """Check that the driver root has the files of the loaded NVIDIA driver."""
        root = self.paths.driver_root
        where = "set --nvidia-driver-root (and --container-driver-root) to the root directory of the NVIDIA driver"
        if not Path(root).is_dir():
            return fail(f"{root} is not a directory", where)
        loaded = self._loaded_version()
        libraries = scan_libraries(RootedTree(root), loaded)
        try:
            find_nvml_library(root)
        except NvmlUnavailableError:
            if libraries.left_out:
                return fail(
                    note_of_left_out(root, libraries.left_out),
                    f"install the NVIDIA driver for this architecture, or {where}",
                )
            return fail(
                f"libnvidia-ml.so.1 is missing below {root}", f"install the NVIDIA driver, or {where}"
            )
        if not libraries.versions:
            return fail(
                f"libcuda.so is missing below {root}",
                f"install the compute libraries of the NVIDIA driver, or {where}",
            )
        if loaded is not None and loaded not in libraries.versions:
            return fail(
                f"{loaded} is loaded, but the libraries below {root} have version {', '.join(libraries.versions)}",
                "reload the kernel modules (`rmmod nvidia_uvm nvidia && modprobe nvidia`) or reboot the node",
            )
        if len(libraries.versions) > 1:
            return warn(
                f"there are libraries of several versions below {root}: {', '.join(libraries.versions)}",
                f"remove the packages of all versions except {loaded or libraries.versions[0]}",
            )
        found = (
            f"{libraries.versions[0]}, {counted(len(libraries.files), 'library', 'libraries')} below {root}"
        )
        if libraries.left_out:
            return ok(f"{found}; {note_of_left_out(root, libraries.left_out)}")
        return ok(found)

    def nvml(self) -> Finding:
        """Check that NVML answers, for every GPU."""
        try:
            inventory = self.inventory.get()
        except NvmlDetachedError as error:
            ends = "`gpu-dra-driver detach --end` opens NVML again"
            seen = str(error).partition("; ")[0]
            if not isinstance(error, NvmlPausedError):
                return fail(seen, ends)
            waits = "run doctor again in a few seconds; if NVML stays closed, drain and reboot the node"
            return warn(seen, waits)
        except NvmlLibraryError:
            raise
        except DraDriverError as error:
            seen = str(error).partition("; ")[0]
            if isinstance(error, NotAnsweredError):
                # nvidia-smi would hang too.
                return fail(
                    seen, f"`dmesg | grep -i nvrm` on the node shows why; {reboot(self.settings.node_name)}"
                )
            return fail(seen, "run `nvidia-smi` on the node; if it fails, `dmesg | grep -i nvrm` shows why")
        loaded = self._loaded_version()
        version = inventory.versions.driver
        if loaded is not None and version is not None and loaded != version:
            return fail(
                f"NVML has version {version}, but the kernel module has version {loaded}",
                "reload the kernel modules or reboot the node",
            )
        silent = self._silent_gpus(inventory)
        answer = counted(len(inventory.gpus), "GPU answers", "GPUs answer")
        if silent:  # the check `health` has a line for each
            answer = f"{len(inventory.gpus)} of {counted(len(inventory.gpus) + len(silent), 'GPU')} answer"
        elif inventory.faults:
            first = inventory.faults[0]
            more = f" (and {len(inventory.faults) - 1} more)" if len(inventory.faults) > 1 else ""
            # Without a minor number the plugin cannot publish a GPU.
            finding = fail if any(gpu.minor is None for gpu in inventory.gpus) else warn
            return finding(
                f"{answer}; {first.subject}: {first.text}{more}",
                "see `nvidia-smi -q` and `dmesg | grep -i -E 'xid|nvrm'` on the node",
            )
        cuda = inventory.versions.cuda
        shown = f", CUDA {cuda[0]}.{cuda[1]}" if cuda is not None else ""
        return ok(f"{answer}, NVIDIA driver {version or 'unknown'}{shown}")

    def health(self) -> list[Finding]:
        inventory = self.inventory.or_none()
        policy = TaintPolicy(dict(self.settings.taint_effects))
        found = health_findings(self.node_view(), has_nvml=inventory is not None, policy=policy)
        gpus = () if inventory is None else inventory.gpus
        dark = [gpu.pci_bus_id or gpu.uuid for gpu in gpus if gpu.nvlink_links == 0 and not gpu.mig_enabled]
        if len(dark) > 1:
            why = "they have no bridge, or it does not work (`nvidia-smi nvlink -s` on the node)"
            found.append(ok(f"no NVLink is up on {named(dark)}: {why}"))
        return found

    def device_nodes(self) -> Finding:
        """Check the device nodes through which containers access the GPUs."""
        dev = DevRoot(self.paths, self.nodes)
        if dev.node("/dev/nvidiactl") is None:
            return fail(
                "/dev/nvidiactl is missing", "run `nvidia-modprobe` on the node, or start nvidia-persistenced"
            )
        if dev.node("/dev/nvidia-uvm") is None:
            return fail("/dev/nvidia-uvm is missing: CUDA fails", "run `nvidia-modprobe -u -c=0` on the node")
        gpus = self.inventory.or_none()
        if gpus is None:
            return ok(
                "/dev/nvidiactl and /dev/nvidia-uvm exist; the GPUs' device nodes are not known without NVML"
            )
        minors = {gpu.minor for gpu in gpus.gpus if gpu.minor is not None}
        missing = sorted(minor for minor in minors if dev.node(f"/dev/nvidia{minor}") is None)
        if missing:
            return fail(
                f"missing: {named([f'/dev/nvidia{minor}' for minor in missing])}",
                f"run `nvidia-modprobe -c={missing[0]}` on the node, or start nvidia-persistenced",
            )
        strays = sorted(self._node_minors(dev) - minors)
        functions = Sysfs(self.paths.sys, self.paths.proc).nvidia_functions()
        # The NVIDIA driver does not remove the device node of a GPU that is bound to vfio.
        passed = self._under_vfio([item for item in functions if item.is_gpu])
        unknown = [gpu for gpu in gpus.gpus if gpu.minor is None]
        if len(strays) > len(passed) + len(unknown) and not self._silent_gpus(gpus):
            return warn(
                f"device nodes without a GPU: {named([f'/dev/nvidia{minor}' for minor in strays])}",
                "if a GPU was lost, `dmesg | grep -i xid` shows it; if it was removed, delete these device nodes",
            )
        return ok(f"/dev/nvidiactl, /dev/nvidia-uvm and the device nodes of {counted(len(minors), 'GPU')}")

    def dev_char_links(self) -> Finding:
        """Check that systemd finds the device nodes; otherwise `systemctl daemon-reload` can take GPUs from
        containers.
        """
        if DevRoot(self.paths, self.nodes).node("/dev/nvidiactl") is None:
            return skip("/dev/nvidiactl is missing")
        links = DevCharLinks(self.paths, self.nodes)
        missing = sorted(links.missing())
        if missing:
            return warn(
                f"{counted(len(missing), 'link')} missing or wrong in {links.directory}: {named(missing)}; with some "
                "versions of runc and systemd, `systemctl daemon-reload` removes GPUs from running containers",
                "set devCharLinks: true and mount the host's /dev writable, or run `nvidia-ctk system "
                "create-dev-char-symlinks --create-all` on the node",
            )
        return ok("systemd finds the NVIDIA driver's device nodes")

    def mig_mode(self) -> Finding:
        inventory = self._known()
        on = [gpu for gpu in inventory.gpus if gpu.mig_enabled]
        empty = {gpu.uuid: gpu.pci_bus_id or gpu.uuid for gpu in on if not gpu.mig_devices}
        if empty and not self.settings.dynamic_mig:
            cut = next((gpu.partitioning for gpu in on if gpu.uuid in empty), None)
            placed = cut.profiles if cut is not None else ()
            smallest = min((one.profile for one in placed), key=lambda one: one.memory_mib, default=None)
            first, one = next(iter(empty.values())), ""
            if smallest is not None:
                one = f"`nvidia-smi mig -i {first} -cgi {smallest.profile_id} -C` creates one, and "
            return fail(
                f"the plugin does not publish GPUs in MIG mode without MIG devices: {named(list(empty.values()))}",
                f"{helm_set('dynamicMig.enabled=true')} creates MIG devices "
                f"on demand; on the node, {one}`nvidia-smi -i {first} -mig 0` makes the whole GPU available again",
            )
        return ok(f"{len(on)} of {counted(len(inventory.gpus), 'GPU')} in MIG mode")

    def gpu_agents(self) -> Finding:
        """Check for programs that keep GPUs open, which blocks MIG mode changes and passthrough."""
        if not self.settings.dynamic_mig and not self.settings.passthrough:
            return skip("only checked with MIG on demand or passthrough")
        users = self.gpu_users()
        if users is None:
            return skip("not checked: the processes of the host are not visible here (needs hostPID: true)")
        if not users:
            return ok("no other program keeps a GPU open")
        if not self.settings.dynamic_mig:
            return fail(
                f"these programs keep GPUs open, so no virtual machine can get these GPUs: {named(users)}",
                "do not run these programs on nodes with virtual machines, or make them release the GPUs "
                "(docs/passthrough.md)",
            )
        inventory = self.inventory.or_none() or Inventory()
        if {gpu.mig_enabled for gpu in inventory.gpus if gpu.partitioning is not None} == {True}:
            return ok(f"these programs keep GPUs open, but MIG mode is on already: {named(users)}")
        return fail(
            f"these programs keep GPUs open, so the NVIDIA driver cannot switch MIG mode: {named(users)}",
            "switch MIG mode on at boot, before these programs start, or make them release the GPUs (docs/mig.md)",
        )

    def imex(self) -> Finding:
        """Check that claims get their IMEX channel."""
        wanted = self.settings.extra_devices.imex
        if wanted is None:
            return skip("claims get no IMEX channels")
        inventory = self._known()
        unready = [
            f"{gpu.pci_bus_id or gpu.uuid} ({gpu.unready_fabric.text})"
            for gpu in inventory.gpus
            if gpu.unready_fabric is not None
        ]
        if unready:
            return fail(
                f"claims wait for GPUs that are not registered with their NVLink fabric yet: {named(unready)}",
                FABRIC,
            )
        outside = [gpu.pci_bus_id or gpu.uuid for gpu in inventory.gpus if gpu.fabric is None]
        if len(outside) == len(inventory.gpus):
            return warn(
                "no GPU is in an NVLink fabric, so no claim gets an IMEX channel",
                "check `nvidia-smi -q | grep -A10 Fabric` on the node: State must be Completed, ClusterUUID not zero",
            )
        channels = ImexChannelNodes(self.paths.proc)
        count = channels.count()
        if count is None:
            return fail(
                f"the NVIDIA driver has no IMEX channels (see devices and driver/nvidia/params in {self.paths.proc})",
                "load the nvidia module with NVreg_ImexChannelCount=2048 (needs NVIDIA driver 550 or newer)",
            )
        if wanted == "all" and count > MAX_IMEX_CHANNELS:
            return fail(
                f"the NVIDIA driver has {count} IMEX channels, too many for one container",
                "set imex.channel to a number, or load the nvidia module with "
                f"NVreg_ImexChannelCount={MAX_IMEX_CHANNELS} or less",
            )
        if wanted != "all" and wanted >= count:
            return fail(
                f"imex.channel is {wanted}, but the NVIDIA driver's last channel is {count - 1}",
                f"set imex.channel to a number below {count}, or load the nvidia module with a larger "
                "NVreg_ImexChannelCount",
            )
        try:
            with scratch_directory("imex") as links:
                programs = InstalledPrograms(
                    self.paths.driver_root, Path(links) / "lib", names=(IMEX_PROGRAM,)
                )
                ImexDaemon(self.paths, programs).refuse_unready()
        except DraDriverError as error:
            seen, _, remedy = str(error).partition("; ")
            return fail(seen, remedy or "install nvidia-imex on the node and start it")
        if outside:
            return warn(
                f"nvidia-imex is ready, but these GPUs are not in an NVLink fabric (yet): {named(outside)}",
                "check `nvidia-smi -q | grep -A10 Fabric` on the node",
            )
        return ok(f"nvidia-imex is ready; claims get {_channels(wanted, count)}")

    def host_devices(self) -> Finding:
        kinds = self.settings.extra_devices.host_devices
        finder = HostDeviceFinder(self.paths, self.nodes)
        missing = [kind for kind in kinds if not finder.find(kind).nodes]
        if missing:
            return warn(
                f"no device nodes for {named(missing)} ({', '.join(HOST_DEVICE_NODES[missing[0]])}), so claims do not "
                "get them",
                f"{HOST_DEVICE_REMEDIES[missing[0]]}, or remove {missing[0]} from --host-devices",
            )
        return ok(f"the host has device nodes for {named(kinds)}")

    def cdi_hook(self) -> Finding:
        try:
            hook = HookFinder(self.paths, self.settings.nvidia_cdi_hook_path).find()
        except RetryableError as error:
            seen, _, remedy = str(error).partition(": ")
            return fail(seen, remedy)
        if hook.host_path is None and not hook.notes:
            return ok(
                "not used, because nvidiaCDIHookPath is none: GPUs work, but containers get more mounts"
            )
        if hook.host_path is None:
            seen, _, remedy = hook.notes[0].partition("; ")
            return warn(seen, remedy)
        if hook.notes:
            return warn(hook.notes[0], f"run `{hook.host_path} --help` on the node")
        return ok(f"{hook.host_path} ({', '.join(hook.verbs)})")

    def gpu_processes(self) -> list[Finding]:
        self._known()
        found = [one for one in self.node_view().processes if one.is_unclaimed]
        texts = (unclaimed_text(one.gpu, GpuProcess(one.pid, one.name, one.memory_bytes)) for one in found)
        findings = [warn(*text.split("; ", 1)) for text in texts]
        return findings or [ok("no unknown processes on the GPUs")]

    def persistence(self) -> Finding:
        roots = dict.fromkeys(filter(None, (self.paths.driver_root, self.paths.host_root)))
        for root in roots:
            tree = RootedTree(root)
            for place in ("/run/nvidia-persistenced/socket", "/var/run/nvidia-persistenced/socket"):
                if tree.file_or_socket(place) is not None:
                    return ok(f"nvidia-persistenced runs ({place})")
        inventory = self.inventory.or_none()
        if inventory is not None and inventory.gpus and all(gpu.persistence for gpu in inventory.gpus):
            return ok("nvidia-persistenced is not running, but persistence mode is on")
        return warn(
            f"nvidia-persistenced is not running, so while gpu-dra-driver is stopped, GPUs {self._loss_at_the_end()}",
            "`systemctl enable --now nvidia-persistenced` on the node",
        )

    def _loss_at_the_end(self) -> str:
        inventory = self.inventory.or_none()
        if inventory is None or inventory.confidential_compute in (None, "off"):
            return "lose their settings, such as power limits"
        return "with confidential computing stop working when the last program exits, until you reset them"

    def gpu_memory(self) -> Finding:
        gpus = self._known().gpus
        nodes = [str(gpu.memory_numa_node) for gpu in gpus if gpu.memory_numa_node is not None]
        if not nodes:
            return ok("GPU memory is separate from host memory")
        return warn(
            f"GPU memory is in NUMA nodes of the host ({named(nodes)}): the kubelet counts it as memory of the node, "
            "and pods without a GPU can use it",
            "enable CDMM (coherent driver-based memory management): `options nvidia "
            "NVreg_CoherentGPUMemoryMode=driver` in /etc/modprobe.d on the node, then reboot",
        )

    def all(self) -> list[Check]:
        """Return the checks, each after its prerequisites. Without GPUs, only the first returns problems."""
        looks: dict[str, Look | None] = {
            "kernel driver": self.kernel_driver,
            "driver root": self.driver_root,
            "NVML": self.nvml,
            "health": self.health,
            "device nodes": self.device_nodes,
            "links in /dev/char": self.dev_char_links,
            "GPU processes": self.gpu_processes,
            "MIG mode": self.mig_mode,
            "GPU agents": self.gpu_agents,
            "IMEX": None if self.settings.extra_devices.imex is None else self.imex,
            "host devices": self.host_devices if self.settings.extra_devices.host_devices else None,
            "nvidia-cdi-hook": self.cdi_hook,
            "persistence": self.persistence,
            "GPU memory": self.gpu_memory,
        }
        needed = (Check(name, self._if_needed(look)) for name, look in looks.items() if look is not None)
        return [Check("GPUs", self.gpus_on_the_bus), *needed]

    def _if_needed(self, look: Look) -> Look:
        def looked() -> Finding | Sequence[Finding]:
            try:
                found = look()
            except _NotKnownError:
                found = skip("not checked without NVML")
            gpus = self._sysfs.gpus()
            if self.settings.passthrough and gpus and len(self._under_vfio(gpus)) == len(gpus):
                return skip("every GPU of this node is bound to vfio")
            is_ok = isinstance(found, Finding) and found.status == "OK"
            return found if is_ok or gpus else skip("no NVIDIA GPU on the PCI bus")

        return looked

    def _kernel_release(self) -> str:
        try:
            return Path(self.paths.proc, "sys/kernel/osrelease").read_text().lower()
        except OSError:
            return ""

    @property
    def _sysfs(self) -> Sysfs:
        return Sysfs(self.paths.sys, self.paths.proc)

    def _under_vfio(self, functions: Sequence[PciFunction]) -> list[str]:
        return [item.bus_id for item in functions if is_vfio(item.driver)]

    def _known(self) -> Inventory:
        inventory = self.inventory.or_none()
        if inventory is None:
            raise _NotKnownError
        return inventory

    def _silent_gpus(self, inventory: Inventory) -> list[str]:
        bound = self._sysfs.gpus_of_the_nvidia_driver()
        return sorted(bound.keys() - {gpu.pci_bus_id for gpu in inventory.gpus})

    def _loaded_version(self) -> str | None:
        match = _KERNEL_VERSION.search(self._sysfs.loaded_driver())
        return match[1] if match is not None else None

    def _node_minors(self, dev: DevRoot) -> set[int]:
        matches = map(_GPU_NODE.match, names_in(join_root(dev.root, "/dev")))
        found = {int(match[1]) for match in matches if match is not None}
        return {minor for minor in found if dev.node(f"/dev/nvidia{minor}") is not None}


def _channels(wanted: ImexChannels, count: int) -> str:
    return f"all {counted(count, 'channel')}" if wanted == "all" else f"channel {wanted} of {count}"
