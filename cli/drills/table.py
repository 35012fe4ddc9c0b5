"""The drills, as data: what is injected, at which moment, and what the user has to be told."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psutil

from cli.drills.ground import Command, Scene, Violation, kill
from launcher.job import JobState
from litgpt_demo.errors import EXIT_CODES, Fault
from litgpt_demo.runs import LITGPT
from litgpt_demo.training.checkpoints import committed, folder_of

Sight: TypeAlias = Callable[[Scene], object]
Injection: TypeAlias = Callable[[Scene], None]

KILLED = -signal.SIGKILL
_OUTAGE = 60.0  # seconds
_HOUR = 3600


# --- moments ----------------------------------------------------------------------------------------------------------


def at_step(number: int) -> Sight:
    """Return the sight of a step; in a bucket metrics come with each checkpoint."""
    return lambda scene: scene.furthest >= number


def said(words: str) -> Sight:
    return lambda scene: re.search(words, scene.text)


def claimed(scene: Scene) -> bool:
    """Return whether an attempt is written down; its platform may not have been asked yet."""
    return bool(scene.attempts.records())


def live(scene: Scene) -> bool:
    return scene.attempts.live() is not None


def trained(scene: Scene) -> bool:
    """Return whether the job has ended, and nobody has collected its model."""
    last = scene.attempts.last()
    return last is not None and last.status.state is JobState.SUCCEEDED


def saving(scene: Scene) -> bool:
    """Return whether a checkpoint is being moved to the run, and is not committed."""
    folder = scene.storage.local_path("checkpoints")
    if folder is None or not folder.is_dir():
        return False
    return any(next(one.iterdir(), None) and not (one / "manifest.json").exists() for one in folder.iterdir())


def trains_again(scene: Scene) -> bool:
    """Return whether ranks have begun once more since the fault, and made a step."""
    return len(scene.starts) > scene.lives and (scene.furthest > scene.starts[-1])


def taken_up(scene: Scene) -> bool:
    """Return whether the next command follows the job, or has started it, or found it done."""
    return bool(re.search(r"adopted|submitted|✓ 4/5", scene.commands[-1].text))


# --- faults -----------------------------------------------------------------------------------------------------------


def hit(*words: str, number: int = signal.SIGKILL, rank: bool | None = None) -> Injection:
    """Return what sends a signal to the youngest process with these words."""
    return lambda scene: kill(scene.processes(*words, rank=rank)[-1:], number)


RANK, AGENT = ("litgpt_demo", "train"), ("litgpt_demo", "node")


def hit_all(scene: Scene) -> None:
    """Kill every process of the drill on this machine, as a power cut does."""
    for _ in range(3):  # one may start another meanwhile
        for process in scene.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()


def hit_all_ranks(scene: Scene) -> None:
    kill(scene.processes(*RANK, rank=True))


def hit_orchestrator(number: int = signal.SIGKILL, *, group: bool = False) -> Injection:
    """Return what sends a signal to the command, or as a terminal does to its whole group."""

    def send(scene: Scene) -> None:
        (os.killpg if group else os.kill)(scene.commands[0].process.pid, number)

    return send


def hit_holder_and_rank(scene: Scene) -> None:
    """Kill the orchestrator that started the job, then a rank: the one that follows has to start the next attempt."""
    holders = [command for command in scene.commands if "submitted" in command.text]
    kill([psutil.Process(command.process.pid) for command in holders])
    hit_rank(scene)


hit_rank = hit(*RANK, rank=True)


def spoil_checkpoint(scene: Scene) -> None:
    """Flip bits in the newest checkpoint, then kill a rank: what a disk does that lies about what it has written."""
    newest = committed(scene.storage)[0]
    largest = max(newest.files, key=lambda record: record.size)
    place = f"{folder_of(newest.step)}/{largest.path}"
    content = scene.storage.read(place)
    middle = len(content) // 2
    scene.storage.write(place, content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :])
    # That one is lost, and none but that.
    scene.saved = max((other.step for other in committed(scene.storage) if other.step < newest.step), default=0)
    hit_rank(scene)


def lose_server(scene: Scene) -> None:
    scene.ground.server.kill()
    scene.pause(_OUTAGE)
    scene.ground.server.start()


def set_clock_and_hit(seconds: int) -> Injection:
    """Return what sets the clock of every process on, then kills a rank, so that the next attempt follows a jump."""

    def jump(scene: Scene) -> None:
        with scene.clock.open("wb") as file:
            file.truncate(seconds)  # no byte of it is stored
        scene.pause(1)
        hit_rank(scene)

    return jump


def fill_disk(scene: Scene) -> None:
    """Fill the disk of the run; room is made when the command has ended."""
    folder = Path(scene.config.root)
    ballast = folder / "ballast"
    with ballast.open("wb") as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    scene.end_of(scene.commands[0])
    ballast.unlink()


@contextmanager
def small_disk() -> Iterator[str]:
    """A disk of 24 MB of this machine; yields its folder."""
    with tempfile.TemporaryDirectory(prefix="train-litgpt-disk-") as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "tmpfs", folder]
        subprocess.run(command, check=True, capture_output=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True, capture_output=True)


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Drill:
    """One fault, when it comes, and what is promised beside what every drill has to keep (judging.violations)."""

    name: str
    injected: str
    """The fault in words."""
    when: Sight = lambda scene: scene.commands
    """The moment to inject it."""
    inject: Injection = lambda scene: None
    ends: tuple[int, ...] = (0,)
    """The exit codes of the commands that were there then, in any order."""
    told: tuple[str, ...] = ()
    """Regular expressions: what the commands have to say."""
    again: bool = False
    """True if the user types the same command again."""
    attempts: tuple[int, ...] = (1,)
    """The numbers of attempts that it may take in all."""
    back: Sight = taken_up
    """The sight that shows that the run has recovered."""
    anywhere: bool = False
    """True if it disturbs commands of this machine alone, so that it can be held with a job on any platform."""
    place: Callable[[], AbstractContextManager[str | None]] = nullcontext
    """The root of its run, where that is another."""
    needs: Callable[[], str] = str
    """Returns why it cannot be held on this machine; nothing where it can."""
    own_server: bool = False
    """True if commands start servers of their own instead of using one that is up."""

    def commands(self, scene: Scene) -> list[Command]:
        """Start the commands that are there when the fault comes."""
        return [scene.run() for _ in self.ends]


def _no_mounts() -> str:
    return "" if os.geteuid() == 0 and shutil.which("mount") else "only root may mount a small disk"


def _cancelled(name: str, injected: str, when: Sight) -> Drill:
    return Drill(
        name=name, injected=f"cancel, typed twice, {injected}", when=when, inject=Scene.cancel, again=True,
        ends=(EXIT_CODES[Fault.CANCELLED],), told=("nothing of it is left", "was cancelled"), attempts=(1, 2),
        anywhere=True,
    )  # fmt: skip


def _orchestrator(name: str, injected: str, when: Sight, *, own_server: bool = False) -> Drill:
    return Drill(
        name=name, injected=f"SIGKILL of the orchestrator {injected}", when=when, inject=hit_orchestrator(),
        ends=(KILLED,), again=True, anywhere=True, own_server=own_server,
    )  # fmt: skip


DRILLS = (
    Drill(name="undisturbed", injected="nothing", told=("✓ 5/5",), anywhere=True, back=lambda scene: False),
    # --- processes of the job ---
    Drill(
        name="rank", injected="SIGKILL of a rank", when=at_step(20), inject=hit_rank, attempts=(2,), back=trains_again,
        told=("attempt 1 ended: .*node fault",),
    ),
    Drill(
        name="agent", injected="SIGKILL of a node's agent", when=at_step(20), inject=hit(*AGENT), attempts=(2,),
        back=trains_again, told=("attempt 1 ended: .*node fault",),
    ),
    Drill(
        name="supervisor", injected="SIGKILL of the job's supervisor, whose nodes live on", when=at_step(20),
        inject=hit("-m", "launcher.platforms.local.supervisor"), attempts=(2,), back=trains_again,
        told=("attempt 1 ended: .*node fault",),
    ),
    Drill(
        name="machine", injected="SIGKILL of everything at once, as a power cut does", when=at_step(20), inject=hit_all,
        ends=(KILLED,), again=True, attempts=(2,), back=trains_again,
    ),
    Drill(
        name="preemption", injected="SIGTERM to a node", when=at_step(20), inject=hit(*AGENT, number=signal.SIGTERM),
        attempts=(2,), back=trains_again, told=("attempt 1 ended: .*preempted",),
    ),
    # --- checkpoints and disks ---
    Drill(
        name="torn-checkpoint", injected="SIGKILL of all ranks while a checkpoint is moved to its place", when=saving,
        inject=hit_all_ranks, attempts=(2,), back=trains_again, told=("attempt 1 ended: .*node fault",),
    ),
    Drill(
        name="spoilt-checkpoint", injected="flipped bits in the newest checkpoint, and SIGKILL of a rank",
        when=at_step(20), inject=spoil_checkpoint, attempts=(2,), back=trains_again, told=("attempt 1 ended",),
    ),
    Drill(
        name="disk-full", injected="a full disk under the run, emptied when the command has ended", when=at_step(20),
        inject=fill_disk, ends=(EXIT_CODES[Fault.DISK_FULL],), again=True, attempts=(2,), back=trains_again,
        told=("disk full",), place=small_disk, needs=_no_mounts,
    ),
    # --- the orchestrator ---
    _orchestrator("before-submit", "before it submits", said("✓ 1/5")),
    _orchestrator("while-submitting", "while it submits", claimed),
    _orchestrator("after-submit", "when it has submitted", live),
    _orchestrator("while-tailing", "while it tails the job", at_step(20)),
    _orchestrator("while-collecting", "while it collects", trained),
    _orchestrator("own-server", "that has a server of its own", at_step(20), own_server=True),
    Drill(
        name="terminal", injected="SIGINT to the command's whole group, as a terminal sends it", when=at_step(20),
        inject=hit_orchestrator(signal.SIGINT, group=True), ends=(128 + signal.SIGINT,), again=True, anywhere=True,
        told=("the job goes on as", "take up +", "cancel +"),
    ),
    Drill(
        name="sigterm", injected="SIGTERM to the command, which cancels", when=at_step(20), again=True, anywhere=True,
        inject=hit_orchestrator(signal.SIGTERM), ends=(128 + signal.SIGTERM,), attempts=(2,),
        told=("terminated: .* is cancelled", "nothing of it is left"),
    ),
    Drill(
        name="two-at-once", injected="two orchestrators at once", ends=(0, 0), anywhere=True,
        told=("submitted",), back=lambda scene: len(re.findall("submitted|adopted|follows", scene.text)) > 1,
    ),
    Drill(
        name="holder-dies", injected="two orchestrators; SIGKILL of the one that started the job, and of a rank",
        when=lambda scene: scene.furthest >= 20 and re.search("adopted|follows", scene.text),
        inject=hit_holder_and_rank, ends=(KILLED, 0), attempts=(2,), back=trains_again,
        told=("attempt 1 ended: .*node fault",),
    ),
    # --- cancellation ---
    _cancelled("cancel-submitting", "while it is submitted", claimed),
    _cancelled("cancel-training", "while it trains", at_step(20)),
    Drill(
        name="cancel-collecting", injected="cancel, typed twice, while it collects", when=trained, inject=Scene.cancel,
        told=("nothing was running", "✓ 5/5"), anywhere=True, back=said("✓ 5/5"),
    ),
    # --- what it depends on ---
    Drill(
        name="server", injected="Prefect's server gone for 60 s", when=at_step(20), inject=lose_server, anywhere=True,
        back=said("✓ 4/5"),
    ),
    Drill(
        name="clock", injected="time.time() an hour on in every process, and SIGKILL of a rank", when=at_step(20),
        inject=set_clock_and_hit(_HOUR), attempts=(2,), back=trains_again, told=("attempt 1 ended: .*node fault",),
    ),
)  # fmt: skip


def weights_of(scene: Scene) -> bytes:
    """Return the exported weights.

    Raises:
        Violation: there are none.
    """
    try:
        return scene.storage.read(f"{LITGPT}/lit_model.pth", most=1 << 34)
    except FileNotFoundError as error:
        raise Violation("no model was exported") from error
