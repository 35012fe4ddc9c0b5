"""Checks of a config before any money is spent; all problems are reported at once.

The preparation of the dataset is tried before any machine is rented. A small corpus is prepared in full, in a scratch
folder, so that its problems are those of the preparation itself. The start of a larger local corpus is read.
"""

from __future__ import annotations

import importlib.util
import json
import os
import posixpath
import shutil
import socket
import subprocess
import tempfile
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from launcher.checks.arithmetic import check_memory, gpu_names
from launcher.checks.fitness import check_fitness
from launcher.config import DaskWorkers, RunConfig, ScriptConfig, Workers
from launcher.errors import LoginProblem, finding_of, install_extra
from launcher.formatting import bytes_text
from launcher.images.settings import BuiltImage, NoImage
from launcher.job import Job
from launcher.platforms.base import Platform
from launcher.runs.run import Run, Script, steps_of
from litgpt_demo import PYTHON, catalogue
from litgpt_demo.config import EvaluationConfig, InitialWeights, ModelConfig, TrainConfig
from litgpt_demo.data.dataset import DatasetManifest, PlannedDataset
from litgpt_demo.errors import Finding, TrainLitgptError, Unreachable, UserError
from litgpt_demo.node.checks import check_packages
from litgpt_demo.storage import bucket_path, is_remote, open_storage
from litgpt_demo.storage.bucket import BucketStorage
from litgpt_demo.storage.private import environment_of_readers
from litgpt_demo.training.origins import optimizer_problem, position_problem, tokenizer_problem

PROBE = ".access-check"
_GIB = 2**30
DRY_RUN_BYTES = 4_000_000
"""Size up to which a corpus is prepared in full, which takes two seconds; this much is read of a larger one."""
_LARGEST_OPENED = 64_000_000
"""Bytes of the largest file that is opened to read its start: its checksum is compared first, which reads all of it."""
_PIECES = 32  # of tokens, that wait to be hashed where the root is a bucket (litgpt_demo.data.workers)


def check_access(config: RunConfig | ScriptConfig) -> str:
    """Write a small file under the root and remove it, and query the platform. Returns a sentence about both."""
    storage = open_storage(config.root)
    probe = f"{PROBE}-{socket.gethostname()}-{os.getpid()}"
    try:
        storage.write(probe, b"train-litgpt was here to see whether it may write\n")
        storage.remove(probe)
    except Unreachable:
        raise
    except (UserError, OSError) as error:
        raise LoginProblem(f"root={config.root} cannot be written: {error}") from error
    return f"{storage.address()} can be written, {config.platform.open().check_access()}"


def check_training(config: RunConfig, job: Job, *, vocab_size: int | None) -> Iterator[Finding]:
    train, model = config.train, config.model
    has_weights = model.init_from is not None
    problem = catalogue.vocabulary_problem(model.name, model.config, vocab_size=vocab_size, has_weights=has_weights)
    if problem is not None:
        yield Finding("error", "model.vocabulary", *problem)
    changes = catalogue.changed(model.name, model.config) if model.name is not None else ""
    if changes:
        what = f"model.config changes {model.name}: {changes}"
        yield Finding("warning", "model.config", what, "model.config={} takes it unchanged")
    yield from _check_schedule(config, vocab_size=vocab_size)
    yield from _check_products(train, model)
    if config.platform.on_this_machine and not gpu_names():
        if train.float8:
            needs = "needs a GPU that multiplies in float8 (H100, L4 or newer), and this machine has none"
            yield Finding("error", "train.float8", f"train.float8=true {needs}", "leave train.float8 out")
        if train.precision.startswith("16"):
            what = f"train.precision={train.precision} needs a GPU, and this machine has none"
            yield Finding("error", "train.precision", what, "set train.precision to 32-true or bf16-mixed")
        elif train.precision.startswith("bf16"):
            what = f"train.precision={train.precision} is emulated on most CPUs and slow"
            yield Finding("warning", "train.precision", what, "set train.precision=32-true")
    if not config.platform.in_containers:
        yield from check_packages(os.environ)
    if config.world_size == 1 and train.strategy != "auto":  # Fabric ignores it silently
        what = f"train.strategy={train.strategy} has no effect, because the run has one process"
        yield Finding("warning", "train.strategy", what, "leave it out, or raise platform.processes_per_node")
    if config.evaluation is not None:
        yield from check_evaluation(config.evaluation)
    yield from check_memory(config, vocab_size=vocab_size)
    yield from config.platform.missing_secrets(job.secrets)


def _check_schedule(config: RunConfig, *, vocab_size: int | None) -> Iterator[Finding]:
    train = config.train
    # The config itself checks max_steps; without a length the dataset decides, and its dry run checks.
    steps = steps_of(config, tokens=None, vocab_size=vocab_size)
    if steps is not None and train.max_steps is None:
        length = f"train.tokens_per_parameter={train.tokens_per_parameter}"
        if train.max_tokens is not None:
            length = f"train.max_tokens={train.max_tokens:,}"
        problems = train.step_problems(steps, f"the {steps:,} steps that {length} makes")
        yield from (Finding("error", code, *problem) for code, problem in problems.items())


def _check_products(train: TrainConfig, model: ModelConfig) -> Iterator[Finding]:
    fields = catalogue.settings(model.name, model.config)
    experts = fields.get("n_expert", 0) if fields.get("mlp_class_name") == "LLaMAMoE" else 0
    if model.init_from is None and experts > fields.get("n_expert_per_token", 0):
        what = f"the model routes tokens to {experts} experts, but the trainer does not balance their load"
        what += ", without which a training from random weights comes to use few of them"
        yield Finding(
            "error", "model.experts", what, "start from trained weights (model.init_from), or take a dense model"
        )
    rows = train.micro_batch * model.sequence_length
    if train.float8 and experts:
        what = "train.float8=true multiplies in multiples of 16 rows, but an expert gets any number of tokens"
        yield Finding("error", "train.float8", what, "leave train.float8 out")
    elif train.float8 and rows % 16:
        what = "train.float8=true multiplies in multiples of 16 rows, but train.micro_batch="
        what += f"{train.micro_batch} x model.sequence_length={model.sequence_length} are {rows:,}"
        yield Finding("error", "train.float8", what, "change one of the two, or leave train.float8 out")


def check_origin(run: Run, dataset: DatasetManifest | None, *, vocab_size: int | None) -> Iterator[Finding]:
    """Compare the initial weights with the tokenizer and the model. The model is compared in a process of its own, so
    that this one does not import torch."""
    origin = run.origin
    if origin is None or run.dataset.unknown:
        return
    known = run.root.address(run.dataset.path) if dataset is not None else None
    if problem := tokenizer_problem(origin, run.dataset, known):
        yield Finding("error", "model.init_from.tokenizer", *problem)
    remote = run.config.platform.in_containers or is_remote(run.config.root)
    if origin.kind == "checkpoint" and remote and not is_remote(origin.address):
        what = f"model.init_from: {origin.address} is on this machine, but the nodes are not"
        yield Finding("error", "model.init_from.place", what, "copy that folder into a bucket, and give this address")
    if vocab_size is not None:
        yield from origin_problems(run, origin, vocab_size=vocab_size)


def check_position(run: Run) -> Iterator[Finding]:
    """Report where in its samples a training begins that continues its weights with their optimizer."""
    origin, hashes = run.origin, run.dataset.sample_hashes
    order = {"seed": run.config.train.seed, "length": run.config.model.sequence_length}
    problem = position_problem(origin, hashes, **order)
    if problem is not None:
        yield Finding("error", "model.init_from.samples", *problem)
    elif origin is not None:
        fix = "another train.seed begins a new order of the samples"
        for dataset in sorted(hashes):
            first = origin.first_sample(dataset, **order)
            if first:
                what = f"the training continues dataset {dataset} after the {first:,} samples that the weights saw"
                yield Finding("info", "model.init_from.samples", what, fix)


def check_optimizer(run: Run) -> Iterator[Finding]:
    """Yield a finding if the run would continue from the state of another optimizer."""
    problem = optimizer_problem(run.origin, run.config.train.optimizer)
    if problem is not None:
        yield Finding("error", "model.init_from.optimizer", *problem)


def origin_problems(run: Run, origin: InitialWeights, *, vocab_size: int) -> Iterator[Finding]:
    """Compare weights with a run's model: their settings, and in a local folder the names and shapes of tensors."""
    model = run.config.model.model_dump(mode="json")
    question = {"model": model, "vocab_size": vocab_size, "origin": origin.model_dump(mode="json")}
    command, environ = [*PYTHON, "-m", "litgpt_demo", "compare"], environment_of_readers(os.environ)
    done = subprocess.run(command, input=json.dumps(question), capture_output=True, text=True, env=environ)
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        fix = "check that the files in that folder are complete"
        yield Finding("error", "model.init_from", f"{origin.name} cannot be compared with the model: {last_line}", fix)
    else:
        yield from (
            Finding("error", "model.init_from", *problem) for problem in json.loads(done.stdout.splitlines()[-1])
        )


def check_evaluation(evaluation: EvaluationConfig) -> Iterator[Finding]:
    missing = [name for name in ("lm_eval", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        what = f"evaluation needs packages that are not installed: {', '.join(missing)}"
        yield Finding("error", "evaluation.missing", what, install_extra("evaluate"))
    if evaluation.folder is not None and not evaluation.folder.is_dir():
        what = f"evaluation.task_folder={evaluation.task_folder} is not a folder of this machine"
        yield Finding("error", "evaluation.task_folder", what, "give the folder with the YAML files of your tasks")


def check_place(config: RunConfig | ScriptConfig, platform: Platform, job: Job) -> list[Finding]:
    """Return the problems of root, image and platform, which the trials of a sweep share."""
    findings = [*check_root(config.root), *_check_region(config.root, config.platform.region)]
    image, machine = config.image, config.platform.machine_type
    if config.platform.in_containers and isinstance(image, NoImage):
        what = f"platform {platform.name} runs container images, but image.kind=none"
        fix = "set image to {kind: docker, repository: …} or {kind: prebuilt, reference: …}"
        findings.append(Finding("error", "image.missing", what, fix))
    elif not config.platform.in_containers and not isinstance(image, NoImage):
        what = f"platform {platform.name} runs no container, so that image.kind={image.kind} is not used"
        findings.append(Finding("warning", "image.unused", what, "set image to {kind: none}"))
    if machine is not None and isinstance(image, BuiltImage) and image.architecture != machine.arch:
        what = f"image.architecture={image.architecture}, but a {machine.name} is {machine.arch}"
        fix = f"set image.architecture to {machine.arch}, and build on such a machine or with emulation"
        findings.append(Finding("error", "image.architecture", what, fix))
    if config.platform.in_containers:
        findings += check_fitness(config)
    return [*findings, *platform.check(platform.render(job))]


# https://docs.cloud.google.com/storage/docs/locations: names of larger areas begin so.
_AREAS = {"us": "us-", "nam": "us-", "eu": "europe-", "asia": "asia-"}


def _check_region(root: str, region: str | None) -> Iterator[Finding]:
    """Warn if the bucket is in another region than the machines: all data and each checkpoint cross between them."""
    storage = open_storage(root)
    if region is None or not isinstance(storage, BucketStorage):
        return
    location = ""
    with suppress(TrainLitgptError):  # the credentials step reports missing permissions and a silent bucket
        location = storage.location()
    if not location:
        return
    prefix = location
    if "-" not in location:
        prefix = next((start for name, start in _AREAS.items() if location.startswith(name)), "")
    if not region.startswith(prefix):
        what = f"the bucket of root={root} is in {location}, but the machines are in {region}"
        fix = f"take a bucket in {region}: traffic between regions is slow and costs by the gigabyte"
        yield Finding("warning", "root.region", what, fix)


def check_root(root: str) -> Iterator[Finding]:
    if bucket_path(root) is not None:
        return  # the credentials step checks it with a real write
    path = Path(root).expanduser().resolve()
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    if not folder.is_dir():
        yield Finding("error", "root.not-a-folder", f"root={root}: {folder} is a file", "choose another root")
        return
    try:
        # A real write: the permission bits say nothing about read-only and full file systems, nor about root.
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        what = f"root={root}: cannot write to {folder} ({error.strerror})"
        yield Finding("error", "root.not-writable", what, "choose another root, or give yourself write permission")
        return
    free = shutil.disk_usage(folder).free
    if free < _GIB:
        what = f"root={root} has {bytes_text(free)} free"
        yield Finding("warning", "root.disk-space", what, "free some space, or choose another root")


def check_workers(workers: Workers) -> list[Finding]:
    """Check that the Dask scheduler accepts connections. It is not queried: Dask executes a scheduler's answers, and
    the config may come from another person."""
    if not isinstance(workers, DaskWorkers):
        return []
    if importlib.util.find_spec("distributed") is None:
        what = "dataset_workers.kind=dask needs a package that is not installed"
        fix = f"{install_extra('dask')}, here and on the cluster; or set dataset_workers.kind=threads"
        return [Finding("error", "dataset_workers.dask-missing", what, fix)]
    try:
        address = urlsplit(workers.scheduler)
        socket.create_connection((address.hostname or "", address.port or 8786), timeout=5).close()
    except (OSError, ValueError) as error:
        what = f"dataset_workers.scheduler={workers.scheduler} does not accept a connection ({error})"
        return [
            Finding("error", "dataset_workers.scheduler", what, "start it with `dask scheduler`, or fix the address")
        ]
    return []


def check_script(script: Script, platform: Platform, job: Job) -> Iterator[Finding]:
    config = script.config
    files = script.code.paths if script.code else ()
    program, setting = config.program[0], f"script={config.script!r}"
    if program == "-m":
        top = config.program[1].split(".")[0]
        is_mounted = any(path == f"{top}.py" or path.startswith(f"{top}/") for path in files)
        if config.platform.on_this_machine and not is_mounted and not _has_module(top):
            fix = "install it, or give the path of a file"
            yield Finding("error", "script.missing", f"{setting}: module {top} is not installed", fix)
    elif config.code is not None:
        if posixpath.normpath(program) not in files:
            what = f"{setting} is not a file of code.folder={config.code.folder}, or its .dockerignore leaves it out"
            fix = "give its path within that folder, and check the .dockerignore there"
            yield Finding("error", "script.missing", what, fix)
    elif config.platform.in_containers and not program.startswith("/"):
        what = f"{setting} is a path in the image, but nodes start in a folder of their own"
        yield Finding("error", "script.relative", what, "give its absolute path in the image, or `-m package.module`")
    elif not config.platform.in_containers and not Path(program).is_file():
        fix = "give a path from the folder where you start the command, or an absolute one"
        yield Finding("error", "script.missing", f"{setting}: {program} is not a file", fix)
    yield from check_place(config, platform, job)


def _has_module(name: str) -> bool:
    """Return whether the ranks find a module: they start in the current folder, and `-m` looks there too."""
    return bool(name and (importlib.util.find_spec(name) or PathFinder.find_spec(name, [str(Path.cwd())])))


DryRun: TypeAlias = DatasetManifest | Finding | None
"""The manifest of a dataset that was prepared in full, or why it would be refused."""


def dry_run_dataset(planned: PlannedDataset) -> DryRun:
    """Prepare a small corpus, or read the start of a larger one, and keep nothing. Returns None if the start has no
    problem, or if it cannot be read in a short time, or not from this machine."""
    from litgpt_demo.data.preparation import prepare
    from litgpt_demo.data.shards import documents
    from litgpt_demo.data.tokens import Encoder

    if planned.unknown:
        return None
    corpus, first = planned.data.corpus, planned.sources[0]
    size = sum(source.size for source in planned.sources)
    if corpus.max_bytes is not None:
        size = min(size, corpus.max_bytes)
    if planned.parts and size > DRY_RUN_BYTES:
        results = map(dry_run_dataset, planned.parts)
        return next((result for result in results if isinstance(result, Finding)), None)
    try:
        with tempfile.TemporaryDirectory(prefix="train-litgpt-dry-run-") as folder:
            if size <= DRY_RUN_BYTES:
                return prepare(planned, open_storage(folder))
            if planned.tokenizer is not None:
                Encoder(planned.tokenizer)  # raises if it cannot encode texts
            if not corpus.is_tokenized and first.file is not None and first.size <= _LARGEST_OPENED:
                start = planned.data.model_copy(
                    update={"corpus": corpus.model_copy(update={"max_bytes": DRY_RUN_BYTES})}
                )
                deque(documents(start, planned.sources, Path(folder)), maxlen=0)
            return None
    except TrainLitgptError as error:
        return finding_of(error, "data.refused")


def scratch_for(planned: PlannedDataset, *, root: str, workers: Workers) -> str:
    """Return the folder and size of a preparation's scratch files at their peak, in words; empty for a local corpus.
    The copies are kept for the second reading while half of the file system is free."""
    from litgpt_demo.data.preparation import threads_for
    from litgpt_demo.data.shards import plan_shards
    from litgpt_demo.data.workers import PrepContext

    if planned.parts:
        texts = [scratch_for(part, root=root, workers=workers) for part in planned.parts]
        return "; ".join(filter(None, texts))
    if planned.data.corpus.is_tokenized or all(source.file is not None for source in planned.sources):
        return ""
    work = PrepContext(data=planned.data, root=root, path=planned.path)
    shards = plan_shards(planned.data.corpus, planned.sources)
    sizes = [sum(part.source.size for part in shard.parts if part.source.file is None) for shard in shards]
    limit = planned.data.corpus.max_bytes
    if limit is not None:
        sizes = sizes[: bisect_left(list(accumulate(sizes)), limit) + 1]
    sizes.sort(reverse=True)
    if isinstance(workers, DaskWorkers):
        count, prefix = 1, "for each worker "
    else:
        count, prefix = workers.count or threads_for(root if workers.kind == "threads" else ""), ""
    waiting = _PIECES if is_remote(root) else 0
    pieces = sum(sizes[: count + waiting])
    least, most = sum(sizes[:count]) + pieces, sum(sizes) + pieces
    text = f"{prefix}about {bytes_text(least)} of scratch in {work.scratch}"
    if most > least:
        text += f", and {bytes_text(most)} while half of that disk is free"
    return text
