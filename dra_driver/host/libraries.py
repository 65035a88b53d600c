"""The NVIDIA driver's libraries below a root: the installed version, its files, and the links to them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from dra_driver.base.atomic import refuse_own_limit
from dra_driver.host.rooted_tree import RootedTree
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.driver_files import DriverLink
from dra_driver.model.units import counted

INSTALLATION: Final = json.loads(Path(__file__).with_name("installation.json").read_bytes())
_ARCHES = ("x86_64-linux-gnu", "aarch64-linux-gnu")
_PER_ARCH = tuple(
    f"/{top}/{arch}{tail}"
    for top in ("usr/lib", "lib")
    for arch in _ARCHES
    for tail in ("", "/nvidia/current")
)

USUAL_DIRS = ("/", "/usr/lib64", *_PER_ARCH, "/lib64")
"""In search order: directories of distributions and driver containers for 64-bit libraries."""

UNUSUAL_DIRS = (
    "/usr/lib", "/usr/local/glibc/usr/lib", "/usr/local/nvidia/lib64", "/opt/nvidia/current/usr/lib64",
    "/usr/lib/nvidia/tesla", "/run/opengl-driver/lib",
)  # fmt: skip
"""First a directory that many systems have, then those of Talos, GKE and driver installers, Flatcar, Bottlerocket,
NixOS.

They are searched only if no usual directory has libcuda: `/usr/lib` often has 32-bit libraries. Containers get these
paths unresolved: programs made for NixOS search `/run/opengl-driver/lib`."""

_LD_CACHE = "/etc/ld.so.cache"
_CACHED_DIRECTORY = re.compile(rb"(/[\x21-\x7e]+)/lib(?:cuda|nvidia-ml)\.so\.1\x00")
_VERSIONED = re.compile(r"^[^/]+\.so\.\d+\.\d+(?:\.\d+)*\Z")
_LIBCUDA = re.compile(r"^libcuda\.so\.(\d+\.\d+(?:\.\d+)*)\Z")
_NVVM70 = "libnvidia-nvvm70.so."
# Distributions build these libraries themselves, with their own versions, and may keep them in another
# directory.
_EGL_PLATFORMS = tuple(f"libnvidia-egl-{name}.so." for name in ("gbm", "wayland", "wayland2", "xcb", "xlib"))
MACHINE = os.uname().machine
"""For example `x86_64`."""

_ELF64 = b"\x7fELF\x02"
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183, "i386": 3, "arm": 40, "ppc64le": 21}
_ELF_MACHINE = slice(18, 20)

# The name under which programs load a library if it is not `<library>.so.1`; None means its full name.
_LOADED_AS: dict[str, str | None] = INSTALLATION["loaded_as"]

# Links that programs need although no package creates them: (library, link below its directory, target).
_EXTRA_LINKS: list[tuple[str, str, str]] = INSTALLATION["extra_links"]


@dataclass(frozen=True, slots=True)
class Libraries:
    """The libraries of one driver version. `versions` lists every libcuda version found, in search order."""

    versions: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()
    """(path, resolved file in the tree)"""
    links: tuple[tuple[str, str, str], ...] = ()
    """(path, target, path of the file it leads to)"""
    directories: tuple[str, ...] = ()
    driver_directories: tuple[str, ...] = ()
    """With libraries of the driver's version, without subdirectories."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """With the architecture for which each file was made."""

    def driver_links(self, host_path: dict[str, str]) -> tuple[DriverLink, ...]:
        return tuple(DriverLink(path, target, host_path[file]) for path, target, file in self.links)


@dataclass(slots=True)
class _Listing:
    """`directory` is resolved, `shown` is its path in containers. `files` maps names to resolved files."""

    directory: str
    shown: str
    files: dict[str, str]
    symlinks: list[str]


def library_directories(tree: RootedTree) -> list[str]:
    """Return the resolved directories that may have the libraries, in search order."""
    return [listing.directory for listing in _search(tree, {})]


def versioned_nvml_libraries(tree: RootedTree, directories: Iterable[str]) -> list[str]:
    """Return NVML libraries under their full names, for a root without the usual link."""
    return [
        _join(directory, name)
        for directory in directories
        for name in sorted(_list(tree, directory, directory).files)
        if name.startswith("libnvidia-ml.so.")
    ]


def foreign_files(tree: RootedTree, paths: Iterable[str]) -> dict[str, str]:
    """Return the files for another architecture than this machine or for 32-bit programs, with their architecture.

    Only ELF files count: others may belong to a simulated machine, or still be written.
    """
    return {path: made_for for path in paths if (made_for := _foreign_architecture(tree, path))}


def _foreign_architecture(tree: RootedTree, path: str) -> str | None:
    try:
        with Path(tree.local(path)).open("rb", buffering=0) as file:
            header = file.read(_ELF_MACHINE.stop)
    except OSError as error:
        refuse_own_limit(path, error)
        return None
    if len(header) < _ELF_MACHINE.stop or not header.startswith(_ELF64[:-1]):
        return None
    number = int.from_bytes(header[_ELF_MACHINE], "little")
    is_64_bit = header.startswith(_ELF64)
    if is_64_bit and number == _ELF_MACHINES.get(MACHINE, number):
        return None
    name = next((name for name, known in _ELF_MACHINES.items() if known == number), f"ELF machine {number}")
    return name if is_64_bit else f"32-bit {name}"


def note_of_left_out(root: str, left_out: Mapping[str, str]) -> str:
    """Return a sentence without a semicolon."""
    what, are = counted(len(left_out), "library", "libraries"), "is" if len(left_out) == 1 else "are"
    first = min(left_out)
    return (
        f"{what} below the driver root {root} {are} not used, because this machine is {MACHINE}: for example, "
        f"{first} is for {left_out[first]}"
    )


def scan_libraries(tree: RootedTree, version: str | None) -> Libraries:
    """Return the libraries of one driver version; no files if it is not installed.

    `version` None selects the one that `libcuda.so.1` leads to, else the first found.
    """
    left_out: dict[str, str] = {}
    listings = _search(tree, left_out)
    versions = tuple(dict.fromkeys(found for listing in listings for found in _libcuda_versions(listing)))
    chosen = version or _linked_version(tree, listings, left_out) or next(iter(versions), None)
    if chosen not in versions:
        return Libraries(versions=versions, left_out=left_out)
    shown: dict[str, str] = {}  # paths in containers, by resolved file
    driver_directories = []
    suffix = f".so.{chosen}"
    usual = {tree.directory(directory) for directory in USUAL_DIRS}
    for listing in listings:
        names = [name for name in listing.files if name.endswith(suffix)]
        vdpau: dict[str, str] = {}
        if names:
            names.extend(name for name in listing.files if name.startswith(_NVVM70))
            vdpau = _vdpau(tree, listing, suffix)
        if names or listing.directory in usual:
            names.extend(name for name in listing.files if name.startswith(_EGL_PLATFORMS))
        found = {listing.files[name]: _join(listing.shown, name) for name in names}
        left_out |= foreign_files(tree, (*found, *vdpau))
        own = {file: path for file, path in (found | vdpau).items() if file not in left_out}
        for file, path in own.items():
            shown.setdefault(file, path)
        if any(path.endswith(suffix) and file not in vdpau for file, path in own.items()):
            driver_directories.append(listing.shown)
    files = {path: file for file, path in shown.items()}
    return Libraries(
        versions=(chosen, *(other for other in versions if other != chosen)),
        files=tuple(sorted(files.items())),
        links=tuple(sorted(_links(tree, listings, shown, chosen))),
        directories=tuple(dict.fromkeys(path.rpartition("/")[0] for path in files)),
        driver_directories=tuple(driver_directories),
        left_out=left_out,
    )


def linker_directories(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the default directories of linkers in images: Debian's, then other distributions'."""
    libcuda = next((path for path in paths if _LIBCUDA.match(path.rpartition("/")[2])), "")
    arch = next((arch for arch in _ARCHES if f"/{arch}/" in libcuda), f"{MACHINE}-linux-gnu")
    return f"/usr/lib/{arch}", "/usr/lib64"


def _search(tree: RootedTree, left_out: dict[str, str]) -> list[_Listing]:
    """Add libcuda of other architectures to `left_out`.

    Links that lead out of their directory are followed only if no directory has libcuda itself.
    """
    everywhere = False
    for follow in (False, False, True):
        shown: dict[str, str] = {}
        more = (*UNUSUAL_DIRS, *_cached_directories(tree)) if everywhere else ()
        for directory in (*USUAL_DIRS, *more):
            resolved = tree.directory(directory)
            if resolved is not None:
                shown.setdefault(resolved, directory if directory in UNUSUAL_DIRS else resolved)
        listings = [_list(tree, *names, follow=follow) for names in shown.items()]
        for listing in listings:
            _drop_foreign_libcuda(tree, listing, left_out)
        if any(True for listing in listings for _ in _libcuda_versions(listing)):
            break
        everywhere = True
    return listings


def _drop_foreign_libcuda(tree: RootedTree, listing: _Listing, left_out: dict[str, str]) -> None:
    found = {file: name for name, file in listing.files.items() if _LIBCUDA.match(name)}
    for file, made_for in foreign_files(tree, found).items():
        left_out[file] = made_for
        del listing.files[found[file]]


def _list(tree: RootedTree, directory: str, shown: str, *, follow: bool = False) -> _Listing:
    """With `follow`, include files in other directories that links lead to."""
    listing = _Listing(directory, shown, {}, [])
    for entry in tree.entries(directory):
        name = entry.name
        if ".so" not in name:
            continue
        path = _join(directory, name)
        if entry.is_symlink():
            listing.symlinks.append(name)
            file = tree.file(path) if follow else None
            name = file.rpartition("/")[2] if file is not None else ""
        else:
            file = path if entry.is_file(follow_symlinks=False) else None
        if file is not None and (_VERSIONED.match(name) or name.startswith(_NVVM70)):
            listing.files.setdefault(name, file)
    return listing


def _libcuda_versions(listing: _Listing) -> Iterator[str]:
    for name in sorted(listing.files):
        match = _LIBCUDA.match(name)
        if match is not None:
            yield match[1]


def _linked_version(tree: RootedTree, listings: Iterable[_Listing], left_out: Collection[str]) -> str | None:
    for listing in listings:
        if "libcuda.so.1" in listing.symlinks:
            target = tree.resolve(_join(listing.directory, "libcuda.so.1")) or ""
            match = _LIBCUDA.match(target.rpartition("/")[2])
            if match is not None and target not in left_out:
                return match[1]
    return None


def _cached_directories(tree: RootedTree) -> list[str]:
    cache = tree.file(_LD_CACHE)
    if cache is None:
        return []
    try:
        data = Path(tree.local(cache)).read_bytes()
    except OSError as error:
        refuse_own_limit(cache, error)
        return []
    return [match.decode("ascii") for match in dict.fromkeys(_CACHED_DIRECTORY.findall(data))]


def _vdpau(tree: RootedTree, listing: _Listing, suffix: str) -> dict[str, str]:
    directory = tree.directory(_join(listing.directory, "vdpau"))
    if directory is None:
        return {}
    found = _list(tree, directory, _join(listing.shown, "vdpau"), follow=True)
    return {file: _join(found.shown, name) for name, file in found.files.items() if name.endswith(suffix)}


def _links(
    tree: RootedTree, listings: Iterable[_Listing], shown: Mapping[str, str], version: str
) -> list[tuple[str, str, str]]:
    """Include links that programs need although the host lacks them. `shown` maps each resolved file to its path in
    containers.
    """
    paths = set(shown.values())
    stems = {path.rpartition("/")[2].partition(".so")[0] for path in paths}
    links: dict[str, tuple[str, str]] = {}
    for listing in listings:
        for name in listing.symlinks:
            if name.partition(".so")[0] not in stems:
                continue
            path = _join(listing.shown, name)
            file = shown.get(tree.resolve(_join(listing.directory, name)) or "")
            if file is not None and path not in paths:
                links[path] = (_target(path, file), file)
    for path, target, file in _needed_links(shown.values(), version):
        if path not in paths and links.get(path, ("", file))[1] == file:
            links[path] = (target, file)
    return [(path, target, file) for path, (target, file) in links.items()]


def _needed_links(files: Iterable[str], version: str) -> Iterator[tuple[str, str, str]]:
    for file in files:
        directory, _, name = file.rpartition("/")
        stem = name.removesuffix(f".so.{version}")
        if stem == name or directory.endswith("/vdpau"):
            continue
        loaded_as = _LOADED_AS.get(stem, "1")
        if loaded_as is not None:
            yield f"{directory}/{stem}.so.{loaded_as}", name, file
        for library, link, target in _EXTRA_LINKS:
            if library == stem:
                yield f"{directory}/{link}", target.format(version=version), file


def _target(path: str, file: str) -> str:
    directory = path.rpartition("/")[0]
    return file[len(directory) + 1 :] if file.startswith(f"{directory}/") else file


def _join(directory: str, name: str) -> str:
    return f"{directory.rstrip('/')}/{name}"
