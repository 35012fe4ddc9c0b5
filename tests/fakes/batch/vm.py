"""A VM of a task: a sandbox with an address and files of its own, on which the task's runnables run in order."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from google.cloud.batch_v1 import types
from kubernetes_cluster.isolation import CHECKOUT, Isolation, Mount, Program, Sandbox
from kubernetes_cluster.processes import Real

from . import docker
from .admission import MACHINES

HOSTS = "/etc/cloudbatch-taskgroup-hosts"
TOO_LONG = 50005


@dataclass(frozen=True)
class Started:
    """What a test can look at: a runnable that was started."""

    task: int
    life: int
    name: str
    kind: str
    text: str
    """Of the script, or the container's words as the shell would take them."""
    environment: Mapping[str, str]


@dataclass
class Settings:
    """What tests may change, before jobs start."""

    image_environment: dict[str, str] = field(default_factory=dict)
    """As set in the image."""
    recorded: dict[str, Mapping[int, int | None]] = field(default_factory=dict)
    """Images whose containers are only said to run, with the code that each task's ends with at once; a task without
    one runs until it is told to stop."""
    unpullable: set[str] = field(default_factory=set)
    sample_variables: bool = True
    """BATCH_MAIN_NODE_HOSTNAME and BATCH_NODE_*, which are in Google's samples but not in its documentation."""
    toolkit: bool = True
    """Debian images have nvidia-ctk."""
    driver: bool = True
    """The installation of the GPU driver works."""
    hosts_late: float = 0.0
    """Seconds until the list of hosts is complete."""
    vms: int = 1000
    """The quota."""
    boot: float = 0.05
    """Seconds."""


@dataclass
class Gang:
    """What the VMs of one job share."""

    job: types.Job
    settings: Settings
    isolation: Isolation
    folder: Path
    exports: Mapping[tuple[str, str], Path]
    log: Callable[[int, int, str], None]
    """Task, life and line."""
    started: list[Started]
    names: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Host name and address of each task's VM."""
    sandboxes: list[Sandbox] = field(default_factory=list)
    up: dict[int, Vm] = field(default_factory=dict)
    _arrived: dict[str, set[int]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def group(self) -> types.TaskGroup:
        return self.job.task_groups[0]

    @property
    def instance(self) -> types.AllocationPolicy.InstancePolicyOrTemplate:
        return self.job.allocation_policy.instances[0]

    @property
    def gpus(self) -> int:
        policy = self.instance.policy
        return MACHINES[policy.machine_type][2] or sum(one.count for one in policy.accelerators)

    @property
    def cos(self) -> bool:
        return self.instance.policy.boot_disk.image == "batch-cos"

    async def barrier(self, name: str, task: int) -> None:
        """Until all tasks are there."""
        self._arrived.setdefault(name, set()).add(task)
        self._tell()
        while len(self._arrived[name]) < self.group.task_count:
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def write_hosts(self) -> None:
        """Every VM knows the names of all that are up."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self.names.values())]
        for sandbox in self.sandboxes:
            sandbox.hosts.write_text("\n".join(lines) + "\n")
        for vm in self.up.values():
            vm.list_hosts()
        if hasattr(self.isolation, "names"):  # without namespaces, names are written out
            self.isolation.names |= dict(self.names.values())


class _Lines:
    """What a process writes, on its way to the log (see kubernetes_cluster.processes.Log)."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def write(self, line: bytes) -> None:
        self._write(line.decode(errors="replace").rstrip("\n"))

    def end(self) -> None:
        pass


class Vm:
    """One life of a task."""

    def __init__(self, gang: Gang, task: int, life: int) -> None:
        self.gang, self.task, self.life = gang, task, life
        self.folder = gang.folder / f"vm-{task}-{life}"
        self.files = self.folder / "files"
        self.name = f"{gang.job.uid[:40]}-group0-{task}-{life}"
        self.sandbox: Sandbox | None = None
        self.silent = False
        self._process: Real | None = None
        self._stop_timeout = 10.0
        self._lost: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._stopped = asyncio.Event()

    @property
    def commands(self) -> list[str]:
        """How the VM's own programs were called."""
        path = self.folder / "commands"
        return path.read_text().splitlines() if path.exists() else []

    async def boot(self) -> None:
        settings, gang = self.gang.settings, self.gang
        await asyncio.sleep(settings.boot)
        memory = {self.folder / f"shm-{number}": str(size) for number, size in self._shm().items()}
        self.sandbox = await gang.isolation.open(
            self.folder / "sandbox", self.name, nics=(), memory=memory, network_of=None
        )
        gang.names[self.task] = (self.name, self.sandbox.address)
        gang.sandboxes.append(self.sandbox)
        if gang.group.require_hosts_file:
            gang.up[self.task] = self
        gang.write_hosts()
        self._install()

    def _shm(self) -> dict[int, int]:
        found = {}
        for number, runnable in enumerate(self.gang.group.task_spec.runnables):
            if "container" in runnable:
                with contextlib.suppress(docker.UnknownFlagError):
                    found[number] = docker.parsed(runnable.container.options).shm
        return found

    async def run(self) -> int:
        """The task's exit code."""
        work = asyncio.ensure_future(self._runnables())
        limit = self.gang.group.task_spec.max_run_duration
        await asyncio.wait(
            {work, self._lost}, return_when=asyncio.FIRST_COMPLETED, timeout=limit.total_seconds() if limit else None
        )
        if self._lost.done():
            work.cancel()
            return self._lost.result()
        if not work.done():
            await self._end_process()
            work.cancel()
            return TOO_LONG
        return work.result()

    async def _runnables(self) -> int:
        first = 0
        for number, runnable in enumerate(self.gang.group.task_spec.runnables):
            if self._stopped.is_set() or (first and not runnable.always_run):
                continue
            code = await self._in_time(number, runnable)
            if code and not runnable.ignore_exit_status:
                first = first or code
        return first or (143 if self._stopped.is_set() else 0)

    async def _in_time(self, number: int, runnable: types.Runnable) -> int:
        limit = runnable.timeout.total_seconds() if runnable.timeout else None
        work = asyncio.ensure_future(self._runnable(number, runnable))
        stop = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED, timeout=limit)
            if not work.done() and "barrier" in runnable:
                return 143 if stop.done() else TOO_LONG
            if not work.done() and not stop.done():
                await self._end_process()
                return TOO_LONG
            return await work
        finally:
            work.cancel()
            stop.cancel()

    async def _runnable(self, number: int, runnable: types.Runnable) -> int:
        if "barrier" in runnable:
            await self.gang.barrier(runnable.barrier.name, self.task)
            return 0
        if "script" in runnable:
            return await self._script(number, runnable)
        return await self._container(number, runnable)

    # --- runnables ----------------------------------------------------------------------------------------------------

    def _batch_variables(self) -> dict[str, str]:
        """https://cloud.google.com/batch/docs/create-run-example-job, and BATCH_NODE_* of the samples."""
        group = self.gang.group
        mine = {
            "BATCH_TASK_INDEX": str(self.task),
            "BATCH_TASK_COUNT": str(group.task_count),
            "BATCH_TASK_RETRY_ATTEMPT": str(self.life),
        }
        if group.require_hosts_file:
            mine["BATCH_HOSTS_FILE"] = str(self.files / HOSTS.strip("/"))
        if self.gang.settings.sample_variables:
            mine |= {
                "BATCH_NODE_INDEX": str(self.task),
                "BATCH_NODE_COUNT": str(group.task_count),
                "BATCH_MAIN_NODE_HOSTNAME": self.gang.names[0][0] if 0 in self.gang.names else self.name,
                "BATCH_JOB_UID": self.gang.job.uid,
            }
        return mine

    async def _script(self, number: int, runnable: types.Runnable) -> int:
        given = {**self.gang.group.task_spec.environment.variables, **runnable.environment.variables}
        path = f"{self.folder / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        environment = {**given, **self._batch_variables(), "PATH": path, "HOME": "/root"}
        self._note(runnable, "script", runnable.script.text, environment)
        mounts = [Mount(self._own(place), place) for place in ("/var/lib/litgpt", "/var/lib/nvidia")]
        return await self._process_of(number, ["sh", "-c", runnable.script.text], environment, mounts)

    async def _container(self, number: int, runnable: types.Runnable) -> int:
        container = runnable.container
        words = [*([container.entrypoint] if container.entrypoint else []), *container.commands]
        try:
            options = docker.parsed(container.options)
            files = [self._own(place, folder=False).read_text() for place in options.env_files]
            self._check_engine(options, container.image_uri)
        except (docker.UnknownFlagError, OSError) as error:
            self._say(f"docker: {error}")
            return 125
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(CHECKOUT),
            "HOME": "/root",
            "LANG": "C.UTF-8",
            **self.gang.settings.image_environment,
            **self._batch_variables(),
            **self.gang.group.task_spec.environment.variables,
            **runnable.environment.variables,
        }
        for text in files:
            environment |= docker.env_file(text)
        environment |= options.environment
        self._note(runnable, "container", shlex.join(words), environment)
        if container.image_uri in self.gang.settings.recorded:
            code = self.gang.settings.recorded[container.image_uri].get(self.task)
            if code is None:
                await self._stopped.wait()
            return 143 if code is None else code
        if self.gang.cos and not self._let_in():
            await self._cut_off()
        self._stop_timeout = options.stop_timeout
        shm = self.folder / f"shm-{number}"
        mounts = [*(self._volume(volume) for volume in container.volumes), Mount(shm, "/dev/shm")]
        return await self._process_of(number, words, environment, mounts, options.workdir)

    def _check_engine(self, options: docker.Options, image: str) -> None:
        """What docker finds wrong before it starts anything."""
        if image in self.gang.settings.unpullable:
            raise docker.UnknownFlagError(f"Error response from daemon: manifest for {image} not found")
        if options.runtime == "nvidia":
            done = self.commands
            configured = "nvidia-ctk runtime configure --runtime=docker" in done
            if not configured or "systemctl restart docker" not in done[done.index(done[0]) :]:
                raise docker.UnknownFlagError("Error response from daemon: unknown or invalid runtime name: nvidia")

    async def _process_of(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        mounts: Sequence[Mount],
        workdir: str = "/",
    ) -> int:
        assert self.sandbox is not None
        folder = self.folder / f"runnable-{number}"
        program = Program("", command, environment, workdir)
        argv = self.gang.isolation.argv(self.sandbox, folder, mounts, program)
        lines, nested = _Lines(self._say), self.gang.isolation.nested
        self._process = await Real.start(argv, folder, lines, nested=nested)  # type: ignore[arg-type]
        return await self._process.wait()

    def _let_in(self) -> bool:
        """COS's firewall keeps other VMs out until it is told otherwise."""
        others = {name for name, _ in self.gang.names.values()}
        opened = {word for line in self.commands if line.startswith("iptables ") for word in line.split()}
        return self.gang.group.task_count == 1 or others <= opened

    async def _cut_off(self) -> None:
        assert self.sandbox is not None
        if self.sandbox.pause is not None:
            down = ("nsenter", "-t", str(self.sandbox.pause.pid), "--net", "ip", "link", "set", "eth0", "down")
            await (await asyncio.create_subprocess_exec(*down)).wait()

    def list_hosts(self) -> None:
        """Write down who is up; where `hosts_late`, the others are missing for a while."""
        path, names = self.files / HOSTS.strip("/"), [self.gang.names[task][0] for task in sorted(self.gang.names)]
        path.parent.mkdir(parents=True, exist_ok=True)
        whole, late = "\n".join(names) + "\n", self.gang.settings.hosts_late
        path.write_text(f"{self.name}\n" if late else whole)
        if late:
            asyncio.get_running_loop().call_later(late, path.write_text, whole)

    # --- files --------------------------------------------------------------------------------------------------------

    def _own(self, place: str, *, folder: bool = True) -> Path:
        path = self.files / place.strip("/")
        if folder:
            path.mkdir(parents=True, exist_ok=True)
        return path

    def _volume(self, volume: str) -> Mount:
        source, target, *mode = volume.split(":")
        for one in self.gang.group.task_spec.volumes:
            if "nfs" in one and (source == one.mount_path or source.startswith(f"{one.mount_path}/")):
                there = self.gang.exports[one.nfs.server, one.nfs.remote_path]
                return Mount(there / source[len(one.mount_path) :].strip("/"), target, mode == ["ro"])
        return Mount(self._own(source), target, mode == ["ro"])

    def _install(self) -> None:
        """Stand-ins for the VM's programs: each writes down how it was called."""
        bin_folder = self.folder / "bin"
        bin_folder.mkdir(parents=True, exist_ok=True)
        gpus, gang = self.gang.gpus, self.gang
        works = gang.settings.driver and gang.instance.install_gpu_drivers
        listing = "; ".join(f"echo 'GPU {number}: stand-in'" for number in range(gpus)) if gpus and works else "exit 9"
        programs = {"docker": "", "systemctl": "", "iptables": "", "mount": ""}
        libcuda = "echo '	libcuda.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so.1'" if works else ""
        if gang.cos:
            nvidia = self._own("/var/lib/nvidia")
            if gpus and works:
                (nvidia / "lib64").mkdir()
                (nvidia / "lib64/libcuda.so.1").touch()
                self._program(nvidia / "bin/nvidia-smi", listing)
        else:
            programs |= {"nvidia-smi": listing, "ldconfig": libcuda}
            programs |= {"nvidia-ctk": ""} if gang.settings.toolkit else {}
        for name, body in programs.items():
            self._program(bin_folder / name, body)

    def _program(self, path: Path, body: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        commands = shlex.quote(str(self.folder / "commands"))
        path.write_text(f'#!/bin/sh\necho "{path.name} $*" >> {commands}\n{body}\n')
        path.chmod(0o755)

    def _note(self, runnable: types.Runnable, kind: str, text: str, environment: Mapping[str, str]) -> None:
        self.gang.started.append(Started(self.task, self.life, runnable.display_name, kind, text, dict(environment)))

    def _say(self, line: str) -> None:
        if not self.silent:
            self.gang.log(self.task, self.life, line)

    # --- ends ---------------------------------------------------------------------------------------------------------

    async def _end_process(self) -> None:
        """As `docker stop`."""
        if self._process is None:
            return
        self._process.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._process.wait()), self._stop_timeout)
            return
        self._process.signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> None:
        """The job is cancelled."""
        self._stopped.set()
        if not self._lost.done():
            await self._end_process()

    async def lose(self, code: int, *, alive: bool = False) -> None:
        """The VM is gone, or only seems to be (`alive`)."""
        self.silent = True
        if not alive:
            self._kill()
        if not self._lost.done():
            self._lost.set_result(code)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.signal(signal.SIGKILL)

    async def delete(self) -> None:
        """With everything that runs on it."""
        self._kill()
        if self._process is not None:
            await self._process.wait()
        if self.sandbox is not None:
            await self.gang.isolation.close(self.sandbox)
            self.gang.sandboxes.remove(self.sandbox)
            self.sandbox = None
