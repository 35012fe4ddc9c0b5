"""The services that tests marked `services` and `docker` run on: what is missing here, and Debian's packages of it.

python deployments/services.py    installs them as root on Debian or Ubuntu, and starts none: tests start their own

Only the standard library is imported: nothing else may be installed yet.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_POSTGRESQL = Path("/usr/lib/postgresql")  # Debian's programs of each version, which are on no PATH
_POLICY = Path("/usr/sbin/policy-rc.d")  # https://people.debian.org/~hmh/invokerc.d-policyrc.d-specification.txt


@dataclass(frozen=True)
class Service:
    """A service, and where it comes from."""

    name: str
    tests: str
    """The tests that need it."""
    programs: tuple[str, ...]
    packages: tuple[str, ...]
    """Debian's, and Ubuntu's."""

    def missing(self) -> list[str]:
        """Return the programs that are not here."""
        return [name for name in self.programs if not _is_here(name)]


SERVICES = (
    Service(
        "Slurm", "jobs on Slurm's own daemons, as root",
        ("munged", "slurmctld", "slurmd", "sbatch"), ("munge", "slurm-wlm"),
    ),
    Service(
        "Slurm's accounting", "sacct, accounts and their limits",
        ("slurmdbd", "mariadbd", "mariadb-install-db"), ("slurmdbd", "mariadb-server"),
    ),
    Service("OpenSSH", "a login node of Slurm", ("sshd", "ssh"), ("openssh-server", "openssh-client")),
    Service("Environment modules", "modules in the scripts of Slurm's jobs", ("envml",), ("environment-modules",)),
    Service("PostgreSQL", "a team's server", ("postgres", "pg_dump"), ("postgresql",)),
    Service("Redis", "a team's server", ("redis-server",), ("redis-server",)),
    Service("HAProxy", "a team's server", ("haproxy",), ("haproxy",)),
    Service(
        "Docker", "real builds of images, which need a running dockerd besides",
        ("dockerd", "docker", "docker-registry", "busybox", "debootstrap"),
        ("docker.io", "docker-registry", "busybox-static", "debootstrap"),
    ),
)  # fmt: skip


def _is_here(program: str) -> bool:
    return shutil.which(program, path=_PATH) is not None or any(_POSTGRESQL.glob(f"*/bin/{program}"))


@contextmanager
def _nothing_starts() -> Iterator[None]:
    """Keep packages from starting their daemons on the usual ports: this machine may need none of them."""
    if _POLICY.exists():  # the administrator's own
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()


def install(packages: Sequence[str]) -> None:
    """Install packages of Debian.

    Raises:
        subprocess.CalledProcessError: apt-get said no; its words are on the terminal.
    """
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with _nothing_starts():
        for words in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            subprocess.run(["apt-get", "-qq", *words], env=environment, stdin=subprocess.DEVNULL, check=True)


def main() -> int:
    """Install what is missing if that can be done here, and say of every service whether it is there."""
    packages = [package for service in SERVICES if service.missing() for package in service.packages]
    can_install = os.geteuid() == 0 and shutil.which("apt-get") is not None
    if packages and can_install:
        print(f"installing {' '.join(packages)} (2 minutes, once)", flush=True)
        install(packages)
    for service in SERVICES:
        missing = service.missing()
        without = f"no {', '.join(missing)}; skipped without: " if missing else ""
        print(f"{'✗' if missing else '✓'} {service.name}: {without}{service.tests}")
    if packages and not can_install:
        print(
            f"On Debian or Ubuntu: sudo apt-get install {' '.join(packages)}\n"
            "Elsewhere install the services by their own instructions; tests find the programs by PATH. Packages may "
            "start daemons of their own, which the tests do not use."
        )
    return 1 if any(service.missing() for service in SERVICES) else 0


if __name__ == "__main__":
    sys.exit(main())
