"""Run:ai by its `runai` program: found, asked what it understands, and spoken to accordingly.

Which flags a release has differs; what is known here, of two generations, is only where to begin. Values hold no commas
where the program would take them apart (v1: "separate values with a comma or add the flag twice").

v1: https://docs.run.ai/v2.13/Researcher/cli-reference/runai-submit-dist-pytorch/
v2: https://docs.nvidia.com/run-ai/self-hosted/reference/cli/runai/training/runai-training-pytorch-submit
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

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

Row: TypeAlias = tuple[str, str | Iterable[str] | bool | None, str | None, str | None]
"""The user's setting; its value, or several for a flag that is repeated, or whether a flag stands alone; the flags of
v1 and of v2, None in the one that says it by another row. What is said in no flag names what has it instead."""
_REST = "the REST API"


class Dialect(NamedTuple):
    """The features of one version of the program."""

    generation: str
    submit: tuple[str, ...]
    """Its command for a PyTorch training."""
    flags: frozenset[str] | None
    """Flags of that command, long and short; None where there is no program to ask: the documented ones count then."""

    def has(self, flag: str) -> bool:
        return flag not in _UNDOCUMENTED[self.generation] if self.flags is None else flag in self.flags


_PAGE = 500  # workloads of v2's list, which otherwise ends after 50

# The words of a clear refusal: the command was understood, and nothing was made. Every other failure is no answer,
# whatever it says: a connection that is cut once the request has been carried out leaves no more than `Post "…": EOF`
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
# An error of Go's HTTP client (net/url: Error) is none of the server's words, though its URL may look like them.
_UNANSWERED = re.compile(r'\b(?:Get|Post|Put|Patch|Delete|Head) "?https?://')
_LOGIN = re.compile(
    r"unauthori[sz]ed|\b401\b|not logged in|(must|please) (log|sign) ?in|runai login|token .*expired", re.IGNORECASE
)
# Of a project or kind that the user may not use; a quota of the namespace is "forbidden: exceeded quota" as well.
_FORBIDDEN = re.compile(r"\b403\b|\bforbidden\b(?!: (?!User))", re.IGNORECASE)
_ALREADY_THERE = re.compile(r"already exists|\b409\b|conflict", re.IGNORECASE)
_GONE = re.compile(r"not found|does not exist|\b404\b|could not find", re.IGNORECASE)

# What v2's JSON may call a workload's name and phase; the shape is not documented, so it is looked for.
_KEYS = ("name", "workloadName", "Name"), ("phase", "status", "actualPhase", "Phase", "Status")


class Cli:
    def __init__(self, settings: RunaiPlatformConfig) -> None:
        self._settings = settings
        self.name, self.trouble, self.unknown = "cli", "project", ()

    @cached_property
    def dialect(self) -> Dialect:
        wanted = self._settings.cli_version
        if wanted != "auto" and shutil.which(self._settings.cli) is None:
            return Dialect(wanted, SUBMIT[wanted][0], None)  # to look at what would be sent, without the program
        commands = [(one, command) for one in SUBMIT if wanted in {"auto", one} for command in SUBMIT[one]]
        for generation, command in commands:
            told = self._run(*command, "--help", check=False)
            # Each flag is the first thing on its line, or follows its short form.
            text = told.stdout + told.stderr
            found = re.findall(r"^\s*(-\w\b)?,?\s*(--[\w-]+)?", text, re.MULTILINE)
            flags = frozenset(flag for both in found for flag in both if flag)
            if told.returncode == 0 and "--workers" in flags:
                return Dialect(generation, command, flags)
        tried = ", ".join(f"`{' '.join(command)}`" for _, command in commands)
        what = f"{self._settings.cli} knows none of {tried}, so it cannot submit a PyTorch training"
        raise ConfigProblem(what, fix="install a runai that does (2.10 or newer), or submit by REST (platform.url)")

    @property
    def excludes(self) -> bool:
        return self.dialect.has(EXCLUDE)

    def render(self, work: Workload) -> Mapping[str, Any]:
        settings, job, dialect = work.settings, work.job, self.dialect
        # The page has one spelling, its snippet another; before 2.10 there was neither.
        v1, spellings = dialect.generation == "v1", ("--pvc-exists", "--pvc-exist", "--pvc")
        pvc = next(filter(dialect.has, spellings), spellings[0])
        claim = "{0.name}:{0.path}" if v1 and pvc == "--pvc" else "claimname={0.name},path={0.path}"
        topology = f"--{'required' if settings.topology_required else 'preferred'}-pod-topology-key"
        gpus, is_part = f"{settings.gpus:g}", 0 < settings.gpus < 1
        early = dialect.submit[0] == "distributed"

        def pairs(given: Mapping[str, object]) -> list[str]:
            return [f"{name}={value}" for name, value in given.items()]

        rows: list[Row] = [
            ("PyTorch", early and "PyTorch", None, "--framework"),
            ("image", job.image or UNBUILT, "--image", "--image"),
            # Pinned by digest: what is there is right.
            ("image", "IfNotPresent", "--image-pull-policy", "--image-pull-policy"),
            ("platform.nodes", str(job.nodes - 1), "--workers", "--workers"),
            # A gang cannot heal pod by pod: a new attempt is ours to make.
            ("restarts", "0", "--backoff-limit", "--backoff-limit"),
            ("labels", pairs(job.all_labels), "--label", "--label"),
            # The programs take a value apart at its commas.
            ("platform.network", any("," in value for value in work.network.annotations.values()), _REST, _REST),
            ("platform.network", pairs(work.network.annotations), "--annotation", "--annotation"),
            ("platform.network", pairs(work.network.resources), "--extended-resource", "--extended-resource"),
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
            ("platform.claims", [claim.format(one) for one in settings.claims], pvc, "--existing-pvc"),
            # One string, in order; that commas separate them is INFERRED.
            ("platform.node_pools", ",".join(settings.node_pools), "--node-pools", None),
            ("platform.node_pools", settings.node_pools, None, "--node-pools"),
            ("platform.priority", settings.priority, "--priority", "--priority"),
            ("platform.preemptible", settings.preemptible, "--preemptible", None),
            ("platform.preemptible", PREEMPTIBILITY[settings.preemptible], None, "--preemptibility"),
            # `max_excluded_nodes` has said where it cannot.
            ("the machines to avoid", job.exclude_nodes if self.excludes else (), None, EXCLUDE),
            # Which machine a pod is on, for verdicts.
            ("LITGPT_HOST", dialect.has(_HOST) and "LITGPT_HOST=spec.nodeName", None, _HOST),
        ]
        name, missing = ["--name", job.attempt_name] if v1 else [job.attempt_name], list[str]()
        words = [settings.cli, *dialect.submit, *name, "--project", settings.project]
        for setting, value, *flags in rows:
            flag = flags[0 if v1 else 1]
            if flag is None or not value:
                continue
            if flag == _REST or not dialect.has(flag):
                missing.append(f"{setting} needs {flag}")
            elif value is True:
                words.append(flag)
            else:
                words += [word for one in ([value] if isinstance(value, str) else value) for word in (flag, one)]
        if missing:
            what = f"`{settings.cli} {' '.join(dialect.submit)}` has not got every flag: {', '.join(missing)}"
            fix = "leave the setting out, install a newer runai, or submit by REST (platform.url)"
            raise ConfigProblem(what, fix=fix)
        return {"argv": [*words, "--command", "--", *work.words]}

    def check_access(self, sent: Mapping[str, Any] | None = None) -> None:
        """Prove that the program runs, the project answers, and it would take this (where it has `--dry-run`)."""
        self._workloads()
        if sent is not None and self.dialect.has("--dry-run"):  # it starts nothing
            words = list(sent["argv"][1:])
            words.insert(words.index("--"), "--dry-run")
            self._run(*words, unless=_ALREADY_THERE)

    def submit(self, sent: Mapping[str, Any]) -> None:
        self._run(*sent["argv"][1:], unless=_ALREADY_THERE)

    def phase(self, name: str) -> str | None:
        return self._workloads().get(name)

    def delete(self, name: str) -> None:
        command = ("delete", "job") if self.dialect.generation == "v1" else (*self.dialect.submit[:-1], "delete")
        self._run(*command, name, "--project", self._settings.project, unless=_GONE)

    def _workloads(self) -> dict[str, str]:
        project = ("--project", self._settings.project)
        if self.dialect.generation == "v1":
            # A table, whose first two columns count, below the line that names them.
            rows = [line.split() for line in self._run("list", "jobs", *project).stdout.splitlines()]
            head = next((number for number, row in enumerate(rows) if row[:2] == ["NAME", "STATUS"]), len(rows))
            return {row[0]: row[1] for row in rows[head + 1 :] if len(row) > 1}
        found: dict[str, str] = {}
        while True:
            page = ("--json", "--limit", str(_PAGE), "--offset", str(len(found)))
            fresh = phases_in(self._run(*self.dialect.submit[:-1], "list", *project, *page).stdout)
            known, found = found, found | fresh
            if len(found) == len(known) or len(fresh) < _PAGE:
                return found

    def _run(
        self, *words: str, unless: re.Pattern[str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """One command of the program; `unless` are words of a failure that is none. An end that is no clear refusal is
        PlatformUnreachable."""
        argv = [self._settings.cli, *words]
        what = f"`{' '.join(argv[:4])}`"
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
            told = f"{what} has not ended for {timeouts.RUNAI_COMMAND:.0f} s"
            raise PlatformUnreachable(told, fix="submitting and asking again is safe") from error
        if done.returncode == 0:
            return done
        # Its error, which a traceback may show with all that it says.
        done.stdout, done.stderr = redacted(done.stdout), redacted(done.stderr)
        printed = done.stderr + done.stdout
        answered = not _UNANSWERED.search(printed)
        if not check or (unless is not None and answered and unless.search(printed)):
            return done
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        # Behind an error of the command line comes the usage, of a page and more (github.com/spf13/cobra: command.go).
        usage = next((number for number, line in enumerate(lines) if line.startswith("Usage:")), 0)
        last = one_line(" ".join(lines[: usage or None][-3:]))
        told = f"{what} ended with {done.returncode}: {last or 'without a word'}"
        if _LOGIN.search(last):
            raise LoginProblem(told, fix=f"log in with `{self._settings.cli} login`, and run again")
        if answered and _FORBIDDEN.search(last):
            fix = f"ask for a role in the project {self._settings.project}, or log in as somebody who has one"
            raise LoginProblem(told, fix=fix)
        if answered and _REFUSED.search(printed):
            raise PlatformRefused(told, fix=f"see that the project {self._settings.project} exists and is yours")
        raise PlatformUnreachable(told)


def phases_in(text: str) -> dict[str, str]:
    """Name to phase, of every workload that v2's JSON holds, however it is nested."""
    try:
        document = json.loads(text.strip() or "{}")
    except ValueError as error:  # an old program prints other things before it is ready
        text = redacted(text)  # nor chained: a traceback may show what was read
        raise PlatformUnreachable(f"runai's list is no JSON ({error}): {text[:200]!r}") from None
    found, todo = dict[str, str](), [document]
    while todo:
        one = todo.pop()
        if isinstance(one, Mapping):
            name, phase = (next((one[key] for key in keys if isinstance(one.get(key), str)), None) for keys in _KEYS)
            if name is not None and phase is not None:
                found.setdefault(name, phase)
            else:
                todo += one.values()
        elif isinstance(one, list):
            todo += one
    return found
