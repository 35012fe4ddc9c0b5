from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from console_script import Cli
from waiting import until

from launcher.config import ScriptConfig
from launcher.platforms.base import BY_HAND
from launcher.platforms.local.supervisor import JOB_TAG
from launcher.runs.attempts import Claim, claim_of
from litgpt_demo.errors import EXIT_CODES, Fault
from litgpt_demo.node.agent import tagged


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Claim]:
    """A job whose two nodes only wait."""
    (tmp_path / "hello.py").write_text("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    config = ScriptConfig.model_validate({
        "name": "hand", "root": str(tmp_path / "out"), "script": str(tmp_path / "hello.py"),
        "platform": {"kind": "local", "nodes": 2, "interactive": True},
    })  # fmt: skip
    claim = claim_of(config)
    job_id = claim.platform.submit(claim.platform.render(claim.make_job(claim.take().attempt)))
    until(lambda: claim.platform.status(job_id).state.live)
    yield claim
    claim.platform.cancel(job_id)


def entered(tmp_path: Path, node: int, typed: str) -> subprocess.CompletedProcess[str]:
    """What comes of typing into a shell of a node."""
    words = [sys.executable, "-m", "cli", "shell", "hand", str(node), "--root", str(tmp_path / "out")]
    return subprocess.run(words, input=typed, env={**os.environ, "SHELL": "/bin/sh"}, capture_output=True, text=True)


@pytest.mark.long
def test_a_shell_in_a_node_has_its_environment_and_ends_with_its_own_code(waiting: Claim, tmp_path: Path) -> None:
    done = entered(tmp_path, 1, f'pwd\necho "$OMP_NUM_THREADS"\necho "${BY_HAND}"\nexit 3\n')
    assert done.returncode == 3, done.stderr
    folder, threads, command = done.stdout.splitlines()
    assert (folder, threads) == (str(Path.cwd()), str(max(1, len(os.sched_getaffinity(0)) // 2)))
    assert "--node-rank 1" in command
    assert str(tmp_path / "hello.py") in command


def test_a_node_that_is_not_there_is_not_entered(waiting: Claim, tmp_path: Path, cli: Cli) -> None:
    said = cli("shell", "hand", "2", "--root", str(tmp_path / "out"))
    assert (said.code, "has no node 2; there are 0, 1" in said.err) == (EXIT_CODES[Fault.USER], True)


def test_a_cancelled_job_is_not_entered_and_its_log_says_why(waiting: Claim, tmp_path: Path, cli: Cli) -> None:
    root = str(tmp_path / "out")
    (record,) = waiting.attempts.records()
    (Path(record.job_id) / "node-0.log").write_text("out of patience\n")
    assert cli("cancel", "hand", "--root", root).code == 0
    said = cli("shell", "hand", "--root", root)
    assert said.code == EXIT_CODES[Fault.USER]
    assert "out of patience" in said.out
    assert "attempt 1 is 'cancelled'" in said.err


@pytest.mark.long
@pytest.mark.training
def test_the_command_that_waits_in_each_node_makes_one_job_and_cancelling_ends_it(
    waiting: Claim, tmp_path: Path, cli: Cli
) -> None:
    words = [sys.executable, "-m", "cli", "shell", "hand", "1", "--root", str(tmp_path / "out")]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, env={**os.environ, "SHELL": "/bin/sh"}, text=True)
    assert other.stdin is not None
    other.stdin.write(f'eval "${BY_HAND}"\n')
    other.stdin.close()
    done = entered(tmp_path, 0, f'eval "${BY_HAND}"\n')
    assert (done.returncode, other.wait(180)) == (0, 0), done.stderr
    assert "rank 0 of 2" in done.stdout
    assert cli("cancel", "hand", "--root", str(tmp_path / "out")).code == 0
    (record,) = waiting.attempts.records()
    assert list(tagged(JOB_TAG, record.job_id)) == []
