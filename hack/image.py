"""`make image`: the image of daemonset/Dockerfile as an archive, built on Debian without a registry.

Whoever can pull `debian:trixie-slim` runs `docker build` instead. Here debootstrap makes an image of that name from
Debian's packages, and buildah builds the unchanged Dockerfile. The package sources of this machine are mounted for the
build, and stay out of the image.
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
"""The image of the cluster of hack/cluster; released ones have the version as tag."""
DOCKERFILE = "daemonset/Dockerfile"
_RELEASE = "trixie"
_BASE = f"docker.io/library/debian:{_RELEASE}-slim"
_PACKAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_PIP_CONFIGURATIONS = ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")
_PIP_SOURCES = ("index-url", "extra-index-url", "trusted-host", "proxy", "cert")
_EPOCH = 315532800
"""1980: no file in a wheel may be older."""
_MAX_IMAGES = 60
_LEFT_OUT = ("etc/hostname", "etc/resolv.conf", "etc/apt/sources.list")
"""Files of the build machine that a published base image does not have."""


def archive() -> Path:
    """The archive of `IMAGE`; built if a file of the build context has changed."""
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
    """Builds an image from a checkout, with all its times set to `epoch`, so that two builds are identical.

    `options` are those of `docker build`, such as `--file` and `--tag`. Raises: ClusterError with the end of
    buildah's output.
    """
    if not debian.is_debian():
        raise ClusterError(
            "this machine is not Debian, whose packages the base is made of; use `docker build`"
        )
    debian.install_missing(_PACKAGES)
    if not _buildah("images", "--quiet", "--filter", f"reference={_BASE}"):
        with shell.step(f"{_BASE} from Debian's packages"):
            _bootstrap()
    with _sources() as volumes:
        place = ["--isolation=chroot", "--network=host", "--pull-never", "--layers", "--force-rm"]
        _buildah("build", *place, f"--timestamp={epoch}", *volumes, *options, ".", folder=folder)


def save(name: str, target: Path) -> None:
    """Write an image that was built as an archive that `ctr` and docker load."""
    unfinished = target.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    _buildah("push", "--quiet", name, f"docker-archive:{unfinished}:{name}")
    unfinished.replace(target)


def _clear() -> None:
    """Removes the base and all cached steps if there are many: each change of the driver adds three."""
    debian.install_missing(_PACKAGES)
    if len(_buildah("images", "--quiet", "--all").split()) > _MAX_IMAGES:
        _buildah("rmi", "--all", "--force")


def _cache() -> Path:
    """The directory for downloads, which may be deleted at any time."""
    return Layout.from_environment().cache / "image"


def _inputs() -> Iterator[Path]:
    """The files of the build context, as .dockerignore lets them in, and the recipes."""
    ignore = ROOT / ".dockerignore"
    yield from (ignore, ROOT / DOCKERFILE, Path(__file__).resolve())
    for name in (line[1:] for line in ignore.read_text().splitlines() if line.startswith("!")):
        path = ROOT / name
        inside = path.rglob("*") if path.is_dir() else [path]
        yield from (one for one in inside if one.is_file() and "__pycache__" not in one.parts)


def _buildah(*words: str, folder: Path | None = None) -> str:
    """Returns buildah's output; it runs in `folder`, with a separate image store."""
    place = ["--root", str(_cache() / "store"), "--runroot", str(_cache() / "run")]
    return shell.run(["buildah", *place, *words], cwd=folder)


def _bootstrap() -> None:
    """Creates a base whose packages match those of the published image."""
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
    """Options that mount this machine's package sources: apt's as the base's own, pip's in root's home."""
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
