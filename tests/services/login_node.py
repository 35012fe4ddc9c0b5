"""A real sshd on loopback, and a user's ~/.ssh that leads to it."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from waiting import free_port, until

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@dataclass
class LoginNode:
    """An sshd that takes one key, known by one host key, under the name `login` of a configuration of its own."""

    folder: Path
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    server: dict[str, str] = field(default_factory=dict)
    """Further settings of sshd."""
    hidden: Path | None = None
    """A folder of this machine that the login node does not see, as if it had another disk."""

    @property
    def config(self) -> Path:
        return self.folder / "config"

    def configure(self, **changes: str) -> None:
        """Write the user's configuration of ssh, with some of its settings changed."""
        settings = {
            "HostName": "127.0.0.1", "Port": str(self.port), "User": getpass.getuser(),
            "IdentityFile": str(self.folder / "key"), "IdentitiesOnly": "yes", "IdentityAgent": "none",
            "UserKnownHostsFile": str(self.folder / "known_hosts"), "GlobalKnownHostsFile": "/dev/null", **changes,
        }  # fmt: skip
        self.config.write_text("Host login\n" + "".join(f"  {name} {value}\n" for name, value in settings.items()))

    def start(self) -> None:
        assert SSHD is not None
        lines = {
            "Port": self.port, "ListenAddress": "127.0.0.1", "HostKey": self.folder / "host_key",
            "PidFile": self.folder / "sshd.pid", "AuthorizedKeysFile": self.folder / "key.pub", "StrictModes": "no",
            "UsePAM": "no", "PasswordAuthentication": "no", "KbdInteractiveAuthentication": "no",
        }  # fmt: skip
        # One line: https://man.openbsd.org/sshd_config#SetEnv takes the first that it meets.
        # The home is empty: what this user's ~/.bashrc does would be done by each command, and cut short with it.
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        given = " ".join(f"{name}={value}" for name, value in {"HOME": home, **self.environment}.items())
        text = "".join(f"{name} {value}\n" for name, value in {**lines, "SetEnv": given, **self.server}.items())
        (self.folder / "sshd_config").write_text(text)
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd does not start as root without
        command = [SSHD, "-f", str(self.folder / "sshd_config"), "-E", str(self.folder / "sshd.log")]
        if self.hidden is not None:
            own = f'mount -t tmpfs none {self.hidden} && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", own, "sh", *command]
        subprocess.run(command, check=True, timeout=30)
        until(lambda: "Server listening" in (self.folder / "sshd.log").read_text())

    def stop(self) -> None:
        """Kill sshd and its connections, as a login node does that is started again."""
        written = self.folder / "sshd.pid"
        if not written.exists():
            return
        with_children = [psutil.Process(int(written.read_text()))]
        with_children += with_children[0].children(recursive=True)
        written.unlink()
        (self.folder / "sshd.log").write_text("")
        for process in with_children:
            process.kill()
        psutil.wait_procs(with_children, timeout=20)


@contextmanager
def login_node(environment: Mapping[str, str] | None = None, *, hidden: Path | None = None) -> Iterator[LoginNode]:
    """Run an sshd, whose logins have these environment variables."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("there is no OpenSSH server and client here: make test-services")
    folder = Path(tempfile.mkdtemp(prefix="ssh-", dir="/tmp"))  # the path of a socket has to be short
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=30)
    node = LoginNode(folder, free_port(), environment or {}, hidden=hidden)
    public = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{node.port} {public}\n")
    node.configure()
    try:
        node.start()
        yield node
    finally:
        node.stop()
        shutil.rmtree(folder, ignore_errors=True)
