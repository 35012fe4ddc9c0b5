"""Run:ai by its `runai` program: found, asked what it understands, and spoken to accordingly."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from launcher.errors import ConfigProblem, LoginProblem, NotInstalled, PlatformRefused, PlatformUnreachable, finding_of
from launcher.platforms.runai.flags import DOCUMENTED, EXCLUDE, SUBMIT, Dialect, Generation, flags_in, submit_words
from launcher.platforms.runai.render import Workload
from launcher.platforms.runai.settings import RunaiPlatformConfig
from litgpt_demo.errors import words_of
from litgpt_demo.findings import Finding
from litgpt_demo.secrets import redacted

# Seconds for one command; v2's submit waits up to a minute for the workload to be created.
PATIENCE = 120.0

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
_ALREADY_THERE = re.compile(r"already exists|\b409\b|conflict", re.IGNORECASE)
_GONE = re.compile(r"not found|does not exist|\b404\b|could not find", re.IGNORECASE)

# What v2's JSON may call a workload's name and phase; the shape is not documented, so it is looked for.
_KEYS = ("name", "workloadName", "Name"), ("phase", "status", "actualPhase", "Phase", "Status")


class Cli:
    """One `runai` program."""

    def __init__(self, settings: RunaiPlatformConfig) -> None:
        self._settings = settings
        self.name = "cli"
        self.unknown: tuple[str, ...] = ()

    @cached_property
    def dialect(self) -> Dialect:
        """The features of the program."""
        wanted = self._settings.cli_version
        if shutil.which(self._settings.cli) is None:
            if wanted != "auto":  # to look at what would be sent, from a machine without the program
                return DOCUMENTED[wanted]
            raise NotInstalled(_NO_PROGRAM.format(cli=self._settings.cli))
        generations: Sequence[Generation] = ("v2", "v1") if wanted == "auto" else (wanted,)
        for generation in generations:
            for command in SUBMIT[generation]:
                told = self._run(*command, "--help", check=False)
                flags = flags_in(told.stdout + told.stderr)
                if told.returncode == 0 and "--workers" in flags:
                    return Dialect(generation=generation, submit=command, flags=flags)
        tried = ", ".join(f"`{' '.join(command)}`" for one in generations for command in SUBMIT[one])
        raise ConfigProblem(
            f"{self._settings.cli} knows none of {tried}, so it cannot submit a PyTorch training; install a runai that "
            "does (2.10 or newer), or submit by REST (platform.url)"
        )

    @property
    def excludes(self) -> bool:
        """Return whether this program takes machines to avoid."""
        return EXCLUDE in self.dialect.flags

    def render(self, work: Workload) -> Mapping[str, Any]:
        """The command line."""
        words = submit_words(work, self.dialect, program=self._settings.cli, project=self._settings.project)
        return {"argv": words}

    def check(self, sent: Mapping[str, Any]) -> Iterator[Finding]:
        """Check that the program runs, the project answers, and it would take this (where it has `--dry-run`)."""
        if shutil.which(self._settings.cli) is None:
            yield finding_of(NotInstalled(_NO_PROGRAM.format(cli=self._settings.cli)), "runai.no-cli")
            return
        try:
            self._workloads()
            if "--dry-run" in self.dialect.flags:  # it starts nothing
                words = list(sent["argv"][1:])
                words.insert(words.index("--"), "--dry-run")
                self._run(*words, unless=_ALREADY_THERE)
        except LoginProblem as error:
            yield Finding("error", "runai.login", str(error))
        except (PlatformRefused, PlatformUnreachable) as error:
            fix = f"see that the project exists and is yours, and that `{self._settings.cli}` reaches the cluster"
            severity = finding_of(error, "runai.project").severity
            yield Finding(severity, "runai.project", f"project {self._settings.project}: {error}", fix)

    def check_access(self) -> None:
        """List the project's workloads."""
        self._workloads()

    def submit(self, sent: Mapping[str, Any]) -> None:
        """Run the command line; a workload of that name that is there already is left as it is."""
        self._run(*sent["argv"][1:], unless=_ALREADY_THERE)

    def phase(self, name: str) -> str | None:
        """The workload's state in Run:ai's word, None where there is none of that name."""
        return self._workloads().get(name)

    def delete(self, name: str) -> None:
        """Ask for it to be gone; already gone is success."""
        command = ("delete", "job") if self.dialect.generation == "v1" else (*self.dialect.submit[:-1], "delete")
        self._run(*command, name, "--project", self._settings.project, unless=_GONE)

    def _workloads(self) -> dict[str, str]:
        """Name to state of all of the project's."""
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
            if fresh.keys() <= found.keys():
                return found
            found |= fresh
            if len(fresh) < _PAGE:
                return found

    def _run(
        self, *words: str, unless: re.Pattern[str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """One command of the program.

        Args:
            unless: words of a failure that is none.

        Raises:
            ConfigProblem: there is no such program.
            PlatformUnreachable: it did not end, or its end is no clear refusal.
            LoginProblem: it is not logged in.
            PlatformRefused: the answer is no.
        """
        argv = [self._settings.cli, *words]
        what = f"`{' '.join(argv[:4])}`"
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False
            )
        except FileNotFoundError as error:
            raise NotInstalled(_NO_PROGRAM.format(cli=self._settings.cli)) from error
        except subprocess.TimeoutExpired as error:
            raise PlatformUnreachable(
                f"{what} has not ended for {PATIENCE:.0f} s; submitting and asking again is safe"
            ) from error
        if done.returncode == 0:
            return done
        # Its error, which a traceback may show with all that it says.
        done.stdout, done.stderr = redacted(done.stdout), redacted(done.stderr)
        printed = done.stderr + done.stdout
        answered = not _UNANSWERED.search(printed)
        if not check or (unless is not None and answered and unless.search(printed)):
            return done
        last = words_of(" ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]))
        told = f"{what} ended with {done.returncode}: {last or 'without a word'}"
        if _LOGIN.search(last):
            raise LoginProblem(f"{told}; log in with `{self._settings.cli} login`, and run again")
        if answered and _REFUSED.search(printed):
            raise PlatformRefused(told)
        raise PlatformUnreachable(told)


_NO_PROGRAM = (
    "there is no program {cli} on PATH; install Run:ai's command line or name it in platform.cli, or submit by REST: "
    "set platform.url and export RUNAI_CLIENT_ID and RUNAI_CLIENT_SECRET"
)


def phases_in(text: str) -> dict[str, str]:
    """Name to phase, of every workload that v2's JSON holds, however it is nested."""
    if not text.strip():
        return {}
    try:
        document = json.loads(text)
    except ValueError as error:  # an old program prints other things before it is ready
        text = redacted(text)  # nor chained: a traceback may show what was read
        raise PlatformUnreachable(f"runai's list is no JSON ({error}): {text[:200]!r}") from None
    found: dict[str, str] = {}
    todo: list[Any] = [document]
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
