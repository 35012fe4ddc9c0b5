"""The environment of processes that read what others wrote: the way to the storage, and no key to anything else."""

from __future__ import annotations

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
        "GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "GCE_METADATA_HOST", "STORAGE_EMULATOR_HOST", "HOME",
        "https_proxy", "NO_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PATH", "LANG", "LC_ALL", "TMPDIR",
        "PYTHONPATH", "OMP_NUM_THREADS", "LD_LIBRARY_PATH",
    ],
)  # fmt: skip
def test_what_the_way_to_the_storage_takes_goes_along(name: str) -> None:
    assert environment_of_readers({name: "value"}) == {name: "value"}
