"""The ranks of a job on this machine end together if one is killed, and listen only where they must."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
from waiting import until

from launcher.job import Job, JobState
from launcher.platforms.local.platform import LocalPlatform
from launcher.platforms.local.settings import LocalPlatformConfig
from launcher.platforms.local.supervisor import JOB_TAG, SUPERVISOR
from litgpt_demo.node.agent import processes_with_env


def four_ranks(folder: Path, text: str) -> Job:
    """On two nodes."""
    (script := folder / "rank.py").write_text(text)
    program = (str(script), str(folder))
    return Job(name="ranks", attempt=1, nodes=2, processes=2, program=program, directory=str(folder / "a"))


STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], "pid-" + os.environ["RANK"]).write_text(str(os.getpid()))
print("up", flush=True)
time.sleep(600)
"""


def test_after_kill_9_of_a_rank_the_attempt_ends_in_15_seconds(tmp_path: Path) -> None:
    """No other rank lets go by itself."""
    platform = LocalPlatform(LocalPlatformConfig(kind="local", grace_period=2))
    job_id = platform.submit(platform.render(four_ranks(tmp_path, STUBBORN)))
    pids = [tmp_path / f"pid-{rank}" for rank in range(4)]
    until(lambda: sum("up" in line.text for line in platform.logs(job_id).lines) == 4)
    killed = time.time()
    os.kill(int(pids[2].read_text()), signal.SIGKILL)
    until(lambda: not platform.status(job_id).state.is_live)
    seen = platform.status(job_id)
    assert seen.ended - killed < 15, "by the supervisor's own clock; this is the promise"
    assert (seen.state, seen.exit_codes[1]) == (JobState.FAILED, 43)
    first = json.loads((tmp_path / "a" / "node-1.json").read_text())["ranks"][0]
    assert (first["rank"], first["exit_code"], first["secondary"]) == (2, -9, False)
    assert processes_with_env(JOB_TAG, job_id) == []
    assert not any(psutil.pid_exists(int(pid.read_text())) for pid in pids)


MEET = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
both = dist.new_group(backend="gloo")
dist.all_reduce(torch.ones(1), group=both)
Path(sys.argv[1], f"met-{dist.get_rank()}").touch()
while not Path(sys.argv[1], "go").exists():
    time.sleep(0.05)
dist.destroy_process_group()
"""


def test_no_socket_of_a_local_job_is_reachable_from_outside(tmp_path: Path) -> None:
    platform = LocalPlatform(LocalPlatformConfig(kind="local", grace_period=2))
    job_id = platform.submit(platform.render(four_ranks(tmp_path, MEET)))
    until(lambda: len(list(tmp_path.glob("met-*"))) == 4)
    listeners = [
        connection.laddr
        for process in processes_with_env(JOB_TAG, job_id)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    (tmp_path / "go").touch()
    until(lambda: not platform.status(job_id).state.is_live)
    assert platform.status(job_id).state is JobState.SUCCEEDED
    assert json.loads((tmp_path / "a" / SUPERVISOR).read_text())["port"] in {listener.port for listener in listeners}
    assert {listener.ip for listener in listeners} <= {"127.0.0.1", "::1"}
