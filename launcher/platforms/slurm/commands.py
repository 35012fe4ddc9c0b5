"""Slurm by its commands, which every cluster has. One look at the queue serves all jobs that are followed here."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache

from launcher.errors import NotInstalled, PlatformRefused, PlatformUnreachable
from launcher.platforms.slurm.render import tasks_of
from launcher.platforms.slurm.shell import NO_COMMAND, Answer, Shell, open_shell
from launcher.platforms.slurm.states import SQUEUE_FORMAT, QueuedJob, queued
from litgpt_demo.errors import words_of

SECONDS = ("env", "SLURM_TIME_FORMAT=%s")
"""Times as seconds since the epoch: the cluster may be in another time zone."""

EVERYWHERE = "--all"
"""The option of squeue, sinfo and scontrol for partitions with Hidden=YES too. Nobody but root is shown anything of
them without it, not even the own jobs: https://slurm.schedmd.com/squeue.html#OPT_all and sinfo.html#OPT_all there."""

# With --export=NONE, which is what the script itself asks for, Slurm runs the user's login profile on the node before
# each job, and puts the job on hold where that takes too long (slurm.conf, GetEnvTimeout; "user env retrieval failed").
# So sbatch is given a clean environment, and hands on all of it.
_CLEAN = (
    'exec env -i HOME="$HOME" USER="$USER" LOGNAME="$LOGNAME" PATH="$PATH" LANG=C.UTF-8 '
    '${SLURM_CONF:+"SLURM_CONF=$SLURM_CONF"} sbatch --parsable --export=ALL "$@"'
)

# What Slurm's commands say when the controller has not answered, so that nobody knows what came of it: slurm_errno.h's
# texts, of 20.02 to 24.05 (https://github.com/SchedMD/slurm/blob/master/src/common/slurm_errno.c). All else is a no.
_UNHEARD = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|Unexpected message received"
    r"|Connection (?:refused|reset|timed out)|Transport endpoint|[Mm]unge|Protocol authentication|standby mode"
    r"|temporarily un(?:able|available)|Error connecting|Insane message length|Can't find an address"
    r"|configuration source",
)


class Slurm:
    """The cluster that a machine's commands speak to."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self._lock = threading.Lock()
        self._asked = -float("inf")
        self._jobs: list[QueuedJob] | PlatformUnreachable = []
        self._tasks: dict[str, dict[str, str]] = {}

    # --- the queue ----------------------------------------------------------------------------------------------------

    def jobs(self, *, age: float = 0.0) -> list[QueuedJob]:
        """Return this user's jobs that the controller knows: those that live, and for some minutes those that ended.

        Args:
            age: seconds that an earlier answer may have; jobs that are looked at side by side share one.

        Raises:
            PlatformUnreachable: no answer.
            NotInstalled: there is no squeue.
        """
        since = time.monotonic() - age
        with self._lock:
            if self._asked < since:
                self._asked = time.monotonic()
                self._jobs = self._look()
            if isinstance(self._jobs, PlatformUnreachable):
                raise PlatformUnreachable(str(self._jobs))
            return self._jobs

    def _look(self) -> list[QueuedJob] | PlatformUnreachable:
        try:
            which = ("--me", EVERYWHERE, "--states=all", "--array")
            return queued(self.answer(*SECONDS, "squeue", *which, "--noheader", f"--format={SQUEUE_FORMAT}").out)
        except PlatformRefused as error:
            return PlatformUnreachable(str(error))  # a look cannot be refused for good
        except PlatformUnreachable as error:
            return error

    # --- one job ------------------------------------------------------------------------------------------------------

    def submit(self, script: str) -> str:
        """Return the number of the job that was made of a script.

        Raises:
            PlatformRefused: the answer is no, and none was made.
            PlatformUnreachable: nobody knows whether one was.
        """
        told = self._sbatch(script).out
        number = told.strip().partition(";")[0].rpartition("\n")[2]  # a site's own plug-in may talk before it
        if not number.isdecimal():
            raise PlatformUnreachable(f"sbatch tells no job's number: {words_of(told)!r}; submitting again is safe")
        return number

    def tasks(self, job: QueuedJob) -> dict[str, str]:
        """Return the jobs that an array has as its tasks, by the script that Slurm keeps: `tasks_of`.

        Raises:
            PlatformUnreachable: Slurm does not tell, and this one lives.
        """
        array = job.number.partition("_")[0]
        if array not in self._tasks:
            done = self._run(("scontrol", "write", "batch_script", job.number, "-"))
            if done.code == 0:
                self._tasks[array] = tasks_of(done.out)
            elif job.live:
                raise PlatformUnreachable(f"the script of job {job.number} cannot be read: {words_of(done.err)}")
        return self._tasks.get(array, {})

    def rehearse(self, script: str) -> str:
        """Return what Slurm says of a script that it would take; nothing is submitted.

        Raises:
            PlatformRefused: it would not.
        """
        return self._sbatch(script, "--test-only").err

    def _sbatch(self, script: str, *options: str) -> Answer:
        return self.answer("sh", "-c", _CLEAN, "sbatch", *options, stdin=script.encode())

    def cancel(self, number: str, *options: str) -> None:
        """Ask for the job's end, or with options for a signal; one that has ended is left alone."""
        done = self._run(("scancel", *options, number))
        if done.code != 0 and not re.search(r"[Ii]nvalid job id|already completing|completed", done.err):
            raise PlatformUnreachable(f"job {number} cannot be cancelled: {words_of(done.err)}; cancel it again")

    def restarts(self, number: str) -> int:
        """Return how often Slurm has queued a job again, as far as it knows."""
        return int(self._fields(number).get("Restarts", "0"))

    def last_words(self, number: str) -> str:
        """Return the exit code that Slurm tells of an ended job, as code:signal; empty where it has forgotten it."""
        return self._fields(number).get("ExitCode", "")

    def _fields(self, number: str) -> dict[str, str]:
        done = self._run(("scontrol", "--oneliner", "show", "job", number))
        return dict(re.findall(r"(Restarts|ExitCode)=(\S+)", done.out)) if done.code == 0 else {}

    def accounted(self, number: str) -> tuple[str, float | None, float | None, str] | None:
        """Return state, start, end and nodes of a job that the controller has forgotten, None without accounting."""
        fields = ("-X", "--noheader", "--parsable2", "--duplicates", "--format=State,Start,End,NodeList", "-j", number)
        done = self._run((*SECONDS, "sacct", *fields))
        rows = [line.split("|") for line in done.out.splitlines() if line.count("|") == 3] if done.code == 0 else []
        if not rows:
            return None
        state, start, end, nodes = rows[-1]  # of a job that was queued again, its last life
        return state, _whole(start), _whole(end), nodes

    def out_of_service(self, nodes: Sequence[str]) -> set[str]:
        """Return those of some nodes that Slurm has lost or taken out of service."""
        if not nodes:
            return set()
        which = ("--Node", EVERYWHERE, f"--nodes={','.join(nodes)}")
        done = self._run(("sinfo", *which, "--noheader", "--format=%N %T"))
        bad = re.compile(r"down|fail|drain|unk|boot|power|\*")
        return {line.split(" ")[0] for line in done.out.splitlines() if bad.search(line.partition(" ")[2])}

    # --- any command --------------------------------------------------------------------------------------------------

    def answer(self, *command: str, stdin: bytes = b"") -> Answer:
        """Return the answer of a command that succeeded.

        Raises:
            NotInstalled: there is no such program.
            PlatformRefused: the answer is no.
            PlatformUnreachable: no answer, or it did not reach the controller.
        """
        done = self._run(command, stdin)
        if done.code == 0:
            return done
        words = words_of(
            " ".join(re.sub(r"(?m)^\w+: (?:error: )?", "", done.err or done.out).strip().splitlines()[-3:])
        )
        kind = PlatformUnreachable if _UNHEARD.search(words) else PlatformRefused
        raise kind(f"{_program(command)} on {self.shell.where}: {words or f'exit code {done.code}'}")

    def _run(self, command: Sequence[str], stdin: bytes = b"") -> Answer:
        done = self.shell.run(command, stdin=stdin)
        if done.code == NO_COMMAND:
            raise NotInstalled(
                f"there is no {_program(command)} on {self.shell.where}; run this on a login node of the "
                "cluster, or name one that ssh reaches in platform.host"
            )
        return done


def _program(command: Sequence[str]) -> str:
    """The name of Slurm's own program in a command."""
    return next(word for word in command if re.fullmatch(r"s[a-z]{4,}", word))


def _whole(text: str) -> float | None:
    return float(text) if text.isdecimal() else None


@cache
def slurm_of(host: str | None) -> Slurm:
    """Return the cluster of a login node, or of this machine: one for all platforms that are opened on it."""
    return Slurm(open_shell(host))


def until(done: Callable[[], bool], *, seconds: float, pause: float = 0.5) -> bool:
    """Return True when `done` says so, False if it does not in time."""
    give_up = time.monotonic() + seconds
    while not done():
        if time.monotonic() > give_up:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 5.0)
    return True
