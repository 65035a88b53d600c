"""`make e2e-vm`: runs the daemon on a real kernel with an IOMMU, in QEMU without KVM.

The guest runs Debian's kernel and pytest on tests/vm. Its root file system is this machine's, read-only; the guest's
changes stay in memory. So nothing is installed on either machine. The GPUs are devices that QEMU emulates: one kernel
module gives them the IDs of GPUs (hack/vm/vmfake.c), and another one is their driver (hack/vm/nvidia.c). NVML is the
simulator's (tests/vm/dra_driver_node.py).

The first boot runs the tests up to a power cut, the second boot the tests after it, on the same disk. Kernel and QEMU
are downloaded once, as Debian packages, to the user's cache. If that is not possible, the script prints why, and exits
with 0.

python hack/e2e_vm.py                   both boots
python hack/e2e_vm.py -- -k hangs       only the first boot, with arguments for pytest
"""

from __future__ import annotations

import argparse
import compileall
import gzip
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "hack/vm"
sys.path[:0] = [str(ROOT), str(ROOT / "hack/cluster")]

from localcluster import debian, shell  # noqa: E402
from localcluster.layout import Layout  # noqa: E402
from localcluster.shell import ClusterError  # noqa: E402

from dra_driver.simulator import catalogue  # noqa: E402

RELEASE = "bookworm"
PACKAGES = ("linux-image-amd64", "linux-headers-amd64", "qemu-system-x86", "busybox-static", "kmod")
_NOT_NEEDED = re.compile(r"(cpp|gcc|lib(a|l|t|ub)san|libgcc-12-dev|binutils|iso-codes|ipxe|ovmf)")
"""Packages that are not unpacked. The compiler, for example, is this machine's own."""
_KEPT = (
    "boot", "lib/modules", "bin/busybox", "bin/kmod", "usr/bin/qemu-system-x86_64", "usr/share/qemu",
    "usr/share/seabios", "usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu",
)  # fmt: skip
_FOR_THE_ROOT = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_blk", "ext4", "crc32c_generic")
MODULES = ("vmfake", "nvidia")
MACHINE = ROOT / "tests/vm/machine.yaml"
BOOTS = ("tests/vm/test_kernel.py", "tests/vm/test_after_power_cut.py")
CUT = "vm: power cut"
"""The line that the first boot prints before its last test cuts the power."""
_LIMIT_S = 1800.0
"""The time limit of one boot: ten times its duration on two idle cores."""
_DISK_BYTES = 256 << 20
_APPEND = (
    "console=ttyS0 quiet panic=-1 mitigations=off audit=0 nokaslr no_timer_check tsc=unstable intel_iommu=on"
)
"""no_timer_check: under TCG with interrupt remapping, the kernel's check of the timer sometimes fails."""


def main() -> int:
    """Run the boots, and return the exit code of pytest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pytest_args", nargs="*", help="arguments for pytest, after --")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `_boot` kills the guest
    try:
        tree = _fetched()
    except ClusterError as error:
        print(f"e2e-vm: skipped: {' '.join(str(error).split())[-300:]}")
        return 0
    for name in ("dra_driver", "hack", "tests/vm"):
        compileall.compile_dir(ROOT / name, quiet=2)
    with tempfile.TemporaryDirectory(prefix="e2e-vm-") as made:
        folder = Path(made)
        disk = folder / "disk"
        disk.touch()
        os.truncate(disk, _DISK_BYTES)
        shell.run(["mkfs.ext4", "-q", "-F", disk])
        _build(tree, folder / "modules")
        if given.pytest_args:
            return _boot(tree, folder, [BOOTS[0], *given.pytest_args])
        for tests in BOOTS:
            code = _boot(tree, folder, [tests])
            if code:
                return code
    return 0


# --- kernel, QEMU and modules -----------------------------------------------------------------------


def _fetched() -> Path:
    """Return the folder of kernel and QEMU; download them once. Raises: ClusterError if that is not possible."""
    if os.uname().machine != "x86_64":
        raise ClusterError("the guest needs an x86-64 machine")
    if shell.find_program("apt-get") is None or not debian.is_debian():
        raise ClusterError("kernel and QEMU are Debian packages, and this machine does not run Debian")
    for program in ("gcc", "make", "mkfs.ext4"):
        if shell.find_program(program) is None:
            raise ClusterError(f"{program} is not installed")
    tree = Layout.from_environment().cache / f"vm-{RELEASE}"
    debian.keep(tree, "fetch kernel and QEMU", _fetch)
    return tree


def _fetch(top: Path) -> Path:
    (top / "debs").mkdir()
    whole, kept = top / "whole", top / "tree"
    for file in debian.download(PACKAGES, RELEASE, "amd64", top / "debs"):
        if not _NOT_NEEDED.match(file.name):
            shell.run(["dpkg-deb", "--extract", file, whole])
    for name in (*_KEPT, "usr/src", "usr/lib/linux-kbuild-6.1"):
        if (whole / name).exists():
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            (whole / name).rename(kept / name)
    shell.run([*_with_libraries(kept), "--argv0", "depmod", kept / "bin/kmod", "-b", kept, _version(kept)])
    return kept


def _build(tree: Path, folder: Path) -> None:
    """Build the modules of hack/vm for the guest's kernel. Raises: ClusterError."""
    headers = tree / "usr/src" / f"linux-headers-{_version(tree)}"
    common = headers.with_name(headers.name.replace("-amd64", "-common"))
    (headers / "Makefile").write_text(f"include {common}/Makefile\n")
    folder.mkdir()
    for name in MODULES:
        shutil.copy(SOURCES / f"{name}.c", folder)
    (folder / "Makefile").write_text("".join(f"obj-m += {name}.o\n" for name in MODULES))
    with shell.step("build the modules of the guest"):
        shell.run(["make", "-s", "-C", headers, f"M={folder}", "CC=gcc", "modules"])


def _version(tree: Path) -> str:
    return next((tree / "lib/modules").iterdir()).name


def _with_libraries(tree: Path) -> list[str]:
    """Return the words to put before a program of the tree, so that it uses the libraries of the tree."""
    library = tree / "lib/x86_64-linux-gnu"
    return [
        str(library / "ld-linux-x86-64.so.2"),
        "--library-path",
        f"{library}:{tree}/usr/lib/x86_64-linux-gnu",
    ]


# --- one boot ---------------------------------------------------------------------------------------


def _boot(tree: Path, folder: Path, tests: Sequence[str]) -> int:
    """Boot the guest with these arguments for pytest. Return pytest's exit code, 0 for a power cut, 1 otherwise."""
    initrd = folder / "initrd"
    initrd.write_bytes(gzip.compress(_archive(_initial_files(tree, folder / "modules", tests)), 1))
    guest = subprocess.Popen(
        _qemu(tree, folder, initrd),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "QEMU_MODULE_DIR": f"{tree}/usr/lib/x86_64-linux-gnu/qemu"},
        start_new_session=True,
    )
    try:
        for line in _lines(guest, time.monotonic() + _LIMIT_S):
            print(line, flush=True)
            if line == CUT:
                guest.wait(60)
                return 0
            if line.startswith("vm: exit code "):
                return int(line.rpartition(" ")[2])
        print(
            f"e2e-vm: the guest stopped too early, or ran for more than {_LIMIT_S:g} s; end of its kernel log:"
        )
        print((folder / "console").read_text(errors="replace")[-3000:])
        return 1
    finally:
        if guest.poll() is None:
            os.killpg(guest.pid, signal.SIGKILL)
        guest.wait()


def _lines(guest: subprocess.Popen[bytes], until: float) -> Iterable[str]:
    """Yield the lines of the guest's output until it ends, or until the time `until`."""
    assert guest.stdout is not None
    with selectors.DefaultSelector() as ready:
        ready.register(guest.stdout, selectors.EVENT_READ)
        left = b""
        while ready.select(max(0.0, until - time.monotonic())):
            read = os.read(guest.stdout.fileno(), 65536)
            if not read:
                return
            *whole, left = (left + read).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace").rstrip("\r")


def _qemu(tree: Path, folder: Path, initrd: Path) -> list[str]:
    """Return the command line of QEMU. Four root ports have a GPU each; one of the GPUs has an audio function, and one
    shares its IOMMU group with a network card. QEMU's monitor is the guest's third serial line, so that tests can
    unplug devices and cut the power.
    """
    ports = [
        f"pcie-root-port,id=port{number},bus=pcie.0,chassis={number},slot={number},addr=0x{16 + number:x}"
        for number in range(1, 5)
    ]
    cards = [
        "edu,id=gpu0,bus=port1,addr=0.0,multifunction=on", "ich9-intel-hda,id=audio0,bus=port1,addr=0.1",
        "ivshmem-plain,id=gpu1,bus=port2,memdev=memory",
        "edu,id=gpu2,bus=port3,addr=0.0,multifunction=on", "e1000e,id=network2,bus=port3,addr=0.1,romfile=",
        "edu,id=gpu3,bus=port4",
    ]  # fmt: skip
    root = "local,path=/,security_model=none,readonly=on,multidevs=remap"
    monitor = f"socket,path={folder}/monitor"
    return [
        "nice", *_with_libraries(tree), str(tree / "usr/bin/qemu-system-x86_64"),
        "-L", str(tree / "usr/share/qemu"), "-L", str(tree / "usr/share/seabios"),
        "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off", "-smp", "2", "-m", "2048",
        "-nodefaults", "-display", "none", "-no-reboot",
        "-device", "intel-iommu,intremap=on,caching-mode=on,device-iotlb=on",
        "-kernel", str(tree / f"boot/vmlinuz-{_version(tree)}"), "-initrd", str(initrd), "-append", _APPEND,
        "-serial", f"file:{folder}/console",
        "-chardev", "stdio,id=output,signal=off", "-serial", "chardev:output",
        "-chardev", f"{monitor},id=monitor,server=on,wait=off", "-mon", "chardev=monitor",
        "-chardev", f"{monitor},id=orders", "-serial", "chardev:orders",
        "-fsdev", f"{root},id=root", "-device", "virtio-9p-pci,fsdev=root,mount_tag=root",
        "-drive", f"file={folder}/disk,if=none,id=disk,format=raw,cache=writeback",
        "-device", "virtio-blk-pci,drive=disk",
        "-object", "memory-backend-ram,id=memory,size=64M,share=on",
        *(word for device in (*ports, *cards) for word in ("-device", device)),
    ]  # fmt: skip


def _initial_files(tree: Path, made: Path, tests: Sequence[str]) -> dict[str, bytes]:
    """Return the guest's initial files: busybox, the modules for its root file system, and its scripts."""
    gpus = catalogue.build(str(MACHINE)).gpus
    settings = {
        "KERNEL": str(tree),
        "LIBRARIES": " ".join(_with_libraries(tree)),
        "PROJECT": str(ROOT),
        "PYTHON": sys.executable,
        "CARDS": ",".join(f"{gpu.bus_id}=10de:26b9:030200" for gpu in gpus),
        "ORDER": ",".join(gpu.bus_id for gpu in gpus),
        "UUIDS": ",".join(gpu.uuid for gpu in gpus),
        "TESTS": shlex.join(tests),
    }
    header = "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
    modules = _modules(tree)
    return {
        "init": (SOURCES / "init.sh").read_bytes(),
        "guest.sh": header.encode() + (SOURCES / "guest.sh").read_bytes(),
        **{f"{name}.ko": (made / f"{name}.ko").read_bytes() for name in MODULES},
        "bin/busybox": (tree / "bin/busybox").read_bytes(),
        "modules/order": "\n".join(module.name for module in modules).encode(),
        **{f"modules/{module.name}": module.read_bytes() for module in modules},
    }


def _modules(tree: Path) -> list[Path]:
    """Return the files of the modules that the root file system needs, each after its dependencies."""
    folder = tree / "lib/modules" / _version(tree)
    needs = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        file, _, others = line.partition(":")
        needs[Path(file).stem.replace("-", "_")] = [*reversed(others.split()), file]
    found = dict.fromkeys(file for name in _FOR_THE_ROOT for file in needs.get(name, ()))
    return [folder / file for file in found]


def _archive(files: dict[str, bytes]) -> bytes:
    """Return a cpio archive of the files, which the kernel unpacks as its first root file system."""
    folders = {str(parent) for name in files for parent in Path(name).parents if str(parent) != "."}
    folders |= {"proc", "sys", "dev"}
    entries = [(name, 0o40755, b"") for name in sorted(folders)]
    entries += [(name, 0o100755, content) for name, content in files.items()]
    entries.append(("TRAILER!!!", 0, b""))
    made = bytearray()
    for number, (name, mode, content) in enumerate(entries, 1):
        numbers = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        made += b"070701" + b"".join(b"%08x" % field for field in numbers) + name.encode() + b"\0"
        made += bytes(-len(made) % 4) + content
        made += bytes(-len(made) % 4)
    return bytes(made)


if __name__ == "__main__":
    sys.exit(main())
