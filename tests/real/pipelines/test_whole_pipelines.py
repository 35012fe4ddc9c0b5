from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from waiting import until

from flows.run_torchrun import run_torchrun
from launcher.config import CodeSettings
from launcher.errors import ConfigProblem, JobFailed
from launcher.events import Listener, Note
from launcher.platforms.local.settings import LocalPlatformConfig
from launcher.runs.index import Index

pytestmark = [pytest.mark.prefect, pytest.mark.training, pytest.mark.timeout(300)]

CHECKOUT = Path(__file__).parents[2]
TWO = LocalPlatformConfig(kind="local", nodes=1, processes=2)


def ran(script: Path | str, root: Path, *args: str) -> Path:
    """The folder with the job's logs."""
    coroutine = run_torchrun(script=str(script), name="tiny", root=str(root), args=args, platform=TWO)
    return Path(asyncio.run(coroutine))


def test_a_users_script_runs_on_every_rank_and_each_call_is_a_new_attempt(tmp_path: Path) -> None:
    first = ran(CHECKOUT / "examples" / "pi.py", tmp_path, "--steps", "1003")
    assert "3.14159" in (first / "node-0.log").read_text()
    second = ran(CHECKOUT / "examples" / "pi.py", tmp_path, "--steps", "1003")
    assert (first.name, second.name) == ("1", "2")
    assert first.parent == second.parent


@pytest.mark.long
def test_mounted_code_runs_as_it_was_on_two_nodes_and_ships_once(tmp_path: Path) -> None:
    """What is edited while the job runs changes nothing, and a change of one file is another run."""
    mine, told = tmp_path / "mine", list[str]()
    (mine / "lib").mkdir(parents=True)
    (mine / "lib" / "second.py").write_text("WORD = 'as it was'")
    (mine / "train.py").write_text(
        "import pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.05)\n"
        "from lib import second\n"
        "import torch.distributed as world\n"
        "world.init_process_group('gloo')\n"
        "print(f'rank {world.get_rank()} of {world.get_world_size()} reads {second.WORD}')\n"
    )

    def run() -> Path:
        config = {
            "script": "train.py", "args": (str(tmp_path / "up"), str(tmp_path / "go")), "root": str(tmp_path / "out"),
            "code": CodeSettings(mount=str(mine)),
            "platform": LocalPlatformConfig(kind="local", nodes=2, processes=1),
        }  # fmt: skip
        with Listener(lambda event: told.append(event.what) if isinstance(event, Note) else None):
            return Path(asyncio.run(run_torchrun(**config)))

    def edit() -> None:
        until((tmp_path / "up").exists, seconds=120)
        (mine / "lib" / "second.py").write_text("WORD = 'edited'")
        (tmp_path / "go").touch()

    editor = threading.Thread(target=edit, daemon=True)
    editor.start()
    first = run()
    editor.join()
    said = [(first / f"node-{number}.log").read_text() for number in (0, 1)]
    assert [f"rank {number} of 2 reads as it was" in text for number, text in enumerate(said)] == [True, True]
    edited = run()
    assert "reads edited" in (edited / "node-0.log").read_text()
    assert edited.parent != first.parent
    again = run()
    assert (again.parent, again.name) == (edited.parent, "2")
    assert [note.endswith("(there already)") for note in told if note.startswith("code: ")] == [False, False, True]
    assert len(list((tmp_path / "out" / "code").iterdir())) == 2


@pytest.mark.long
def test_a_resumed_flow_run_goes_on_with_the_code_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its orchestrator was killed, and before it came back somebody saved a file."""
    (mine := tmp_path / "mine").mkdir()
    (mine / "train.py").write_text("print('as it was')")

    def run() -> Path:
        code = CodeSettings(mount=str(mine))
        return Path(asyncio.run(run_torchrun(script="train.py", code=code, root=str(tmp_path / "out"), platform=TWO)))

    first = run()
    (started,) = Index.of(str(tmp_path / "out")).newest()
    (mine / "train.py").unlink()
    # Prefect gives a resumed flow run its former id.
    monkeypatch.setattr("flows.run_torchrun.flow_runs", lambda: [started.flow_run])
    again = run()
    assert (again.parent, again.name) == (first.parent, "2")
    assert "as it was" in (again / "node-0.log").read_text()


def test_a_script_that_fails_ends_the_run_as_its_own_error(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise RuntimeError('the weights are on fire')")
    with pytest.raises(JobFailed, match="the weights are on fire"):
        ran(script, tmp_path)


def test_a_script_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigProblem, match=r"script\.missing"):
        ran(tmp_path / "no.py", tmp_path)
    assert not list(tmp_path.iterdir())
