"""Write the pages of docs/ that follow from the code: `python -m docs.reference`, or `make docs`.

Each function of PAGES returns one page. The pages are committed, so that a checkout and GitHub show them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.markdown import page, table
from docs.reference_checks import checks
from docs.reference_settings import SETTINGS_PAGES
from launcher.runs.diagnosis import ADVICE
from litgpt_demo.config import RestartRule, RestartSettings
from litgpt_demo.errors import JOB_FAILURE_CLASSES, FailureClass

DOCS = Path(__file__).parent


def write() -> None:
    """Write each page whose text has changed."""
    for name, text_of in PAGES.items():
        file, text = DOCS / name, text_of()
        if not file.is_file() or file.read_text("utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")


_ADVICE: Mapping[FailureClass, str] = {
    FailureClass.UNREACHABLE: "wait, and run the same command again: the job may still be running",
    FailureClass.UNKNOWN_RUN: "take a name that `train-litgpt runs` lists",
    FailureClass.LIVE: "follow the running job, replace it with `--replace`, or start another with `--allow-duplicate`",
    FailureClass.CANCELLED: "nothing; the same command resumes the run from its last checkpoint",
    FailureClass.SERVER: "start Prefect's server with `train-litgpt serve`, or unset `PREFECT_API_URL`",
    FailureClass.REFUSED: "do what the message says",
}
"""The advice for the classes that only the launching side has; ADVICE has that of the others."""


def exit_codes() -> str:
    """Return the page of exit codes."""
    jobs = [
        (_anchored(fault.exit_code), fault, fault.meaning, _what_follows(fault), ADVICE[fault])
        for fault in JOB_FAILURE_CLASSES
    ]
    commands = [(_anchored(fault.exit_code), fault, fault.meaning, advice) for fault, advice in _ADVICE.items()]
    ends = [
        ("0", "done", "The command succeeded. A plan that nothing blocks and an empty list are successes too."),
        ("2", "wrong command line", "`--help` shows the arguments and options of a command."),
        ("129", "closed terminal", "The job keeps running. The same command reattaches to it."),
        ("130", "Ctrl-C", "The job keeps running, unless you pressed Ctrl-C twice."),
        ("143", "SIGTERM", "The job was cancelled, unless the machine was shutting down."),
    ]
    return page(
        "Exit codes",
        "litgpt_demo/errors.py and launcher/runs/diagnosis.py",
        "Use this page to look up the exit code of a command or of a node. Scripts can rely on these codes.",
        "## Failures of a job",
        "A node exits with the code of its failure class. `train-litgpt run` exits with the same code. The platform "
        "uses the code to decide whether to restart.",
        table("code", "failure class", "meaning", "what follows", "what to do", rows=jobs),
        "`train.restart_policy` changes the number of new attempts of each class. A user error always stops.",
        "## Failures of a command",
        "These codes come only from commands, never from a node. A command can also end with the codes above.",
        table("code", "failure class", "meaning", "what to do", rows=commands),
        "## Other ends of a command",
        table("code", "end", "meaning", rows=ends),
    )


def _anchored(code: int) -> str:
    """Return an exit code with an anchor, which messages name (launcher.pages)."""
    return f'<a id="{code}"></a>{code}'


def _what_follows(fault: FailureClass) -> str:
    """Return the consequence of a failure by the default rules of restarts."""
    rule = getattr(RestartSettings(), fault.replace(" ", "_"), RestartRule(attempts=0))
    if rule.attempts == 0:
        return "stop"
    counted = "counted unless it left a new checkpoint" if rule.reset_on_progress else "counted"
    return f"new attempt after about {rule.wait:g} s, {counted}"


PAGES: Mapping[str, Callable[[], str]] = {
    **{f"reference/settings/{name}.md": settings.text for name, settings in SETTINGS_PAGES.items()},
    "reference/checks.md": checks,
    "reference/exit-codes.md": exit_codes,
}
"""Path below docs/ to the function that returns the page."""


if __name__ == "__main__":
    write()
