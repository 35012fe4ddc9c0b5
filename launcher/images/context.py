"""The context of `docker build`: the files that .dockerignore leaves, in a tar that is the same everywhere.

The tar is written by us and not by the docker command, so that what is hashed is what is built, byte for byte.
Owners, times and permissions (but for "executable") are left out, as in git: checkouts of one commit differ in them.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

DOCKERFILE = "Dockerfile.train-litgpt"
"""Name of the Dockerfile within the tar: it may come from outside the context."""

# 1980-01-02: zip files, hence wheels built in the image, cannot hold earlier times.
_TIME = 315_619_200


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of a .dockerignore (https://docs.docker.com/build/concepts/context/#dockerignore-files)."""

    pattern: str
    keep: bool
    """The line began with `!`: what matches is taken back in."""

    def matches(self, path: str) -> bool:
        """Return True if the line means `path` or a folder above it."""
        expression = _expression(self.pattern)
        return any(expression.fullmatch(part) for part in _with_parents(path))


def read_rules(text: str) -> tuple[Rule, ...]:
    """The lines of a .dockerignore; the last one that matches a path decides about it."""
    rules = []
    for line in text.removeprefix("\ufeff").splitlines():
        if line.startswith("#") or not line.strip():
            continue
        pattern = line.strip()
        keep = pattern.startswith("!")
        pattern = posixpath.normpath(pattern.removeprefix("!").strip()).lstrip("/")
        if pattern not in {"", "."}:
            rules.append(Rule(pattern=pattern, keep=keep))
    return tuple(rules)


def ignored(path: str, rules: Sequence[Rule]) -> bool:
    """Return True if the build cannot see `path`, written with slashes and relative to the context."""
    verdict = False
    for rule in rules:
        if rule.keep == verdict and rule.matches(path):
            verdict = not rule.keep
    return verdict


def _with_parents(path: str) -> Iterator[str]:
    while path:
        yield path
        path = posixpath.dirname(path)


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    """Go's filepath.Match plus `**`, as a regular expression: `*` and `?` stop at a slash, `**` does not."""
    tokens = re.findall(r"\*\*/?|\\.|\[[^]]*\]|.", pattern, re.DOTALL)
    return re.compile("".join(_TRANSLATED.get(token) or _literal(token) for token in tokens), re.DOTALL)


_TRANSLATED = {"**": ".*", "**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}


def _literal(token: str) -> str:
    if len(token) > 1 and token.startswith("["):
        return "[" + token[1:-1].replace("[", r"\[") + "]"
    return re.escape(token[1:] if len(token) > 1 and token.startswith("\\") else token)


def context_paths(context: Path, rules: Sequence[Rule]) -> list[str]:
    """Files and links of the context that are not ignored, sorted; folders are made by what is in them, as in git."""
    return sorted(_walk(context, "", rules))


def _walk(context: Path, folder: str, rules: Sequence[Rule]) -> Iterator[str]:
    with os.scandir(context / folder) as entries:
        for entry in entries:
            path = posixpath.join(folder, entry.name)
            out = ignored(path, rules)
            if entry.is_dir(follow_symlinks=False):
                if not out or _may_keep_below(path, rules):
                    yield from _walk(context, path, rules)
            elif not out and (entry.is_symlink() or entry.is_file()):
                yield path


def _may_keep_below(folder: str, rules: Sequence[Rule]) -> bool:
    """Docker's own shortcut: an ignored folder is entered only for a `!` line that spells its path out."""
    return any(rule.keep and f"{rule.pattern}/".startswith(f"{folder}/") for rule in rules)


def read_ignore_file(context: Path) -> tuple[Rule, ...]:
    """The rules of the context's .dockerignore. The file itself is never sent: it acts by its rules alone."""
    file = context / ".dockerignore"
    if not file.exists():
        return ()
    return (*read_rules(file.read_text("utf-8")), Rule(pattern=".dockerignore", keep=False))


def write_context(context: Path, dockerfile: str, *, to: BinaryIO | None = None) -> str:
    """Write the tar that the engine gets, or only pretend to; returns its sha256, in hex.

    Raises:
        OSError: the context or one of its files cannot be read.
        UnicodeError: its .dockerignore is no UTF-8.
    """
    sink = _Hashing(to)
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        for path in context_paths(context, read_ignore_file(context)):
            _add(tar, context / path, path)
        text = dockerfile.encode()
        tar.addfile(_entry(DOCKERFILE, size=len(text)), io.BytesIO(text))
    return sink.hash.hexdigest()


def _add(tar: tarfile.TarFile, file: Path, path: str) -> None:
    if file.is_symlink():
        entry = _entry(path, mode=0o777)
        entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(file)  # noqa: PTH115 (the text, not a path)
        tar.addfile(entry)
        return
    with file.open("rb") as content:
        status = os.fstat(content.fileno())
        mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        tar.addfile(_entry(path, size=status.st_size, mode=mode), content)


def _entry(path: str, *, size: int = 0, mode: int = 0o644) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode, entry.mtime = size, mode, _TIME
    return entry


class _Hashing:
    """A file to write to that hashes what goes through it."""

    def __init__(self, to: BinaryIO | None) -> None:
        self.hash = sha256()
        self._to = to

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        if self._to is not None:
            self._to.write(data)
        return len(data)
