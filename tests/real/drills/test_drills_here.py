"""Drills with the job on this machine: its processes, checkpoints, disk, orchestrators and server fail."""

import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from another_user import needs_another_user
from drill_ground import AGENT, KILLED, MARK, RANK, Ground, Scene, Sight, live, printed, recorded, step, trained

from litgpt_demo.errors import EXIT_CODES, FailureClass
from litgpt_demo.node.agent import processes_with_env
from litgpt_demo.training.checkpoints import folder_of, list_complete

SUPERVISOR = "-m launcher.platforms.local.supervisor"
AGAIN = "attempt 1 ended: .*node fault"


@pytest.mark.parametrize(
    ("marker", "number", "pattern"),
    [
        (RANK, signal.SIGKILL, AGAIN),
        (AGENT, signal.SIGKILL, AGAIN),
        (SUPERVISOR, signal.SIGKILL, AGAIN),
        (AGENT, signal.SIGTERM, "attempt 1 ended: .*preempted"),
    ],
    ids=["rank", "agent", "supervisor", "preemption"],
)
def test_next_attempt_loses_no_step_when_a_process_dies(scene: Scene, marker: str, number: int, pattern: str) -> None:
    """Or is preempted."""
    command = scene.run()
    scene.until(step(20))
    scene.kill(marker, number)
    assert scene.end_of(command) == 0
    scene.require_promises(pattern, attempts=(2,))


def test_after_a_power_cut_the_same_command_goes_on(scene: Scene) -> None:
    command = scene.run()
    scene.until(step(20))
    for _ in range(3):  # one may start another meanwhile
        for process in processes_with_env(MARK, scene.config.name):
            process.kill()
    assert scene.end_of(command) == KILLED
    assert scene.end_of(scene.run()) == 0
    scene.require_promises(attempts=(2,))


def test_a_spoilt_checkpoint_is_passed_over(scene: Scene) -> None:
    command = scene.run()
    scene.until(step(20))
    newest = list_complete(scene.storage)[0]
    largest = max(newest.files, key=lambda record: record.size)
    path = f"{folder_of(newest.step)}/{largest.path}"
    content = bytearray(scene.storage.read(path))
    content[len(content) // 2] ^= 0xFF
    scene.storage.write(path, bytes(content))
    scene.kill(RANK)
    assert scene.end_of(command) == 0
    scene.require_promises(AGAIN, attempts=(2,))


@needs_another_user  # root, who may mount
def test_same_command_continues_once_a_full_disk_has_room(drills: Ground, tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "tmpfs", tmp_path], check=True)
    try:
        with drills.scene(root=str(tmp_path)) as scene:
            command = scene.run()
            scene.until(step(20))
            with suppress(OSError):
                (tmp_path / "ballast").write_bytes(bytes(1 << 25))
            assert scene.end_of(command) == EXIT_CODES[FailureClass.DISK_FULL]
            (tmp_path / "ballast").unlink()
            assert scene.end_of(scene.run()) == 0
            scene.require_promises("disk full", attempts=(2,))
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


@pytest.mark.parametrize(
    "moment",
    [printed("✓ 1/5"), recorded, live, step(20), trained],
    ids=["before it submits", "while it submits", "after it has", "while it tails", "while it collects"],
)
def test_same_command_reattaches_when_the_first_was_killed(scene: Scene, moment: Sight) -> None:
    """The first orchestrator was killed."""
    command = scene.run()
    scene.until(moment)
    command.kill()
    assert scene.end_of(command) == KILLED
    assert scene.end_of(scene.run()) == 0
    scene.require_promises()


def test_follower_continues_when_the_leader_dies(scene: Scene) -> None:
    """Only the leader starts the job."""
    first, second = scene.run(), scene.run()
    scene.until(step(20))
    scene.until(printed("reattached|follows"))
    [holder] = [command for command, log in scene.logs.items() if "submitted" in log.read_text()]
    holder.kill()
    scene.kill(RANK)
    assert sorted([scene.end_of(first), scene.end_of(second)]) == [KILLED, 0]
    scene.require_promises(AGAIN, attempts=(2,))
    assert len(re.findall("submitted .*-1-\\w+ on local", scene.text)) == 1


def test_prefects_server_is_away_for_a_minute(drills: Ground, scene: Scene) -> None:
    command = scene.run()
    scene.until(step(20))
    drills.kill_server()
    scene.pause(60)
    drills.start_server()
    assert scene.end_of(command) == 0
    scene.require_promises()
