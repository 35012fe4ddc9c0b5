"""The kinds of corpora: the files of each, listed by a name and a version that do not depend on where they are stored.

A new kind of corpus is a class of settings in `litgpt_demo.config`, a class here, and its entry in KINDS.
"""

from __future__ import annotations

import fnmatch
import os
import re
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from pydantic import JsonValue

from litgpt_demo.config import Corpus, FileCorpus, HubCorpus, OpenWebTextCorpus, Settings, StdlibCorpus, TokensCorpus
from litgpt_demo.data.hub import address_of, hub_endpoint, list_repository
from litgpt_demo.data.readers import MOST_POINTER, FileFormat, Source, first_few, refuse_lfs_pointer
from litgpt_demo.errors import UserError
from litgpt_demo.secrets import redacted
from litgpt_demo.storage import ObjectInfo, is_remote, open_storage
from litgpt_demo.storage.base import copy_with_crc

CorpusSettings = TypeVar("CorpusSettings", bound=Settings)

_READERS = 4  # local files read at once

# Hidden files, and those that Spark, Hive, Delta Lake and Databricks keep next to the data. Not every name that begins
# with an underscore, as in Hive: `__init__.py` is text that people train on.
_BESIDE = re.compile(r"\.|_(SUCCESS|(common_)?metadata|temporary|delta_log|spark_metadata|(started|committed)_.*)$")


class CorpusKind(ABC, Generic[CorpusSettings]):
    known_totals: ClassVar[Mapping[str, int] | None] = None
    """Documents, and tokens of both splits, that the corpus must have with GPT-2's tokenizer."""

    def __init__(self, corpus: CorpusSettings) -> None:
        self.corpus = corpus

    @abstractmethod
    def list_files(self, skipped_paths: list[str]) -> list[Source]:
        """Return the files in their one order; selected paths that cannot be read are appended to `skipped_paths`."""

    def identity(self, files: Sequence[Source]) -> JsonValue:
        """Return what a dataset's content hash covers: settings that decide the text, files by name and content."""
        settings = self.corpus.model_dump(mode="json", include={"max_bytes", "format", "column", "separator"})
        return {"settings": settings, "files": [[file.name, file.size, file.version] for file in files]}


class Stdlib(CorpusKind[StdlibCorpus]):
    """Ordered by the hash of the name, so that the first megabytes are a sample of all packages."""

    def list_files(self, skipped_paths: list[str]) -> list[Source]:
        return sorted(self._files(), key=lambda file: sha256(file.name.encode()).digest())

    def _files(self) -> Iterator[Source]:
        """Yield the files that decode as UTF-8. The library's test suite has a few that do not, on purpose."""
        library = Path(sysconfig.get_path("stdlib"))
        for folder, folders, names in os.walk(library):
            folders[:] = set(folders) - {"site-packages", "dist-packages", "__pycache__"}
            for path in (Path(folder, name) for name in names if name.endswith(".py")):
                with suppress(UnicodeDecodeError):
                    if path.is_file():
                        content = path.read_bytes()
                        content.decode()
                        stored = ObjectInfo(path.name, *copy_with_crc(BytesIO(content)))
                        yield _Selected(str(path), path.relative_to(library).as_posix(), stored).source()


class Files(CorpusKind[FileCorpus]):
    def list_files(self, skipped_paths: list[str]) -> list[Source]:
        by_address: dict[str, _Selected] = {}
        for path in self.corpus.paths:
            if not path.strip():
                raise UserError("data.corpus.paths has an empty path; `.` is the current folder")
            selected = _select(path, skipped_paths)
            if not selected:
                raise UserError(
                    f"data.corpus.paths has {path!r}, but no file matches it (seen from {Path.cwd()}); `*` stays "
                    "inside a folder, `**/` covers all folders below, and names that begin with a dot, `_SUCCESS` "
                    "and the like are left out"
                )
            _require_one_format(self.corpus, path, [file.name for file in selected])
            for file in selected:
                # A file that two paths name differently takes the smaller name.
                known = by_address.get(file.address)
                if known is None or file.name < known.name:
                    by_address[file.address] = file
        return _in_order(_read_checksums([*by_address.values()]))


class Hub(CorpusKind[HubCorpus]):
    def list_files(self, skipped_paths: list[str]) -> list[Source]:
        corpus, hub = self.corpus, redacted(hub_endpoint())
        repository = list_repository(corpus.name, corpus.revision)
        siblings, files = repository.siblings or [], list[Source]()
        for sibling in siblings:
            name = sibling.rfilename
            if not selects(name, corpus.files):
                continue
            if name.startswith("/") or ".." in name.split("/"):
                what = f"{hub} lists {name!r}, which leads out of the folder of downloads"
                raise UserError(f"{what}; check whose server that is, and unset HF_ENDPOINT")
            if sibling.size is None or sibling.blob_id is None:
                what = f"{hub} lists {name} without size and blob id, so it cannot be pinned"
                raise UserError(f"{what}; unset HF_ENDPOINT")
            version = f"sha256:{sibling.lfs.sha256}" if sibling.lfs else f"git:{sibling.blob_id}"
            address = address_of(corpus.name, repository.sha, name)
            files.append(Source(address=address, name=name, size=sibling.size, version=version))
        if not files:
            some = ", ".join(sorted(sibling.rfilename for sibling in siblings)[:10]) or "nothing"
            raise UserError(
                f"data.corpus.files={corpus.files!r} matches no file of the dataset {corpus.name}; it has {some}"
            )
        _require_one_format(corpus, corpus.files, [file.name for file in files])
        return _in_order(files)


class OpenWebText(Hub):
    # nanoGPT's data/openwebtext/readme.md and the corpus' own card: GPT-2's tokenizer, seed 2357, fraction 0.0005.
    known_totals: ClassVar = {"documents": 8_013_769, "train": 9_035_582_198, "validation": 4_434_897}

    def __init__(self, corpus: OpenWebTextCorpus) -> None:
        name = "Skylion007/openwebtext"
        super().__init__(HubCorpus(kind="hub", name=name, revision=corpus.revision, files="**/*.parquet"))


class Tokens(CorpusKind[TokensCorpus]):
    def list_files(self, skipped_paths: list[str]) -> list[Source]:
        corpus = self.corpus
        train, validation = self._select(corpus.train), self._select(corpus.validation)
        train = [file for file in train if not selects(file.name, corpus.validation)]
        if not train:
            what = f"data.corpus.validation={corpus.validation} selects every file of data.corpus.train={corpus.train}"
            raise UserError(what, fix="give each split its own files")
        return [*train, *validation]

    def _select(self, pattern: str) -> list[Source]:
        folder = token_folder(self.corpus)
        selected = _select(f"{folder}/{pattern}", [])
        if not selected:
            raise UserError(
                f"data.corpus.path={self.corpus.path} has no file {pattern}",
                fix="set data.corpus.train and data.corpus.validation to the files' names, such as fineweb_val_*.bin",
            )
        return _in_order(
            _read_checksums([file._replace(name=file.address.removeprefix(f"{folder}/")) for file in selected])
        )

    def identity(self, files: Sequence[Source]) -> JsonValue:
        held_out = self.corpus.validation
        rows: list[JsonValue] = [[file.name, file.size, file.version, selects(file.name, held_out)] for file in files]
        return {"tokens": self.corpus.dtype, "files": rows}


KINDS: Mapping[str, type[CorpusKind[Any]]] = {
    "stdlib": Stdlib,
    "files": Files,
    "hub": Hub,
    "openwebtext": OpenWebText,
    "tokens": Tokens,
}


def kind_of(corpus: Corpus) -> CorpusKind[Any]:
    return KINDS[corpus.kind](corpus)


def _in_order(files: Sequence[Source]) -> list[Source]:
    # `train_2.bin` precedes `train_10.bin`. Of two files of one name the content decides, never the folder.
    def key(file: Source) -> tuple[str, str, str, int]:
        padded = re.sub("[0-9]+", lambda number: number[0].zfill(20), file.name)
        return padded, file.name, file.version, file.size

    return sorted(files, key=key)


class _Selected(NamedTuple):
    address: str
    name: str
    stored: ObjectInfo | None = None

    def source(self) -> Source:
        stored, local_path = self.stored, None
        if stored is None:
            folder, _, name = self.address.rpartition("/")
            stored = open_storage(folder or "/").stat(name)
        if not is_remote(self.address):
            local_path = Path(self.address)
            with local_path.open("rb") as content:
                refuse_lfs_pointer(content.read(MOST_POINTER), _escaped(self.address))
        return Source(
            address=_escaped(self.address),
            name=_escaped(self.name),
            size=stored.size,
            version=f"crc32c:{stored.crc32c}",
            file=local_path,
        )


def _read_checksums(selected: Sequence[_Selected]) -> list[Source]:
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(_Selected.source, selected))


def _escaped(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def token_folder(corpus: TokensCorpus) -> str:
    if is_remote(corpus.path):
        return corpus.path.rstrip("/")
    return os.path.abspath(Path(corpus.path).expanduser())  # noqa: PTH100


def _require_one_format(corpus: Corpus, path: str, names: Sequence[str]) -> None:
    """Raise UserError for several formats: a card, a licence or an index next to the data would be trained on."""
    layout, by_format = FileFormat.of(corpus), dict[str, list[str]]()
    for name in sorted(names):
        by_format.setdefault(layout.format_of(name), []).append(_escaped(name))
    if len(by_format) <= 1:
        return
    counts = []
    for form, examples in sorted(by_format.items()):
        counts.append(f"{len(examples):,} {form} ({first_few(examples, ', ')})")
    suffix = PurePosixPath(by_format[min(by_format)][0]).suffix
    raise UserError(
        f"data.corpus: {path} has files of several formats: {', '.join(counts)}",
        fix=f"select the files to read by a pattern, such as **/*{suffix}, "
        "or set data.corpus.format if all have the same one",
    )


def _select(path: str, skipped_paths: list[str]) -> list[_Selected]:
    if is_remote(path):
        return list(_select_in_bucket(path))
    return list(_select_local(path, skipped_paths))


def _select_local(path: str, skipped_paths: list[str]) -> Iterator[_Selected]:
    """Yield the files that match. A folder that links lead to is read once, under its own path if that is selected."""
    expanded = Path(path).expanduser()
    if expanded.is_file():
        yield _Selected(os.path.abspath(expanded), expanded.name)  # noqa: PTH100 (Path.resolve would follow links)
        return
    base, pattern = str(expanded), "**"
    if not expanded.is_dir():
        base, pattern = _split_pattern(base)
    for folder, names in _walk_once(base, pattern, skipped_paths):
        for name in names:
            file = Path(folder, name)
            relative = file.relative_to(base).as_posix()
            if not selects(relative, pattern):
                continue
            if file.is_file():
                yield _Selected(os.path.abspath(file), relative)  # noqa: PTH100
            elif file.is_symlink():
                skipped_paths.append(_escaped(f"{file} is a broken link"))
            else:
                skipped_paths.append(_escaped(f"{file} is not a file"))


def _walk_once(base: str, pattern: str, skipped_paths: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder below `base` that the pattern may reach, with the names of its files; linked folders last."""

    def note(error: OSError) -> None:
        skipped_paths.append(_escaped(f"{error.filename} cannot be read ({error.strerror})"))

    parts = pattern.split("/")
    depth = len(Path(base).parts) + len(parts) - 1
    with_hidden = any(part.startswith((".", "_")) for part in parts)
    starts, visited = [base], {str(parent) for parent in Path(os.path.realpath(base)).parents}
    while starts:
        start = starts.pop(0)
        for folder, folders, names in os.walk(start, onerror=note):
            real = os.path.realpath(folder)
            if real in visited:
                if Path(os.path.realpath(Path(folder).parent)).is_relative_to(real):
                    skipped_paths.append(_escaped(f"{folder} is a link to {real}, which contains it"))
                folders.clear()
                continue
            visited.add(real)
            if "**" not in parts and len(Path(folder).parts) >= depth:
                folders.clear()
            folders[:] = sorted(name for name in folders if with_hidden or _BESIDE.match(name) is None)
            starts += [str(path) for path in (Path(folder, name) for name in folders) if path.is_symlink()]
            yield folder, sorted(names)


def _select_in_bucket(address: str) -> Iterator[_Selected]:
    base, pattern = _split_pattern(address.rstrip("/"))
    parent, _, last = base.rpartition("/")
    if not pattern and is_remote(parent) and open_storage(parent).exists(last):
        yield _Selected(base, last)
        return
    for stored in open_storage(base).inventory(odd=True):
        name = re.sub(r"(^|/)(\.{0,2}/)+", r"\1", stored.path)
        if not selects(name, pattern or "**"):
            continue
        if name != stored.path or re.search(r"[\0\r\n]", name):
            raise UserError(
                f"data.corpus.paths has {address!r}, where the bucket has the object {stored.path!r}: a name with a "
                "part that is empty or dots, or with a line break, cannot be read; rename it, or leave it out"
            )
        yield _Selected(f"{base}/{name}", name, stored)


def _split_pattern(path: str) -> tuple[str, str]:
    """Return `path` cut before its first component with a wildcard; the second half is empty if there is none."""
    parts = path.split("/")
    wild = next((number for number, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    if not wild:
        return ".", path
    return "/".join(parts[:wild]) or "/", "/".join(parts[wild:])


def selects(name: str, pattern: str) -> bool:
    """Return whether a pattern selects the file called `name`, as Python's recursive glob would.

    `*`, `?` and `[…]` stay inside a component, and the component `**` is any number of folders. A name that begins with
    a dot is only matched by a component that does too; the same holds for `_SUCCESS` and others that writers keep
    next to the data.
    """
    if not name or not pattern:
        return name == pattern
    first, _, rest = name.partition("/")
    component, _, later = pattern.partition("/")
    is_visible = _BESIDE.match(first) is None
    if pattern == "**":
        return is_visible and (not rest or selects(rest, pattern))
    if component == "**":
        return selects(name, later) or (is_visible and selects(rest, pattern))
    may_match = is_visible or component.startswith(first[0])
    return may_match and fnmatch.fnmatchcase(first, component) and selects(rest, later)
