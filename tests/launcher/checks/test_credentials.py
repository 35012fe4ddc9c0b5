from __future__ import annotations

from pathlib import Path

import pytest

from launcher.checks.access import check_access
from launcher.config import RunConfig, ScriptConfig
from launcher.errors import LoginProblem


@pytest.mark.parametrize("root", ["there", "not/yet/there"])
def test_access_is_proved_by_a_write_that_leaves_nothing(tmp_path: Path, root: str) -> None:
    (tmp_path / "there").mkdir()
    place = tmp_path / root
    assert check_access(RunConfig(root=str(place))) == f"{place} can be written, this machine runs the nodes"
    assert list(place.iterdir()) == []


def test_what_lies_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "config.json").write_text("{}")
    check_access(ScriptConfig(root=str(tmp_path), script="pi.py"))
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["runs", "runs/config.json"]


def test_a_root_that_cannot_be_written_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    root = f"{tmp_path}/file/out"
    with pytest.raises(LoginProblem, match=f"root={root} cannot be written: .+"):
        check_access(RunConfig(root=root))
