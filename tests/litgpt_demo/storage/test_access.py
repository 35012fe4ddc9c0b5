"""The environment of processes that read what others wrote: the way to the storage, and no key to anything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from litgpt_demo.storage.access import environment_of_readers


@pytest.mark.parametrize(
    "name",
    [
        "KUBECONFIG", "RUNAI_CLIENT_ID", "RUNAI_CLIENT_SECRET", "RUNAI_TOKEN", "PREFECT_API_KEY", "PREFECT_API_URL",
        "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN",
        "WANDB_API_KEY", "DOCKER_CONFIG", "DOCKER_AUTH_CONFIG", "REGISTRY_PASSWORD", "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GITHUB_TOKEN", "SSH_AUTH_SOCK", "CLOUDSDK_AUTH_ACCESS_TOKEN",
        "GOOGLE_API_KEY", "MY_OWN_SECRET",
    ],
)  # fmt: skip
def test_a_key_to_anything_but_the_storage_stays_behind(name: str) -> None:
    assert environment_of_readers({"PATH": "/bin", name: "secret"}) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    "name",
    [
        "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES", "GCLOUD_PROJECT",
        "CLOUDSDK_CONFIG", "GCE_METADATA_HOST", "STORAGE_EMULATOR_HOST", "HOME",
        "https_proxy", "NO_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PATH", "LANG", "LC_ALL", "TMPDIR",
        "PYTHONPATH", "OMP_NUM_THREADS", "LD_LIBRARY_PATH",
    ],
)  # fmt: skip
def test_what_the_way_to_the_storage_takes_goes_along(name: str) -> None:
    assert environment_of_readers({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(
    ("source", "along"),
    [
        ({"environment_id": "aws1", "regional_cred_verification_url": "https://sts.{region}.amazonaws.com"}, True),
        ({"file": "/var/run/token"}, False),
    ],
)
def test_keys_of_aws_go_along_where_the_storages_account_is_had_for_them(
    source: dict[str, str], along: bool, tmp_path: Path
) -> None:
    account = tmp_path / "account.json"
    account.write_text(json.dumps({"type": "external_account", "credential_source": source}))
    keys = {
        "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "token",
        "AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "eu-west-1",
    }  # fmt: skip
    named = {"GOOGLE_APPLICATION_CREDENTIALS": str(account)}
    assert environment_of_readers(keys | named) == (keys | named if along else named)
