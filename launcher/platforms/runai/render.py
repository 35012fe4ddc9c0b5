"""Rendering of a job for Run:ai, for its program and its REST API alike: pods, command, environment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from launcher.environment import Entry, node_environment
from launcher.errors import ConfigProblem
from launcher.job import UNBUILT, Job
from launcher.networks.profile import Network
from launcher.platforms.log_files import JobRef
from launcher.platforms.runai.settings import RunaiPlatformConfig
from launcher.platforms.settings import LONGEST_LABEL
from litgpt_demo.node.rendezvous import PYTORCHJOB, SPEC, pack, plain

SCRATCH = "/tmp/litgpt"
"""A pod's own logs, error files and staged data, writable by any user; it goes with the pod."""


PREEMPTIBILITY = {None: None, True: "preemptible", False: "non-preemptible"}
"""The names of it in REST and CLI v2."""


class Workload(NamedTuple):
    """One PyTorch training as Run:ai has it: a master, and workers one fewer than pods. That it takes 0 workers is
    INFERRED."""

    job: Job
    settings: RunaiPlatformConfig
    network: Network
    command: tuple[str, ...]
    """The command of each pod; no word has a character that a shell interprets."""
    variables: Mapping[str, str]
    """Variables of the pod, plain words too; the others are packed into the command."""
    node: Mapping[str, object]
    """The command and its environment unpacked, for people."""
    environment: list[Entry]


class WorkloadReference(JobRef):
    platform = "Run:ai"
    scheme = "runai"


def workload(job: Job, settings: RunaiPlatformConfig) -> Workload:
    # Pods are called `<job>-master-0` and `<job>-worker-<i>`, and their names become host names.
    longest = len(job.attempt_name) + len("-worker-999")
    if longest > LONGEST_LABEL:
        what = f"{job.attempt_name!r} cannot be a workload's name: its pods' would have {longest} characters"
        raise ConfigProblem(f"{what}, and Kubernetes takes {LONGEST_LABEL}", fix="choose another `name` for the run")
    network = settings.fabric
    shm = network.node.shm_bytes if settings.large_shm else 0
    entries = node_environment(job, settings, network, allow_tcp_fallback=settings.allow_tcp_fallback, shm_bytes=shm)
    variables = {entry.name: entry.value for entry in entries}
    shown = {name: value for name, value in variables.items() if plain(value)}
    hidden = {name: value for name, value in variables.items() if name not in shown}
    # One command line for all pods. The number of nodes is said, never read: Run:ai's WORLD_SIZE has two meanings.
    arguments = job.node_command(
        node_rank=PYTORCHJOB,
        master=PYTORCHJOB,
        directory=f"{SCRATCH}/{job.attempt_name}",
        log_flags=("--log-uri", job.directory, "--log-every", "10"),  # seconds; that copy is what is read
        grace=settings.grace_period,
    )
    packed_command = ("python", *arguments[:3], SPEC, pack(arguments[3:], hidden))
    unpacked = {
        "image": job.image or UNBUILT,
        "command": ["python", *arguments],
        "environment": variables,
        **({"by_hand": " ".join(packed_command)} if settings.interactive else {}),
    }
    command = ("sleep", "infinity") if settings.interactive else packed_command
    return Workload(job, settings, network, command, shown, unpacked, entries)
