"""Checks of a config before anything is spent on it; all that is wrong is reported at once."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import posixpath
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from urllib.parse import urlsplit

from launcher.checks.arithmetic import check_memory, gpu_names
from launcher.config import DaskWorkers, RunConfig, ScriptConfig, Workers
from launcher.formatting import bytes_text
from launcher.images.fitness import check_fitness
from launcher.images.settings import BuiltImage, NoImage
from launcher.job import Job
from launcher.platforms.base import Capability, Platform
from litgpt_demo.config import TrainedTokenizer
from litgpt_demo.findings import Finding
from litgpt_demo.models import catalogue
from litgpt_demo.storage import bucket_path, is_remote

_GIB = 2**30


def check_training(config: RunConfig, job: Job, *, vocab_size: int | None) -> list[Finding]:
    """Return what is wrong with data, model and training, whatever the place."""
    return [
        *check_vocabulary(config, vocab_size),
        *check_steps(config),
        *check_precision(config),
        *check_strategy(config),
        *check_memory(config, vocab_size=vocabulary_of(config, vocab_size)),
        *check_secrets(config, job),
    ]


def check_place(config: RunConfig | ScriptConfig, platform: Platform, job: Job) -> list[Finding]:
    """Return what is wrong with root, image and platform; trials of a sweep share these."""
    return [
        *check_root(config.root),
        *check_image(config, platform),
        *check_architecture(config),
        *(check_fitness(config) if Capability.IMAGES in platform.capabilities else ()),
        *platform.check(platform.render(job)),
    ]


def check_script(config: ScriptConfig, platform: Platform, job: Job, *, files: Collection[str] = ()) -> list[Finding]:
    """Return what blocks a user's own script.

    Args:
        files: the paths of the code that it mounts.
    """
    return [*check_program(config, files), *check_preemptions(config), *check_place(config, platform, job)]


def check_root(root: str) -> Iterator[Finding]:
    """Check that the root is a place that can be written, with room left."""
    if bucket_path(root) is not None:
        return  # asked by the credentials step, with a real write
    if is_remote(root):
        yield Finding("error", "root.scheme", f"root={root} is no place we know", "a folder, or gs://bucket/prefix")
        return
    path = Path(root).expanduser().resolve()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir():
        yield Finding("error", "root.not-a-folder", f"root={root}: {there} is a file", "choose another root")
        return
    try:
        # A real write: the permission bits say nothing about read-only and full file systems, nor about root.
        with tempfile.NamedTemporaryFile(dir=there):
            pass
    except OSError as error:
        yield Finding(
            "error",
            "root.not-writable",
            f"root={root}: cannot write to {there} ({error.strerror})",
            "choose another root, or give yourself write permission",
        )
        return
    if (free := shutil.disk_usage(there).free) < _GIB:
        yield Finding(
            "warning",
            "root.disk-space",
            f"root={root} has {bytes_text(free)} free",
            "free some, or choose another root",
        )


def check_workers(workers: Workers, *, trusted: bool = False) -> list[Finding]:
    """Check that the Dask cluster is there, and usable. Its scheduler is asked, for 5 seconds at most.

    Args:
        trusted: whether the scheduler may be talked to, as in a run: Dask executes what it answers. A plan of a config
            that may be somebody else's only knocks.
    """
    if not isinstance(workers, DaskWorkers):
        return []
    if not all(importlib.util.find_spec(name) for name in ("distributed", "prefect_dask")):
        return [
            Finding(
                "error",
                "workers.dask-missing",
                "workers.kind=dask needs packages that are not installed",
                'pip install "train-litgpt[dask]", here and on the cluster; or take threads or processes',
            )
        ]
    try:
        if not trusted:
            _require_listener(workers.scheduler)
            return []
        there = _dask_workers(workers.scheduler)
    except (OSError, ValueError) as error:
        return [
            Finding(
                "error",
                "workers.scheduler",
                f"workers.scheduler={workers.scheduler} does not answer ({error})",
                "start it with `dask scheduler`, or fix the address",
            )
        ]
    if there:
        return []
    return [
        Finding(
            "warning",
            "workers.none",
            f"the Dask cluster at {workers.scheduler} has no workers; nothing begins before it has",
            f"start some: dask worker {workers.scheduler}",
        )
    ]


def _require_listener(scheduler: str) -> None:
    address = urlsplit(scheduler)
    socket.create_connection((address.hostname or "", address.port or 8786), timeout=5).close()


def _dask_workers(scheduler: str) -> Collection[str]:
    from distributed import Client

    with Client(scheduler, timeout=5, set_as_default=False) as client:
        found: Collection[str] = client.scheduler_info(n_workers=-1)["workers"]
        return found


def check_vocabulary(config: RunConfig, vocab_size: int | None) -> Iterator[Finding]:
    """Check that the tokenizer's ids fit the model's embeddings."""
    vocab_size = vocabulary_of(config, vocab_size)
    rows = catalogue.padded_vocabulary(config.model.name, config.model.config)
    if vocab_size is None or rows is None:
        return
    if problem := catalogue.vocabulary_problem(config.model.name, rows=rows, vocab_size=vocab_size):
        yield Finding("error", "model.vocabulary", *problem)


def vocabulary_of(config: RunConfig, vocab_size: int | None) -> int | None:
    """Ids of the tokenizer: of one that is trained as many as its settings say, else `vocab_size`."""
    tokenizer = config.data.tokenizer
    return tokenizer.vocab_size if isinstance(tokenizer, TrainedTokenizer) else vocab_size


def check_steps(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding where the warm-up takes all of the steps that train.max_tokens makes; max_steps is held already.

    Without either the dataset decides, and a rehearsal of it tells.
    """
    train = config.train
    if train.max_tokens is None:
        return
    steps = train.steps(tokens=0, sequence_length=config.model.sequence_length)
    if train.warmup_steps >= steps:
        yield Finding(
            "error",
            "train.warmup_steps",
            f"train.warmup_steps={train.warmup_steps} leaves nothing of the {steps:,} steps that "
            f"train.max_tokens={train.max_tokens:,} makes",
            "lower it; a tenth of the steps is a usual warm-up",
        )


def check_secrets(config: RunConfig, job: Job) -> Iterator[Finding]:
    """Yield the secrets that the training names and its ranks would not have."""
    return config.platform.missing_secrets(job.secrets)


def check_precision(config: RunConfig) -> Iterator[Finding]:
    """Half precision needs a GPU; on this machine it can be looked up."""
    if not config.platform.on_this_machine or gpu_names():
        return
    if config.train.float8:
        yield Finding(
            "error",
            "train.float8",
            "train.float8=true needs a GPU that multiplies in float8 (H100, L4 or newer), and this machine has none",
            "leave it off",
        )
    if config.train.precision.startswith("16"):
        yield Finding(
            "error",
            "train.precision",
            f"train.precision={config.train.precision} needs a GPU, and this machine has none",
            "use 32-true or bf16-mixed",
        )
    elif config.train.precision.startswith("bf16"):
        yield Finding(
            "warning",
            "train.precision",
            f"train.precision={config.train.precision} is emulated on most CPUs and slow",
            "use 32-true here",
        )


def check_strategy(config: RunConfig) -> Iterator[Finding]:
    """A strategy for several processes given to one is silently ignored by Fabric; say so."""
    if config.world_size == 1 and config.train.strategy != "auto":
        yield Finding(
            "warning",
            "train.strategy",
            f"train.strategy={config.train.strategy} is ignored: there is one process",
            "raise platform.nodes or platform.processes",
        )


def check_image(config: RunConfig | ScriptConfig, platform: Platform) -> Iterator[Finding]:
    """An image where none is used, or none where one is needed."""
    needed = Capability.IMAGES in platform.capabilities
    if needed and isinstance(config.image, NoImage):
        yield Finding(
            "error",
            "image.missing",
            f"platform {platform.name} runs container images, and image.kind=none",
            "set image to {kind: docker, repository: …} or {kind: prebuilt, reference: …}",
        )
    elif not needed and not isinstance(config.image, NoImage):
        yield Finding(
            "warning",
            "image.unused",
            f"platform {platform.name} runs this very environment; image.kind={config.image.kind} is not used",
            "set image to {kind: none}",
        )


def check_architecture(config: RunConfig | ScriptConfig) -> Iterator[Finding]:
    """An image for the processor that the machines have."""
    machine = config.platform.machine_type
    if machine is None or not isinstance(config.image, BuiltImage):
        return
    if config.image.platform.split("/")[1] != machine.arch:
        yield Finding(
            "error",
            "image.architecture",
            f"image.platform={config.image.platform}, and a {machine.name} is {machine.arch}",
            f"set image.platform to linux/{machine.arch}, and build on such a machine or with emulation",
        )


def check_program(config: ScriptConfig, files: Collection[str] = ()) -> Iterator[Finding]:
    """Check that the script is there, or is one of the `files` of the code that it mounts."""
    program, here = config.program, config.platform.on_this_machine
    if program[0] == "-m":
        top = program[1].split(".")[0]
        if any(path == f"{top}.py" or path.startswith(f"{top}/") for path in files):
            return
        # Ranks start in this folder, and `-m` looks there too.
        places = top and (importlib.util.find_spec(top) or PathFinder.find_spec(top, [str(Path.cwd())]))
        if here and not places:
            yield Finding(
                "error",
                "script.missing",
                f"script={config.script!r}: there is no module {top}",
                "install it, or give the path of a file",
            )
    elif config.code is not None:
        if posixpath.normpath(program[0]) not in files:
            yield Finding(
                "error",
                "script.missing",
                f"script={config.script!r} is no file of code.mount={config.code.mount}, or one that is left out",
                "give its path within that folder, and look into the .dockerignore there",
            )
    elif not here and not program[0].startswith("/"):
        yield Finding(
            "error",
            "script.relative",
            f"script={config.script!r} is a path in the image, and nodes start in a folder of their own",
            "give its absolute path in the image, or `-m package.module`",
        )
    elif here and not Path(program[0]).is_file():
        yield Finding(
            "error",
            "script.missing",
            f"script={config.script!r}: {program[0]} is not a file",
            "paths are relative to the folder you start from",
        )


def check_preemptions(config: ScriptConfig) -> Iterator[Finding]:
    """Tell that Spot machines end a script that may not be started again."""
    own = config.restarts.preempted.attempts
    if config.platform.ends_by_preemption and (config.max_restarts if own is None else own) == 0:
        yield Finding(
            "info",
            "script.preemptions",
            "platform.spot=true and max_restarts=0: the first preemption that the platform does not make good by "
            "platform.restarts ends the script",
            "raise max_restarts if the script goes on where it was",
        )
