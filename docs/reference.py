"""Write the pages of docs/ that follow from the code: `python -m docs.reference`, or `make docs`.

Each function of PAGES returns one page. The pages are committed, so that a checkout and GitHub show them.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from typer.main import get_command

import train_litgpt
from cli.main import app
from docs.markdown import page, sentence, table
from docs.reference_checks import checks
from docs.reference_schedules import schedules
from docs.reference_settings import SETTINGS_PAGES, type_of
from launcher.checks.fitness import stack_for
from launcher.images.stacks import STACKS
from launcher.machines import MACHINES
from launcher.networks import NETWORKS
from launcher.networks.profile import Carrier, Network, NetworkContext
from launcher.runs.diagnosis import ADVICE
from launcher.yaml_files import read_yaml
from litgpt_demo.config import RestartRule, RestartSettings
from litgpt_demo.errors import JOB_FAILURE_CLASSES, FailureClass
from litgpt_demo.metrics import COLUMNS, ROW_KINDS

DOCS = Path(__file__).parent
CHECKOUT = DOCS.parent


def write() -> None:
    """Write each page whose text has changed."""
    for name, text_of in PAGES.items():
        file, text = DOCS / name, text_of()
        if not file.is_file() or file.read_text("utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")


def exit_codes() -> str:
    """Return the page of exit codes."""
    jobs = [
        (_anchored(fault.exit_code), fault, fault.meaning, _what_follows(fault), ADVICE[fault])
        for fault in JOB_FAILURE_CLASSES
    ]
    commands = [
        (_anchored(fault.exit_code), fault, fault.meaning, ADVICE[fault])
        for fault in FailureClass
        if fault not in JOB_FAILURE_CLASSES
    ]
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


def commands() -> str:
    """Return the page of commands."""
    program: Any = get_command(app)
    parts = [_options(program)]
    for name, command in program.commands.items():
        usage = " ".join(["train-litgpt", name, *_arguments(command), "[OPTIONS]"])
        parts += [f"## `{name}`", inspect.cleandoc(command.help or ""), f"```text\n{usage}\n```", _options(command)]
    return page(
        "Commands",
        "cli/main.py",
        "Use this page to look up the arguments and options of a command.",
        "`train-litgpt COMMAND --help` prints the same. `OVERRIDES` are [settings](settings/general.md), such as "
        "`train.max_steps=100`. [Exit codes](exit-codes.md) lists the codes of all commands.",
        *parts,
    )


def _arguments(command: Any) -> Iterator[str]:
    for param in command.params:
        if param.param_type_name == "argument":
            name = param.metavar or param.name.upper()
            yield (name if param.required else f"[{name}]") + ("..." if param.nargs == -1 or param.multiple else "")


def _options(command: Any) -> str:
    rows = []
    for param in command.params:
        names, kind = f"`{param.metavar or param.name.upper()}`", type_of(param.type_descriptor.annotation)
        if param.param_type_name == "option":
            names = ", ".join(f"`{name}`" for name in param.opts)
            kind = "flag" if param.is_flag else kind
        if param.min is not None:
            kind += f" ≥ {param.min}"
        default = "required" if param.required else ""
        if param.default not in (None, False, ""):
            default = f"`{param.default}`"
        rows.append((names, kind, default, sentence(param.help or "")))
    return table("argument or option", "type", "default", "meaning", rows=rows) if rows else ""


def metrics() -> str:
    """Return the page of metrics."""
    rows = [
        (f"`{name}`", column.unit, ", ".join(column.kinds.split()), "yes" if column.in_csv else "", column.meaning)
        for name, column in COLUMNS.items()
    ]
    return page(
        "Metrics",
        "litgpt_demo/metrics.py",
        "Use this page to look up a column of `metrics.jsonl` or `metrics.csv` in a run's folder.",
        "Each line of `metrics.jsonl` is one row, the same on every platform. Each row has its `kind` and its `step`. "
        "`metrics.csv` has the rows of steps, evaluations and checkpoints.",
        "## Kinds of rows",
        table("kind", "meaning", rows=[(f"`{kind}`", sentence(meaning)) for kind, meaning in ROW_KINDS.items()]),
        "## Columns",
        table("column", "unit", "kinds of rows", "in metrics.csv", "meaning", rows=rows),
        "For a mixture, rows also have `tokens.SOURCE`, `loss.SOURCE`, `validation_loss.SOURCE` and "
        "`bits_per_byte.SOURCE` of each source. "
        "`loss.SOURCE` is the mean since the last row.",
        _MFU,
    )


_MFU = """## MFU

The peak is the maker's dense figure for the type of the products (`litgpt_demo/models/devices.py`, with sources). In
float8 the peak is twice that of bfloat16, so the same speed is half the MFU. A GPU that is not in the table has an
unknown peak.

A CPU's peak is measured when the training starts: the fastest of many matrix products of several sizes, in the threads
of the process. Other load can only lower it. If a step is faster than the measured peak, MFU is not reported until the
next evaluation or save, which measures the peak again. A reported MFU is therefore never above 100 %."""


def stacks() -> str:
    """Return the page of software stacks and of the network plugins that are qualified for them."""
    rows = [
        (f"`{name}`", stack.torch, stack.cuda, stack.nccl, stack.python, stack.glibc, stack.driver)
        for name, stack in STACKS.items()
    ]
    return page(
        "Software stacks and NCCL",
        "launcher/images/stacks.py and launcher/networks",
        "Use this page to look up the versions in an image, and the NCCL versions that a GPU network needs.",
        "## Stacks",
        table("stack", "torch", "CUDA", "NCCL", "Python", "glibc", "oldest GPU driver", rows=rows),
        "Without `image.stack`, an image gets the first stack that its network is qualified for. Networks without a "
        "plugin (`tcp`, `ib`, `roce`) work with any stack, and get the first.",
        "## Releases of network plugins",
        table(
            "network", "machines", "plugin", "daemon", "qualified for NCCL", "known to load", "known to fail", "stack",
            rows=list(_releases()),
        ),
        "The first release of a network and its machines is the default of `platform.network_plugin`. An empty cell "
        "means that the publisher states no version. Then any NCCL is accepted. Some entries of *known to load* are "
        "inferred. The sources are next to the values in `launcher/networks`.",
    )  # fmt: skip


def _releases() -> Iterator[tuple[str, ...]]:
    """Yield a row for each release of each plugin, once for all machines that take it."""
    for name, network in NETWORKS.items():
        releases = dict[tuple[str, ...], list[str]]()
        for machine in network.machines:
            context = NetworkContext(machine=MACHINES[machine])

            def made(**options: Any) -> Network:
                return network.make(context, network.settings[Carrier.PODS](**options))  # noqa: B023 - called at once

            for pair in made().known:
                stack = stack_for(made(network_plugin=pair.plugin))
                nccl = (
                    " or ".join(f"`{part}`" for part in parts)
                    for parts in (pair.nccl, pair.nccl_loads, pair.nccl_fails)
                )
                row = (pair.plugin, pair.daemon or "", *nccl, f"`{stack.stack}`" if stack else "none")
                releases.setdefault(row, []).append(f"`{machine}`")
        for row, machines in releases.items():
            yield f"`{name}`", ", ".join(machines), *row


def iam() -> str:
    """Return the page of Google Cloud's permissions."""
    roles = read_yaml(CHECKOUT / "deployments" / "iam.yaml")
    parts = []
    for who, meaning in _ACCOUNTS.items():
        rows = [
            (
                f"`{entry['permission']}`",
                f"`{entry['role']}`",
                entry["where"],
                place,
                entry.get("by", "train-litgpt"),
                sentence(entry["why"]),
            )
            for place, entries in roles[who].items()
            for entry in entries
        ]
        parts += [f"## {who.capitalize()}", meaning]
        parts.append(table("permission", "role", "granted on", "needed for", "used by", "why", rows=rows))
    return page(
        "Google Cloud roles",
        "deployments/iam.yaml",
        "Use this page to grant the least roles that train-litgpt needs in Google Cloud.",
        "`any` means every platform. The other words of the column *needed for* are a platform or a kind of image.",
        "## How to grant a role",
        table("granted on", "command", rows=_GRANTS.items()),
        "For `root`, write this condition to `FILE`, with your bucket and prefix. It confines objects to the prefix. "
        "The names of all objects of the bucket stay visible. The bucket needs uniform bucket-level access.",
        f"```yaml\ntitle: {roles['condition']['title']}\nexpression: >-\n  {roles['condition']['expression']}\n```",
        *parts,
    )


_ACCOUNTS = {
    "launcher": "The account that runs train-litgpt: a person, or the service account of that machine.",
    "trainer": "The account of the nodes: on GKE the Google side of `platform.service_account`, on Batch that account.",
    "builder": "The account that builds an image: `image.service_account`, of Cloud Build.",
    "nodes": "The account of GKE's machines, which pull the image.",
}
_GRANTS = {
    name: f"`gcloud {verb} add-iam-policy-binding {target} --member=MEMBER --role=ROLE{rest}`"
    for name, verb, target, rest in (
        ("root", "storage buckets", "gs://BUCKET", " --condition-from-file=FILE"),
        ("corpus", "storage buckets", "gs://BUCKET", ""),
        ("project", "projects", "PROJECT", ""),
        ("repository", "artifacts repositories", "REPOSITORY --location=LOCATION", ""),
        ("account", "iam service-accounts", "ACCOUNT", ""),
    )
}


def python() -> str:
    """Return the page of the Python API."""
    parts = []
    for name in ("submit", "Submitted"):
        member = getattr(train_litgpt, name)
        functions = {name: member}
        if inspect.isclass(member):
            parts += [f"## `{name}`", inspect.getdoc(member) or ""]
            functions = {
                f"{name}.{key}": value for key, value in vars(member).items() if key[0] != "_" and callable(value)
            }
        for title, function in functions.items():
            signature = f"{title}{inspect.signature(function)}".replace("self, ", "").replace("(self)", "()")
            signature = signature.replace("'", "")  # of the annotations, which are texts
            parts += [f"{'###' if '.' in title else '##'} `{title}`", f"```python\n{signature}\n```"]
            parts.append(inspect.getdoc(function) or "")
    return page(
        "Python API",
        "train_litgpt/__init__.py",
        "Use this page to look up the functions of the package `train_litgpt`.",
        "[From Python](../howto/python.md) shows their use.",
        *parts,
    )


def status() -> str:
    """Return the page of the tests that need more than a checkout, with their last passes."""
    real = CHECKOUT / "tests" / "real"
    lines = re.findall(
        r"^\| (\w+) \| (\w+) \| ([^|]+) \| ([^|]+) \|", (real / "STATUS.md").read_text("utf-8"), re.MULTILINE
    )
    passes = {topic: (when, commit, tests) for topic, commit, when, tests in lines if topic != "topic"}
    rows = []
    for topic in sorted(path.name for path in real.iterdir() if any(path.glob("test_*.py"))):
        texts = (
            ast.get_docstring(ast.parse(file.read_text("utf-8"))) for file in sorted((real / topic).glob("test_*.py"))
        )
        proof = " ".join(text.partition("\n\n")[0] for text in texts if text)
        rows.append((f"`{topic}`", proof, *passes.get(topic, ("not run yet", "", ""))))
    return page(
        "What was tested where",
        "tests/real",
        "Use this page to see when each test with real programs last passed, and at which commit.",
        "`make test-TOPIC` runs the tests of a topic. `make test` runs at every change, and is not listed here. "
        "A topic was not seen to pass after the commit of its row.",
        table("topic", "what it tests", "last pass (UTC)", "commit", "tests", rows=rows),
    )


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/commands.md": commands,
    **{f"reference/settings/{name}.md": settings.text for name, settings in SETTINGS_PAGES.items()},
    "reference/checks.md": checks,
    "reference/exit-codes.md": exit_codes,
    "reference/metrics.md": metrics,
    "reference/stacks.md": stacks,
    "reference/iam.md": iam,
    "reference/python.md": python,
    "project/status.md": status,
    "images/schedules.svg": schedules,
}
"""Path below docs/ to the function that returns the page."""


if __name__ == "__main__":
    write()
