"""Run the tests of one topic (a folder beside this file), and write down the commit at which they last passed.

python tests/real/status.py docker [options of pytest]
"""

import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

STATUS = Path(__file__).with_name("STATUS.md")
TABLE = "|---|---|---|---|---|"
OPTIONS = ("-o", "addopts=", "-v", "-rs", "-p", "no:kmock", "--strict-markers", "--strict-config", "-n", "0")


def main(topic: str, *options: str) -> int:
    """Run them; the exit code is pytest's."""
    begun = time.time()
    command = [sys.executable, "-m", "pytest", *OPTIONS, "--durations=10", str(Path(__file__).parent / topic), *options]
    printed = b""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        # Each test as it begins and ends: a run may be cut short.
        for part in iter(partial(os.read, running.stdout.fileno(), 2**16), b""):
            sys.stdout.buffer.write(part)
            sys.stdout.flush()
            printed += part
    lines = printed.decode().splitlines() or [""]
    # The conftest of a folder prints the device in pytest's header, if it matters there.
    device = "".join(f", {line.removeprefix('device: ')}" for line in lines if line.startswith("device: "))
    passed = re.search(r"\b(\d+) passed(, \d+ skipped)?", lines[-1])
    if running.returncode == 0 and not options and passed:
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
        minutes, when = f"{(time.time() - begun) / 60:.1f}", f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
        tests = passed[1] + (passed[2] or "") + device
        head, _, rows = STATUS.read_text().partition(f"{TABLE}\n")
        others = [row for row in rows.splitlines() if not row.startswith(f"| {topic} |")]
        row = f"| {topic} | {commit.stdout.strip()} | {when} | {tests} | {minutes} |"
        STATUS.write_text("\n".join([f"{head}{TABLE}", *sorted([*others, row])]) + "\n")
        subprocess.run([sys.executable, "-m", "docs.reference"], check=True)  # docs/project/status.md has the row too
    return running.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
