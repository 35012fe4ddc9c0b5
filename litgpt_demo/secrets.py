"""Secrets: the addresses and the HTTP client that may get them, and their removal from texts and logs."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast
from urllib.parse import quote, unquote, urlsplit

if TYPE_CHECKING:
    import httpx

P = ParamSpec("P")
T = TypeVar("T")

HIDDEN = "[secure]"

# Headers, members of JSON, user information and signatures of URLs, in whatever an answer may repeat of a request.
_NAMES = r"[\w.-]{0,60}(?:secret|token|password|passwd|signature|credential|assertion|api[_-]?key)[\w.-]{0,60}"
# Texts that the patterns need, in lower case and found faster than they are: most lines of a log have none.
_HINTS = (
    "secret", "token", "passw", "signature", "credential", "assertion", "api", "bearer", "basic", "eyj", "hf_", "://",
    "_key", "akia", "asia", "slack", "xox", "wandb", "gh", "ya29.",
)  # fmt: skip
# Repetitions before the last part are bounded, so that the time grows with the length: nodes print lines of 4 MiB.
_PATTERNS = (
    # Words have no capital or digit within: "Bearer tokens" is shown, "Bearer s3cret" is not.
    (re.compile(r"\b((?i:Bearer|Basic)\s+)(?=\S*[A-Z0-9])[\w.~+/%-]{6,}=*"), rf"\1{HIDDEN}"),
    (re.compile(rf"""(\\?["']{_NAMES}\\?["']\s*:\s*\\?["'])[^"'\\]+""", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(rf"([?&;\"']{_NAMES}=)[^\s&;\"']+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\beyJ[\w-]{1,1000}\.[\w-]+\.[\w-]*"), HIDDEN),  # a JSON web token
    (re.compile(r"((?:SECRET|TOKEN|PASSWORD|(?:API|ACCESS)_KEY)(?:_[A-Z0-9_]{1,60})?=)[^\s$]\S+"), rf"\1{HIDDEN}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), HIDDEN),  # a token of the Hub
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), HIDDEN),  # AWS
    (re.compile(r"\b(hooks\.slack\.com/\w+/)[^\s\"'>|]+"), rf"\1{HIDDEN}"),
    (re.compile(r"\bxox[a-z]-[\w-]{10,}"), HIDDEN),  # Slack
    (re.compile(r"\bwandb_v\d+_\w{20,}"), HIDDEN),
    (re.compile(r"((?i:wandb|api.key)\W{1,4})[0-9a-f]{40}\b"), rf"\1{HIDDEN}"),  # an older key of W&B
    (re.compile(r"\b(?:gh[a-z]_[A-Za-z0-9]{30,}|github_pat_\w{30,})"), HIDDEN),
    (re.compile(r"\bya29\.[\w.-]{20,}"), HIDDEN),  # a token of Google's
    (re.compile(r"([a-z0-9+.-]://[^\s/?#:@]*:)[^\s/]+@", re.IGNORECASE), rf"\1{HIDDEN}@"),
)


_SHORTEST = 6  # characters of a secret: shorter values are words


def is_loopback(host: str) -> bool:
    """Return True if a host is this machine without a name server: `localhost` or an address."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_protected(url: str) -> bool:
    """Return whether the request to a URL is protected on its way: by https, or within this machine."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme == "https" or is_loopback(parts.hostname or "")


def protected_client(**settings: Any) -> httpx.Client:
    """Return an HTTP client that refuses to send anything to an address that is not protected.

    It follows a redirect only if a request enables that, and then without `Authorization` to another origin.
    """
    import httpx

    def refuse(request: httpx.Request) -> None:
        if not is_protected(str(request.url)):
            raise httpx.UnsupportedProtocol(f"{origin_of(request.url)} is not encrypted; https:// is needed")

    logging.getLogger("httpx").setLevel(logging.WARNING)  # else it logs every URL, and a signed one is a secret
    # Plain HTTP is for this machine, which no proxy reaches. None means no proxy.
    mounts = {"http://": None}
    return httpx.Client(event_hooks={"request": [refuse]}, mounts=mounts, follow_redirects=False, **settings)


def origin_of(url: httpx.URL | str) -> str:
    """Return scheme, host and port of a URL, which hold no secret; a relative one has none."""
    parts = urlsplit(str(url))
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else ""


def redacted(text: str, *secrets: str) -> str:
    """Return a foreign text without these secrets, and without anything in the form of a secret.

    A response may repeat its request, as a proxy's error page and many validation messages do.
    """
    text = without(text, *secrets)
    lower = text.lower()
    if any(hint in lower for hint in _HINTS):
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
    return text


class Cleaner:
    """Removes the secrets of this process's environment, and anything in the form of a secret."""

    def __init__(self) -> None:
        self._secrets = sorted(secrets_of(os.environ), key=len, reverse=True)

    def __call__(self, value: T) -> T:
        """Return a text, or a JSON document, without secrets."""
        clean: Any = value
        match value:
            case str():
                clean = redacted(value, *self._secrets)
            case dict():
                clean = {name: self(part) for name, part in value.items()}
            case list() | tuple():
                clean = [self(part) for part in value]
        return cast(T, clean)


def without(text: str, *secrets: str) -> str:
    """Return a text without these secrets, in every form in which requests write them."""
    for secret in filter(None, secrets):
        for written in _forms(secret):
            text = text.replace(written, HIDDEN)
    return text


def _forms(secret: str) -> set[str]:
    return {secret, quote(secret, safe=""), json.dumps(secret)[1:-1]}


def secrets_of(environ: Mapping[str, str]) -> set[str]:
    """Return the secrets of an environment: lines of variables with a secret's name, and passwords in URLs."""
    found = set[str]()
    for name, value in environ.items():
        if re.fullmatch(rf"{_NAMES}|\w*_KEY", name, re.IGNORECASE) and not value.startswith(("/", "~")):
            found |= {line.strip() for line in value.splitlines()}
        with suppress(ValueError):
            password = urlsplit(value).password or ""
            found |= {password, unquote(password)}
    return {secret for secret in found if len(secret) >= _SHORTEST}


class Mask:
    """Masks secrets, and anything in the form of a secret, in the bytes of a log.

    A masked copy has the same length and positions.
    """

    overlap = 8192
    """The most bytes of a secret, and so of its beginning at the end of an unfinished line."""

    def __init__(self, secrets: Iterable[str]) -> None:
        written = {form.encode().decode("latin-1") for secret in secrets for form in _forms(secret)}
        # A file that was cut off may end with the beginning of a secret.
        self._beginnings = sorted({form[:end] for form in written for end in range(_SHORTEST, len(form))}, key=len)[
            ::-1
        ]
        known = "|".join(map(re.escape, sorted(written, key=lambda form: (-len(form), form))))
        self._hints = [*_HINTS, *(form.lower() for form in written)]
        self._patterns = [re.compile(known)] if known else []
        self._patterns += [pattern for pattern, _ in _PATTERNS]

    def __call__(self, lines: bytes) -> bytes:
        """Return lines with each secret masked; each line is searched separately."""
        return b"".join(self._line(line) for line in re.findall(rb"[^\r\n]+[\r\n]*|[\r\n]+", lines))

    def begin(self, text: bytes) -> tuple[bytes, bytes]:
        """Split the text of an unfinished line: a masked part to write, and a part to keep for the text that follows.

        In the second part, only a secret that begins in the first is masked. Another secret may continue in the text
        that follows, and a mask over its beginning would hide the rest from the patterns.
        """
        masked, end = self(text), max(0, len(text) - self.overlap)
        stars = re.compile(rb"\**").match(masked, end)
        after = stars.end() if stars else end
        return masked[:end], masked[end:after] + text[after:]

    def last(self, line: bytes) -> bytes:
        """Return the masked last line of a log, which may end within a secret."""
        masked = self(line)
        for beginning in self._beginnings:
            if masked.endswith(beginning.encode("latin-1")):
                return masked[: len(masked) - len(beginning)] + b"*" * len(beginning)
        return masked

    def _line(self, line: bytes) -> bytes:
        text = line.decode("latin-1")  # a character for each byte
        lower = text.lower()
        if not any(hint in lower for hint in self._hints):
            return line
        for pattern in self._patterns:
            text = pattern.sub(_starred, text)
        return text.encode("latin-1")

    def copy(self, source: Path, target: Path, *, cut: bool) -> bool:
        """Copy a file masked; return True if it is complete. With `cut`, an unfinished last line is not copied."""
        kept = b""
        with source.open("rb") as reading, target.open("wb") as writing:
            while block := reading.read(_BLOCK):
                kept += block
                end = max(kept.rfind(b"\n"), kept.rfind(b"\r")) + 1
                if not end and len(kept) > _BLOCK:  # a line without end
                    masked, kept = self.begin(kept)
                else:
                    masked, kept = self(kept[:end]), kept[end:]
                writing.write(masked)
            if not cut:
                writing.write(self.last(kept))
        return not (cut and kept)


_BLOCK = 2**20


def _starred(match: re.Match[str]) -> str:
    begin = match[1] if match.re.groups else ""
    end = "@" if begin.endswith(":") and match[0].endswith("@") else ""
    return begin + "*" * (len(match[0]) - len(begin) - len(end)) + end


def translating(manager: Callable[P, Iterator[None]]) -> Callable[P, AbstractContextManager[None]]:
    """Return a context manager like `contextmanager`'s, for a generator that raises our errors in place of others'."""
    return lambda *args, **named: _Translating(contextmanager(manager)(*args, **named))


class _Translating(AbstractContextManager[None]):
    """Removes contextlib's frame from the traceback: it holds the other error, which may repeat a secret."""

    def __init__(self, manager: AbstractContextManager[None]) -> None:
        self._manager = manager

    def __enter__(self) -> None:
        self._manager.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        try:
            return self._manager.__exit__(kind, error, trace)
        except BaseException as raised:
            translated = raised.with_traceback(None)
        del error, trace
        raise translated
