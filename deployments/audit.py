"""Compare pinned packages with the vulnerabilities that are known of them.

python deployments/audit.py FILE… OPTION…    files of exact pins, then what pip-audit is to be told besides

pip-audit asks osv.dev.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile

# The end of pip-audit's traceback where osv.dev does not answer: requests' classes for it.
_UNREACHABLE = re.compile(r"requests\.exceptions\.(ConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError)\b.*")


def main(argv: Sequence[str]) -> int:
    """Print what pip-audit finds in each file and return the worst exit code; 0 where it cannot ask, and say so."""
    files = list(takewhile(lambda word: not word.startswith("-"), argv))
    return max(_audit(file, argv[len(files) :]) for file in files)


def _audit(pins: str, options: Sequence[str]) -> int:
    """Audit one file: pip-audit takes none without hashes beside one that has them."""
    asked = ["--requirement", pins, "--no-deps", "--disable-pip", "--progress-spinner", "off", *options]
    command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", "osv", *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and (why := _UNREACHABLE.search(done.stderr)):
        print(f"NOT AUDITED: the packages of {pins} were not looked up, for osv.dev did not answer ({why[0][:200]}).")
        print("Run `make audit` where it can.")
        return 0
    print(done.stdout + done.stderr, end="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
