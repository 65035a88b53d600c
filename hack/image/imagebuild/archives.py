"""Tar and OCI archives of which the same content gives the same bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_LEVEL = 6


@dataclass(frozen=True, slots=True)
class Layer:
    """A file with a gzipped tar; ``diff_id`` is the digest of the tar in it, ``unpacked`` the bytes of its files."""

    file: Path
    digest: str
    diff_id: str
    unpacked: int
    made_by: str


def write_layer(file: Path, tree: Path, below: str, made_by: str) -> Layer:
    """All of ``tree`` as a layer that puts it below a path of the image, owned by root and writable by root only.

    No entry has a time of its own, so that a new build of the same packages is the same layer; and no program of a
    layer changes its user.
    """
    plain = file.with_suffix(".tar")
    total = 0
    with tarfile.open(plain, "w", format=tarfile.PAX_FORMAT) as archive:
        for parent in reversed(Path(below).parents if below else []):
            if parent.name:
                archive.addfile(_folder(str(parent)))
        for path in [tree, *sorted(tree.rglob("*"))]:
            name = str(Path(below) / path.relative_to(tree))
            if name != ".":
                total += _add(archive, path, name)
    diff_id = _digest(plain)
    with plain.open("rb") as source, file.open("wb") as target:
        _gzip(source, target)
    plain.unlink()
    layer = Layer(file, _digest(file), diff_id, total, made_by)
    file.with_suffix(".json").write_text(json.dumps([layer.digest, diff_id, total, made_by]))
    return layer


def read_layer(file: Path) -> Layer | None:
    """The layer that `write_layer` wrote to ``file``, None if it did not come to its end."""
    note = file.with_suffix(".json")
    return Layer(file, *json.loads(note.read_text())) if note.exists() else None


def write_image(
    file: Path, name: str, platform: Mapping[str, str], config: Json, layers: Sequence[Layer], epoch: int
) -> str:
    """Write an image as an OCI archive under its full name, registry and tag included; its digest."""
    created = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    described = {
        **platform,
        "created": created,
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": created, "created_by": layer.made_by} for layer in layers],
    }
    config_blob = _json(described)
    layer_entries = [_descriptor(_LAYER, layer.digest, layer.file.stat().st_size) for layer in layers]
    manifest_blob = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(_CONFIG, _digest_of(config_blob), len(config_blob)),
            "layers": layer_entries,
            "annotations": dict(config.get("Labels", {})),
        }
    )
    image = {
        **_descriptor(_MANIFEST, _digest_of(manifest_blob), len(manifest_blob)),
        "platform": dict(platform),
        # containerd takes the first one as the name, podman, skopeo and buildah the second.
        "annotations": {
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
        },
    }
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [image]}
    unfinished = file.with_suffix(".unfinished")
    with tarfile.open(unfinished, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(_folder("blobs"))
        archive.addfile(_folder("blobs/sha256"))
        blobs: dict[str, bytes | Path] = {layer.digest: layer.file for layer in layers}
        blobs |= {_digest_of(config_blob): config_blob, _digest_of(manifest_blob): manifest_blob}
        for digest, blob in sorted(blobs.items()):
            _add_blob(archive, f"blobs/sha256/{digest.removeprefix('sha256:')}", blob)
        _add_blob(archive, "index.json", _json(index))
        _add_blob(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
    unfinished.replace(file)
    return str(image["digest"])


def write_tar_gz(file: Path, entries: Iterable[tuple[str, Path]], epoch: int) -> None:
    """A gzipped tar of files under the given names, all with one time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in sorted(entries):
            _add(archive, path, name, epoch)
    buffer.seek(0)
    with file.open("wb") as target:
        _gzip(buffer, target)


def _add(archive: tarfile.TarFile, path: Path, name: str, epoch: int = 0) -> int:
    """The size of what was added."""
    entry = archive.gettarinfo(path, name)
    if (
        entry.islnk()
    ):  # A second name of a file: the file once more, since which of its names is met first is chance.
        entry.type, entry.linkname, entry.size = tarfile.REGTYPE, "", path.stat().st_size
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = epoch
    if entry.issym():
        entry.mode = 0o777
    elif entry.isdir() and entry.mode & 0o1000:
        entry.mode = 0o1777
    else:
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o111 else 0o644
    if not entry.isfile():
        archive.addfile(entry)
        return 0
    with path.open("rb") as content:
        archive.addfile(entry, content)
    return entry.size


def _folder(name: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    return entry


def _add_blob(archive: tarfile.TarFile, name: str, blob: bytes | Path) -> None:
    entry = tarfile.TarInfo(name)
    entry.mode = 0o644
    if isinstance(blob, bytes):
        entry.size = len(blob)
        archive.addfile(entry, io.BytesIO(blob))
        return
    entry.size = blob.stat().st_size
    with blob.open("rb") as content:
        archive.addfile(entry, content)


def _gzip(source: IO[bytes], target: IO[bytes]) -> None:
    with gzip.GzipFile(filename="", mode="wb", compresslevel=_LEVEL, fileobj=target, mtime=0) as packed:
        shutil.copyfileobj(source, packed, 1 << 20)


def _descriptor(kind: str, digest: str, size: int) -> Json:
    return {"mediaType": kind, "digest": digest, "size": size}


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return f"sha256:{hashlib.file_digest(content, 'sha256').hexdigest()}"


def _digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


Json = dict[str, Any]
