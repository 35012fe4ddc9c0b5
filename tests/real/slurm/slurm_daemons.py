"""Slurm's own daemons on this machine, as Debian's packages have them.

Needs root for the daemons and `apt-get install slurm-wlm munge`; for accounts `slurmdbd mariadb-server` too, and
`openssh-server` for ssh.

Every node is a slurmd of its own with the name of a node; all see one file system, and processes of this machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from waiting import until

USERS = {"alice": 61_101, "bob": 61_102}
GROUP = 61_100
"""Of both."""
_DUMPABLE = 4  # PR_SET_DUMPABLE of <sys/prctl.h>; without it /proc/self is another user's after a change of users


@contextlib.contextmanager
def acting_as(user: int, group: int) -> Iterator[None]:
    """Let this process, which root has started, be that user's for a while; its children are nobody else's."""
    old = os.geteuid(), os.getegid()
    _become(user, group)
    try:
        yield
    finally:
        _become(*old)


def _become(user: int, group: int) -> None:
    os.setresuid(0, 0, 0)
    os.setgroups([])
    os.setresgid(group, group, 0)
    os.setresuid(user, user, 0)
    ctypes.CDLL(None).prctl(_DUMPABLE, 1)


_ACCOUNTS = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge
AccountingStorageEnforce=associations,limits,qos
MinJobAge=2
"""
_DBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge
DbdHost=localhost
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=slurm
StoragePass=quiet
StorageLoc=accounts
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
"""
_CONF = """\
ClusterName=test
FirstJobId={first}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=5
OverTimeLimit=0
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP MaxTime=2:00:00
PartitionName=short Nodes=ALL State=UP MaxTime=1
"""


@dataclass(frozen=True)
class Cluster:
    folder: Path
    hidden: Path | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: str, check: bool = True) -> str:
        environment = {"PATH": os.environ["PATH"], **self.environment}  # daemons inherit it, and outlive a test
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout

    def by_root(self, *command: str, check: bool = True) -> str:
        with acting_as(0, 0):
            return self.call(*command, check=check)

    def start_controller(self) -> None:
        self.by_root("slurmctld", "-f", str(self.folder / "slurm.conf"))

    def start_node(self, number: int) -> None:
        hide = ["unshare", "--mount", "sh", "-ec", 'mount -t tmpfs none "$0"; exec "$@"', str(self.hidden)]
        self.by_root(*(hide if self.hidden else []), "slurmd", "-N", f"n{number}")

    def stop(self, name: str, *, how: signal.Signals = signal.SIGTERM) -> None:
        """Stop the daemon of that name, `slurmctld` or a node's; steps of jobs live on without it."""
        with acting_as(0, 0), contextlib.suppress(FileNotFoundError, ValueError, psutil.NoSuchProcess):
            process = psutil.Process(int((self.folder / f"{name}.pid").read_text()))
            process.send_signal(how)
            psutil.wait_procs([process])

    def live(self) -> list[str]:
        """The jobs that have not ended, by name."""
        return self.call("squeue", "-h", "-o", "%j").split()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def accounts(folder: Path) -> Iterator[str]:
    """MariaDB and slurmdbd; what slurm.conf says of them."""
    if shutil.which("slurmdbd") is None or shutil.which("mariadbd") is None:
        pytest.skip("needs Slurm's accounts: apt-get install slurmdbd mariadb-server")
    (data := folder / "mariadb").mkdir()
    at, (port, database) = f"--socket={data}/socket", (free_port(), free_port())
    command = ["mariadb-install-db", "--user=root", f"--datadir={data}", "--auth-root-authentication-method=normal"]
    subprocess.run(command, check=True, capture_output=True)
    options = (
        "--no-defaults",
        "--user=root",
        f"--datadir={data}",
        at,
        "--bind-address=127.0.0.1",
        f"--port={database}",
    )
    with subprocess.Popen(["mariadbd", *options], stderr=subprocess.DEVNULL) as mariadb:
        try:
            until(lambda: subprocess.run(["mariadb-admin", at, "ping"], capture_output=True).returncode == 0)
            grant = "CREATE USER slurm@'127.0.0.1' IDENTIFIED BY 'quiet'; GRANT ALL ON accounts.* TO slurm@'127.0.0.1'"
            subprocess.run(["mariadb", at, "-e", grant], check=True)
            (own := folder / "slurmdbd.conf").touch(mode=0o600)
            own.write_text(_DBD_CONF.format(port=port, database=database, folder=folder))
            environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
            with subprocess.Popen(["slurmdbd", "-D"], env=environment, stderr=subprocess.DEVNULL) as slurmdbd:
                try:
                    yield _ACCOUNTS.format(port=port, folder=folder)
                finally:
                    slurmdbd.terminate()
        finally:
            mariadb.terminate()


@contextlib.contextmanager
def slurm_cluster(
    folder: Path, *, nodes: int = 2, cpus: int | str = 8, accounting: bool = False, hidden: Path | None = None,
    lines_of_conf: str = "",
) -> Iterator[Cluster]:  # fmt: skip
    """munge, one slurmctld, and a slurmd for each node; all are gone afterwards, with every process of their jobs.

    With `accounting`, the users are of the account `lab`, and the controller forgets a job soon after its end. Nodes do
    not see `hidden`.
    """
    if os.getresuid()[2] != 0 or shutil.which("slurmctld") is None or shutil.which("munged") is None:
        pytest.skip("needs Slurm, and root to run its daemons: apt-get install slurm-wlm munge")
    host, user = socket.gethostname(), (os.geteuid(), os.getegid())
    lines = [
        f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={cpus} RealMemory=2000"
        for number in range(nodes)
    ]
    cluster = Cluster(folder, hidden)
    with acting_as(0, 0), contextlib.ExitStack() as stack:
        (folder / "state").mkdir(parents=True)
        stack.enter_context(munge(folder))
        none = "AccountingStorageType=accounting_storage/none\n"
        text = _CONF.replace(none, stack.enter_context(accounts(folder))) if accounting else _CONF
        first = random.randint(1, 60_000)  # the port of a job follows from it, and other clusters have begun at 1
        text = text.format(host=host, port=free_port(), folder=folder, nodes="\n".join(lines), first=first)
        (folder / "slurm.conf").write_text(text + lines_of_conf)
        if accounting:
            own = ("sacctmgr", "-i", "add")
            until(
                lambda: (
                    cluster.call(*own, "cluster", "test", check=False)
                    or "test" in cluster.call("sacctmgr", "-n", "list", "cluster", check=False)
                )
            )
            cluster.call(*own, "account", "lab", "Cluster=test")
            cluster.call(*own, "user", ",".join(USERS), "Account=lab")
        try:
            cluster.start_controller()
            for number in range(nodes):
                (folder / "spool" / f"n{number}").mkdir(parents=True)
                cluster.start_node(number)
            states = ("sinfo", "-h", "-N", "-p", "main", "-o", "%t")
            until(lambda: cluster.call(*states, check=False).split() == ["idle"] * nodes)
            with acting_as(*user):
                yield cluster
        finally:
            cluster.call("scancel", "--state=PENDING", check=False)
            cluster.call("scancel", "--state=RUNNING", check=False)
            until(lambda: not cluster.call("squeue", "-h", check=False).strip())
            for name in ("slurmctld", *(f"n{number}" for number in range(nodes))):
                cluster.stop(name)
            for process in psutil.process_iter(["name"]):
                with contextlib.suppress(psutil.Error):
                    if process.info["name"].startswith("slurmstepd") and str(folder) in str(process.environ()):
                        process.kill()


@contextlib.contextmanager
def munge(folder: Path) -> Iterator[None]:
    """A munged with a socket and a key of its own, forced because it wants all folders to be root's."""
    (folder / "munge.key").touch(mode=0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))
    files = {"key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
    flags = [f"--{name}={folder / file}" for name, file in files.items()]
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge", *flags]
    with subprocess.Popen(munged, stderr=subprocess.DEVNULL) as daemon:
        until(lambda: (folder / "munge").exists())
        try:
            yield
        finally:
            daemon.terminate()


@contextlib.contextmanager
def ssh_login(folder: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """A real sshd on loopback, and the folder of an `ssh` that knows it as `login`, by a key of its own."""
    if (sshd := shutil.which("sshd", path="/usr/sbin")) is None:
        pytest.skip("needs sshd: apt-get install openssh-server")
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    port, variables = free_port(), " ".join(f"{name}={value}" for name, value in environment.items())
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        f"StrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile {folder}/pid\nSetEnv {variables}\n"
    )
    (folder / "ssh_config").write_text(
        f"Host login\n HostName 127.0.0.1\n Port {port}\n IdentityFile {folder}/user\n IdentitiesOnly yes\n"
        f" UserKnownHostsFile {folder}/known\n StrictHostKeyChecking accept-new\n"
    )
    (own := folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    own.chmod(0o755)
    server = subprocess.Popen([sshd, "-D", "-f", str(folder / "sshd_config")])
    try:
        until(
            lambda: any(
                connection.laddr.port == port
                for connection in psutil.net_connections("tcp")
                if connection.status == "LISTEN"
            )
        )
        yield folder
    finally:
        server.terminate()
        server.wait()
