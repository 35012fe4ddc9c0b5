"""The Hugging Face Hub: the files of a repository, of a dataset or of a model, listed and fetched."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from litgpt_demo.data.corpus.patterns import matches
from litgpt_demo.data.corpus.source import Source
from litgpt_demo.data.settings import HubCorpus
from litgpt_demo.errors import NetworkError, Unreachable, UserError, words_of
from litgpt_demo.secrets import is_protected, redacted

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_HUB_ADDRESS = re.compile(r"hf://(?P<dataset>datasets/)?(?P<repository>[^/]+/[^/@]+)@(?P<commit>[^/]+)/(?P<path>.+)")
_HUB_TRIES = 3
"""A download goes on where it broke off, so a few tries get a large file through a bad line."""


def hub_endpoint() -> str:
    """Return the Hub's address. It is read at each call: huggingface_hub keeps what HF_ENDPOINT was at its import.

    Raises:
        UserError: a token would be sent there, and the way is not encrypted.
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


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository of the Hub, as the user named it."""

    kind: Literal["dataset", "model"]
    name: str
    revision: str
    setting: str
    """The setting that names it."""
    revised_by: str
    """The setting that names its revision."""

    @property
    def address(self) -> str:
        """Return the address of its page below the Hub's, and with `hf://` of its files."""
        return f"datasets/{self.name}" if self.kind == "dataset" else self.name


def hub_sources(corpus: HubCorpus) -> list[Source]:
    """The repository's files that the corpus takes, pinned to a commit.

    Raises:
        As `hub_files`, and UserError where the corpus takes none of its files.
    """
    repository = Repository(
        kind="dataset", name=corpus.name, revision=corpus.revision,
        setting="data.corpus.name", revised_by="data.corpus.revision",
    )  # fmt: skip
    files = hub_files(repository)
    chosen = [file for file in files if matches(file.name, corpus.files)]
    if not chosen:
        some = ", ".join(sorted(file.name for file in files)[:10]) or "nothing"
        raise UserError(
            f"data.corpus.files={corpus.files!r} matches no file of the dataset {corpus.name}; it has {some}"
        )
    return chosen


def hub_files(repository: Repository) -> list[Source]:
    """Every file of a repository, pinned to a commit.

    Raises:
        UserError: no such repository, revision or files, no right to them, or no way to the Hub.
        NetworkError: the Hub is there and does not serve.
    """
    endpoint = hub_endpoint()
    info = _hub_listing(repository, endpoint)
    address = f"hf://{repository.address}@{info.sha}"
    return [_hub_source(address, file, endpoint) for file in info.siblings or []]


def _hub_listing(repository: Repository, endpoint: str) -> Any:
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        return HfApi(endpoint=endpoint).repo_info(
            repository.name,
            repo_type=repository.kind,
            revision=repository.revision,
            files_metadata=True,
            timeout=60,
        )
    except HfHubHTTPError as error:
        raise _refusal(error, repository, endpoint) from None
    except (httpx.TransportError, OfflineModeIsEnabled) as error:
        instead = {"dataset": "use data.corpus.kind=files", "model": "name their folder"}[repository.kind]
        raise Unreachable(
            f"the Hub at {redacted(endpoint)} cannot be reached for the {repository.kind} {repository.name} "
            f"({words_of(error)}); check the network, HF_HUB_OFFLINE and HF_ENDPOINT, or download the files and "
            f"{instead}"
        ) from None


def _hub_source(repository: str, file: Any, endpoint: str) -> Source:
    if file.size is None or file.blob_id is None:
        raise UserError(
            f"{redacted(endpoint)} lists {file.rfilename} without size and blob id, so it cannot be pinned; "
            "unset HF_ENDPOINT"
        )
    return Source(
        address=f"{repository}/{file.rfilename}",
        name=file.rfilename,
        size=file.size,
        version=f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}",
    )


def fetch_from_hub(source: Source, folder: Path) -> Path:
    """Download a file of the Hub into `folder`; one that broke off there before is taken up where it ended.

    Raises:
        UserError: the repository is gone or closed to us.
        NetworkError: the Hub breaks off each time.
    """
    import httpx
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    place = _HUB_ADDRESS.fullmatch(source.address)
    if place is None:
        raise UserError(f"{source.address!r} is no file of the Hub; it reads hf://datasets/owner/name@commit/path")
    repository = Repository(
        kind="dataset" if place["dataset"] else "model", name=place["repository"], revision=place["commit"],
        setting="data.corpus.name" if place["dataset"] else "model.from",
        revised_by="data.corpus.revision" if place["dataset"] else "model.from=owner/name@revision",
    )  # fmt: skip
    endpoint = hub_endpoint()
    lost = ""
    for _ in range(_HUB_TRIES):
        try:
            return Path(
                hf_hub_download(
                    repository.name, place["path"], repo_type=repository.kind, revision=repository.revision,
                    local_dir=folder, endpoint=endpoint,
                )
            )  # fmt: skip
        except HfHubHTTPError as error:
            raise _refusal(error, repository, endpoint) from None
        except (httpx.TransportError, LocalEntryNotFoundError) as error:
            lost = words_of(error)
    raise NetworkError(f"{source.address} could not be fetched from {redacted(endpoint)} in {_HUB_TRIES} tries: {lost}")


def _refusal(error: HfHubHTTPError, repository: Repository, endpoint: str) -> Exception:
    """Return what the user can do about the Hub's refusal; the most special class comes first.

    It is not chained to what it says: a traceback may show the headers that were sent, and the token is one of them.
    """
    from huggingface_hub import errors

    hub, named = redacted(endpoint), f"{repository.kind} {repository.name}"
    match error:
        case errors.GatedRepoError():
            return UserError(
                f"the {named} is gated: accept its conditions on {hub}/{repository.address} "
                "and set HF_TOKEN to a token of that account"
            )
        case errors.RepositoryNotFoundError():
            return UserError(
                f"{hub} has no {named}, or it is private; check {repository.setting}, "
                "and set HF_TOKEN to a token that may read it"
            )
        case errors.RevisionNotFoundError():
            return UserError(
                f"the {named} has no branch, tag or commit {repository.revision!r}; set {repository.revised_by}"
            )
    return _explained_answer(error.response.status_code, f"{hub}, {named}: {words_of(error)}")


def _explained_answer(status: int, words: str) -> Exception:
    if status == 429 or status >= 500:
        return NetworkError(f"{words}; the Hub has too much to do, try again later")
    return UserError(f"{words}; is HF_TOKEN still valid, and is HF_ENDPOINT a Hugging Face Hub?")
