import re
import socket
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.errors import InvalidConfigError, StateError
from dra_driver.kubelet.sockets import (
    PLUGINS_DIR,
    REGISTRY_DIR,
    ensure_free,
    ensure_plugin_dir,
    hidden_path,
    socket_paths,
)

UID = "0a1b2c3d-1111-2222-3333-444455556666"


def digest(text: str, size: int) -> str:
    return urlsafe_b64encode(sha256(text.encode()).digest()[:size]).decode().rstrip("=")


def paths(driver="gpu.nvidia.com", registry=REGISTRY_DIR, plugins=None, uid=None):
    return socket_paths(
        driver, registry_dir=Path(registry), plugin_dir=Path(plugins or PLUGINS_DIR / driver), pod_uid=uid
    )


def test_default_names_are_the_well_known_ones():
    found = paths()
    assert str(found.registrar) == "/var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock"
    assert str(found.dra) == "/var/lib/kubelet/plugins/gpu.nvidia.com/dra.sock"


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("d" * 27, f"{'d' * 27}-{UID}-reg.sock"),
        ("d" * 28, f"{'d' * 28}-{digest(UID, 8)}-reg.sock"),
        ("d" * 52, f"{'d' * 52}-{digest(UID, 8)}-reg.sock"),
        ("d" * 53, f"dra-{digest('d' * 53 + chr(0) + UID, 16)}-reg.sock"),
        ("d" * 63, f"dra-{digest('d' * 63 + chr(0) + UID, 16)}-reg.sock"),
    ],
)
def test_registrar_name_is_the_first_that_fits_in_107_bytes(driver, name):
    assert paths(driver, uid=UID).registrar.name == name
    assert len(str(paths(driver, uid=UID).registrar)) <= 107


@pytest.mark.parametrize(
    ("length", "name"),
    [
        (36, f"dra-{UID}.sock"),
        (37, f"dra-{digest(UID, 8)}.sock"),
        (61, f"dra-{digest(UID, 8)}.sock"),
        (62, f"dra-{digest(UID, 6)}.sock"),
        (63, f"dra-{digest(UID, 6)}.sock"),
    ],
)
def test_dra_name_is_hashed_when_the_uid_does_not_fit(length, name):
    assert paths("d" * length, uid=UID).dra.name == name


def test_directory_without_room_is_refused_with_its_name_and_the_room_there_is():
    longest = "/" + "r" * (107 - 1 - 1 - len("gpu.nvidia.com-reg.sock"))
    assert len(str(paths(registry=longest).registrar)) == 107
    with pytest.raises(InvalidConfigError, match=f"rr is too long .* at most {len(longest)}"):
        paths(registry=longest + "r")


def test_length_counts_bytes_not_characters():
    with pytest.raises(InvalidConfigError, match="too long"):
        paths(registry="/" + "é" * 50)


@given(
    driver=st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True),
    uid=st.one_of(st.none(), st.uuids().map(str)),
    registry=st.integers(1, 60),
    plugins=st.integers(1, 60),
)
def test_every_path_fits_stays_in_its_directory_and_differs_per_instance(driver, uid, registry, plugins):
    directories = {"registry": "/" + "r" * registry, "plugins": "/" + "p" * plugins}
    try:
        found = paths(driver, uid=uid, **directories)
    except InvalidConfigError:
        assert uid is None
        assert registry + 2 + len(driver) + 9 > 107
        return
    for path, parent in ((found.registrar, directories["registry"]), (found.dra, directories["plugins"])):
        assert len(str(path)) <= 107
        assert str(path.parent) == parent
        assert len(str(hidden_path(path))) <= len(str(path))
        assert hidden_path(path).name.startswith(".")
        assert re.fullmatch(r"[A-Za-z0-9._-]+\.sock", path.name)
    assert paths(driver, uid=uid, **directories) == found
    if uid is not None:
        other = paths(driver, uid=f"{uid[:-1]}x", **directories)
        assert other.registrar != found.registrar
        assert other.dra != found.dra


def test_plugin_directory_that_is_a_file_names_directory_and_flag(short_dir):
    (short_dir / "plugins").write_text("")
    with pytest.raises(StateError, match=r"plugins/d.*--kubelet-plugins-directory-path"):
        ensure_plugin_dir(short_dir / "plugins" / "d")


def test_plain_file_directory_and_symlink_are_refused(short_dir):
    (short_dir / "file").write_text("precious")
    (short_dir / "directory").mkdir()
    (short_dir / "link").symlink_to(short_dir / "nowhere")
    for name in ("file", "directory", "link"):
        with pytest.raises(StateError, match=f"{name} exists and is not a socket"):
            ensure_free(short_dir / name)
    assert (short_dir / "file").read_text() == "precious"


@pytest.mark.parametrize("backlog", [0, 5])
def test_live_socket_is_refused_even_when_its_queue_is_full(short_dir, backlog):
    path = short_dir / "dra.sock"
    with socket.socket(socket.AF_UNIX) as live, socket.socket(socket.AF_UNIX) as first:
        live.bind(str(path))
        live.listen(backlog)
        if backlog == 0:
            first.connect(str(path))
        with pytest.raises(StateError, match="another process listens"):
            ensure_free(path)
    assert path.exists()


def test_datagram_socket_of_someone_is_refused(short_dir):
    path = short_dir / "dra.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as live:
        live.bind(str(path))
        with pytest.raises(StateError, match="another process listens"):
            ensure_free(path)
