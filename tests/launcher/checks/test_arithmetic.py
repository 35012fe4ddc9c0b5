"""What `plan` says a training takes: figures with how they come about, and a change that would fit."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.checks import arithmetic as module
from launcher.checks.arithmetic import Place, arithmetic, check_memory, gpu_names, host_memory, place_of
from launcher.config import RunConfig, validated
from litgpt_demo.findings import Finding
from litgpt_demo.models import catalogue

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
    assert "128 GB whatever the batch" in error.what
    assert "and H100 has 80.0 GB" in error.what
    (warning,) = found(config(model={"name": "pythia-1b", "sequence_length": 2048}, train={"micro_batch": 32}))
    assert warning.severity == "warning"
    assert found(config(model={"name": "pythia-1b", "sequence_length": 2048}, train={"micro_batch": 8})) == []


@pytest.mark.parametrize("batch", [65_536, 62_500, 8_000_000])
def test_a_batch_that_no_error_of_the_estimate_could_make_fit_is_refused_with_the_batch_that_does(batch: int) -> None:
    """The model's own state takes 0.2 GB: neither sharding nor a smaller model is what helps."""
    asked = config(
        model={"name": "pythia-14m", "sequence_length": 512},
        train={"micro_batch": batch, "global_batch": batch, "precision": "32-true"},
    )
    (finding,) = found(asked)
    assert finding.severity == "error"
    size = int(finding.fix.removeprefix("set train.micro_batch=").partition(",")[0])
    assert 1 < size < batch
    assert finding.fix.startswith(f"set train.micro_batch={size}, which takes about ")
    train = asked.train.model_dump() | {"micro_batch": size}
    assert found(config(**asked.model_dump() | {"train": train})) == []


def test_compiled_trainings_are_given_the_benefit_of_the_doubt(on_h100: None) -> None:
    model = {"name": "pythia-1b", "sequence_length": 2048}
    (plain,), (compiled,) = (
        found(config(model=model, train={"micro_batch": 64, "compile": how})) for how in ("none", "blocks")
    )
    assert (plain.severity, compiled.severity) == ("error", "warning")


LONG = 131_072  # tokens, of which not even one sample fits without recomputation


@pytest.mark.parametrize(
    ("model", "train", "processes", "length", "fix"),
    [
        ("pythia-1b", {"micro_batch": 64}, 1, 2048, "set train.micro_batch=16, which takes"),
        ("pythia-1b", {"micro_batch": 31, "global_batch": 31}, 1, 2048, "set train.micro_batch=1, which takes"),
        ("Llama-3.2-1B", {"micro_batch": 1}, 1, LONG, "set train.activation_checkpointing=full, which takes"),
        ("Llama-3-8B", {"micro_batch": 1}, 8, 2048, "set train.strategy=fsdp, which takes about"),
        ("Llama-3.1-8B", {"strategy": "fsdp"}, 8, LONG, "set model.sequence_length="),
        ("transformer-175b", {}, 8, 2048, "take 128 processes and set train.strategy=fsdp train.activation_"),
        ("Llama-3-8B", {"micro_batch": 1}, 1, 128, "take 2 processes and set train.strategy=fsdp"),
    ],
)
def test_the_fix_is_the_change_that_fits_and_costs_least(
    model: str, train: dict[str, Any], processes: int, length: int, fix: str, on_h100: None
) -> None:
    asked = config(
        model={"name": model, "sequence_length": length}, train=train,
        platform={"kind": "local", "processes": processes},
    )  # fmt: skip
    (finding,) = found(asked)
    assert finding.fix.startswith(fix)
    words = re.findall(r"(model|train)\.(\w+)=(\w+)", finding.fix)
    processes = int(count[1]) if (count := re.match(r"take (\d+) processes", finding.fix)) else processes
    sections = {name: {key: value for where, key, value in words if where == name} for name in ("model", "train")}
    fits = asked.model_dump() | {
        "platform": {"kind": "local", "processes": min(processes, 64), "nodes": -(-processes // 64)}
    }
    assert found(config(**fits | {name: fits[name] | sections[name] for name in sections})) == []


def test_a_model_that_no_setting_makes_fit_is_told_how_large_one_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of one machine share its memory: more of them are of no use."""
    monkeypatch.setattr(module, "gpu_names", list)
    asked = config(model={"name": "transformer-175b"}, train={"precision": "32-true"})
    (finding,) = found(asked)
    assert re.fullmatch(
        r"take a model of at most about [\d.]+ [MB] parameters, or devices with more memory", finding.fix
    )


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


def test_this_machines_gpus_say_nothing_of_nodes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpu_names", lambda: ["NVIDIA L4"])
    here = place_of(config(platform={"kind": "local"}))
    assert here is not None
    assert here.name == "L4"
    assert place_of(config(platform={"kind": "gke", "gpus": 1})) is None
    assert place_of(config(platform={"kind": "runai", "project": "team-a", "gpus": 1})) is None


def test_a_gpu_that_is_not_in_the_table_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpu_names", lambda: ["NVIDIA GeForce RTX 3090"])
    huge = config(model={"name": "transformer-175b"}, platform={"kind": "local"})
    assert place_of(huge) is None
    assert found(huge) == []
    assert "memory per process" in said(huge)
