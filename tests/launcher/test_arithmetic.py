"""What `plan` says a training takes: figures with how they come about, and a change that would fit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from launcher import arithmetic as module
from launcher.arithmetic import Place, arithmetic, check_memory, gpu_names, host_memory, place_of
from launcher.config import RunConfig, validated
from launcher.findings import Finding
from litgpt_demo import catalogue

H100 = Place(name="H100", kind="cuda", memory=80 * 10**9, peak=989.5e12)


def config(**settings: Any) -> RunConfig:
    return validated(RunConfig, settings, where="test")


def said(asked: RunConfig, **known: Any) -> dict[str, tuple[str, str]]:
    table = arithmetic(asked, **{"vocab_size": None} | known)
    return {row["what"]: (row["figure"], row["arithmetic"]) for row in table}


def found(asked: RunConfig) -> list[Finding]:
    return list(check_memory(asked, vocab_size=None))


@pytest.fixture
def on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3"])


def test_every_model_of_the_catalogue_is_answered_for_at_once() -> None:
    began = time.process_time()
    for name in catalogue.models():
        figures = said(config(model={"name": name, "sequence_length": 128}, platform={"kind": "local"}))
        assert {"parameters", "FLOPs per token", "memory per process"} == set(figures), name
    assert time.process_time() - began < 20


def test_the_figures_show_how_they_come_about(on_h100: None) -> None:
    asked = config(model={"name": "transformer-175b", "sequence_length": 2048}, platform={"kind": "local"})
    figures = said(asked, tokens=300_000_000_000)
    assert figures["parameters"] == ("175 B", "96 blocks of 1.81 B, embedding and output of 50,304 x 12,288 each")
    flops, how = figures["FLOPs per token"]
    assert flops == "1.08 T"
    assert how == "6 x 175 B weights in products + 29.0 B for attention over 2,048 tokens"
    flops, how = figures["FLOPs in all"]
    assert flops == "3.23e+23"
    assert how.startswith("300 B tokens; ")
    assert how.endswith("at 40% of 1 H100 of 989.5 TFLOP/s")
    memory, how = figures["memory per process"]
    assert memory.endswith(" TB")
    assert how.startswith("weights 701 GB + AdamW 1.40 TB + gradients 701 GB + at the ")
    assert how.endswith("; H100 has 80.0 GB")


def test_a_model_without_a_name_has_no_figures_before_its_vocabulary_is_known() -> None:
    own = config(model={"name": None, "config": {"n_layer": 2, "n_embd": 64, "n_head": 2}})
    assert said(own) == {}
    assert found(own) == []
    assert said(own, vocab_size=1000)["parameters"][1].endswith("of 1,024 x 64 each")


def test_a_model_that_cannot_fit_is_an_error_and_one_that_may_not_a_warning(on_h100: None) -> None:
    (error,) = found(config(model={"name": "Llama-3-8B", "sequence_length": 128}, train={"micro_batch": 1}))
    assert (error.severity, error.code) == ("error", "train.memory")
    assert "of which 128 GB whatever the batch, and H100 has 80.0 GB" in error.what
    (warning,) = found(config(model={"name": "pythia-1b", "sequence_length": 2048}, train={"micro_batch": 64}))
    assert warning.severity == "warning"
    assert found(config(model={"name": "pythia-1b", "sequence_length": 2048}, train={"micro_batch": 8})) == []


@pytest.mark.parametrize(
    ("model", "train", "processes", "fix"),
    [
        ("pythia-1b", {"micro_batch": 64}, 1, "train.micro_batch=16 takes about"),
        (
            "pythia-1b",
            {"micro_batch": 31, "global_batch": 31},
            1,
            "train.activation_checkpointing=selective takes about",
        ),
        ("Llama-3-8B", {"micro_batch": 1}, 8, "train.strategy=fsdp takes about"),
        ("transformer-175b", {}, 8, "take more processes with train.strategy=fsdp"),
    ],
)
def test_the_fix_is_the_least_change_that_fits(
    model: str, train: dict[str, Any], processes: int, fix: str, on_h100: None
) -> None:
    asked = config(
        model={"name": model, "sequence_length": 2048}, train=train, platform={"kind": "local", "processes": processes}
    )
    (finding,) = found(asked)
    assert finding.fix.startswith(fix)
    if finding.fix.startswith("train."):
        changes = dict(word.split("=") for word in finding.fix.split(" takes")[0].split())
        fits = {name.removeprefix("train."): value for name, value in changes.items()}
        assert found(config(**asked.model_dump() | {"train": asked.train.model_dump() | fits})) == []


# --- where it runs ----------------------------------------------------------------------------------------------------


def test_the_driver_names_the_gpus(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        text = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 12{number}\n"
        (tmp_path / str(number) / "information").write_text(text)
    assert gpu_names(tmp_path) == ["NVIDIA H100 80GB HBM3"] * 2
    assert gpu_names(tmp_path / "none") == []


def test_a_containers_limit_is_its_memory(tmp_path: Path) -> None:
    whole = host_memory(tmp_path / "none")
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "some").write_text("1000000000\n")
    assert host_memory(tmp_path / "max") == whole > 10**8
    assert host_memory(tmp_path / "some") == 10**9


def test_processes_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpu_names", list)
    one, four = (place_of(config(platform={"kind": "local", "processes": count})) for count in (1, 4))
    assert one is not None
    assert four is not None
    assert (one.kind, one.peak) == ("cpu", None)
    assert four.memory == one.memory // 4


def test_a_gpu_that_is_not_in_the_table_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpu_names", lambda: ["NVIDIA GeForce RTX 3090"])
    huge = config(model={"name": "transformer-175b"}, platform={"kind": "local"})
    assert place_of(huge) is None
    assert found(huge) == []
    assert "memory per process" in said(huge)
