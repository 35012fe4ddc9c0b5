"""A VM of a task: a folder and an address of loopback, on which the task's runnables run in order."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from google.cloud.batch_v1 import types

from litgpt_demo.node.agent import tagged

from .admission import MACHINES

if TYPE_CHECKING:
    from .cloud import Record

CHECKOUT = Path(__file__).parents[3]
MARK = "BATCH_VM"
"""The variable with a VM's name, in the environment of every process on it."""
HOSTS = "hosts"
FOLDERS = ("/var/lib/litgpt", "/var/lib/nvidia")
"""Each VM has its own; they are written out where scripts name them."""
PORT = ":29500"
"""A VM has all ports to itself; a job here has one that nobody else has."""

# `docker run`'s flags: what does not know them ends with 125.
_FLAGS = frozenset({
    "--network", "--shm-size", "--ulimit", "--stop-timeout", "--env-file", "--runtime", "--gpus", "--privileged",
    "--cap-drop", "--security-opt",
})  # fmt: skip


@dataclass(frozen=True)
class Started:
    """What a test can look at: a runnable that was started."""

    task: int
    life: int
    name: str
    kind: str
    environment: Mapping[str, str]


@dataclass
class Settings:
    """What tests may change, before jobs start."""

    recorded: dict[str, Mapping[int, int | None]] = field(default_factory=dict)
    """Images whose containers are only said to run, with the code that each task's ends with at once; a task without
    one runs until it is told to stop."""
    sample_variables: bool = True
    """BATCH_MAIN_NODE_HOSTNAME and BATCH_NODE_*, which are in Google's samples but not in its documentation."""
    toolkit: bool = True
    """Debian images have nvidia-ctk."""
    driver: bool = True
    """The installation of the GPU driver works."""
    vms: int = 1000
    """The quota."""
    boot: float = 0.0
    """Seconds."""


class Vm:
    """One life of a task."""

    def __init__(self, record: Record, task: int, life: int) -> None:
        self.record, self.task, self.life = record, task, life
        self.name = record.cloud.new_address()
        self.folder = record.folder / f"vm-{task}-{life}"
        self.lost = 0
        """The code that a task whose VM is gone ends with."""
        self.stopped = False
        self._process: subprocess.Popen[str] | None = None
        for place in FOLDERS:
            self._own(place).mkdir(parents=True)
        self._install()

    @property
    def over(self) -> bool:
        return bool(self.lost or self.stopped)

    @property
    def commands(self) -> list[str]:
        """How the VM's own programs were called."""
        path = self.folder / "commands"
        return path.read_text().splitlines() if path.exists() else []

    def run(self) -> int:
        """The task's exit code."""
        first = 0
        for runnable in self.record.group.task_spec.runnables:
            if not self.over and not first:
                code = self._runnable(runnable)
                first = 0 if runnable.ignore_exit_status else code
        return self.lost or first or (143 if self.stopped else 0)

    def _runnable(self, runnable: types.Runnable) -> int:
        if "barrier" in runnable:
            arrived = self.record.arrived.setdefault(runnable.barrier.name, set())
            arrived.add(self.task)
            self.record.cloud.tell()
            self.record.cloud.wait(lambda: self.over or len(arrived) == self.record.group.task_count)
            return 0
        if "script" in runnable:
            return self._script(runnable)
        return self._container(runnable)

    # --- runnables ----------------------------------------------------------------------------------------------------

    def _batch_variables(self) -> dict[str, str]:
        """https://cloud.google.com/batch/docs/create-run-example-job, and BATCH_NODE_* of the samples."""
        mine = {"BATCH_TASK_INDEX": str(self.task), "BATCH_TASK_RETRY_ATTEMPT": str(self.life)}
        if self.record.group.require_hosts_file:
            hosts = self.folder / HOSTS
            hosts.write_text("".join(f"{name}\n" for name in self.record.names))
            mine["BATCH_HOSTS_FILE"] = str(hosts)
        if self.record.cloud.options.sample_variables:
            mine |= {"BATCH_NODE_INDEX": str(self.task), "BATCH_MAIN_NODE_HOSTNAME": self.record.names[0]}
        return mine

    def _script(self, runnable: types.Runnable) -> int:
        given = {**self.record.group.task_spec.environment.variables, **runnable.environment.variables}
        environment = {
            **given,
            **self._batch_variables(),
            "PATH": f"{self.folder / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin",
        }
        self._note(runnable, "script", environment)
        text = runnable.script.text
        for place in FOLDERS:
            text = text.replace(place, str(self._own(place)))
        return self._process_of(["sh", "-c", text.replace(PORT, f":{self.record.port}")], environment)

    def _container(self, runnable: types.Runnable) -> int:
        container = runnable.container
        flags = dict(word.partition("=")[::2] for word in shlex.split(container.options))
        if unknown := flags.keys() - _FLAGS:
            return self._docker_fails(f"unknown flags: {sorted(unknown)}")
        configured = "nvidia-ctk runtime configure --runtime=docker" in self.commands
        if flags.get("--runtime") == "nvidia" and not configured:
            return self._docker_fails("Error response from daemon: unknown or invalid runtime name: nvidia")
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(CHECKOUT),
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",  # the host name of this machine may resolve to nothing
            **self._batch_variables(),
            **self.record.group.task_spec.environment.variables,
            **dict(line.split("=", 1) for line in self._own(flags["--env-file"]).read_text().splitlines()),
        }
        self._note(runnable, "container", environment)
        recorded = self.record.cloud.options.recorded.get(container.image_uri)
        if recorded is not None:
            code = recorded.get(self.task)
            if code is None:
                self.record.cloud.wait(lambda: self.over)
            return 143 if code is None else code
        words = [container.entrypoint, *container.commands]
        for volume in container.volumes:
            source, target = volume.split(":")[:2]
            there = str(self._mounted(source))
            words = [word.replace(target, there) for word in words]
            environment = {name: value.replace(target, there) for name, value in environment.items()}
        return self._process_of(words, environment)

    def _docker_fails(self, line: str) -> int:
        self.record.log(self.task, self.life, f"docker: {line}")
        return 125

    def _process_of(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        with subprocess.Popen(
            command, env={**environment, MARK: self.name}, cwd=self.folder, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        ) as process:  # fmt: skip
            self._process = process
            if self.lost:
                self._kill()
            assert process.stdout is not None
            for line in process.stdout:
                if not self.lost:
                    self.record.log(self.task, self.life, line.rstrip("\n"))
        self._kill()  # what it has left: a container ends with its first process
        code = process.returncode
        return 128 - code if code < 0 else code

    # --- files --------------------------------------------------------------------------------------------------------

    def _own(self, place: str) -> Path:
        return self.folder / place.strip("/")

    def _mounted(self, source: str) -> Path:
        for one in self.record.group.task_spec.volumes:
            if source == one.mount_path:
                return self.record.cloud.exports[one.nfs.server, one.nfs.remote_path]
        return self._own(source)

    def _install(self) -> None:
        """Stand-ins for the VM's programs: each writes down how it was called."""
        options, instance = self.record.cloud.options, self.record.job.allocation_policy.instances[0]
        gpus = MACHINES[instance.policy.machine_type][2]
        works = gpus and options.driver and instance.install_gpu_drivers
        listing = f"echo '{gpus} GPUs'" if works else "exit 9"
        programs = dict.fromkeys(("docker", "systemctl", "iptables", "mount"), "") | {"hostname": f"echo {self.name}"}
        if instance.policy.boot_disk.image == "batch-cos":
            if works:
                (self._own("/var/lib/nvidia/lib64")).mkdir()
                (self._own("/var/lib/nvidia/lib64/libcuda.so.1")).touch()
                self._program(self._own("/var/lib/nvidia/bin/nvidia-smi"), listing)
        else:
            programs |= {"nvidia-smi": listing, "ldconfig": "echo 'libcuda.so.1 (libc6,x86-64)'" if works else ""}
            programs |= {"nvidia-ctk": ""} if options.toolkit else {}
        for name, body in programs.items():
            self._program(self.folder / "bin" / name, body)

    def _program(self, path: Path, body: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{path.name} $*" >> "{self.folder}/commands"\n{body}\n')
        path.chmod(0o755)

    def _note(self, runnable: types.Runnable, kind: str, environment: Mapping[str, str]) -> None:
        self.record.cloud.started.append(Started(self.task, self.life, runnable.display_name, kind, environment))

    # --- ends ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The job is cancelled: the container may save."""
        self.stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def lose(self, code: int) -> None:
        """The VM is gone."""
        self.lost = code
        if self._process is not None and self._process.poll() is None:
            self._kill()

    def _kill(self) -> None:
        for process in tagged(MARK, self.name):
            os.kill(process.pid, signal.SIGKILL)
