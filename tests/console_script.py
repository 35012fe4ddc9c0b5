"""The console script `train-litgpt`, called in the test's own process."""

import os
import sys
from dataclasses import dataclass
from unittest.mock import patch

import pytest

import cli.main


@dataclass(frozen=True)
class Said:
    """The answer to a call of the console script."""

    code: int
    out: str
    err: str


class Cli:
    """Call it with the words that follow its name."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch, self._console = capsys, monkeypatch, cli.main.console

    def __call__(self, *arguments: str) -> Said:
        self._monkeypatch.setattr(sys, "argv", ["train-litgpt", *arguments])
        self._monkeypatch.setattr("cli.main.console", self._console)  # --json takes another one
        # The command line sets variables for the processes that it starts; here other tests would have them too.
        with patch.dict(os.environ), pytest.raises(SystemExit) as end:
            cli.main.main()
        code = end.value.code
        captured = self._capsys.readouterr()
        assert "Traceback" not in captured.err
        return Said(int(code or 0), captured.out, captured.err)
