"""What running a config would do: which steps are done by their key, which would run, what stands in the way."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.arithmetic import arithmetic
from launcher.attempts import attempts_at, attempts_of
from launcher.benchmark import BenchmarkConfig
from launcher.config import DaskWorkers, RunConfig, ScriptConfig, SweepConfig, Workers
from launcher.cost import expected, machine_of
from launcher.curves import summary
from launcher.figures import bytes_text, count_text, loss_text
from launcher.findings import Finding
from launcher.preflight import check_run, check_script, check_workers, vocabulary_of
from launcher.runs import Run, plan_run, training_spec
from launcher.sweeps import trials
from litgpt_demo import checkpoints
from litgpt_demo.catalogue import config_of, fields_of
from litgpt_demo.collection import collected
from litgpt_demo.dataset import finished_dataset
from litgpt_demo.estimates import flops_per_token
from litgpt_demo.metrics import rows_of
from litgpt_demo.runs import FINAL, METRICS

_UNKNOWN_VOCABULARY = 50_304
"""Of a tokenizer that is still to be trained, for estimates: GPT-2's, padded."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `train-litgpt plan` prints."""

    steps: list[dict[str, str]]
    """Tables, both of them."""
    arithmetic: list[dict[str, str]]
    findings: list[Finding]


def plan_of(config: RunConfig | ScriptConfig | SweepConfig | BenchmarkConfig) -> Plan:
    """Of a training, its steps, its arithmetic and what stands in the way; of anything else the last alone."""
    if not isinstance(config, RunConfig):
        return Plan(steps=[], arithmetic=[], findings=findings_of(config))
    run = plan_run(config)
    return Plan(steps=steps_at(run), arithmetic=arithmetic_at(run), findings=findings_at(run))


def arithmetic_at(run: Run) -> list[dict[str, str]]:
    """What the training will cost in operations and memory."""
    config, dataset = run.config, finished_dataset(run.root, run.dataset)
    length, asked = config.model.sequence_length, config.train.max_steps or config.train.max_tokens
    steps = None
    if asked is not None or dataset is not None:
        steps = config.train.steps(tokens=dataset.train.tokens if dataset else 0, sequence_length=length)
    tokens = None if steps is None else steps * config.train.global_batch * length
    known = dataset or run.dataset.tokenizer
    return arithmetic(config, vocab_size=vocabulary_of(config, known.vocab_size if known else None), tokens=tokens)


def findings_of(config: RunConfig | ScriptConfig | SweepConfig | BenchmarkConfig) -> list[Finding]:
    """What stands in the way of this config."""
    if isinstance(config, SweepConfig):
        found = [finding for trial in trials(config) for finding in findings_of(trial.config)]
        return list(dict.fromkeys(found))
    if isinstance(config, BenchmarkConfig):
        return [finding for job in config.jobs() for finding in findings_of(job)]
    if isinstance(config, ScriptConfig):
        attempts = attempts_of(config)
        return check_script(config, attempts.platform, attempts.make_job(attempts.next()))
    return findings_at(plan_run(config))


def findings_at(run: Run) -> list[Finding]:
    """What stands in the way of a run that is planned already: planning reads the whole corpus for its checksums."""
    attempts, tokenizer = attempts_at(run), run.dataset.tokenizer
    job = attempts.make_job(attempts.next())
    found = check_run(run.config, attempts.platform, job, vocab_size=tokenizer.vocab_size if tokenizer else None)
    return found + _about_workers(run)


def _about_workers(run: Run) -> list[Finding]:
    """A run whose dataset is there needs none."""
    found = check_workers(run.config.workers)
    return found if found and finished_dataset(run.root, run.dataset) is None else []


def steps_of(config: RunConfig) -> list[dict[str, str]]:
    """The steps as a table: what each would do."""
    return steps_at(plan_run(config))


def steps_at(run: Run) -> list[dict[str, str]]:
    """The same of a run that is planned already."""
    config = run.config
    return [
        {"step": "dataset", "would": _dataset(run), "where": run.root.address(run.dataset.path)},
        {
            "step": "image",
            "would": "record this environment" if config.image.kind == "none" else "pin by digest",
            "where": "",
        },
        {"step": "credentials", "would": "prove write access", "where": run.root.address()},
        {"step": "training", "would": _training(run), "where": run.storage.address()},
        {"step": "checkpoints", "would": _checkpoints(run), "where": run.storage.address(FINAL)},
    ]


def _dataset(run: Run) -> str:
    done = finished_dataset(run.root, run.dataset)
    if done is None:
        size = sum(source.size for source in run.dataset.sources)
        return f"prepare {len(run.dataset.sources):,} files, {bytes_text(size)}, by {_workers(run.config.workers)}"
    return f"nothing: done, {count_text(done.train.tokens)} training tokens"


def _workers(workers: Workers) -> str:
    if isinstance(workers, DaskWorkers):
        return f"the Dask workers of {workers.scheduler}"
    return f"{workers.count or 'as many'} {workers.kind}" + ("" if workers.count else " as cores")


def _training(run: Run) -> str:
    live = attempts_at(run).live()
    if live is not None:
        return f"take up attempt {live.number}, which is {live.status.state.value}"
    there = checkpoints.committed(run.storage)
    dataset = finished_dataset(run.root, run.dataset)
    steps = training_spec(run, dataset).steps if dataset else run.config.train.max_steps
    known = f"{steps:,} steps" if steps else "one pass over the data"
    if there and steps and there[0].step >= steps:
        return f"nothing: done, {steps:,} steps"
    begun = there[0].step if there else 0
    cost = _cost(run, steps - begun) if steps else ""
    return (f"train on from step {begun:,} of {known}" if there else f"train {known}") + cost


def _cost(run: Run, steps: int) -> str:
    """Time and price of what is left to do, where the machines have GPUs that we know."""
    platform, model = run.config.platform, run.config.model
    machine = machine_of(platform)
    if machine is None or not machine.gpus:
        return ""
    vocabulary = run.dataset.tokenizer.vocab_size if run.dataset.tokenizer else _UNKNOWN_VOCABULARY
    fields = fields_of(model.name, model.config, sequence_length=model.sequence_length, vocab_size=vocabulary)
    tokens = steps * run.config.train.global_batch * model.sequence_length
    flops = float(tokens) * flops_per_token(config_of(fields), model.sequence_length)
    return f", {expected(machine, nodes=platform.nodes, flops=flops)}"


def _checkpoints(run: Run) -> str:
    done = collected(run.storage)
    return (
        "verify the last checkpoint, make final/litgpt and final/huggingface"
        if done is None
        else f"nothing: done, loss {loss_text(done.validation_loss)}"
    )


def progress_of(config: RunConfig) -> str:
    """How far the training is, in a line; empty where it has not begun."""
    storage = plan_run(config).storage
    if not storage.exists(METRICS):
        return ""
    seen = summary(rows_of(storage.read(METRICS).decode()))
    return ", ".join([f"step {seen.step}/{seen.steps}", *seen.facts])
