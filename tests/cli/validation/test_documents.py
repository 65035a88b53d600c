"""Files that are not YAML, or larger than any hand-written file: one sentence each, without delay."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dra_driver.cli.validation.documents import _MAX_BYTES, Document, read_documents
from dra_driver.errors import InvalidConfigError
from tests.fakes.tables import tabled

CLAIM = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: a}\nspec: {}\n"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


def of(path: Path, content: str | bytes) -> list[Document]:
    file = path / "a.yaml"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_documents([str(file)]))


@tabled(
    "text",
    "expected",
    more=[
        (
            f"a: &x {'x' * 100_000}\nb: [{', '.join(['*x'] * 1000)}]\n",
            [(1, "document", "its aliases expand to too many values")],
        ),
        ("'{': '" + "{" * 3000, [(1, "document", "this is not valid YAML: ")]),
    ],
)
def test_documents(tmp_path: Path, text: str, expected: list[tuple[int, str, str | None]]) -> None:
    (tmp_path / "d.yaml").write_text(text)
    found = list(read_documents([str(tmp_path)]))
    assert [(document.line, document.name) for document in found] == [
        (line, name) for line, name, _ in expected
    ]
    for document, (_, _, problem) in zip(found, expected, strict=True):
        assert (document.problem or "").startswith(problem or "")
        assert (document.problem is None) == (problem is None)


@pytest.mark.parametrize(
    "content", ["", "\ufeff", "# only\n# comments\n", "---\n# one\n---\n# two\n", "\r\n\r\n"]
)
def test_empty_file_has_no_documents(tmp_path: Path, content: str) -> None:
    assert of(tmp_path, content) == []


@pytest.mark.parametrize(
    "content", [CLAIM.replace("\n", "\r\n"), "\ufeff" + CLAIM, CLAIM.replace("\n", "\r")]
)
def test_line_ends_and_a_byte_order_mark_do_not_matter(tmp_path: Path, content: str) -> None:
    [document] = of(tmp_path, content)
    assert (document.name, document.problem) == ("ResourceClaim a", None)


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        ("a: " + "[" * 100_000, 1, "this document is nested too deeply"),
        ("a: 1\n---\na: " + "[" * 3000 + "]" * 3000, 1, "this document is nested too deeply"),
        ("".join(" " * n + "a:\n" for n in range(1500)), 1, "this document is nested too deeply"),
        (BOMB, 1, "its aliases expand to too many values"),
        ("<!DOCTYPE html>\n<html><body>log in</body></html>\n", 1, "this is HTML or XML, not YAML"),
        ("a: b\nc: \x07\n", 2, "this is not valid YAML: character U+0007 is not allowed"),
        ("a:\n\tb: c\n", 2, r"this is not valid YAML: found character '\t' that cannot start any token"),
    ],
)
def test_unreadable_file_is_one_sentence(tmp_path: Path, content: str, line: int, problem: str) -> None:
    found = of(tmp_path, content)[-1]
    assert (found.line, found.problem, found.content) == (line, problem, None)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (CLAIM.encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (CLAIM.encode("utf-16-be"), "is not a text file in UTF-8"),
        (CLAIM.encode("utf-16-le"), "is not a text file in UTF-8"),
        (b"\x7fELF\x02\x01\x01\x00", "is not a text file in UTF-8"),
        (b"a: \xff\n", "is not a text file in UTF-8"),
        (b"a" * (_MAX_BYTES + 1), "is larger than 4 MiB; split it into smaller files"),
    ],
)
def test_a_file_that_is_not_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, why: str
) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        of(tmp_path, content)
    assert str(caught.value) == f"{tmp_path}/a.yaml {why}"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    with pytest.raises(InvalidConfigError) as caught:
        list(read_documents(["-"]))
    assert str(caught.value) == f"(stdin) {why}"


def test_of_a_file_without_end_only_so_much_is_read() -> None:
    with pytest.raises(InvalidConfigError, match=r"/dev/zero is larger than 4 MiB"):
        list(read_documents(["/dev/zero"]))


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfigError, match="there are no YAML files in"):
        list(read_documents([str(tmp_path)]))
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "in/pipe.yaml")
    (tmp_path / "in/loop").symlink_to("..")
    for name in ("in/b.yml", "in/a.json", "c.yaml"):
        (tmp_path / name).write_text(CLAIM)
    found = [Path(one.file).name for one in read_documents([str(tmp_path)])]
    assert found == ["c.yaml", "a.json", "b.yml"]
    (tmp_path / "d.yaml").symlink_to("nowhere")
    with pytest.raises(InvalidConfigError, match=r"cannot read .*/d.yaml: No such file or directory"):
        list(read_documents([str(tmp_path)]))

    def refused(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(InvalidConfigError) as caught:
        list(read_documents([str(tmp_path)]))
    assert str(caught.value) == f"cannot read {tmp_path}: Permission denied"
