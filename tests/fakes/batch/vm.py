"""A VM of a task: a folder and an address of loopback, on which the task's runnables run in order."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from google.cloud.batch_v1 import types

from litgpt_demo.node.agent import processes_with_env

CHECKOUT = Path(__file__).parents[3]
MARK = "BATCH_VM"
"""The variable with a VM's folder, in the environment of every process on it."""
FOLDERS = ("/var/lib/litgpt", "/var/lib/nvidia")
"""Each VM has its own; they are written out where scripts name them."""
CANCELLED = 143


class Vm:
    """The one life of a task.

    Args:
        hosts: addresses of all VMs of the job, of which that with the task's number is this one's.
        port: what takes the place of node 0's port, which each VM has to itself and this machine has not.
    """

    def __init__(self, folder: Path, job: types.Job, task: int, *, hosts: Sequence[str], port: int = 29500) -> None:
        self.folder, self._spec, self._port = folder / f"vm-{task}", job.task_groups[0].task_spec, port
        self._ended = 0
        """The exit code of a VM that was lost, or whose job was cancelled."""
        self._process: subprocess.Popen[str] | None = None
        for place in FOLDERS:
            self._own(place).mkdir(parents=True)
        (self.folder / "hosts").write_text("".join(f"{host}\n" for host in hosts))
        self.variables = {"BATCH_TASK_INDEX": str(task), "BATCH_TASK_RETRY_ATTEMPT": "0"}
        self.variables |= {"BATCH_HOSTS_FILE": str(self.folder / "hosts")}
        self.variables |= {"BATCH_NODE_INDEX": str(task), "BATCH_MAIN_NODE_HOSTNAME": hosts[0]}
        # Stand-ins for the VM's programs: each writes down how it was called.
        programs = dict.fromkeys(("docker", "systemctl", "iptables", "mount", "nvidia-smi", "nvidia-ctk"), "")
        programs |= {"hostname": f"echo {hosts[task]}", "ldconfig": "echo libcuda.so.1"}
        for program, body in programs.items():
            self._program(self.folder / "bin" / program, body)
        self._program(self._own("/var/lib/nvidia/bin/nvidia-smi"), "")
        self._program(self._own("/var/lib/nvidia/lib64/libcuda.so.1"), "")

    def _program(self, path: Path, body: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{path.name} $*" >> "{self.folder}/commands"\n{body}\n')
        path.chmod(0o755)

    def _own(self, place: str) -> Path:
        return self.folder / place.strip("/")

    @property
    def commands(self) -> list[str]:
        """How the VM's own programs were called."""
        return (self.folder / "commands").read_text().splitlines()

    @property
    def node(self) -> dict[str, str]:
        """What a container is told of its node."""
        lines = self._own("/var/lib/litgpt/node.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def run(self, log: Callable[[str], None], *, contained: bool = True) -> int:
        """Run the task and return its exit code.

        Args:
            log: takes each line of its output.
            contained: its containers run too, and not only what is before them.
        """
        for runnable in self._spec.runnables:
            code = 0
            if "script" in runnable and not self._ended:
                text = runnable.script.text.replace(":29500", f":{self._port}")
                for place in FOLDERS:
                    text = text.replace(place, str(self._own(place)))
                path = f"{self.folder / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin"
                code = self._process_of(["sh", "-c", text], {**self.variables, "PATH": path}, log)
            elif "container" in runnable and not self._ended and contained:
                code = self._container(runnable.container, log)
            if code and not runnable.ignore_exit_status:
                return code if self._ended in {0, CANCELLED} else self._ended
        return self._ended

    def _container(self, container: types.Runnable.Container, log: Callable[[str], None]) -> int:
        """What is mounted from elsewhere is at the same place here."""
        assert "--env-file=/var/lib/litgpt/node.env" in shlex.split(container.options)
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(CHECKOUT),
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",  # the host name of this machine may resolve to nothing
            **self.variables,
            **self._spec.environment.variables,
            **self.node,
        }
        command = [container.entrypoint, *container.commands]
        for volume in container.volumes:
            source, target = volume.split(":")[:2]
            if source in FOLDERS:
                command = [word.replace(target, str(self._own(source))) for word in command]
        return self._process_of(command, environment, log)

    def _process_of(self, command: Sequence[str], environment: Mapping[str, str], log: Callable[[str], None]) -> int:
        with subprocess.Popen(
            command, env={**environment, MARK: str(self.folder)}, cwd=self.folder, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        ) as process:  # fmt: skip
            self._process = process
            if self._ended:
                self.end(self._ended)
            for line in process.stdout:
                log(line.rstrip("\n"))
        self._kill()  # what it has left: a container ends with its first process
        return 128 - process.returncode if process.returncode < 0 else process.returncode

    def end(self, code: int = CANCELLED) -> None:
        """The VM is gone, and the task ends with this code; or the job is cancelled, and its container may save."""
        self._ended = code
        if self._process is not None and self._process.poll() is None:
            if code == CANCELLED:
                self._process.terminate()
            else:
                self._kill()

    def _kill(self) -> None:
        for process in processes_with_env(MARK, str(self.folder)):
            os.kill(process.pid, signal.SIGKILL)
