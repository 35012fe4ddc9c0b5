"""Image references, and what a registry returns for each: its digest, and its config with the labels.

Registries speak one API, the OCI distribution specification (https://github.com/opencontainers/distribution-spec),
which grew from Docker's "registry HTTP API v2": one HEAD request returns the digest behind a tag.
"""

from __future__ import annotations

import base64
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self, TypeVar

from pydantic import AliasPath, BaseModel, BeforeValidator, Field

from launcher.errors import ImageOutOfSight, ImageProblem, ImageUnreachable
from litgpt_demo import timeouts
from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError, one_line
from litgpt_demo.grants import Grant
from litgpt_demo.secrets import is_loopback, is_protected, origin_of, protected_client, redacted

if TYPE_CHECKING:
    import httpx

# Without the list and index types a registry answers a multi-platform image with one platform's manifest, or with 404.
MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::\d{1,5})?")
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REST = re.compile(
    rf"(?P<path>{_COMPONENT}(?:/{_COMPONENT})*)(?::(?P<tag>[A-Za-z0-9_][\w.-]{{0,127}}))?(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?",
    re.ASCII,
)

_HUB = "docker.io"


@dataclass(frozen=True, kw_only=True)
class ImageReference:
    """The name of an image: `[host[:port]/]path[:tag][@sha256:…]`."""

    host: str
    """Registry, `docker.io` where the reference names none."""
    path: str
    """Repository within the registry, as written."""
    repository: str
    """Host and path as written: what stands before tag and digest."""
    tag: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Take a reference apart by the rules that Docker and containerd use; a ValueError if it is none."""
        head, slash, rest = text.partition("/")
        host = head if slash and (head == "localhost" or any(mark in head for mark in ".:[")) else ""
        match = _REST.fullmatch(rest if host else text)
        if match is None or (host and not _HOST.fullmatch(host)):
            fix = "write registry/repository:tag or registry/repository@sha256:<64 hex digits>, in lower case"
            raise ValueError(f"{text!r} is not the name of an image; {fix}")
        path, tag, digest = match.group("path", "tag", "digest")
        return cls(host=host or _HUB, path=path, repository=f"{host}/{path}" if host else path, tag=tag, digest=digest)

    def __str__(self) -> str:
        text = self.repository
        if self.tag:
            text += f":{self.tag}"
        if self.digest:
            text += f"@{self.digest}"
        return text


def is_local(host: str) -> bool:
    """Return True if `host[:port]` is this machine: the one case in which Docker, and so we, speak plain HTTP."""
    return is_loopback(re.sub(r":\d+$", "", host))


_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
"""Answers that a minute later may be others."""
_NO_SUCH_HOST = ("[Errno -2]", "[Errno -5]")
"""The resolver's final words, EAI_NONAME and EAI_NODATA; a resolver that is away says EAI_AGAIN."""
MOST_BYTES = 8 << 20
"""Bytes of the largest manifest or config that is read; registries take manifests of 4 MiB."""


# All that follow raise ImageProblem where the registry has no such image, refuses or answers nonsense, and
# ImageUnreachable where it does not answer. Requests to an unreachable or busy registry are repeated for `patience`
# seconds, by default timeouts.REGISTRY. Each answer may take 5 seconds longer.


def resolve(image: str) -> str:
    """`image` as repository@sha256:…, by what its registry says now; without a tag it means `latest`."""
    wanted = tagged = ImageReference.parse(image)
    if not (wanted.tag or wanted.digest):
        tagged = replace(wanted, tag="latest")
    digest = find_digest(tagged)
    if digest is None:
        raise ImageProblem(f"{wanted}: {wanted.host} has no such image; check its name")
    return f"{wanted.repository}@{digest}"


def find_digest(reference: ImageReference, *, patience: float | None = None) -> str | None:
    """The digest of `reference` in its registry, None where the registry has no such image."""
    return _retry_while_unavailable(reference, _Registry.digest, patience)


def read_config(reference: str, *, architecture: str = "amd64", patience: float | None = None) -> ImageConfig:
    """The config of an image in its registry; of one for several platforms, that for Linux on `architecture`."""
    try:
        return _retry_while_unavailable(
            ImageReference.parse(reference), lambda registry: registry.config(architecture), patience
        )
    except DataError as error:
        raise ImageProblem(str(error)) from error


class _RegistryUnavailable(Exception):
    """The registry, or its token service, cannot answer now; the message says what it does."""


T = TypeVar("T")


def _retry_while_unavailable(reference: ImageReference, ask: Callable[[_Registry], T], patience: float | None) -> T:
    import httpx

    patience = timeouts.REGISTRY if patience is None else patience
    ends, pauses = time.monotonic() + patience, iter(_PAUSES)
    while True:
        # Nothing is chained: a traceback may show the headers that were sent.
        try:
            with protected_client(timeout=patience + 5.0) as client:
                return ask(_Registry(reference, client))
        except _RegistryUnavailable as error:
            problem, is_final = str(error), False
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = f"cannot be reached ({one_line(error)}); check its name, the network and HTTPS_PROXY"
            at_once = (httpx.UnsupportedProtocol, httpx.ProxyError)  # a proxy's no, not its silence
            is_final = not isinstance(error, httpx.TransportError) or isinstance(error, at_once)
            is_final = is_final or any(number in str(error) for number in _NO_SUCH_HOST)
        wait = next(pauses, math.inf)
        if is_final or time.monotonic() + wait > ends:
            kind = ImageOutOfSight if is_final else ImageUnreachable
            raise kind(f"{reference}: the registry {reference.host} {problem}, then try again")
        time.sleep(wait)


# The form of a name that goes into messages: any user may have written it.
_Word = Annotated[str, Field(pattern=r"^[\w.-]{0,60}$")]


class _Descriptor(BaseModel):
    """The place of a manifest or blob, by its hash (image-spec, descriptor.md), and what an image there is for."""

    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    os: _Word = Field("", validation_alias=AliasPath("platform", "os"))
    architecture: _Word = Field("", validation_alias=AliasPath("platform", "architecture"))


class _Manifest(BaseModel):
    """An image's manifest, or the index of those of several platforms (image-spec, manifest.md and image-index.md)."""

    config: _Descriptor | None = None
    manifests: tuple[_Descriptor, ...] | None = None  # programs in Go write null for a list that is empty


class ImageConfig(BaseModel):
    """An image's config, as far as we read it (image-spec, config.md)."""

    architecture: _Word = ""
    labels: Annotated[dict[str, str], BeforeValidator(lambda labels: labels or {})] = Field(
        {}, validation_alias=AliasPath("config", "Labels")
    )


class _Registry:
    """The registry of an image, and our login there. Its variables are shown by no traceback: it has no repr."""

    def __init__(self, reference: ImageReference, client: httpx.Client) -> None:
        self._reference, self._client = reference, client
        self._at = f"{reference}: {reference.host}"
        self._headers = {"Accept": ", ".join(MANIFEST_TYPES)}

    def digest(self) -> str | None:
        """Ask by HEAD, because Docker Hub counts only GETs against its limit."""
        reference = self._reference
        name = reference.digest or str(reference.tag)
        with self._answer("HEAD", "manifests", name) as answer:
            if answer.status_code == 404:
                return None
            digest: str = answer.headers.get("docker-content-digest", "")
        if not _DIGEST.fullmatch(digest):
            # The header is optional in the specification; the digest is defined as the hash of the manifest's bytes.
            digest = f"sha256:{sha256(self._download('manifests', name)).hexdigest()}"
        if reference.digest not in {None, digest}:
            raise ImageProblem(f"{self._at} answered with another image, {digest}; do not use this registry")
        return digest

    def config(self, architecture: str) -> ImageConfig:
        digest = self._reference.digest or self.digest() or str(self._reference.tag)
        manifest = self._document("manifests", digest, _Manifest)
        if manifest.manifests:
            # BuildKit lists its attestations next to the images, as for the platform unknown/unknown
            # (https://docs.docker.com/build/metadata/attestations/attestation-storage/).
            images = [image for image in manifest.manifests if image.architecture != "unknown"]
            fitting = [image for image in images if (image.os, image.architecture) == ("linux", architecture)]
            fitting += [image for image in images if not image.architecture]  # a single image may have no platform
            if not fitting:
                names = ", ".join(sorted({f"{image.os}/{image.architecture}" for image in images})) or "no platform"
                raise ImageProblem(f"{self._reference} is not for linux/{architecture}, but for {names}; name another")
            manifest = self._document("manifests", fitting[0].digest, _Manifest)
        if manifest.config is None:
            raise ImageProblem(f"{self._reference}: its manifest names no config; name the manifest of an image")
        return self._document("blobs", manifest.config.digest, ImageConfig)

    def _document(self, where: str, digest: str, kind: type[T]) -> T:
        named, content = f"{self._reference.repository}@{digest}", self._download(where, digest)
        received = f"sha256:{sha256(content).hexdigest()}"
        if digest != received:
            raise ImageProblem(f"{named}: {self._reference.host} answered with {received}; do not use this registry")
        return parse_json(content, kind, where=f"{named}: {self._url(where, digest)}", fix="push the image again")

    def _download(self, where: str, name: str) -> bytes:
        with self._answer("GET", where, name) as answer:
            if answer.status_code == 404:
                raise ImageProblem(f"{self._at} has no such image; check repository and tag")
            content = b""
            for chunk in answer.iter_bytes():
                content += chunk
                if len(content) > MOST_BYTES:
                    what = f"{MOST_BYTES:,} bytes for {self._url(where, name)}, which no manifest and no config has"
                    raise ImageProblem(f"{self._at} sent more than {what}; do not use this registry")
            return content

    def _url(self, where: str, name: str) -> str:
        host, path = self._reference.host, self._reference.path
        if host == _HUB:  # which has another name for its API
            host, path = "registry-1.docker.io", path if "/" in path else f"library/{path}"
        return f"{'http' if is_local(host) else 'https'}://{host}/v2/{path}/{where}/{name}"

    @contextmanager
    def _answer(self, method: str, where: str, name: str) -> Iterator[httpx.Response]:
        """Send a request, and again with a login if the registry itself wants one. A blob's storage, which the client
        is redirected to, gets no credentials."""
        while True:
            url = self._url(where, name)
            with self._client.stream(method, url, headers=self._headers, follow_redirects=True) as answer:
                first, status = (*answer.history, answer)[0], answer.status_code
                refused = status == 401 and "Authorization" not in self._headers
                own = origin_of(answer.url) == origin_of(first.url)
                if refused and own and self._log_in(answer.headers.get("www-authenticate", "")):
                    continue
                if status in {401, 403}:
                    raise self._refused(f"answered {status}")
                if status in _TRANSIENT:
                    raise _RegistryUnavailable(f"does not answer: {status}; wait")
                if not answer.is_success and status != 404:
                    fix = "which is not an answer of a registry; check its name, and any proxy on the way"
                    raise ImageProblem(f"{self._at} answered {status}, {fix}")
                yield answer
                return

    def _log_in(self, challenge: str) -> bool:
        scheme, _, rest = challenge.partition(" ")
        parameters, login = dict(re.findall(r'(\w+)="([^"]*)"', rest)), stored_login(self._reference.host)
        if scheme.lower() == "basic" and login:
            self._headers["Authorization"] = _basic(login)
            return True
        if scheme.lower() != "bearer" or "realm" not in parameters:
            return False
        realm = parameters["realm"]
        if not is_protected(realm):
            unsafe = f"the password sent to {origin_of(realm)}, which is not encrypted; use another registry"
            raise ImageProblem(f"{self._at} wants {unsafe}")
        # No redirect is followed: it would take the password, or the token that stands for it, to another address.
        answer = self._client.send(_token_request(self._client, parameters, login))
        if answer.status_code in _TRANSIENT:
            raise _RegistryUnavailable(f"has a token service that does not answer: {answer.status_code}; wait")
        if not answer.is_success:
            raise self._refused(f"gave no token (its token service answered {answer.status_code})")
        grant = Grant.read(answer.content)
        if grant is None:
            raise ImageProblem(f"{self._at} has a token service that answered without a token; try again later")
        self._headers["Authorization"] = f"Bearer {grant.token.get_secret_value()}"
        return True

    def _refused(self, why: str) -> ImageProblem:
        fix = f"check the name, then log in with `{login_command(self._reference.host)}`"
        return ImageOutOfSight(f"{self._at} {why}; it has no such image, or this account may not read it: {fix}")


# A function, for the variables of one that raises an error are shown by its traceback.
def _token_request(client: httpx.Client, parameters: Mapping[str, str], login: Login | None) -> httpx.Request:
    scope = {key: value for key, value in parameters.items() if key in {"service", "scope"}}
    if login and login.username == "<token>":
        form = {**scope, "grant_type": "refresh_token", "client_id": "train-litgpt", "refresh_token": login.secret}
        return client.build_request("POST", parameters["realm"], data=form)
    account = {"Authorization": _basic(login)} if login else {}
    return client.build_request("GET", parameters["realm"], params=scope, headers=account)


def login_command(host: str, engine: str = "docker") -> str:
    """Return the command that lets an engine, and us, use the registry `host`."""
    if host.endswith((".pkg.dev", "gcr.io")):
        return f"gcloud auth configure-docker {host}"
    return f"{engine} login" if host == _HUB else f"{engine} login {host}"


@dataclass(frozen=True, kw_only=True)
class Login:
    """The credentials that `docker login` or a credential helper has for a registry."""

    username: str
    """`<token>` where the secret is an identity token, to be changed for an access token."""
    secret: str = field(repr=False)


def _basic(login: Login) -> str:
    return "Basic " + base64.b64encode(f"{login.username}:{login.secret}".encode()).decode()


def stored_login(host: str) -> Login | None:
    """Return the login that Podman's configuration holds for a registry, or else Docker's.
    https://github.com/containers/image/blob/main/docs/containers-auth.json.5.md"""
    from docker.auth import load_config  # here, for it takes a while, and most images are public

    podman = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/containers/{os.getuid()}") / "containers" / "auth.json"
    for file in (os.environ.get("REGISTRY_AUTH_FILE") or str(podman), None):  # None is Docker's own
        try:
            found = load_config(file).resolve_authconfig(host) or {}
        except Exception as error:  # of files and programs of others
            why = redacted(one_line(error))[-300:]
            break
        login = {key.lower(): value for key, value in found.items()}
        if "identitytoken" in login:
            return Login(username="<token>", secret=login["identitytoken"])
        if "password" in login:
            return Login(username=login["username"], secret=login["password"])
    else:
        return None
    # Not chained, for a traceback would show the secret.
    raise ImageOutOfSight(f"the stored login for {host} cannot be used ({why}); run `{login_command(host)}`")
