from __future__ import annotations

import sys
from pathlib import Path

import pytest
from echoing_server import echoing_server

from launcher.checks.doctor import examine_environment


def severities(root: Path) -> dict[str, str]:
    return {one.code: one.severity for one in examine_environment(str(root))}


def test_doctor_tells_what_is_there_and_a_fix_of_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    found = {one.code: one for one in examine_environment(str(tmp_path))}
    assert found["python.version"].what == "Python " + ".".join(map(str, sys.version_info[:3]))
    assert found["package.torch"].what.startswith("torch ")
    assert {"machine.memory", "machine.cores", "machine.gpus", "network.loopback", "tool.git"} <= set(found)
    assert all(one.fix for one in found.values() if one.severity != "info")
    (tmp_path / "file").touch()
    assert severities(tmp_path / "file")["root.not-a-folder"] == "error"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert severities(tmp_path)["tool.git"] == "warning"
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: "0rc1")
        assert severities(tmp_path)["package.torch"] == "warning"
    monkeypatch.setattr(sys, "path", [])
    assert severities(tmp_path)["package.litgpt"] == "error"


def test_doctor_says_whether_prefects_server_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with echoing_server(status=200) as server:
        monkeypatch.setenv("PREFECT_API_URL", f"{server.address}/api")
        assert severities(tmp_path)["prefect.server"] == "info"
        assert [one.splitlines()[0] for one in server.asked] == ["GET /api/health HTTP/1.1"]
    assert severities(tmp_path)["prefect.server"] == "error"
