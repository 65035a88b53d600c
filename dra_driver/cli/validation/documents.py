"""YAML documents from files and standard input."""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, NoReturn

from dra_driver.cli.validation.rules.manifests import is_of_device_plugin
from dra_driver.errors import InvalidConfigError
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.ids import quoted
from dra_driver.model.schema import YAML_ERRORS

_READ_BYTES = 65536
_MAX_BYTES = 4 * 1024 * 1024
"""Per file. More YAML than this takes a minute and half a GiB to parse."""
_SUFFIXES = (".yaml", ".yml", ".json")
_ALIKE = 0.8
_LONGEST_KEY = 64
_HELM = re.compile(r"\{\{[^}]*(\.(Values|Release|Chart|Capabilities)\b|\b(include|define|template)\s+\")")
_RENDER = "render it first: `helm template CHART | gpu-dra-driver validate -`"
_MAX_VALUES = 1_000_000
"""With aliases expanded. An object of the API server has at most 3 MiB."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document with a `problem` has no content."""

    file: str
    line: int
    content: Any = None
    problem: str | None = None
    is_configuration: bool = False
    """It is not a Kubernetes object, and a key resembles a setting of gpu-dra-driver."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def metadata(self) -> dict[str, Any]:
        metadata = self.content.get("metadata") if isinstance(self.content, dict) else None
        return metadata if isinstance(metadata, dict) else {}

    @property
    def labels(self) -> dict[str, Any]:
        labels = self.metadata.get("labels")
        return labels if isinstance(labels, dict) else {}

    @property
    def name(self) -> str:
        if not isinstance(self.content, dict):
            return "document"
        kind = str(self.content.get("kind") or ("configuration" if self.is_configuration else "document"))
        name = self.metadata.get("name") or self.metadata.get("generateName")
        namespace = self.metadata.get("namespace")
        place = f"{quoted(namespace)}/" if namespace else ""
        return f"{quoted(kind)} {place}{quoted(name)}" if name else quoted(kind)


def read_documents(files: Sequence[str], settings: Collection[str] = ()) -> Iterator[Document]:
    """Yield the documents of all files. Empty ones are skipped, and a List is split. Raises: InvalidConfigError.

    `-` means standard input; a directory, all YAML and JSON files below it. `settings` are the keys of a
    configuration file.
    """
    for name in files:
        if name == "-":
            read = _documents("(stdin)", _text("(stdin)", sys.stdin.buffer))
            yield from (_recognised(document, settings) for document in read)
            continue
        for path in _files(Path(name)):
            try:
                with path.open("rb") as file:
                    text = _text(str(path), file)
            except OSError as error:
                _refuse(error)
            yield from (_recognised(document, settings) for document in _documents(str(path), text))


def _recognised(document: Document, settings: Collection[str]) -> Document:
    content = document.content
    if not isinstance(content, dict) or "kind" in content or "apiVersion" in content:
        return document
    if is_of_device_plugin(content):
        return document
    ours = any(get_close_matches(str(key)[:_LONGEST_KEY], settings, 1, _ALIKE) for key in content)
    return replace(document, is_configuration=ours)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [
        Path(directory, name)
        for directory, _, names in os.walk(path, onerror=_refuse)
        for name in names
        if name.endswith(_SUFFIXES)
    ]
    if not found:
        raise InvalidConfigError(f"there are no YAML files in {path}")
    # Reading a named pipe would block until someone writes.
    return sorted(file for file in found if file.is_file() or file.is_symlink())


def _refuse(error: OSError) -> NoReturn:
    raise InvalidConfigError(f"cannot read {error.filename}: {error.strerror}") from error


def _text(name: str, file: IO[bytes]) -> str:
    content = bytearray()
    while len(content) <= _MAX_BYTES and (part := file.read(_READ_BYTES)):
        content += part
    if len(content) > _MAX_BYTES:
        raise InvalidConfigError(
            f"{name} is larger than {_MAX_BYTES // 1024**2} MiB; split it into smaller files"
        )
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InvalidConfigError(f"{name} is UTF-16; save it as UTF-8")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidConfigError(f"{name} is not a text file in UTF-8") from error
    if "\0" in text:
        raise InvalidConfigError(f"{name} is not a text file in UTF-8")
    return text


def _documents(file: str, text: str) -> Iterator[Document]:
    import yaml

    if text.lstrip("\ufeff \t\r\n").startswith("<"):
        yield Document(file, 1, problem="this is HTML or XML, not YAML")
        return
    template = _HELM.search(text)
    if template is not None:
        line = text.count("\n", 0, template.start()) + 1
        yield Document(file, line, problem=f"this is a Helm template; {_RENDER}")
        return
    line = 1
    loader = None
    try:
        loader = yaml.SafeLoader(text)  # the constructor checks the characters
        while loader.check_node():
            node: Any = loader.get_node()
            line = node.start_mark.line + 1
            try:
                if _values(node, "", {}) > _MAX_VALUES:
                    raise InvalidConfigError("its aliases expand to too many values")
            except InvalidConfigError as error:
                yield Document(file, line, problem=str(error))
                continue
            yield from _taken_apart(Document(file, line, loader.construct_document(node)))
    except RecursionError:
        yield Document(file, line, problem="this document is nested too deeply")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        yield Document(
            file, line, problem=f"this is not valid YAML: character U+{error.character:04X} is not allowed"
        )
    except (yaml.YAMLError, *YAML_ERRORS) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        yield Document(file, mark.line + 1 if mark else line, problem=f"this is not valid YAML: {reason}")
    finally:
        if loader is not None:
            loader.dispose()


def _taken_apart(document: Document) -> Iterator[Document]:
    content = document.content
    if isinstance(content, dict) and content.get("kind") == "List" and isinstance(content.get("items"), list):
        yield from (Document(document.file, document.line, item) for item in content["items"])
    elif content is not None:
        yield document


def _values(node: Any, path: str, known: dict[int, int]) -> int:
    """Count values with aliases expanded, and a value that contains itself once.

    Raises: InvalidConfigError for a duplicate key, which YAML would silently overwrite.
    """
    import yaml

    if id(node) in known:
        return known[id(node)]
    known[id(node)] = count = 1
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            here = f"{path}.{name}" if path else name
            if name in names and name != "<<":
                raise InvalidConfigError(f"{here} appears twice")
            names.add(name)
            count += _values(key, here, known) + _values(value, here, known)
    elif isinstance(node, yaml.SequenceNode):
        count += sum(_values(item, f"{path}[{number}]", known) for number, item in enumerate(node.value))
    else:
        count += len(node.value) // 64
    known[id(node)] = count
    return count
