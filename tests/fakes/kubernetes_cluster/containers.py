"""Pods as containers of a Docker engine: the image's own files, on a network with an address for each pod.

As with a kubelet, a container that only sleeps holds what the containers of a pod share.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .isolation import Identity, Mount, Program, Sandbox, run


@dataclass
class Containers:
    """The isolation of a real container runtime."""

    pause: str
    """An image that has a shell: the one of the container that only sleeps."""
    gateway: str = ""
    nested: bool = False
    _network: str = field(default_factory=lambda: f"pods-{random.randrange(16**8):08x}")
    _memory: dict[Path, str] = field(default_factory=dict)

    async def start(self) -> None:
        await run("docker", "network", "create", self._network)
        found, _ = await run("docker", "network", "inspect", self._network)
        self.gateway = json.loads(found)[0]["IPAM"]["Config"][0]["Gateway"]

    async def stop(self) -> None:
        await run("docker", "network", "rm", self._network)

    def promised(self, hostname: str) -> str | None:
        """Nothing: the engine gives an address when a container starts."""
        return None

    async def open(
        self,
        folder: Path,
        hostname: str,
        *,
        nics: Sequence[str],
        memory: Mapping[Path, str],
        network_of: Sandbox | None,
    ) -> Sandbox:
        if nics or network_of:
            raise RuntimeError("these pods have one network card each, and none shares its node's")
        folder.mkdir(parents=True, exist_ok=True)
        sandbox = Sandbox(hostname, "", folder, folder / "hosts")
        sandbox.hosts.touch()
        self._memory |= memory
        await run(
            "docker", "run", "--detach", "--init", f"--name={self._name(sandbox)}", f"--network={self._network}",
            f"--hostname={hostname}", f"--label={self._network}={sandbox.folder.name}",
            self.pause, "sleep", "infinity",
        )  # fmt: skip
        found, _ = await run("docker", "inspect", self._name(sandbox))
        sandbox.address = json.loads(found)[0]["NetworkSettings"]["Networks"][self._network]["IPAddress"]
        return sandbox

    def _name(self, sandbox: Sandbox) -> str:
        return f"{self._network}-{sandbox.folder.name}"

    def argv(self, sandbox: Sandbox, folder: Path, mounts: Sequence[Mount], program: Program) -> list[str]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "termination-log").write_text("")
        (folder / "termination-log").chmod(0o666)
        shared = [Mount(sandbox.hosts, "/etc/hosts"), Mount(folder / "termination-log", "/dev/termination-log")]
        words = [
            "docker", "run", "--rm", f"--network=container:{self._name(sandbox)}",
            f"--label={self._network}={sandbox.folder.name}",
            *_identified(program.identity),
            *(word for mount in (*mounts, *shared) for word in self._mounted(mount)),
            *(f"--env={name}={value}" for name, value in program.environment.items()),
            *([f"--workdir={program.workdir}"] if program.workdir else []),
        ]  # fmt: skip
        return [*words, f"--entrypoint={program.command[0]}", program.image, *program.command[1:]]

    def _mounted(self, mount: Mount) -> list[str]:
        if mount.source in self._memory:
            size = self._memory[mount.source]
            # Docker's tmpfs is noexec unless it is told otherwise, a kubelet's is not.
            return [f"--tmpfs={mount.target}:exec,mode=1777{f',size={size}' if size else ''}"]
        return [f"--volume={mount.source}:{mount.target}{':ro' if mount.read_only else ''}"]

    async def close(self, sandbox: Sandbox) -> None:
        label = f"label={self._network}={sandbox.folder.name}"
        found, _ = await run("docker", "ps", "--all", "--quiet", f"--filter={label}")
        await run("docker", "rm", "--force", "--volumes", *found.split())


def _identified(identity: Identity) -> list[str]:
    """The options that make a container's process who its pod says it is."""
    rights = [] if identity.capabilities is None else ["--cap-drop=ALL"]
    return [
        f"--user={identity.uid}:{identity.gid}",
        *(f"--group-add={group}" for group in identity.groups),
        *rights,
        *(f"--cap-add={one}" for one in identity.capabilities or ()),
        *(["--security-opt=no-new-privileges"] if identity.confined else []),
        *(["--read-only"] if identity.read_only else []),
    ]
