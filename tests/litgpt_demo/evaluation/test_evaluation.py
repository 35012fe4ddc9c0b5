"""Evaluation: a collected model is scored on text and by lm-evaluation-harness, once for each set of settings."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from litgpt_demo.config import EvaluationConfig
from litgpt_demo.errors import DiskFull, UserError
from litgpt_demo.evaluation import EvaluationManifest, evaluated, main, score_model
from litgpt_demo.evaluation.bits import Measured, text_bytes, text_scores
from litgpt_demo.evaluation.harness import language_model, require_known, scores_in
from litgpt_demo.export import collected
from litgpt_demo.export.card import CARD, replace_card, with_scores
from litgpt_demo.manifests import differences
from litgpt_demo.storage import ObjectInfo, open_storage
from litgpt_demo.storage.local import LocalStorage


@pytest.fixture(scope="module")
def run(scored_run: Path) -> Path:
    return scored_run


TASK = """
task: endings
dataset_path: json
dataset_kwargs: {data_files: {test: endings.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{start}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def task_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of four questions."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "endings.yaml").write_text(TASK)
    questions = [{"start": f"the {n}", "choices": [" a", " zz"], "right": n % 2} for n in range(4)]
    (folder / "endings.json").write_text("\n".join(map(json.dumps, questions)))
    return folder


@pytest.fixture(scope="module")
def settings(task_files: Path) -> EvaluationConfig:
    return EvaluationConfig(tasks=("endings",), task_files=str(task_files), limit=3, validation_windows=5)


@pytest.fixture(scope="module")
def scored(run: Path, settings: EvaluationConfig) -> EvaluationManifest:
    return score_model(open_storage(str(run)), settings)


@pytest.mark.long
def test_a_model_is_scored_on_the_validation_split_and_by_a_task_of_files(scored: EvaluationManifest) -> None:
    found = {score.name: score for score in scored.scores}
    assert set(found) == {"validation/bits_per_byte", "validation/perplexity", "endings/acc"}
    acc = found["endings/acc"]
    assert (acc.samples, acc.few_shot, acc.higher_is_better) == (3, 0, True)
    assert acc.value is not None
    assert acc.value * 3 == pytest.approx(round(acc.value * 3))
    assert acc.stderr is not None
    assert found["validation/bits_per_byte"].samples == 5
    assert scored.harness == "0.4.13"


def test_bits_per_byte_are_the_loss_of_all_tokens_over_the_bytes_of_their_text(
    run: Path, scored: EvaluationManifest, tiny_dataset: Path
) -> None:
    from litgpt import LLM

    tokens = np.fromfile(tiny_dataset / "val.bin", dtype="<u2")[: 5 * 32 + 1].astype(np.int64)
    llm = LLM.load(str(run / "final/litgpt"), distribute=None)
    llm.distribute(accelerator="cpu", devices=1, precision="32-true")
    inputs = torch.from_numpy(tokens[:-1].reshape(5, 32))
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            llm.model(inputs).flatten(0, 1), torch.from_numpy(tokens[1:]), reduction="none"
        )
    text = Tokenizer.from_file(str(tiny_dataset / "tokenizer/tokenizer.json")).decode(tokens[1:].tolist())
    each = losses.reshape(5, 32).mean(dim=1)
    found = {score.metric: score for score in scored.scores if score.task == "validation"}
    expected = float(losses.sum()) / math.log(2) / len(text.encode())
    assert found["bits_per_byte"].value == pytest.approx(expected, rel=1e-5)
    assert found["bits_per_byte"].stderr == pytest.approx(
        float(each.std()) / 5**0.5 * 160 / math.log(2) / len(text.encode()), rel=1e-4
    )
    assert found["perplexity"].value == pytest.approx(float(losses.mean().exp()), rel=1e-5)


def test_the_harness_finds_the_log_likelihoods_of_our_own_model(run: Path, corpus: Path) -> None:
    from litgpt import LLM
    from lm_eval.api.instance import Instance

    text = corpus.read_text()
    pairs = [(text[at : at + 20], text[at + 20 : at + 35]) for at in (0, 100, 333)]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    harness = language_model(run / "final/huggingface", batch_size=2)
    theirs = [likelihood for likelihood, _ in harness.loglikelihood(requests, disable_tqdm=True)]
    llm = LLM.load(str(run / "final/litgpt"), distribute=None)
    llm.distribute(accelerator="cpu", devices=1, precision="32-true")
    ours = []
    for context, continuation in pairs:
        before, after = harness._encode_pair(context, continuation)
        with torch.no_grad():
            logits = llm.model(torch.tensor([(before + after)[:-1]])).log_softmax(-1)[0, -len(after) :]
        ours.append(float(logits.gather(1, torch.tensor(after)[:, None]).sum()))
    assert theirs == pytest.approx(ours, abs=1e-4)


def test_the_same_evaluation_reads_its_result_and_another_is_made_beside_it(
    run: Path, scored: EvaluationManifest, settings: EvaluationConfig, task_files: Path, tmp_path: Path
) -> None:
    storage = open_storage(str(run))
    written = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    assert score_model(storage, settings.model_copy(update={"batch_size": 3})) == scored
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == written
    moved = Path(shutil.copytree(task_files, tmp_path / "elsewhere"))
    assert evaluated(storage, settings.model_copy(update={"task_files": str(moved)})) == scored
    (moved / "endings.json").write_text((moved / "endings.json").read_text().replace("zz", "yy"))
    for changed in ({"task_files": str(moved)}, {"limit": 2}, {"few_shot": 1}, {"validation_windows": 4}):
        assert evaluated(storage, settings.model_copy(update=changed)) is None


def test_the_card_tells_the_scores_and_stays_what_the_manifest_says(run: Path, scored: EvaluationManifest) -> None:
    card = (run / "final/MODEL_CARD.md").read_text()
    shown = {score.name: str(score) for score in scored.scores}
    assert f"| endings | acc | {shown['endings/acc']} | 3 |" in card
    assert f"| validation | bits\\_per\\_byte | {shown['validation/bits_per_byte']} | 5 |" in card
    final = collected(open_storage(str(run)))
    assert final is not None
    assert differences(run / "final", final.files) == []


def test_a_card_that_cannot_be_written_leaves_the_models_collected(
    scored_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write = open_storage(str(shutil.copytree(scored_run, tmp_path / "run"))), LocalStorage.write

    def full(self: LocalStorage, path: str, data: bytes) -> ObjectInfo:
        if path == CARD:
            raise DiskFull("there is no room")
        return write(self, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "write", full)
        with pytest.raises(DiskFull):
            replace_card(run, lambda card: f"{card}\n")
    before = collected(run)
    assert before is not None
    replace_card(run, lambda card: f"{card}\n")
    assert collected(run) != before


def test_scores_of_a_card_are_replaced_and_nothing_else_in_it() -> None:
    card = "# a run\n\n## Results\n\n| | |\n\n## What it writes\n\n```text\n## Scores\n\n## What it writes\n```\n"
    once = with_scores(card, [("a|b", "acc", "0.5000", None)])
    assert "| a\\|b | acc | 0.5000 |  |" in once
    assert with_scores(once, [("c", "acc", "0.1000", 7)]) == once.replace(
        "| a\\|b | acc | 0.5000 |  |", "| c | acc | 0.1000 | 7 |"
    )
    assert once.replace(once[once.index("## Scores") : once.index("## What it")], "", 1) == card


def test_a_folder_of_tasks_that_is_not_there_is_refused_before_anything_is_scored(
    run: Path, settings: EvaluationConfig
) -> None:
    before = sorted((run / "evaluations").glob("*"))
    with pytest.raises(UserError, match=r"evaluation\.task_files=/there/is/none is not a folder"):
        score_model(open_storage(str(run)), settings.model_copy(update={"task_files": "/there/is/none"}))
    assert sorted((run / "evaluations").glob("*")) == before


def test_a_run_without_a_collected_model_says_what_makes_one(finished: Path) -> None:
    with pytest.raises(UserError, match="train-litgpt collect"):
        main(["--run", str(finished)])


def test_figures_of_the_harness_become_scores() -> None:
    found = {
        "results": {"sum": {"alias": "sum", "acc,none": 0.5, "acc_stderr,none": "N/A", "em,strict": math.inf}},
        "groups": {"all": {"acc,none": 0.25, "acc_stderr,none": 0.125}},
        "higher_is_better": {"sum": {"acc": True}},
        "n-samples": {"sum": {"original": 9, "effective": 4}},
        "n-shot": {"sum": 5},
    }
    first, second, group = scores_in(found)
    assert (first.name, first.value, first.stderr, first.samples, first.few_shot) == ("sum/acc", 0.5, None, 4, 5)
    assert (second.name, second.value, str(second)) == ("sum/em,strict", None, "not finite")
    assert (group.name, str(group), group.higher_is_better) == ("all/acc", "0.2500 ± 0.1250", None)


def test_bytes_are_counted_document_by_document(tiny_dataset: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_dataset / "tokenizer/tokenizer.json"))
    manifest = json.loads((tiny_dataset / "manifest.json").read_text())
    documents = ["the ümlaut €", "", "and 漢字"]
    tokens = [token for text in documents for token in [*tokenizer.encode(text).ids, manifest["end_of_text"]]]
    assert text_bytes(tokenizer, tokens, manifest["end_of_text"]) == sum(len(text.encode()) for text in documents)


def test_one_sample_has_no_standard_error_and_a_great_loss_no_perplexity() -> None:
    bits, perplexity = text_scores("validation", Measured(np.array([3200.0]), np.array([4.0]), size=2))
    assert (bits.value, bits.stderr) == (pytest.approx(1600 / math.log(2)), None)
    assert (perplexity.value, perplexity.stderr) == (None, None)


def test_sources_are_scored_together_by_their_bytes() -> None:
    ten = np.array([10.0, 10.0])
    prose, code = Measured(np.array([20.0, 40.0]), ten, 30), Measured(ten, ten, 50)
    together = {score.metric: score.value for score in text_scores("validation", prose, code)}
    assert together["bits_per_byte"] == pytest.approx(2.0 * 40 / 80 / math.log(2))
    assert together["perplexity"] == pytest.approx(math.exp(2.0))


def test_a_conversation_counts_by_its_tokens_that_are_learned() -> None:
    answers = Measured(np.array([30.0, 0.0, 10.0]), np.array([10.0, 0.0, 30.0]), size=80)
    bits, perplexity = text_scores("validation", answers)
    assert bits.value == pytest.approx(40 / 80 / math.log(2))
    assert perplexity.value == pytest.approx(math.e)
    assert perplexity.stderr is not None


@pytest.mark.parametrize(("task", "told"), [("qqq", "lm-eval ls tasks"), ("endigs", "did you mean endings")])
def test_a_task_that_nobody_knows_is_refused_with_what_there_is(task: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        require_known((task,), ["endings"])
