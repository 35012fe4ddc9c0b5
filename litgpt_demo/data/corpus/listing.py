"""The files of a corpus, and the part of them that goes into a dataset's key."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pydantic import JsonValue

from litgpt_demo.config import Corpus, FileCorpus, HubCorpus, OpenWebTextCorpus, StdlibCorpus
from litgpt_demo.data.corpus.files import Layout, Source, ending_of, is_beside, matches
from litgpt_demo.data.corpus.hub import hub_sources
from litgpt_demo.errors import UserError
from litgpt_demo.storage import ObjectInfo, bucket_path, is_remote, open_storage

_READERS = 4
"""Local files read at once."""
_NEWLY_READ = (".gzip", ".zstd", ".bz2", ".xz")
"""Ends of compressed files that were bad documents once."""


def sources(corpus: Corpus, left_out: list[str] | None = None) -> list[Source]:
    """The files of the corpus in their one order: by name, but the standard library's by the hash of the name.

    In alphabetical order the first megabytes of the standard library would be a package or two; by hash they are a
    sample of all of it. Local files are read through once for their checksum.

    Args:
        left_out: takes what a local path selects and nobody can read, or would read twice.
    """
    match corpus:
        case StdlibCorpus():
            return sorted(_stdlib_sources(), key=lambda source: sha256(source.name.encode()).digest())
        case FileCorpus():
            found = _file_sources(corpus, [] if left_out is None else left_out)
        case HubCorpus():
            found = hub_sources(corpus)
            _require_one_format(corpus, corpus.files, [source.name for source in found])
        case OpenWebTextCorpus():
            found = hub_sources(corpus.as_hub())
    # Two folders may hold files of one name: then the content decides, never the folder.
    return sorted(found, key=lambda source: (source.name, source.version, source.size))


def corpus_identity(corpus: Corpus, sources: Sequence[Source]) -> JsonValue:
    """Return what the dataset's key hashes of a corpus: settings that decide the text, files by name and content.

    Addresses are no part of it: the same files in another folder, or behind another branch, give the same key.
    """
    settings = corpus.as_hub() if isinstance(corpus, OpenWebTextCorpus) else corpus
    told = settings.model_dump(mode="json", include={"max_bytes", "format", "column", "separator"})
    if isinstance(settings, HubCorpus) and settings.format == "auto":
        del told["format"]  # datasets made before there was a choice keep their keys
    # What was made of these before is another dataset.
    if Layout.of(settings).format == "auto" and any(ending_of(source.name) == ".json" for source in sources):
        told["json"] = "lines"  # it was text once
    if any(source.name.lower().endswith(_NEWLY_READ) for source in sources):
        told["compressed"] = "decompressed"
    return {"settings": told, "files": [[source.name, source.size, source.version] for source in sources]}


class _Place(NamedTuple):
    """A file that a path selects: its address, and its name there; size and checksum where the listing told them."""

    address: str
    name: str
    stored: ObjectInfo | None = None

    def source(self) -> Source:
        """A local file is read for its checksum."""
        folder, _, last = self.address.rpartition("/")
        stored = self.stored or open_storage(folder or "/").stat(last)
        return Source(
            address=_shown(self.address),
            name=_shown(self.name),
            size=stored.size,
            version=f"crc32c:{stored.crc32c}",
            file=None if is_remote(self.address) else Path(self.address),
        )


def _shown(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _stdlib_sources() -> Iterator[Source]:
    """Python files of the standard library that decode as UTF-8; its test suite has a few that do not, on purpose."""
    library = Path(sysconfig.get_path("stdlib"))
    for folder, folders, files in os.walk(library):
        folders[:] = set(folders) - {"site-packages", "dist-packages", "__pycache__"}
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            with suppress(UnicodeDecodeError):
                if path.is_file():
                    path.read_bytes().decode()
                    yield _Place(str(path), path.relative_to(library).as_posix()).source()


def _file_sources(corpus: FileCorpus, left_out: list[str]) -> list[Source]:
    """The files that the paths select, each once; a file that two paths name differently takes the smaller name."""
    places: dict[str, _Place] = {}
    for path in corpus.paths:
        if not path.strip():
            raise UserError("data.corpus.paths has an empty path; `.` is the current folder")
        if bucket_path(path) is None and is_remote(path):
            raise UserError(
                f"data.corpus.paths has {path!r}: only local paths and gs:// addresses can be read; copy the files"
            )
        found = _on_this_machine(path, left_out) if bucket_path(path) is None else _in_bucket(path)
        _require_one_format(corpus, path, [place.name for place in found])
        for place in found:
            places[place.address] = min(place, places.get(place.address, place), key=lambda one: one.name)
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(_Place.source, places.values()))


def _require_one_format(corpus: Corpus, path: str, names: Sequence[str]) -> None:
    """A card, a licence or an index beside the data would be trained on, and nobody would see it: a UserError."""
    layout, formats = Layout.of(corpus), dict[str, list[str]]()
    for name in map(_shown, sorted(names)):
        formats.setdefault(layout.format_of(name), []).append(name)
    if len(formats) > 1:
        first, *_ = found = sorted(formats.items())
        told = [f"{len(some):,} {form} ({', '.join(some[:3])}{', …' * (len(some) > 3)})" for form, some in found]
        raise UserError(
            f"data.corpus: {path} has files of several formats: {', '.join(told)}; name those to read by a pattern for "
            f"each format, such as **/*{PurePosixPath(first[1][0]).suffix}, or set data.corpus.format if all are of one"
        )


def _on_this_machine(path: str, left_out: list[str]) -> list[_Place]:
    given = Path(path).expanduser()
    if given.is_file():
        return [_Place(_absolute(given), given.name)]
    base, pattern = (str(given), "**") if given.is_dir() else _fixed_part(str(given))
    names = list(_below(base, pattern, left_out))
    if not names:
        raise UserError(_nothing_at(path, _absolute(base), pattern, there=Path(base).is_dir()))
    return [_Place(_absolute(Path(base, name)), name) for name in names]


def _below(base: str, pattern: str, left_out: list[str]) -> Iterator[str]:
    """The files that match, of each folder once: by links only where nothing else leads there, and never back up."""
    parts = pattern.split("/")
    hidden = any(part.startswith((".", "_")) for part in parts)
    folders, links = [""], list[str]()
    seen = {_identity(parent) for parent in Path(os.path.realpath(base)).parents if parent.is_dir()}
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        here = Path(base, folder)
        try:
            if (found := _identity(here)) in seen:
                if (above := here.resolve()) in [here.parent.resolve(), *here.parent.resolve().parents]:
                    left_out.append(_shown(f"{here} is a link to {above}, which it lies in"))
                continue
            seen.add(found)
            for path in sorted(here.iterdir()):
                name = f"{folder}{path.name}"
                deeper = "**" in parts or name.count("/") < len(parts) - 1
                if path.is_dir():
                    if deeper and (hidden or not is_beside(path.name)):
                        (links if path.is_symlink() else folders).append(f"{name}/")
                elif matches(name, pattern):
                    if path.is_file():
                        yield name
                    else:
                        left_out.append(_shown(f"{path} {'leads nowhere' if path.is_symlink() else 'is no file'}"))
        except OSError as error:
            left_out.append(_shown(f"{here} cannot be read ({error.strerror})"))


def _identity(folder: Path) -> tuple[int, int]:
    return (found := folder.stat()).st_dev, found.st_ino


def _absolute(path: str | Path) -> str:
    return os.path.abspath(path)  # noqa: PTH100 (Path.resolve would follow symbolic links)


def _in_bucket(address: str) -> list[_Place]:
    base, pattern = _fixed_part(address.rstrip("/"))
    parent, _, last = base.rpartition("/")
    if not pattern and is_remote(parent) and open_storage(parent).exists(last):
        return [_Place(base, last)]
    found = []
    for stored in open_storage(base).inventory(odd=True):
        name = re.sub(r"(^|/)(\.{0,2}/)+", r"\1", stored.path)
        if not matches(name, pattern or "**"):
            continue
        if name != stored.path or re.search(r"[\0\r\n]", name):
            raise UserError(
                f"data.corpus.paths has {address!r}, where the bucket has the object {stored.path!r}: components that "
                "are empty or dots, and line breaks, cannot be read; rename it, or give a pattern that leaves it out"
            )
        found.append(_Place(f"{base}/{name}", name, stored))
    if not found:
        raise UserError(_nothing_at(address, base, pattern, there=True))
    return found


def _nothing_at(path: str, base: str, pattern: str, *, there: bool) -> str:
    if not pattern or not there:
        return f"data.corpus.paths has {path!r}, but {base} does not exist; give a file, a folder or a pattern"
    return (
        f"data.corpus.paths has {path!r}, but no file under {base} matches {pattern!r}; "
        "`*` stays inside a folder, `**/` goes through folders, names that begin with a dot are left out, "
        "and so are `_SUCCESS` and the like"
    )


def _fixed_part(path: str) -> tuple[str, str]:
    """`path` cut before the first component with a wildcard; the second half is empty where there is none."""
    parts = path.split("/")
    wild = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    return ("/".join(parts[:wild]) or "/") if wild else ".", "/".join(parts[wild:])
