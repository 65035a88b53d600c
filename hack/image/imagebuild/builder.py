"""buildah with a store of its own, so that no other images are in reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localcluster import shell

# No user namespaces, no network namespaces: builds must work inside containers too.
_ISOLATION = "--isolation=chroot"


@dataclass(frozen=True, slots=True)
class Builder:
    """A buildah store in one folder; the driver is overlay, or vfs which copies."""

    store: Path
    storage_driver: str

    @classmethod
    def open(cls, folder: Path) -> Builder:
        """The store below ``folder``; overlay where the kernel allows it here."""
        overlay = cls(folder / "overlay", "overlay")
        if overlay.store.exists() or overlay._works():
            return overlay
        return cls(folder / "vfs", "vfs")

    def has(self, image: str) -> bool:
        return shell.succeeds(self._buildah("inspect", "--type=image", image))

    def commit_tree(self, tree: Path, image: str) -> None:
        """Make a one-layer image of a root file system."""
        container = shell.run(self._buildah("from", "scratch")).strip()
        try:
            shell.run(self._buildah("copy", container, str(tree), "/"))
            shell.run(self._buildah("commit", container, image))
        finally:
            shell.run(self._buildah("rm", container))

    def run_in(self, image: str, argv: Sequence[str]) -> str:
        """The output of a command in a throw-away container."""
        container = shell.run(self._buildah("from", "--pull-never", image)).strip()
        try:
            return shell.run(self._buildah("run", _ISOLATION, container, "--", *argv))
        finally:
            shell.run(self._buildah("rm", container))

    def build(self, context: Path, containerfile: Path, image: str, arguments: dict[str, str]) -> None:
        """Build a Containerfile, reusing the layers whose inputs are the same."""
        given = [f"--build-arg={name}={value}" for name, value in sorted(arguments.items())]
        options = [_ISOLATION, "--layers", "--pull-never", f"--file={containerfile}", f"--tag={image}"]
        shell.run(self._buildah("bud", *options, *given, str(context)))

    def save(self, image: str, archive: Path) -> None:
        """Write an image as a docker archive that keeps the image's name."""
        unfinished = archive.with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)
        shell.run(self._buildah("push", image, f"docker-archive:{unfinished}:{image}"))
        unfinished.replace(archive)

    def prune(self) -> None:
        """Drop the layers that no named image stands on."""
        shell.run(self._buildah("rmi", "--prune"))

    def _works(self) -> bool:
        """Whether a container can be mounted with this storage driver."""
        if not shell.succeeds(self._buildah("from", "--name=probe", "scratch")):
            return False
        try:
            return shell.succeeds(self._buildah("mount", "probe"))
        finally:
            shell.run(self._buildah("rm", "probe"))

    def _buildah(self, command: str, *words: str) -> list[str]:
        return [
            *("buildah", "--root", str(self.store), "--runroot", f"{self.store}-run"),
            *("--storage-driver", self.storage_driver, command, *words),
        ]
