"""A small training by the real command, disturbed from outside as a system or a colleague would, and then judged.

The judge is a training that nobody disturbed: weights and checkpoints have to be the same, bit for bit.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import httpx
import psutil
import yaml
from job_handles import handle_of
from waiting import until

from launcher.config import RunConfig, overridden, validated
from launcher.job import JobState
from launcher.runs.lease import Lease
from launcher.runs.listing import orphaned_resources
from launcher.runs.run import plan_run
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.node.agent import kill_by_env_marker, processes_with_env
from litgpt_demo.runs import LITGPT, read_metrics
from litgpt_demo.training.checkpoints import list_complete

# Some seconds of two processors, with six checkpoints on the way. It trains nothing of use.
TRAINING = {
    "name": "drill",
    "data": {
        "corpus": {"kind": "stdlib", "max_bytes": 600_000},
        "tokenizer": {"kind": "train", "vocab_size": 512},
        "validation_fraction": 0.05,
    },
    "model": {"name": None, "config": {"n_layer": 2, "n_embd": 128, "n_head": 4}, "sequence_length": 128},
    "train": {
        "global_batch": 16, "micro_batch": 4, "max_steps": 48, "learning_rate": 1e-3, "warmup_steps": 4,
        "precision": "32-true", "evaluate_every": 48, "evaluation_samples": 16, "checkpoint_every": 8,
    },
    "platform": {"kind": "local", "nodes": 2, "processes_per_node": 1, "grace_period": 20},
}  # fmt: skip
MARK = "TRAIN_LITGPT_DRILL"
"""The variable that every process of a drill has, its jobs on this machine among them."""
KILLED = -signal.SIGKILL
RANK, AGENT = "litgpt_demo train", "litgpt_demo node"
Sight: TypeAlias = Callable[["Scene"], object]


@dataclass
class Ground:
    """The place of a module's drills, with a Prefect server that can be killed and comes back at the same address."""

    folder: Path
    home: Path
    """Of the server."""
    changes: Mapping[str, Any]
    """Settings of the training that differ from those of the file."""
    environment: Mapping[str, str]
    """Where its bucket is."""
    port: int = 0
    made: int = 0
    server: subprocess.Popen[bytes] | None = None
    undisturbed: tuple[str, tuple[int, ...]] | None = None
    """The hash of the exported weights, and the steps of the checkpoints."""

    @contextmanager
    def used(self) -> Iterator[Ground]:
        """Have the server, and a training that nobody disturbs."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        try:
            self.start_server()
            with self.scene() as scene:
                assert scene.end_of(scene.run()) == 0, scene.text
                self.undisturbed = scene.result()
            yield self
        finally:
            self.kill_server()

    def start_server(self) -> None:
        command = [sys.executable, "-m", "prefect", "server", "start", "--no-ui", "--port", str(self.port)]
        with (self.home / "server.log").open("ab") as log:
            env = {**os.environ, "PREFECT_HOME": str(self.home)}
            self.server = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        until(self._answers)

    def kill_server(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.wait()

    def _answers(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.port}/api/health", trust_env=False).is_success
        return False

    @contextmanager
    def scene(self, **changes: Any) -> Iterator[Scene]:
        """Yield the place of one drill; whatever it comes to, nothing of it runs on."""
        self.made += 1
        place = {"root": str(self.folder / "root"), "name": f"drill-{os.getpid()}-{self.made}"}
        document = overridden(TRAINING, {**place, **self.changes, **changes})
        with patch.dict(os.environ, self.environment):
            scene = Scene(self, validated(RunConfig, document, where="drill"))
            try:
                yield scene
            finally:
                kill_by_env_marker(MARK, scene.config.name, grace=0)
                for command in scene.logs:
                    command.wait()
                with suppress(TrainLitgptError):
                    scene.attempts.cancel()


class Scene:
    """One drill as it goes on: its commands, its run, and what has been seen of them."""

    def __init__(self, ground: Ground, config: RunConfig) -> None:
        self.ground, self.config = ground, config
        self.attempts, self.storage = handle_of(config).attempts, plan_run(config).storage
        self.logs: dict[subprocess.Popen[bytes], Path] = {}
        """The commands as a user types them, each in a session of its own, and what they said."""
        self.most = 0
        """The most jobs that were there at once."""

    def run(self) -> subprocess.Popen[bytes]:
        """Type `train-litgpt run`; it goes on beside this process."""
        folder, name = self.ground.folder, self.config.name
        (config := folder / f"{name}.yaml").write_text(yaml.safe_dump(self.config.model_dump(mode="json")))
        log = folder / f"{name}-{len(self.logs)}.txt"
        environment = {
            **os.environ, MARK: name, "PREFECT_API_URL": f"http://127.0.0.1:{self.ground.port}/api",
            "PREFECT_HOME": str(folder / "prefect"), "TRAIN_LITGPT_HOME": str(folder / "jobs"),
        }  # fmt: skip
        command = [sys.executable, "-m", "cli", "run", str(config)]
        with log.open("wb") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        self.logs[process] = log
        return process

    @property
    def text(self) -> str:
        """Everything that the commands have said."""
        return "\n".join(log.read_text(errors="replace") for log in self.logs.values())

    def kill(self, marker: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to the youngest process of the job with these words in its command line."""
        found = []
        for process in processes_with_env(MARK, self.config.name):
            with suppress(psutil.Error):
                # torchrun's command line has its ranks' words too; a rank has a number.
                if marker in " ".join(process.cmdline()) and ("RANK" in process.environ()) == (marker == RANK):
                    found.append(process)
        max(found, key=lambda process: process.create_time()).send_signal(number)

    def until(self, sight: Sight) -> None:
        """Return when it is seen; the commands must not end before."""

        def seen() -> bool:
            over = all(command.poll() is not None for command in self.logs)
            found = self._sees(sight)
            assert found or not over, f"the commands ended before that:\n{self.text[-3000:]}"
            return found

        until(seen)

    def _sees(self, sight: Sight) -> bool:
        with suppress(TrainLitgptError):  # a platform or a bucket that does not answer shows nothing
            self.most = max(self.most, sum(attempt.status.state.is_live for attempt in self.attempts.all()))
            return bool(sight(self))
        return False

    def pause(self, seconds: float) -> None:
        """Look on for so long."""
        over = time.monotonic() + seconds
        while time.monotonic() < over:
            self._sees(live)
            time.sleep(0.2)

    def end_of(self, command: subprocess.Popen[bytes]) -> int:
        """Return how a command ended: its exit code, or the negative number of a signal."""
        while command.poll() is None:
            self.pause(0.2)
        return command.wait()

    # --- the judgement ---

    def result(self) -> tuple[str, tuple[int, ...]]:
        """Return what all drills have to end with."""
        weights = sha256(self.storage.read(f"{LITGPT}/lit_model.pth", most=1 << 34)).hexdigest()
        return weights, tuple(checkpoint.step for checkpoint in list_complete(self.storage))

    def require_promises(self, *patterns: str, attempts: tuple[int, ...] = (1,), kept: bool = False) -> None:
        """Hold the end of the run against the promises; Kubernetes keeps (`kept`) a finished job for `platform.ttl`."""
        assert self.result() == self.ground.undisturbed
        assert len(self.attempts.records()) in attempts, self.text
        assert self.most <= 1
        assert [pattern for pattern in patterns if not re.search(pattern, self.text)] == [], self.text
        assert re.search("^Traceback", self.text, re.MULTILINE) is None, self.text
        assert self.attempts.live() is None
        orphaned = [
            resource
            for resource in orphaned_resources(self.attempts.index)
            if resource.run == self.attempts.run and not kept
        ]
        assert orphaned == [], orphaned
        until(lambda: not processes_with_env(MARK, self.config.name))
        with Lease(self.attempts.index, self.attempts.run) as lease:
            assert lease.take()


def step(number: int) -> Sight:
    """Return the sight of a step; in a bucket metrics come with each checkpoint."""
    return lambda scene: number <= max((row["step"] for row in read_metrics(scene.storage)), default=0)


def printed(pattern: str) -> Sight:
    return lambda scene: re.search(pattern, scene.text)


def recorded(scene: Scene) -> bool:
    """Whether an attempt is written down; its platform may not have been asked yet."""
    return bool(scene.attempts.records())


def live(scene: Scene) -> bool:
    return scene.attempts.live() is not None


def trained(scene: Scene) -> bool:
    """Whether the job has ended, and nobody has collected its model."""
    last = scene.attempts.last()
    return last is not None and last.status.state is JobState.SUCCEEDED
