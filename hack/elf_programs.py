"""The programs and libraries of a simulated machine's driver as ELF files, for tests and `make e2e`.

They are linked against the C library of the release before this machine's, so they run beside any newer one. NVIDIA's
are linked so too, against a very old one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import libcs
from localcluster.layout import Layout

LIBRARY = Path(__file__).with_name("elf") / "library.c"

_SOURCES = LIBRARY.parent


def hostile() -> dict[str, str]:
    """What makes new simulated machines as unkind as real ones, unlike those of users: variables of the environment."""
    elf = directory()
    return {"SIMULATE_HOSTILE": "true"} | ({} if elf is None else {"SIMULATE_ELF": str(elf)})


def directory() -> Path | None:
    """The directory for SIMULATE_ELF: `program`, `library` and `libc`. It is kept in the user's cache.

    None on a machine that cannot have them, or before `python3 hack/libcs.py` has fetched what they need.
    """
    if not libcs.can_be_had() or shutil.which("cc") is None:
        return None
    older = libcs.older()
    if older is None:
        return None
    content = b"".join(file.read_bytes() for file in sorted(_SOURCES.iterdir()))
    built = Layout.from_environment().cache / f"elf-{older.name}-{hashlib.sha256(content).hexdigest()[:12]}"
    if not built.is_dir():
        # Another process may do the same: the first one's is kept.
        unfinished = Path(tempfile.mkdtemp(prefix=".elf-", dir=built.parent))
        try:
            link(_SOURCES / "program.c", unfinished / "program", older, "-s")
            link(LIBRARY, unfinished / "library", older, "-shared", "-fPIC", "-s")
            soname = "-Wl,-soname,libc.so.6"
            compile_c(_SOURCES / "libc.c", unfinished / "libc", "-shared", "-fPIC", "-nostdlib", "-s", soname)
            unfinished.chmod(0o755)
            unfinished.rename(built)
        except OSError:
            if not built.is_dir():
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return built


def link(source: Path, output: Path, libc: Path, *options: str) -> None:
    """Build a program or a library that runs with the C library in the directory `libc`, and with newer ones."""
    libraries = [str(libc / name) for name in ("libdl.so.2", "libpthread.so.0", "libm.so.6", "libc.so.6")]
    flags = ["-O0", "-fno-stack-protector", "-nodefaultlibs", "-Wl,--no-as-needed", f"-Wl,-rpath-link,{libc}"]
    compile_c(source, output, *flags, after=[*options, *libraries, "-lgcc"])


def compile_c(source: Path, output: Path, *options: str, after: tuple[str, ...] | list[str] = ()) -> None:
    """Run the C compiler; `after` stands behind the source."""
    command = ["cc", *options, "-o", str(output), str(source), *after]
    subprocess.run(command, check=True, timeout=60, env={**os.environ, "LC_ALL": "C"})
