"""Texts that a model writes during its training: they depend only on its weights, and change nothing in it."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from states import training_of
from tokenizers import Tokenizer
from training_runs import MODEL, NewRun, TrainElsewhere, rows, train

from litgpt_demo.errors import UserError
from litgpt_demo.export.generation import Writer
from litgpt_demo.export.models import export
from litgpt_demo.storage import open_storage
from litgpt_demo.training.sampling import Sampler
from litgpt_demo.training.setup import Training

PROMPTS = ["the", "A longer beginning", "7"]
SAMPLED: dict[str, Any] = {"sample_every": 5, "sample_prompts": PROMPTS, "sample_tokens": 9}


def texts(run: Path) -> dict[tuple[int, str], str]:
    """The texts of a run by step and prompt, each of which it has once."""
    found = rows(run, "sample")
    by_step = {(row["step"], row["prompt"]): row["text"] for row in found}
    assert len(by_step) == len(found)
    return by_step


def figures(run: Path) -> list[dict[str, Any]]:
    """Losses and norms of a run."""
    names = ("kind", "step", "loss", "grad_norm", "validation_loss")
    return [{name: row.get(name) for name in names} for row in rows(run, "step", "evaluation")]


def test_texts_change_no_bit_of_the_training(new_run: NewRun, finished: Path) -> None:
    run = new_run("run", **SAMPLED)
    train(run)
    assert figures(run) == figures(finished)
    assert [*texts(run)] == [(step, prompt) for step in (5, 10, 12) for prompt in PROMPTS]
    assert len(set(texts(run).values())) > len(PROMPTS), "they are of the weights of their step"


def test_texts_are_what_generate_writes(new_run: NewRun) -> None:
    """Greedily, by the exported model, and to the end of a document or of a sample."""
    run = new_run("run", **SAMPLED)
    train(run)
    storage = open_storage(str(run))
    export(storage)
    writer, written = Writer(storage), texts(run)
    for prompt in PROMPTS:
        expected = "".join(writer.write(prompt, max_tokens=9, temperature=0.0, top_k=1, seed=0))
        text = written[12, prompt]
        assert text.startswith(expected)  # `generate` leaves out a character that is cut at the end
        assert len(text) <= len(expected) + 3


def untrained(run: Path) -> Training:
    """What a run begins with, but with weights whose texts differ."""
    training = training_of(run, open_storage(str(run)))
    torch.manual_seed(0)
    for weight in training.model.parameters():
        weight.data.normal_(0, 0.3)
    return training


def likeliest(training: Training, ids: list[int]) -> list[int]:
    """A prompt and the tokens that continue it until the sample is full, each by a pass over those before it."""
    ids = list(ids)
    while len(ids) < MODEL.sequence_length:
        ids.append(int(training.model.module(torch.tensor([ids]))[0, -1].argmax()))
    return ids


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
@pytest.mark.parametrize("attention", ["causal", "documents"])
def test_each_token_is_the_likeliest_after_all_before(micro_batch: int, attention: str, new_run: NewRun) -> None:
    """Padding and the other prompts of a pass change nothing, also where a text fills the sample."""
    run = new_run("run", **SAMPLED | {"sample_tokens": 40}, micro_batch=micro_batch, attention=attention)
    training = untrained(run)
    tokenizer = Tokenizer.from_file(str(training.data.tokenizer))
    before = torch.get_rng_state()
    written = Sampler(training).texts(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert training.model.training
    for prompt, text in zip(PROMPTS, written, strict=True):
        assert prompt + text == tokenizer.decode(likeliest(training, tokenizer.encode(prompt).ids))


def test_text_ends_with_its_document(new_run: NewRun) -> None:
    training = untrained(new_run("run", **SAMPLED))
    tokenizer = Tokenizer.from_file(str(training.data.tokenizer))
    prompt = tokenizer.encode(PROMPTS[0]).ids
    written = likeliest(training, prompt)[len(prompt) :]
    end = next(number for number in written if number != written[0])
    manifest = training.data.manifest.model_copy(update={"end_of_text": end})
    text, *_ = Sampler(replace(training, data=replace(training.data, manifest=manifest))).texts(0)
    assert text == tokenizer.decode(written[: written.index(end)])
    assert text


def test_all_strategies_write_the_same_texts(new_run: NewRun, train_elsewhere: TrainElsewhere) -> None:
    """Every rank makes the passes that the others wait for."""
    settings = SAMPLED | {"max_steps": 1, "warmup_steps": 0, "evaluation_samples": 1, "sample_tokens": 4}
    plain = new_run("plain", **settings)
    runs = [new_run(name, **settings, world_size=2, strategy=name) for name in ("ddp", "fsdp")]
    hybrid = new_run("hybrid", **settings, world_size=4, strategy="hybrid")
    assert train_elsewhere(*((run, 2, 0) for run in runs)) == [[0, 0], [0, 0]]
    assert train_elsewhere((hybrid, 4, 0), nodes=2) == [[0] * 4]
    train(plain)
    assert all(texts(plain).values())
    for run in (*runs, hybrid):
        assert texts(run) == texts(plain)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_models_in_16_bits_write_texts(precision: str, new_run: NewRun, train_elsewhere: TrainElsewhere) -> None:
    """A CPU's layers take no weights of another type than their inputs'."""
    settings = SAMPLED | {"max_steps": 1, "warmup_steps": 0, "evaluation_samples": 1, "precision": precision}
    settings |= {"sample_tokens": 4, "activation_checkpointing": "full", "optimizer": "muon"}
    plain, sharded = new_run("plain", **settings), new_run("sharded", **settings, world_size=2, strategy="fsdp")
    assert train_elsewhere((sharded, 2, 0)) == [[0, 0]]
    train(plain)
    for run in (plain, sharded):
        assert all(texts(run).values())


def test_texts_are_written_once_however_a_run_is_killed(new_run: NewRun, train_elsewhere: TrainElsewhere) -> None:
    plain, killed = (new_run(name, **SAMPLED | {"sample_every": 4}) for name in ("plain", "killed"))
    assert train_elsewhere((plain, 1, 0), (killed, 1, 8)) == [[0], [-signal.SIGKILL]]
    train(killed)
    assert texts(killed) == texts(plain)
    assert figures(killed) == figures(plain)
    train(killed)
    assert texts(killed) == texts(plain)


def test_resumed_step_is_sampled_if_it_was_not(new_run: NewRun) -> None:
    """Such as of an attempt that was preempted, or had no prompts yet."""
    run = new_run("run", max_steps=8)
    train(run)
    assert texts(run) == {}
    new_run("run", max_steps=8, **SAMPLED)
    train(run)
    assert [*texts(run)] == [(8, prompt) for prompt in PROMPTS]


def test_prompt_that_fills_a_sample_is_refused(new_run: NewRun) -> None:
    run = new_run("run", sample_every=4, sample_prompts=["a 1 b 2 " * 9])
    with pytest.raises(UserError, match=r"a prompt of \d\d tokens, but model.sequence_length=32"):
        Sampler(training_of(run, open_storage(str(run))))
