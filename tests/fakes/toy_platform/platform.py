"""The toy platform: a job is a folder, and its nodes are processes that a shell starts and writes the end of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from launcher.errors import PlatformUnreachable
from launcher.job import Job, JobId, JobState, JobStatus, LogLine, LogPage, Submission
from launcher.platforms.base import Avoidable, Capability
from litgpt_demo.findings import Finding
from litgpt_demo.node.agent import kill_tagged, tagged

MARK = "TOY_JOB"
"""The variable with the job's id, in the environment of every process of the job."""
SUBMITTED, CANCELLED = "submitted.json", "cancelled"
_GRACE = 2


class ToyPlatform:
    """Runs the nodes of a job as processes. A job's id is its directory."""

    name: ClassVar[str] = "toy"
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    poll_seconds: ClassVar[float] = 0.5

    def render(self, job: Job) -> Submission:
        directory = str(Path(job.directory).absolute())
        master = f"127.0.0.1:{20_000 + zlib.crc32(job.attempt_name.encode()) % 10_000}"
        commands = [
            job.node_command(node_rank=str(node), master=master, directory=directory, grace=_GRACE)
            for node in range(job.nodes)
        ]
        env = {MARK: directory, "GLOO_SOCKET_IFNAME": "lo", **job.env}
        return Submission(platform=self.name, job_id=JobId(directory), body={"commands": commands, "env": env})

    def check(self, submission: Submission) -> Iterator[Finding]:
        shells = len(submission.body["commands"])
        yield Finding("info", "toy.shells", f"{shells} shells of this machine play the nodes")

    def avoidable(self, job: Job) -> Avoidable:
        return Avoidable(0, "the shells are of this machine")

    def check_access(self) -> str:
        return "a shell is always there"

    def submit(self, submission: Submission) -> JobId:
        directory = Path(submission.job_id)
        if (directory / SUBMITTED).exists():
            return submission.job_id
        directory.mkdir(parents=True, exist_ok=True)
        (directory / SUBMITTED).write_text(json.dumps(submission.body))
        for node, command in enumerate(submission.body["commands"]):
            with (directory / f"node-{node}.log").open("wb") as log:
                subprocess.Popen(
                    ["sh", "-c", f'"$@"; echo $? > {directory}/ended-{node}', "sh", sys.executable, *command],
                    env={**os.environ, **submission.body["env"]},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        return submission.job_id

    def gave(self, job_id: JobId, *, attempt_name: str, directory: str) -> bool:
        return Path(job_id) == Path(directory).absolute()

    def status(self, job_id: JobId) -> JobStatus:
        directory = Path(job_id)
        if not (directory / SUBMITTED).exists():
            return JobStatus(state=JobState.ABSENT, native="no such folder")
        if (directory / CANCELLED).exists():
            return JobStatus(state=JobState.CANCELLED, native="cancelled")
        alive = bool(tagged(MARK, job_id))
        codes = {
            node: int(text)
            for node in range(len(_nodes(directory)))
            if (text := _text(directory / f"ended-{node}").strip())
        }
        bad = {node: code for node, code in codes.items() if code}
        if bad:
            kill_tagged(MARK, job_id, grace=_GRACE)
            return JobStatus(state=JobState.FAILED, native=f"ended with {bad}", exit_codes=codes)
        if alive:
            return JobStatus(state=JobState.RUNNING, native="shells run", exit_codes=codes)
        state = JobState.SUCCEEDED if len(codes) == len(_nodes(directory)) else JobState.FAILED
        return JobStatus(state=state, native="no shell is left", exit_codes=codes)

    def logs(self, job_id: JobId, position: str = "") -> LogPage:
        directory, lines = Path(job_id), []
        offsets = dict(enumerate(json.loads(position or "[]")))
        for node in range(len(_nodes(directory))):
            whole, newline, _ = _text(directory / f"node-{node}.log")[offsets.get(node, 0) :].rpartition("\n")
            offsets[node] = offsets.get(node, 0) + len(whole) + len(newline)
            lines += [LogLine(node, text) for text in whole.split("\n") if whole]
        return LogPage(tuple(lines), json.dumps(list(offsets.values())))

    def cancel(self, job_id: JobId) -> None:
        if self.status(job_id).state.live:
            (Path(job_id) / CANCELLED).touch()
        if left := kill_tagged(MARK, job_id, grace=_GRACE):
            raise PlatformUnreachable(f"job {job_id} is not gone: {len(left)} processes do not end; cancel it again")

    def left(self, job_id: JobId) -> tuple[str, ...]:
        return tuple(f"process {process.pid}" for process in tagged(MARK, job_id))


def _nodes(directory: Path) -> list[list[str]]:
    commands: list[list[str]] = json.loads(_text(directory / SUBMITTED) or "{}").get("commands", [])
    return commands


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
