"""The addresses that a secret may be sent to, the client that holds to them, and texts that may repeat a secret."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, _GeneratorContextManager
from ipaddress import ip_address
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec
from urllib.parse import quote, urlsplit

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, SecretStr, ValidationError

if TYPE_CHECKING:
    import httpx

P = ParamSpec("P")

HIDDEN = "[secure]"

# Headers, members of JSON, user information and signatures of URLs, in whatever an answer may repeat of a request.
_NAMES = r"[\w.-]*(?:secret|token|password|passwd|signature|credential|assertion|api[_-]?key)[\w.-]*"
_PATTERNS = (
    # Words have no capital or digit within: "Bearer tokens" is told, "Bearer s3cret" is not.
    (re.compile(r"\b((?i:Bearer|Basic)\s+)(?=\S*[A-Z0-9])[\w.~+/%-]{6,}=*"), rf"\1{HIDDEN}"),
    (re.compile(rf"""(\\?["']{_NAMES}\\?["']\s*:\s*\\?["'])[^"'\\]+""", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(rf"([?&;\"']{_NAMES}=)[^\s&;\"']+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]*"), HIDDEN),  # a JSON web token
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/?#:@]*:)[^\s/]+@", re.IGNORECASE), rf"\1{HIDDEN}@"),
)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, whatever a name server says: `localhost` or an address, not 127.evil.example."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_protected(url: str) -> bool:
    """Return True if nobody on the way can read what is sent to a URL: by https, or within this machine."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme == "https" or is_loopback(parts.hostname or "")


def protected_client(**settings: Any) -> httpx.Client:
    """Return an HTTP client that refuses to send anything to an address that is not protected.

    It follows a redirect only if a request asks for that, and then without `Authorization` to another origin.
    """
    import httpx

    def refuse(request: httpx.Request) -> None:
        if not is_protected(str(request.url)):
            raise httpx.UnsupportedProtocol(f"{origin_of(request.url)} is not encrypted; https:// is needed")

    logging.getLogger("httpx").setLevel(logging.WARNING)  # else it logs every URL, and a signed one is a secret
    # Plain HTTP is for this machine, which no proxy leads to. None stands for the client's own way, without one.
    mounts = {"http://": None}
    return httpx.Client(event_hooks={"request": [refuse]}, mounts=mounts, follow_redirects=False, **settings)


def origin_of(url: httpx.URL | str) -> str:
    """Return scheme, host and port of a URL, which hold no secret; a relative one has none."""
    parts = urlsplit(str(url))
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else ""


def redacted(text: str, *secrets: str) -> str:
    """A text of another without these secrets, and without what has the form of one.

    An answer may repeat the request that it answers: a proxy's error page does, and many a validation message.
    """
    text = without(text, *secrets)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def without(text: str, *secrets: str) -> str:
    """A text without these secrets, in any of the ways that requests write them, and otherwise as it is."""
    for secret in filter(None, secrets):
        for written in {secret, quote(secret, safe=""), json.dumps(secret)[1:-1]}:
            text = text.replace(written, HIDDEN)
    return text


def translating(manager: Callable[P, Iterator[None]]) -> Callable[P, AbstractContextManager[None]]:
    """`contextmanager` for one that raises errors of ours in place of others'.

    contextlib's own frame, which a traceback would show, holds the other error, and that may repeat a secret.
    """
    return lambda *args, **named: _Translating(manager, args, named)  # type: ignore[arg-type]  # it is a generator


class _Translating(_GeneratorContextManager[None]):
    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        try:
            return super().__exit__(kind, error, trace)
        except BaseException as raised:
            ours = raised.with_traceback(None)
        del error, trace
        raise ours


class Grant(BaseModel):
    """The answer of a token service."""

    model_config = ConfigDict(hide_input_in_errors=True)

    token: SecretStr = Field(validation_alias=AliasChoices("token", "access_token", "accessToken"))
    expires: float | None = Field(None, validation_alias=AliasChoices("expires_in", "expiresIn"))
    """Seconds that the token holds."""

    @classmethod
    def read(cls, content: bytes) -> Grant | None:
        """Return the grant that an answer holds, None where it holds none that a header can carry."""
        try:
            grant = cls.model_validate_json(content)
        except ValidationError:
            return None
        return grant if re.fullmatch(r"[\x21-\x7e]+", grant.token.get_secret_value()) else None
