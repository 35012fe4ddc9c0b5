"""The files of a corpus: listed, each by a name and a version that say nothing about where it lies, and fetched.

`corpus_identity` is what the dataset's key takes of the list. A file whose content is no longer what was listed is an
error, because the key would then name a text that the dataset does not hold.
"""

from __future__ import annotations

import fcntl
import fnmatch
import os
import re
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import file_digest, sha1, sha256
from logging import LogRecord, getLogger
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pydantic import JsonValue

from litgpt_demo import timeouts
from litgpt_demo.config import Corpus, FileCorpus, HubCorpus, OpenWebTextCorpus, StdlibCorpus, TokensCorpus
from litgpt_demo.data.reading import MOST_POINTER, Layout, Source, ending_of, require_content
from litgpt_demo.errors import DataError, NetworkError, Unreachable, UserError, one_line
from litgpt_demo.secrets import is_protected, redacted, translating
from litgpt_demo.storage import ObjectInfo, bucket_path, crc32c_of, is_remote, open_storage, sha256_of
from litgpt_demo.storage.local import explaining

_READERS = 4  # local files read at once
_NEWLY_READ = (".gzip", ".zstd", ".bz2", ".xz")  # ends of compressed files that were bad documents once

# Hidden files, and what Spark, Hive, Delta Lake and Databricks keep beside the data. Not every name that begins with an
# underscore, as in Hive: `__init__.py` is text that people train on.
_BESIDE = re.compile(r"\.|_(SUCCESS|(common_)?metadata|temporary|delta_log|spark_metadata|(started|committed)_.*)$")


def sources(corpus: Corpus, left_out: list[str] | None = None) -> list[Source]:
    """The files of the corpus in their one order: by name, numbers by their value, but the standard library's by the
    hash of the name.

    In alphabetical order the first megabytes of the standard library would be a package or two; by hash they are a
    sample of all of it. Local files are read through once for their checksum. What a local path selects and nobody can
    read, or would read twice, goes to `left_out`.
    """
    if isinstance(corpus, StdlibCorpus):
        return sorted(_stdlib_sources(), key=lambda source: sha256(source.name.encode()).digest())
    if isinstance(corpus, TokensCorpus):
        train = [one for one in _token_sources(corpus, corpus.train) if not selects(one.name, corpus.validation)]
        if not train:
            what = f"data.corpus.train={corpus.train} selects no file that data.corpus.validation does not"
            raise UserError(what, fix="give the two splits files of their own")
        return [*train, *_token_sources(corpus, corpus.validation)]
    if isinstance(corpus, FileCorpus):
        found = _file_sources(corpus, [] if left_out is None else left_out)
    else:
        hub = corpus.as_hub() if isinstance(corpus, OpenWebTextCorpus) else corpus
        found = _hub_sources(hub)
        _require_one_format(hub, hub.files, [source.name for source in found])
    # Two folders may hold files of one name: then the content decides, never the folder.
    return sorted(found, key=lambda source: (_in_order(source.name), source.version, source.size))


def _in_order(name: str) -> tuple[str, str]:
    """The key by which names are sorted: `train_2.bin` precedes `train_10.bin`, as their maker counted."""
    return re.sub("[0-9]+", lambda number: number[0].zfill(20), name), name


def corpus_identity(corpus: Corpus, sources: Sequence[Source]) -> JsonValue:
    """Return what the dataset's key hashes of a corpus: settings that decide the text, files by name and content.

    Addresses are no part of it: the same files in another folder, or behind another branch, give the same key.
    """
    if isinstance(corpus, TokensCorpus):
        held = {source.name: selects(source.name, corpus.validation) for source in sources}
        files: list[JsonValue] = [[one.name, one.size, one.version, held[one.name]] for one in sources]
        return {"tokens": corpus.dtype, "files": files}
    settings = corpus.as_hub() if isinstance(corpus, OpenWebTextCorpus) else corpus
    told = settings.model_dump(mode="json", include={"max_bytes", "format", "column", "separator"})
    if isinstance(settings, HubCorpus) and settings.format == "auto":
        del told["format"]  # datasets made before there was a choice keep their keys
    # What was made of these before is another dataset.
    if Layout.of(corpus).format == "auto" and any(ending_of(source.name) == ".json" for source in sources):
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
        file = None if is_remote(self.address) else Path(self.address)
        shown, version = _shown(self.address), f"crc32c:{stored.crc32c}"
        if file is not None:
            _require_content(file, shown, stored.size)
        return Source(address=shown, name=_shown(self.name), size=stored.size, version=version, file=file)


def _require_content(file: Path, address: str, size: int) -> None:
    if size < MOST_POINTER:
        require_content(file.read_bytes(), address)


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
        if not (found := list(_in_bucket(path) if is_remote(path) else _on_this_machine(path, left_out))):
            raise UserError(
                f"data.corpus.paths has {path!r}, and no file matches that (seen from {Path.cwd()}); `*` stays inside "
                "a folder, `**/` goes through folders, and names that begin with a dot, `_SUCCESS` and the like are "
                "left out"
            )
        _require_one_format(corpus, path, [place.name for place in found])
        for place in found:
            places[place.address] = min(place, places.get(place.address, place), key=lambda one: one.name)
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(_Place.source, places.values()))


def token_home(corpus: TokensCorpus) -> str:
    """Return the address of the folder of token files, written out."""
    return corpus.path.rstrip("/") if is_remote(corpus.path) else os.path.abspath(Path(corpus.path).expanduser())  # noqa: PTH100


def _token_sources(corpus: TokensCorpus, pattern: str) -> list[Source]:
    home, left_out = token_home(corpus), list[str]()
    where = f"{home}/{pattern}"
    places = list(_in_bucket(where) if is_remote(home) else _on_this_machine(where, left_out))
    if not places:
        raise UserError(
            f"data.corpus.path={corpus.path} has no file {pattern}",
            fix="name the files of ids by data.corpus.train and data.corpus.validation, as in fineweb_val_*.bin",
        )
    places = [place._replace(name=place.address.removeprefix(f"{home}/")) for place in places]
    with ThreadPoolExecutor(_READERS) as pool:
        return sorted(pool.map(_Place.source, places), key=lambda source: _in_order(source.name))


def _require_one_format(corpus: Corpus, path: str, names: Sequence[str]) -> None:
    """A card, a licence or an index beside the data would be trained on, and nobody would see it: a UserError."""
    layout, formats = Layout.of(corpus), dict[str, list[str]]()
    for name in map(_shown, sorted(names)):
        formats.setdefault(layout.format_of(name), []).append(name)
    if len(formats) > 1:
        first, *_ = found = sorted(formats.items())
        told = [f"{len(some):,} {form} ({', '.join(some[:3])}{', …' * (len(some) > 3)})" for form, some in found]
        raise UserError(
            f"data.corpus: {path} has files of several formats: {', '.join(told)}",
            fix=f"name those to read by a pattern for each format, such as **/*{PurePosixPath(first[1][0]).suffix}, "
            "or set data.corpus.format if all are of one",
        )


def _on_this_machine(path: str, left_out: list[str]) -> Iterator[_Place]:
    """The files that match, of each folder once: by links only where nothing else leads there, and never back up."""
    given = Path(path).expanduser()
    if given.is_file():
        yield _Place(os.path.abspath(given), given.name)  # noqa: PTH100 (Path.resolve would follow symbolic links)
        return
    base, pattern = (str(given), "**") if given.is_dir() else _fixed_part(str(given))
    parts = pattern.split("/")
    hidden = any(part.startswith((".", "_")) for part in parts)
    folders, links = [""], list[str]()
    seen = {str(parent) for parent in Path(os.path.realpath(base)).parents}
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        here = Path(base, folder)
        if (real := os.path.realpath(here)) in seen:
            if Path(os.path.realpath(here.parent)).is_relative_to(real):
                left_out.append(_shown(f"{here} is a link to {real}, which it lies in"))
            continue
        seen.add(real)
        try:
            for file in sorted(here.iterdir()):
                name = f"{folder}{file.name}"
                deeper = "**" in parts or name.count("/") < len(parts) - 1
                if file.is_dir():
                    if deeper and (hidden or _BESIDE.match(file.name) is None):
                        (links if file.is_symlink() else folders).append(f"{name}/")
                elif selects(name, pattern):
                    if file.is_file():
                        yield _Place(os.path.abspath(file), name)  # noqa: PTH100
                    else:
                        left_out.append(_shown(f"{file} {'leads nowhere' if file.is_symlink() else 'is no file'}"))
        except OSError as error:
            left_out.append(_shown(f"{here} cannot be read ({error.strerror})"))


def _in_bucket(address: str) -> Iterator[_Place]:
    base, pattern = _fixed_part(address.rstrip("/"))
    parent, _, last = base.rpartition("/")
    if not pattern and is_remote(parent) and open_storage(parent).exists(last):
        yield _Place(base, last)
        return
    for stored in open_storage(base).inventory(odd=True):
        name = re.sub(r"(^|/)(\.{0,2}/)+", r"\1", stored.path)
        if not selects(name, pattern or "**"):
            continue
        if name != stored.path or re.search(r"[\0\r\n]", name):
            raise UserError(
                f"data.corpus.paths has {address!r}, where the bucket has the object {stored.path!r}: components that "
                "are empty or dots, and line breaks, cannot be read; rename it, or give a pattern that leaves it out"
            )
        yield _Place(f"{base}/{name}", name, stored)


def _fixed_part(path: str) -> tuple[str, str]:
    """`path` cut before the first component with a wildcard; the second half is empty where there is none."""
    parts = path.split("/")
    wild = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    return ("/".join(parts[:wild]) or "/") if wild else ".", "/".join(parts[wild:])


def selects(name: str, pattern: str) -> bool:
    """Whether a pattern selects the file called `name`, as Python's recursive glob would.

    `*`, `?` and `[…]` stay inside a component, the component `**` is any number of folders, and a name that begins with
    a dot is only matched by a component that does too; so it is with `_SUCCESS` and others that writers keep beside.
    """
    (first, _, deeper), (here, _, later) = name.partition("/"), pattern.partition("/")
    if not name or not pattern:
        return name == pattern
    visible = _BESIDE.match(first) is None
    if pattern == "**":
        return visible and (not deeper or selects(deeper, pattern))
    if here == "**":
        return selects(name, later) or (visible and selects(deeper, pattern))
    return fnmatch.fnmatchcase(first, here) and (visible or here.startswith(first[0])) and selects(deeper, later)


_HUB_ADDRESS = re.compile(r"hf://datasets/([^/]+/[^/@]+)@([^/]+)/(.+)")
_HUB_TRIES = 3  # a download goes on where it broke off, so a few tries get a large file through a bad line


def hub_endpoint() -> str:
    """Return the Hub's address. It is read at each call: huggingface_hub keeps what HF_ENDPOINT was at its import.

    A UserError where a token would be sent there and the way is not encrypted.
    """
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not is_protected(endpoint):
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        if "authorization" in build_hf_headers():
            raise UserError(
                f"HF_ENDPOINT={redacted(endpoint)} is not encrypted, and your Hugging Face token would be sent there; "
                "write https://, or set HF_HUB_DISABLE_IMPLICIT_TOKEN=1 for a mirror that needs no token"
            )
    return endpoint


def can_reach_hub(*, patience: float = timeouts.INTERACTIVE) -> bool:
    """Return whether the Hub answers at all; False too where the environment forbids to ask it."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(hub_endpoint(), timeout=patience)
    except httpx.TransportError:
        return False
    return True


@translating
def asking_hub(repository: str, revision: str) -> Iterator[None]:
    """Say what a person can do where the Hub refuses (UserError), is busy (NetworkError) or not there (Unreachable).

    Nothing is chained: a traceback may show the headers that were sent, and the token is one of them.
    """
    from httpx import TransportError
    from huggingface_hub import errors

    hub, said, retries = redacted(hub_endpoint()), list[LogRecord](), getLogger("huggingface_hub.utils._http")
    retries.addFilter(said.append)  # type: ignore[arg-type]  # a filter that returns nothing lets nothing pass
    try:
        yield
    # RuntimeError: after a refused connection huggingface_hub 1.3.7 tries again with the client that it just closed.
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, TransportError, RuntimeError) as error:
        why = one_line(said[0].getMessage() if said else error)  # the first try's, for the last one's may be that
        raise Unreachable(
            f"the Hub at {hub} cannot be reached for {repository} ({why})",
            fix="check the network, HF_HUB_OFFLINE and HF_ENDPOINT, or download what is wanted and give its path",
        ) from None
    except errors.HfHubHTTPError as error:
        status, refused = error.response.status_code, f"{hub} refused {repository} at {revision}: {one_line(error)}"
        if status == 429 or status >= 500:
            raise NetworkError(refused, fix="the Hub has too much to do, try again later") from None
        advice = {  # the most special class comes first
            errors.GatedRepoError: "it is gated: accept its conditions on its page, and `hf auth login`",
            errors.RepositoryNotFoundError: "there is none, or it is private: check the name, and set HF_TOKEN",
            errors.RevisionNotFoundError: "it has no such branch, tag or commit",
            errors.EntryNotFoundError: "it has no such file",
            Exception: "is HF_TOKEN still valid, and is HF_ENDPOINT a Hugging Face Hub?",
        }
        raise UserError(refused, fix=next(fix for kind, fix in advice.items() if isinstance(error, kind))) from None
    finally:
        retries.removeFilter(said.append)  # type: ignore[arg-type]


def _hub_sources(corpus: HubCorpus) -> list[Source]:
    from huggingface_hub import HfApi

    hub = redacted(endpoint := hub_endpoint())
    with asking_hub(corpus.name, corpus.revision):
        api = HfApi(endpoint=endpoint)
        info = api.dataset_info(corpus.name, revision=corpus.revision, files_metadata=True, timeout=60)
    files, found = info.siblings or [], list[Source]()
    for file in files:
        if not selects(name := file.rfilename, corpus.files):
            continue
        if name.startswith("/") or ".." in name.split("/"):
            what = f"{hub} lists {name!r}, which leads out of the folder of downloads"
            raise UserError(f"{what}; see whose server that is, and unset HF_ENDPOINT")
        if file.size is None or file.blob_id is None:
            raise UserError(f"{hub} lists {name} without size and blob id, so it cannot be pinned; unset HF_ENDPOINT")
        version = f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}"
        address = f"hf://datasets/{corpus.name}@{info.sha}/{name}"
        found.append(Source(address=address, name=name, size=file.size, version=version))
    if not found:
        some = ", ".join(sorted(file.rfilename for file in files)[:10]) or "nothing"
        raise UserError(
            f"data.corpus.files={corpus.files!r} matches no file of the dataset {corpus.name}; it has {some}"
        )
    return found


def _fetch_from_hub(source: Source, folder: Path) -> Path:
    """One that broke off there before is taken up where it ended."""
    from huggingface_hub import hf_hub_download

    place = _HUB_ADDRESS.fullmatch(source.address)
    assert place is not None, source.address
    repository, commit, name = place.groups()
    for _ in range(_HUB_TRIES):
        try:
            with asking_hub(repository, commit):
                return Path(
                    hf_hub_download(
                        repository, name, repo_type="dataset", revision=commit, local_dir=folder,
                        endpoint=hub_endpoint(),
                    )
                )  # fmt: skip
        except Unreachable as error:
            lost = error
    raise NetworkError(f"{source.address} could not be fetched in {_HUB_TRIES} tries: {lost}")


# Nanoseconds after which a file's time of change tells its next change apart: file systems keep some only by the second
# or two, and then two writes in a row look like one.
_SETTLED = 2_000_000_000


@contextmanager
def local_copy(source: Source, scratch: Path) -> Iterator[Path]:
    """The file on this machine, verified before it is read and, by its time of change, again afterwards.

    A remote file is fetched into `scratch` and stays there for the next reading. One that another process of this
    machine is fetching already is waited for. One that is gone, is not what was listed or changes meanwhile is a
    DataError.
    """
    if (path := source.file) is None:
        yield _fetched(source, scratch)
        return
    before = _verified(path, source)
    try:
        yield path
    except (DataError, OSError):
        _verified(path, source, before)
        raise
    _verified(path, source, before)


def _fetched(source: Source, scratch: Path) -> Path:
    folder = _folder_of(source, scratch)  # where a download that was killed finds what it had
    content = folder / "content"
    with explaining(str(scratch), needed=source.size), _alone(folder):
        if not content.exists():
            folder.mkdir(exist_ok=True)
            if bucket_path(source.address) is None:
                _fetch_from_hub(source, folder).rename(content)
            else:
                parent, _, last = source.address.rpartition("/")
                with suppress(FileNotFoundError):
                    open_storage(parent).download(last, content)
        try:
            _verified(content, source)
            _require_content(content, source.address, source.size)
        except DataError:
            content.unlink(missing_ok=True)  # so that the next try fetches it anew
            raise
    return content


def forget(sources: Iterable[Source], scratch: Path) -> None:
    """Remove what was fetched of these files; who wants one later fetches it anew."""
    for source in sources:
        folder = _folder_of(source, scratch)
        if source.file is None and folder.exists():
            with _alone(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _folder_of(source: Source, scratch: Path) -> Path:
    return scratch / "sources" / sha256(f"{source.version} {source.address}".encode()).hexdigest()[:24]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One thread of one process of this machine at a time; a process that dies lets go of the lock."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _verified(path: Path, source: Source, before: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """What tells this state of the file from another without reading it, if it holds what `source` says, as it did
    when it was `before`.

    The Hub's client checks sizes only: here the bytes are checked, once per process for a file that stays as it is.
    """
    if not path.is_file():
        raise DataError(f"{source.address} was there when the corpus was listed and is gone; run again to list it anew")
    found = path.stat()
    signature = found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev
    algorithm, _, listed = source.version.partition(":")
    settled = time.time_ns() - found.st_mtime_ns > _SETTLED
    checksum = _known_checksum(path, algorithm, signature) if settled else CHECKSUMS[algorithm](path)
    if checksum != listed:
        raise DataError(
            f"{source.address} has {algorithm} {checksum} ({found.st_size} bytes), listed was {listed} "
            f"({source.size} bytes): it changed meanwhile or came damaged; run again to list it anew"
        )
    if before not in {None, signature}:  # what was read may be neither the old nor the new text
        raise DataError(f"{source.address} was written anew while it was read; run again to list it anew")
    return signature


@cache
def _known_checksum(path: Path, algorithm: str, signature: tuple[int, ...]) -> str:
    return CHECKSUMS[algorithm](path)


def _git_blob_of(path: Path) -> str:
    """The id that git gives a file: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects, "Object Storage"."""
    blob = sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)  # git's own choice
    with path.open("rb") as file:
        return file_digest(file, lambda: blob).hexdigest()


CHECKSUMS: dict[str, Callable[[Path], str]] = {"crc32c": crc32c_of, "sha256": sha256_of, "git": _git_blob_of}
"""How a file's content is compared with what a bucket or the Hub lists."""
