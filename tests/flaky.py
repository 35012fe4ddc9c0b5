"""Is a test ever red without a fault? The suite ten times in a row, five of them beside six busy loops.

make test-flaky
"""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
ROUNDS, LOOPS = 10, 6


def main() -> int:
    """Print a row a round; the exit code is 1 if a round was red."""
    red = 0
    print("| round | busy loops | seconds | load | result |\n|---|---|---|---|---|", flush=True)
    for number in range(1, ROUNDS + 1):
        loops = LOOPS if number % 2 == 0 else 0
        with ExitStack() as beside:
            for _ in range(loops):
                busy = beside.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
                beside.callback(busy.kill)
            begun = time.monotonic()
            done = subprocess.run([sys.executable, "-m", "pytest"], cwd=CHECKOUT, capture_output=True, text=True)
            seconds, load = time.monotonic() - begun, os.getloadavg()[0]
        summary = done.stdout.strip().splitlines()[-1]
        print(f"| {number} | {loops} | {seconds:.0f} | {load:.1f} | {summary} |", flush=True)
        if done.returncode != 0:
            red = 1
            print("\n".join(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))))
    return red


if __name__ == "__main__":
    sys.exit(main())
