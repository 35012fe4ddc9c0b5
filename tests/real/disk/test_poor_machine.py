from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A machine of its own: its disk and shared memory are small, its second disk is read-only, its network is down.
POOR_MACHINE = """
set -e
mount -t tmpfs -o size=1m tmpfs "SMALL"
mount -t tmpfs -o ro tmpfs "LOCKED"
mount -t tmpfs -o size=64m tmpfs /dev/shm
exec "$@"
"""
EXAMINE = """
import sys
from launcher.checks.doctor import examine_environment
for root in sys.argv[1:]:
    sys.stdout.writelines(f"{finding}\\n" for finding in examine_environment(root))
"""


def test_doctor_finds_a_poor_machine_out(tmp_path: Path) -> None:
    own = ["unshare", "--user", "--map-root-user", "--mount", "--net", "sh"]
    if subprocess.run([*own, "-c", "mount -t tmpfs tmpfs /mnt"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody make namespaces")
    small, locked = tmp_path / "small", tmp_path / "locked"
    small.mkdir()
    locked.mkdir()
    script = POOR_MACHINE.replace("SMALL", str(small)).replace("LOCKED", str(locked))
    command = [*own, "-c", script, "sh", sys.executable, "-c", EXAMINE, str(small), str(locked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for code in (
        "warning [root.disk-space]",
        "error [root.not-writable]",
        "warning [machine.shm]",
        "[network.loopback]",
    ):
        assert code in done.stdout
