"""Run:ai's command line, as documented for two generations, and a workload in its words.

Which flags a release has differs; what is known here is only where to begin. A flag that may be missing, or is spelt in
more than one way, is an `Option` with alternatives, of which the first that the program at hand knows is taken. Values
hold no commas where the program would take them apart (v1: "separate values with a comma or add the flag twice").

v1: https://docs.run.ai/v2.13/Researcher/cli-reference/runai-submit-dist-pytorch/
v2: https://docs.nvidia.com/run-ai/self-hosted/reference/cli/runai/training/runai-training-pytorch-submit
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from launcher.errors import ConfigProblem
from launcher.platforms.runai.render import Workload

Generation = Literal["v1", "v2"]

SUBMIT = MappingProxyType(
    {
        # The newest first; early v2 had one command for all frameworks, later ones an alias.
        "v2": (
            ("training", "pytorch", "submit"),
            ("pytorch", "submit"),
            ("distributed", "submit"),
        ),
        "v1": (("submit-dist", "pytorch"),),
    }
)

# Of the flags that are documented, those that we use.
_BOTH = (
    "annotation", "backoff-limit", "command", "extended-resource", "image", "image-pull-policy", "label", "large-shm",
    "node-pools", "node-type", "preferred-pod-topology-key", "project", "required-pod-topology-key", "run-as-user",
    "workers",
)  # fmt: skip
_V1 = ("cpu", "gpu", "memory", "name", "pvc", "pvc-exists")
_V2 = (
    "cpu-core-request", "cpu-memory-request", "existing-pvc", "gpu-devices-request", "gpu-portion-request",
    "gpu-request-type", "run-as-gid", "run-as-uid",
)  # fmt: skip

EXCLUDE = "--exclude-node"
"""A machine to avoid, as the newest releases of v2 have it; that it is named by its host name is INFERRED."""

Spelling: TypeAlias = tuple[str, ...]
"""A flag and its value, or a flag alone."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The features of one version of the program."""

    generation: Generation
    submit: tuple[str, ...]
    """Its command for a PyTorch training."""
    flags: frozenset[str]
    """Long flags of that command."""


DOCUMENTED = MappingProxyType(
    {
        "v1": Dialect(generation="v1", submit=SUBMIT["v1"][0], flags=frozenset(f"--{name}" for name in (*_BOTH, *_V1))),
        "v2": Dialect(generation="v2", submit=SUBMIT["v2"][0], flags=frozenset(f"--{name}" for name in (*_BOTH, *_V2))),
    }
)


@dataclass(frozen=True)
class Option:
    """Something to say, in one of several spellings."""

    setting: str
    """The user's setting that asks for it."""
    spellings: tuple[Spelling, ...]
    optional: bool = False
    """Left out where the program has none of them."""

    @property
    def names(self) -> str:
        """The flags, for people."""
        return " or ".join(spelling[0] for spelling in self.spellings)


def said(setting: str, *words: str, optional: bool = False) -> Option:
    """An option with one spelling."""
    return Option(setting, (words,), optional)


def submit_words(work: Workload, dialect: Dialect, *, program: str, project: str) -> list[str]:
    """The whole command line.

    Raises:
        ConfigProblem: the program lacks flags that the settings ask for; names all of them.
    """
    options = _v1(work) if dialect.generation == "v1" else _v2(work, dialect)
    words: list[str] = []
    missing: list[Option] = []
    for option in options:
        spelling = next((words for words in option.spellings if words[0] in dialect.flags or words[0] == "-e"), None)
        if spelling is not None:
            words += spelling
        elif not option.optional:
            missing.append(option)
    if missing:
        told = "; ".join(f"{one.setting} needs {one.names}" for one in missing)
        raise ConfigProblem(
            f"`{program} {' '.join(dialect.submit)}` has not got every flag: {told}. Leave the setting out, install a "
            "newer runai, or submit by REST (platform.url)"
        )
    name = ["--name", work.name] if dialect.generation == "v1" else [work.name]
    return [
        program, *dialect.submit, *name, "--project", project, *words, "--command", "--", *work.words,
    ]  # fmt: skip


def _v1(work: Workload) -> Iterator[Option]:
    settings = work.settings
    yield from _common(work)
    yield said("platform.gpus", "--gpu", f"{settings.gpus:g}")
    if settings.cpus is not None:
        yield said("platform.cpus", "--cpu", f"{settings.cpus:g}")
    if settings.memory is not None:
        yield said("platform.memory", "--memory", settings.memory)
    for claim in settings.claims:
        exists = f"claimname={claim.name},path={claim.path}"
        # The page has one spelling, its snippet another; before 2.10 there was neither.
        spellings = ("--pvc-exists", exists), ("--pvc-exist", exists), ("--pvc", f"{claim.name}:{claim.path}")
        yield Option("platform.claims", spellings)
    if settings.node_pools:
        # One string, in order; that commas separate them is INFERRED.
        yield said("platform.node_pools", "--node-pools", ",".join(settings.node_pools))
    if settings.priority is not None:
        yield said("platform.priority", "--priority", settings.priority)
    if settings.preemptible:
        yield said("platform.preemptible", "--preemptible")


def _v2(work: Workload, dialect: Dialect) -> Iterator[Option]:
    settings = work.settings
    if dialect.submit[0] == "distributed":
        yield said("PyTorch", "--framework", "PyTorch")
    yield from _common(work)
    if settings.gpus >= 1:
        yield said("platform.gpus", "--gpu-devices-request", f"{settings.gpus:g}")
    elif settings.gpus:
        yield said("platform.gpus", "--gpu-devices-request", "1")
        yield said("platform.gpus", "--gpu-request-type", "portion")
        yield said("platform.gpus", "--gpu-portion-request", f"{settings.gpus:g}")
    if settings.cpus is not None:
        yield said("platform.cpus", "--cpu-core-request", f"{settings.cpus:g}")
    if settings.memory is not None:
        yield said("platform.memory", "--cpu-memory-request", settings.memory)
    for claim in settings.claims:
        yield said("platform.claims", "--existing-pvc", f"claimname={claim.name},path={claim.path}")
    for pool in settings.node_pools:
        yield said("platform.node_pools", "--node-pools", pool)
    if settings.priority is not None:
        yield said("platform.priority", "--priority", settings.priority)
    if settings.preemptible is not None:
        yield said("platform.preemptible", "--preemptibility", preemptibility(settings.preemptible))
    for machine in work.exclude_nodes:
        yield said("the machines to avoid", EXCLUDE, machine, optional=True)  # `avoidable` has said where it cannot
    # Which machine a pod is on, for verdicts.
    yield said("LITGPT_HOST", "--env-pod-field-ref", "LITGPT_HOST=spec.nodeName", optional=True)


def _common(work: Workload) -> Iterator[Option]:
    """The name that both generations share."""
    settings = work.settings
    yield said("image", "--image", work.image)
    # Pinned by digest: what is there is right.
    yield said("image", "--image-pull-policy", "IfNotPresent")
    yield said("platform.nodes", "--workers", str(work.workers))
    # A gang cannot heal pod by pod: a new attempt is ours to make.
    yield said("restarts", "--backoff-limit", "0")
    for name, value in work.labels.items():
        yield said("labels", "--label", f"{name}={value}")
    for name, value in work.annotations.items():
        # The programs take a value apart at its commas.
        yield said("platform.network", "the REST API" if "," in value else "--annotation", f"{name}={value}")
    for name, count in work.resources.items():
        yield said("platform.network", "--extended-resource", f"{name}={count}")
    for name, value in work.variables.items():
        # The long form names an asset in the newest releases; the short one always sets a variable.
        yield said("env", "-e", f"{name}={value}")
    if settings.secrets:
        yield said("platform.secrets", "the REST API")
    if settings.node_type is not None:
        yield said("platform.node_type", "--node-type", settings.node_type)
    if settings.topology is not None:
        how = "required" if settings.topology_required else "preferred"
        yield said("platform.topology", f"--{how}-pod-topology-key", settings.topology)
    if settings.large_shm:
        yield said("platform.large_shm", "--large-shm")
    if settings.run_as_user:
        yield said("platform.run_as_user", "--run-as-user")
    if settings.uid is not None:
        yield said("platform.uid", "--run-as-uid", str(settings.uid))
    if settings.gid is not None:
        yield said("platform.gid", "--run-as-gid", str(settings.gid))


def preemptibility(preemptible: bool) -> str:
    """The name in REST and CLI v2."""
    return "preemptible" if preemptible else "non-preemptible"


def flags_in(help_text: str) -> frozenset[str]:
    """The long flags that a `--help` lists: each is the first thing on its line, or follows its short form."""
    found = set()
    for line in help_text.splitlines():
        words: Sequence[str] = line.replace(",", " ").split()
        if words and words[0].startswith("-"):
            found |= {word.partition("=")[0] for word in words[:2] if word.startswith("--")}
    return frozenset(found)
