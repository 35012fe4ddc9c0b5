"""Run the tests of one topic (a folder beside this file), and write down the commit at which they last passed.

python tests/real/seen.py docker [options of pytest]
"""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

SEEN = Path(__file__).with_name("SEEN.md")
HEAD = """# What was last seen to pass

`make test-TOPIC` writes its line here when it passes. A topic that is old, or is not here, has not been seen since.

| topic | commit | when (UTC) | tests | minutes |
|---|---|---|---|---|
"""
OPTIONS = ("-q", "-rs", "-p", "no:kmock", "--strict-markers", "--strict-config", "-n", "0", "--durations=10")


class _Counted:
    """A plug-in that counts what passed and what did not run."""

    passed = skipped = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        self.skipped += report.skipped


def main(topic: str, *options: str) -> int:
    """Run them; the exit code is pytest's."""
    begun, counted = time.time(), _Counted()
    folder = Path(__file__).parent / topic
    code = pytest.main(["-o", "addopts=", *OPTIONS, str(folder), *options], plugins=[counted])
    if code == 0 and counted.passed and not options:
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
        rest = f", {counted.skipped} skipped" if counted.skipped else ""
        cells = (
            topic, commit.stdout.strip(), f"{datetime.now(UTC):%Y-%m-%d %H:%M}", f"{counted.passed}{rest}",
            f"{(time.time() - begun) / 60:.1f}",
        )  # fmt: skip
        _write(topic, f"| {' | '.join(cells)} |")
    return int(code)


def _write(topic: str, row: str) -> None:
    rows = SEEN.read_text().splitlines() if SEEN.exists() else HEAD.splitlines()
    kept = [line for line in rows if not line.startswith(f"| {topic} |")]
    table = kept.index("|---|---|---|---|---|") + 1
    SEEN.write_text("\n".join([*kept[:table], *sorted([*kept[table:], row])]) + "\n")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
