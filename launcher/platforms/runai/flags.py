"""Run:ai's command line, as documented for two generations, and a workload in its words.

Which flags a release has differs; what is known here is only where to begin. Values hold no commas where the program
would take them apart (v1: "separate values with a comma or add the flag twice").

v1: https://docs.run.ai/v2.13/Researcher/cli-reference/runai-submit-dist-pytorch/
v2: https://docs.nvidia.com/run-ai/self-hosted/reference/cli/runai/training/runai-training-pytorch-submit
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from launcher.errors import ConfigProblem
from launcher.platforms.runai.render import Workload

Generation = Literal["v1", "v2"]

SUBMIT = MappingProxyType(
    {
        # The newest first; early v2 had one command for all frameworks, later ones an alias.
        "v2": (("training", "pytorch", "submit"), ("pytorch", "submit"), ("distributed", "submit")),
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
_HOST = "--env-pod-field-ref"

Row: TypeAlias = tuple[str, str | Iterable[str] | bool | None, str | None, str | None]
"""The user's setting; its value, or several for a flag that is repeated, or whether a flag stands alone; the flags of
v1 and of v2, None in the one that says it by another row. What is said in no flag names what has it instead."""
_REST = "the REST API"


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


def rows(work: Workload, dialect: Dialect) -> list[Row]:
    """All that there is to say of a workload, in the order of the command line."""
    settings = work.settings
    # The page has one spelling, its snippet another; before 2.10 there was neither.
    spellings = {"--pvc-exists": "claimname={},path={}", "--pvc-exist": "claimname={},path={}", "--pvc": "{}:{}"}
    pvc = next((flag for flag in spellings if flag in dialect.flags), " or ".join(spellings))
    v1_claims = [spellings.get(pvc, "").format(claim.name, claim.path) for claim in settings.claims]
    v2_claims = [f"claimname={claim.name},path={claim.path}" for claim in settings.claims]
    topology = f"--{'required' if settings.topology_required else 'preferred'}-pod-topology-key"
    gpus, is_part = f"{settings.gpus:g}", 0 < settings.gpus < 1
    early = dialect.submit[0] == "distributed"

    def pairs(given: Mapping[str, object]) -> list[str]:
        return [f"{name}={value}" for name, value in given.items()]

    return [
        ("PyTorch", early and "PyTorch", None, "--framework"),
        ("image", work.image, "--image", "--image"),
        # Pinned by digest: what is there is right.
        ("image", "IfNotPresent", "--image-pull-policy", "--image-pull-policy"),
        ("platform.nodes", str(work.workers), "--workers", "--workers"),
        # A gang cannot heal pod by pod: a new attempt is ours to make.
        ("restarts", "0", "--backoff-limit", "--backoff-limit"),
        ("labels", pairs(work.labels), "--label", "--label"),
        # The programs take a value apart at its commas.
        ("platform.network", any("," in value for value in work.annotations.values()), _REST, _REST),
        ("platform.network", pairs(work.annotations), "--annotation", "--annotation"),
        ("platform.network", pairs(work.resources), "--extended-resource", "--extended-resource"),
        # The long form names an asset in the newest releases; the short one always sets a variable.
        ("env", pairs(work.variables), "-e", "-e"),
        ("platform.secrets", bool(settings.secrets), _REST, _REST),
        ("platform.node_type", settings.node_type, "--node-type", "--node-type"),
        ("platform.topology", settings.topology, topology, topology),
        ("platform.large_shm", settings.large_shm, "--large-shm", "--large-shm"),
        ("platform.run_as_user", settings.run_as_user, "--run-as-user", "--run-as-user"),
        ("platform.uid", str(settings.uid or ""), "--run-as-uid", "--run-as-uid"),
        ("platform.gid", str(settings.gid or ""), "--run-as-gid", "--run-as-gid"),
        ("platform.gpus", gpus, "--gpu", None),
        ("platform.gpus", settings.gpus > 0 and ("1" if is_part else gpus), None, "--gpu-devices-request"),
        ("platform.gpus", is_part and "portion", None, "--gpu-request-type"),
        ("platform.gpus", is_part and gpus, None, "--gpu-portion-request"),
        ("platform.cpus", f"{settings.cpus:g}" if settings.cpus else None, "--cpu", "--cpu-core-request"),
        ("platform.memory", settings.memory, "--memory", "--cpu-memory-request"),
        ("platform.claims", v1_claims, pvc, None),
        ("platform.claims", v2_claims, None, "--existing-pvc"),
        # One string, in order; that commas separate them is INFERRED.
        ("platform.node_pools", ",".join(settings.node_pools), "--node-pools", None),
        ("platform.node_pools", settings.node_pools, None, "--node-pools"),
        ("platform.priority", settings.priority, "--priority", "--priority"),
        ("platform.preemptible", settings.preemptible, "--preemptible", None),
        ("platform.preemptible", preemptibility(settings.preemptible), None, "--preemptibility"),
        # `avoidable` has said where it cannot.
        ("the machines to avoid", work.exclude_nodes if EXCLUDE in dialect.flags else (), None, EXCLUDE),
        # Which machine a pod is on, for verdicts.
        ("LITGPT_HOST", _HOST in dialect.flags and "LITGPT_HOST=spec.nodeName", None, _HOST),
    ]


def submit_words(work: Workload, dialect: Dialect, *, program: str, project: str) -> list[str]:
    """The whole command line."""
    words: list[str] = []
    missing: list[str] = []
    for setting, value, *flags in rows(work, dialect):
        flag = flags[dialect.generation == "v2"]
        if flag is None or not value:
            continue
        if flag not in dialect.flags and flag != "-e":
            missing.append(f"{setting} needs {flag}")
        elif value is True:
            words.append(flag)
        else:
            words += [word for one in ([value] if isinstance(value, str) else value) for word in (flag, one)]
    if missing:
        raise ConfigProblem(
            f"`{program} {' '.join(dialect.submit)}` has not got every flag: {'; '.join(missing)}. Leave the setting "
            "out, install a newer runai, or submit by REST (platform.url)"
        )
    name = ["--name", work.name] if dialect.generation == "v1" else [work.name]
    return [program, *dialect.submit, *name, "--project", project, *words, "--command", "--", *work.words]


def preemptibility(preemptible: bool | None) -> str | None:
    """The name in REST and CLI v2."""
    return None if preemptible is None else "preemptible" if preemptible else "non-preemptible"


def flags_in(help_text: str) -> frozenset[str]:
    """The long flags that a `--help` lists: each is the first thing on its line, or follows its short form."""
    found = set()
    for line in help_text.splitlines():
        words: Sequence[str] = line.replace(",", " ").split()
        if words and words[0].startswith("-"):
            found |= {word.partition("=")[0] for word in words[:2] if word.startswith("--")}
    return frozenset(found)
