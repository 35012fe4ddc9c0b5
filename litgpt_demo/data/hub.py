"""The Hugging Face Hub: its address, its errors, and the files of its dataset repositories."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from logging import LogRecord, getLogger
from pathlib import Path
from typing import TYPE_CHECKING

from litgpt_demo import timeouts
from litgpt_demo.data.readers import Source
from litgpt_demo.errors import NetworkError, Unreachable, UserError, one_line
from litgpt_demo.secrets import is_protected, redacted, translating

if TYPE_CHECKING:
    from huggingface_hub.hf_api import DatasetInfo

_ADDRESS = re.compile(r"hf://datasets/([^/]+/[^/@]+)@([^/]+)/(.+)")
_TRIES = 3  # a download continues where it broke off, so a few tries get a large file through a bad line


def hub_endpoint() -> str:
    """Return the Hub's address, read at each call: huggingface_hub keeps the HF_ENDPOINT of its import."""
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not is_protected(endpoint):
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        if "authorization" in build_hf_headers():
            raise UserError(
                f"HF_ENDPOINT={redacted(endpoint)} is not encrypted, and your Hugging Face token would be sent there; "
                "write https://, or set HF_HUB_DISABLE_IMPLICIT_TOKEN=1 for a mirror that needs no token"
            )
    return endpoint


def can_reach_hub() -> bool:
    """Return whether the Hub answers at all; False too where the environment forbids requests to it."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(hub_endpoint(), timeout=timeouts.INTERACTIVE)
    except httpx.TransportError:
        return False
    return True


@translating
def translate_hub_errors(repository: str, revision: str) -> Iterator[None]:
    # Nothing is chained: a traceback may show the headers that were sent, and the token is one of them.
    from httpx import TransportError
    from huggingface_hub import errors

    hub = redacted(hub_endpoint())
    warnings, retries = list[LogRecord](), getLogger("huggingface_hub.utils._http")
    retries.addFilter(warnings.append)  # type: ignore[arg-type]  # a filter that returns nothing lets nothing pass
    try:
        yield
    # RuntimeError: after a refused connection huggingface_hub 1.3.7 tries again with the client that it just closed.
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, TransportError, RuntimeError) as error:
        # The first try's reason: the last one's may be the closed client.
        reason = one_line(warnings[0].getMessage() if warnings else error)
        raise Unreachable(
            f"the Hub at {hub} cannot be reached for {repository} ({reason})",
            fix="check the network, HF_HUB_OFFLINE and HF_ENDPOINT, or download the files yourself and give their path",
        ) from None
    except errors.HfHubHTTPError as error:
        status, refusal = error.response.status_code, f"{hub} refused {repository} at {revision}: {one_line(error)}"
        if status == 429 or status >= 500:
            raise NetworkError(refusal, fix="try again later, when the Hub has less load") from None
        advice = {  # the most special class comes first
            errors.GatedRepoError: "it is gated: accept its conditions on its page, and run `hf auth login`",
            errors.RepositoryNotFoundError: "it does not exist, or is private: check the name, and set HF_TOKEN",
            errors.RevisionNotFoundError: "it has no such branch, tag or commit: check its page",
            errors.EntryNotFoundError: "it has no such file: check its page",
            Exception: "check that HF_TOKEN is still valid, and that HF_ENDPOINT is a Hugging Face Hub",
        }
        raise UserError(refusal, fix=next(fix for kind, fix in advice.items() if isinstance(error, kind))) from None
    finally:
        retries.removeFilter(warnings.append)  # type: ignore[arg-type]


def list_repository(name: str, revision: str) -> DatasetInfo:
    from huggingface_hub import HfApi

    with translate_hub_errors(name, revision):
        api = HfApi(endpoint=hub_endpoint())
        return api.dataset_info(name, revision=revision, files_metadata=True, timeout=60)


def address_of(repository: str, commit: str | None, name: str) -> str:
    return f"hf://datasets/{repository}@{commit}/{name}"


def download_from_hub(source: Source, folder: Path) -> Path:
    """Download a file into the folder. A download that broke off there before is continued."""
    from huggingface_hub import hf_hub_download

    address = _ADDRESS.fullmatch(source.address)
    assert address is not None, source.address
    repository, commit, name = address.groups()
    for _ in range(_TRIES):
        try:
            with translate_hub_errors(repository, commit):
                return Path(
                    hf_hub_download(
                        repository, name, repo_type="dataset", revision=commit, local_dir=folder,
                        endpoint=hub_endpoint(),
                    )
                )  # fmt: skip
        except Unreachable as error:
            last_error = error
    raise NetworkError(f"{source.address} could not be fetched in {_TRIES} tries: {last_error}")
