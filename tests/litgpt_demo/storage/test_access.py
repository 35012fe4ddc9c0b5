"""The environment of processes that read what others wrote: the way to the storage, and no key to anything else."""

from __future__ import annotations

import json
from pathlib import Path

from litgpt_demo.storage.access import environment_of_readers

KEYS = (
    "KUBECONFIG", "RUNAI_CLIENT_SECRET", "PREFECT_API_KEY", "PREFECT_SERVER_API_AUTH_STRING", "HF_TOKEN",
    "WANDB_API_KEY", "DOCKER_AUTH_CONFIG", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "SSH_AUTH_SOCK",
    "CLOUDSDK_AUTH_ACCESS_TOKEN", "GOOGLE_API_KEY", "MY_OWN_SECRET",
)  # fmt: skip
WAY = (
    "GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "GCE_METADATA_HOST", "STORAGE_EMULATOR_HOST", "HOME",
    "https_proxy", "NO_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PATH", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH",
)  # fmt: skip


def test_a_key_to_anything_but_the_storage_stays_behind() -> None:
    assert environment_of_readers(dict.fromkeys(KEYS + WAY, "value")) == dict.fromkeys(WAY, "value")


def test_keys_of_aws_go_along_where_the_storages_account_is_had_for_them(tmp_path: Path) -> None:
    account = tmp_path / "account.json"
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "eu-west-1"}
    named = {"GOOGLE_APPLICATION_CREDENTIALS": str(account)}
    for source, expected in (({"environment_id": "aws1"}, keys | named), ({"file": "/var/token"}, named)):
        account.write_text(json.dumps({"type": "external_account", "credential_source": source}))
        assert environment_of_readers(keys | named) == expected
