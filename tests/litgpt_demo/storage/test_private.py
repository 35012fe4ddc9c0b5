"""What lies in the temporary folder, and a run's own folder, is its user's alone; so are keys."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from litgpt_demo.errors import UserError
from litgpt_demo.storage import open_storage, private
from litgpt_demo.storage.private import make_private, make_temporary, own_temporary, write_private
from litgpt_demo.training.loop import scratch_of


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's part of the temporary folder, which is yet to be made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return own_temporary()


def mode_of(folder: Path) -> int:
    return folder.stat().st_mode & 0o7777


def test_a_folder_that_others_may_have_written_to_is_refused(own: Path) -> None:
    own.touch()
    with pytest.raises(UserError, match="is not a folder"):
        make_temporary("sources")
    own.unlink()
    (own / "sources").mkdir(parents=True)
    (own / "sources" / "part").write_text("fetched")
    own.chmod(0o777)
    with pytest.raises(UserError, match="has mode 777, which lets others write"):
        make_temporary("sources")
    own.chmod(0o755)  # one that others could only read is closed, and its content kept
    assert (make_temporary("sources") / "part").read_text() == "fetched"
    assert mode_of(own) == 0o700


def test_a_folder_of_another_user_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UserError, match=f"belongs to the user {os.getuid()}, so that another user"):
        make_temporary("sources")


def test_ranks_share_a_folder_but_runs_of_two_buckets_do_not(own: Path) -> None:
    run, same_name = (open_storage(f"gs://{bucket}/runs/owt-1a2b") for bucket in ("bucket", "other"))
    assert scratch_of(run, 0).parent == scratch_of(run, 1).parent
    assert scratch_of(same_name, 0) != scratch_of(run, 0)


@pytest.mark.parametrize(("above", "made"), [(0o755, 0o700), (0o2775, 0o2755), (0o1777, 0o700)])
def test_folder_of_a_run_is_private_unless_in_a_shared_one(tmp_path: Path, above: int, made: int) -> None:
    tmp_path.chmod(above)
    before = os.umask(0o022)
    try:
        make_private(tmp_path / "owt-1a2b")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "owt-1a2b") == made


def test_a_private_file_is_replaced_in_one_piece_or_stays(tmp_path: Path) -> None:
    write_private(tmp_path / "environment", "export SECRET=1")
    with pytest.raises(UnicodeEncodeError):
        write_private(tmp_path / "environment", "export SECRET=\udcff")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("environment", "export SECRET=1")]
    assert mode_of(tmp_path / "environment") == 0o600


# --- processes that read what others wrote: they get the way to the storage, and no key to anything else ----------

KEYS = (
    "KUBECONFIG", "RUNAI_CLIENT_SECRET", "PREFECT_API_KEY", "PREFECT_SERVER_API_AUTH_STRING", "HF_TOKEN",
    "WANDB_API_KEY", "DOCKER_AUTH_CONFIG", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "SSH_AUTH_SOCK",
    "CLOUDSDK_AUTH_ACCESS_TOKEN", "GOOGLE_API_KEY", "MY_OWN_SECRET",
)  # fmt: skip
WAY = (
    "GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "GCE_METADATA_HOST", "STORAGE_EMULATOR_HOST", "HOME",
    "https_proxy", "NO_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PATH", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH",
)  # fmt: skip


def test_environment_of_readers_has_only_storage_credentials() -> None:
    assert private.environment_of_readers(dict.fromkeys(KEYS + WAY, "value")) == dict.fromkeys(WAY, "value")


def test_aws_keys_stay_when_google_credentials_need_them(tmp_path: Path) -> None:
    account = tmp_path / "account.json"
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "eu-west-1"}
    named = {"GOOGLE_APPLICATION_CREDENTIALS": str(account)}
    for source, expected in (({"environment_id": "aws1"}, keys | named), ({"file": "/var/token"}, named)):
        account.write_text(json.dumps({"type": "external_account", "credential_source": source}))
        assert private.environment_of_readers(keys | named) == expected
