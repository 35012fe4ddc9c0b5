"""These tests run as alice, an ordinary user; bob is another one of her group. Only the daemons run as root.

Started by root, the process of the tests enters a mount namespace of its own, in which both are in /etc/passwd and in
which every user may enter the folders above the interpreter, this checkout and its environment. Nothing of the machine
is changed, and all of it is gone when the process ends.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from slurm_daemons import GROUP, USERS, acting_as

_CHECKOUT = Path(__file__).parents[3]
_NEW_MOUNTS = 0x20000  # CLONE_NEWNS of <sched.h>


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _enter_mounts(folder: Path) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS) != 0:
        pytest.skip(f"needs a mount namespace of its own: {os.strerror(ctypes.get_errno())}")
    _mount("--make-rprivate", "/")
    for file, line in (("passwd", "{0}:x:{1}:{2}::{3}/{0}:/bin/bash\n"), ("shadow", "{0}:*:19000:0:99999:7:::\n")):
        accounts = "".join(line.format(name, uid, GROUP, folder) for name, uid in USERS.items())
        _cover(folder / file, Path("/etc", file), accounts)
    _cover(folder / "group", Path("/etc/group"), f"lab:x:{GROUP}:\n")
    needed = [Path(sys.base_prefix), Path(sys.prefix), _CHECKOUT]
    closed = {path: [above for above in path.parents if not above.stat().st_mode & 1] for path in needed}
    for number, (path, parents) in enumerate(closed.items()):
        if parents:
            (kept := folder / f"kept-{number}").mkdir()
            _mount("--bind", path, kept)
    for top in {parents[-1] for parents in closed.values() if parents}:
        _mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", top)
    for number, (path, parents) in enumerate(closed.items()):
        if parents:
            path.mkdir(parents=True, exist_ok=True)
            _mount("--move", folder / f"kept-{number}", path)  # so that nobody removes it with the folder


def _cover(copy: Path, file: Path, lines: str) -> None:
    shutil.copy2(file, copy)
    with copy.open("a") as text:
        text.write(lines)
    _mount("--bind", copy, file)


@pytest.fixture(scope="session", autouse=True)
def users(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Become alice. `migrated` is made before, in the checkout's own cache."""
    if os.geteuid() != 0:
        pytest.skip("needs root to run Slurm's daemons, and to become an ordinary user")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    _enter_mounts(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # after Prefect's own, which was registered later
    for name, uid in USERS.items():
        (folder / name).mkdir()
        shutil.chown(folder / name, uid, GROUP)
    alice = USERS["alice"]
    subprocess.run(["chown", "-R", f"{alice}:{GROUP}", Path(os.environ["PREFECT_HOME"]).parent], check=True)
    with acting_as(alice, GROUP):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTEST_DEBUG_TEMPROOT", str(folder / "alice"))
            base = tmp_path_factory.getbasetemp()
        for shared in (base, base.parent):
            shared.chmod(0o755)
        yield


@pytest.fixture(autouse=True)
def _home(users: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a login sets."""
    home = Path(os.environ["PREFECT_HOME"]).parent
    for name, value in {"HOME": str(home), "USER": "alice", "LOGNAME": "alice"}.items():
        monkeypatch.setenv(name, value)
