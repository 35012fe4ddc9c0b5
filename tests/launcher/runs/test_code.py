"""A user's own code as an archive under the root: what ships, what never does, and by which name."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bucket_emulator import bucket_emulator

from launcher.checks.plan import findings_of, plan_of
from launcher.config import ScriptConfig, validated
from launcher.errors import ConfigProblem, UnknownRun
from launcher.images.settings import PrebuiltImage
from launcher.runs import code
from launcher.runs.attempts import claim_of
from launcher.runs.code import CodeArchive, pack_code
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
    ],
)  # fmt: skip
@pytest.mark.parametrize("rules", ["", "*\n!lib\n!train.py\n", "!**\n"])
def test_what_looks_like_a_secret_never_ships_whatever_the_ignore_file_brings_back(
    mine: Path, secret: str, rules: str
) -> None:
    (mine / secret).parent.mkdir(exist_ok=True)
    (mine / secret).write_text("hunter2")
    (mine / ".dockerignore").write_text(rules)
    assert names(archive := packed(mine)) == ["lib/second.py", "train.py"]
    assert b"hunter2" not in archive.content


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
    claim_of(config).take()
    with pytest.raises(UnknownRun, match="2 runs were started with this config, for its corpus or code changed"):
        find_started_with(config)
