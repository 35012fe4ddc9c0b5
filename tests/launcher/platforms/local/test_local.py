from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from another_user import as_nobody, needs_another_user, shared_temporary
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from launcher.errors import ConfigProblem, PlatformRefused
from launcher.job import Job, JobId, JobState, JobStatus, Submission
from launcher.platforms.local.platform import LocalPlatform
from launcher.platforms.local.supervisor import JOB_TAG, SUPERVISOR, deadlines, reserved_ports, result
from litgpt_demo.node.agent import tagged


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[LocalPlatform]:
    """A platform whose jobs are gone when the test is over, however it ended."""
    yield LocalPlatform(grace=2)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(JOB_TAG, "").startswith(str(tmp_path)):
                process.kill()


def job(directory: Path, **changes: object) -> Job:
    made = Job(
        name=f"drill-{directory.parent.name}",
        attempt=1,
        nodes=2,
        processes=1,
        program=("-m", "this"),
        directory=str(directory),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def plain(platform: LocalPlatform, directory: Path, *nodes: str) -> Submission:
    """A job whose nodes are these Python programs: no torchrun, which is nothing to the platform and takes time."""
    submission = platform.render(job(directory))
    body = dict(submission.body)
    body["nodes"] = [
        {**body["nodes"][0], "node": number, "argv": [sys.executable, "-c", text]} for number, text in enumerate(nodes)
    ]
    return replace(submission, body=body)


def end_of(platform: LocalPlatform, job_id: JobId, seconds: float = 30.0) -> JobStatus:
    until(lambda: not platform.status(job_id).state.live, seconds=seconds)
    return platform.status(job_id)


SLEEP = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


# --- rendering and checks ---------------------------------------------------------------------------------------------


def test_the_port_of_a_job_is_nobody_elses_while_it_is_reserved() -> None:
    with reserved_ports() as port, reserved_ports() as other, socket.socket() as asking:
        assert {port, port + 1}.isdisjoint({other, other + 1})
        with pytest.raises(OSError, match="in use"):
            asking.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
            pass  # the programs that are told of them can listen there


def test_a_job_lives_in_its_own_directory_or_where_that_is_a_bucket_under_the_state(tmp_path: Path) -> None:
    platform = LocalPlatform(state=tmp_path / "state")
    assert platform.render(job(tmp_path / "attempt")).job_id == str(tmp_path / "attempt")
    remote = platform.render(replace(job(tmp_path / "x"), name="owt-1a2b", attempt=3, directory="gs://bucket/runs/x"))
    assert remote.job_id == str(tmp_path / "state" / "owt-1a2b-3")


def test_every_node_gets_its_rank_and_all_of_them_one_master(tmp_path: Path) -> None:
    nodes = LocalPlatform(port=23456).render(job(tmp_path / "a", nodes=3)).body["nodes"]
    commands = [" ".join(node["argv"]) for node in nodes]
    assert [f"--node-rank {number} " in command for number, command in enumerate(commands)] == [True] * 3
    assert all("--nodes 3 " in command and "--master 127.0.0.1:23456 " in command for command in commands)
    assert all(command.startswith(sys.executable) and command.endswith("-- -m this") for command in commands)


def test_an_environment_that_the_platform_sets_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigProblem, match="GLOO_SOCKET_IFNAME=eth0"):
        LocalPlatform().render(job(tmp_path / "a", env={"GLOO_SOCKET_IFNAME": "eth0", "MINE": "1"}))
    env = (
        LocalPlatform().render(job(tmp_path / "a", env={"PYTHONUNBUFFERED": "1", "MINE": "1"})).body["nodes"][1]["env"]
    )
    assert env["MINE"] == "1"


def test_what_stands_in_the_way_is_found_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        platform = LocalPlatform(port=other.getsockname()[1])
        submission = platform.render(job(tmp_path / "file" / "a", processes=5000))
        submission.body["nodes"][0]["argv"][0] = str(tmp_path / "no-python")
        found = {finding.code: finding for finding in platform.check(submission)}
    assert set(found) == {"local.port", "local.directory", "local.python", "local.cores"}
    assert found["local.cores"].severity == "warning"
    assert f"process {os.getpid()} " in found["local.port"].what


def test_nothing_stands_in_the_way_of_a_small_job(tmp_path: Path) -> None:
    platform = LocalPlatform()
    assert list(platform.check(platform.render(job(tmp_path / "a" / "b", nodes=1)))) == []


# --- submitting -------------------------------------------------------------------------------------------------------


def test_submitters_at_the_same_moment_start_one_job(platform: LocalPlatform, tmp_path: Path) -> None:
    submission = plain(platform, tmp_path / "a", "open('started', 'a').write('x'); " + SLEEP)
    submission = replace(submission, body={**submission.body, "working_directory": str(tmp_path)})
    with ThreadPoolExecutor(6) as pool:
        ids = set(pool.map(lambda _: LocalPlatform(grace=2).submit(submission), range(6)))
    assert ids == {submission.job_id}
    until((tmp_path / "started").exists)
    platform.cancel(submission.job_id)
    assert (tmp_path / "started").read_text() == "x"


def test_an_ended_job_is_not_started_again(platform: LocalPlatform, tmp_path: Path) -> None:
    submission = plain(platform, tmp_path / "a", "print('once')")
    first = end_of(platform, platform.submit(submission))
    assert (first.state, first.exit_codes) == (JobState.SUCCEEDED, {0: 0})
    assert platform.submit(submission) == submission.job_id
    assert platform.status(submission.job_id) == first
    assert [line.text for line in platform.logs(submission.job_id).lines] == ["once"]


def test_a_job_that_its_submitter_died_over_before_it_began_is_started(platform: LocalPlatform, tmp_path: Path) -> None:
    submission = plain(platform, tmp_path / "a", "pass")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "submission.json").write_text("{}")
    assert end_of(platform, platform.submit(submission)).state is JobState.SUCCEEDED


def test_a_taken_port_is_refused_with_its_owner_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        platform = LocalPlatform(port=other.getsockname()[1])
        with pytest.raises(PlatformRefused, match=rf"in use by process {os.getpid()} .*platform\.port"):
            platform.submit(platform.render(job(tmp_path / "a")))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    platform = LocalPlatform()
    with pytest.raises(PlatformRefused, match="choose another root"):
        platform.submit(platform.render(job(tmp_path / "file" / "a")))


def test_a_node_that_cannot_be_started_fails_the_job(platform: LocalPlatform, tmp_path: Path) -> None:
    submission = plain(platform, tmp_path / "a", SLEEP, SLEEP)
    submission.body["nodes"][1]["argv"][0] = str(tmp_path / "no-python")
    seen = end_of(platform, platform.submit(submission))
    assert seen.state is JobState.FAILED
    assert "no-python" in seen.native
    assert tagged(JOB_TAG, submission.job_id) == []


# --- logs -------------------------------------------------------------------------------------------------------------


def test_a_progress_bar_is_its_last_state_and_bytes_that_are_no_text_are_shown(tmp_path: Path) -> None:
    (tmp_path / "submission.json").write_text('{"body": {"nodes": [{}]}}')
    (tmp_path / "node-0.log").write_bytes(b"10%\r 50%\r100%\nplain\r\n\xff\xfe\nunfinished")
    page = LocalPlatform().logs(JobId(str(tmp_path)))
    assert [line.text for line in page.lines] == ["100%", "plain", "\ufffd\ufffd", "unfinished"]


@settings(max_examples=30, deadline=None)
@given(chunks=st.lists(st.tuples(st.integers(0, 1), st.text("aé\n", max_size=6)), max_size=12))
def test_lines_come_whole_and_once_however_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[tuple[int, str]]
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    (folder / "submission.json").write_text('{"body": {"nodes": [{}, {}]}}')
    platform, read, position = LocalPlatform(), {0: list[str](), 1: list[str]()}, ""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for node, text in chunks:
            with (folder / f"node-{node}.log").open("ab") as log:
                log.write(text.encode())
            page = platform.logs(JobId(str(folder)), position)
            position = page.position
            for line in page.lines:
                read[line.node].append(line.text)
    for line in platform.logs(JobId(str(folder)), position).lines:
        read[line.node].append(line.text)
    for node in (0, 1):
        whole = "".join(text for number, text in chunks if number == node)
        assert read[node] == (whole.removesuffix("\n").split("\n") if whole else [])


# --- the end of a job -------------------------------------------------------------------------------------------------


def test_the_nodes_left_over_from_a_failed_one_are_ended(platform: LocalPlatform, tmp_path: Path) -> None:
    failing = "import time; time.sleep(1); raise SystemExit(43)"
    submission = plain(platform, tmp_path / "a", failing, SLEEP)
    began = time.monotonic()
    seen = end_of(platform, platform.submit(submission))
    assert seen.state is JobState.FAILED
    assert seen.exit_codes == {0: 43, 1: -signal.SIGTERM}
    assert seen.native.startswith("node 0 ended with 43 (node fault)")
    assert 6 < time.monotonic() - began < 15
    assert tagged(JOB_TAG, submission.job_id) == []


def test_a_process_left_behind_by_a_node_that_succeeded_is_ended(platform: LocalPlatform, tmp_path: Path) -> None:
    leaves = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"
    submission = plain(platform, tmp_path / "a", leaves)
    assert end_of(platform, platform.submit(submission)).state is JobState.SUCCEEDED
    assert tagged(JOB_TAG, submission.job_id) == []


def test_a_cancelled_job_may_save_and_who_will_not_go_is_killed(platform: LocalPlatform, tmp_path: Path) -> None:
    saves = (
        "import pathlib, signal, sys, time\n"
        "def save(*_): pathlib.Path('saved').touch(); sys.exit(45)\n"
        "signal.signal(signal.SIGTERM, save); print('up', flush=True); time.sleep(600)"
    )
    submission = plain(platform, tmp_path / "a", saves, STUBBORN)
    submission = replace(submission, body={**submission.body, "working_directory": str(tmp_path)})
    job_id = platform.submit(submission)
    until(lambda: len(platform.logs(job_id).lines) == 2)
    platform.cancel(job_id)
    assert tagged(JOB_TAG, job_id) == []
    assert (tmp_path / "saved").exists()
    seen = platform.status(job_id)
    assert (seen.state, seen.exit_codes) == (JobState.CANCELLED, {0: 45, 1: -signal.SIGKILL})


@pytest.mark.parametrize(
    ("asked", "failed", "expected"),
    [
        (None, None, (float("inf"), float("inf"))),
        (None, 100.0, (105.0, 110.0)),
        (100.0, None, (100.0, 132.0)),
        (101.0, 100.0, (101.0, 110.0)),
    ],
)
def test_nodes_are_told_and_killed_in_time(
    asked: float | None, failed: float | None, expected: tuple[float, float]
) -> None:
    assert deadlines(asked=asked, failed=failed, grace=30) == expected


def test_a_job_that_came_to_its_end_before_the_cancel_succeeded() -> None:
    assert result({0: 0, 1: 0}, cancelled=True)["state"] is JobState.SUCCEEDED
    assert result({0: 0, 1: 45}, cancelled=True)["state"] is JobState.CANCELLED


# --- drills -----------------------------------------------------------------------------------------------------------


def test_a_job_outlives_the_process_that_submitted_it(platform: LocalPlatform, tmp_path: Path) -> None:
    submission = plain(platform, tmp_path / "a", "import time; print('up', flush=True); time.sleep(3); print('done')")
    (tmp_path / "submission").write_text(json.dumps({"job_id": submission.job_id, "body": submission.body}))
    submitter = (
        "import json, os, pathlib, signal, sys\n"
        "from launcher.job import Submission\n"
        "from launcher.platforms.local.platform import LocalPlatform\n"
        "told = json.loads(pathlib.Path(sys.argv[1]).read_text())\n"
        "LocalPlatform().submit(Submission(platform='local', **told))\n"
        "os.killpg(0, signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", submitter, str(tmp_path / "submission")]
    dead = subprocess.run(command, start_new_session=True, check=False)
    assert dead.returncode == -signal.SIGKILL
    assert platform.status(submission.job_id).state is JobState.RUNNING
    assert platform.submit(submission) == submission.job_id
    assert end_of(platform, submission.job_id).state is JobState.SUCCEEDED
    assert [line.text for line in platform.logs(submission.job_id).lines] == ["up", "done"]


def test_a_job_whose_supervisor_was_killed_has_failed_and_cancelling_sweeps_it(
    platform: LocalPlatform, tmp_path: Path
) -> None:
    submission = plain(platform, tmp_path / "a", SLEEP, SLEEP)
    job_id = platform.submit(submission)
    until(lambda: len(tagged(JOB_TAG, job_id)) == 3)
    os.kill(json.loads((tmp_path / "a" / "supervisor.json").read_text())["pid"], signal.SIGKILL)
    lost = end_of(platform, job_id, seconds=5)
    assert (lost.state, lost.native) == (JobState.FAILED, "supervisor lost")
    assert len(tagged(JOB_TAG, job_id)) == 2
    platform.cancel(job_id)
    assert tagged(JOB_TAG, job_id) == []
    swept = platform.status(job_id)
    assert (swept.state, swept.native) == (JobState.CANCELLED, "swept, its supervisor was lost")


def test_a_pid_that_is_another_processs_by_now_is_left_alone(platform: LocalPlatform, tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", SLEEP])
    submission = plain(platform, tmp_path / "a", SLEEP)
    job_id = platform.submit(submission)
    until((tmp_path / "a" / "supervisor.json").exists)
    told = json.loads((tmp_path / "a" / "supervisor.json").read_text())
    os.kill(told["pid"], signal.SIGKILL)
    (tmp_path / "a" / "supervisor.json").write_text(json.dumps({**told, "pid": bystander.pid}))
    platform.cancel(job_id)
    assert bystander.poll() is None
    assert tagged(JOB_TAG, job_id) == []
    bystander.kill()
    bystander.wait()


@pytest.mark.long
@pytest.mark.training
def test_after_kill_9_of_a_rank_the_attempt_is_over_in_15_seconds_though_no_other_rank_lets_go(
    platform: LocalPlatform, tmp_path: Path
) -> None:
    script = tmp_path / "rank.py"
    note = (
        f"import os, pathlib; pathlib.Path({str(tmp_path)!r}, 'pid-' + os.environ['RANK']).write_text(str(os.getpid()))"
    )
    script.write_text(f"{note}\n{STUBBORN}")
    submission = platform.render(job(tmp_path / "a", processes=2, program=(str(script),)))
    job_id = platform.submit(submission)
    pids = [tmp_path / f"pid-{rank}" for rank in range(4)]
    until(lambda: sum("up" in line.text for line in platform.logs(job_id).lines) == 4, seconds=60)
    os.kill(int(pids[2].read_text()), signal.SIGKILL)
    killed = time.monotonic()
    seen = end_of(platform, job_id)
    took = time.monotonic() - killed
    assert took < 15
    assert (seen.state, seen.exit_codes[1]) == (JobState.FAILED, 43)
    told = json.loads((tmp_path / "a" / "node-1.json").read_text())
    first = told["ranks"][0]
    assert (first["rank"], first["exit_code"], first["bystander"]) == (2, -9, False)
    assert tagged(JOB_TAG, job_id) == []
    assert not any(psutil.pid_exists(int(pid.read_text())) for pid in pids)


# --- secrets ----------------------------------------------------------------------------------------------------------

SECRET = "c0ffee-not-to-be-written-anywhere"


def test_ranks_find_a_secret_that_nothing_shows(
    platform: LocalPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole node with torchrun, which logs much; its rank proves the secret by a checksum."""
    monkeypatch.setenv("MY_KEY", SECRET)
    script = tmp_path / "prove.py"
    script.write_text("import os, zlib; print('checksum', zlib.crc32(os.environ['MY_KEY'].encode()))")
    asked = job(tmp_path / "attempt", nodes=1, program=(str(script),), secrets=("MY_KEY",))
    submission = platform.render(asked)
    assert SECRET not in str(submission)
    assert "MY_KEY" in str(submission)
    assert list(platform.check(submission)) == []
    status = end_of(platform, platform.submit(submission), 60)
    assert status.state is JobState.SUCCEEDED
    lines = [line.text for line in platform.logs(submission.job_id).lines]
    assert any(line.endswith(f"checksum {zlib.crc32(SECRET.encode())}") for line in lines)
    files = [path for path in (tmp_path / "attempt").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_ranks_have_no_key_to_prefects_server_unless_the_job_names_it(
    platform: LocalPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["PREFECT_API_AUTH_STRING", "PREFECT_API_KEY", "PREFECT_SERVER_API_AUTH_STRING"]
    for name in keys:
        monkeypatch.setenv(name, "litgpt:the server's")
    shown = f"import os; print(*(os.environ.get(name, 'none') for name in {keys}), sep=', ')"
    submission = plain(platform, tmp_path / "without", shown)
    end_of(platform, platform.submit(submission))
    assert [line.text for line in platform.logs(submission.job_id).lines] == ["none, none, none"]
    named = plain(platform, tmp_path / "with", shown)
    named.body["secrets"].append(keys[0])
    named.body["nodes"][0]["env"][keys[1]] = "mine"
    end_of(platform, platform.submit(named))
    assert [line.text for line in platform.logs(named.job_id).lines] == ["litgpt:the server's, mine, none"]


def test_a_secret_that_is_not_there_is_told_and_refused(
    platform: LocalPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    submission = platform.render(job(tmp_path / "attempt", nodes=1, secrets=("MY_KEY",)))
    (finding,) = platform.check(submission)
    assert (finding.severity, finding.code) == ("error", "local.secret")
    with pytest.raises(PlatformRefused, match="MY_KEY"):
        platform.submit(submission)
    assert platform.status(submission.job_id).state is JobState.ABSENT


# --- other users and other machines -----------------------------------------------------------------------------------


MEET = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
both = dist.new_group(backend="gloo")
dist.all_reduce(torch.ones(1), group=both)
Path(sys.argv[1], str(dist.get_rank())).touch()
while not Path(sys.argv[1], "go").exists():
    time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.training
def test_nothing_of_a_job_listens_where_another_machine_could_reach_it(platform: LocalPlatform, tmp_path: Path) -> None:
    (script := tmp_path / "meet.py").write_text(MEET)
    (met := tmp_path / "met").mkdir()
    two_by_two = job(tmp_path / "attempt", processes=2, program=(str(script), str(met)))
    job_id = platform.submit(platform.render(two_by_two))
    until(lambda: len(list(met.iterdir())) == 4, seconds=120)
    listeners = [
        connection.laddr
        for process in tagged(JOB_TAG, job_id)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    (met / "go").touch()
    assert end_of(platform, job_id, seconds=60).state is JobState.SUCCEEDED
    chosen = json.loads((tmp_path / "attempt" / SUPERVISOR).read_text())["port"]
    assert chosen in {address.port for address in listeners}
    assert {address.ip for address in listeners} <= {"127.0.0.1", "::1"}


def test_other_users_cannot_look_into_a_job(platform: LocalPlatform, tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "drill" / "attempts" / "1"
    job_id = platform.submit(plain(platform, directory, "print('secret')"))
    end_of(platform, job_id)
    assert directory.stat().st_mode & 0o077 == 0


@needs_another_user
def test_of_another_users_job_is_said_that_it_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_temporary(monkeypatch) as shared:
        theirs = shared / "runs" / "drill"
        assert as_nobody('mkdir -p "$1" && chmod 700 "$1" && mkdir "$1/1"', theirs)
        # A child that gives up root's right to look everywhere, when it has read what it needs.
        look = f"""import os
from launcher.platforms.local.platform import LocalPlatform
platform = LocalPlatform()
os.setuid(1)
platform.status({str(theirs / "1")!r})
"""
        told = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
        assert "UserError" in told.stderr
        assert f"{theirs / '1'}: Permission denied" in told.stderr
