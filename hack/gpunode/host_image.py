"""Makes the plugin's image on the machine that runs it: the machine's own Python and libraries, the bundle's packages.

So the bundle needs no image of a distribution, and the image fits the machine's kernel and architecture.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Sequence
from pathlib import Path

from localcluster import images

NAME = "localhost/gpu-dra-driver:dev"
_PLACE = Path("/opt/gpu-dra-driver")
PYTHON = Path(sys.executable).resolve()
"""The interpreter itself, not a link to it: pods have other directories at /tmp, for example."""
_PROGRAM = f'#!/bin/sh\nexec {PYTHON} -m dra_driver.cli.main "$@"\n'
_NOT_NEEDED = re.compile(
    "/(__pycache__|test|tests|idlelib|tkinter|turtledemo|ensurepip|site-packages|dist-packages|config-.*)(/|$)"
)
_SETTERS = re.compile(
    "nvml(Device|System|GpuInstance|ComputeInstance)(?!Get|EventSet)[A-Za-z]*"
    "(Set|Create|Destroy|Clear|Reset|Modify|Remove|Freeze)"
)
GUARD = f"""
# Appended by gpunode/host_image.py: this machine's settings shall stay as they are.
import re as _re
for _name, _it in list(globals().items()):
    if not (_re.match({_SETTERS.pattern!r}, _name) and hasattr(_it, "__code__")):
        continue
    def _refuse(*_arguments, _name=_name, **_more):
        raise NVMLError(NVML_ERROR_NO_PERMISSION)
    globals()[_name] = _refuse
"""


def archive(target: Path, bundle: Path, programs: Path, *, guarded: bool) -> Path:
    """Write the image as an archive for `ctr`. If it is `guarded`, NVML's functions that change a setting fail."""
    packages = bundle / "packages" / f"{sys.version_info.major}.{sys.version_info.minor}"
    ours = [(path, packages) for path in packages.rglob("*")]
    ours += [(path, bundle) for path in (bundle / "dra_driver").rglob("*")]
    files = {_PLACE / path.relative_to(top): path for path, top in ours if _is_needed(path)}
    python = [PYTHON, *filter(_is_needed, Path(sysconfig.get_path("stdlib")).rglob("*"))]
    programs_of_python = [
        path for path in [*python, *files.values()] if ".so" in path.suffixes or path == python[0]
    ]
    files |= {path: path for path in [*python, *_libraries(programs_of_python)]}
    buffer = io.BytesIO(images.base_layer(programs))
    with tarfile.open(fileobj=buffer, mode="a") as layer:
        names = set(layer.getnames())
        for place, path in files.items():
            if (name := str(place).lstrip("/")) not in names:
                content = path.read_bytes() + (
                    GUARD.encode() if guarded and path.name == "pynvml.py" else b""
                )
                images.add_file(layer, name, content, 0o755 if path.stat().st_mode & 0o100 else 0o644)
        # The simulated control daemon is a Python program that needs an option which busybox's env does not have.
        images.add_file(layer, "usr/bin/env", Path("/usr/bin/env").read_bytes(), 0o755)
        python3 = tarfile.TarInfo("usr/local/bin/python3")
        python3.type, python3.linkname = tarfile.SYMTYPE, str(PYTHON)
        layer.addfile(python3)
        images.add_file(layer, "usr/local/bin/gpu-dra-driver", _PROGRAM.encode(), 0o755)
    environment = (f"PYTHONPATH={_PLACE}", "PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1")
    made = images.Image((NAME,), ("run",), ("gpu-dra-driver",), environment)
    images.write(target, [made], buffer.getvalue())
    return target


def _is_needed(path: Path) -> bool:
    return path.is_file() and not _NOT_NEEDED.search(str(path))


def _libraries(programs: Sequence[Path]) -> list[Path]:
    """Return the shared libraries that these files need, as the dynamic linker finds them."""
    done = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False)
    return sorted({Path(path) for path in re.findall(r"(?:=> )?(/\S+) \(0x", done.stdout)})
