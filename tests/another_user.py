"""Another user of this machine, and a temporary folder that both can write to."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@contextmanager
def shared_temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a temporary folder as a machine of several users has it; this process takes it for its own."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own are below a folder that no other user can enter
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


def as_nobody(script: str, *arguments: Path) -> bool:
    """Return whether a shell script of another user succeeds."""
    nobody = pwd.getpwnam("nobody")
    done = subprocess.run(
        ["/bin/sh", "-ec", script, "sh", *map(str, arguments)],
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=[],
        stderr=subprocess.DEVNULL,
        cwd="/",
        check=False,
    )
    return done.returncode == 0
