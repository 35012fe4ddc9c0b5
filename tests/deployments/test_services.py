"""The words of `make test-services` and what it installs; apt-get is a script here that notes what it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments import services
from deployments.services import Service, main

APT = """#!/bin/sh
echo "$*" >> "{folder}/asked"
test -x "{folder}/policy-rc.d" && ! "{folder}/policy-rc.d" || exit 100
case "$*" in *install*) printf '#!/bin/sh\\n' > "{folder}/oracled"; chmod +x "{folder}/oracled";; esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Debian whose tests need two services, one of which is there."""
    there = Service("Pythia", "of what is", ("pythiad",), ("pythia",))
    missing = Service("Oracle", "of what is to come", ("oracled",), ("oracle", "tripod"))
    for name, text in {"pythiad": "#!/bin/sh\n", "apt-get": APT.format(folder=tmp_path)}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(services, "SERVICES", (there, missing))
    monkeypatch.setattr(services, "_PATH", str(tmp_path))
    monkeypatch.setattr(services, "_POLICY", tmp_path / "policy-rc.d")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    return tmp_path


def test_missing_packages_are_installed_and_start_nothing(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert (machine / "asked").read_text().splitlines() == [
        "-qq update", "-qq install --yes --no-install-recommends oracle tripod",
    ]  # fmt: skip
    assert not (machine / "policy-rc.d").exists()
    assert "✓ Oracle" in capsys.readouterr().out


def test_nothing_is_asked_for_where_all_is_there(machine: Path) -> None:
    assert main() == 0
    (machine / "asked").unlink()
    assert main() == 0
    assert not (machine / "asked").exists()


def test_who_may_not_install_is_told_what_is_needed_and_for_which_tests(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main() == 1
    said = capsys.readouterr().out
    assert "✓ Pythia: of what is\n" in said
    assert "✗ Oracle: no oracled; skipped without: of what is to come" in said
    assert "sudo apt-get install oracle tripod" in said
    assert not (machine / "asked").exists()
