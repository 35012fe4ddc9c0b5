"""A user's own code as an archive under the root: what ships, what never does, and by which name."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
from bucket_emulator import bucket_emulator

from launcher.checks.plan import findings_of, plan_of
from launcher.config import ScriptConfig, validated
from launcher.errors import ConfigProblem, UnknownRun
from launcher.images.context import write_files
from launcher.images.settings import PrebuiltImage
from launcher.job import JobState, JobStatus
from launcher.platforms.local.platform import LocalPlatform
from launcher.runs import code
from launcher.runs.attempts import claim_of, claim_script, script_of_flow_run
from launcher.runs.code import CodeArchive, code_paths, pack_code
from launcher.runs.index import Index
from launcher.runs.run import plan_script, script_job
from launcher.runs.targets import find_started_with
from litgpt_demo.errors import DataError
from litgpt_demo.storage import Storage, open_storage

Mounted = Callable[..., ScriptConfig]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder of code: a script that imports a second file."""
    folder = tmp_path / "mine"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text("from lib import second\nprint(second.WORD)\n")
    (folder / "lib" / "second.py").write_text("WORD = 'two'\n")
    return folder


@pytest.fixture
def mounted(mine: Path, tmp_path: Path) -> Mounted:
    def make(**changes: Any) -> ScriptConfig:
        document = {"script": "train.py", "code": {"mount": str(mine)}, "root": str(tmp_path / "out"), **changes}
        return validated(ScriptConfig, document, where="test")

    return make


@pytest.fixture(params=["folder", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    if request.param == "folder":
        yield open_storage(str(tmp_path / "root"))
        return
    with bucket_emulator("shared") as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        yield open_storage("gs://shared/prefix")


def packed(folder: Path, root: str = "gs://bucket/prefix") -> CodeArchive:
    return pack_code(str(folder), root=root)


def names(archive: CodeArchive) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        return tar.getnames()


# --- what ships -------------------------------------------------------------------------------------------------------


def test_the_same_files_are_the_same_archive_wherever_and_whenever_they_lie(mine: Path, tmp_path: Path) -> None:
    other = tmp_path / "checkout"
    (other / "lib").mkdir(parents=True)
    for path in ("lib/second.py", "train.py"):
        (other / path).write_bytes((mine / path).read_bytes())
        os.utime(other / path, (1, 1))
    assert packed(mine) == packed(other)
    assert names(packed(mine)) == ["lib/second.py", "train.py"]


def test_a_change_of_one_file_is_another_run_and_the_same_image(mine: Path, mounted: Mounted) -> None:
    image = "registry.example/mine@sha256:" + 64 * "0"
    config = mounted(image=PrebuiltImage(kind="prebuilt", reference=image))
    before = claim_of(config).next_job()
    (mine / "lib" / "second.py").write_text("WORD = 'three'\n")
    after = claim_of(config).next_job()
    assert before.image == after.image == image
    assert before.code != after.code
    assert before.name != after.name


def test_a_script_without_mounted_code_keeps_its_name(mounted: Mounted) -> None:
    plain = validated(ScriptConfig, {"script": "/app/train.py"}, where="test")
    assert plan_script(plain).name == "script-f2fbc8f0a4"


@pytest.mark.parametrize(
    "secret",
    [
        ".env", "lib/.env.production", ".git/config", ".ssh/id_ed25519", "key.pem", "lib/tls.key", ".netrc",
        ".aws/credentials", "application_default_credentials.json", "service-account-owt.json", "id_rsa",
        ".envrc", ".ENV", "lib/.npmrc", "pip.conf", ".gnupg/secring.gpg", "kubeconfig", "Prod.PEM", ".pgpass", ".boto",
        ".s3cfg", ".condarc", "store.jks", ".streamlit/secrets.toml", ".config/gcloud/credentials.db",
    ],
)  # fmt: skip
@pytest.mark.parametrize("rules", ["", "*\n!lib\n!train.py\n", "!**\n"])
def test_what_looks_like_a_secret_never_ships_whatever_the_ignore_file_brings_back(
    mine: Path, secret: str, rules: str
) -> None:
    (mine / secret).parent.mkdir(exist_ok=True, parents=True)
    (mine / secret).write_text("hunter2")
    (mine / ".dockerignore").write_text(rules)
    assert names(archive := packed(mine)) == ["lib/second.py", "train.py"]
    assert b"hunter2" not in archive.content


@pytest.mark.parametrize(
    "key",
    [
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n", "a comment\r\n-----BEGIN OPENSSH PRIVATE KEY-----\r\nb3Bl\r\n",
        '{"type": "service_account", "private_key": "x"}', '{\n  "refresh_token": "x",\n  "type": "authorized_user"\n}',
    ],
)  # fmt: skip
def test_a_key_is_refused_by_the_name_of_its_file_whatever_that_is(mine: Path, key: str) -> None:
    (mine / "my-proj-1234567890ab.json").write_bytes(key.encode())
    with pytest.raises(ConfigProblem, match=r"my-proj-1234567890ab\.json holds a private key.* name it in \.dockerig"):
        packed(mine)
    (mine / ".dockerignore").write_text("my-proj-*")
    packed(mine)


def test_code_that_only_speaks_of_keys_ships(mine: Path) -> None:
    (mine / "keys.py").write_text(
        "if text.startswith('-----BEGIN PRIVATE KEY-----') or info['type'] == 'service_account': print(text)"
    )
    assert "keys.py" in names(packed(mine))


@pytest.mark.parametrize("secret", [".env", "lib/tls.key", ".git/config"])
def test_a_link_to_a_secret_ships_it_under_no_other_name(mine: Path, secret: str) -> None:
    (mine / secret).parent.mkdir(exist_ok=True)
    (mine / secret).write_text("hunter2")
    (mine / "settings.txt").symlink_to(secret)
    with pytest.raises(ConfigProblem, match=r"settings\.txt is a link to .*put the file there, or name the link"):
        packed(mine)
    (mine / ".dockerignore").write_text("settings.txt")
    assert b"hunter2" not in packed(mine).content


def test_a_link_to_what_is_ignored_is_refused(mine: Path) -> None:
    (mine / "notes.txt").write_text("mine alone")
    (mine / "readme").symlink_to("notes.txt")
    (mine / ".dockerignore").write_text("notes.txt")
    with pytest.raises(ConfigProblem, match=r"readme is a link to .*only links to files that ship themselves"):
        packed(mine)


def test_an_ignore_file_leaves_out_what_it_names(mine: Path) -> None:
    (mine / "data").mkdir()
    (mine / "data" / "train.bin").write_text("large")
    (mine / ".dockerignore").write_text("data\n")
    assert names(packed(mine)) == ["lib/second.py", "train.py"]


def test_what_runs_write_into_the_folder_is_no_part_of_the_code(mine: Path) -> None:
    before = packed(mine, root=str(mine / "out[1]"))
    (mine / "out[1]").mkdir()
    (mine / "out[1]" / "metrics.jsonl").write_text("{}")
    assert packed(mine, root=str(mine / "out[1]")) == before


def test_a_link_to_a_file_of_the_folder_ships_as_that_file(mine: Path) -> None:
    (mine / "again.py").symlink_to("train.py")
    with tarfile.open(fileobj=io.BytesIO(packed(mine).content)) as tar:
        assert all(member.isreg() for member in tar)
        again = tar.extractfile("again.py")
        assert again is not None
        assert again.read() == (mine / "train.py").read_bytes()


def test_a_root_that_is_the_folder_of_the_code_is_refused(mine: Path) -> None:
    """Each run would ship what all before it wrote."""
    with pytest.raises(ConfigProblem, match=r"and code\.mount are one folder.* give the root a folder of its own"):
        packed(mine, root=str(mine))


@pytest.mark.parametrize("mount", ["~nobody-of-this-name/code", "a\0b"])
def test_a_mount_that_can_be_no_path_is_refused(mount: str) -> None:
    with pytest.raises(ConfigProblem, match=r"code\.mount=.* cannot be read"):
        pack_code(mount, root="gs://bucket/prefix")


def test_a_link_to_itself_is_refused(mine: Path) -> None:
    (mine / "loop").symlink_to("loop")
    with pytest.raises(ConfigProblem, match="loop"):
        packed(mine)


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "lib", "gone.py"])
def test_a_link_that_leads_elsewhere_is_refused(mine: Path, target: str) -> None:
    (mine.parent / "outside").write_text("not yours")
    (mine / "link").symlink_to(target)
    with pytest.raises(ConfigProblem, match=r"link is a link to .*put the file there, or name the link in \.d"):
        packed(mine)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_big_folder_is_refused_with_its_largest_files(mine: Path) -> None:
    with (mine / "weights.pt").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ConfigProblem, match=r"has 68\.2 MB, and code may have 67\.1 MB; the largest are weights\.pt"):
        packed(mine)
    (mine / ".dockerignore").write_text("*.pt\n")
    packed(mine)


def test_paths_that_make_a_longer_archive_than_nodes_take_are_refused(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = mine / "/".join(["d" * 200] * 5)
    deep.mkdir(parents=True)
    (deep / "module.py").touch()
    packed(mine)
    monkeypatch.setattr(code, "MOST_ARCHIVE", 4096)
    with pytest.raises(ConfigProblem, match=r"nodes take .*very long paths; give a folder further down"):
        packed(mine)


@pytest.mark.parametrize("change", ["shorter", "longer", "gone"])
def test_a_file_that_changes_while_it_is_read_is_no_question_of_permissions(
    mine: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = mine / "train.py"

    def write(folder: Path, paths: Iterable[str], *, to: BinaryIO) -> str:
        def saved() -> Iterator[str]:
            for path in paths:
                if path == "train.py" and change == "gone":
                    script.unlink()
                yield path
                if path == "train.py" and change == "longer":
                    script.write_text("print('more')" * 99)

        if change == "shorter":
            fstat = os.fstat

            def longer(number: int) -> SimpleNamespace:
                return SimpleNamespace(st_mode=(status := fstat(number)).st_mode, st_size=status.st_size + 600)

            monkeypatch.setattr(os, "fstat", longer)
        return write_files(folder, saved(), to=to)

    monkeypatch.setattr(code, "write_files", write)
    with pytest.raises(ConfigProblem, match="change while they are read; wait, then run again"):
        packed(mine)


def test_a_folder_of_too_many_files_is_refused(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MOST_FILES", 1)
    with pytest.raises(ConfigProblem, match="more than 1 files, which is no source code; name what the job does not"):
        packed(mine)


@pytest.mark.parametrize(
    ("mount", "said"), [("gone", "is no folder"), ("train.py", "is no folder"), ("empty", "has no files")]
)
def test_a_mount_without_code_is_refused(mine: Path, mount: str, said: str) -> None:
    (mine / "empty").mkdir()
    with pytest.raises(ConfigProblem, match=said):
        packed(mine / mount)


@pytest.mark.parametrize("script", ["/app/train.py", "../train.py", "lib/../../train.py"])
def test_a_script_outside_of_its_mounted_code_is_refused(mounted: Mounted, script: str) -> None:
    with pytest.raises(ConfigProblem, match=r"leads out of code\.mount"):
        mounted(script=script)


@pytest.mark.parametrize("script", ["gone.py", "lib", "key.pem"])
def test_a_plan_refuses_a_script_that_does_not_ship(mine: Path, mounted: Mounted, script: str) -> None:
    (mine / "key.pem").write_text("")
    assert [finding.code for finding in plan_of(mounted(script=script)).findings if finding.severity == "error"] == [
        "script.missing"
    ]


@pytest.mark.parametrize("script", ["train.py", "./train.py", "-m lib.second", "-m train"])
def test_a_script_or_module_of_the_mounted_code_is_found(mounted: Mounted, script: str) -> None:
    assert [one.code for one in findings_of(mounted(script=script)) if one.severity == "error"] == []


# --- under the root ---------------------------------------------------------------------------------------------------


def test_an_archive_is_put_once_and_never_again(root: Storage, mine: Path) -> None:
    archive = packed(mine)
    assert archive.ship(root)
    assert root.read(archive.path) == archive.content
    assert not archive.ship(root)
    assert root.list("code") == [f"code/{archive.sha256}.tar"]


def test_other_users_cannot_look_into_the_folder_of_shipped_code(mine: Path, tmp_path: Path) -> None:
    packed(mine).ship(open_storage(str(tmp_path / "out")))
    assert stat.S_IMODE((tmp_path / "out" / "code").stat().st_mode) == 0o700


def test_an_archive_that_somebody_changed_stops_the_run_before_a_job(root: Storage, mine: Path) -> None:
    archive = packed(mine)
    root.write(archive.path, archive.content.replace(b"two", b"six"))
    with pytest.raises(DataError, match="is not the code that its name says; see who writes there"):
        archive.ship(root)


def test_the_record_of_an_attempt_names_its_code(mounted: Mounted) -> None:
    claim = claim_of(config := mounted())
    script = plan_script(config)
    assert script.code is not None
    assert claim.take().code == script.root.address(f"code/{script.code.sha256}.tar")
    assert script_job(script, attempt=1, image=None).code == claim.attempts.records()[0].code


def test_a_job_is_found_by_its_config_after_its_code_changed(mine: Path, mounted: Mounted) -> None:
    (claim := claim_of(config := mounted())).take()
    (mine / "train.py").write_text("print('other')")
    assert find_started_with(config).runs == (claim.attempts.run,)
    (mine / "train.py").unlink()
    assert find_started_with(config).runs == (claim.attempts.run,)
    claim_of(mounted(script="lib/second.py")).take()
    assert find_started_with(config).runs == (claim.attempts.run,)


def test_a_resumed_flow_run_follows_its_own_job_whatever_the_folder_holds_now(mine: Path, mounted: Mounted) -> None:
    script = plan_script(config := mounted())
    assert script.code is not None
    assert script_of_flow_run(config, "mine") is None, "it has started nothing yet"
    script.code.ship(script.root)
    replace(claim_script(script), flow_runs=["mine"]).take()
    (mine / "train.py").write_text("print('edited')")
    assert script_of_flow_run(config, "mine") == script
    assert script_of_flow_run(config, "another") is None
    (mine / "train.py").unlink()
    assert script_of_flow_run(config, "mine") == script
    script.root.write(script.code.path, b"changed")
    with pytest.raises(DataError, match="cancel this flow run, and start a new one"):
        script_of_flow_run(config, "mine")


def test_a_plan_reads_the_code_once(mounted: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that were checked are those that ship, though a file is saved in between."""
    read = list[str]()

    def counted(mount: str, *, root: str) -> list[str]:
        read.append(mount)
        return code_paths(mount, root=root)

    monkeypatch.setattr(code, "code_paths", counted)
    findings_of(mounted())
    assert len(read) == 1
    plan_of(mounted())
    assert len(read) == 2


def test_of_several_runs_a_config_means_that_of_the_present_code(mine: Path, mounted: Mounted) -> None:
    first = claim_of(config := mounted()).take().run
    (mine / "train.py").write_text("print('edited')")
    second = claim_of(config).take().run
    assert find_started_with(config).runs == (second,) != (first,)
    (mine / "train.py").unlink()
    with pytest.raises(UnknownRun, match="2 runs were started with this config, for its corpus or code changed"):
        find_started_with(config)


def test_of_several_runs_of_former_code_a_config_means_the_only_live_one(
    mine: Path, mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = claim_of(config := mounted()).take().run
    for text in ("print('edited')", "print('again')"):
        (mine / "train.py").write_text(text)
        ended = claim_of(config).take()
    Index.of(config.root).end(ended, JobStatus(state=JobState.SUCCEEDED, native="ended"))
    (mine / "train.py").write_text("print('never started')")
    with pytest.raises(UnknownRun, match="3 runs were started"):
        find_started_with(config)

    def status(self: LocalPlatform, job_id: str) -> JobStatus:
        return JobStatus(state=JobState.RUNNING if f"/{live}/" in job_id else JobState.ABSENT, native="")

    monkeypatch.setattr(LocalPlatform, "status", status)
    assert find_started_with(config).runs == (live,)
