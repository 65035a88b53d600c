"""`make image`: builds the image of daemonset/Dockerfile as an archive, on Debian and without a registry.

If you can pull `debian:trixie-slim`, use `docker build` instead. This script creates a base image of that name with
debootstrap, and builds the unchanged Dockerfile with buildah. It mounts this machine's package sources for the build,
so they do not become part of the image.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "hack" / "cluster"))

from localcluster import debian, shell  # noqa: E402
from localcluster.layout import Layout  # noqa: E402
from localcluster.shell import ClusterError  # noqa: E402

IMAGE = "localhost/gpu-dra-driver:dev"
"""The image that the cluster of hack/cluster runs. The tag of a released image is its version."""
DOCKERFILE = "daemonset/Dockerfile"
_RELEASE = "trixie"
_BASE = f"docker.io/library/debian:{_RELEASE}-slim"
_PACKAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_PIP_CONFIGURATIONS = ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")
_PIP_SOURCES = ("index-url", "extra-index-url", "trusted-host", "proxy", "cert")
_EPOCH = 315532800
"""1980-01-01, the earliest time that a file in a wheel can have."""
_MAX_IMAGES = 60
_LEFT_OUT = ("etc/hostname", "etc/resolv.conf", "etc/apt/sources.list")
"""Files of the build machine that a published base image does not have."""


def archive() -> Path:
    """Return the archive of `IMAGE`. Build it if a file of the build context has changed."""
    with shell.exclusive(_cache() / "lock", wait=True):
        total = hashlib.sha256()
        for path in sorted(_inputs()):
            total.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
        target = _cache() / f"gpu-dra-driver-{total.hexdigest()[:16]}.tar"
        if not target.exists():
            with shell.step(f"image {IMAGE}"):
                _clear()
                build("--file", DOCKERFILE, "--tag", IMAGE, folder=ROOT)
                for old in _cache().glob("gpu-dra-driver-*"):
                    old.unlink()
                save(IMAGE, target)
        return target


def build(*options: str, folder: Path, epoch: int = _EPOCH) -> None:
    """Build an image from the directory `folder`, with all times set to `epoch`, so that two builds are identical.

    `options` are options of `docker build`, such as `--file` and `--tag`. Raises: ClusterError with the end of
    buildah's output.
    """
    if not debian.is_debian():
        raise ClusterError("the base image can only be built on Debian; on other systems, use `docker build`")
    debian.install_missing(_PACKAGES)
    if not _buildah("images", "--quiet", "--filter", f"reference={_BASE}"):
        with shell.step(f"{_BASE} from Debian's packages"):
            _bootstrap()
    with _sources() as volumes:
        place = ["--isolation=chroot", "--network=host", "--pull-never", "--layers", "--force-rm"]
        _buildah("build", *place, f"--timestamp={epoch}", *volumes, *options, ".", folder=folder)


def save(name: str, target: Path) -> None:
    """Write the built image `name` as an archive that `ctr` and docker can load."""
    unfinished = target.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    _buildah("push", "--quiet", name, f"docker-archive:{unfinished}:{name}")
    unfinished.replace(target)


def _clear() -> None:
    """Remove the base image and all cached steps if there are too many. Each change of the driver adds three steps."""
    debian.install_missing(_PACKAGES)
    if len(_buildah("images", "--quiet", "--all").split()) > _MAX_IMAGES:
        _buildah("rmi", "--all", "--force")


def _cache() -> Path:
    """Return the directory of archives and cached steps. It can be deleted at any time."""
    return Layout.from_environment().cache / "image"


def _inputs() -> Iterator[Path]:
    """Yield the files of the build context that .dockerignore allows, and the files that define the build."""
    ignore = ROOT / ".dockerignore"
    yield from (ignore, ROOT / DOCKERFILE, Path(__file__).resolve())
    for name in (line[1:] for line in ignore.read_text().splitlines() if line.startswith("!")):
        path = ROOT / name
        inside = path.rglob("*") if path.is_dir() else [path]
        yield from (one for one in inside if one.is_file() and "__pycache__" not in one.parts)


def _buildah(*words: str, folder: Path | None = None) -> str:
    """Run buildah in `folder`, with a separate image store, and return its output."""
    place = ["--root", str(_cache() / "store"), "--runroot", str(_cache() / "run")]
    return shell.run(["buildah", *place, *words], cwd=folder)


def _bootstrap() -> None:
    """Create a base image with the same packages as the published one."""
    with tempfile.TemporaryDirectory(dir=_cache()) as name:
        root = Path(name, "root")
        shell.run(["debootstrap", "--variant=minbase", _RELEASE, root, debian.sources(_RELEASE)[_RELEASE]])
        for left in _LEFT_OUT:
            (root / left).unlink(missing_ok=True)
        shell.run(["find", root / "var/cache", root / "var/lib/apt/lists", "-type", "f", "-delete"])
        (root / "etc/apt/sources.list.d/debian.sources").touch()
        shell.run(["tar", "--create", "--file", Path(name, "base.tar"), "--directory", root, "."])
        container = _buildah("from", "scratch").strip()
        _buildah("add", "--quiet", container, str(Path(name, "base.tar")), "/")
        _buildah("commit", "--quiet", "--rm", container, _BASE)


@contextmanager
def _sources() -> Iterator[list[str]]:
    """Yield options that mount this machine's package sources: apt's over the base image's, pip's in root's home."""
    with tempfile.TemporaryDirectory() as name:
        apt, home = Path(name, "debian.sources"), Path(name, "home")
        keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
        apt.write_text(
            "\n".join(
                f"Types: deb\nURIs: {site}\nSuites: {suite}\nComponents: main\nSigned-By: {keys}\n"
                for suite, site in debian.sources(_RELEASE).items()
            )
        )
        found = configparser.ConfigParser(interpolation=None)
        found.read(Path(file).expanduser() for file in _PIP_CONFIGURATIONS)
        given = dict(found["global"]) if found.has_section("global") else {}
        variables = {key: f"PIP_{key.upper().replace('-', '_')}" for key in _PIP_SOURCES}
        given |= {key: os.environ[name] for key, name in variables.items() if name in os.environ}
        certificates = Path(given.get("cert", _CERTIFICATES))
        (home / ".config/pip").mkdir(parents=True)
        if certificates.exists():
            shutil.copy(certificates, home / "ca.crt")
            given["cert"] = "/root/ca.crt"
        lines = [f"{key} = {given[key]}\n" for key in _PIP_SOURCES if key in given]
        (home / ".config/pip/pip.conf").write_text("[global]\n" + "".join(lines))
        yield ["--volume", f"{apt}:/etc/apt/sources.list.d/debian.sources:ro", "--volume", f"{home}:/root"]


def main() -> int:
    """Print the path of the archive."""
    try:
        print(archive())
    except ClusterError as error:
        shell.say(f"image: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
