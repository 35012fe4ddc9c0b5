"""A Slurm cluster of its own on this machine: Debian's daemons as they are, on free ports in a temporary folder.

All nodes are this host under several names: they share its file system, its loopback and its processes.
"""

from __future__ import annotations

import itertools
import os
import pwd
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from waiting import free_port, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
ACCOUNTING = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db")
SUBREAPER = Path(__file__).with_name("subreaper.py")
STRANGER = "nobody"
"""A user of this machine without an account in this Slurm."""

_CLUSTERS = itertools.count()

# Seconds where a cluster of people has minutes, so that tests see what Slurm does about a node that is gone.
SLURM_CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin={task}
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/backfill
FirstJobId={first_job}
SchedulerParameters=sched_interval=2,sched_min_interval=100000,bf_interval=2,batch_sched_delay=0,default_queue_depth=1000
PriorityType=priority/basic
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout={node_timeout}
BatchStartTimeout=20
InactiveLimit=0
KillWait=5
EnforcePartLimits=ALL
MinJobAge={record_age}
MessageTimeout=20
TCPTimeout=5
UnkillableStepTimeout=20
CompleteWait=0
GresTypes=gpu
DefMemPerCPU=4000
{accounting}
NodeName=DEFAULT CPUs=8 RealMemory=64000 Gres=gpu:2
{nodes}
PartitionName=DEFAULT Nodes=ALL State=UP MaxTime=1-00:00:00 DefaultTime=01:00:00 PriorityTier=10 PreemptMode=OFF
PartitionName=main Default=YES
PartitionName=short MaxTime=00:01:00 DefaultTime=00:01:00
PartitionName=spare PriorityTier=1 PreemptMode=CANCEL
PartitionName=requeued PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent PriorityTier=100
PartitionName=staff MaxTime=UNLIMITED AllowAccounts=staff AllowGroups=root
PartitionName=closed State=DOWN
"""
# Memory alone: the rest of the machine stays as it is.
CGROUP_CONF = """
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainRAMSpace=yes
ConstrainSwapSpace=yes
"""
WITHOUT_ACCOUNTING = "AccountingStorageType=accounting_storage/none\n"
WITH_ACCOUNTING = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass=socket={folder}/munge.socket
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
"""
SLURMDBD_CONF = """
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
"""
# What is known to the accounting: an account to use, one for the staff, and limits that a job can run into.
ACCOUNTS = (
    "add qos single MaxJobsPerUser=1",
    "add qos brief MaxWall=00:10:00",
    "add account lab Description=lab Organization=lab",
    "add account staff Description=staff Organization=lab",
    "add account narrow Description=narrow Organization=lab GrpTRES=gres/gpu=2",
    "add user root Account=lab DefaultAccount=lab",
    "add user root Account=staff",
    "add user root Account=narrow",
    "modify user root set QOS=normal,single,brief",
)


def require_slurm(*, accounting: bool = True) -> None:
    """Skip the test where a program is missing, or where daemons cannot start jobs as their users."""
    if missing := [name for name in PROGRAMS + ACCOUNTING * accounting if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} of Slurm is not installed: make test-services")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons start jobs as their users, which root alone can: run the tests as root")


@dataclass
class Daemon:
    """A program in the foreground, and what it started, all of which ends with these tests."""

    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    _keepers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._keepers.append(
                subprocess.Popen(
                    [sys.executable, "-B", str(SUBREAPER), *self.command],
                    stdin=subprocess.PIPE, stdout=log, stderr=log,
                    env={**os.environ, **self.environment}, start_new_session=True,
                )
            )  # fmt: skip

    @property
    def process(self) -> psutil.Process | None:
        """The program itself, while it runs."""
        if not self._keepers:
            return None
        name = Path(self.command[0]).name
        for one in psutil.Process(self._keepers[-1].pid).children():
            with suppress(psutil.NoSuchProcess):  # what it started may end meanwhile
                if one.name().startswith(name[:15]):
                    return one
        return None

    def tree(self) -> list[psutil.Process]:
        """Return the program and all that it started, the youngest last: of a slurmd, its steps and their tasks too."""
        there = [one for keeper in self._keepers for one in psutil.Process(keeper.pid).children(recursive=True)]
        return sorted(there, key=lambda one: one.create_time())

    def wait(self, answers: Callable[[], bool], *, seconds: float = 60.0) -> None:
        """Wait until the program answers; its log is the reason where it ends instead."""

        def look() -> bool:
            done = answers()
            last = "\n".join(self.log.read_text().splitlines()[-10:])
            assert done or self.process is not None, f"{self.command[0]} has ended: {last}"
            return done

        until(lambda: self._keepers and psutil.Process(self._keepers[-1].pid).children())
        until(look, seconds=seconds)

    def kill(self) -> None:
        """Kill the program alone; what it started goes on."""
        if process := self.process:
            process.kill()
            until(lambda: self.process is None)

    def stop(self) -> None:
        """Kill the program and all that it started, as a machine does that loses its power."""
        for keeper in self._keepers:
            assert keeper.stdin is not None
            keeper.stdin.close()
        for keeper in self._keepers:
            keeper.wait(30)
        self._keepers.clear()


@dataclass
class SlurmCluster:
    """A running cluster: nodes n0, n1, …, each with 8 processors, 64 GB and 2 GPUs that no driver knows."""

    folder: Path
    controller: Daemon
    nodes: dict[str, Daemon]
    accounting: Daemon | None = None

    def environment(self) -> dict[str, str]:
        """Return what makes Slurm's commands speak to this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, user: str | None = None, check: bool = True) -> str:
        """Return what a command prints, as root or as another user of this machine."""
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=120, user=user,
            group=pwd.getpwnam(user).pw_gid if user else None, extra_groups=[] if user else None,
            cwd="/", env={**os.environ, **self.environment()},
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return (done.stdout + ("" if check else done.stderr)).strip()

    def state(self, job: str | int) -> str:
        """Return the state of a job that the controller knows, in its words, else an empty text."""
        said = self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T", check=False)
        return "" if "error" in said else said

    def node_state(self, node: str) -> str:
        return self.run("sinfo", "--noheader", "--partition=main", f"--nodes={node}", "--format=%T")

    def start_controller(self) -> None:
        self.controller.start()
        self.controller.wait(lambda: "is UP" in self.run("scontrol", "ping", check=False))

    def stop_controller(self) -> None:
        """Stop slurmctld as an administrator does: it writes down first what it knows."""
        if process := self.controller.process:
            process.terminate()
            until(lambda: self.controller.process is None)
        self.controller.stop()

    def stop_node(self, node: str, *, steps: bool = True) -> None:
        """Kill a node's slurmd, with what runs on the node or without."""
        daemon = self.nodes[node]
        daemon.stop() if steps else daemon.kill()

    def start_node(self, node: str) -> None:
        """Start a node's slurmd and wait until the controller uses it."""
        if self.nodes[node].process is None:
            self.nodes[node].start()
        self.nodes[node].wait(lambda: self.node_state(node).rstrip("*") in {"idle", "mixed", "allocated", "completing"})

    def reset(self) -> None:
        """Cancel all jobs, and bring back what a test has stopped or drained."""
        if self.controller.process is None:
            self.start_controller()
        self.run("scancel", "--signal=KILL", "--full", "--user=root", check=False)
        self.run("scancel", "--user=root", check=False)
        self.run("scancel", f"--user={STRANGER}", check=False)
        for name, daemon in self.nodes.items():
            if daemon.process is None:
                daemon.stop()
                daemon.start()
            if "drain" in (state := self.node_state(name)) or "down" in state:
                self.run("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)
        until(lambda: not self.run("squeue", "--noheader"), seconds=120)
        states = ["sinfo", "--noheader", "--partition=main", "--format=%T"]
        until(lambda: self.run(*states) == "idle")


@contextmanager
def slurm_cluster(
    *,
    nodes: int = 3,
    accounting: bool = True,
    limit_memory: bool = False,
    node_timeout: int = 10,
    record_age: int = 300,
) -> Iterator[SlurmCluster]:
    """Run a cluster.

    Args:
        nodes: their number.
        accounting: run slurmdbd and its database too.
        limit_memory: end what takes more memory than its job asked for, by control groups.
        node_timeout: seconds without an answer of slurmd after which its node is DOWN.
        record_age: seconds for which the controller knows a job that has ended.
    """
    require_slurm(accounting=accounting)
    if limit_memory and not Path("/sys/fs/cgroup/memory").is_dir():
        pytest.skip("control groups are not mounted as version 1, which slurmd takes without systemd")
    folder = Path(tempfile.mkdtemp(prefix="train-litgpt-slurm-", dir="/tmp"))  # other users have to reach it
    folder.chmod(0o755)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        _start(stack, _munge(folder))
        written = _accounting(stack, folder) if accounting else WITHOUT_ACCOUNTING
        # The control groups of all clusters of this machine are called after their nodes.
        names = [f"m{os.getpid()}-{index}" if limit_memory else f"n{index}" for index in range(nodes)]
        task = "task/cgroup" if limit_memory else "task/none"
        _configure(folder, names, accounting=written, task=task, node_timeout=node_timeout, record_age=record_age)
        (folder / "cgroup.conf").write_text(CGROUP_CONF if limit_memory else "CgroupAutomount=no\n")
        environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        cluster = SlurmCluster(
            folder,
            Daemon(["slurmctld", "-D"], folder / "slurmctld.out", environment),
            {name: Daemon(["slurmd", "-D", "-N", name], folder / f"slurmd-{name}.out", environment) for name in names},
        )
        if accounting:
            cluster.accounting = _slurmdbd(stack, cluster)
        stack.callback(cluster.controller.stop)
        for node in cluster.nodes.values():
            stack.callback(node.stop)
            node.start()
        cluster.start_controller()
        for name in names:
            cluster.start_node(name)
        if accounting:  # after the controller, which tells slurmdbd that there are GPUs to count
            for line in ACCOUNTS:
                cluster.run("sacctmgr", "-i", *line.split())
        yield cluster


def _start(stack: ExitStack, daemon: Daemon) -> Daemon:
    daemon.start()
    stack.callback(daemon.stop)
    return daemon


def _munge(folder: Path) -> Daemon:
    """Make a key of its own, which proves to Slurm's daemons and commands who asks."""
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = {"key-file": key, "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
    options = [f"--{name}={folder / file}" for name, file in {**files, "seed-file": "munge.seed"}.items()]
    # --force: folders below /tmp, which is everyone's, are refused else.
    return Daemon(["munged", "--foreground", "--force", "--num-threads=4", *options], folder / "munge.out")


def _accounting(stack: ExitStack, folder: Path) -> str:
    """Start a database for slurmdbd; returns what slurm.conf says about them."""
    data, database_port, port = folder / "mariadb", free_port(), free_port()
    install = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root", "--skip-test-db"]
    subprocess.run([*install, "--auth-root-authentication-method=normal"], check=True, capture_output=True, timeout=120)
    server = [
        "mariadbd", "--no-defaults", f"--datadir={data}", "--user=root", f"--socket={folder}/mariadb.socket",
        f"--pid-file={folder}/mariadb.pid", "--bind-address=127.0.0.1", f"--port={database_port}",
        "--innodb-buffer-pool-size=32M", "--innodb-flush-method=nosync", "--skip-log-bin",
    ]  # fmt: skip
    daemon = _start(stack, Daemon(server, folder / "mariadb.out"))
    words = ["mariadb", "--no-defaults", f"--socket={folder}/mariadb.socket", "--user=root", "--execute"]
    grant = "create database slurm; grant all on slurm.* to slurm@'%' identified by 'slurm'"
    daemon.wait(lambda: subprocess.run([*words, grant], capture_output=True).returncode == 0)
    written = folder / "slurmdbd.conf"
    written.write_text(SLURMDBD_CONF.format(folder=folder, port=port, database_port=database_port))
    written.chmod(0o600)  # slurmdbd refuses it else
    return WITH_ACCOUNTING.format(folder=folder, port=port)


def _slurmdbd(stack: ExitStack, cluster: SlurmCluster) -> Daemon:
    """Start the accounting and tell it about the cluster, before the controller asks."""
    daemon = _start(stack, Daemon(["slurmdbd", "-D"], cluster.folder / "slurmdbd.out", cluster.environment()))
    daemon.wait(lambda: " started" in daemon.log.read_text())
    cluster.run("sacctmgr", "-i", "add", "cluster", "tests")
    return daemon


def _configure(folder: Path, names: list[str], **values: object) -> None:
    gpus = folder / "gpus"
    gpus.mkdir()
    for index in range(2):
        os.mknod(gpus / f"gpu{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # slurmd wants a device: /dev/null's
    host = socket.gethostname().partition(".")[0]
    # A job's number gives the port of its node 0: clusters beside each other on one machine need numbers of their own.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    text = SLURM_CONF.format(
        folder=folder,
        host=host,
        controller_port=free_port(),
        first_job=(worker * 4 + next(_CLUSTERS) % 4) * 600 + 1,
        nodes="\n".join(f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()}" for name in names),
        **values,
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(f"Name=gpu File={gpus}/gpu[0-1]\n")
    (folder / "state").mkdir()
    for name in names:
        (folder / f"spool-{name}").mkdir()
