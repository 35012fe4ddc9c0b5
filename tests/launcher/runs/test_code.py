"""A user's own code as an archive under the root: what ships, what never does, and which run it is."""

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.config import ScriptConfig, validated
from launcher.errors import ConfigProblem
from launcher.runs import code
from launcher.runs.attempts import job_handle, script_of_flow_run
from launcher.runs.code import CodeArchive, pack_code
from launcher.runs.listing import find_started_with
from launcher.runs.run import plan_script
from litgpt_demo.errors import DataError
from litgpt_demo.storage import open_storage

Mounted = Callable[..., ScriptConfig]


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    """A folder of code: a script that imports a second file."""
    folder = tmp_path / "mine"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text("from lib import second\nprint(second.WORD)\n")
    (folder / "lib" / "second.py").write_text("WORD = 'two'\n")
    return folder


@pytest.fixture
def mounted(user_folder: Path, tmp_path: Path) -> Mounted:
    def make(**changes: Any) -> ScriptConfig:
        document = {
            "script": "train.py",
            "code": {"folder": str(user_folder)},
            "root": str(tmp_path / "out"),
            **changes,
        }
        return validated(ScriptConfig, document, where="test")

    return make


def packed(folder: Path, root: str | Path = "gs://bucket/prefix") -> CodeArchive:
    return pack_code(str(folder), root=str(root))


def names(folder: Path, root: str | Path = "gs://bucket/prefix") -> list[str]:
    """The files that ship."""
    with tarfile.open(fileobj=io.BytesIO(packed(folder, root).content)) as tar:
        assert all(member.isreg() for member in tar)
        return tar.getnames()


def ignoring(folder: Path, rules: str) -> Path:
    (folder / ".dockerignore").write_text(rules)
    return folder


def test_archive_of_the_same_files_has_the_same_bytes(user_folder: Path, tmp_path: Path) -> None:
    """Wherever they are stored, and whenever."""
    second_folder = shutil.copytree(user_folder, tmp_path / "checkout")
    os.utime(second_folder / "train.py", (1, 1))
    assert packed(user_folder) == packed(second_folder)
    assert names(user_folder) == ["lib/second.py", "train.py"]


def test_code_excludes_ignored_files_or_files_of_runs(user_folder: Path) -> None:
    root = user_folder / "out[1]"
    before = packed(user_folder, root)
    root.mkdir()
    (root / "metrics.jsonl").write_text("{}")
    assert packed(user_folder, root) == before
    (user_folder / "train.bin").write_text("large")
    assert names(ignoring(user_folder, "*.bin\n"), root) == ["lib/second.py", "train.py"]
    with pytest.raises(ConfigProblem, match=r"and code\.folder are one folder"):
        packed(user_folder, user_folder)


@pytest.mark.parametrize(
    "secret",
    [
        ".env", "lib/.env.production", ".git/config", ".ssh/id_ed25519", "key.pem", "lib/tls.key", ".netrc",
        ".aws/credentials", "application_default_credentials.json", "service-account-owt.json", "id_rsa",
        ".envrc", ".ENV", "lib/.npmrc", "pip.conf", ".gnupg/secring.gpg", "kubeconfig", "Prod.PEM", ".pgpass", ".boto",
        ".s3cfg", ".condarc", "store.jks", ".streamlit/secrets.toml", ".config/gcloud/credentials.db",
    ],
)  # fmt: skip
def test_secrets_never_ship_despite_the_ignore_file(user_folder: Path, secret: str) -> None:
    (user_folder / secret).parent.mkdir(exist_ok=True, parents=True)
    (user_folder / secret).write_text("hunter2")
    for rules in ("", "*\n!lib\n!train.py\n", "!**\n"):
        assert names(ignoring(user_folder, rules)) == ["lib/second.py", "train.py"]


@pytest.mark.parametrize(
    "key",
    [
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n", "a comment\r\n-----BEGIN OPENSSH PRIVATE KEY-----\r\nb3Bl\r\n",
        '{"type": "service_account", "private_key": "x"}', '{\n  "refresh_token": "x",\n  "type": "authorized_user"\n}',
    ],
)  # fmt: skip
def test_private_key_is_refused_by_the_name_of_any_file(user_folder: Path, key: str) -> None:
    (user_folder / "my-proj-1234567890ab.json").write_bytes(key.encode())
    with pytest.raises(ConfigProblem, match=r"my-proj-1234567890ab\.json holds a private key.* list it in \.dockerig"):
        packed(user_folder)
    (user_folder / "keys.py").write_text("if text.startswith('-----BEGIN PRIVATE KEY-----'): print('a key')")
    assert "keys.py" in names(ignoring(user_folder, "my-proj-*")), "code that only speaks of keys ships"


@pytest.mark.parametrize("secret", [".env", "lib/tls.key", ".git/config"])
def test_a_link_to_a_secret_ships_it_under_no_other_name(user_folder: Path, secret: str) -> None:
    (user_folder / secret).parent.mkdir(exist_ok=True)
    (user_folder / secret).write_text("hunter2")
    (user_folder / "settings.txt").symlink_to(secret)
    with pytest.raises(ConfigProblem, match=r"settings\.txt is a link to .*replace the link by the file"):
        packed(user_folder)
    assert b"hunter2" not in packed(ignoring(user_folder, "settings.txt")).content


def test_only_a_link_to_a_file_that_ships_itself_ships(user_folder: Path) -> None:
    (user_folder / "again.py").symlink_to("train.py")
    assert names(user_folder) == ["again.py", "lib/second.py", "train.py"]
    for kept in (user_folder.parent / "outside", ignoring(user_folder, "notes.txt") / "notes.txt"):
        kept.write_text("mine alone")
    for target in ("/etc/passwd", "../outside", "lib", "gone.py", "link", "notes.txt"):
        (user_folder / "link").symlink_to(target)
        with pytest.raises(ConfigProblem, match="link"):
            packed(user_folder)
        (user_folder / "link").unlink()


def test_large_files_are_refused_by_name(user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (user_folder / "weights.pt").touch()
    os.truncate(user_folder / "weights.pt", 65 << 20)
    with pytest.raises(ConfigProblem, match=r"has 68\.2 MB, .* at most 67\.1 MB; the largest are weights\.pt"):
        packed(user_folder)
    monkeypatch.setattr(code, "MOST_FILES", 1)
    with pytest.raises(ConfigProblem, match="more than 1 files, too many for code"):
        packed(ignoring(user_folder, "*.pt"))


def test_script_outside_the_mounted_folder_is_refused(mounted: Mounted) -> None:
    for script in ("/app/train.py", "lib/../../train.py"):
        with pytest.raises(ConfigProblem, match=r"is outside of code\.folder"):
            mounted(script=script)


def test_archive_is_stored_once_for_its_owner(user_folder: Path, tmp_path: Path) -> None:
    """A changed archive stops the run."""
    archive, root = packed(user_folder), open_storage(str(tmp_path / "out"))
    assert archive.ship(root)
    assert root.read(archive.path) == archive.content
    assert not archive.ship(root)
    assert stat.S_IMODE((tmp_path / "out" / "code").stat().st_mode) == 0o700
    root.write(archive.path, archive.content.replace(b"two", b"six"))
    with pytest.raises(DataError, match="is a checksum, says; remove it, and run again"):
        archive.ship(root)


def test_resumed_flow_run_reattaches_to_its_own_job(user_folder: Path, mounted: Mounted) -> None:
    script = plan_script(config := mounted())
    assert script_of_flow_run(config, "mine") is None, "it has started nothing yet"
    script.code.ship(script.root)
    replace(job_handle(script), flow_runs=["mine"]).reattach_or_create()
    (user_folder / "train.py").write_text("print('edited')")
    assert script_of_flow_run(config, "mine") == script
    assert find_started_with(config).runs == (script.name,)
    assert script_of_flow_run(config, "another") is None
    script.root.write(script.code.path, b"changed")
    with pytest.raises(DataError, match="cancel this flow run, and start a new one"):
        script_of_flow_run(config, "mine")
