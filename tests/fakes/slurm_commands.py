"""Slurm's commands in memory: several users, a queue, accounts if the site keeps them. Others are refused.

The words and their order are those of Slurm 22.05. The daemons themselves are in tests/real/slurm.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest


@dataclass
class _Job:
    number: int
    name: str
    comment: str
    user: str
    state: str = "RUNNING"
    reason: str = "None"
    saving: int = 0
    """Looks at the queue until its nodes have saved and left, once they were asked to; 0 before."""


@dataclass
class SlurmCommands:
    """A cluster. A test decides who calls, and what becomes of jobs."""

    user: str = "alice"
    """The Unix user who calls the commands."""
    hides_jobs: bool = False
    """The site's PrivateData=jobs: users see their own jobs alone."""
    keeps_accounts: bool = False
    jobs: dict[int, _Job] = field(default_factory=dict)
    """The queue."""
    accounts: list[_Job] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    first_number: int = 77
    answer: tuple[int, str] | None = None
    """What sbatch answers when it has made a job, in place of the job's number."""
    fate: dict[str, str] = field(default_factory=dict)
    """What becomes of each new job at once."""

    def live(self) -> list[_Job]:
        return [job for job in self.jobs.values() if job.state in {"PENDING", "RUNNING"}]

    def forget(self, number: int) -> None:
        """Let the controller forget a job that ended, as it does after MinJobAge."""
        del self.jobs[number]

    def run(self, command: list[str], *, input: str = "", **_: Any) -> subprocess.CompletedProcess[str]:
        command = command[4:]  # behind sh, which takes variables away
        self.calls.append(command)
        code, text = getattr(self, f"_{command[0]}")(command[1:], input)
        return subprocess.CompletedProcess(command, code, "" if code else text, text if code else "")

    def _id(self, arguments: list[str], _: str) -> tuple[int, str]:
        assert arguments == ["-un"]
        return 0, f"{self.user}\n"

    def _sinfo(self, arguments: list[str], _: str) -> tuple[int, str]:
        return 0, "slurm 22.05.8\n" if arguments == ["--version"] else "main* up infinite 2 (null)\n"

    def _scontrol(self, arguments: list[str], _: str) -> tuple[int, str]:
        assert arguments == ["show", "config"]
        return 0, "Configuration data as of 2026-11-28T11:03:48\nClusterName             = cluster\n"

    def _sbatch(self, arguments: list[str], script: str) -> tuple[int, str]:
        if arguments == ["--test-only"]:
            return 0, ""
        assert arguments == ["--parsable"]
        options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.MULTILINE))
        number = max([self.first_number - 1, *self.jobs, *(job.number for job in self.accounts)]) + 1
        comment = " ".join(shlex.split(options["comment"]))
        self.jobs[number] = job = _Job(number, options["job-name"], comment, self.user)
        vars(job).update(self.fate)
        self.accounts.append(job)
        return self.answer or (0, f"{number}\n")

    def _squeue(self, arguments: list[str], _: str) -> tuple[int, str]:
        assert arguments[:3] == ["-h", "-t", "all"]
        assert arguments[-2:] == ["-o", "%i|%T|%r|%S|%N|%u|%j|%k"]
        rows = self._seen(self.jobs.values())
        for job in rows:
            job.saving -= job.saving > 0
            job.state = "FAILED" if job.saving == 1 and job.state == "RUNNING" else job.state
        for argument in arguments[3:-2]:
            flag, value = argument.split("=")
            rows = [job for job in rows if value == {"--name": job.name, "--jobs": str(job.number)}[flag]]
            if flag == "--jobs" and not rows:
                return 1, "slurm_load_jobs error: Invalid job id specified"
        start = "2026-11-28T11:03:48"
        return 0, "".join(f"{job.number}|{job.state}|{job.reason}|{start}|n0,n1|{job.user}|{job.name}|{job.comment}\n"
                          for job in rows)  # fmt: skip

    def _sacct(self, arguments: list[str], _: str) -> tuple[int, str]:
        if not self.keeps_accounts:
            return 1, "Slurm accounting storage is disabled"
        assert arguments[:4] == ["-n", "-X", "-P", "-a"]
        assert arguments[-2:] == ["-o", "JobIDRaw,State,Start,NodeList,User,JobName,Comment"]
        names = [argument.removeprefix("--name=") for argument in arguments if argument.startswith("--name=")]
        numbers = [int(argument.removeprefix("--jobs=")) for argument in arguments if argument.startswith("--jobs=")]
        rows = [job for job in self._seen(self.accounts) if job.name in names or job.number in numbers]
        return 0, "".join(
            f"{job.number}|{job.state}|2026-11-28T11:03:48|n[0-1]|{job.user}|{job.name}|\n" for job in rows
        )

    def _scancel(self, arguments: list[str], _: str) -> tuple[int, str]:
        job = self.jobs.get(int(arguments[-1]))
        if job is None:
            return 1, f"scancel: error: Kill job error on job id {arguments[-1]}: Invalid job id specified"
        if job.user != self.user:
            return 210, f"scancel: error: Kill job error on job id {job.number}: Access/permission denied"
        if "--signal=TERM" in arguments:
            job.saving = 3
        else:
            job.state = "CANCELLED"
        return 0, ""

    def _seen(self, jobs: Any) -> list[_Job]:
        return [job for job in jobs if job.user == self.user or not self.hides_jobs]


@contextmanager
def slurm_commands(**about: Any) -> Iterator[SlurmCommands]:
    """Put a cluster's commands in place of this machine's."""
    slurm = SlurmCommands(**about)
    with pytest.MonkeyPatch.context() as patch:
        commands = SimpleNamespace(run=slurm.run, TimeoutExpired=subprocess.TimeoutExpired)
        patch.setattr("launcher.platforms.slurm.platform.subprocess", commands)
        patch.setattr("launcher.platforms.slurm.platform.shutil", SimpleNamespace(which=lambda name: name))
        yield slurm
