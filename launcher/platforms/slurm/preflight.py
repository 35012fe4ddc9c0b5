"""Checks of a submission against itself and the cluster: findings before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

from launcher.errors import LauncherError, NotInstalled, PlatformRefused
from launcher.findings import finding_of
from launcher.job import Submission
from launcher.networks import network_findings
from launcher.platforms.base import by_hand_finding
from launcher.platforms.slurm.commands import EVERYWHERE, Slurm
from launcher.platforms.slurm.environment_settings import (
    CondaEnvironment,
    ContainerEnvironment,
    NodeEnvironment,
    VenvEnvironment,
)
from launcher.platforms.slurm.render import PLATFORM, JobReference, work_of
from launcher.platforms.slurm.settings import SlurmPlatformConfig
from litgpt_demo.errors import words_of
from litgpt_demo.findings import Finding
from litgpt_demo.storage import is_remote

PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo")

NOT_SEEN = (
    "take a root that both see under one path (a file system that is mounted here too), or a bucket with "
    "platform.folder, or start this on the login node, without platform.host"
)
_MISSING = 'for name in "$@"; do command -v "$name" > /dev/null || echo "$name"; done'
_MODES = 'for file in "$@"; do stat -L -c "%a %n" -- "$file" 2> /dev/null || echo "- $file"; done'
_PLACE = 'hostname -s; there="$1"; while ! test -d "$there"; do there=$(dirname "$there"); done; stat -f -c %T "$there"'
_LIMITS = "MaxWall,GrpTRES,MaxTRES,MaxTRESPerNode"
_ACCOUNTS = f'exec sacctmgr --noheader --parsable2 show associations user="$(id -un)" format=Account,QOS,{_LIMITS}'

_OWN_DISKS = {"ext2/ext3", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlayfs"}
"""File systems, as stat names them, that a machine mostly has to itself; NFS, Lustre, GPFS and others are shared."""


def findings(slurm: Slurm, settings: SlurmPlatformConfig, submission: Submission) -> Iterator[Finding]:
    """Yield what the submission itself shows to be wrong, then what the cluster lacks for it."""
    reference = JobReference.of(submission.job_id)
    work = work_of(reference, settings)
    yield from network_findings(settings)
    if settings.interactive:
        yield by_hand_finding(PLATFORM)
    try:
        yield from _cluster(slurm, settings, submission, work)
    except LauncherError as error:
        yield finding_of(error, "slurm.cluster")


def _error(code: str, what: str, fix: str) -> Finding:
    return Finding("error", f"slurm.{code}", what, fix)


def _warning(code: str, what: str, fix: str) -> Finding:
    return Finding("warning", f"slurm.{code}", what, fix)


def _cluster(slurm: Slurm, settings: SlurmPlatformConfig, submission: Submission, work: str) -> Iterator[Finding]:
    if missing := _script(slurm, _MISSING, *PROGRAMS).split():
        raise NotInstalled(
            f"there is no {', '.join(missing)} on {slurm.shell.where}; run this on a login node of the cluster, or "
            "name one that ssh reaches in platform.host"
        )
    nodes = _nodes(slurm, settings)
    found = [
        *_partition(slurm, settings, nodes),
        *_account(slurm, settings),
        *_secrets(slurm, settings),
        *_software(slurm, settings.environment),
    ]
    yield from found
    if slurm.shell.host is not None and not is_remote(JobReference.of(submission.job_id).directory):
        yield from _seen_there(slurm, work)
    yield from _shared(slurm, work, nodes)
    yield from _time_to_save(slurm, settings)
    if all(one.severity != "error" for one in found):
        yield from _rehearsed(slurm, submission.body["script"])


def _script(slurm: Slurm, script: str, *words: str) -> str:
    return slurm.shell.run(("sh", "-c", script, "sh", *words)).out


# --- the partition and its nodes --------------------------------------------------------------------------------------


class _Node(NamedTuple):
    name: str
    host: str
    gres: str
    state: str


def _nodes(slurm: Slurm, settings: SlurmPlatformConfig) -> list[_Node]:
    """Return the nodes that the job may get, each once."""
    # Slurm 22.05 refuses --all beside --partition, which shows a hidden partition by its name.
    where = f"--partition={settings.partition}" if settings.partition else EVERYWHERE
    told = slurm.answer("sinfo", "--Node", "--noheader", "--format=%N|%n|%G|%T|%P", where).out
    rows = [line.split("|") for line in told.splitlines() if line.count("|") == 4]
    default = [row for row in rows if row[4].endswith("*")]  # where none is named
    return list({row[0]: _Node(*row[:4]) for row in (rows if settings.partition else default or rows)}.values())


def _partition(slurm: Slurm, settings: SlurmPlatformConfig, nodes: list[_Node]) -> Iterator[Finding]:
    known = set(slurm.answer("sinfo", EVERYWHERE, "--noheader", "--format=%R").out.split())
    for name in (settings.partition or "").split(","):
        if name and name not in known:
            what = f"platform.partition={name} is no partition of this cluster"
            yield _error("partition", what, f"take {', '.join(sorted(known))}")
            return
    name = (settings.partition or "").partition(",")[0]
    shown = slurm.answer("scontrol", EVERYWHERE, "--oneliner", "show", "partition", name).out if name else ""
    told = dict(re.findall(r"(\w+)=(\S+)", shown))
    if told.get("State", "UP") != "UP":
        what = f"platform.partition={name} is {told['State']}, and starts no jobs"
        yield _warning("partition", what, "take another one, or wait")
    limit = _duration(told.get("MaxTime", ""))
    if settings.time is not None and limit is not None and settings.time > limit:
        what = f"platform.time={settings.time} is above the partition's MaxTime of {limit}"
        yield _error("time", what, "lower it: a run goes on over as many attempts as it needs")
    if not settings.gpus:
        return
    able = [one for one in nodes if _gpus(one.gres, settings.gpu) >= settings.gpus]
    if len(able) < settings.nodes:
        kind = f"{settings.gpu} " if settings.gpu else ""
        there = ", ".join(sorted({one.gres for one in nodes})) or "none"
        yield _error(
            "gpus",
            f"{settings.nodes} nodes with {settings.gpus} {kind}GPUs each are asked for, and {len(able)} of the "
            f"partition's {len(nodes)} have them",
            f"its nodes have {there}: see platform.gpus, gpu and partition against `sinfo -o '%P %G %D'`",
        )


def _gpus(gres: str, kind: str | None) -> int:
    """The GPUs in a list such as gpu:h100:8(S:0-1),nvme:1."""
    listed = re.findall(r"(?:^|,)gpu(?::([^:,()]+))??:(\d+)(?=[(,]|$)", gres)
    return sum(int(count) for name, count in listed if kind is None or name == kind)


def _duration(text: str) -> timedelta | None:
    """A time as Slurm prints it: [days-]hours:minutes:seconds, or hours:minutes; None for no limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+)(?::(\d+))?", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


# --- what this user may do --------------------------------------------------------------------------------------------


def _account(slurm: Slurm, settings: SlurmPlatformConfig) -> Iterator[Finding]:
    """Yield where account, QOS or their limits forbid the job; a cluster without accounting has none of them."""
    done = slurm.shell.run(("sh", "-c", _ACCOUNTS))
    rows = [line.split("|") for line in done.out.splitlines() if line.count("|") == 5] if done.code == 0 else []
    if not rows:
        return
    accounts = sorted({row[0] for row in rows})
    if settings.account is not None and settings.account not in accounts:
        what = f"platform.account={settings.account} is none of yours"
        yield _error("account", what, f"take {' or '.join(accounts)}")
        return
    mine = [row for row in rows if settings.account in (None, row[0])]
    allowed = sorted({qos for row in mine for qos in row[1].split(",") if qos})
    if settings.qos is not None and settings.qos not in allowed:
        what = f"platform.qos={settings.qos} is none that you may use with this account"
        yield _error("qos", what, f"take {' or '.join(allowed) or 'none'}")
        return
    for row in mine if len({row[0] for row in mine}) == 1 else ():
        yield from _limits(settings, f"the account {row[0]}", *row[2:])
        # What an account has as a whole stands in a line without a user.
        yield from _told_limits(slurm, settings, f"the account {row[0]}", "associations", f"account={row[0]}", "user=")
    if settings.qos is not None:
        yield from _told_limits(slurm, settings, f"the QOS {settings.qos}", "qos", settings.qos)


def _told_limits(slurm: Slurm, settings: SlurmPlatformConfig, whose: str, *words: str) -> Iterator[Finding]:
    fields = f"format={_LIMITS}"
    told = slurm.answer("sacctmgr", "--noheader", "--parsable2", "show", *words, fields).out
    for line in told.splitlines()[:1]:
        yield from _limits(settings, whose, *line.split("|"))


def _limits(
    settings: SlurmPlatformConfig, whose: str, wall: str, group: str, most: str, per_node: str
) -> Iterator[Finding]:
    limit = _duration(wall)
    if settings.time is not None and limit is not None and settings.time > limit:
        what = f"platform.time={settings.time} is above the {limit} of {whose} (MaxWall)"
        yield _error("time", what, "lower it: a run goes on over as many attempts as it needs")
    for name, limits, asked in (
        ("GrpTRES", group, settings.nodes), ("MaxTRES", most, settings.nodes), ("MaxTRESPerNode", per_node, 1),
    ):  # fmt: skip
        bounds = _bounds(limits)
        if (bound := bounds.get("gres/gpu")) is not None and settings.gpus * asked > bound:
            what = f"{settings.gpus * asked} GPUs are asked for, and {whose} may have {bound} ({name})"
            yield _error("limit", what, "lower platform.nodes or gpus, or take another account or QOS")
        if (bound := bounds.get("node")) is not None and asked > bound:
            what = f"{asked} nodes are asked for, and {whose} may have {bound} ({name})"
            yield _error("limit", what, "lower platform.nodes, or take another account or QOS")


def _bounds(limits: str) -> Mapping[str, int]:
    return {name: int(count) for name, count in re.findall(r"([\w/]+)=(\d+)(?=,|$)", limits)}


def _software(slurm: Slurm, environment: NodeEnvironment) -> Iterator[Finding]:
    """Yield an environment whose files are not there. Nothing of it is started: a config may be somebody else's."""
    match environment:
        case VenvEnvironment(path=folder) | CondaEnvironment(prefix=folder):
            file: str | None = f"{folder}/bin/python"
        case ContainerEnvironment():
            file = environment.file
        case _:
            file = None
    if file is not None and slurm.shell.run(("test", "-r", file)).code != 0:
        what = f"platform.environment: {slurm.shell.where} cannot read {file}"
        yield _error("environment", what, "make it on a file system that login node and nodes share: docs/slurm.md")


def _secrets(slurm: Slurm, settings: SlurmPlatformConfig) -> Iterator[Finding]:
    names = {file: name for name, file in settings.secrets.items()}
    for line in _script(slurm, _MODES, *names).splitlines() if names else ():
        mode, _, file = line.partition(" ")
        if mode == "-":
            what = f"platform.secrets.{names[file]}={file} is not there on {slurm.shell.where}"
            yield _error("secret", what, "write its value into that file, and close it: chmod 600")
        elif int(mode, 8) & 0o077:
            what = f"platform.secrets.{names[file]}={file} has mode {mode}, so that others may read or change it"
            yield _error("secret", what, f"close it: chmod 600 {file}")


# --- files and time ---------------------------------------------------------------------------------------------------


def _seen_there(slurm: Slurm, work: str) -> Iterator[Finding]:
    """Yield a root that the login node does not see: what is written here is read there. A file there shows it."""
    root = Path(work.partition("/runs/")[0])
    try:
        with NamedTemporaryFile(dir=root, prefix=".train-litgpt-") as probe:
            seen = slurm.shell.run(("test", "-e", probe.name)).code == 0
    except OSError:  # a root that is not there yet is looked for when it is
        return
    if not seen:
        what = f"root={root} is a folder of this machine, and {slurm.shell.host} does not see what is in it"
        yield _error("root", what, NOT_SEEN)


def _shared(slurm: Slurm, work: str, nodes: list[_Node]) -> Iterator[Finding]:
    """Yield a folder that seems to be on this machine's own disk; what nodes see is known when they start."""
    here, _, kind = _script(slurm, _PLACE, work).strip().partition("\n")
    elsewhere = sorted({one.host for one in nodes} - {here})
    if kind in _OWN_DISKS and elsewhere:
        yield _warning(
            "root",
            f"{work} is on a disk of {slurm.shell.where} ({kind}), which {elsewhere[0]} may not see",
            "take a root (or platform.folder) on a file system that login node and nodes share",
        )


def _time_to_save(slurm: Slurm, settings: SlurmPlatformConfig) -> Iterator[Finding]:
    """Yield where Slurm kills sooner than ranks have saved. Before a time limit it waits for platform.notice."""
    told = re.search(r"KillWait\s*=\s*(\d+)", slurm.answer("scontrol", "show", "config").out)
    if told is not None and int(told[1]) < settings.grace:
        yield Finding(
            "info",
            "slurm.kill-wait",
            f"Slurm kills processes {told[1]} s after scancel or a preemption (KillWait), and platform.grace lets "
            f"ranks save for {settings.grace} s",
            "`train-litgpt cancel` and the time limit give them all of it; else the last checkpoint counts",
        )


def _rehearsed(slurm: Slurm, script: str) -> Iterator[Finding]:
    """Yield what Slurm itself says of the script, which it does not submit."""
    try:
        done = slurm.rehearse(script)
    except PlatformRefused as error:
        yield _error("refused", str(error), "see the platform section against `sinfo` and `sacctmgr show assoc`")
        return
    if (found := re.search(r"to start at (\S+) using .* on nodes? (\S+)", done)) is not None:
        what = f"Slurm would start it at {found[1].replace('T', ' ')} on {found[2]} as things are now"
        yield Finding("info", "slurm.start", words_of(what), "")
