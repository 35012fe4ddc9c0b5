"""Jobs on this machine: submitted once, ended whole, and outliving whoever submitted them."""

import json
import os
import signal
import socket
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import until

from launcher.errors import ConfigProblem, PlatformRefused
from launcher.job import Job, JobId, JobState, JobStatus, Submission
from launcher.platforms.local.platform import LocalPlatform
from launcher.platforms.local.settings import LocalPlatformConfig
from launcher.platforms.local.supervisor import JOB_TAG, reserved_ports, result
from litgpt_demo.node.agent import processes_with_env


@pytest.fixture
def platform() -> LocalPlatform:
    return LocalPlatform(LocalPlatformConfig(kind="local", grace_period=5))


def job(folder: Path, **changes: object) -> Job:
    made = Job(name="drill", attempt=1, nodes=2, processes=1, program=("-m", "this"), directory=str(folder))
    return replace(made, **changes)  # type: ignore[arg-type]


def plain(platform: LocalPlatform, directory: Path, *nodes: str, **changes: object) -> Submission:
    """A job whose nodes are these Python programs: no torchrun, which is nothing to the platform and takes time."""
    submission = platform.render(job(directory, **changes))
    first, *_ = submission.body["nodes"]
    texts = enumerate(nodes)
    made = [{**first, "node": number, "argv": [sys.executable, "-c", text]} for number, text in texts]
    return replace(submission, body={**submission.body, "nodes": made, "working_directory": str(directory.parent)})


def end_of(platform: LocalPlatform, job_id: JobId) -> JobStatus:
    until(lambda: not platform.status(job_id).state.is_live)
    return platform.status(job_id)


def printed_lines(platform: LocalPlatform, job_id: JobId) -> list[str]:
    return [line.text for line in platform.logs(job_id).lines]


SLEEP = "import time; time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {SLEEP}"


def test_the_port_of_a_job_is_nobody_elses_while_it_is_reserved() -> None:
    with reserved_ports() as port, reserved_ports() as other_port, socket.socket() as asking:
        assert {port, port + 1}.isdisjoint({other_port, other_port + 1})
        with pytest.raises(OSError, match="in use"):
            asking.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
            pass  # the programs that are told of them can listen there


def test_emptied_bucket_gets_a_new_job_without_the_old_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's folder is on this machine, so it outlives the root; the attempt made anew is number 1 too."""
    monkeypatch.setenv("TRAIN_LITGPT_HOME", str(tmp_path))
    platform = LocalPlatform(LocalPlatformConfig(kind="local"))
    requested = job(tmp_path, directory="gs://bucket/runs/demo/attempts/1", nonce="aaaaaa")
    old = platform.submit(replace(plain(platform, tmp_path, "print('old')"), job_id=platform.render(requested).job_id))
    assert end_of(platform, old).state is JobState.SUCCEEDED
    new = platform.render(replace(requested, nonce="bbbbbb")).job_id
    assert (platform.status(new).state, printed_lines(platform, old)) == (JobState.ABSENT, ["old"])
    assert not platform.owns_job_id(old, attempt_name=Path(new).name, directory=requested.directory)


def test_job_of_a_bucket_has_a_local_folder_and_one_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAIN_LITGPT_HOME", str(tmp_path))
    platform = LocalPlatform(LocalPlatformConfig(kind="local"))
    requested = job(tmp_path, name="owt-1a2b", attempt=3, directory="gs://bucket/runs/x", nodes=3)
    submission = platform.render(requested)
    assert submission.job_id == str(tmp_path / "jobs" / "owt-1a2b-3-000000")
    commands = [" ".join(node["argv"]) for node in submission.body["nodes"]]
    assert all(f"--nodes 3 --node-rank {number} " in command for number, command in enumerate(commands))
    assert len({command.partition("--master ")[2].split()[0] for command in commands}) == 1
    with pytest.raises(ConfigProblem, match=r"(?s)'my-key' cannot be an environment variable.*GLOO_SOCKET_IFNAME=eth0"):
        platform.render(replace(requested, env={"GLOO_SOCKET_IFNAME": "eth0", "my-key": "1"}))


def test_obstacles_are_found_refused_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    (tmp_path / "file").touch()
    with socket.create_server(("", 0)) as listener:
        platform = LocalPlatform(LocalPlatformConfig(kind="local", port=listener.getsockname()[1]))
        submission = platform.render(job(tmp_path / "file" / "a", processes=5000, secrets=("MY_KEY",)))
        found = {finding.code for finding in platform.check(submission)}
        with pytest.raises(PlatformRefused, match=rf"in use by process {os.getpid()} .*platform\.port"):
            platform.submit(platform.render(job(tmp_path / "a")))
    assert found == {"local.port", "local.cores"}
    with pytest.raises(PlatformRefused, match="MY_KEY"):
        platform.submit(submission)
    with pytest.raises(PlatformRefused, match="choose another root"):
        platform.submit(platform.render(job(tmp_path / "file" / "a")))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- submitting -------------------------------------------------------------------------------------------------------


def test_submitters_at_the_same_moment_start_one_job(platform: LocalPlatform, tmp_path: Path) -> None:
    submission = plain(platform, tmp_path / "a", "open('started', 'a').write('x'); " + SLEEP)
    with ThreadPoolExecutor(6) as pool:
        second_platform = LocalPlatform(LocalPlatformConfig(kind="local", grace_period=2))
        ids = set(pool.map(lambda _: second_platform.submit(submission), range(6)))
    assert ids == {submission.job_id}
    until((tmp_path / "started").exists)
    platform.cancel(submission.job_id)
    assert (tmp_path / "started").read_text() == "x"


def test_submit_starts_a_recorded_job_but_not_an_ended_one(platform: LocalPlatform, tmp_path: Path) -> None:
    """And a process that a node leaves behind is ended with the job."""
    leaves = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"
    submission = plain(platform, tmp_path / "a", f"print('once'); {leaves}")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "submission.json").write_text("{}")
    first = end_of(platform, platform.submit(submission))
    assert (first.state, first.exit_codes) == (JobState.SUCCEEDED, {0: 0})
    assert processes_with_env(JOB_TAG, submission.job_id) == []
    assert platform.submit(submission) == submission.job_id
    assert platform.status(submission.job_id) == first
    assert printed_lines(platform, submission.job_id) == ["once"]


def test_log_shows_the_last_state_of_a_progress_bar(tmp_path: Path) -> None:
    """Bytes that are not text are shown too."""
    (tmp_path / "submission.json").write_text('{"body": {"nodes": [{}]}}')
    (tmp_path / "node-0.log").write_bytes(b"10%\r 50%\r100%\nplain\r\n\xff\xfe\nunfinished")
    platform = LocalPlatform(LocalPlatformConfig(kind="local"))
    assert printed_lines(platform, JobId(str(tmp_path))) == ["100%", "plain", "\ufffd\ufffd", "unfinished"]


# --- the end of a job -------------------------------------------------------------------------------------------------


def test_peers_of_a_failed_node_are_ended(platform: LocalPlatform, tmp_path: Path) -> None:
    failing = platform.submit(plain(platform, tmp_path / "a", "raise SystemExit(43)", SLEEP))
    lame = plain(platform, tmp_path / "b", SLEEP, SLEEP)
    lame.body["nodes"][1]["argv"][0] = str(tmp_path / "no-python")
    seen = end_of(platform, platform.submit(lame))
    assert (seen.state, "no-python" in seen.native) == (JobState.FAILED, True)
    seen = end_of(platform, failing)
    assert (seen.state, seen.exit_codes) == (JobState.FAILED, {0: 43, 1: -signal.SIGTERM})
    assert seen.native.startswith("node 0 ended with 43 (node fault)")
    assert processes_with_env(JOB_TAG, failing) == processes_with_env(JOB_TAG, lame.job_id) == []


def test_cancelled_job_may_save_before_it_is_killed(platform: LocalPlatform, tmp_path: Path) -> None:
    saves = f"""
import pathlib, signal, sys
def save(*_): pathlib.Path('saved').touch(); sys.exit(45)
signal.signal(signal.SIGTERM, save); print('up', flush=True); {SLEEP}"""
    job_id = platform.submit(plain(platform, tmp_path / "a", saves, STUBBORN))
    until(lambda: len(printed_lines(platform, job_id)) == 2)
    platform.cancel(job_id)
    assert processes_with_env(JOB_TAG, job_id) == []
    assert (tmp_path / "saved").exists()
    seen = platform.status(job_id)
    assert (seen.state, seen.exit_codes) == (JobState.CANCELLED, {0: 45, 1: -signal.SIGKILL})
    assert result({0: 0, 1: 0}, cancelled=True)["state"] is JobState.SUCCEEDED, "it came to its end before the cancel"


# --- who submitted it is gone, or its supervisor ----------------------------------------------------------------------


def test_a_job_outlives_the_process_that_submitted_it(platform: LocalPlatform, tmp_path: Path) -> None:
    waits = "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)\nprint('done')"
    submission = plain(platform, tmp_path / "a", waits)
    submitter = """
import json, os, signal, sys
from launcher.job import Submission
from launcher.platforms import default_settings
default_settings().open().submit(Submission(platform='local', **json.loads(sys.argv[1])))
os.killpg(0, signal.SIGKILL)"""
    document = json.dumps({"job_id": submission.job_id, "body": submission.body})
    subprocess.run([sys.executable, "-c", submitter, document], start_new_session=True, check=False)
    assert platform.status(submission.job_id).state is JobState.RUNNING
    assert platform.submit(submission) == submission.job_id
    (tmp_path / "go").touch()
    assert end_of(platform, submission.job_id).state is JobState.SUCCEEDED
    assert printed_lines(platform, submission.job_id) == ["done"]


def test_job_without_supervisor_failed_and_cancel_kills_only_it(platform: LocalPlatform, tmp_path: Path) -> None:
    job_id = platform.submit(plain(platform, tmp_path / "a", SLEEP, SLEEP))
    until(lambda: len(processes_with_env(JOB_TAG, job_id)) == 3)
    record = tmp_path / "a" / "supervisor.json"
    supervisor = json.loads(record.read_text())
    os.kill(supervisor["pid"], signal.SIGKILL)
    lost = end_of(platform, job_id)
    assert (lost.state, lost.native) == (JobState.FAILED, "supervisor lost")
    assert len(processes_with_env(JOB_TAG, job_id)) == 2
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as bystander:  # whose pid was the supervisor's
        record.write_text(json.dumps({**supervisor, "pid": bystander.pid}))
        platform.cancel(job_id)
        assert bystander.poll() is None
        bystander.kill()
    assert processes_with_env(JOB_TAG, job_id) == []
    swept = platform.status(job_id)
    assert (swept.state, swept.native) == (JobState.CANCELLED, "swept, its supervisor was lost")


# --- secrets and other users ------------------------------------------------------------------------------------------

SECRET = "c0ffee-not-to-be-written-anywhere"


def test_ranks_find_a_secret_that_nothing_shows(
    platform: LocalPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole node with torchrun, which logs much; its rank proves the secret by a checksum."""
    monkeypatch.setenv("MY_KEY", SECRET)
    script = tmp_path / "prove.py"
    script.write_text("import os, zlib; print('checksum', zlib.crc32(os.environ['MY_KEY'].encode()))")
    submission = platform.render(job(tmp_path / "a", nodes=1, program=(str(script),), secrets=("MY_KEY",)))
    assert "MY_KEY" in str(submission)
    assert end_of(platform, platform.submit(submission)).state is JobState.SUCCEEDED
    assert any(
        line.endswith(f"checksum {zlib.crc32(SECRET.encode())}") for line in printed_lines(platform, submission.job_id)
    )
    files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_ranks_have_prefects_key_only_if_the_job_names_it(
    platform: LocalPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["PREFECT_API_AUTH_STRING", "PREFECT_API_KEY", "PREFECT_SERVER_API_AUTH_STRING", "TRAIN_LITGPT_KEY_PASSWORD"]
    for name in keys:
        monkeypatch.setenv(name, "the server's")
    submission = plain(platform, tmp_path / "a", f"import os; print(*(os.environ.get(one, 'none') for one in {keys}))")
    submission.body["secrets"].append(keys[0])
    submission.body["nodes"][0]["env"][keys[1]] = "mine"
    end_of(platform, platform.submit(submission))
    assert printed_lines(platform, submission.job_id) == ["the server's mine none none"]


def test_other_users_cannot_look_into_a_job(platform: LocalPlatform, tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "drill" / "attempts" / "1"
    end_of(platform, platform.submit(plain(platform, directory, "print('secret')")))
    assert directory.stat().st_mode & 0o077 == 0


def test_attempt_is_refused_beside_a_live_one_of_its_run(platform: LocalPlatform, tmp_path: Path) -> None:
    """The index was deleted while the first one ran, so that the next one got another number and folder."""
    root = {"root": str(tmp_path)}
    first = platform.submit(plain(platform, tmp_path / "1", SLEEP, **root))
    beside = plain(platform, tmp_path / "other", SLEEP, root="/elsewhere")
    second = plain(platform, tmp_path / "2", SLEEP, **root)
    with pytest.raises(PlatformRefused, match=rf"the job in {first} trains drill-\w+ under the same root.*kill \d+"):
        platform.submit(second)
    platform.submit(beside)
    platform.cancel(first)
    platform.submit(second)
    assert [platform.status(rival.job_id).state.is_live for rival in (beside, second)] == [True, True]
    for submission in (beside, second):
        platform.cancel(submission.job_id)
