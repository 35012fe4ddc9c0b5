"""The Hugging Face Hub: the files of a dataset repository, listed and fetched."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from litgpt_demo.config import HubCorpus
from litgpt_demo.data.corpus.files import Source, matches
from litgpt_demo.errors import NetworkError, Unreachable, UserError, words_of
from litgpt_demo.secrets import is_protected, redacted

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_HUB_ADDRESS = re.compile(r"hf://datasets/(?P<repository>[^/]+/[^/@]+)@(?P<commit>[^/]+)/(?P<path>.+)")
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


def hub_sources(corpus: HubCorpus) -> list[Source]:
    """The repository's files that the corpus takes, pinned to a commit."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    endpoint = hub_endpoint()
    try:
        info = HfApi(endpoint=endpoint).dataset_info(
            corpus.name, revision=corpus.revision, files_metadata=True, timeout=60
        )
    except HfHubHTTPError as error:
        raise _refusal(error, corpus.name, corpus.revision, endpoint) from None
    except (httpx.TransportError, OfflineModeIsEnabled) as error:
        raise Unreachable(
            f"the Hub at {redacted(endpoint)} cannot be reached for the dataset {corpus.name} ({words_of(error)}); "
            "check the network, HF_HUB_OFFLINE and HF_ENDPOINT, or download the files and use data.corpus.kind=files"
        ) from None
    files = info.siblings or []
    found = list[Source]()
    for file in files:
        if not matches(file.rfilename, corpus.files):
            continue
        if file.rfilename.startswith("/") or ".." in file.rfilename.split("/"):
            what = f"{redacted(endpoint)} lists {file.rfilename!r}, which leads out of the folder of downloads"
            raise UserError(f"{what}; see whose server that is, and unset HF_ENDPOINT")
        if file.size is None or file.blob_id is None:
            raise UserError(
                f"{redacted(endpoint)} lists {file.rfilename} without size and blob id, so it cannot be pinned; "
                "unset HF_ENDPOINT"
            )
        found.append(
            Source(
                address=f"hf://datasets/{corpus.name}@{info.sha}/{file.rfilename}",
                name=file.rfilename,
                size=file.size,
                version=f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}",
            )
        )
    if not found:
        some = ", ".join(sorted(file.rfilename for file in files)[:10]) or "nothing"
        raise UserError(
            f"data.corpus.files={corpus.files!r} matches no file of the dataset {corpus.name}; it has {some}"
        )
    return found


def fetch_from_hub(source: Source, folder: Path) -> Path:
    """Download a file of the Hub into `folder`; one that broke off there before is taken up where it ended."""
    import httpx
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    place = _HUB_ADDRESS.fullmatch(source.address)
    assert place is not None, source.address
    endpoint, lost = hub_endpoint(), ""
    for _ in range(_HUB_TRIES):
        try:
            return Path(
                hf_hub_download(
                    place["repository"], place["path"], repo_type="dataset", revision=place["commit"],
                    local_dir=folder, endpoint=endpoint,
                )
            )  # fmt: skip
        except HfHubHTTPError as error:
            raise _refusal(error, place["repository"], place["commit"], endpoint) from None
        except (httpx.TransportError, LocalEntryNotFoundError) as error:
            lost = words_of(error)
    raise NetworkError(f"{source.address} could not be fetched from {redacted(endpoint)} in {_HUB_TRIES} tries: {lost}")


def _refusal(error: HfHubHTTPError, repository: str, revision: str, endpoint: str) -> Exception:
    """Return what the user can do about the Hub's refusal; the most special class comes first.

    It is not chained to what it says: a traceback may show the headers that were sent, and the token is one of them.
    """
    from huggingface_hub import errors

    hub = redacted(endpoint)
    match error:
        case errors.GatedRepoError():
            return UserError(
                f"the dataset {repository} is gated: accept its conditions on {hub}/datasets/{repository} "
                "and set HF_TOKEN to a token of that account"
            )
        case errors.RepositoryNotFoundError():
            return UserError(
                f"{hub} has no dataset {repository}, or it is private; check data.corpus.name, "
                "and set HF_TOKEN to a token that may read it"
            )
        case errors.RevisionNotFoundError():
            return UserError(
                f"the dataset {repository} has no branch, tag or commit {revision!r}; set data.corpus.revision"
            )
    status, words = error.response.status_code, f"{hub}, dataset {repository}: {words_of(error)}"
    if status == 429 or status >= 500:
        return NetworkError(f"{words}; the Hub has too much to do, try again later")
    return UserError(f"{words}; is HF_TOKEN still valid, and is HF_ENDPOINT a Hugging Face Hub?")
