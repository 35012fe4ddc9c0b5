"""Known vulnerabilities of the pinned packages: `make audit`. Asks OSV, or PyPI where only that is reached."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SERVICES = ("osv", "pypi")
OPTIONS = ("--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "--desc", "off")


def audited(pins: Path) -> list[dict[str, Any]]:
    """Return each package of a file of pins with its vulnerabilities; [] if no service answers."""
    for service in SERVICES:
        command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", service, "--requirement", str(pins)]
        done = subprocess.run([*command, *OPTIONS], capture_output=True, text=True)
        try:
            packages = json.loads(done.stdout)["dependencies"]
        except ValueError:  # pip-audit ends with a traceback where it reaches nobody
            continue
        # A mirror of PyPI without data on vulnerabilities: pip-audit skips all packages, and exits with 0.
        if found := [package for package in packages if "skip_reason" not in package]:
            return found
    return []


def main(files: Iterable[Path]) -> int:
    """Print what is known; the exit code is 1 if a package has a vulnerability, or could not be checked."""
    worst = 0
    for pins in files:
        if not (packages := audited(pins)):
            print(f"{pins}: could not be checked, neither {' nor '.join(SERVICES)} knows its packages here")
            worst = 1
            continue
        bad = [package for package in packages if package["vulns"]]
        print(f"{pins}: {len(packages)} packages checked, {len(bad)} with known vulnerabilities")
        for package in bad:
            for known in package["vulns"]:
                fixed = ", ".join(known["fix_versions"]) or "no version"
                print(f"  {package['name']} {package['version']}: {known['id']}, fixed in {fixed}")
            worst = 1
    return worst


if __name__ == "__main__":
    sys.exit(main(map(Path, sys.argv[1:])))
