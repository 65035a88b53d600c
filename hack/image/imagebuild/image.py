"""From the repository's files to an image archive, when anything changed."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from localcluster import locking, progress

from imagebuild import architectures, archives, base, places, wheels
from imagebuild.architectures import Architecture
from imagebuild.archives import Json, Layer
from imagebuild.base import Base

_RECIPES = [Path(__file__).resolve(), Path(archives.__file__).resolve()]
_PLACE = "opt/gpu-dra-driver"
"""Where the driver lies in the image. The Containerfile makes the same with another base."""
_CONFIG: Json = {
    "Entrypoint": ["gpu-dra-driver"],
    "Cmd": ["run"],
    "Env": [
        f"PATH=/{_PLACE}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONDONTWRITEBYTECODE=1",
        "PYTHONUNBUFFERED=1",
    ],
}
_SCRIPT = f"""#!/{_PLACE}/bin/python3
import sys
from {{module}} import {{function}}
if __name__ == "__main__":
    sys.exit({{function}}())
"""


@dataclass(frozen=True, slots=True)
class Image:
    """A released image: the digest of its manifest, and the control data of its Debian packages."""

    digest: str
    debian: dict[str, dict[str, str]]


def archive(architecture: str | None = None) -> Path:
    """Build the image of the cluster of hack/cluster and return its OCI archive; at once when it is current."""
    with locking.exclusive(places.cache() / "lock", wait=True):
        wanted = architectures.ARCHITECTURES[architecture] if architecture else architectures.own()
        ground = base.ensure(wanted)
        layers = _layers(ground, epoch=0)
        key = places.digest(_RECIPES, more=[layer.digest for layer in layers])
        target = places.cache() / f"gpu-dra-driver-{wanted.name}-{key}.tar"
        if not target.exists():
            _write(target, places.IMAGE, ground, layers, 0, {})
            _tell(target, ground, layers)
            _drop_old(wanted, target, layers)
        return target


def release(
    architecture: Architecture, name: str, target: Path, epoch: int, origin: Mapping[str, str]
) -> Image:
    """Write the image of a version, from the newest packages of its Debian release. `origin` is the `revision` that it
    is made from, and the `source` where that is kept."""
    with locking.exclusive(places.cache() / "lock", wait=True):
        ground = base.ensure(architecture, newest=True)
        layers = _layers(ground, epoch)
        digest = _write(target, name, ground, layers, epoch, origin)
        _tell(target, ground, layers)
        return Image(digest, ground.packages)


def context(folder: Path, python_version: str, processors: Sequence[Architecture]) -> Path:
    """Make a build context for the Containerfile and any other builder."""
    folder.mkdir(parents=True, exist_ok=True)
    with locking.exclusive(places.cache() / "lock", wait=True):
        parts = {"dependencies": wheels.dependencies(python_version, processors), "project": wheels.project()}
        for name, source in parts.items():
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.copytree(source, folder / name)
    return folder


def _layers(ground: Base, epoch: int) -> list[Layer]:
    """Base, dependencies, driver, in the order in which they change."""
    dependencies = wheels.dependencies(ground.python_version, [ground.architecture])
    project = wheels.project(epoch)
    compiler = base.ensure(architectures.own())
    makers = {"base": ground.key, "dependencies": dependencies.name, "driver": project.name}
    made = []
    for part, key in makers.items():
        name = places.digest(_RECIPES, more=[part, key, ground.key])
        file = places.cache() / f"layer-{ground.architecture.name}-{part}-{name}.gz"
        layer = archives.read_layer(file)
        if layer is None:
            with progress.step(f"layer {part} for {ground.architecture.name}"):
                layer = _make_layer(part, file, ground, compiler, dependencies, project)
        made.append(layer)
    return made


def _make_layer(
    part: str, file: Path, ground: Base, compiler: Base, dependencies: Path, project: Path
) -> Layer:
    if part == "base":
        return archives.write_layer(file, ground.tree, "", f"Debian packages of {ground.architecture.name}")
    root = file.with_suffix(".unfinished")
    shutil.rmtree(root, ignore_errors=True)
    place = root / _PLACE
    packages = place / "lib" / f"python{ground.python_version}" / "site-packages"
    packages.mkdir(parents=True)
    for wheel in sorted((dependencies if part == "dependencies" else project).glob("*.whl")):
        _unpack(wheel, packages)
    if part == "dependencies":
        _make_environment(place, ground)
    else:
        _write_script(place / "bin")
    compiler.compile(packages, root=root)
    layer = archives.write_layer(file, place, _PLACE, f"the {part} of gpu-dra-driver")
    shutil.rmtree(root)
    return layer


def _unpack(wheel: Path, packages: Path) -> None:
    """What pip does with a wheel, but for the scripts, of which the image needs the driver's only."""
    with zipfile.ZipFile(wheel) as content:
        for entry in content.infolist():
            place, name = packages, entry.filename
            head, _, rest = name.partition("/")
            if head.endswith(".data"):
                kind, _, name = rest.partition("/")
                if kind not in {"purelib", "platlib"} or not name:
                    continue
            if entry.is_dir():
                continue
            target = place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read(entry))


def _make_environment(place: Path, ground: Base) -> None:
    """A virtual environment, as `python3 -m venv --without-pip` makes it."""
    (place / "bin").mkdir()
    (place / "bin" / "python3").symlink_to("/usr/bin/python3")
    (place / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {ground.python_version}\n"
    )


def _write_script(folder: Path) -> None:
    folder.mkdir()
    for name, target in places.project_settings()["project"]["scripts"].items():
        module, _, function = target.partition(":")
        script = folder / name
        script.write_text(_SCRIPT.format(module=module, function=function))
        script.chmod(0o755)


def _write(
    target: Path, name: str, ground: Base, layers: Sequence[Layer], epoch: int, origin: Mapping[str, str]
) -> str:
    architecture = ground.architecture
    platform = {"architecture": architecture.name, "os": "linux"}
    if architecture.variant:
        platform["variant"] = architecture.variant
    project = places.project_settings()["project"]
    told = {
        "title": project["name"],
        "description": project["description"],
        "version": project["version"],
        "licenses": project["license"],
        **origin,
    }
    labels = {f"org.opencontainers.image.{key}": value for key, value in told.items()}
    with progress.step(f"image {name} for {architecture.name}"):
        return archives.write_image(target, name, platform, {**_CONFIG, "Labels": labels}, layers, epoch)


def _tell(target: Path, ground: Base, layers: Sequence[Layer]) -> None:
    """What the image weighs."""
    below, packages, driver = (layer.unpacked / 1e6 for layer in layers)
    progress.say(
        f"image for {ground.architecture.name}: {below + packages + driver:.0f} MB unpacked: base {below:.0f} MB, "
        f"Python packages {packages:.0f} MB, driver {driver:.0f} MB; archive {target.stat().st_size / 1e6:.0f} MB"
    )


def _drop_old(architecture: Architecture, target: Path, layers: Sequence[Layer]) -> None:
    """Keep one archive, its layers and one project: each change of code or of the lock makes new ones."""
    kept = {target, *(layer.file for layer in layers), *(layer.file.with_suffix(".json") for layer in layers)}
    for pattern in (f"gpu-dra-driver-{architecture.name}-*.tar", f"layer-{architecture.name}-*"):
        for path in set(places.cache().glob(pattern)) - kept:
            path.unlink()
    projects = sorted(places.cache().glob("project-*"), key=lambda path: path.stat().st_mtime)
    for path in projects[:-1]:
        shutil.rmtree(path)
