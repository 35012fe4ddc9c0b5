"""Where a pod's processes live: namespaces of their own where we are root, plain processes otherwise.

With root a pod has a network namespace with an address on the cluster's bridge, a host name, name resolution, and each
of its containers its own processes and its own file system: the machine's, with what it writes kept apart (overlayfs),
so that `/run/litgpt` or `/dev/shm` of one pod are not another's. All of it hangs on one process per pod and ends with
that.

There a container is also who its security context says: its user and groups, its capabilities, and whether it may
write into its image. Seccomp profiles are not applied, and NetworkPolicies keep nobody out: that needs a firewall in
the machine that runs the tests.

Without root a pod has an address of 127/8, and names and mount paths are written out in its command and environment;
it runs as whoever runs the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import os
import random
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

CHECKOUT = Path(__file__).parents[3]
_BRIDGE = re.compile(r"fk(?P<pid>\d+)-\w+")
TRAINER = "/home/trainer"
"""The home of the image's user (litgpt_demo/Dockerfile)."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


@dataclass(frozen=True)
class Mount:
    source: Path
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Identity:
    """The user, groups and capabilities of a container."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    capabilities: tuple[str, ...] | None = None
    """All that it has, where the default ones are dropped."""
    confined: bool = False
    """The bar on gaining privileges (allowPrivilegeEscalation: false)."""
    read_only: bool = False
    """An image that it cannot write into (readOnlyRootFilesystem: true)."""

    def argv(self) -> list[str]:
        """The start of a command line that becomes it."""
        groups = [f"--groups={','.join(map(str, self.groups))}"] if self.groups else ["--clear-groups"]
        rights = (
            []
            if self.capabilities is None
            else [
                "--inh-caps=-all",
                f"--bounding-set={','.join(['-all', *(f'+{one.lower()}' for one in self.capabilities)])}",
            ]
        )
        more = ["--no-new-privs"] if self.confined else []
        return ["/usr/bin/setpriv", f"--reuid={self.uid}", f"--regid={self.gid}", *groups, *rights, *more]


ROOT = Identity()


@dataclass(frozen=True)
class Program:
    """The main process of a container, as its pod asks for it."""

    image: str
    command: Sequence[str]
    environment: Mapping[str, str]
    """Without that of the image."""
    workdir: str | None = None
    """None is the image's own."""
    identity: Identity = ROOT

    def as_on_this_machine(self, hostname: str) -> dict[str, str]:
        """The environment where this machine's files stand for the image."""
        image = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(CHECKOUT),
            "HOME": TRAINER if self.identity.uid else "/root",
            "LANG": "C.UTF-8",
            "HOSTNAME": hostname,
        }
        return {**image, **self.environment}


@dataclass
class Sandbox:
    """What the containers of one pod share."""

    hostname: str
    address: str
    folder: Path
    hosts: Path
    pause: asyncio.subprocess.Process | None = None


class Isolation(Protocol):
    gateway: str
    """Under which address pods reach this machine."""
    nested: bool
    """The process that `argv` starts has the container's first process as its child."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def promised(self, hostname: str) -> str | None: ...
    async def open(
        self,
        folder: Path,
        hostname: str,
        *,
        nics: Sequence[str],
        memory: Mapping[Path, str],
        network_of: Sandbox | None,
    ) -> Sandbox: ...
    def argv(self, sandbox: Sandbox, folder: Path, mounts: Sequence[Mount], program: Program) -> list[str]: ...
    async def close(self, sandbox: Sandbox) -> None: ...


def namespaces_work() -> bool:
    return os.geteuid() == 0 and sys.platform == "linux"


@dataclass
class Namespaces:
    shared: Sequence[Path]
    gateway: str = ""
    nested: bool = True
    bridge: str = ""
    _addresses: itertools.count[int] = field(default_factory=lambda: itertools.count(2))

    async def start(self) -> None:
        await self._sweep()
        for _ in range(20):
            number = f"{random.randrange(16**4):04x}"
            self.bridge = f"fk{os.getpid()}-{number}"[:15]
            self._net = ipaddress.ip_network(f"10.{random.randrange(64, 128)}.{random.randrange(256)}.0/24")
            self.gateway = str(self._net[1])
            taken, _ = await run("ip", "-o", "addr", "show", "to", str(self._net))
            if not taken:
                break
        await run("ip", "link", "add", self.bridge, "type", "bridge")
        await run("ip", "addr", "add", f"{self.gateway}/24", "dev", self.bridge)
        await run("ip", "link", "set", self.bridge, "up")
        await self._pass_the_firewall("-I")

    async def stop(self) -> None:
        await self._pass_the_firewall("-D")
        await run("ip", "link", "del", self.bridge)

    async def _pass_the_firewall(self, action: str) -> None:
        """Let the pods reach each other on a machine with Docker, which drops what bridges forward but its own."""
        if shutil.which("iptables"):
            with contextlib.suppress(RuntimeError):  # a kernel without it drops nothing either
                await run("iptables", "-w", action, "FORWARD", "-i", self.bridge, "-o", self.bridge, "-j", "ACCEPT")

    def promised(self, hostname: str) -> str | None:
        """The address that a pod will have, where it is known before the pod has it."""
        return None

    async def _sweep(self) -> None:
        """Bridges of test runs that were killed."""
        listed, _ = await run("ip", "-o", "link", "show", "type", "bridge")
        for match in _BRIDGE.finditer(listed):
            if not Path(f"/proc/{match['pid']}").exists():
                await run("ip", "link", "del", match[0])

    async def open(
        self,
        folder: Path,
        hostname: str,
        *,
        nics: Sequence[str],
        memory: Mapping[Path, str],
        network_of: Sandbox | None,
    ) -> Sandbox:
        folder.mkdir(parents=True, exist_ok=True)
        sandbox = Sandbox(hostname, "", folder, folder / "hosts")
        sandbox.hosts.touch()
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        lines = ["mount --make-rprivate /", f"hostname {shlex.quote(hostname)}"]
        for path, size in memory.items():
            path.mkdir(parents=True, exist_ok=True)
            lines.append(f"mount -t tmpfs -o mode=1777{',size=' + size if size else ''} tmpfs {shlex.quote(str(path))}")
        if network_of is None:
            lines.append("ip link set lo up")
        script = "\n".join(["set -e", *lines, "echo ready", "exec sleep infinity"])
        enter = ["nsenter", f"--net=/proc/{network_of.pause.pid}/ns/net"] if network_of and network_of.pause else []
        spaces = ["--mount", "--uts", "--ipc", *([] if network_of else ["--net"])]
        sandbox.pause = await asyncio.create_subprocess_exec(
            "setpriv", "--pdeathsig", "KILL", *enter, "unshare", *spaces, "sh", "-c", script,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert sandbox.pause.stdout is not None
        if await sandbox.pause.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the sandbox of {hostname} did not start")
        if network_of is not None:
            sandbox.address = network_of.address
            return sandbox
        try:
            await self._connect(sandbox, nics)
        except BaseException:
            await self.close(sandbox)
            raise
        return sandbox

    async def _connect(self, sandbox: Sandbox, nics: Sequence[str]) -> None:
        number = next(self._addresses)
        if number > 250:
            raise RuntimeError("this cluster has no addresses left: 249 pods at most, or simulate them")
        assert sandbox.pause is not None
        pid, ours = str(sandbox.pause.pid), f"{self.bridge}{number:x}".replace("-", "")[-15:]
        sandbox.address = str(self._net[number])
        await run("ip", "link", "add", ours, "type", "veth", "peer", "name", "eth0", "netns", pid)
        await run("ip", "link", "set", ours, "master", self.bridge, "up")
        inside = [
            f"addr add {sandbox.address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {self.gateway}",
        ]
        for nic in nics:  # what multi-networking would bring; no traffic goes over them
            inside += [f"link add {nic} type bridge", f"link set {nic} up"]
        await run("nsenter", "-t", pid, "--net", "ip", "-batch", "-", text="\n".join(inside))

    def argv(self, sandbox: Sandbox, folder: Path, mounts: Sequence[Mount], program: Program) -> list[str]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "termination-log").write_text("")
        (folder / "termination-log").chmod(0o666)
        script = folder / "start.sh"
        script.write_text(self._script(sandbox, folder, mounts, program))
        assert sandbox.pause is not None
        return [
            "setpriv", "--pdeathsig", "KILL",
            "nsenter", "-t", str(sandbox.pause.pid), "--mount", "--net", "--uts", "--ipc",
            "unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", str(script),
        ]  # fmt: skip

    def _script(self, sandbox: Sandbox, folder: Path, mounts: Sequence[Mount], program: Program) -> str:
        identity, workdir = program.identity, program.workdir or "/"
        root = folder / "root"
        root.mkdir(exist_ok=True)
        lines = [
            "set -e", "mount --make-rprivate /", f"mount -t tmpfs tmpfs {root}", f"cd {root}", "mkdir upper work image",
            "mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work image", "cd image",
            "mount -t proc proc proc", "mount --rbind /sys sys", "mount -t tmpfs -o mode=755 dev dev",
            "mkdir dev/pts dev/shm", "mount --rbind /dev/pts dev/pts", "ln -s pts/ptmx dev/ptmx",
            "ln -s /proc/self/fd dev/fd", "ln -s fd/0 dev/stdin", "ln -s fd/1 dev/stdout", "ln -s fd/2 dev/stderr",
            *(f"touch dev/{name}; mount --bind /dev/{name} dev/{name}" for name in DEVICES),
            "mount -t tmpfs -o size=64m,mode=1777 shm dev/shm",  # what container runtimes give
            f"touch dev/termination-log; mount --bind {folder}/termination-log dev/termination-log",
            "rm -f etc/resolv.conf; touch etc/resolv.conf",
            f"mount --bind {sandbox.folder}/resolv.conf etc/resolv.conf",
            f"mount --bind {sandbox.hosts} etc/hosts",
        ]  # fmt: skip
        seen = {
            CHECKOUT,
            Path(sys.prefix),
            Path(sys.base_prefix),
        }  # what the image holds, in the places of this machine
        if identity.uid:  # the image's user
            lines.append(f"mkdir -p .{TRAINER}; chown {identity.uid}:{identity.gid} .{TRAINER}")
            lines += [f"chmod -R a+rwX {shlex.quote(str(path))}" for path in self.shared]
        for path in sorted({*seen, *self.shared}):
            there = shlex.quote(f".{path}")
            lines.append(f"mkdir -p {there}; mount --rbind {shlex.quote(str(path))} {there}")
            # Everybody may go through the folders of an image; on this machine they may be root's own.
            ours = (one for one in path.parents[:-1] if not any(one.is_relative_to(bound) for bound in seen))
            lines += [f"chmod a+x {shlex.quote(f'.{one}')}" for one in ours]
        if identity.read_only:
            lines += [f"mount -o remount,ro,bind {shlex.quote(f'.{path}')}" for path in sorted(seen)]
        for mount in sorted(mounts, key=lambda one: one.target):
            source, there = shlex.quote(str(mount.source)), shlex.quote(f".{mount.target}")
            make = f"mkdir -p {there}" if mount.source.is_dir() else f"mkdir -p $(dirname {there}); touch {there}"
            lines.append(f"{make}; mount --bind {source} {there}")
            if mount.read_only:
                lines.append(f"mount -o remount,ro,bind {there}")
        environment = program.as_on_this_machine(sandbox.hostname)
        variables = " ".join(shlex.quote(f"{name}={value}") for name, value in environment.items())
        lines.append(f"mkdir -p .{shlex.quote(workdir)}")
        if identity.read_only:
            lines.append(f"mount -o remount,ro {root}/image")
        started = [*identity.argv(), "/usr/bin/env", "-i", f"--chdir={workdir}"]
        lines.append(f"exec chroot . {shlex.join(started)} {variables} {shlex.join(program.command)}")
        return "\n".join(lines) + "\n"

    async def close(self, sandbox: Sandbox) -> None:
        if sandbox.pause is not None and sandbox.pause.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(sandbox.pause.pid, signal.SIGKILL)
            await sandbox.pause.communicate()


@dataclass
class Plain:
    """Without root: addresses of 127/8, and no name of its own for a pod but what is written out for it."""

    gateway: str = "127.0.0.1"
    nested: bool = False
    _promises: dict[str, str] = field(default_factory=dict)
    _addresses: itertools.count[int] = field(default_factory=lambda: itertools.count(2))

    async def start(self) -> None:
        self._net = f"127.{random.randrange(1, 255)}.{random.randrange(255)}"

    async def stop(self) -> None:
        pass

    async def open(
        self,
        folder: Path,
        hostname: str,
        *,
        nics: Sequence[str],
        memory: Mapping[Path, str],
        network_of: Sandbox | None,
    ) -> Sandbox:
        folder.mkdir(parents=True, exist_ok=True)
        for path in memory:
            path.mkdir(parents=True, exist_ok=True)
        return Sandbox(hostname, self.promised(hostname), folder, folder / "hosts")

    def promised(self, hostname: str) -> str:
        """Names are written out when a pod starts, which may be before those it will call have started."""
        if hostname not in self._promises:
            self._promises[hostname] = f"{self._net}.{next(self._addresses) % 250 + 2}"
        return self._promises[hostname]

    def argv(self, sandbox: Sandbox, folder: Path, mounts: Sequence[Mount], program: Program) -> list[str]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "termination-log").write_text("")
        known: dict[str, str] = {}
        for line in sandbox.hosts.read_text().splitlines():
            address, *names = line.split()
            known |= {name: address for name in names if "." in name}
        known |= {mount.target: str(mount.source) for mount in mounts if mount.target != "/dev/shm"}
        pairs = sorted(known.items(), key=lambda pair: -len(pair[0]))

        def written_out(text: str) -> str:
            for name, value in pairs:
                text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", value.replace("\\", "\\\\"), text)
            return text

        environment = program.as_on_this_machine(sandbox.hostname)
        variables = [f"{name}={written_out(value)}" for name, value in environment.items()]
        return ["env", "-i", *variables, *map(written_out, program.command)]

    async def close(self, sandbox: Sandbox) -> None:
        pass


async def run(*command: str, text: str | None = None) -> tuple[str, int]:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate(text.encode() if text else None)
    if process.returncode and command[:2] != ("ip", "-o"):
        raise RuntimeError(f"{shlex.join(command)}: {err.decode().strip()}")
    return out.decode(), process.returncode or 0
