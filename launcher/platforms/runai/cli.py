"""Run:ai by its `runai` program.

Releases of the program have different flags, which `--help` lists. Values have no commas where the program would split
them (v1: "separate values with a comma or add the flag twice").

v1: https://docs.run.ai/v2.13/Researcher/cli-reference/runai-submit-dist-pytorch/
v2: https://docs.nvidia.com/run-ai/self-hosted/reference/cli/runai/training/runai-training-pytorch-submit
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from launcher.errors import ConfigProblem, LoginProblem, NotInstalled, PlatformRefused, PlatformUnreachable
from launcher.job import UNBUILT
from launcher.platforms.runai.render import PREEMPTIBILITY, Workload
from launcher.platforms.runai.settings import RunaiPlatformConfig
from litgpt_demo import timeouts
from litgpt_demo.errors import one_line
from litgpt_demo.secrets import redacted

SUBMIT = {
    # The newest first; early v2 had one command for all frameworks, later ones an alias.
    "v2": (("training", "pytorch", "submit"), ("pytorch", "submit"), ("distributed", "submit")),
    "v1": (("submit-dist", "pytorch"),),
}
"""A generation of the program, and its commands for a PyTorch training."""

EXCLUDE = "--exclude-node"
"""A machine to avoid, as the newest releases of v2 have it; that it is named by its host name is INFERRED."""
_HOST = "--env-pod-field-ref"
# Of the flags that we use, those that some releases have and the documentation of their generation has not.
_NEWER = {EXCLUDE, _HOST, "--dry-run", "--preemptible", "--preemptibility", "--priority"}
_UNDOCUMENTED = {"v1": _NEWER | {"--run-as-gid", "--run-as-uid"}, "v2": _NEWER}


class Flag(NamedTuple):
    setting: str
    """The user's setting, for the message that this release lacks the flag."""
    name: str
    value: str | float | Sequence[str] | None
    """Several values repeat the flag, True is a flag without a value. A flag with 0 or an empty value is left out."""


class Dialect(NamedTuple):
    """The features of one version of the program."""

    generation: str
    submit: tuple[str, ...]
    """Its command for a PyTorch training."""
    flags: frozenset[str] | None
    """Flags of that command, long and short. None without a program: the documented flags count then."""

    def has(self, flag: str) -> bool:
        return flag not in _UNDOCUMENTED[self.generation] if self.flags is None else flag in self.flags


_PAGE = 500  # workloads of v2's list, which otherwise ends after 50

# The messages of a clear refusal: the command was understood, and nothing was made. Any other failure leaves open what
# happened: a connection that is cut after the request has been carried out leaves no more than `Post "…": EOF`
# (https://github.com/google/go-containerregistry/pull/1268), and Go's HTTP client does not repeat a POST.
REFUSALS = (
    # The program's own reading of the command line (github.com/spf13/cobra: args.go, command.go; spf13/pflag: flag.go).
    r"unknown (?:shorthand )?flag|unknown command|flag needs an argument|required flag\(s\) .* not set",
    r"invalid argument .* for .* flag|accepts .*, received|requires at (?:least|most) \d+ arg",
    # Kubernetes' (k8s.io/apimachinery, pkg/api/errors: NewNotFound, NewForbidden, NewInvalid; k8s.io/apiserver,
    # pkg/admission/plugin/webhook/errors).
    r'"[^"]*" not found|\bis forbidden: |"[^"]*" is invalid: |denied (?:the )?request',
    # Run:ai's. INFERRED: its messages are not documented.
    r'"[^"]*" was not found|invalid (?:workload )?name',
)
_REFUSED = re.compile("|".join(REFUSALS), re.IGNORECASE)
# An error of Go's HTTP client (net/url: Error) is not the server's answer, though its URL may look like one.
_UNANSWERED = re.compile(r'\b(?:Get|Post|Put|Patch|Delete|Head) "?https?://')
_LOGIN = re.compile(
    r"unauthori[sz]ed|\b401\b|not logged in|(must|please) (log|sign) ?in|runai login|token .*expired", re.IGNORECASE
)
# Of a project or kind that the user may not use; a quota of the namespace is "forbidden: exceeded quota" as well.
_FORBIDDEN = re.compile(r"\b403\b|\bforbidden\b(?!: (?!User))", re.IGNORECASE)
_ALREADY_THERE = re.compile(r"already exists|\b409\b|conflict", re.IGNORECASE)
_GONE = re.compile(r"not found|does not exist|\b404\b|could not find", re.IGNORECASE)

# The undocumented keys of a workload's name and phase in v2's JSON.
_KEYS = ("name", "workloadName", "Name"), ("phase", "status", "actualPhase", "Phase", "Status")


class Cli:
    def __init__(self, settings: RunaiPlatformConfig) -> None:
        self._settings = settings
        self.name, self.error_code, self.unknown = "cli", "runai.project", ()

    @cached_property
    def dialect(self) -> Dialect:
        wanted = self._settings.cli_version
        if wanted != "auto" and shutil.which(self._settings.cli) is None:
            return Dialect(wanted, SUBMIT[wanted][0], None)  # to look at what would be sent, without the program
        tried = []
        for generation, commands in SUBMIT.items():
            for command in commands if wanted in {"auto", generation} else ():
                done = self._run(*command, "--help", check=False)
                # Each flag is the first word on its line, or follows its short form.
                pairs = re.findall(r"^\s*(-\w\b)?,?\s*(--[\w-]+)?", done.stdout + done.stderr, re.MULTILINE)
                flags = frozenset(flag for pair in pairs for flag in pair if flag)
                if done.returncode == 0 and "--workers" in flags:
                    return Dialect(generation, command, flags)
                tried.append(f"`{' '.join(command)}`")
        what = f"{self._settings.cli} has no command {' or '.join(tried)}, so it cannot submit a PyTorch training"
        raise ConfigProblem(what, fix="install a runai that does (2.10 or newer), or submit by REST (platform.url)")

    @property
    def excludes(self) -> bool:
        return self.dialect.has(EXCLUDE)

    def render(self, work: Workload) -> Mapping[str, Any]:  # noqa: C901 - two generations of flags side by side
        settings, job, dialect = work.settings, work.job, self.dialect
        topology = "--required-pod-topology-key" if settings.topology_required else "--preferred-pod-topology-key"
        pvcs = [f"claimname={pvc.name},path={pvc.path}" for pvc in settings.pvcs]
        flags = [
            Flag("image", "--image", job.image or UNBUILT),
            # The image is pinned by its digest, so that a copy on the node is right.
            Flag("image", "--image-pull-policy", "IfNotPresent"),
            Flag("platform.nodes", "--workers", str(job.nodes - 1)),
            # A gang cannot recover pod by pod: the launcher makes a new attempt.
            Flag("restarts", "--backoff-limit", "0"),
            Flag("labels", "--label", _assignments(job.all_labels)),
            Flag("platform.network", "--annotation", _assignments(work.network.annotations)),
            Flag("platform.network", "--extended-resource", _assignments(work.network.resources)),
            # The long form names an asset in the newest releases; the short one always sets a variable.
            Flag("env", "-e", _assignments(work.variables)),
            Flag("platform.node_type", "--node-type", settings.node_type),
            Flag("platform.topology", topology, settings.topology),
            Flag("platform.large_shm", "--large-shm", settings.large_shm),
            Flag("platform.run_as_user", "--run-as-user", settings.run_as_user),
            Flag("platform.uid", "--run-as-uid", settings.uid),
            Flag("platform.gid", "--run-as-gid", settings.gid),
        ]
        argv = [settings.cli, *dialect.submit, job.attempt_name, "--project", settings.project]
        if dialect.generation == "v1":
            argv.insert(-3, "--name")
            # The page and its snippet spell the flag differently. Releases before 2.10 have neither.
            spellings = ("--pvc-exists", "--pvc-exist", "--pvc")
            flag = next(filter(dialect.has, spellings), spellings[0])
            if flag == "--pvc":
                pvcs = [f"{pvc.name}:{pvc.path}" for pvc in settings.pvcs]
            flags += [
                Flag("platform.gpus", "--gpu", f"{settings.gpus:g}"),
                Flag("platform.cpus", "--cpu", settings.cpus),
                Flag("platform.memory", "--memory", settings.memory),
                Flag("platform.pvcs", flag, pvcs),
                # One string, in order; that commas separate them is INFERRED.
                Flag("platform.node_pools", "--node-pools", ",".join(settings.node_pools)),
                Flag("platform.priority", "--priority", settings.priority),
                Flag("platform.preemptible", "--preemptible", settings.preemptible),
            ]
        else:
            devices, part, request = settings.gpus, 0.0, ""
            if 0 < settings.gpus < 1:
                devices, part, request = 1.0, settings.gpus, "portion"
            flags += [
                Flag("platform.gpus", "--gpu-devices-request", devices),
                Flag("platform.gpus", "--gpu-request-type", request),
                Flag("platform.gpus", "--gpu-portion-request", part),
                Flag("platform.cpus", "--cpu-core-request", settings.cpus),
                Flag("platform.memory", "--cpu-memory-request", settings.memory),
                Flag("platform.pvcs", "--existing-pvc", pvcs),
                Flag("platform.node_pools", "--node-pools", settings.node_pools),
                Flag("platform.priority", "--priority", settings.priority),
                Flag("platform.preemptible", "--preemptibility", PREEMPTIBILITY[settings.preemptible]),
            ]
            if dialect.submit[0] == "distributed":
                flags.insert(0, Flag("PyTorch", "--framework", "PyTorch"))
            if self.excludes:  # otherwise `max_excluded_nodes` has said so
                flags.append(Flag("the machines to avoid", EXCLUDE, job.exclude_nodes))
            if dialect.has(_HOST):  # the machine of a pod, for diagnoses
                flags.append(Flag("LITGPT_HOST", _HOST, "LITGPT_HOST=spec.nodeName"))
        missing = [f"{flag.setting} needs {flag.name}" for flag in flags if flag.value and not dialect.has(flag.name)]
        if settings.secrets:
            missing.append("platform.secrets needs the REST API")
        if any("," in value for value in work.network.annotations.values()):  # the program splits values at commas
            missing.append("platform.network needs the REST API")
        if missing:
            what = f"`{settings.cli} {' '.join(dialect.submit)}` lacks flags: {', '.join(missing)}"
            fix = "leave the setting out, install a newer runai, or submit by REST (platform.url)"
            raise ConfigProblem(what, fix=fix)
        for _, name, value in flags:
            match value:
                case True:
                    argv.append(name)
                case str() | int() | float() if value:
                    argv += [name, f"{value:g}" if isinstance(value, float) else str(value)]
                case list() | tuple():
                    argv += [word for item in value for word in (name, item)]
        return {"argv": [*argv, "--command", "--", *work.command]}

    def check_access(self, sent: Mapping[str, Any] | None = None) -> None:
        """Prove that the program runs, the project answers, and it would take this (where it has `--dry-run`)."""
        self._workloads()
        if sent is not None and self.dialect.has("--dry-run"):  # it starts nothing
            argv = list(sent["argv"][1:])
            argv.insert(argv.index("--"), "--dry-run")
            self._run(*argv, ignore_errors=_ALREADY_THERE)

    def submit(self, sent: Mapping[str, Any]) -> None:
        self._run(*sent["argv"][1:], ignore_errors=_ALREADY_THERE)

    def phase(self, name: str) -> str | None:
        return self._workloads().get(name)

    def delete(self, name: str) -> None:
        command = ("delete", "job") if self.dialect.generation == "v1" else (*self.dialect.submit[:-1], "delete")
        self._run(*command, name, "--project", self._settings.project, ignore_errors=_GONE)

    def _workloads(self) -> dict[str, str]:
        project = ("--project", self._settings.project)
        if self.dialect.generation == "v1":
            # A table with name and phase in its first two columns, below its heading.
            rows = [line.split() for line in self._run("list", "jobs", *project).stdout.splitlines()]
            head = next((number for number, row in enumerate(rows) if row[:2] == ["NAME", "STATUS"]), len(rows))
            return {row[0]: row[1] for row in rows[head + 1 :] if len(row) > 1}
        phases: dict[str, str] = {}
        while True:
            before = len(phases)
            page = ("--json", "--limit", str(_PAGE), "--offset", str(before))
            fresh = phases_in(self._run(*self.dialect.submit[:-1], "list", *project, *page).stdout)
            phases |= fresh
            if len(phases) == before or len(fresh) < _PAGE:
                return phases

    def _run(
        self, *arguments: str, ignore_errors: re.Pattern[str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        argv = [self._settings.cli, *arguments]
        command = f"`{' '.join(argv[:4])}`"
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeouts.RUNAI_COMMAND,
                check=False,
            )
        except FileNotFoundError as error:
            fix = "install Run:ai's command line or name it in platform.cli, or submit by REST: set platform.url"
            raise NotInstalled(f"there is no program {argv[0]} on PATH", fix=fix) from error
        except subprocess.TimeoutExpired as error:
            what = f"{command} has not ended for {timeouts.RUNAI_COMMAND:.0f} s"
            raise PlatformUnreachable(what, fix="it is safe to submit again") from error
        if done.returncode == 0:
            return done
        # Its error, which a traceback may show with all that it says.
        done.stdout, done.stderr = redacted(done.stdout), redacted(done.stderr)
        printed = done.stderr + done.stdout
        answered = not _UNANSWERED.search(printed)
        if not check or (ignore_errors is not None and answered and ignore_errors.search(printed)):
            return done
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        # Behind an error of the command line comes the usage, of a page and more (github.com/spf13/cobra: command.go).
        for number, line in enumerate(lines[1:], start=1):
            if line.startswith("Usage:"):
                lines = lines[:number]
                break
        last = one_line(" ".join(lines[-3:]))
        what = f"{command} ended with exit code {done.returncode}: {last or 'it printed nothing'}"
        if _LOGIN.search(last):
            raise LoginProblem(what, fix=f"log in with `{self._settings.cli} login`, and run again")
        if answered and _FORBIDDEN.search(last):
            fix = f"request a role in the project {self._settings.project}, or log in as a user who has one"
            raise LoginProblem(what, fix=fix)
        if answered and _REFUSED.search(printed):
            raise PlatformRefused(what, fix=f"check that the project {self._settings.project} exists and has you")
        raise PlatformUnreachable(what)


def _assignments(values: Mapping[str, object]) -> list[str]:
    return [f"{name}={value}" for name, value in values.items()]


def phases_in(text: str) -> dict[str, str]:
    """Name to phase, of every workload that v2's JSON holds, however it is nested."""
    try:
        document = json.loads(text.strip() or "{}")
    except ValueError as error:  # an old program prints other things before it is ready
        text = redacted(text)  # nor chained: a traceback may show what was read
        raise PlatformUnreachable(f"runai's list is not JSON ({error}): {text[:200]!r}") from None
    phases, todo = dict[str, str](), [document]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        elif isinstance(value, Mapping):
            name, phase = (
                next((value[key] for key in keys if isinstance(value.get(key), str)), None) for keys in _KEYS
            )
            if name is not None and phase is not None:
                phases.setdefault(name, phase)
            else:
                todo += value.values()
    return phases
