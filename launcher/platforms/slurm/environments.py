"""The way into the software of Slurm's nodes: what a job's script says for it, and whether it is there."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import singledispatch
from typing import NamedTuple

import litgpt_demo
from launcher.errors import ConfigProblem
from launcher.images.oci import ImageReference
from launcher.platforms.slurm.environment_settings import (
    ApptainerEnvironment,
    CondaEnvironment,
    ContainerEnvironment,
    ModuleEnvironment,
    NodeEnvironment,
    PyxisEnvironment,
    VenvEnvironment,
)
from launcher.platforms.slurm.shell import Shell
from litgpt_demo.documents import parse_json
from litgpt_demo.errors import EXIT_CODES, DataError, Fault, words_of
from litgpt_demo.findings import Finding


class Entered(NamedTuple):
    """A job's way into its environment."""

    lines: tuple[str, ...]
    """Lines of the script, before `srun`; bash."""
    srun: tuple[str, ...]
    """Arguments of `srun`."""
    python: tuple[str, ...]
    """The words that start Python on a node; its own arguments follow."""


def entered(
    environment: NodeEnvironment,
    *,
    image: str | None,
    folders: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    gpus: bool = True,
) -> Entered:
    """Return what a job's script says for its environment. Pure. The script is bash, and `srun` exports all of it.

    Args:
        image: the image of the image step, by digest.
        folders: folders of the nodes that a container sees too, such as a root.
        variables: environment variables that win over those of an image.

    Raises:
        ConfigProblem: an image for software that is none, a container without one, or one by two ways.
    """
    _require_one_source(environment, image)
    ours = _loaded(environment.modules)
    theirs = _entered(environment, image, [*folders, *getattr(environment, "mounts", ())], variables or {}, gpus)
    return theirs._replace(lines=(*ours, *theirs.lines))


def _require_one_source(environment: NodeEnvironment, image: str | None) -> None:
    if not isinstance(environment, ContainerEnvironment):
        if image is not None:
            raise ConfigProblem(
                f"image={image} is given, and platform.environment.kind={environment.kind} runs no "
                "container; set image.kind=none, or platform.environment.kind to pyxis or apptainer"
            )
    elif environment.file is not None and image is not None:
        raise ConfigProblem(
            f"platform.environment.file={environment.file} and image={image} are both images; leave "
            "environment.file out, or set image.kind=none"
        )
    elif environment.file is None and image is None:
        raise ConfigProblem(
            f"platform.environment.kind={environment.kind} is a container, and nothing names its image; give "
            "platform.environment.file, or an `image` section whose kind is not none"
        )


@singledispatch
def _entered(
    environment: NodeEnvironment, image: str | None, mounts: Sequence[str], variables: Mapping[str, str], gpus: bool
) -> Entered:
    raise TypeError(f"{type(environment).__name__} is no software of nodes")


@_entered.register
def _venv(environment: VenvEnvironment, *_: object) -> Entered:
    python = f"{environment.path}/bin/python"
    lines = (
        f"export VIRTUAL_ENV={environment.path} PATH={environment.path}/bin:$PATH",
        _required("-x", python, "venv"),
    )
    return Entered(lines, (), (python,))


@_entered.register
def _conda(environment: CondaEnvironment, *_: object) -> Entered:
    """Return what `conda activate` does, which is there only where a shell was set up for it."""
    prefix = environment.prefix
    lines = (
        f"export CONDA_PREFIX={prefix} PATH={prefix}/bin:$PATH PYTHONNOUSERSITE=1",
        _required("-x", f"{prefix}/bin/python", "conda environment"),
        f'for script in {prefix}/etc/conda/activate.d/*.sh; do test ! -r "$script" || . "$script"; done',
    )
    return Entered(lines, (), (f"{prefix}/bin/python",))


@_entered.register
def _modules(environment: ModuleEnvironment, *_: object) -> Entered:
    lines = (
        "export PYTHONNOUSERSITE=1",
        f"command -v python > /dev/null || {_failure('no module brings python', 'see module avail')}",
    )
    return Entered(lines, (), ("python",))


@_entered.register
def _pyxis(
    environment: PyxisEnvironment, image: str | None, mounts: Sequence[str], variables: Mapping[str, str], _gpus: bool
) -> Entered:
    """The options of Pyxis, https://github.com/NVIDIA/pyxis/wiki/Usage. Enroot gives it the GPUs that the job has."""
    listed = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in dict.fromkeys(mounts))
    srun = (
        f"--container-image={environment.file or _for_enroot(image or '')}",
        *((f"--container-mounts={listed}",) if listed else ()),
        "--container-mount-home" if environment.home else "--no-container-mount-home",
    )
    return Entered((), srun, (*_set(variables), "python"))


def _for_enroot(image: str) -> str:
    """Return a pinned image as Enroot 3 and 4 read it: `REGISTRY#IMAGE:TAG`, where a tag may be a digest.

    Only Enroot 4 knows Docker's `host/path@sha256:…` (docker::_parse_uri in
    https://github.com/NVIDIA/enroot/blob/master/src/docker.sh).
    """
    one = ImageReference.parse(image)
    registry = "" if one.host == "docker.io" else f"{one.host}#"
    return f"{registry}{one.path}:{one.digest or one.tag or 'latest'}"


@_entered.register
def _apptainer(
    environment: ApptainerEnvironment,
    image: str | None,
    mounts: Sequence[str],
    variables: Mapping[str, str],
    gpus: bool,
) -> Entered:
    """The words of `apptainer exec`, https://apptainer.org/docs/user/main/cli/apptainer_exec.html.

    An image of a registry is made into a file once, aside and then renamed: as docker://… each node would convert it
    at each start.
    """
    program = environment.program
    lines: tuple[str, ...]
    missing = _failure(
        f"there is no program {program}", "name the module that brings it in platform.environment.modules"
    )
    here = f"command -v {program} > /dev/null || {missing}"
    if environment.file is not None:
        file, lines = environment.file, (here, _required("-r", environment.file, "image"))
    else:
        if environment.images is None:
            raise ConfigProblem(
                f"platform.environment.kind=apptainer is to run image={image}, which has to become a file first; "
                "name a folder for it that all nodes see in platform.environment.images, or the file itself in "
                "platform.environment.file"
            )
        file = f"{environment.images}/{(image or '').rpartition('@')[2].replace(':', '-')}.sif"
        made = f"{program} pull {file}.$SLURM_JOB_ID docker://{image} && mv {file}.$SLURM_JOB_ID {file}"
        pulled = _failure(f"{image} cannot be pulled", f"log in with {program} registry login, or see the folder")
        lines = (here, f"mkdir -p {environment.images}", f"test -r {file} || {{ {made}; }} || {pulled}")
    words = (
        program, "exec", *(("--nv",) if gpus else ()),
        *(word for mount in dict.fromkeys(mounts) for word in ("--bind", mount)),
        file, *_set({"PYTHONNOUSERSITE": "1", **variables}), "python",
    )  # fmt: skip
    return Entered(lines, (), words)


def _set(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The words that set variables within a container, whose image may have its own values of them."""
    return ("env", *(f"{name}={value}" for name, value in variables.items())) if variables else ()


# --- lines of the script ----------------------------------------------------------------------------------------------


def _loaded(modules: Sequence[str]) -> tuple[str, ...]:
    """The lines that load modules. `module` is a function that a login defines, and a batch job's shell is none."""
    if not modules:
        return ()
    wanted = shlex.join(modules)
    no_modules = _failure("this node has no environment modules", "leave platform.environment.modules out")
    refused = _failure(f"module load {wanted} failed", "see module avail on a node of the partition")
    return (
        "type module > /dev/null 2>&1 || . /etc/profile",
        f"type module > /dev/null 2>&1 || {no_modules}",
        f"module load {wanted} || {refused}",
    )


def _required(test: str, path: str, what: str) -> str:
    return f"test {test} {path} || {_failure(f'{path} is not there for {what}', 'is its file system on the nodes?')}"


def _failure(what: str, fix: str) -> str:
    """The words that end the script as a node ends that was asked for what cannot be: no special characters of bash."""
    told = f"error [slurm.environment] $(hostname): {what} -> {fix}"
    return f'{{ echo "{told}" >&2; exit {EXIT_CODES[Fault.USER]}; }}'


# --- before it is submitted -------------------------------------------------------------------------------------------


_PACKAGES = ("torch", "lightning", "litgpt")
_MARK = "<train-litgpt>"
# Metadata alone is read, because an import of torch takes a login node half a minute.
_PROBE = f"""
import json
from importlib import metadata
found = {{}}
for name in {_PACKAGES}:
    try: found[name] = metadata.version(name)
    except metadata.PackageNotFoundError: pass
try:
    import litgpt_demo
    found["litgpt_demo"] = litgpt_demo.__version__
except ImportError: pass
print("{_MARK}" + json.dumps(found))
"""


def check_environment(shell: Shell, environment: NodeEnvironment, *, image: str | None = None) -> Iterator[Finding]:
    """Yield what is wrong with the nodes' environment, as the machine that submits sees the shared file systems.

    Raises:
        ConfigProblem: as `entered`.
        PlatformUnreachable, LoginProblem: the login node does not answer.
    """
    if isinstance(environment, PyxisEnvironment):
        if "--container-image" not in shell.run(("srun", "--help")).out:
            fix = "ask the administrators for Pyxis, or take platform.environment.kind=apptainer"
            yield Finding("error", "slurm.environment", f"srun of {shell.where} knows no --container-image", fix)
    elif isinstance(environment, ApptainerEnvironment) and environment.file is None:
        lines = entered(environment, image=image or _UNKNOWN).lines[:-2]  # nothing is pulled
        yield from _said(shell, environment, (*lines, "exit 0"))
    else:
        way = entered(environment, image=None, gpus=False)
        yield from _said(shell, environment, (*way.lines, "cd /", shlex.join((*way.python, "-c", _PROBE))))


_UNKNOWN = f"localhost/image@sha256:{'0' * 64}"


def _said(shell: Shell, environment: NodeEnvironment, lines: Sequence[str]) -> Iterator[Finding]:
    """Yield what a start of the environment there says."""
    answer = shell.run(("bash", "-c", "\n".join(lines)), seconds=120)
    where = f"the environment ({environment.kind}) as {shell.where} sees it"
    if answer.code != 0:
        told = words_of(" ".join((answer.err or answer.out).strip().splitlines()[-2:])) or f"exit code {answer.code}"
        fix = "a job would end so too, where its nodes see the same files: docs/slurm.md says how to make one"
        yield Finding("error", "slurm.environment", f"{where} does not start: {told}", fix)
    elif _MARK in answer.out:
        yield from _judged(answer.out.rpartition(_MARK)[2].encode(), where)


def _judged(told: bytes, where: str) -> Iterator[Finding]:
    try:
        found = parse_json(told, dict[str, str], where=where, fix="see what its python prints at its start")
    except DataError as error:
        yield Finding("error", "slurm.environment", str(error))
        return
    ours = found.pop("litgpt_demo", None)
    if missing := [*(("train-litgpt",) if ours is None else ()), *(name for name in _PACKAGES if name not in found)]:
        what = f"{where} lacks {', '.join(missing)}"
        yield Finding("error", "slurm.environment", what, "install train-litgpt into it, which brings them all")
    elif ours != litgpt_demo.__version__:
        what = f"{where} has train-litgpt {ours}, and this one is {litgpt_demo.__version__}: they have to be the same"
        fix = f"install that one there: pip install train-litgpt=={litgpt_demo.__version__}"
        yield Finding("error", "slurm.environment", what, fix)
    else:
        yield Finding("info", "slurm.environment", f"{where} has {', '.join(f'{k} {v}' for k, v in found.items())}")
