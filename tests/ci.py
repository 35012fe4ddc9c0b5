"""Runs the last commit's `.ci/run` in a fresh clone, with the time of each part and the sizes against the ratchet.

make ci
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from test_size import ALLOWED, lines

CHECKOUT = Path(__file__).parents[1]


def main() -> int:
    """Clone and run; the exit code is that of `.ci/run`."""
    if subprocess.run(["git", "status", "--porcelain"], cwd=CHECKOUT, capture_output=True, check=True).stdout:
        print("not committed, so not in the clone: git status")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ci-") as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(CHECKOUT), str(clone)], check=True)
        code = subprocess.run(
            ["bash", ".ci/run"], cwd=clone, env={**os.environ, "CI": "true"}, stdin=subprocess.DEVNULL
        ).returncode
        for name, allowed in ALLOWED.items():
            print(f"{name:<32} {lines(name, clone):>7,} lines of {allowed:,}")
    load = os.getloadavg()[2]
    print(f".ci/run ended with {code} after {(time.monotonic() - begun) / 60:.1f} min; load of 15 min {load:.1f}")
    return code


if __name__ == "__main__":
    sys.exit(main())
